"""A wait that nothing interrupts, for threads that write into somebody's memory.

Python's own locks and queues are left when a signal's handler raises, in the main thread at any moment: the
other threads then go on writing into memory that its owner uses again. The interpreter's C interface has a
lock that is waited for until it is free; called through ctypes, it lets other threads run meanwhile.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Final, final

__all__ = ["Latch"]

# Not `ctypes.pythonapi` itself, whose functions keep the interpreter's lock: nobody could open the latch.
_PYTHON: Final = ctypes.CDLL("python", handle=ctypes.pythonapi._handle)

_allocate = _PYTHON.PyThread_allocate_lock
_allocate.argtypes, _allocate.restype = (), ctypes.c_void_p
_acquire = _PYTHON.PyThread_acquire_lock
_acquire.argtypes, _acquire.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.c_int
_release = _PYTHON.PyThread_release_lock
_release.argtypes, _release.restype = (ctypes.c_void_p,), None

_SPARE: Final[list[Latch]] = []


@final
class Latch:
    """What one thread waits at until another one opens it, once.

    ``wait()`` and ``open()`` are single calls into C: an exception that is thrown into the waiting thread is
    raised before the wait or after it.

    Example:
        >>> latch = Latch.closed()
        >>> latch.open()
        >>> _ = latch.wait()
        >>> latch.give_back()
    """

    __slots__ = ("open", "wait")

    def __init__(self) -> None:
        lock = _allocate()
        if not lock:
            raise MemoryError(
                f"{_allocate.__name__} got no lock from the system: end other programs or threads"
            )
        _acquire(lock, 1)
        self.open = partial(_release, lock)
        self.wait = partial(_acquire, lock, 1)

    @staticmethod
    def closed() -> Latch:
        """Return a latch to wait at."""
        try:
            return _SPARE.pop()
        except IndexError:
            return Latch()

    def give_back(self) -> None:
        """Let it be used again: it was opened, and waited for. One that is lost costs a few bytes."""
        _SPARE.append(self)
