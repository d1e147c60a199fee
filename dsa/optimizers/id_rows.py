"""Ids of a batch as rows of a table whose rows belong to ids."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsa.backends.id_map import Ids
from dsa.errors import RowIndexError
from dsa.kernels.rows import unique_inverse
from dsa.optimizers.tensors import ArrayLike, to_array
from dsa.rules.from_array import FromArray
from dsa.schema import Rows
from dsa.state.coalesce import as_ids, as_rows
from dsa.state.id_policy import IdPolicy, admit, make_room
from dsa.state.keyed_rows import delete_ids, find_rows, first_weights, insert_ids
from dsa.state.keys import Keys
from dsa.state.state_directory import StateDirectory
from dsa.state.table import Table, read_weights

__all__ = [
    "PADDING",
    "FoundIds",
    "all_ids",
    "delete_rows",
    "insert_rows",
    "known_rows",
    "read_ids",
    "rows_of_ids",
]

PADDING: Final = -(2**62)
"""Stands for the row of the padding id, which has none."""
_UNKNOWN: Final = -1


class FoundIds(NamedTuple):
    """The distinct rows of a batch of ids.

    Args:
        rows: ``(U,)`` int64, strictly increasing; negative ones stand for ids that have none.
        owners: ``(U,)`` int64, the id that has each row.
        inverse: ``(B,)`` int64, the position of each id among them.
        values: ``(U, D)`` float32, their weights.
    """

    rows: Rows
    owners: Ids
    inverse: Rows
    values: NDArray[np.float32]


def read_ids(
    state: StateDirectory, table: Table, policy: IdPolicy, ids: Ids, padding: int | None, training: bool
) -> FoundIds:
    """Read the weights of a batch of ids, giving rows to new ones while training.

    Args:
        state: The state of the table, held, with nothing pending.
        table: The table.
        policy: What becomes of ids without a row.
        ids: ``(B,)`` int64, in any order.
        padding: The id that stands for none, whose weights are zero.
        training: Whether ids may get rows.

    Raises:
        RowIndexError: an id has no row, and the policy has that as an error.
        CorruptRowError: a stored row is implausible.
        DiskSpaceError: there is no room for new ids.
    """
    rows = np.full(len(ids), PADDING)
    others = slice(None) if padding is None else np.flatnonzero(ids != padding)
    rows[others] = admit(state, table, policy, ids[others]) if training else find_rows(table, ids[others])
    unknown = np.flatnonzero(rows == _UNKNOWN)
    started = np.empty(0, np.int64)
    if len(unknown) and policy.unknown == "error" and not training:
        raise RowIndexError(
            f"id {ids[unknown[0]]} has no row in table {table.name!r}: pass ids that were trained, or "
            "IdPolicy(unknown='zeros' or 'first')"
        )
    if len(unknown) and policy.unknown == "first":
        started, place = np.unique(ids[unknown], return_inverse=True)
        rows[unknown] = _UNKNOWN - 1 - place.reshape(-1)
    if len(unknown) or padding is not None:
        distinct, inverse = np.unique(rows, return_inverse=True)
    else:
        distinct, inverse = unique_inverse(rows)
    values = np.zeros((len(distinct), table.dim), np.float32)
    stored = int(np.searchsorted(distinct, 0))
    values[stored:] = read_weights(table, distinct[stored:])
    if len(started):
        at = np.flatnonzero((distinct < _UNKNOWN) & (distinct > PADDING))
        values[at] = first_weights(table, started)[_UNKNOWN - 1 - distinct[at]]
    owners = np.empty(len(distinct), np.int64)
    owners[inverse.reshape(-1)] = ids
    return FoundIds(distinct, owners, inverse.reshape(-1), values)


def known_rows(table: Table, given: NDArray[Any]) -> Rows:
    """Return the rows that indices of a table stand for: themselves, or those of ids that have one.

    Args:
        table: The table.
        given: ``(B,)`` of an integer dtype, in any order.

    Raises:
        RowIndexError, RowTypeError: the indices can't be used.
    """
    if table.keys is None:
        return as_rows(given, len(table), table.name)
    rows = find_rows(table, as_ids(given, table.name))
    return rows[rows >= 0]


def rows_of_ids(table: Table, given: NDArray[Any]) -> Rows:
    """Return the rows of ids, all of which have one.

    Raises:
        RowIndexError: one has none.
        RowTypeError: they can't be ids.
    """
    ids = as_ids(given, table.name)
    rows = find_rows(table, ids)
    if len(lacking := np.flatnonzero(rows < 0)):
        raise RowIndexError(
            f"id {ids[lacking[0]]} has no row in table {table.name!r}: give it one by insert(ids, weights)"
        )
    return rows


def all_ids(table: Table) -> Ids:
    """Return the ids that have a row.

    Raises:
        TypeError: the table's rows belong to no ids.
    """
    return np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in _keys_of(table).items())])


def insert_rows(
    state: StateDirectory, table: Table, policy: IdPolicy, ids: ArrayLike, weights: ArrayLike | None
) -> None:
    """Give rows to ids that have none, below the cap.

    Args:
        state: The state of the table.
        table: The table.
        policy: Says the cap.
        ids: ``(B,)`` of an integer dtype, in any order; of one that comes twice the first counts.
        weights: ``(B, D)`` first weights of the new ones, inside the ball where there is one; None takes
            those of the rule.

    Raises:
        TypeError: the table's rows belong to no ids.
        ValueError: the weights can't be theirs, or there are more ids than the cap; nothing has changed.
        RowTypeError: they can't be ids.
        DiskSpaceError: there is no room.
    """
    _keys_of(table)
    wanted = as_ids(to_array(ids).reshape(-1), table.name)
    values = None
    if weights is not None:
        source = FromArray(weights)
        if (source.rows, source.dim) != (len(wanted), table.dim):
            raise ValueError(
                f"weights of {source.rows} x {source.dim} are not those of {len(wanted)} ids of table "
                f"{table.name!r}: pass {(len(wanted), table.dim)}"
            )
        values = source.rows_of(0, len(wanted))
        if (outside := table.space.project(values.astype(np.float64))[1]).any():
            raise ValueError(
                f"the weights of id {wanted[np.flatnonzero(outside)[0]]} are outside the ball of table "
                f"{table.name!r}: scale them to less than {table.k**-0.5:.7g}"
            )
    with state.use():
        state.settle()
        new = np.unique(wanted[find_rows(table, wanted) < 0])
        make_room(state, table, policy, len(new), wanted)
        insert_ids(state, table, wanted, values)


def delete_rows(state: StateDirectory, table: Table, ids: ArrayLike) -> int:
    """Take their rows from ids, and return how many had one.

    Raises:
        TypeError: the table's rows belong to no ids.
        RowTypeError: they can't be ids.
    """
    _keys_of(table)
    with state.use():
        state.settle()
        return delete_ids(state, table, as_ids(to_array(ids).reshape(-1), table.name))


def _keys_of(table: Table) -> Keys:
    if table.keys is None:
        raise TypeError(
            f"the rows of table {table.name!r} belong to no ids, as it was made with a number of rows: make "
            "it with None for that"
        )
    return table.keys
