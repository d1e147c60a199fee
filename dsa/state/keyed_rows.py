"""Rows of a table that belong to ids: found, given out, taken back. Each change is one transaction.

An id gets a row when it is first trained; its first weights depend on the table's rule and the id, not on the
row or the order of arrival. Rows of deleted ids are given out again and start anew in every field.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dsa.backends.id_map import Ids
from dsa.errors import StateCorruptError
from dsa.schema import Rows
from dsa.state.growth import Growth, grow_tables
from dsa.state.keys import KeyChange, Keys, owned_rows
from dsa.state.progress import Progress
from dsa.state.state_directory import StateDirectory
from dsa.state.storage import FEW_ROWS
from dsa.state.table import Table, blank_records, clip_to_ball, set_weights, stamp_of

__all__ = ["delete_ids", "find_rows", "first_weights", "insert_ids", "keys_of", "wrong_index"]

Weights = NDArray[np.float32]

_BATCH: Final = 1 << 16
_BLOCK_BYTES: Final = 64 << 20


def keys_of(table: Table) -> Keys:
    """Return the ids of a table whose rows belong to ids."""
    assert table.keys is not None, "only tables whose schema is keyed have ids"
    return table.keys


def find_rows(table: Table, ids: Ids) -> Rows:
    """Return the row of each id, -1 where it has none.

    Args:
        table: The table.
        ids: ``(B,)`` int64, in any order.

    Raises:
        StateCorruptError: the index names rows that the table does not have.
    """
    rows = keys_of(table).find(ids)
    if len(rows) and rows.max() >= len(table):
        raise wrong_index(table)
    return rows


def first_weights(table: Table, ids: Ids) -> Weights:
    """Return the weights ``(B, D)`` that ids start with, whether they have a row or not."""
    weights = np.empty((len(ids), table.dim), np.float32)
    assert table.initializer is not None, "a table of ids has a rule for first weights"
    table.initializer.fill(ids, weights)
    return clip_to_ball(table, weights)


def insert_ids(state: StateDirectory, table: Table, ids: Ids, weights: Weights | None = None) -> Rows:
    """Give rows to ids that have none, and return the rows of all.

    The table grows where it has to. Ids are taken in the order in which they first occur.

    Args:
        state: The state of the table, held, with nothing pending.
        table: The table.
        ids: ``(B,)`` int64, in any order.
        weights: ``(B, D)`` float32: first weights of the new ones; None takes those of the rule.

    Raises:
        DiskSpaceError: there is no room; the ids before have their rows, the others none.
    """
    rows = find_rows(table, ids)
    unknown = np.flatnonzero(rows < 0)
    if len(unknown) == 0:
        return rows
    _, first = np.unique(ids[unknown], return_index=True)
    new = unknown[np.sort(first)]
    for start in range(0, len(new), _BATCH):
        some = new[start : start + _BATCH]
        _insert(state, table, ids[some], None if weights is None else weights[some])
    return find_rows(table, ids)


def _insert(state: StateDirectory, table: Table, ids: Ids, weights: Weights | None) -> None:
    keys = keys_of(table)
    rows = keys.choose(len(ids))
    lacking = int(rows.max()) + 1 - len(table)
    if lacking > 0:
        grow_tables(state, [Growth(table, len(table) + max(lacking, _block_rows(table)))])
    change = KeyChange("insert", ids, rows, keys.freed)
    order = np.argsort(rows)
    _require_index(table, rows[order], None)
    (records,) = state.prepare(_with_change(state, table, change), [(table, rows[order])])
    records[:] = blank_records(table, len(rows), stamp_of(state.global_step))
    records["id"], records["live"] = ids[order], 1
    first = first_weights(table, ids) if weights is None else weights
    set_weights(table, records, first[order], stamp_of(state.global_step))
    state.commit()


def delete_ids(state: StateDirectory, table: Table, ids: Ids) -> int:
    """Take their rows from ids, which may have none; the rows are zero from here on, and free.

    Args:
        state: The state of the table, held, with nothing pending.
        table: The table.
        ids: ``(B,)`` int64, in any order.

    Returns:
        How many ids had a row.
    """
    keys, deleted = keys_of(table), 0
    ids = np.unique(ids)
    for start in range(0, len(ids), _BATCH):
        some = ids[start : start + _BATCH]
        rows = keys.find(some)
        some, rows = some[rows >= 0], rows[rows >= 0]
        if len(rows) == 0:
            continue
        order = np.argsort(rows)
        _require_index(table, rows[order], some[order])
        change = KeyChange("delete", some, rows, keys.freed)
        (records,) = state.prepare(_with_change(state, table, change), [(table, rows[order])])
        records[:] = blank_records(table, len(rows), stamp_of(state.global_step))
        state.commit()
        deleted += len(rows)
    return deleted


def _require_index(table: Table, rows: Rows, ids: Ids | None) -> None:
    """Check that rows which are about to change hands, sorted, belong to whom the index says, or to nobody.

    Raises:
        StateCorruptError: one does not; nothing has changed.
    """
    sound = len(rows) == 0 or bool(rows[0] >= 0 and rows[-1] < len(table) and (rows[1:] > rows[:-1]).all())
    if sound:
        records = table.backend.read(rows)
        owned = owned_rows(records)
        sound = not owned.any() if ids is None else bool((~owned | (records["id"] == ids)).all())
    if not sound:
        raise wrong_index(table)


def wrong_index(table: Table) -> StateCorruptError:
    """Return the error that the index of a table's ids says something else than its records."""
    return StateCorruptError(
        f"the index of the ids of table {table.name!r} does not fit its records, as if it were of another "
        "moment: close the state, remove the table's .ids file and open it again, which makes it anew"
    )


def _with_change(state: StateDirectory, table: Table, change: KeyChange) -> Progress:
    return replace(state.progress(), keys={state.index(table): change})


def _block_rows(table: Table) -> int:
    """Return the rows by which a table grows: an eighth, but no block that takes long to be had."""
    largest = max(FEW_ROWS, _BLOCK_BYTES // table.backend.schema.dtype.itemsize)
    return min(max(FEW_ROWS, len(table) // 8), largest)
