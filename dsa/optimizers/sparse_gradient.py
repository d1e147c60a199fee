"""The gradient of a table as torch's clipping and the trainers that call it want it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["SparseGradient", "clippable"]


class SparseGradient(torch.Tensor):
    """A sparse gradient that has a norm and can be scaled and clamped in place.

    `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` do to it what `dsa.clip_grad_norm_` does:
    contributions to one row are summed before the norm is taken. All else is as with any sparse tensor.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Compute with the values where torch has no function for sparse tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            change = _CHANGES.get(func)
            if change is None:
                return func(*args, **(kwargs or {}))
            return change(*args, **(kwargs or {}))


def clippable(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Let a gradient that is sparse be a `SparseGradient`: the same object, in its place."""
    if gradient is not None and type(gradient) is torch.Tensor and gradient.is_sparse:
        gradient.__class__ = SparseGradient
    return gradient


def _norm(gradient: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:  # noqa: ANN401 - torch's
    norm: torch.Tensor = torch.linalg.vector_norm(gradient.coalesce()._values(), *arguments, **options)
    return norm


def _scale(gradient: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
    gradient._values().mul_(factor)
    return gradient


def _clamp(gradient: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:  # noqa: ANN401 - torch's
    if not gradient.is_coalesced():
        gradient.copy_(gradient.coalesce())
    gradient._values().clamp_(*arguments, **options)
    return gradient


_CHANGES: Mapping[Callable[..., Any], Callable[..., torch.Tensor]] = {
    torch.linalg.vector_norm: _norm,
    torch.Tensor.mul_: _scale,
    torch.Tensor.clamp_: _clamp,
}
