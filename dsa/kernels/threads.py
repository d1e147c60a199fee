"""Run a serial function over slices of a batch on several threads.

numba's own ``parallel=True`` is not used: its default threading layer aborts the process on concurrent use
and after a fork. Rows are independent, so results do not depend on the number of threads.
"""

from __future__ import annotations

import operator
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache, partial
from itertools import chain, repeat
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Final, Generic, TypeVar, final

from dsa.kernels.latch import Latch

__all__ = ["run_slices", "thread_limit"]

T = TypeVar("T")

# Handing a slice to another thread, or taking it back, costs some 20 microseconds.
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

    The caller's thread works on the first slice itself, and then on those that no other thread has begun: on
    a machine whose cores are taken, by torch's own threads for instance, waiting for one would take longer
    than its slice. A batch too small to share is one slice. The results are in the order of the slices. An
    exception is raised after all slices that were begun have ended, whatever raised it: a slice, a signal's
    handler, or another thread that threw it into this one.

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
    # An exception can be thrown into this thread when a call returns or a loop turns, not within a call into
    # C. So all slices are handed over in one, and ending them is one, the first that follows whatever was
    # raised. The second one is for debuggers, which can raise on any line; it finds nothing to do.
    try:
        try:
            deque(handing_over, 0)
            # A slice that has slices itself goes through them alone: the threads are taken, and one of them
            # may be waiting for a lock that this thread holds.
            with thread_limit(1):
                first = function(0, call.bounds[1])
                call.take_over()
        finally:
            deque(call.ending, 0)
    finally:
        deque(call.ending, 0)
        call.let_go()
    return [first, *call.outcome()]


@final
class _Call(Generic[T]):
    """One call of `run_slices`: its slices but the first.

    A slice is begun by the thread that pops its claim, which is indivisible. Whoever has done so opens the
    slice's latch: a thread of the crew when the slice has ended, the caller at once.
    """

    __slots__ = ("bounds", "claims", "ending", "errors", "function", "latches", "results", "withdrawing")

    def __init__(self, function: Callable[[int, int], T], rows: int, count: int) -> None:
        self.function: Callable[[int, int], T] | None = function
        self.bounds = [rows * i // count for i in range(count + 1)]
        self.results: dict[int, T] = {}
        self.errors: dict[int, BaseException] = {}
        self.latches = {number: Latch.closed() for number in range(1, count)}
        self.claims: dict[int, Callable[[], object]] = {
            number: latch.open for number, latch in self.latches.items()
        }
        # From the last slice on, since the crew begins with the first. Each turn is within C: of a slice that
        # nobody has begun, it pops the claim and opens the latch, and tells None; of another, it tells False.
        self.withdrawing = map(operator.call, map(self.claims.pop, reversed(self.latches), repeat(bool)))
        self.ending = chain(
            self.withdrawing, map(operator.call, [each.wait for each in self.latches.values()])
        )

    def run(self, number: int) -> None:
        """Do a slice, in a thread of the crew, unless the caller has."""
        ended = self.claims.pop(number, None)
        if ended is None:
            return
        try:
            self.results[number] = self._do(number)
        except BaseException as error:
            self.errors[number] = error
        ended()

    def take_over(self) -> None:
        """Do the slices that nobody has begun, in the caller's thread."""
        for number, begun in zip(reversed(self.latches), self.withdrawing, strict=True):
            if begun is None:
                try:
                    self.results[number] = self._do(number)
                except Exception as error:  # that of an earlier slice comes first
                    self.errors[number] = error

    def let_go(self) -> None:
        """Keep nothing alive for a thread that comes too late."""
        self.function = None

    def outcome(self) -> list[T]:
        """Return what the slices returned, or raise what the first of them raised that did."""
        for latch in self.latches.values():
            latch.give_back()
        if not self.errors:
            return [self.results[number] for number in self.latches]
        error = self.errors[min(self.errors)]
        self.errors.clear()  # its traceback leads here
        try:
            raise error
        finally:
            del error

    def _do(self, number: int) -> T:
        assert self.function is not None, "who has begun a slice is waited for"
        return self.function(self.bounds[number], self.bounds[number + 1])


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
