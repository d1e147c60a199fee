"""Setting rows of a table by hand, and the row that is none."""

from __future__ import annotations

import numpy as np
import torch

from dsa.optimizers.disk_parameter import DiskParameter
from dsa.optimizers.id_rows import rows_of_ids
from dsa.optimizers.options import as_index
from dsa.optimizers.tensors import to_array
from dsa.rules.from_array import FromArray
from dsa.state.coalesce import as_rows
from dsa.state.maintenance import write_weights
from dsa.state.state_directory import StateDirectory
from dsa.state.table import Table

__all__ = ["as_padding", "set_rows", "zero_padding"]


def set_rows(state: StateDirectory, table: Table, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Set the weights of some rows, see `dsa.modules.disk_module.DiskModule.set_rows`.

    Args:
        state: The state of the table.
        table: The table.
        ids: ``(B,)`` of an integer dtype.
        weights: ``(B, D)``.

    Raises:
        ValueError: an id comes twice, or the weights can't be these rows'; nothing has changed.
        TypeError: the weights are no floating-point numbers.
        RowIndexError, RowTypeError: the ids can't be used; nothing has changed.
        CorruptRowError: a stored row is implausible; nothing has changed.
    """
    given = to_array(ids)
    rows = as_rows(given, len(table), table.name) if table.keys is None else rows_of_ids(table, given)
    shape = tuple(getattr(weights, "shape", ()))
    if shape != (len(rows), table.dim):
        raise ValueError(
            f"weights of shape {shape} are not those of {len(rows)} rows of table {table.name!r}: pass "
            f"{(len(rows), table.dim)}"
        )
    if not len(rows):
        with state.use():
            return
    values = FromArray(weights).rows_of(0, len(rows))
    order = np.argsort(rows, kind="stable")
    rows, values = rows[order], values[order]
    if (twice := np.flatnonzero(np.diff(rows) == 0)).size:
        raise ValueError(f"row {rows[twice[0]]} of table {table.name!r} comes twice: pass each id once")
    outside = np.flatnonzero(table.space.project(values.astype(np.float64))[1])
    if outside.size:
        norm = float(np.linalg.norm(values[outside[0]].astype(np.float64)))
        raise ValueError(
            f"the weights of row {rows[outside[0]]} of table {table.name!r} have norm {norm:.7g}, outside "
            f"the ball of k={table.k:g}: scale them to less than {table.k**-0.5:.7g}"
        )
    with state.use():
        state.settle()
        write_weights(state, table, rows, values)


def zero_padding(weight: DiskParameter, padding_idx: int | None) -> None:
    """Zero the padding row of a fresh table that a rule fills, as `torch.nn.Embedding` does."""
    table, state = weight.table, weight.state
    if padding_idx is None or table.initializer is None or table.keys is not None:
        return
    row = np.array([padding_idx])
    with state.use():
        if table.backend.read(row)["s"][0] == 0:
            write_weights(state, table, row, np.zeros((1, table.dim), np.float32))


def as_padding(padding_idx: int | None, rows: int | None) -> int | None:
    """Return the padding row, counted from the start; where there is no number of rows, the padding id.

    Raises:
        TypeError: it is no integer.
        ValueError: it is outside the table.
    """
    if padding_idx is None:
        return None
    if rows is None:
        return as_index("padding_idx", padding_idx)
    if not -rows <= (index := as_index("padding_idx", padding_idx)) < rows:
        raise ValueError(f"padding_idx={padding_idx!r} is outside the table of {rows} rows: pass a row of it")
    return index % rows
