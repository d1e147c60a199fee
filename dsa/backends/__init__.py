"""Where records live: the protocols `Layout` and `StateBackend`, and their implementations."""

from dsa.backends.base import GROWING, Growing, Layout, Sizes, Source, StateBackend
from dsa.backends.layouts import Memmap, Zarr
from dsa.backends.memmap import MemmapBackend
from dsa.backends.memory import MemoryBackend
from dsa.backends.zarr import ZarrBackend
from dsa.backends.zarr_compressed import CompressedZarrBackend

__all__ = [
    "GROWING",
    "CompressedZarrBackend",
    "Growing",
    "Layout",
    "Memmap",
    "MemmapBackend",
    "MemoryBackend",
    "Sizes",
    "Source",
    "StateBackend",
    "Zarr",
    "ZarrBackend",
]
