"""Tables on disk back into modules in memory."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from dsa.modules.candidates import places_of
from dsa.modules.disk_module import DiskModule
from dsa.modules.embedding import DiskEmbeddingBag
from dsa.modules.exchanging import carry_over, exchange
from dsa.optimizers.disk_parameter import DiskParameter
from dsa.state.table import read_weights

__all__ = ["materialize_"]

_BLOCK_BYTES: Final = 8 << 20


def materialize_(model: torch.nn.Module, *, sparse: bool = False) -> None:
    """Replace the embeddings on disk of a model by torch's own, in place: the way back from `convert_`.

    Each becomes a `torch.nn.Embedding` or `torch.nn.EmbeddingBag` with the weights that the table has now, in
    the dtype and on the device that the module hands rows out with, and with its options, mode and hooks.
    Modules over one table share one parameter again. The memory has to hold all of them. Then the state
    directories are closed, unless something else uses them; they stay on disk as they are. Moments stay there
    alone.

    Args:
        model: The model; nothing else in it changes.
        sparse: Whether the modules' gradients are to be sparse.

    Raises:
        ValueError: there is nothing to replace, or a module has no counterpart in torch; nothing has changed.
        CorruptRowError: a stored row is implausible; nothing has changed.
        StateError: a directory can't be used; nothing has changed.

    Example:
        >>> import tempfile
        >>> from dsa import DiskEmbedding
        >>> model = torch.nn.Sequential(DiskEmbedding(1000, 2, state_dir=tempfile.mkdtemp()))
        >>> materialize_(model)
        >>> model
        Sequential(
          (0): Embedding(1000, 2)
        )
    """
    layers = {
        module: names[0] for module, names in places_of(model).items() if isinstance(module, DiskModule)
    }
    if not layers:
        raise ValueError(f"the {type(model).__name__} has no embedding on disk: pass a model that has")
    for layer, name in layers.items():
        _require_counterpart(layer, name)
    weights: dict[DiskParameter, torch.nn.Parameter] = {}
    for layer in layers:
        if layer.weight not in weights:
            weights[layer.weight] = _in_memory(layer.weight)
    replacements: dict[torch.nn.Module, torch.nn.Module] = {}
    for layer in layers:
        plain = _plain(layer, weights[layer.weight], sparse)
        carry_over(layer, plain)
        replacements[layer] = plain
    exchange(model, replacements)
    for directory in {weight.state for weight in weights}:
        mine = {weight.table.name for weight in weights if weight.state is directory}
        if set(directory.users) <= mine:
            with directory.exclusive:
                directory.close()


def _require_counterpart(layer: DiskModule, name: str) -> None:
    if not name:
        raise ValueError(
            f"the model itself is the {type(layer).__name__}, and has no place in which to put another: put "
            "it into a torch.nn.Sequential"
        )
    if layer.weight.table.keys is not None:
        raise ValueError(
            f"the rows of {name!r} belong to ids, which no module of torch knows: make a table of rows by "
            "dsa.convert_ids(..., dense={...}), or export ids and weights by export_weights"
        )
    if isinstance(layer, DiskEmbeddingBag) and layer.k > 0.0:
        raise ValueError(
            f"{name!r} takes means on the ball of k={layer.k:g}, which no module of torch does: export its "
            "weights by export_weights"
        )


def _in_memory(weight: DiskParameter) -> torch.nn.Parameter:
    state, table = weight.state, weight.table
    values = torch.empty(len(table), table.dim, dtype=weight.dtype, device=weight.device)
    block = max(1, _BLOCK_BYTES // (4 * table.dim))
    with state.use():
        state.settle()
        for start in range(0, len(table), block):
            rows = np.arange(start, min(start + block, len(table)))
            values[start : start + len(rows)] = torch.from_numpy(read_weights(table, rows))
    return torch.nn.Parameter(values, weight.requires_grad)


def _plain(layer: DiskModule, weight: torch.nn.Parameter, sparse: bool) -> torch.nn.Module:
    rows, dim = weight.shape
    if isinstance(layer, DiskEmbeddingBag):
        made: torch.nn.Embedding | torch.nn.EmbeddingBag = torch.nn.EmbeddingBag(
            rows,
            dim,
            layer.max_norm,
            layer.norm_type,
            mode=layer.mode,
            sparse=sparse,
            _weight=weight,
            include_last_offset=layer.include_last_offset,
            padding_idx=layer.padding_idx,
        )
    else:
        made = torch.nn.Embedding(
            rows, dim, layer.padding_idx, layer.max_norm, layer.norm_type, sparse=sparse, _weight=weight
        )
    made.weight = weight
    return made
