"""Changes of rows that no optimizer makes, each block of them one transaction."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsa.errors import StateWarning, notify
from dsa.kernels.plausible import first_implausible
from dsa.schema import Rows, read_numbers
from dsa.state.keys import Keys
from dsa.state.state_directory import StateDirectory
from dsa.state.table import (
    Table,
    blank_records,
    corrupt_row,
    fill_untouched,
    implausible_rows,
    set_weights,
    stamp_of,
)
from dsa.state.table_files import file_of

__all__ = ["reproject", "write_weights"]


def reproject(state: StateDirectory, table: Table) -> int:
    """Bring the rows of a table into its space and reset those that hold implausible values.

    Where rows belong to ids, those that are reset belong to none any more.

    Idempotent row by row, so that it needs no record of how far it got.

    Returns:
        The number of rows projected.
    """
    projected = reset = 0
    for first, records in table.backend.scan(0, len(table)):
        rows = np.arange(first, first + len(records))
        broken = implausible_rows(records, table.rule)
        if broken.any():
            records[broken] = fill_untouched(table, rows[broken], blank_records(table, int(broken.sum()), 0))
        weights, outside = table.space.project(read_numbers(records, "w").astype(np.float64))
        if outside.any():  # on a ball, where weights are float32
            records["w"][outside] = weights[outside]
        # A stamp: the next differential checkpoint has to hold them.
        records["s"][broken | (outside & (records["s"] > 0))] = stamp_of(state.global_step)
        moved = broken | outside
        if moved.any():
            (memory,) = state.prepare(state.progress(), [(table, rows[moved])])
            memory[:] = records[moved]
            state.commit()
        projected += int(outside.sum())
        reset += int(broken.sum())
    if reset and table.keys is not None:
        table.keys.close(None)
        table.keys = Keys.make(file_of(state.path, table), table.backend)
    if reset:
        notify(
            f"{reset} rows of table {table.name!r} held implausible values and were reset: if that is "
            "unexpected, check the disk",
            StateWarning,
        )
    return projected


def write_weights(state: StateDirectory, table: Table, rows: Rows, weights: NDArray[np.float32]) -> None:
    """Set the weights of some rows in one transaction; their moments and counters stay.

    Args:
        state: The state of the table.
        table: The table.
        rows: ``(B,)`` int64, strictly increasing, inside the table.
        weights: ``(B, D)`` float32, finite and inside the table's space.

    Raises:
        CorruptRowError: a stored row is implausible; nothing has changed.
    """
    (memory,) = state.prepare(state.progress(), [(table, rows)])
    table.backend.read(rows, memory)
    position = first_implausible(memory, table.rule.non_negative)
    if position >= 0:
        raise corrupt_row(table, rows, memory, position)
    set_weights(table, memory, weights, stamp_of(state.global_step))
    state.commit()
