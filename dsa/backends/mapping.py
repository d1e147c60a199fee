"""Files that are mapped into memory, and an error that says what a file system must offer for it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from dsa.backends import system

__all__ = ["Allocate", "check_allocate", "map_file", "opened"]

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
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            raise _too_many_files(path, error) from error
        code = error.errno if isinstance(error, OSError) and error.errno else errno.ENOMEM
        raise OSError(
            code,
            f"{str(path)!r} ({size:,} bytes) can't be mapped into memory ({error}): its file system must "
            "support shared mappings (network and FUSE mounts often do not) and the process's address-space "
            "limit must leave room; use a local disk or raise the limit",
        ) from error
    system.advise_random(mapping)
    return mapping


@contextlib.contextmanager
def opened(path: Path, mode: int) -> Iterator[int]:
    """Open a file and close it at the end of the block.

    Args:
        path: The file.
        mode: Flags as `os.open` takes them.

    Raises:
        OSError: the system refuses.
    """
    try:
        file = os.open(path, mode | getattr(os, "O_BINARY", 0), 0o644)
    except OSError as error:
        raise (_too_many_files(path, error) if error.errno == errno.EMFILE else error) from None
    try:
        yield file
    finally:
        os.close(file)


def _too_many_files(path: Path, error: OSError) -> OSError:
    """Return the error that says what to do when no descriptor is left for a file."""
    return OSError(
        error.errno,
        f"{str(path)!r} can't be opened ({error.strerror}), each file that is mapped keeps a descriptor: "
        "raise the limit (ulimit -n), close states that are not in use, or make tables of fewer shards, "
        "backend=Zarr(shard_bytes=...)",
    )
