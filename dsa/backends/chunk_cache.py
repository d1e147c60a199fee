"""Decoded chunks in memory, the least recently used making room for others.

A slot holds one chunk of every field, so that a row's fields are found, or not, together. Where a chunk lies
is looked up in an array with one entry per chunk of the table: batches are looked up without a loop.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from dsa.backends.shards.layout import ArrayLayout
from dsa.kernels.columns import Units, unit_of

__all__ = ["ChunkCache", "Hold", "run_bounds"]

_NOWHERE: Final = -1


def run_bounds(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where the runs of equal values begin, and at the end the number of values.

    Example:
        >>> run_bounds(np.array([4, 4, 9])).tolist()
        [0, 2, 3]
    """
    changes = np.flatnonzero(values[1:] != values[:-1]) + 1
    return np.concatenate([[0], changes, [len(values)]]) if len(values) else np.zeros(1, np.int64)


@final
class Hold:
    """Chunks that nobody takes away while this is alive, in the cache or, where it is full, in own memory.

    Attributes:
        chunks: Their numbers in the table, increasing.
        slots: The slot of each.
        missing: Positions of those whose slots are yet to be filled.
        fields: The rows of all slots, for each field.
        in_cache: Whether the slots are the cache's.
    """

    __slots__ = ("__weakref__", "chunks", "fields", "in_cache", "missing", "slots")

    def __init__(
        self,
        chunks: NDArray[np.int64],
        slots: NDArray[np.int64],
        missing: NDArray[np.int64],
        fields: list[Units],
        in_cache: bool,
    ) -> None:
        self.chunks, self.slots, self.missing = chunks, slots, missing
        self.fields, self.in_cache = fields, in_cache


@final
class ChunkCache:
    """The slots. The owner lets one thread at a time call; what is held may be used by all meanwhile.

    After any exception the cache holds nothing wrong: a chunk is found once `publish` has told where it is.

    Args:
        layouts: The fields', all cut at the same rows.
        budget: Bytes that the slots may take; there is at least one.
    """

    def __init__(self, layouts: Sequence[ArrayLayout], budget: int) -> None:
        first = layouts[0]
        chunks = first.shards * first.chunks_per_shard
        self._layouts = layouts
        self.chunk_rows = first.chunk_rows
        self.slots = max(1, min(chunks, budget // sum(layout.chunk_bytes for layout in layouts)))
        self.fields = self._memory(self.slots)
        self._slot_of = np.full(chunks, _NOWHERE, np.int32)
        self._chunk_of = np.full(self.slots, _NOWHERE, np.int64)
        self._used = np.zeros(self.slots, np.int64)
        self._clock = 0
        # Weak: what an interrupt leaves behind is not held for ever.
        self._holds: weakref.WeakSet[Hold] = weakref.WeakSet()

    def extend(self, chunks: int) -> None:
        """Take in that the table has so many chunks; those that are held stay."""
        more = np.full(max(0, chunks - len(self._slot_of)), _NOWHERE, np.int32)
        self._slot_of = np.concatenate([self._slot_of, more])

    def find(self, chunks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slots of chunks, -1 for those that are not here."""
        return self._slot_of[chunks].astype(np.int64)

    def hold(self, chunks: NDArray[np.int64]) -> Hold:
        """Hold as many chunks, from the first on, as there is room for; one at least.

        Args:
            chunks: At least one, increasing.
        """
        busy = np.zeros(self.slots, np.bool_)
        for each in self._holds:
            busy[each.slots] = True
        slots = self.find(chunks)
        # Each takes a slot that is not busy yet, unless it is in one that is.
        takes = (slots < 0) | ~busy[slots]
        count = int(np.searchsorted(np.cumsum(takes), self.slots - np.count_nonzero(busy), side="right"))
        if count == 0:
            nowhere = np.zeros(1, np.int64)
            return Hold(chunks[:1], nowhere, nowhere, self._memory(1), in_cache=False)
        chunks, slots = chunks[:count], slots[:count]
        missing = np.flatnonzero(slots < 0)
        busy[slots[slots >= 0]] = True
        self._clock += 1
        self._used[slots[slots >= 0]] = self._clock
        slots[missing] = self._make_room(len(missing), busy)
        hold = Hold(chunks, slots, missing, self.fields, in_cache=True)
        self._holds.add(hold)
        return hold

    def release(self, hold: Hold, filled: NDArray[np.int64]) -> None:
        """Hold chunks no longer.

        Args:
            hold: What holds them.
            filled: Positions of those that were missing and are found from now on.
        """
        if hold.in_cache:
            self.publish(hold.chunks[filled], hold.slots[filled])
        self._holds.discard(hold)

    def publish(self, chunks: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Take slots, whose fields have been filled, as those of chunks."""
        self._chunk_of[slots] = chunks
        self._slot_of[chunks] = slots

    def forget(self, chunks: NDArray[np.int64]) -> None:
        """Let go of chunks, whose slots keep what they hold until others need them."""
        self._slot_of[chunks] = _NOWHERE

    def _memory(self, slots: int) -> list[Units]:
        units = [unit_of(layout.spec.row_bytes) for layout in self._layouts]
        return [
            np.zeros((slots * self.chunk_rows, layout.spec.row_bytes // unit.itemsize), unit)
            for layout, unit in zip(self._layouts, units, strict=True)
        ]

    def _make_room(self, count: int, busy: NDArray[np.bool_]) -> NDArray[np.int64]:
        free = np.flatnonzero(~busy)
        if count < len(free):
            free = free[np.argpartition(self._used[free], count)[:count]]
        owners = self._chunk_of[free]
        mine = owners >= 0
        # A chunk that was forgotten and read again has another slot by now.
        mine[mine] = self._slot_of[owners[mine]] == free[mine]
        self._slot_of[owners[mine]] = _NOWHERE
        self._chunk_of[free] = _NOWHERE
        self._used[free] = self._clock
        return free
