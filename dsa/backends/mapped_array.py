"""One field of a live Zarr table, as files that are mapped: a shard's data is a plain array."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, final

import numpy as np

from dsa import system
from dsa.backends.cold_reads import page_runs
from dsa.backends.mapping import map_file
from dsa.backends.zarr_group import LABEL_BYTES, corrupt, shard_files, shard_label
from dsa.kernels.columns import Units, gather_column, scatter_column, unit_of, units_of
from dsa.schema import Records, Rows
from dsa.shards.encoding import index_bytes, raw_index
from dsa.shards.layout import ArrayLayout

__all__ = ["MappedArray", "make_shards"]

_MODE: Final = getattr(os, "O_BINARY", 0)


class _Part(NamedTuple):
    shard: int
    start: int
    stop: int


@final
class MappedArray:
    """The shards of one field.

    Args:
        table: The table's directory.
        identity: The table's id.
        layout: How the array is cut.
        field: The field's place in the record.
        offset: Where the field lies in a record, in bytes.
        writable: Whether it may be written to.

    Raises:
        StateCorruptError: a shard is missing, truncated, extended, damaged in its index or another one.
    """

    def __init__(
        self, table: Path, identity: str, layout: ArrayLayout, field: int, offset: int, writable: bool
    ) -> None:
        self._layout = layout
        self._unit = unit_of(layout.spec.row_bytes)
        self._column = offset // self._unit.itemsize
        self._bounds = np.arange(layout.shards + 1) * layout.shard_rows
        self._files = shard_files(table, layout)
        self._mode = (os.O_RDWR if writable else os.O_RDONLY) | _MODE
        # What a process before this one has written may be in the page cache only.
        self._unsynced = set(range(layout.shards)) if writable else set()
        self._mappings: list[mmap.mmap] = []
        self._shards: list[Units] = []
        try:
            for shard in range(layout.shards):
                self._map(table, shard_label(identity, field, shard), shard)
        except BaseException:
            self.release()
            raise

    def gather(self, rows: Rows, records: Records) -> None:
        """Fill the field of records."""
        units = units_of(records, self._unit)
        for shard, start, stop in self._parts(rows):
            gather_column(
                self._shards[shard], rows[start:stop], self._bounds[shard], units[start:stop], self._column
            )

    def scatter(self, rows: Rows, records: Records) -> None:
        """Write the field of records."""
        units = units_of(records, self._unit)
        for shard, start, stop in self._parts(rows):
            try:
                scatter_column(
                    self._shards[shard],
                    rows[start:stop],
                    self._bounds[shard],
                    units[start:stop],
                    self._column,
                )
            finally:
                self._unsynced.add(shard)  # afterwards: a flush that began before must not count for it

    def copy_range(self, first: int, records: Records) -> None:
        """Fill the field of the records of consecutive rows."""
        units, done, width = units_of(records, self._unit), 0, self._shards[0].shape[1]
        while done < len(records):
            shard, at = divmod(first + done, self._layout.shard_rows)
            block = self._shards[shard][at : at + len(records) - done]
            units[done : done + len(block), self._column : self._column + width] = block
            done += len(block)

    def announce(self, rows: Rows) -> None:
        """Announce the pages of rows to the system."""
        length = self._layout.spec.row_bytes
        for shard, start, stop in self._parts(rows):
            runs = page_runs((rows[start:stop] - self._bounds[shard]) * length, length)
            self._announce(shard, *runs)

    def announce_range(self, first: int, stop: int) -> None:
        """Announce the pages of consecutive rows to the system."""
        length = self._layout.spec.row_bytes
        while first < stop:
            shard, at = divmod(first, self._layout.shard_rows)
            count = min(stop - first, self._layout.shard_rows - at)
            self._announce(shard, [at * length], [count * length])
            first += count

    def flush(self) -> None:
        """Return once what was written to the shards is on the device."""
        for shard in sorted(self._unsynced):
            self._unsynced.discard(shard)
            try:
                with self._open(shard) as file:
                    system.sync_mapping(self._mappings[shard], file)
            except BaseException:
                self._unsynced.add(shard)
                raise

    def release(self) -> None:
        """Unmap the shards."""
        mappings, self._mappings = self._mappings, []
        self._shards = []
        for mapping in mappings:
            # An exception that is still being handled may hold a view; the mapping goes when that goes.
            with contextlib.suppress(BufferError):
                mapping.close()

    def _map(self, table: Path, label: bytes, shard: int) -> None:
        layout = self._layout
        where = f"shard {shard} of its field {layout.spec.name!r}"
        expected = _file_bytes(layout)
        try:
            with self._open(shard) as file:
                size = os.fstat(file).st_size
                if size != expected:
                    what = "truncated" if size < expected else "longer than it was made"
                    raise corrupt(table, f"is damaged: {where} is {what}, {size:,} bytes")
                mapping = map_file(file, self._files[shard], size, self._mode & os.O_RDWR != 0)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise corrupt(table, f"lacks {where}") from error
        except OSError as error:
            raise (_too_many(table, error) if error.errno == errno.EMFILE else error) from None
        self._mappings.append(mapping)
        if mapping[layout.shard_bytes :] != label + raw_index(layout.chunks_per_shard, layout.chunk_bytes):
            raise corrupt(table, f"has a damaged or foreign file in place of {where}")
        # The rows beyond the array's end are never touched.
        units = np.frombuffer(mapping, self._unit, layout.shard_bytes // self._unit.itemsize)
        self._shards.append(units.reshape(layout.shard_rows, -1))

    def _parts(self, rows: Rows) -> Iterator[_Part]:
        if len(self._shards) == 1:
            yield _Part(0, 0, len(rows))
            return
        cuts = np.searchsorted(rows, self._bounds).tolist()
        for shard in range(len(self._shards)):
            if cuts[shard] < cuts[shard + 1]:
                yield _Part(shard, cuts[shard], cuts[shard + 1])

    def _announce(self, shard: int, starts: list[int], lengths: list[int]) -> None:
        # Announcing is advice; what is wrong with a file shows when it is read.
        with contextlib.suppress(OSError), self._open(shard) as file:
            system.announce_ranges(file, starts, lengths)

    def _open(self, shard: int) -> contextlib.AbstractContextManager[int]:
        # A mapping keeps a descriptor of its own: with another one for each shard there would be too many.
        return _closing(os.open(self._files[shard], self._mode))


@contextlib.contextmanager
def _closing(file: int) -> Iterator[int]:
    try:
        yield file
    finally:
        os.close(file)


def _file_bytes(layout: ArrayLayout) -> int:
    return layout.shard_bytes + LABEL_BYTES + index_bytes(layout.chunks_per_shard)


def _too_many(table: Path, error: OSError) -> OSError:
    return OSError(
        error.errno,
        f"the shards of the table {str(table)!r} can't all be mapped ({error.strerror}): raise the limit "
        "(ulimit -n), or make the table with larger shards, backend=Zarr(shard_bytes=...)",
    )


def make_shards(table: Path, identity: str, layout: ArrayLayout, field: int, *, reserve: bool) -> None:
    """Make the files of an array, all of whose rows are zero.

    Args:
        table: The table's directory.
        identity: The table's id.
        layout: How the array is cut.
        field: The field's place in the record.
        reserve: Whether the rows' blocks are allocated now; otherwise each is when it is first written.

    Raises:
        DiskSpaceError: there is not enough room.
    """
    left = layout.spec.rows * layout.spec.row_bytes
    for shard, path in enumerate(shard_files(table, layout)):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _closing(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _MODE, 0o644)) as file:
            if reserve:
                system.reserve(file, min(left, layout.shard_bytes), str(table.parent))
            os.ftruncate(file, layout.shard_bytes)
            os.lseek(file, 0, os.SEEK_END)
            label = shard_label(identity, field, shard)
            os.write(file, label + raw_index(layout.chunks_per_shard, layout.chunk_bytes))
        left -= layout.shard_bytes
