"""A hash index from rows to integers, for looking up which rows of a batch are waiting to be written.

Open addressing with linear probing over a power of two of slots (Knuth, The Art of Computer Programming 3,
6.4). A row is put, looked up or removed in some tens of nanoseconds, whole batches at a time and without the
interpreter's lock.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from dsa.kernels.compiled import compiled
from dsa.schema import Rows

__all__ = ["RowIndex"]

_FREE: Final = -1
_REMOVED: Final = -2
_FEWEST_SLOTS: Final = 1024
_USED: Final = 0
_OCCUPIED: Final = 1
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)


@final
class RowIndex:
    """Maps rows (>= 0) to values (>= 0). Not thread-safe.

    Example:
        >>> index = RowIndex()
        >>> index.put(np.array([3, 8]), first_value=100)
        >>> index.get(np.array([8, 9, 3])).tolist()
        [101, -1, 100]
    """

    def __init__(self) -> None:
        self._keys, self._values, self._counts = _empty_table(_FEWEST_SLOTS)

    def __len__(self) -> int:
        return int(self._counts[_USED])

    def put(self, rows: Rows, first_value: int) -> None:
        """Set the values of distinct rows to `first_value`, `first_value` + 1, ..."""
        # At most half of the slots may be occupied, removed ones included: probes stay short.
        if 2 * (int(self._counts[_OCCUPIED]) + len(rows)) > len(self._keys):
            self._rebuild(len(self) + len(rows))
        _put(self._keys, self._values, self._counts, rows, first_value)

    def get(self, rows: Rows) -> NDArray[np.int64]:
        """Return the value of each row, -1 for a row without one."""
        return np.asarray(_get(self._keys, self._values, rows))

    def remove(self, rows: Rows, first_value: int) -> None:
        """Remove the rows whose values are still those of ``put(rows, first_value)``."""
        _remove(self._keys, self._values, self._counts, rows, first_value)

    def _rebuild(self, entries: int) -> None:
        kept = self._keys >= 0
        table = _empty_table(max(_FEWEST_SLOTS, 1 << (4 * entries - 1).bit_length()))
        _put_pairs(*table, self._keys[kept], self._values[kept])
        self._keys, self._values, self._counts = table


def _empty_table(slots: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    # The counts lie in an array that the kernels keep: an interrupt can't fall between slots and counts.
    return np.full(slots, _FREE, np.int64), np.zeros(slots, np.int64), np.zeros(2, np.int64)


@compiled
def _home(row: int, slots: int) -> int:
    return int((np.uint64(row) * _MULTIPLIER) >> np.uint64(20)) & (slots - 1)


@compiled
def _find(keys: NDArray[np.int64], row: int) -> tuple[int, int]:
    """Return the slot of a row, or -1, and the slot where it would be put."""
    place = -1
    slot = _home(row, keys.shape[0])
    while keys[slot] != _FREE:
        if keys[slot] == row:
            return slot, slot
        if keys[slot] == _REMOVED and place < 0:
            place = slot
        slot = (slot + 1) & (keys.shape[0] - 1)
    return -1, slot if place < 0 else place


@compiled
def _put(
    keys: NDArray[np.int64],
    values: NDArray[np.int64],
    counts: NDArray[np.int64],
    rows: Rows,
    first_value: int,
) -> None:
    for i in range(rows.shape[0]):
        slot, place = _find(keys, rows[i])
        if slot < 0:
            counts[_USED] += 1
            counts[_OCCUPIED] += keys[place] != _REMOVED
            keys[place] = rows[i]
        values[place] = first_value + i


@compiled
def _put_pairs(
    keys: NDArray[np.int64],
    values: NDArray[np.int64],
    counts: NDArray[np.int64],
    rows: Rows,
    row_values: NDArray[np.int64],
) -> None:
    for i in range(rows.shape[0]):
        _, place = _find(keys, rows[i])
        keys[place] = rows[i]
        values[place] = row_values[i]
    counts[_USED] = counts[_OCCUPIED] = rows.shape[0]


@compiled
def _get(keys: NDArray[np.int64], values: NDArray[np.int64], rows: Rows) -> NDArray[np.int64]:
    found = np.empty(rows.shape[0], np.int64)
    for i in range(rows.shape[0]):
        slot, _ = _find(keys, rows[i])
        found[i] = values[slot] if slot >= 0 else -1
    return found


@compiled
def _remove(
    keys: NDArray[np.int64],
    values: NDArray[np.int64],
    counts: NDArray[np.int64],
    rows: Rows,
    first_value: int,
) -> None:
    for i in range(rows.shape[0]):
        slot, _ = _find(keys, rows[i])
        if slot >= 0 and values[slot] == first_value + i:
            keys[slot] = _REMOVED
            counts[_USED] -= 1
    if counts[_USED] == 0 and counts[_OCCUPIED] > 0:
        keys[:] = _FREE
        counts[_OCCUPIED] = 0
