"""What `from_pretrained` takes over."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import torch

from dsa.optimizers.id_rows import insert_rows
from dsa.optimizers.tensors import ArrayLike, to_array
from dsa.rules.init import FromArray, MatrixLike, as_initializer
from dsa.state.coalesce import as_ids

if TYPE_CHECKING:
    from dsa.modules.disk_module import DiskModule

__all__ = ["pretrained_by_id", "pretrained_options", "pretrained_source"]

M = TypeVar("M", bound="DiskModule")

_BLOCK_BYTES: Final = 8 << 20

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


def pretrained_by_id(
    kind: Callable[..., M],
    embeddings: MatrixLike | torch.nn.Module,
    row_ids: ArrayLike,
    options: dict[str, Any],
) -> M:
    """Make a module whose rows belong to ids, of weights that exist; called again, it goes on where it ended.

    Args:
        kind: The module's class.
        embeddings: ``(N, D)`` weights, taken over block by block.
        row_ids: ``(N,)`` the id of each row.
        options: The constructor's.

    Raises:
        ValueError: there are not as many distinct ids as rows, or more than the cap; nothing is made.
        RowTypeError: they can't be ids; nothing is made.
    """
    source, brought = pretrained_source(embeddings), pretrained_options(embeddings)
    ids = as_ids(to_array(row_ids).reshape(-1), options.get("name", "embedding"))
    if len(ids) != source.rows or len(np.unique(ids)) < len(ids):
        raise ValueError(
            f"row_ids names {len(np.unique(ids))} distinct ids for {source.rows} rows: pass one for each"
        )
    policy = options.get("ids")
    if policy is not None and policy.max_rows is not None and len(ids) > policy.max_rows:
        raise ValueError(f"max_rows={policy.max_rows!r} has no room for {len(ids)} rows: pass a larger cap")
    if (row := brought.get("padding_idx")) is not None:
        brought["padding_idx"] = int(ids[row])
    module = kind(None, source.dim, **{**brought, **options})
    padding, weight = module.padding_idx, module.weight
    for start, weights in source.blocks(max(1, _BLOCK_BYTES // (4 * source.dim))):
        some = ids[start : start + len(weights)]
        kept = np.ones(len(some), np.bool_) if padding is None else some != padding
        insert_rows(weight.state, weight.table, weight.policy, some[kept], weights[kept])
    return module
