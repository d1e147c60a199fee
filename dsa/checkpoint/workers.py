"""Threads for work that releases the interpreter's lock, which Ctrl-C can't bring to a standstill.

The executors and futures of the standard library guard themselves with locks that the main thread takes in
Python code. A KeyboardInterrupt can strike there just after a lock was taken, nobody releases it, and the
threads wait for ever: measured once in a few hundred interrupts. Here the main thread touches nothing but
queues whose operations are indivisible.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any, Generic, TypeVar, final

__all__ = ["Task", "Workers", "worker_count"]

T = TypeVar("T")


def worker_count() -> int:
    """Return how many threads are worth having: the processors of this process, from 2 to 4."""
    affinity = getattr(os, "sched_getaffinity", None)
    return min(4, max(2, len(affinity(0)) if affinity else os.cpu_count() or 1))


@final
class Task(Generic[T]):
    """Work that was handed over."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._outcome: SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = SimpleQueue()

    def run(self) -> None:
        """Do the work, in a worker."""
        try:
            self._outcome.put((self._work(), None))
        except BaseException as error:
            self._outcome.put((None, error))

    def result(self) -> T:
        """Wait for the result and return it; to be called once.

        Raises:
            BaseException: what the work raised.
        """
        value, error = self._outcome.get()
        if error is not None:
            raise error
        return value  # type: ignore[return-value]  # of the first kind of pair


@final
class Workers:
    """A number of threads that do tasks in the order in which they were handed over.

    A context manager: leaving it waits for the tasks that are being done and forgets those that aren't.

    Args:
        name: What the threads' names begin with.
        count: How many.
    """

    def __init__(self, name: str, count: int | None = None) -> None:
        self._name = name
        self._count = worker_count() if count is None else count
        self._tasks: SimpleQueue[Task[Any] | None] = SimpleQueue()
        self._running: set[int] = set()
        self._finished: SimpleQueue[None] = SimpleQueue()
        self._closed = False

    def __enter__(self) -> Workers:
        try:
            for number in range(self._count):
                Thread(target=self._serve, args=(number,), name=f"{self._name}_{number}", daemon=True).start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        self._closed = True
        for _ in range(self._count):
            self._tasks.put(None)
        while self._running:
            self._finished.get()

    def submit(self, work: Callable[..., T], *args: Any) -> Task[T]:  # noqa: ANN401 - those of `work`
        """Hand a task over."""
        task = Task(lambda: work(*args))
        self._tasks.put(task)
        return task

    def _serve(self, number: int) -> None:
        # A worker says that it is running before it asks whether it may; `_close` does both the other way
        # round, so that one of the two always sees the other.
        while (task := self._tasks.get()) is not None:
            self._running.add(number)
            if not self._closed:
                task.run()
            del task  # it may hold memory
            self._running.discard(number)
            if self._closed:
                self._finished.put(None)
