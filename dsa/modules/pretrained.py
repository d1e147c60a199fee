"""What `from_pretrained` takes over."""

from __future__ import annotations

from typing import Any, Final

import torch

from dsa.rules.init import FromArray, MatrixLike, as_initializer

__all__ = ["pretrained_options", "pretrained_source"]

_KEPT: Final = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")


def pretrained_options(embeddings: object) -> dict[str, Any]:
    """Return the options that a torch module brings; an array brings none."""
    if isinstance(embeddings, torch.nn.Embedding):
        return {name: getattr(embeddings, name) for name in _KEPT}
    if isinstance(embeddings, torch.nn.EmbeddingBag):
        return {name: getattr(embeddings, name) for name in (*_KEPT, "mode", "include_last_offset")}
    return {}


def pretrained_source(embeddings: MatrixLike | torch.nn.Module) -> FromArray:
    """Return the weights of an array or of a torch module.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(embeddings, torch.nn.Embedding | torch.nn.EmbeddingBag):
        return FromArray(embeddings.weight.detach())
    source = as_initializer(embeddings)  # type: ignore[arg-type]  # anything else is refused with advice
    if not isinstance(source, FromArray):
        raise TypeError(
            f"{type(embeddings).__name__} is a rule, not weights: pass it as init= to the constructor"
        )
    return source
