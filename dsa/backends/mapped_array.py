"""One field of a live Zarr table, as files that are mapped: a shard's data is a plain array."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from dsa.backends import system
from dsa.backends.cold_reads import page_runs
from dsa.backends.holes import Holes, written_stretches
from dsa.backends.mapping import map_file, opened
from dsa.backends.room import reserve_range
from dsa.backends.shards.encoding import index_bytes, raw_index
from dsa.backends.shards.layout import ArrayLayout
from dsa.backends.zarr_group import LABEL_BYTES, corrupt, shard_files, shard_label
from dsa.backends.zarr_growth import remove_rest
from dsa.kernels.checksums import factors
from dsa.kernels.columns import (
    Units,
    gather_column,
    gather_summed,
    scatter_column,
    scatter_summed,
    unit_of,
    units_of,
)
from dsa.kernels.layout import Words
from dsa.schema import Rows

__all__ = ["MappedArray", "make_shards"]


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
        sparse: Whether its shards were made without blocks for all rows.
        units: Units of the record before those of the field, for the checksum.

    Raises:
        StateCorruptError: a shard is missing, truncated, extended, damaged in its index or another one.
    """

    def __init__(
        self,
        table: Path,
        identity: str,
        layout: ArrayLayout,
        field: int,
        offset: int,
        *,
        writable: bool,
        sparse: bool,
        units: int = 0,
    ) -> None:
        self._table, self._identity, self._field = table, identity, field
        self._layout = layout
        self._unit = unit_of(layout.spec.row_bytes)
        self._column = offset // self._unit.itemsize
        self.width = layout.spec.row_bytes // self._unit.itemsize
        self._factors = factors(units + self.width)[units:]
        self._sparse = sparse
        self._follow(layout)
        self._writable = writable
        # What a process before this one has written may be in the page cache only.
        self._unsynced = set(range(layout.shards)) if writable else set()
        self._mappings: list[mmap.mmap] = []
        self._shards: list[Units] = []
        self._holes: list[Holes | None] = []
        try:
            for shard in range(layout.shards):
                self._map(shard)
        except BaseException:
            self.release()
            raise

    def gather(self, rows: Rows, records: NDArray[Any], sums: Words | None = None) -> None:
        """Fill the field of records, and add it to their checksums."""
        units = units_of(records, self._unit)
        for shard, start, stop in self._parts(rows):
            table, first = self._shards[shard], self._bounds[shard]
            part, some = units[start:stop], rows[start:stop]
            if sums is None:
                gather_column(table, some, first, part, self._column)
            else:
                gather_summed(table, some, first, part, self._column, self._factors, sums[start:stop])

    def scatter(self, rows: Rows, records: NDArray[Any], sums: Words | None = None) -> None:
        """Write the field of records, and add it to their checksums."""
        units = units_of(records, self._unit)
        for shard, start, stop in self._parts(rows):
            table, first = self._shards[shard], self._bounds[shard]
            part, some = units[start:stop], rows[start:stop]
            try:
                if sums is None:
                    scatter_column(table, some, first, part, self._column)
                else:
                    scatter_summed(table, some, first, part, self._column, self._factors, sums[start:stop])
            finally:
                self._unsynced.add(shard)  # afterwards: a flush that began before must not count for it

    @property
    def shard_rows(self) -> int:
        """Rows of a shard."""
        return self._layout.shard_rows

    @property
    def shards(self) -> Sequence[Units]:
        """The shards as they are mapped, each a matrix with a row of the field in a row."""
        return tuple(self._shards)

    def note_changed(self, shards: Iterable[int]) -> None:
        """Take in that shards were written to, not by `scatter`."""
        self._unsynced.update(shards)

    def holes_under(self, rows: Rows) -> NDArray[np.bool_]:
        """Tell of which rows some page may be a hole."""
        found = np.zeros(len(rows), np.bool_)
        for holes, part, starts in self._sparse_parts(rows):
            found[part.start : part.stop] = holes.under(starts, self._layout.spec.row_bytes)
        return found

    def note_whole(self, rows: Rows) -> None:
        """Take in that the pages under rows are no holes."""
        for holes, _, starts in self._sparse_parts(rows):
            holes.note(starts, self._layout.spec.row_bytes)

    def fill_holes(self, rows: Rows) -> None:
        """Give blocks to the pages under rows; see `Holes.fill`."""
        for holes, _, starts in self._sparse_parts(rows):
            holes.fill(starts, self._layout.spec.row_bytes)

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
                system.sync_mapped(self._mappings[shard], self._files[shard])
            except BaseException:
                self._unsynced.add(shard)
                raise

    def release(self) -> None:
        """Unmap the shards."""
        mappings, self._mappings = self._mappings, []
        self._shards, self._holes = [], []
        for mapping in mappings:
            # An exception that is still being handled may hold a view; the mapping goes when that goes.
            with contextlib.suppress(BufferError):
                mapping.close()

    def extend(self, layout: ArrayLayout) -> None:
        """Take room for more rows: the rest of the last shard, and new ones.

        Args:
            layout: How the longer array is cut.

        Raises:
            DiskSpaceError: there is not enough room; nothing has changed.
            OSError: the system refuses; likewise.
        """
        former, shards = self._layout, self._layout.shards
        files = shard_files(self._table, layout)
        try:
            if not self._sparse:
                first = int(self._bounds[shards - 1])
                used, wanted = (min(each.spec.rows - first, each.shard_rows) for each in (former, layout))
                length = layout.spec.row_bytes
                with opened(files[shards - 1], os.O_RDWR) as file:
                    reserve_range(file, used * length, wanted * length, str(self._table.parent))
            for file_left in files[shards:]:
                file_left.unlink(missing_ok=True)  # by an interrupted growth
            make_shards(
                self._table, self._identity, layout, self._field, reserve=not self._sparse, first=shards
            )
            self._follow(layout)
            for shard in range(shards, layout.shards):
                self._map(shard)
        except BaseException:
            self._follow(former)
            del self._mappings[shards:], self._shards[shards:], self._holes[shards:]
            for file_made in files[shards:]:
                file_made.unlink(missing_ok=True)
            raise
        self._unsynced.update(range(shards, layout.shards))

    def shorten(self, layout: ArrayLayout) -> None:
        """Let go of rows that are nobody's: whole shards, and what the last one holds.

        Args:
            layout: How the shorter array is cut.
        """
        shards = layout.shards
        remove_rest(self._table, layout)
        self._follow(layout)
        self._unsynced.difference_update(range(shards, max(self._unsynced, default=0) + 1))
        del self._mappings[shards:], self._shards[shards:], self._holes[shards:]
        used = (layout.spec.rows - int(self._bounds[shards - 1])) * layout.spec.row_bytes
        mapping = self._mappings[-1]
        for start, stop in written_stretches(self._files[-1], used):
            if start < layout.shard_bytes:
                mapping[start : min(stop, layout.shard_bytes)] = bytes(min(stop, layout.shard_bytes) - start)
        system.sync_mapped(mapping, self._files[-1])

    def files_from(self, row: int) -> list[Path]:
        """Return the files of the shards that begin at a row or behind it."""
        return self._files[-(-row // self._layout.shard_rows) :]

    def _follow(self, layout: ArrayLayout) -> None:
        self._layout = layout
        self._bounds = np.arange(layout.shards + 1) * layout.shard_rows
        self._files = shard_files(self._table, layout)

    def _map(self, shard: int) -> None:
        layout, table = self._layout, self._table
        label = shard_label(self._identity, self._field, shard)
        path, where = self._files[shard], f"shard {shard} of its field {self._layout.spec.name!r}"
        expected = _file_bytes(layout)
        try:
            with opened(path, os.O_RDWR if self._writable else os.O_RDONLY) as file:
                size = os.fstat(file).st_size
                if size != expected:
                    what = "truncated" if size < expected else "longer than it was made"
                    sizes = f"{size:,} bytes instead of {expected:,}"
                    raise corrupt(
                        table,
                        f"is damaged: {where} ({path.name!r} in {str(path.parent)!r}) is {what}, {sizes}",
                    )
                mapping = map_file(file, path, size, self._writable)
                whole = not self._sparse and system.is_allocated(file, self._needed_bytes(shard))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise corrupt(table, f"lacks {where}") from error
        self._mappings.append(mapping)
        if mapping[layout.shard_bytes :] != label + raw_index(layout.chunks_per_shard, layout.chunk_bytes):
            raise corrupt(table, f"has a damaged or foreign file in place of {where}")
        # The rows beyond the array's end are never touched.
        units = np.frombuffer(mapping, self._unit, layout.shard_bytes // self._unit.itemsize)
        self._shards.append(units.reshape(layout.shard_rows, -1))
        self._holes.append(Holes(path, mapping, size) if self._writable and not whole else None)

    def _needed_bytes(self, shard: int) -> int:
        """Return what a shard occupies whose rows all have blocks: of the last one, some rows are no rows."""
        spec = self._layout.spec
        used = min(self._layout.shard_bytes, (spec.rows - int(self._bounds[shard])) * spec.row_bytes)
        tail = self._layout.shard_bytes - self._layout.shard_bytes % system.PAGE
        return used + (_file_bytes(self._layout) - max(used, tail))

    def _parts(self, rows: Rows) -> Iterator[_Part]:
        if len(self._shards) == 1:
            yield _Part(0, 0, len(rows))
            return
        cuts = np.searchsorted(rows, self._bounds).tolist()
        for shard in range(len(self._shards)):
            if cuts[shard] < cuts[shard + 1]:
                yield _Part(shard, cuts[shard], cuts[shard + 1])

    def _sparse_parts(self, rows: Rows) -> Iterator[tuple[Holes, _Part, Rows]]:
        """Yield the rows of each shard that may have holes: the holes, which rows, and where they lie."""
        for part in self._parts(rows):
            holes = self._holes[part.shard]
            if holes is not None and part.stop > part.start:
                places = rows[part.start : part.stop] - self._bounds[part.shard]
                yield holes, part, places * self._layout.spec.row_bytes

    def _announce(self, shard: int, starts: list[int], lengths: list[int]) -> None:
        # Announcing is advice; what is wrong with a file shows when it is read.
        with contextlib.suppress(OSError), opened(self._files[shard], os.O_RDONLY) as file:
            system.announce_ranges(file, starts, lengths)


def _file_bytes(layout: ArrayLayout) -> int:
    return layout.shard_bytes + LABEL_BYTES + index_bytes(layout.chunks_per_shard)


def make_shards(
    table: Path, identity: str, layout: ArrayLayout, field: int, *, reserve: bool, first: int = 0
) -> None:
    """Make the files of an array, all of whose rows are zero.

    Args:
        table: The table's directory.
        identity: The table's id.
        layout: How the array is cut.
        field: The field's place in the record.
        reserve: Whether the rows' blocks are allocated now; otherwise each is when it is first written.
        first: The first shard to be made.

    Raises:
        DiskSpaceError: there is not enough room.
    """
    left = layout.spec.rows * layout.spec.row_bytes - first * layout.shard_bytes
    for shard, path in enumerate(shard_files(table, layout)[first:], first):
        path.parent.mkdir(parents=True, exist_ok=True)
        with opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
            if reserve:
                system.reserve(file, min(left, layout.shard_bytes), str(table.parent))
            os.ftruncate(file, layout.shard_bytes)
            os.lseek(file, 0, os.SEEK_END)
            label = shard_label(identity, field, shard)
            os.write(file, label + raw_index(layout.chunks_per_shard, layout.chunk_bytes))
        left -= layout.shard_bytes
