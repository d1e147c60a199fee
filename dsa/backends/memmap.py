"""Records in one memory-mapped file per table: the default, and the fast path.

A row's fields lie together in one record, because a cold step is bound by pages: with four files per table a
row of 128 elements costs 10.3 KiB of reading, with one record 5.1 KiB.

*The stride rule.* Records are packed unless a stride that never makes a record cross a page it need not cross
(a divisor of 4,096 bytes, or a multiple of it) costs at most an eighth more disk. A packed record of 1,548
bytes (128 elements) touches 1.37 pages on average; padding it to 2,048 would save that third and cost a third
of the disk. ``stride="page"`` pads whatever it costs.

File: a header page, see `dsa.backends.table_header`, then ``rows * stride`` bytes. The header repeats the
description and carries the table's id, so that truncated, extended, swapped and foreign files are told apart
from sound ones when the file is opened. A table grows at its end, see `dsa.backends.room`.

*Checksums.* Where records have a stamp, each is followed by a checksum of its words
(`dsa.kernels.checksums`), computed and verified while they are copied. A page that a loss of power has left
old beside a new one, or a bit that the disk has lost, is thereby known: the record is handed out with the
stamp `dsa.schema.TORN`.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import mmap
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, final

import numpy as np

from dsa.backends import system
from dsa.backends.base import GROWING, Visitor
from dsa.backends.cold_reads import ColdReads, page_runs
from dsa.backends.holes import Holes, written_stretches
from dsa.backends.mapping import Allocate, check_allocate, map_file, opened
from dsa.backends.room import cut, lengthen, sync_range
from dsa.backends.settling import settle
from dsa.backends.table_header import check_file, header_page
from dsa.errors import StateClosedError, StateCorruptError
from dsa.kernels.checksums import factors
from dsa.kernels.layout import Words, as_words
from dsa.kernels.rows import gather_checked, gather_words, scatter_checked, scatter_words
from dsa.kernels.threads import run_slices
from dsa.schema import Records, Rows, Schema, has_stamp

__all__ = ["Allocate", "MemmapBackend", "Stride", "choose_stride", "file_bytes", "stored_bytes"]

T = TypeVar("T")

Stride = int | Literal["packed", "page"] | None

_BLOCK_BYTES: Final = 4 << 20


def stored_bytes(schema: Schema) -> int:
    """Return the bytes of a record in the file: its checksum follows it, where it has a stamp.

    Example:
        >>> from dsa.schema import adam_schema
        >>> stored_bytes(adam_schema(dim=128))
        1548
    """
    return schema.dtype.itemsize + (4 if has_stamp(schema) else 0)


def choose_stride(record_bytes: int, stride: Stride = None) -> int:
    """Return the distance between two records in bytes, by the rule in the module's docstring.

    Raises:
        ValueError: an explicit stride is too short or not a multiple of four.

    Example:
        >>> choose_stride(1548), choose_stride(1548, "page"), choose_stride(500), choose_stride(6152, "page")
        (1548, 2048, 512, 8192)
    """
    if stride is None:
        page = _page_stride(record_bytes)
        return page if page - record_bytes <= record_bytes // 8 else record_bytes
    if stride == "packed":
        return record_bytes
    if stride == "page":
        return _page_stride(record_bytes)
    if not isinstance(stride, int) or isinstance(stride, bool) or stride < record_bytes or stride % 4:
        raise ValueError(
            f"stride={stride!r} can't hold records of {record_bytes} bytes: pass a multiple of 4 that is at "
            "least that, 'packed' or 'page'"
        )
    return stride


def _page_stride(record_bytes: int) -> int:
    if record_bytes > system.PAGE:
        return -(-record_bytes // system.PAGE) * system.PAGE
    return 1 << (record_bytes - 1).bit_length()


def file_bytes(rows: int, schema: Schema, stride: Stride = None) -> int:
    """Return the size of a table's file in bytes."""
    return system.PAGE + rows * choose_stride(stored_bytes(schema), stride)


