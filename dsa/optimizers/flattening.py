"""Parameters ``(N, ...)`` as tables of N rows: their sparse gradients, and moments of theirs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dsa.errors import GradientError
from dsa.kernels.visiting import Gradients
from dsa.optimizers.tensors import to_array
from dsa.schema import Rows
from dsa.state.coalesce import as_gradient, as_ids, as_rows, coalesce
from dsa.state.keyed_rows import find_rows
from dsa.state.table import Table

__all__ = ["gradient_rows", "moments_by_rows"]


def gradient_rows(grad: torch.Tensor, table: Table) -> tuple[Rows, Gradients]:
    """Return what a sparse gradient says of a table's rows, as `dsa.state.coalesce.coalesce` leaves it.

    Where rows belong to ids, its indices are ids, and what is about ids that have lost their row since is
    left out.

    Raises:
        GradientError: it is about single elements.
        RowIndexError: an index is outside the table.
    """
    if grad.sparse_dim() != 1:
        raise GradientError(
            f"the gradient of the parameter {table.name!r} has sparse_dim={grad.sparse_dim()}: it is indexed "
            "by single elements, as results of torch.sparse.mm and to_sparse() are, and a step needs whole "
            "rows; set parameter.grad to grad.to_dense().to_sparse(1), or look rows up with an embedding"
        )
    if grad._nnz() == 0:
        # numpy would pin the storage of the gradient, which torch has to enlarge in the next backward.
        return coalesce(np.empty(0, np.int64), np.empty((0, table.dim), np.float32))
    indices = to_array(grad._indices()[0])
    values = to_array(grad._values()).reshape(len(indices), -1)
    if table.keys is None:
        rows = as_rows(indices, len(table), table.name)
        return coalesce(rows, as_gradient(values, rows, table.dim, table.name))
    rows = find_rows(table, as_ids(indices, table.name))
    values = as_gradient(values, rows, table.dim, table.name)
    if len(kept := np.flatnonzero(rows >= 0)) < len(rows):
        rows, values = rows[kept], values[kept]
    return coalesce(rows, values)


def moments_by_rows(foreign: object, parameters: Sequence[torch.Tensor]) -> object:
    """Return the state of a `torch.optim.SparseAdam` with moments as ``(N, D)``, whatever the parameters are.

    What does not fit is left as it is, for whoever reads it to refuse.

    Args:
        foreign: The ``"state"`` of its state dict.
        parameters: The parameters, in order.
    """
    if not isinstance(foreign, dict):
        return foreign
    return {
        index: {key: _by_rows(value, parameters[index].shape) for key, value in entry.items()}
        if isinstance(entry, dict) and index in range(len(parameters))
        else entry
        for index, entry in foreign.items()
    }


def _by_rows(value: object, shape: torch.Size) -> object:
    if isinstance(value, torch.Tensor) and value.shape == shape:
        return value.reshape(len(value), -1)
    return value
