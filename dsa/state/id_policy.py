"""Which ids get rows, and which lose them.

An id gets a row when it is trained, at once or when it has come often enough. It loses it when it was not
trained for long, and when there are too many. Time alone bounds nothing, since ids may come faster than they
grow old; a cap alone forgets what is still in use on a quiet day. So there are three numbers: an age, a cap,
and a floor below which age takes nothing.

What is evicted is a function of the step and the stored rows, so that a run that was killed and resumed
forgets the same ids, but for what a batch had begun before the kill: ids that it has inserted count for the
floor, and for how the table is divided into slices, and its arrivals are counted again. A step looks at a
slice of the table, one after the other, so that no step waits for a pass over all of it; rows in the cap's
way are the oldest of the slices that are looked at for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal, final

import numpy as np
from numpy.typing import NDArray

from dsa.backends.id_map import Ids
from dsa.schema import Records, Rows
from dsa.state.keyed_rows import delete_ids, find_rows, insert_ids, keys_of, wrong_index
from dsa.state.state_directory import StateDirectory
from dsa.state.table import Table

__all__ = ["IdPolicy", "admit", "evict_aged", "evict_before", "make_room"]

_SLICE: Final = 1024
"""Rows that a step looks at, at least."""
_SWEEP: Final = 1 << 14
"""Rows that are looked at together where all of them are."""
_WINDOW: Final = 8
"""Rows that are looked at for each that has to go."""


@final
@dataclass(frozen=True, slots=True)
class IdPolicy:
    """How a table treats ids: which get rows, what the others are, and which lose theirs.

    It is a choice of a run, and may be another in the next.

    Args:
        unknown: What an id without a row is where none is given out, as in eval mode: ``"zeros"``;
            ``"first"``, the weights that it would start with; ``"error"``.
        min_count: An id gets a row when it has come so often in training; before that it is unknown, and gets
            no gradient. It is an estimate, never too late: see `dsa.state.arrivals`.
        evict_after: Steps without training after which an id may lose its row; None keeps it.
        max_rows: Rows that ids may have together; None sets no cap.
        min_rows: Rows that are left, however old they are.

    Raises:
        ValueError: an option is out of range, or the floor is above the cap.

    Example:
        >>> IdPolicy(evict_after=10_000, max_rows=50_000_000).unknown
        'zeros'
    """

    unknown: Literal["zeros", "first", "error"] = "zeros"
    min_count: int = 1
    evict_after: int | None = None
    max_rows: int | None = None
    min_rows: int = 0

    def __post_init__(self) -> None:
        if self.unknown not in ("zeros", "first", "error"):
            raise ValueError(f"unknown={self.unknown!r} is not known: use 'zeros', 'first' or 'error'")
        for name, least in (("min_count", 1), ("evict_after", 1), ("max_rows", 1), ("min_rows", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value!r} is out of range: pass at least {least}")
        if self.max_rows is not None and self.min_rows > self.max_rows:
            raise ValueError(
                f"min_rows={self.min_rows!r} is above max_rows={self.max_rows!r}: pass a floor below the cap"
            )


def admit(state: StateDirectory, table: Table, policy: IdPolicy, ids: Ids) -> Rows:
    """Return the rows of ids in training, where need be new ones; -1 for an id that is not admitted yet.

    Args:
        state: The state of the table, held, with nothing pending.
        table: The table.
        policy: Who is admitted, and who has to go for it.
        ids: ``(B,)`` int64, in any order.

    Raises:
        DiskSpaceError: there is no room; ids before have their rows, the others none.
        ValueError: the batch alone is more than the cap; nobody is admitted.
    """
    keys = keys_of(table)
    if keys.swept_step != state.global_step:
        evict_aged(state, table, policy)
        keys.swept_step = state.global_step
    rows = find_rows(table, ids)
    unknown = np.flatnonzero(rows < 0)
    if len(unknown) == 0:
        return rows
    distinct, first, times = np.unique(ids[unknown], return_index=True, return_counts=True)
    order = np.argsort(first)  # as they come, so that rows don't depend on what ids look like
    new = distinct[order]
    if policy.min_count > 1:
        arrived, change = keys.arrivals.count(new, times[order])
        state.prepare(replace(state.progress(), keys={state.index(table): change}), [])
        state.commit()
        new = new[arrived >= policy.min_count]
    if len(new):
        make_room(state, table, policy, len(new), ids)
        insert_ids(state, table, new)
    return find_rows(table, ids)


def evict_aged(state: StateDirectory, table: Table, policy: IdPolicy) -> int:
    """Take their rows from ids in this step's slice of the table that were not trained for long.

    Each row is looked at once in `IdPolicy.evict_after` steps or earlier. Doing so again in the same step
    changes nothing.

    Args:
        state: The state of the table, held, with nothing pending.
        table: The table.
        policy: When.

    Returns:
        How many ids have lost their row.
    """
    keys = keys_of(table)
    spare = len(keys) - policy.min_rows
    if policy.evict_after is None or spare <= 0:
        return 0
    size = max(_SLICE, -(-keys.used // policy.evict_after))
    start = state.global_step % -(-keys.used // size) * size
    records = _owned(table, np.arange(start, min(start + size, keys.used)))
    aged = records[state.global_step - _last_steps(records) > policy.evict_after]
    return delete_ids(state, table, _oldest(aged, spare))


def evict_before(state: StateDirectory, table: Table, step: int) -> int:
    """Take their rows from all ids that were trained before a step, and not since; O(N), slice by slice.

    Args:
        state: The state of the table, held, with nothing pending.
        table: The table.
        step: The step.

    Returns:
        How many ids have lost their row.
    """
    evicted, used = 0, keys_of(table).used
    for start in range(0, used, _SWEEP):
        records = _owned(table, np.arange(start, min(start + _SWEEP, used)))
        aged = records[_last_steps(records) < step]
        evicted += delete_ids(state, table, np.ascontiguousarray(aged["id"]))
    return evicted


def make_room(state: StateDirectory, table: Table, policy: IdPolicy, new: int, kept: Ids) -> int:
    """Take their rows from ids until some more have room below the cap.

    Those that were not trained for the longest time go, of `_WINDOW` times as many rows as are needed, from
    this step's place in the table on.

    Args:
        state: The state of the table, held, with nothing pending.
        table: The table.
        policy: The cap.
        new: How many ids are to come.
        kept: ``(B,)`` ids that stay: those of the batch.

    Returns:
        How many ids have lost their row.

    Raises:
        ValueError: ids that stay and those to come are more than the cap; nothing has changed.
    """
    keys = keys_of(table)
    if policy.max_rows is None or len(keys) + new <= policy.max_rows:
        return 0
    needed = len(keys) + new - policy.max_rows
    staying = int(np.count_nonzero(keys.find(np.unique(kept)) >= 0))
    if needed > len(keys) - staying:
        raise ValueError(
            f"a batch of {staying + new} distinct ids has no room in table {table.name!r}, whose cap is "
            f"{policy.max_rows}: pass smaller batches, or a larger cap"
        )
    size = max(_SLICE, _WINDOW * needed)
    place = state.global_step * size % keys.used
    evicted = looked = 0
    while evicted < needed:
        if looked >= keys.used + size:
            raise wrong_index(table)  # it has fewer rows to give than it counts
        rows = np.sort(np.arange(place, place + min(size, keys.used)) % keys.used)
        records = _owned(table, rows)
        records = records[~np.isin(records["id"], kept)]
        evicted += delete_ids(state, table, _oldest(records, needed - evicted))
        place, looked = (place + size) % keys.used, looked + size
    return evicted


def _owned(table: Table, rows: Rows) -> Records:
    """Return the records of those rows that belong to an id."""
    records = table.backend.read(rows)
    owned: Records = records[(records["live"] == 1) & (records["s"] > 0)]
    return owned


def _last_steps(records: Records) -> NDArray[np.int64]:
    """Return the step that has written each record last."""
    return records["s"].astype(np.int64) - 1


def _oldest(records: Records, count: int) -> Ids:
    """Return the ids of at most so many records, those written the longest time ago; of equals the first."""
    order = np.argsort(records["s"], kind="stable")[:count]
    return np.ascontiguousarray(records["id"][order])