@final
class MemmapBackend:
    """A `StateBackend` over one memory-mapped file.

    Make one with `create` or `open`. `write` copies; the array handed over may be used again.

    Example:
        >>> import tempfile
        >>> from dsa.schema import adam_schema
        >>> path = Path(tempfile.mkdtemp()) / "entity.rec"
        >>> backend = MemmapBackend.create(path, 1000, adam_schema(dim=2))
        >>> rows = np.array([7, 999])
        >>> records = backend.read(rows)
        >>> records["w"] = 1.5
        >>> backend.write(rows, records)
        >>> description = backend.describe()
        >>> backend.close()
        >>> backend = MemmapBackend.open(path, description)
        >>> backend.read(np.array([999]))["w"].tolist()
        [[1.5, 1.5]]
        >>> backend.close()
    """

    def __init__(self, file: int, path: Path, header: dict[str, Any], schema: Schema, writable: bool) -> None:
        """Map an open file, which is not needed afterwards; `create` and `open` are the ways to call this."""
        self._path = path
        self._header = header
        self._schema = schema
        self._rows: int = header["rows"]
        self._stride: int = header["stride"]
        self._dtype = schema.dtype
        self._record_bytes = stored_bytes(schema)
        # Without a stamp there is nothing to mark, and no checksum.
        self._stamp = schema.offset("s") // 4 if has_stamp(schema) else -1
        self._factors = factors(self._dtype.itemsize // 4)
        self._reads = ColdReads()
        size = self._bytes_of(self._rows)
        self._mapping: mmap.mmap | None = map_file(file, path, size, writable)
        self._former: list[mmap.mmap] = []  # letting go of one takes the longer, the more of it was used
        self._is_ahead = not writable
        self._table = self._over(self._mapping, self._rows)
        self._room = self._synced = self._rows  # those behind the table's are zero
        # A copy of a file that was reserved may have holes.
        whole = header["allocate"] == "reserve" and system.is_allocated(file, size)
        self._holes = None if whole or not writable else Holes(path, self._mapping, size)

    @classmethod
    def create(
        cls, path: Path, rows: int, schema: Schema, *, stride: Stride = None, allocate: Allocate = "reserve"
    ) -> MemmapBackend:
        """Create a table's file; nothing is left behind when that fails.

        Args:
            path: The file; it must not exist.
            rows: Number of rows N, >= 1.
            schema: Layout of a record.
            stride: None for the rule, ``"packed"``, ``"page"``, or bytes.
            allocate: ``"reserve"`` allocates every block now, so that no later step can run out of disk.
                ``"sparse"`` allocates a block when `reserve` names its rows, or when it is first written: a
                full disk then kills the process (SIGBUS).

        Raises:
            FileExistsError: the file exists.
            DiskSpaceError: there is not enough room.
            OSError: the file system can't hold or map such a file.
        """
        check_allocate(allocate)
        if rows < 1:
            raise ValueError(f"rows={rows!r} is out of range: pass at least 1")
        header: dict[str, Any] = {
            "kind": "memmap",
            "id": secrets.token_hex(8),
            "rows": rows,
            "layout": stride,
            "stride": choose_stride(stored_bytes(schema), stride),
            "allocate": allocate,
            "schema": schema.to_json(),
        }
        page = header_page(header)
        made = False
        try:
            with opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
                made = True
                size = system.PAGE + rows * header["stride"]
                if allocate == "reserve":
                    system.reserve(file, size, str(path.parent))
                else:
                    os.ftruncate(file, size)
                os.lseek(file, 0, os.SEEK_SET)
                os.write(file, page)
                return cls(file, path, header, schema, writable=True)
        except BaseException:
            if made:
                os.unlink(path)
            raise

    @classmethod
    def open(cls, path: Path, description: dict[str, Any], *, writable: bool = True) -> MemmapBackend:
        """Open a table's file, having checked that it is whole and the one described.

        Raises:
            StateCorruptError: the file is missing, truncated, extended, damaged in its header or another
                table's.
        """
        schema = Schema.from_json(description.get("schema"))
        try:
            with opened(path, os.O_RDWR if writable else os.O_RDONLY) as file:
                check_file(file, path, description)
                header = {key: value for key, value in description.items() if key != GROWING}
                return cls(file, path, copy.deepcopy(header), schema, writable)
        except (FileNotFoundError, IsADirectoryError) as error:
            raise StateCorruptError(
                f"the table file {str(path)!r} is missing: restore it from a copy, or start over"
            ) from error

    @property
    def schema(self) -> Schema:
        """The layout of one record."""
        return self._schema

    @property
    def records(self) -> Records:
        """The records as they lie in the file: an array ``(N,)`` over the mapping, without a copy.

        It can be written where the file was opened writable, past every check. It keeps the mapping alive
        beyond `close`.
        """
        # Over the table and not the mapping itself, which could be closed under the array.
        return np.ndarray((self._rows,), self._dtype, buffer=self._open_table(), strides=(self._stride,))

    def __len__(self) -> int:
        return self._rows

    def read(self, rows: Rows, out: Records | None = None) -> Records:
        """Return copies of the records of `rows`, in `out` if that is given."""
        self._open_table()
        records = np.empty(len(rows), self._dtype) if out is None else out
        self._reads.read(rows, self._announce, lambda: self._gather(rows, records))
        return records

    def write(self, rows: Rows, records: Records) -> None:
        """Replace the records of `rows`.

        Raises:
            OSError: the file was opened for reading only (EROFS).
        """
        table = self._writable_table()
        words = as_words(records)[0]

        def scatter(start: int, stop: int) -> None:
            if self._stamp < 0:
                scatter_words(table, rows[start:stop], words[start:stop])
            else:
                scatter_checked(table, rows[start:stop], words[start:stop], self._factors)

        run_slices(scatter, len(rows))

    @property
    def image_words(self) -> int:
        """Words of a record, and of the checksum behind it."""
        return self._record_bytes // 4

    def look(self, rows: Rows, visitor: Visitor[T]) -> list[T]:
        """Let a visitor read the records of `rows` where they are; see `InPlace.look`."""
        table = self._open_table()
        of_checksum = self._factors if self._stamp >= 0 else self._factors[:0]

        def run(start: int, stop: int) -> T:
            return self._reads.read(
                rows[start:stop], self._announce, lambda: visitor(table, of_checksum, rows, start, stop)
            )

        return run_slices(run, len(rows))

    def visit(self, rows: Rows, visitor: Visitor[T]) -> list[T]:
        """Let a visitor read and change the records of `rows` where they are; see `InPlace.visit`."""
        self._writable_table()
        return self.look(rows, visitor)

    def restore(self, rows: Rows, images: Words) -> None:
        """Put back words that were read from the records of `rows`, checksums included."""
        scatter_words(self._writable_table(), rows, np.ascontiguousarray(images))

    def reserve(self, rows: Rows) -> None:
        """Take the blocks under `rows` that have none; nothing is done for a file that has all of its blocks.

        Raises:
            DiskSpaceError: there are not enough.
        """
        self._open_table()
        if self._holes is None:
            return
        starts = system.PAGE + rows * self._stride
        unknown = self._holes.under(starts, self._record_bytes)
        if not unknown.any():
            return
        rows, starts = rows[unknown], starts[unknown]
        if self._stamp >= 0:
            # A record that was written whole has its blocks.
            sound = self.read(rows)["s"] > 0
            self._holes.note(starts[sound], self._record_bytes)
            starts = starts[~sound]
        self._holes.fill(starts, self._record_bytes)

    def make_room(self, rows: int) -> bool:
        """Lengthen the file, whose new part is zero; see `Growing.make_room`."""
        self._writable_table()
        former, rows = self._mapping, max(rows, self._room)
        if former is None or (rows == self._room and self._is_ahead):
            return True
        before, size = self._bytes_of(self._room), self._bytes_of(rows)
        reserve = self._header["allocate"] == "reserve"
        mapping = lengthen(self._path, former, before, size, unit=self._stride, reserve=reserve)
        self._is_ahead, self._room = True, rows
        if mapping is not former:
            self._former.append(former)
            self._mapping, self._table = mapping, self._over(mapping, self._rows)
        if self._holes is not None:
            self._holes.follow(mapping, size)
        return True

    def adopt_rows(self, rows: int) -> None:
        """Have so many rows, once the device holds that the file is so long; see `Growing.adopt_rows`."""
        self._writable_table()
        assert rows <= self._room, "make_room comes first"
        assert self._mapping is not None, "it is open"
        if rows > self._synced:
            sync_range(self._mapping, self._path, self._bytes_of(self._synced), self._bytes_of(rows))
        elif rows < self._rows:
            self._room = rows  # what was written behind them goes when there is to be room again
            if self._holes is not None:
                self._holes.follow(self._mapping, self._bytes_of(rows))
        self._table, self._rows, self._synced = self._over(self._mapping, rows), rows, rows
        self._header = {**self._header, "rows": rows}

    def scan(self, start: int, stop: int) -> Iterator[tuple[int, Records]]:
        """Yield consecutive blocks of ``[start, stop)``, a few megabytes each, reading one block ahead."""
        self._open_table()
        block = max(1, _BLOCK_BYTES // self._stride)
        self._announce_range(start, min(stop, start + block))
        for first in range(start, stop, block):
            last = min(stop, first + block)
            records = np.empty(last - first, self._dtype)
            self._gather(np.arange(first, last), records)
            self._announce_range(last, min(stop, last + block))
            yield first, records

    def written(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of rows, increasing, outside of which every byte is zero, as far as it is known."""
        self._open_table()
        done = 0
        for start, stop in written_stretches(self._path, system.PAGE):
            first = max(done, (start - system.PAGE) // self._stride)
            done = min(self._rows, -(-(stop - system.PAGE) // self._stride))
            if first < done:
                yield first, done

    def hint(self, rows: Rows) -> None:
        """Announce the pages of `rows` to the system, unless announcing has lately been for nothing."""
        self._open_table()
        self._reads.hint(rows, self._announce)

    def flush(self) -> None:
        """Write every changed page to the device and wait for it.

        Raises:
            OSError: the device has refused; what it refused may not be written again by a later flush.
        """
        if self._open_table().flags.writeable and self._mapping is not None:
            system.sync_mapped(self._mapping, self._path)

    def close(self) -> None:
        """Flush, unmap and close; closing twice is silent.

        A file opened for reading is not flushed: that would wait for what others are writing.
        """
        if self._mapping is None:
            return
        ends_at = self._bytes_of(self._rows) if self._table.flags.writeable else None
        try:
            self.flush()
        finally:
            self._release()
        cut(self._path, ends_at)

    def describe(self) -> dict[str, Any]:
        """Return the header, with the rows of now: kind, id, rows, stride and schema."""
        return copy.deepcopy(self._header)

    def _release(self) -> None:
        mapping, self._mapping = self._mapping, None
        self._table = np.empty((0, 0), np.int32)
        self._holes = None
        for each in self._former if mapping is None else [*self._former, mapping]:
            # An exception that is still being handled may hold a view; the mapping goes when that goes.
            with contextlib.suppress(BufferError):
                each.close()

    def _open_table(self) -> Words:
        if self._mapping is None:
            raise StateClosedError(
                f"the table file {str(self._path)!r} was closed: open the state directory again"
            )
        return self._table

    def _writable_table(self) -> Words:
        table = self._open_table()
        if not table.flags.writeable:
            raise OSError(
                errno.EROFS, f"the table file {str(self._path)!r} was opened for reading: open it writable"
            )
        return table

    def _bytes_of(self, rows: int) -> int:
        return system.PAGE + rows * self._stride

    def _over(self, mapping: mmap.mmap, rows: int) -> Words:
        words = self._stride // 4
        return np.frombuffer(mapping, np.int32, rows * words, system.PAGE).reshape(rows, words)

    def _gather(self, rows: Rows, records: Records) -> None:
        table, words = self._open_table(), as_words(records)[0]
        if self._stamp < 0:
            gather_words(table, rows, words)
        elif gather_checked(table, rows, words, self._factors, self._stamp):
            settle(self._gather_once, rows, records)

    def _gather_once(self, rows: Rows) -> Records:
        records = np.empty(len(rows), self._dtype)
        gather_checked(self._open_table(), rows, as_words(records)[0], self._factors, self._stamp)
        return records

    def _announce(self, rows: Rows) -> None:
        self._announce_runs(*page_runs(system.PAGE + rows * self._stride, self._record_bytes))

    def _announce_range(self, start: int, stop: int) -> None:
        if stop > start:
            begin, length = system.PAGE + start * self._stride, (stop - start) * self._stride
            self._announce_runs([begin], [length])

    def _announce_runs(self, starts: list[int], lengths: list[int]) -> None:
        # The mapping has a descriptor of its own; one more, kept for advice, would be one for each table.
        # Announcing is advice: without a descriptor, pages are read when they are needed.
        with contextlib.suppress(OSError), opened(self._path, os.O_RDONLY) as file:
            system.announce_ranges(file, starts, lengths)
