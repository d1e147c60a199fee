"""Files that are mapped into memory, and an error that says what a file system must offer for it."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path
from typing import Literal

from dsa import system

__all__ = ["Allocate", "check_allocate", "map_file"]

Allocate = Literal["reserve", "sparse"]


def check_allocate(allocate: str) -> None:
    """Raise `ValueError` when a way of allocation is not known."""
    if allocate not in ("reserve", "sparse"):
        raise ValueError(f"allocate={allocate!r} is not known: use 'reserve' or 'sparse'")


def map_file(file: int, path: Path, size: int, writable: bool) -> mmap.mmap:
    """Map an open file's first `size` bytes, shared, without read-ahead.

    Raises:
        OSError: the system refuses.
    """
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    try:
        mapping = mmap.mmap(file, size, access=access)
    except (OSError, ValueError, OverflowError) as error:
        code = error.errno if isinstance(error, OSError) and error.errno else errno.ENOMEM
        raise OSError(
            code,
            f"{str(path)!r} ({size:,} bytes) can't be mapped into memory ({error}): its file system must "
            "support shared mappings (network and FUSE mounts often do not) and the process's address-space "
            "limit must leave room; use a local disk or raise the limit",
        ) from error
    system.advise_random(mapping)
    return mapping
