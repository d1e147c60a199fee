"""Holes of a sparse file: pages without blocks on the disk, to which nobody may store on a full disk.

Storing to such a page through a mapping takes a block, and where there is none the process is killed by
SIGBUS. `fill` takes the blocks before, and turns a full disk into an error.

A page is filled by the fault that storing to it would cause (MADV_POPULATE_WRITE): nothing of it changes,
whatever other threads are storing to it. Of the ways to do this it was measured to be the cheapest together
with the stores that follow: 2,048 new records of 1,548 bytes take 12 ms instead of 10 without it, 12 with a
byte written to each page by `pwrite`, and 24 with `posix_fallocate`. A byte written to a page would not do on
a file system whose blocks are smaller than pages, nor where the page cache keeps several pages as one: a
store then takes blocks for all of them.

On a file system in memory (tmpfs) looking at a hole takes a page as storing does: there a table should have
all of its blocks.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from dsa.backends import system
from dsa.backends.mapping import opened
from dsa.errors import DiskSpaceError
from dsa.schema import Rows

__all__ = ["Holes", "written_stretches"]

_PAGE: Final = mmap.PAGESIZE
_GAP: Final = 256 << 10
"""Bytes of a hole that are sooner read, in some 0.1 ms, than left out."""


def written_stretches(path: Path, begin: int) -> Iterator[tuple[int, int]]:
    """Yield the stretches of a file outside of which it was never written, and is zero.

    Where the system can't tell, or the file is not sparse, that is all of it.

    Args:
        path: The file.
        begin: Where to begin, in bytes.
    """
    with opened(path, os.O_RDONLY) as file:
        end = os.fstat(file).st_size
        start = _next_data(file, begin, end)
        while start < end:
            stop = following = start
            while following < end and following - stop < _GAP:
                stop = _next_hole(file, following, end)
                following = _next_data(file, stop, end)
            yield start, stop
            start = following


def _next_data(file: int, start: int, end: int) -> int:
    if start >= end or not hasattr(os, "SEEK_DATA"):
        return start
    try:
        return os.lseek(file, start, os.SEEK_DATA)
    except OSError as error:
        return end if error.errno == errno.ENXIO else start


def _next_hole(file: int, start: int, end: int) -> int:
    if not hasattr(os, "SEEK_HOLE"):
        return end
    try:
        return os.lseek(file, start, os.SEEK_HOLE)
    except OSError:
        return end


@final
class Holes:
    """Remembers which pages of a mapped file have blocks, and gives blocks to others.

    Args:
        path: The file.
        mapping: All of it, and perhaps more than there is.
        size: Bytes of the file.
    """

    def __init__(self, path: Path, mapping: mmap.mmap, size: int) -> None:
        self._path = path
        self._filled = np.zeros(0, np.bool_)
        self.follow(mapping, size)

    def follow(self, mapping: mmap.mmap, size: int) -> None:
        """Take in that the file has another length, and how it is mapped from now on."""
        self._mapping, self._size = mapping, size
        filled = np.zeros(-(-size // _PAGE), np.bool_)
        known = np.flatnonzero(self._filled[: len(filled)])
        filled[known] = True  # one by one: of a large file few are known, and zeros take no memory
        self._filled = filled

    def under(self, starts: Rows, length: int) -> NDArray[np.bool_]:
        """Tell of stretches of the file whether some of their pages may be holes.

        Args:
            starts: ``(B,)``, where they begin, in bytes, increasing.
            length: Bytes of each.
        """
        first, last = starts // _PAGE, (starts + length - 1) // _PAGE
        found = ~self._filled[last]
        for step in range(_most_pages(first, last)):
            found |= ~self._filled[np.minimum(first + step, last)]
        return found

    def note(self, starts: Rows, length: int) -> None:
        """Take in that the pages under stretches, as `under` takes them, are no holes."""
        first, last = starts // _PAGE, (starts + length - 1) // _PAGE
        self._filled[last] = True
        for step in range(_most_pages(first, last)):
            self._filled[np.minimum(first + step, last)] = True

    def fill(self, starts: Rows, length: int) -> None:
        """Give blocks to the pages under stretches, as `under` takes them; what is stored stays.

        Raises:
            DiskSpaceError: the disk is full; some pages may have got theirs.
        """
        first, last = starts // _PAGE, (starts + length - 1) // _PAGE
        steps = range(_most_pages(first, last))
        pages = np.unique(np.concatenate([last, *(np.minimum(first + step, last) for step in steps)]))
        pages = pages[~self._filled[pages]]
        cuts = np.flatnonzero(np.diff(pages) != 1) + 1
        for run in np.split(pages, cuts) if len(pages) else ():
            begin = int(run[0]) * _PAGE
            length = min(self._size, (int(run[-1]) + 1) * _PAGE) - begin
            if not self._populate(begin, length):
                self._allocate(begin, length, _own_places(run, starts))
            self._filled[run] = True

    def _populate(self, start: int, length: int) -> bool:
        try:
            return system.populate(self._mapping, start, length)
        except OSError as error:
            # The fault failed as storing would have: why, the system tells whoever asks for blocks.
            if error.errno != errno.EFAULT:
                raise
            return False

    def _allocate(self, start: int, length: int, places: list[int]) -> None:
        file = os.open(self._path, os.O_RDWR | getattr(os, "O_BINARY", 0))
        try:
            self._require_whole(file)
            if not system.allocate_range(file, start, length):
                # Read from the mapping: a plain read would fetch pages around it, as one with theirs.
                for place in places:
                    system.write_at(file, self._mapping[place : place + 1], place)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            directory = str(self._path.parent)
            remedy = "or make the state with allocate='reserve', which takes its room at once"
            raise DiskSpaceError(length, system.available_bytes(directory), directory, remedy) from error
        finally:
            os.close(file)

    def _require_whole(self, file: int) -> None:
        # Asking for blocks beyond its end would make a file that was cut as long again, with zeros.
        size = os.fstat(file).st_size
        if size < self._size:
            raise OSError(
                errno.EIO,
                f"the table file {str(self._path)!r} was truncated while it was open, {size:,} bytes instead "
                f"of {self._size:,}: restore it from a copy",
            )


def _own_places(pages: NDArray[np.int64], starts: Rows) -> list[int]:
    """Return for each page where it holds a byte of one of the stretches that begin at `starts`."""
    begins = pages * _PAGE
    following = np.append(starts, np.iinfo(np.int64).max)[np.searchsorted(starts, begins)]
    # A page in which no stretch begins is the continuation of one.
    places: list[int] = np.where(following < begins + _PAGE, following, begins).tolist()
    return places


def _most_pages(first: Rows, last: Rows) -> int:
    """Return the pages under the stretch that has most of them but one, which is its last."""
    return int((last - first).max()) if len(first) else 0
