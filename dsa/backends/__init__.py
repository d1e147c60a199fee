"""Where records live: the `StateBackend` protocol and its implementations."""

from dsa.backends.base import StateBackend
from dsa.backends.memmap import Memmap, MemmapBackend
from dsa.backends.memory import MemoryBackend

__all__ = ["Memmap", "MemmapBackend", "MemoryBackend", "StateBackend"]
