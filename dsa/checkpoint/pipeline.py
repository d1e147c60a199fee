"""Many arrays written at once from one stream of records.

A record's fields go to arrays of their own. Each array takes its rows in order, one thread at a time;
different arrays are served by different threads, which works well because gathering, hashing, compressing
and writing all release the interpreter's lock. How many blocks of records may be under way is bounded, and
so is memory.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from types import TracebackType
from typing import Any, Final, final

from numpy.typing import NDArray

from dsa.checkpoint.arrays import ArrayWriter

__all__ = ["ArrayPipeline", "worker_count"]

_BLOCKS_UNDER_WAY: Final = 4


def worker_count() -> int:
    """Return how many threads are worth having: the processors of this process, from 2 to 4."""
    affinity = getattr(os, "sched_getaffinity", None)
    return min(4, max(2, len(affinity(0)) if affinity else os.cpu_count() or 1))


class _Lane:
    """The rows that wait for one array."""

    def __init__(self, writer: ArrayWriter) -> None:
        self.writer = writer
        self.waiting: deque[tuple[NDArray[Any], list[int]]] = deque()
        self.asked = False  # for a thread
        self.served = False


@final
class ArrayPipeline:
    """Writes the arrays of one table.

    A context manager: leaving it waits for the threads.

    Args:
        writers: One per array.
        pool: The threads.
    """

    def __init__(self, writers: Sequence[ArrayWriter], pool: ThreadPoolExecutor) -> None:
        self._lanes = [_Lane(writer) for writer in writers]
        self._pool = pool
        self._changed = Condition()
        self._blocks = 0
        self._error: BaseException | None = None

    def __enter__(self) -> ArrayPipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            if kind is not None and self._error is None:
                self._error = error
            while any(lane.served for lane in self._lanes):
                self._changed.wait()
        if self._error is not None:
            for lane in self._lanes:
                lane.writer.abandon()

    def add(self, parts: Sequence[NDArray[Any]]) -> None:
        """Hand over the next rows of every array, in the writers' order; they must not be changed any more.

        Waits while too much is under way.

        Raises:
            Exception: whatever an earlier part of the work raised.
        """
        with self._changed:
            while self._blocks >= _BLOCKS_UNDER_WAY and self._error is None:
                self._changed.wait()
            self._reraise()
            self._blocks += 1
            left = [len(self._lanes)]
            for lane, rows in zip(self._lanes, parts, strict=True):
                lane.waiting.append((rows, left))
                if not lane.asked:
                    lane.asked = True
                    self._pool.submit(self._serve, lane)

    def finish(self) -> None:
        """Wait until everything that was handed over is written.

        Raises:
            Exception: whatever the work raised.
        """
        with self._changed:
            while self._blocks and self._error is None:
                self._changed.wait()
            self._reraise()

    def _reraise(self) -> None:
        if self._error is not None:
            raise self._error

    def _serve(self, lane: _Lane) -> None:
        while True:
            with self._changed:
                lane.served = bool(lane.waiting) and self._error is None
                if not lane.served:
                    lane.asked = False
                    self._changed.notify_all()
                    return
                rows, left = lane.waiting.popleft()
            try:
                lane.writer.add(rows)
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
            with self._changed:
                left[0] -= 1
                self._blocks -= left[0] == 0
                self._changed.notify_all()
