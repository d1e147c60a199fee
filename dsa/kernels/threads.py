"""Run a serial function over slices of a batch on several threads.

numba's own ``parallel=True`` is not used: its default threading layer aborts the process on concurrent use
and after a fork. Rows are independent, so results do not depend on the number of threads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import lru_cache
from typing import Final, TypeVar

__all__ = ["run_slices", "thread_limit"]

T = TypeVar("T")

# Handing a slice to another thread costs about 40 microseconds, what a kernel takes for 300 rows of 128
# elements.
_MIN_ROWS: Final = 512

_LIMIT: Final[ContextVar[int]] = ContextVar("dsa_threads", default=1)


@contextlib.contextmanager
def thread_limit(threads: int) -> Iterator[None]:
    """Allow `run_slices` so many threads, the caller's included, inside the block.

    Example:
        >>> with thread_limit(2):
        ...     run_slices(lambda start, stop: (start, stop), rows=4096)
        [(0, 2048), (2048, 4096)]
    """
    token = _LIMIT.set(threads)
    try:
        yield
    finally:
        _LIMIT.reset(token)


def run_slices(function: Callable[[int, int], T], rows: int) -> list[T]:
    """Call ``function(start, stop)`` for consecutive half-open slices that cover ``[0, rows)``.

    The caller's thread works on the first slice itself; a batch too small to share is one slice. The results
    are in the order of the slices. An exception is raised after all slices have ended.

    Example:
        >>> run_slices(lambda start, stop: (start, stop), rows=10)
        [(0, 10)]
    """
    limit = _LIMIT.get()
    count = max(1, min(limit, rows // _MIN_ROWS))
    if count == 1:
        return [function(0, rows)]
    bounds = [rows * i // count for i in range(count + 1)]
    pool = _pool(limit - 1, os.getpid())
    others = [pool.submit(function, bounds[i], bounds[i + 1]) for i in range(1, count)]
    try:
        # A slice that has slices itself goes through them alone: the threads are taken, and one of them may
        # be waiting for a lock that this thread holds.
        with thread_limit(1):
            first = function(bounds[0], bounds[1])
    finally:
        errors = [future.exception() for future in others]
    for error in errors:
        if error is not None:
            raise error
    return [first, *(future.result() for future in others)]


@lru_cache(maxsize=4)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    # Keyed by the process: threads don't survive a fork, so a child makes its own.
    return ThreadPoolExecutor(threads, thread_name_prefix=f"dsa-kernel-{process}")
