"""What the rows of a table tell of its last steps, where no journal does: each has the stamp of its step.

A table is read once, which takes a second for one or two gigabytes that are in memory, and as long as the
disk takes for others. Where the backend knows of stretches that were never written, and a rule says what
their rows are, these are left out: of a billion rows only those count that were touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dsa.backends.base import Sparse
from dsa.kernels.decay import rounded
from dsa.schema import DECAY, Records, Rows, catches_up
from dsa.state.metadata import Metadata
from dsa.state.table import Table, implausible_rows, lost_rows, outside_rows, stamp_of

__all__ = ["Loss", "adopt_newest", "survey"]


class Loss(NamedTuple):
    """What is known to be wrong with a table that was not closed.

    Args:
        torn: Rows whose records are not as they were written: no step can use them.
        newest: The newest stamp of the others, one more than the step that wrote it.
        unsure: How many of these were written after the last step that the device is known to hold.
        decay: The largest decay that one of the others stores, 0 where they store none.
    """

    torn: Rows
    newest: int
    unsure: int
    decay: float


def survey(table: Table, durable_step: int, advance: Callable[[int], object] = lambda size: None) -> Loss:
    """Read a table for what a kill without a journal, a loss of power, or damage, has left of it.

    Args:
        table: The table.
        durable_step: The last step that the device is known to hold.
        advance: Is told of bytes that were read, or need not be.
    """
    torn: list[Rows] = [np.empty(0, np.int64)]
    newest = unsure = done = 0
    decay = 0.0
    for first, records in _written_blocks(table):
        broken = implausible_rows(records, table.rule) | outside_rows(records, table.k)
        broken |= lost_rows(records, table.initializer is not None)
        stamps = records["s"][~broken]
        torn.append(first + np.flatnonzero(broken))
        newest = max(newest, int(stamps.max(initial=0)))
        unsure += int((stamps > stamp_of(durable_step)).sum())
        if catches_up(records.dtype):
            decay = max(decay, float(records[DECAY][~broken].max(initial=0.0)))
        advance((first + len(records) - done) * records.itemsize)
        done = first + len(records)
    advance((len(table) - done) * table.backend.schema.dtype.itemsize)
    return Loss(np.concatenate(torn), newest, unsure, decay)


def adopt_newest(stored: Metadata, tables: Sequence[Table], losses: Sequence[Loss]) -> None:
    """Raise the counts of steps, and decay that rows may miss, to those that the rows tell of.

    A table counts as one that took part in every step up to its newest row's: too few steps would be worse,
    since a bias correction of the first steps would then be applied to moments that have none. Decay never
    falls, and each row stores what it was: what is lost is that of last steps of which no row is left.

    Args:
        stored: The description; its count of steps is the last one that is known otherwise.
        tables: The tables.
        losses: What was found in each.
    """
    known = stored.global_step
    for table, loss in zip(tables, losses, strict=True):
        table.steps += max(0, loss.newest - 1 - known)
        if loss.decay > rounded(table.decay):
            table.decay = loss.decay
        stored.global_step = max(stored.global_step, loss.newest - 1)


def _written_blocks(table: Table) -> Iterator[tuple[int, Records]]:
    backend = table.backend
    if table.initializer is None or not isinstance(backend, Sparse):
        yield from backend.scan(0, len(table))
        return
    for start, stop in backend.written():
        yield from backend.scan(start, stop)
