"""The file of a map from ids to rows: what is in it, when it is trusted, and how it grows.

A header page, then segments of ``width`` slots of 16 bytes, as `dsa.kernels.id_map` has them; all numbers are
little-endian. The header's words of 64 bits: 0 and 1 the magic, 2 the seed, 3 the width, 4 the length in
segments when it was closed, 5 a checksum of the directory, 6 one of the page in which this word is 0; from 8
on what the kernels keep; from 16 on the state, what the map was closed with, and who has it open.
Directories of up to 256 entries lie in the page's second half, that of depth d from entry 2^d on; larger ones
in segments of their own. `DIRECTORY` holds the depth, and 256 times the segment where the directory begins.

The file never shrinks, and a directory that was replaced stays where it is: whoever reads beside a writer
can't be led out of the file. Blocks are taken before anything is stored to them, the length is doubled in
advance, as a hole: so the file is seldom mapped anew.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import zlib
from pathlib import Path
from typing import Final, NoReturn, final

import numpy as np
from numpy.typing import NDArray

from dsa.backends import system
from dsa.backends.births import file_number
from dsa.backends.mapping import map_file, opened
from dsa.errors import DiskSpaceError, StateCorruptError
from dsa.kernels.id_map import (
    COUNT,
    DIRECTORY,
    NOTED,
    SEQUENCE,
    SPARE,
    USED,
    IdTable,
    check_directory,
    renew_segment,
)

__all__ = ["REPLACED", "IdMapFile", "retire", "segments_of"]

_MAGIC: Final = b"dsa-id-map-1\n\0\0\0"
_WORDS: Final = system.PAGE // 8
_SEED, _WIDTH, _LENGTH, _DIRECTORY_SUM, _PAGE_SUM = 2, 3, 4, 5, 6
_STATE: Final = 16
_TOKEN: Final = slice(17, 19)
_BOOT: Final = slice(19, 21)
_NUMBER: Final = slice(21, 23)
_OPENED: Final = 23
_WHOLE, _IN_USE, REPLACED = 1, 2, 3
_IN_PAGE: Final = 8
"""The largest depth of a directory that lies in the header page."""
_DEEPEST: Final = 32
_FEWEST_SLOTS, _MOST_SLOTS = 16, 1 << 20
_LARGEST_STEP: Final = 64 << 20
"""Bytes for which blocks are taken at once, at most."""


@final
class IdMapFile:
    """An open file of a map. `create` and `open` make one.

    Attributes:
        path: Where it was opened.
        writable: Whether it may be changed.
        table: Its memory for the kernels, replaced when the file or the directory grows.
        interrupted: Whether whoever changed it last has not closed it.
    """

    def __init__(self, file: int, path: Path, writable: bool) -> None:
        """Map an open file that was checked, and is this object's from then on."""
        self.path, self.writable, self.interrupted = path, writable, False
        self._file = file
        header = np.frombuffer(system.read_at(file, system.PAGE, 0), np.int64)
        self._width, self._seed = int(header[_WIDTH]), header[_SEED : _SEED + 1].view(np.uint64)[0]
        self._mapping: mmap.mmap | None = None
        self._reserved = 0
        self.table = _no_table()
        self.remap()

    @classmethod
    def create(cls, path: Path, width: int, seed: int) -> IdMapFile:
        """Make a map of no ids, in use; nothing is left behind when that fails.

        Raises:
            FileExistsError: the file exists.
            DiskSpaceError: there is not enough room.
        """
        if not _FEWEST_SLOTS <= width <= _MOST_SLOTS:
            raise ValueError(
                f"width={width!r} is out of range: pass {_FEWEST_SLOTS} to {_MOST_SLOTS} slots of a segment"
            )
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o644)
        made = None
        try:
            size = system.PAGE + width * 16
            os.ftruncate(file, size)
            _take_blocks(file, 0, size, path.parent)
            header = np.zeros(_WORDS, np.int64)
            header[[_WIDTH, USED]] = width, 1
            header[_SEED] = np.uint64(seed % 2**64).view(np.int64)
            system.write_at(file, header.tobytes(), 0)
            made = cls(file, path, writable=True)
            made._reserved = 1
            made.mark_in_use()
            header[:2] = np.frombuffer(_MAGIC, np.int64)
            made.table.header[:2] = header[:2]
            return made
        except BaseException:
            os.close(file) if made is None else made.release()
            os.unlink(path)
            raise

    @classmethod
    def open(cls, path: Path, token: str | None, *, writable: bool) -> IdMapFile:
        """Open a map that can be trusted, having put right what a killed process was changing.

        Args:
            path: The file.
            token: What it was closed with; None for anything.
            writable: Whether it is to be changed.

        Raises:
            StateCorruptError: it can't be trusted: it is missing, not one, damaged, was closed with something
                else, or was being changed when the system went down or when it was copied.
        """
        mode = os.O_RDWR if writable else os.O_RDONLY
        try:
            file = os.open(path, mode | getattr(os, "O_BINARY", 0))
        except (FileNotFoundError, IsADirectoryError):
            _distrust(path, "missing")
        found = None
        try:
            _check_header(file, path, token)
            found = cls(file, path, writable)
            found._settle_in()
            return found
        except BaseException as error:
            moved = _leads_elsewhere(path, file)
            os.close(file) if found is None else found.release()
            if moved and not writable and isinstance(error, StateCorruptError):
                return cls.open(path, token, writable=False)
            raise

    def remap(self) -> IdTable:
        """Map the file as long as it is by now; return its memory."""
        length = (os.fstat(self._file).st_size - system.PAGE) // (self._width * 16)
        size = system.PAGE + length * self._width * 16
        mapping = map_file(self._file, self.path, size, self.writable)
        former, self._mapping = self._mapping, mapping
        words = np.frombuffer(mapping, np.int64)
        header, slots = words[:_WORDS], words[_WORDS:].reshape(-1, 2)
        self.table = IdTable(header, self.table.directory, slots, self._width, self._seed, -1)
        if former is not None:
            with contextlib.suppress(BufferError):  # a thread that is reading keeps it until it has done
                former.close()
        return self.find_directory()

    def find_directory(self) -> IdTable:
        """Return the memory with the directory that is valid by now.

        Raises:
            StateCorruptError: there is none where it should be.
        """
        placed = int(self.table.header[DIRECTORY])
        directory = _directory(self.table, placed)
        if directory is None:
            _distrust(self.path, "damaged: its directory lies outside of the file")
        self.table = self.table._replace(directory=directory, placed=placed)
        return self.table

    @property
    def state(self) -> int:
        """Whether it is in use, or whole, or was replaced by another file."""
        return int(self.table.header[_STATE])

    @property
    def whole(self) -> bool:
        """Whether it is as it was closed."""
        return self.state == _WHOLE

    @property
    def segments(self) -> int:
        """Segments that have been handed out."""
        return int(self.table.header[USED])

    def mark_in_use(self) -> None:
        """Say that it is being changed, and by which system."""
        header = self.table.header
        header[_BOOT], header[_NUMBER] = _identity(self.path)
        header[_TOKEN] = 0
        header[_OPENED] += 1  # the page is written to the device, whatever was there
        header[_STATE] = _IN_USE

    def seal(self, token: str) -> None:
        """Say that it is whole; what it holds has to be on the device."""
        page = np.array(self.table.header)
        page[[_LENGTH, _STATE, _PAGE_SUM]] = len(self.table.slots) // self.table.width, _WHOLE, 0
        page[NOTED] = 0
        page[_TOKEN], page[_BOOT], page[_NUMBER] = _digest(token), 0, 0
        page[_DIRECTORY_SUM] = zlib.crc32(self.table.directory.tobytes())
        page[_PAGE_SUM] = zlib.crc32(page.tobytes())
        self.table.header[:] = page

    def flush(self) -> None:
        """Write every changed page to the device and wait for it."""
        if self._mapping is not None:
            system.sync_mapping(self._mapping, self._file)

    def flush_header(self) -> None:
        """Write the header to the device and wait for it."""
        if self._mapping is not None:
            self._mapping.flush(0, max(system.PAGE, mmap.PAGESIZE))
            system.sync_file(self._file)

    def make_room(self, segments: int) -> None:
        """Take the blocks of segments that are to be handed out next.

        Raises:
            DiskSpaceError: there are not enough; nothing has changed.
        """
        needed, size = self.segments + segments, self.table.width * 16
        if needed <= self._reserved:
            return
        ahead = min(self._reserved // 8, _LARGEST_STEP // size)
        wanted = max(needed, self._reserved + ahead)
        length = len(self.table.slots) // self.table.width
        if wanted > length:
            os.ftruncate(self._file, system.PAGE + max(wanted, 2 * length) * size)
            self.remap()
        try:
            self._take(wanted)
        except DiskSpaceError:
            self._take(needed)

    def double_directory(self) -> None:
        """Put a directory of twice as many entries in the place of this one."""
        depth = int(self.table.header[DIRECTORY]) % 256 + 1
        placed = depth
        if depth > _IN_PAGE:
            count = -(-(4 << depth) // (self.table.width * 16))
            self.make_room(count)
            placed += 256 * self.segments
            self.table.header[USED] += count
        larger = _directory(self.table, placed)
        assert larger is not None
        larger[0::2] = larger[1::2] = self.table.directory
        self.table.header[DIRECTORY] = placed
        self.find_directory()

    def release(self) -> None:
        """Unmap and close the file."""
        mapping, self._mapping = self._mapping, None
        self.table = _no_table()
        if mapping is not None:
            with contextlib.suppress(BufferError):
                mapping.close()
        os.close(self._file)

    def _take(self, segments: int) -> None:
        size = self.table.width * 16
        start, stop = (system.PAGE + each * size for each in (self._reserved, segments))
        _take_blocks(self._file, start, stop, self.path.parent)
        self._reserved = segments

    def _settle_in(self) -> None:
        """Check the directory, and where the map may be changed put it right and take blocks of its holes."""
        header, table = self.table.header, self.table
        self.interrupted = not self.whole
        if self.interrupted and not self.writable:
            return  # its writer may be alive; the kernels check what they are led to
        if not check_directory(table.directory, int(header[USED])):
            _distrust(self.path, "damaged in its directory")
        if self.whole and zlib.crc32(table.directory.tobytes()) != header[_DIRECTORY_SUM]:
            _distrust(self.path, "damaged in its directory")
        if not self.writable:
            return
        # A copy may have holes.
        self._take(self.segments)
        if self.interrupted:
            self._mend()

    def _mend(self) -> None:
        header = self.table.header
        noted = int(header[NOTED]) - 1
        if noted in self.table.directory:
            self.make_room(1)
            renew_segment(self.table, noted)
        last = (segments_of(self.table.directory) + 1) * self.table.width - 1
        self.table.header[COUNT] = self.table.slots[last, 0].sum()
        sequence = int(self.table.header[SEQUENCE])
        self.table.header[SEQUENCE] = (sequence + sequence % 2) % 2**62


def segments_of(directory: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Return the segments that a directory names, each once: the entries of one lie together."""
    first = np.ones(len(directory), np.bool_)
    np.not_equal(directory[1:], directory[:-1], out=first[1:])
    return directory[first].astype(np.int64)


def retire(path: Path) -> None:
    """Tell those who read a map that another one takes its place; nothing is done to other files."""
    with contextlib.suppress(FileNotFoundError), opened(path, os.O_RDWR) as file:
        if system.read_at(file, len(_MAGIC), 0) == _MAGIC:
            system.write_at(file, REPLACED.to_bytes(8, "little"), 8 * _STATE)


def _no_table() -> IdTable:
    """Return memory that no id is in, nor can be: whoever looks for one has to ask again."""
    header, directory = np.zeros(_WORDS, np.int64), np.zeros(1, np.uint32)
    return IdTable(header, directory, np.empty((0, 2), np.int64), 1, np.uint64(0), -1)


def _directory(table: IdTable, placed: int) -> NDArray[np.uint32] | None:
    depth, segment = placed % 256, placed // 256
    if placed < 0 or depth > _DEEPEST or (depth <= _IN_PAGE) != (segment == 0):
        return None
    if depth <= _IN_PAGE:
        return table.header[_WORDS // 2 :].view(np.uint32)[1 << depth : 2 << depth]
    start = segment * table.width
    if start + (4 << depth) // 16 > len(table.slots):
        return None
    return table.slots[start : start + (4 << depth) // 16].reshape(-1).view(np.uint32)


def _leads_elsewhere(path: Path, file: int) -> bool:
    """Tell whether another file has taken the place of an open one."""
    try:
        return not os.path.samestat(os.stat(path), os.fstat(file))
    except OSError:
        return False


def _check_header(file: int, path: Path, token: str | None) -> None:
    """Check what has to hold before a file is mapped.

    Raises:
        StateCorruptError: it does not.
    """
    page = system.read_at(file, system.PAGE, 0)
    if len(page) < system.PAGE or not page.startswith(_MAGIC):
        _distrust(path, "truncated, damaged in its header or not one of dsa's")
    header = np.frombuffer(page, np.int64)
    width = int(header[_WIDTH])
    if not _FEWEST_SLOTS <= width <= _MOST_SLOTS:
        _distrust(path, "damaged in its header")
    length, rest = divmod(os.fstat(file).st_size - system.PAGE, width * 16)
    state = int(header[_STATE])
    if state == _WHOLE:
        _check_seal(header, path, token)
        if (length, rest) != (int(header[_LENGTH]), 0):
            _distrust(path, "truncated or extended")
    elif state != _IN_USE or not _same_identity(header, path):
        _distrust(path, "not whole: it was being changed when the system went down, or is a copy")
    used, spare, count = (int(header[each]) for each in (USED, SPARE, COUNT))
    sound = 1 <= used <= length and 0 <= spare <= used and 0 <= count <= used * width and not rest
    if not sound:
        _distrust(path, "damaged in its header, or truncated")


def _check_seal(header: NDArray[np.int64], path: Path, token: str | None) -> None:
    page = np.array(header)
    page[_PAGE_SUM] = 0
    if zlib.crc32(page.tobytes()) != header[_PAGE_SUM]:
        _distrust(path, "damaged in its header")
    if token is not None and not np.array_equal(header[_TOKEN], _digest(token)):
        _distrust(path, f"of another moment than {token!r}")


def _distrust(path: Path, what: str) -> NoReturn:
    raise StateCorruptError(
        f"the id map {str(path)!r} is {what}: rebuild it from the ids that the table's rows have"
    )


def _identity(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the run of the system, and the number of the file in it; of 16 bytes each."""
    number = file_number(path) % 2**128
    return _digest(system.boot_identity()), np.frombuffer(number.to_bytes(16, "little"), np.int64)


def _same_identity(header: NDArray[np.int64], path: Path) -> bool:
    boot, number = _identity(path)
    known = system.boot_identity() != ""
    return known and np.array_equal(header[_BOOT], boot) and np.array_equal(header[_NUMBER], number)


def _digest(text: str) -> NDArray[np.int64]:
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), np.int64)


def _take_blocks(file: int, start: int, stop: int, directory: Path) -> None:
    """Give blocks to a range of a file that holds nothing yet, or has them already.

    Raises:
        DiskSpaceError: there are not enough.
    """
    length, remedy = stop - start, "or remove ids and rebuild the map"
    try:
        if not system.allocate_range(file, start, length):
            _fill(file, start, stop)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        free = system.available_bytes(directory)
        raise DiskSpaceError(length, free, str(directory), remedy) from error


def _fill(file: int, start: int, stop: int) -> None:
    """Write what a range holds again, so that it has blocks, where the system can't allocate them."""
    for begin in range(start, stop, 1 << 20):
        size = min(stop, begin + (1 << 20)) - begin
        system.write_at(file, system.read_at(file, size, begin).ljust(size, b"\0"), begin)
