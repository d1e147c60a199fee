"""Many arrays written at once from one stream of records.

A record's fields go to arrays of their own, each of which has a thread of its own: that works well because
gathering, hashing, compressing and writing all release the interpreter's lock. How many blocks of records may
be under way is bounded, and so is memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Final, final

from numpy.typing import NDArray

from dsa.checkpoint.arrays import ArrayWriter
from dsa.checkpoint.workers import Workers

__all__ = ["ArrayPipeline"]

_BLOCKS_UNDER_WAY: Final = 4


@final
class ArrayPipeline:
    """Writes the arrays of one table.

    A context manager: leaving it waits for the threads.

    Args:
        writers: One per array.
    """

    def __init__(self, writers: Sequence[ArrayWriter]) -> None:
        self._writers = writers
        self._workers = Workers("dsa-export", len(writers))
        self._queues: list[SimpleQueue[tuple[int, NDArray[Any]] | None]] = [SimpleQueue() for _ in writers]
        self._done: SimpleQueue[int | BaseException] = SimpleQueue()
        self._left: dict[int, int] = {}  # arrays that a block has still to go to, by its number
        self._number = 0
        self._stopped = False

    def __enter__(self) -> ArrayPipeline:
        self._workers.__enter__()
        try:
            for writer, queue in zip(self._writers, self._queues, strict=True):
                self._workers.submit(self._serve, writer, queue)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        for queue in self._queues:
            queue.put(None)
        self._workers.__exit__(kind, error, trace)
        if kind is not None:
            for writer in self._writers:
                writer.abandon()

    def add(self, parts: Sequence[NDArray[Any]]) -> None:
        """Hand over the next rows of every array, in the writers' order; they must not be changed any more.

        Waits while too much is under way.

        Raises:
            Exception: whatever an earlier part of the work raised.
        """
        while len(self._left) >= _BLOCKS_UNDER_WAY:
            self._wait()
        self._number += 1
        self._left[self._number] = len(parts)
        for queue, rows in zip(self._queues, parts, strict=True):
            queue.put((self._number, rows))

    def finish(self) -> None:
        """Wait until everything that was handed over is written.

        Raises:
            Exception: whatever the work raised.
        """
        while self._left:
            self._wait()

    def _wait(self) -> None:
        done = self._done.get()
        if isinstance(done, BaseException):
            raise done
        self._left[done] -= 1
        if not self._left[done]:
            del self._left[done]

    def _serve(self, writer: ArrayWriter, queue: SimpleQueue[tuple[int, NDArray[Any]] | None]) -> None:
        while (item := queue.get()) is not None and not self._stopped:
            number, rows = item
            try:
                writer.add(rows)
            except BaseException as error:
                self._done.put(error)
                return
            del item, rows
            self._done.put(number)
