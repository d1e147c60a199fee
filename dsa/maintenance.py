"""Changes of whole tables, block by block, that survive a kill at any instant.

A change is first recorded with everything needed to carry it on. Each block is then one transaction that
holds the new records and the row up to which the change is done, so that a change interrupted anywhere is
finished by `finish_change`, no row being changed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsa.curvature import CurvatureMap, recurve
from dsa.errors import StateCorruptError, StateWarning
from dsa.init import FromArray
from dsa.kernels.checks import first_implausible
from dsa.manifolds import Euclidean, manifold_of
from dsa.notices import notify
from dsa.schema import Records, Rows
from dsa.state import StateDirectory
from dsa.table import Table, blank_records, corrupt_row, fill_untouched, stamp_of

__all__ = [
    "change_curvature",
    "finish_change",
    "implausible_rows",
    "replace_weights",
    "reproject",
    "write_weights",
]

_BLOCK_BYTES: Final = 4 << 20


def change_curvature(
    state: StateDirectory, table: Table, k: float, mapping: CurvatureMap, reset_moments: bool
) -> None:
    """Carry every row of a table over to another curvature.

    Rows that were never written stay so: their first weights are drawn for the new space.

    Args:
        state: The state of the table.
        table: The table.
        k: The new curvature magnitude.
        mapping: See `dsa.curvature.recurve`.
        reset_moments: See `dsa.curvature.recurve`.

    Raises:
        ValueError: `k` is out of range.
        CorruptRowError: a row holds implausible values; nothing has changed.
    """
    manifold_of(k)
    if k == table.k and not reset_moments:
        return
    for rows, records in _written(table, 0):
        _require_plausible(table, rows, records)
    _start(state, {"kind": "curvature", "table": table.name, "k": k, "map": mapping, "reset": reset_moments})
    finish_change(state)


def reproject(state: StateDirectory, table: Table) -> int:
    """Bring the rows of a table into its space and reset those that hold implausible values.

    Idempotent row by row, so that it needs no record of how far it got. While a change of curvature is
    pending, rows of two spaces lie side by side and none is projected: the change will do that.

    Returns:
        The number of rows projected.
    """
    projected = reset = 0
    space = table.space if state.change is None else Euclidean()
    for first, records in table.backend.scan(0, len(table)):
        rows = np.arange(first, first + len(records))
        broken = implausible_rows(records)
        if broken.any():
            fresh = fill_untouched(table, rows[broken], blank_records(table, int(broken.sum()), 0))
            # A stamp: the next differential checkpoint has to hold them.
            fresh["s"] = stamp_of(state.global_step)
            records[broken] = fresh
        weights, outside = space.project(records["w"].astype(np.float64))
        records["w"][outside] = weights[outside]
        moved = broken | outside
        records["s"][moved & (records["s"] > 0)] = stamp_of(state.global_step)
        if moved.any():
            _store(state, table, rows[moved], records[moved], state.change)
        projected += int(outside.sum())
        reset += int(broken.sum())
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
    """
    (memory,) = state.begin(state.progress(), [(table, rows)])
    table.backend.read(rows, memory)
    memory["w"] = weights
    memory["s"] = stamp_of(state.global_step)
    state.commit()


def replace_weights(state: StateDirectory, table: Table, source: FromArray) -> None:
    """Set the weights of all rows, brought into the table's space, block by block; see `write_weights`.

    Raises:
        ValueError: a weight is not finite; nothing has changed.
    """
    block_rows = max(1, _BLOCK_BYTES // (4 * table.dim))
    for _ in source.blocks(block_rows):
        pass
    state.require_open()
    with state.exclusive:
        state.settle()
        finish_change(state)
        for start, block in source.blocks(block_rows):
            inside = table.space.project(block.astype(np.float64))[0].astype(np.float32)
            write_weights(state, table, np.arange(start, start + len(block)), inside)


def finish_change(state: StateDirectory) -> None:
    """Carry a pending change to its end, if there is one.

    Raises:
        StateCorruptError: the record of the change can't be read.
        CorruptRowError: a row holds implausible values.
    """
    change = state.change
    if change is None:
        return
    task = _curvature_task(state, change)
    for rows, records in _written(task.table, int(change.get("done", 0))):
        _require_plausible(task.table, rows, records)
        changed = task.transform(records)
        changed["s"] = stamp_of(state.global_step)
        _store(state, task.table, rows, changed, {**change, "done": int(rows[-1]) + 1})
    progress = state.progress().with_change(None).with_curvature(state.index(task.table), task.k)
    state.begin(progress, [])
    state.commit()
    state.mark_change(None)


def _require_plausible(table: Table, rows: Rows, records: Records) -> None:
    position = first_implausible(records)
    if position >= 0:
        raise corrupt_row(table, rows, records, position)


def implausible_rows(records: Records) -> NDArray[np.bool_]:
    """Tell which records hold implausible values, ``(B,)`` bool."""
    broken = np.zeros(len(records), dtype=np.bool_)
    start = 0
    while (position := first_implausible(records[start:])) >= 0:
        start += position + 1
        broken[start - 1] = True
    return broken


class _Task(NamedTuple):
    table: Table
    k: float
    transform: Callable[[Records], Records]


def _curvature_task(state: StateDirectory, change: dict[str, Any]) -> _Task:
    try:
        table, k = state.tables[change["table"]], float(change["k"])
        mapping, reset = change["map"], bool(change["reset"])
        known = change["kind"] == "curvature" and mapping in ("clip", "log0")
        old, new = table.space, manifold_of(k)
    except (KeyError, TypeError, ValueError) as error:
        raise StateCorruptError(
            f"the pending change {change!r} can't be read: restore the directory from a copy"
        ) from error
    if not known:
        raise StateCorruptError(
            f"the pending change {change!r} is not known: open the state with the release that made it"
        )
    return _Task(table, k, lambda records: recurve(records, old, new, table.second_moment, mapping, reset))


def _start(state: StateDirectory, change: dict[str, Any]) -> None:
    # The journal's last entry holds rows of an ordinary step, which recovery must not write over changed
    # ones.
    state.begin(state.progress().with_change(change), [])
    state.commit()
    state.mark_change(change)


def _store(
    state: StateDirectory, table: Table, rows: Rows, records: Records, change: dict[str, Any] | None
) -> None:
    (memory,) = state.begin(state.progress().with_change(change), [(table, rows)])
    memory[:] = records
    state.commit()


def _written(table: Table, start: int) -> Iterator[tuple[Rows, Records]]:
    """Yield the rows of a table from `start` on that were ever written, and their records, in blocks."""
    for first, records in table.backend.scan(start, len(table)):
        written = np.flatnonzero(records["s"] != 0)
        if len(written) == len(records):
            yield np.arange(first, first + len(records)), records
        elif len(written):
            yield first + written, np.ascontiguousarray(records[written])
