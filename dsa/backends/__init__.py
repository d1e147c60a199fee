"""Where records live: the `StateBackend` protocol and its implementations."""

from dsa.backends.base import StateBackend
from dsa.backends.memmap import Memmap, MemmapBackend
from dsa.backends.memory import MemoryBackend
from dsa.backends.zarr import Zarr, ZarrBackend
from dsa.backends.zarr_compressed import CompressedZarrBackend

__all__ = [
    "CompressedZarrBackend",
    "Memmap",
    "MemmapBackend",
    "MemoryBackend",
    "StateBackend",
    "Zarr",
    "ZarrBackend",
]
