"""Room for more rows in a mapped file: the file is lengthened, and what is there stays mapped as it is.

A mapping that is made anew has to fault in every page again, and the larger the table is, the more. So a file
is mapped ahead: on Linux pages beyond the end of a file may be mapped, though nobody may touch them before
the file has them. They take no memory. Where that can't be had, and once what was mapped ahead is used up,
the file is mapped anew. Arrays over the mapping before stay what they are: all mappings of a file are the
same pages.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
from pathlib import Path
from typing import Final

from dsa.backends import system
from dsa.backends.mapping import map_file, opened
from dsa.errors import DiskSpaceError

__all__ = ["cut", "lengthen", "reserve_range", "sync_range"]

_AHEAD: Final = 16
"""How many times its length a file is mapped ahead."""
_LEAST: Final = 1 << 34
_ZEROS: Final = bytes(1 << 20)


def lengthen(
    path: Path, mapping: mmap.mmap, before: int, size: int, *, unit: int, reserve: bool
) -> mmap.mmap:
    """Give a mapped file another length, with zeros behind what it holds, and return what it is mapped by.

    Killed anywhere, the file is longer by whole rows, or as it was.

    Args:
        path: The file.
        mapping: All of it, writable, and perhaps more than there is.
        before: Bytes that count of it; what lies behind them was left by something interrupted.
        size: Bytes that it is to have.
        unit: Bytes of a row.
        reserve: Whether the new part gets its blocks.

    Raises:
        DiskSpaceError: there is not enough room; the file has the length before.
        OSError: the file system refuses, likewise; or the file was cut.
    """
    with opened(path, os.O_RDWR) as file:
        _require_length(file, path, before)
        try:
            if os.fstat(file).st_size > before:
                os.ftruncate(file, before)
            if len(mapping) < size or len(mapping) <= before:
                mapping = _map_ahead(file, path, size, unit)
            # The whole length at once, and the blocks after that.
            os.ftruncate(file, size)
            if reserve:
                reserve_range(file, before, size, str(path.parent))
        except BaseException:
            os.ftruncate(file, before)
            raise
    return mapping


def cut(path: Path, size: int | None) -> None:
    """Let go of what is behind so many bytes of a file, if there is anything; it has no mapping any more.

    Args:
        path: The file, which may be gone.
        size: Bytes; None leaves it alone.

    Raises:
        OSError: the system refuses.
    """
    if size is None:
        return
    with contextlib.suppress(FileNotFoundError), opened(path, os.O_RDWR) as file:
        if os.fstat(file).st_size > size:
            os.ftruncate(file, size)


def _map_ahead(file: int, path: Path, size: int, unit: int) -> mmap.mmap:
    """Map a file for writing that is about to be `size` bytes long, and on Linux more than that.

    Python maps no more than a file has, so that the file is longer afterwards, by whole rows.
    """
    if sys.platform == "linux" and _is_space_unlimited():
        more = size + max((_AHEAD - 1) * size, _LEAST) // unit * unit
        # Refused by a limit of the file system or of file sizes, it is mapped as it is.
        with contextlib.suppress(OSError):
            os.ftruncate(file, more)
            return map_file(file, path, more, writable=True)
    os.ftruncate(file, size)
    return map_file(file, path, size, writable=True)


def _is_space_unlimited() -> bool:
    resource = system.resource
    return resource is None or resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def _require_length(file: int, path: Path, size: int) -> None:
    # Lengthening it would make a file that was cut as long again, with zeros.
    found = os.fstat(file).st_size
    if found < size:
        raise OSError(
            errno.EIO,
            f"the table file {str(path)!r} was truncated while it was open, {found:,} bytes instead of "
            f"{size:,}: restore it from a copy",
        )


def reserve_range(file: int, start: int, stop: int, directory: str) -> None:
    """Give blocks to a range of a file in which nothing is stored, and which it is long enough for.

    Args:
        file: Open for writing.
        start: Where the range begins, in bytes.
        stop: Where it ends.
        directory: Where the file is, for the message and for the free space.

    Raises:
        DiskSpaceError: there is not enough room; tested before any block is taken and again by the system.
    """
    needed = stop - start
    if needed <= 0:
        return
    free = system.available_bytes(directory)
    if needed > free:
        raise DiskSpaceError(needed, free, directory)
    try:
        if not system.allocate_range(file, start, needed):
            os.lseek(file, start, os.SEEK_SET)
            while needed > 0:
                needed -= os.write(file, _ZEROS[: min(needed, len(_ZEROS))])
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DiskSpaceError(stop - start, system.available_bytes(directory), directory) from error
        raise


def sync_range(mapping: mmap.mmap, path: Path, start: int, stop: int) -> None:
    """Return once a range of a file's mapping is on the device, and that the file is so long.

    On Linux, `msync` asks the file system for what `fdatasync` does (``vfs_fsync_range`` in ``mm/msync.c``),
    the length of the file among it, but does not wait for the pages outside of the range, which may be many.
    Elsewhere all of the file is synced.

    Raises:
        OSError: writing back has failed.
    """
    if sys.platform != "linux":
        system.sync_mapped(mapping, path)
        return
    begin = start - start % mmap.PAGESIZE
    mapping.flush(begin, stop - begin)
