"""Announcing pages to the system before they are read, for as long as that pays.

Read-ahead is off, since it would fetch megabytes per row. While reads reach the disk, the pages of a whole
batch are announced before the first is touched, so that the device works on many at once; once a batch has
needed no disk, announcing stops, because two thousand system calls cost more than a warm step. The thread's
own count of blocks read tells which it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar, final

import numpy as np

from dsa.backends import system
from dsa.schema import Rows

__all__ = ["ColdReads", "page_runs"]

T = TypeVar("T")

_SECTOR: Final = 512
_IDLE_HINTS: Final = 16
"""While everything announced is in memory already, so many hints out of as many plus one are not passed
on.
"""


@final
class ColdReads:
    """Decides, read by read, whether pages are announced first: one for each table."""

    def __init__(self) -> None:
        self._cold = True
        self._hints_idle = False
        self._hints_skipped = 0

    def read(self, rows: Rows, announce: Callable[[Rows], None], gather: Callable[[], T]) -> T:
        """Return what `gather` returns, having announced its rows if the last reads reached the disk."""
        before = system.blocks_read()
        if self._cold:
            announce(rows)
        result = gather()
        # One page in a hundred from the disk costs as much as announcing the whole batch.
        read = (system.blocks_read() - before) * _SECTOR
        self._cold = before >= 0 and read > len(rows) * system.PAGE // 100
        return result

    def hint(self, rows: Rows, announce: Callable[[Rows], None]) -> None:
        """Announce rows that will be read later, unless that has lately been for nothing."""
        self._hints_skipped += 1
        if self._hints_idle and not self._cold and self._hints_skipped < _IDLE_HINTS:
            return
        self._hints_skipped = 0
        before = system.blocks_read()
        announce(rows)
        self._hints_idle = 0 <= before == system.blocks_read()


def page_runs(starts: Rows, length: int) -> tuple[list[int], list[int]]:
    """Return where the runs of pages under stretches of a file begin, and how long they are, in bytes.

    Args:
        starts: Where the stretches begin in the file, increasing.
        length: Bytes of each stretch.

    Example:
        >>> page_runs(np.array([100, 4000, 20_000]), 200)
        ([0, 16384], [8192, 4096])
    """
    if len(starts) == 0:
        return [], []
    first, last = starts // system.PAGE, (starts + length - 1) // system.PAGE
    begins = np.flatnonzero(np.append(True, first[1:] > last[:-1] + 1))
    ends = np.append(begins[1:], len(starts)) - 1
    lengths = (last[ends] - first[begins] + 1) * system.PAGE
    return (first[begins] * system.PAGE).tolist(), lengths.tolist()
