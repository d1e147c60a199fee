"""Run a serial function over slices of a batch on several threads.

numba's own ``parallel=True`` is not used: its default threading layer aborts the process on concurrent use
and after a fork. Rows are independent, so results do not depend on the number of threads.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache, partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Final, Generic, TypeVar, final

from dsa.kernels.latch import Latch

__all__ = ["run_slices", "thread_limit"]

T = TypeVar("T")

# Handing a slice to another thread costs about 40 microseconds, what a kernel takes for 300 rows of 128
# elements.
_MIN_ROWS: Final = 512

_LIMIT: Final[ContextVar[int]] = ContextVar("dsa_threads", default=1)


@final
class thread_limit:
    """Allow `run_slices` so many threads, the caller's included, inside the block.

    Example:
        >>> with thread_limit(2):
        ...     run_slices(lambda start, stop: (start, stop), rows=4096)
        [(0, 2048), (2048, 4096)]
    """

    # No generator: one that an interrupt left half-way would change the limit when it is collected.
    __slots__ = ("_threads", "_token")

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def __enter__(self) -> None:
        self._token = _LIMIT.set(self._threads)

    def __exit__(self, *raised: object) -> None:
        _LIMIT.reset(self._token)


def run_slices(function: Callable[[int, int], T], rows: int) -> list[T]:
    """Call ``function(start, stop)`` for consecutive half-open slices that cover ``[0, rows)``.

    The caller's thread works on the first slice itself; a batch too small to share is one slice. The results
    are in the order of the slices. An exception is raised after all slices have ended, whatever raised it:
    a slice, a signal's handler, or another thread that threw it into this one.

    Example:
        >>> run_slices(lambda start, stop: (start, stop), rows=10)
        [(0, 10)]
    """
    limit = _LIMIT.get()
    count = max(1, min(limit, rows // _MIN_ROWS))
    crew = None if count == 1 else _crew_of(limit - 1, count - 1)
    if crew is None:
        return [function(0, rows)]
    call = _Call(function, rows, count)
    handing_over = map(crew.jobs.put, [partial(call.run, number) for number in range(1, count)])
    handed_over: list[None] = []
    # An exception can be thrown into this thread when a call returns or a loop turns, not within a call into
    # C. So all slices are handed over in one, and waiting for them is one, the first that follows whatever
    # was raised. The second wait is for debuggers, which can raise on any line.
    try:
        try:
            handed_over.extend(handing_over)
            # A slice that has slices itself goes through them alone: the threads are taken, and one of them
            # may be waiting for a lock that this thread holds.
            with thread_limit(1):
                first = function(0, call.bounds[1])
        finally:
            if handed_over:
                call.latch.wait()
    finally:
        if handed_over and call.unfinished:
            call.latch.wait()
    return [first, *call.outcome()]


@final
class _Call(Generic[T]):
    """One call of `run_slices`: its slices but the first."""

    __slots__ = ("bounds", "errors", "function", "latch", "results", "unfinished")

    def __init__(self, function: Callable[[int, int], T], rows: int, count: int) -> None:
        self.function = function
        self.bounds = [rows * i // count for i in range(count + 1)]
        self.results: dict[int, T] = {}
        self.errors: dict[int, BaseException] = {}
        # Whoever pops the last one, which is true, opens the latch: popping is indivisible.
        self.unfinished = [number == 1 for number in range(1, count)]
        self.latch = Latch.closed()

    def run(self, number: int) -> None:
        """Do a slice, in a thread of the crew."""
        try:
            self.results[number] = self.function(self.bounds[number], self.bounds[number + 1])
        except BaseException as error:
            self.errors[number] = error
        if self.unfinished.pop():
            self.latch.open()

    def outcome(self) -> list[T]:
        """Return what the slices returned, or raise what the first of them raised that did."""
        self.latch.give_back()
        if not self.errors:
            return [self.results[number] for number in range(1, len(self.bounds) - 1)]
        error = self.errors[min(self.errors)]
        self.errors.clear()  # its traceback leads here
        try:
            raise error
        finally:
            del error


@final
class _Crew:
    """Threads that do jobs. They live as long as this does; one that waits for a job keeps nothing alive."""

    def __init__(self, process: int) -> None:
        # Nothing of the executors of the standard library: an interrupt can leave their locks taken for ever.
        self.jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._name = f"dsa-kernel-{process}"
        self._members: list[Thread] = []
        self._lock = Lock()
        # Not at exit: others are still to come then who want slices done.
        weakref.finalize(self, self.jobs.put, None).atexit = False

    def grow(self, members: int) -> None:
        """Start the threads that are missing."""
        if len(self._members) >= members:
            return
        with self._lock:
            while len(self._members) < members:
                thread = Thread(target=_serve, args=(self.jobs,), name=self._name, daemon=True)
                thread.start()
                self._members.append(thread)


def _serve(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds memory
    jobs.put(None)  # the next one has to go too


def _crew_of(threads: int, needed: int) -> _Crew | None:
    """Return a crew with as many threads as are needed, or None when there are none to be had."""
    if sys.is_finalizing():
        return None  # the threads stand still by now
    crew = _crew(threads, os.getpid())
    try:
        crew.grow(needed)
    except RuntimeError:  # the system's limit is reached, or the program ends
        return None
    return crew


@lru_cache(maxsize=4)
def _crew(threads: int, process: int) -> _Crew:
    # Keyed by the process: threads don't survive a fork, so a child makes its own.
    return _Crew(process)
