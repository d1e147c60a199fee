"""Decoded chunks in memory, the least recently used making room for others.

A slot holds one chunk of every field, so that a row's fields are found, or not, together. Where a chunk lies
is looked up in an array with one entry per chunk of the table: batches are looked up without a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from dsa.kernels.columns import Units, unit_of
from dsa.shards.layout import ArrayLayout

__all__ = ["ChunkCache", "run_bounds"]

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
class ChunkCache:
    """The slots. Not thread-safe; after any exception it holds nothing wrong.

    Args:
        layouts: The fields', all cut at the same rows.
        budget: Bytes that the slots may take; there is at least one.
    """

    def __init__(self, layouts: Sequence[ArrayLayout], budget: int) -> None:
        first = layouts[0]
        chunks = first.shards * first.chunks_per_shard
        self.chunk_rows = first.chunk_rows
        self.slots = max(1, min(chunks, budget // sum(layout.chunk_bytes for layout in layouts)))
        self.fields: list[Units] = []
        for layout in layouts:
            unit = unit_of(layout.spec.row_bytes)
            shape = self.slots * self.chunk_rows, layout.spec.row_bytes // unit.itemsize
            self.fields.append(np.zeros(shape, unit))
        self._slot_of = np.full(chunks, _NOWHERE, np.int32)
        self._chunk_of = np.full(self.slots, _NOWHERE, np.int64)
        self._used = np.zeros(self.slots, np.int64)
        self._clock = 0

    def find(self, chunks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slots of chunks, -1 for those that are not here, and note that they are used."""
        slots = self._slot_of[chunks].astype(np.int64)
        self._clock += 1
        self._used[slots[slots >= 0]] = self._clock
        return slots

    def make_room(self, count: int) -> NDArray[np.int64]:
        """Free so many slots, none of them one that the last `find` returned, and return them.

        There must be as many.
        """
        used = self._used
        slots = np.argpartition(used, count - 1)[:count] if count < len(used) else np.arange(len(used))
        self._drop(slots)
        self._used[slots] = self._clock
        return slots

    def publish(self, chunks: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Take slots, whose fields have been filled, as those of chunks."""
        self._chunk_of[slots] = chunks
        self._slot_of[chunks] = slots

    def forget(self, chunks: NDArray[np.int64]) -> None:
        """Let go of chunks, whose slots keep what they hold until others need them."""
        self._slot_of[chunks] = _NOWHERE

    def block(self, field: int, slot: int) -> Units:
        """Return a slot's rows of one field."""
        return self.fields[field][slot * self.chunk_rows : (slot + 1) * self.chunk_rows]

    def _drop(self, slots: NDArray[np.int64]) -> None:
        owners = self._chunk_of[slots]
        mine = owners >= 0
        # A chunk that was forgotten and read again has another slot by now.
        mine[mine] = self._slot_of[owners[mine]] == slots[mine]
        self._slot_of[owners[mine]] = _NOWHERE
        self._chunk_of[slots] = _NOWHERE
