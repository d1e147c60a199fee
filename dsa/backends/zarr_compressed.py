"""Records as a Zarr group of compressed chunks: less disk, for many times the work.

A read decompresses the chunks of its rows, 64 rows each, unless the cache has them. A write rewrites every
shard that holds one of its rows, once, each of its chunks at most once: it is meant for large batches, which
`dsa.backends.writer.WriteBehind` collects. Space is taken as rows are written; a full disk is an error of
`write`.

Opened for reading only, and in a forked child, it goes on when another process replaces shards: each chunk
is of the old shard or the new one. What its cache holds is of the moment when it was read.

Damage is noticed: by the checksum of an index when the table is opened, by that of a chunk when it is read.
The rows of a damaged chunk are handed out with the stamp `dsa.schema.TORN`, and what else they hold is zero;
where records have no stamp to say so, it is an error. The fields' shards are replaced one after the other, so
that a loss of power can leave a row whose fields are of different times. A checksum for each row, the array
`c`, tells: such a row is handed out with that stamp too.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import itertools
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from dsa.backends.base import GROWING
from dsa.backends.chunk_cache import ChunkCache, Hold, run_bounds
from dsa.backends.cold_reads import ColdReads
from dsa.backends.compressed_array import CompressedArray, Replacement, make_empty_shards, mark_torn, sums_of
from dsa.backends.settling import settle
from dsa.backends.zarr_group import (
    check_group,
    corrupt,
    describe_group,
    sync_tree,
    write_group,
)
from dsa.backends.zarr_growth import all_layouts, extend_group, shorten_group
from dsa.errors import StateClosedError, StateCorruptError
from dsa.kernels.columns import Units, gather_column, units_of
from dsa.kernels.threads import run_slices
from dsa.schema import TORN, Records, Rows, Schema, has_stamp

__all__ = ["CACHE_BYTES", "OVERLAY_BYTES", "CompressedZarrBackend"]

CACHE_BYTES: Final = 128 << 20
OVERLAY_BYTES: Final = 128 << 20
_BLOCK_BYTES: Final = 4 << 20


class _Shared(NamedTuple):
    """What readers and the writer share, anew in a forked child, whose parent's threads are not there."""

    process: int
    lock: threading.Lock
    cache: ChunkCache


@final
class CompressedZarrBackend:
    """A `StateBackend` over a directory of shards of zstd chunks.

    Make one with `create` or `open`. `write` copies; the array handed over may be used again.

    Example:
        >>> import tempfile, zarr
        >>> from dsa.schema import adam_schema
        >>> path = Path(tempfile.mkdtemp()) / "entity.zarr"
        >>> backend = CompressedZarrBackend.create(path, 1000, adam_schema(dim=2))
        >>> rows = np.array([7, 999])
        >>> records = backend.read(rows)
        >>> records["w"] = 1.5
        >>> backend.write(rows, records)
        >>> zarr.open_group(path, mode="r")["w"][6:8].tolist()
        [[0.0, 0.0], [1.5, 1.5]]
        >>> backend.close()
    """

    def __init__(self, path: Path, description: dict[str, Any], cache_bytes: int, writable: bool) -> None:
        """Read the places of a checked directory's chunks; `create` and `open` are the ways to call this."""
        self._path = path
        self._description = copy.deepcopy({k: v for k, v in description.items() if k != GROWING})
        self._room = self._description  # what the documents say
        self._schema = Schema.from_json(description["schema"])
        self._dtype = self._schema.dtype
        self._rows: int = description["rows"]
        self._writable = writable
        self._follows = not writable
        self._tree_synced = not writable
        self._reads = ColdReads()
        self._cache_bytes = cache_bytes
        self._layouts, self._fields = all_layouts(description), len(self._schema.fields)
        # Without a stamp there is nothing to mark, and there are no checksums.
        self._stamp = self._schema.names.index("s") if has_stamp(self._schema) else -1
        self._closed = False
        # How often each shard was replaced.
        self._versions = np.zeros(self._layouts[0].shards, np.int64)
        self._arrays = self._open_arrays()
        self._shared = _Shared(os.getpid(), threading.Lock(), ChunkCache(self._layouts, cache_bytes))
        # Bytes between fields belong to nobody: they are zero in what `read` returns.
        used = sum(self._schema.field_bytes(field) for field in self._schema.fields)
        self._blank = np.empty if used == self._dtype.itemsize else np.zeros

    @classmethod
    def create(
        cls,
        path: Path,
        rows: int,
        schema: Schema,
        *,
        shard_bytes: int | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> CompressedZarrBackend:
        """Create a table's directory; nothing is left behind when that fails.

        Args:
            path: The directory; it must not exist.
            rows: Number of rows N, >= 1.
            schema: Layout of a record.
            shard_bytes: See `dsa.backends.Zarr`; likewise the others.
            cache_bytes: See `dsa.backends.Zarr`.

        Raises:
            FileExistsError: there is something of that name.
            OSError: the file system can't hold such files.
        """
        description = describe_group(rows, schema, "zstd", shard_bytes)
        path.mkdir()
        try:
            for number, layout in enumerate(all_layouts(description)):
                make_empty_shards(path, description["id"], layout, number)
            write_group(path, description)
            return cls(path, description, cache_bytes, writable=True)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise

    @classmethod
    def open(
        cls,
        path: Path,
        description: dict[str, Any],
        *,
        cache_bytes: int = CACHE_BYTES,
        writable: bool = True,
    ) -> CompressedZarrBackend:
        """Open a table's directory, having checked that it is whole and the one described.

        Raises:
            StateCorruptError: a file is missing, truncated, extended, damaged in its index or another
                table's.
        """
        grew = check_group(path, description)
        backend = cls(path, description, cache_bytes, writable)
        if writable:
            for array in backend._arrays:
                for shard in range(array.layout.shards):
                    array.discard(shard)
            if grew:
                backend._settle_rest()
        return backend

    @property
    def schema(self) -> Schema:
        """The layout of one record."""
        return self._schema

    def __len__(self) -> int:
        return self._rows

    def read(self, rows: Rows, out: Records | None = None) -> Records:
        """Return copies of the records of `rows`, in `out` if that is given.

        Raises:
            StateCorruptError: a shard is missing or its index is damaged, or a chunk is damaged of
                records without a stamp; the message names it.
        """
        self._require_open()
        records = self._blank(len(rows), self._dtype) if out is None else out
        self._reads.read(rows, self._announce, lambda: self._gather(rows, records))
        return records

    def write(self, rows: Rows, records: Records) -> None:
        """Replace the records of `rows`, rewriting each shard that holds one of them once.

        The other rows of a damaged chunk keep its mark.

        Raises:
            StateCorruptError: as in `read`.
            OSError: the disk is full, or the table was opened for reading only (EROFS).
        """
        self._require_writable()
        shard_rows = self._layouts[0].shard_rows
        cuts = np.searchsorted(rows, np.arange(self._layouts[0].shards + 1) * shard_rows).tolist()
        for shard, (start, stop) in enumerate(itertools.pairwise(cuts)):
            if start < stop:
                self._rewrite(shard, rows[start:stop], records[start:stop])

    def reserve(self, rows: Rows) -> None:
        """Do nothing: a full disk is an error of `write`, which leaves the shards as they were."""
        self._require_open()

    def make_room(self, rows: int) -> bool:
        """Make new shards, which are empty, and tell the documents; see `Growing.make_room`."""
        self._require_writable()
        if rows <= self._room["rows"]:
            return True
        shared = self._enter()
        grown = extend_group(self._path, self._room, rows, self._arrays)
        if grown is None:
            return False
        with shared.lock:
            self._layouts, self._room, first = all_layouts(grown), grown, all_layouts(grown)[0]
            self._versions = np.resize(self._versions, first.shards)  # what they are counts for nothing
            shared.cache.extend(first.shards * first.chunks_per_shard)
        return True

    def adopt_rows(self, rows: int) -> None:
        """Have so many rows, once the device holds the new shards; see `Growing.adopt_rows`."""
        assert rows <= self._room["rows"], "make_room comes first"
        if rows > self._rows:
            shards = slice(self._rows // self._layouts[0].shard_rows, None)
            sync_tree(self._path, (file for array in self._arrays for file in list(array.files)[shards]))
        fewer, self._rows = rows < self._rows, rows
        self._description = {**self._description, "rows": rows}
        if fewer:
            self._settle_rest()

    def scan(self, start: int, stop: int) -> Iterator[tuple[int, Records]]:
        """Yield consecutive blocks of ``[start, stop)``, a few megabytes each."""
        self._require_open()
        chunk = self._layouts[0].chunk_rows
        block = max(1, _BLOCK_BYTES // (chunk * self._dtype.itemsize)) * chunk
        while start < stop:
            last = min(stop, start - start % chunk + block)
            yield start, self.read(np.arange(start, last))
            start = last

    def hint(self, rows: Rows) -> None:
        """Announce the chunks of `rows` to the system, unless announcing has lately been for nothing."""
        self._require_open()
        self._reads.hint(rows, self._announce)

    def flush(self) -> None:
        """Return once the shards' names are on the device; their data was before they had them."""
        self._require_open()
        if not self._tree_synced:
            sync_tree(self._path, (file for array in self._arrays for file in array.files))
            self._tree_synced = True
        for array in self._arrays:
            array.flush()

    def close(self) -> None:
        """Flush and let go of the cache; closing twice is silent."""
        if self._closed:
            return
        try:
            self.flush()
            if self._rows < self._room["rows"]:
                self._settle_rest()
        finally:
            self._closed = True
            self._shared = self._shared._replace(cache=ChunkCache(self._layouts, 0))

    def describe(self) -> dict[str, Any]:
        """Return kind, id, rows, schema, compression, and where the fields are cut."""
        return copy.deepcopy(self._description)

    def _open_arrays(self) -> list[CompressedArray]:
        arrays: list[CompressedArray] = []
        for number, layout in enumerate(self._layouts):
            offset = self._schema.offset(layout.spec.name) if number < self._fields else 0
            array = CompressedArray(
                self._path,
                self._description["id"],
                layout,
                number,
                offset,
                follows=self._follows,
                units=sum(each.width for each in arrays),
            )
            arrays.append(array)
        return arrays

    def _settle_rest(self) -> None:
        """Let go of room for more rows than there are, so that the documents say how many there are."""
        layout = all_layouts(self._description)[0]
        rest = np.arange(self._rows, layout.shards * layout.shard_rows)
        if len(rest):
            self._rewrite(layout.shards - 1, rest, np.zeros(len(rest), self._dtype))
        for array in self._arrays:
            array.flush()
        shorten_group(self._path, self._description, self._arrays)
        self._layouts, self._room = all_layouts(self._description), self._description

    def _require_writable(self) -> None:
        self._require_open()
        if not self._writable:
            raise OSError(
                errno.EROFS, f"the table {str(self._path)!r} was opened for reading: open it writable"
            )

    def _require_open(self) -> None:
        if self._closed:
            raise StateClosedError(f"the table {str(self._path)!r} was closed: open the directory again")

    def _enter(self) -> _Shared:
        if self._shared.process != os.getpid():
            cache = ChunkCache(self._layouts, self._cache_bytes)
            self._follows = True  # the parent goes on replacing shards
            self._arrays = self._open_arrays()
            self._shared = _Shared(os.getpid(), threading.Lock(), cache)
        return self._shared

    def _gather(self, rows: Rows, records: Records) -> None:
        if self._gather_marked(rows, records):
            settle(self._gather_once, rows, records)

    def _gather_once(self, rows: Rows) -> Records:
        records = self._blank(len(rows), self._dtype)
        self._gather_marked(rows, records)
        return records

    def _gather_marked(self, rows: Rows, records: Records) -> bool:
        """Fill records, with the mark of those that are torn, and tell whether there are any."""
        shared = self._enter()
        owners = rows // shared.cache.chunk_rows
        bounds = run_bounds(owners)
        first, torn = 0, False
        while first < len(bounds) - 1:
            with shared.lock:
                hold = shared.cache.hold(owners[bounds[first:-1]])
                shards = hold.chunks[hold.missing] // self._layouts[0].chunks_per_shard
                versions = self._versions[shards]
            whole = np.zeros(len(hold.missing), np.bool_)
            try:
                whole = self._fill(hold, shared)
                last = first + len(hold.chunks)
                torn |= self._copy(hold, rows, records, bounds[first : last + 1])
                first = last
            finally:
                with shared.lock:
                    # What was rewritten meanwhile is right for every row but those that were written.
                    whole &= self._versions[shards] == versions
                    shared.cache.release(hold, hold.missing[whole])
        return torn

    def _fill(self, hold: Hold, shared: _Shared) -> NDArray[np.bool_]:
        """Decompress the chunks that a hold misses; tell which of them are to be found from now on."""
        chunks, slots = hold.chunks[hold.missing], hold.slots[hold.missing]
        rows = shared.cache.chunk_rows

        def decode(start: int, stop: int) -> list[bool]:
            some = slice(start // rows, stop // rows)
            places = [slice(slot * rows, (slot + 1) * rows) for slot in slots[some].tolist()]
            damaged: set[int] = set()
            for array, field in zip(self._arrays, hold.fields, strict=True):
                found = array.decode(chunks[some], [field[place] for place in places], shared.lock)
                self._require_stamp(array, chunks[some][found])
                damaged.update(found)
            for k in damaged:
                for number, field in enumerate(hold.fields):
                    field[places[k]] = TORN if number == self._stamp else 0
            torn = [self._mark([field[place] for field in hold.fields]) for place in places]
            # Whose fields are of different times will be whole when another process has replaced them all.
            return [not (self._follows and each) for each in torn]

        parts = run_slices(decode, len(chunks) * rows)
        return np.array([each for part in parts for each in part], np.bool_)

    def _mark(self, fields: Sequence[Units]) -> bool:
        return self._stamp >= 0 and mark_torn(self._arrays[: self._fields], fields, self._stamp)

    def _copy(self, hold: Hold, rows: Rows, records: Records, bounds: NDArray[np.int64]) -> bool:
        """Copy the records of the rows of a hold's chunks, which lie between the bounds.

        Returns:
            Whether any is marked.
        """
        start, stop = int(bounds[0]), int(bounds[-1])
        chunk_rows = self._layouts[0].chunk_rows
        places = np.repeat(hold.slots, np.diff(bounds)) * chunk_rows + rows[start:stop] % chunk_rows
        for array, field in zip(self._arrays[: self._fields], hold.fields, strict=False):
            units = units_of(records, array.unit)[start:stop]
            gather_column(field, places, 0, units, array.column)
        return self._stamp >= 0 and bool((hold.fields[self._stamp][places] == TORN).any())

    def _rewrite(self, shard: int, rows: Rows, records: Records) -> None:
        shared = self._enter()
        try:
            replacements = self._prepare(shard, rows, records)
            self._mark([each.rows for each in replacements])  # for the cache: they are encoded
            with shared.lock:
                self._versions[shard] += 1
                cache, chunks = shared.cache, replacements[0].chunks
                slots = cache.find(chunks)
                cached = np.flatnonzero(slots >= 0)
                cache.forget(chunks)
                for number, (array, replacement) in enumerate(zip(self._arrays, replacements, strict=True)):
                    array.adopt(replacement)
                    fresh = replacement.rows.reshape(len(chunks), cache.chunk_rows, -1)
                    held = cache.fields[number].reshape(cache.slots, cache.chunk_rows, -1)
                    held[slots[cached]] = fresh[cached]
                cache.publish(chunks[cached], slots[cached])
        except BaseException:
            for array in self._arrays:
                array.discard(shard)
            raise

    def _prepare(self, shard: int, rows: Rows, records: Records) -> list[Replacement]:
        arrays = self._arrays[: self._fields]
        replacements = [array.prepare(shard, rows, records) for array in arrays]
        sums = sums_of(arrays, records)
        replacements += [array.prepare(shard, rows, sums) for array in self._arrays[self._fields :]]
        damaged: set[int] = set()
        for array, replacement in zip(self._arrays, replacements, strict=True):
            self._require_stamp(array, np.array(replacement.damaged, np.int64))
            damaged.update(replacement.damaged)
        if damaged:
            stamps = self._arrays[self._stamp]
            replacements[self._stamp] = stamps.prepare(shard, rows, records, torn=sorted(damaged))
        return replacements

    def _require_stamp(self, array: CompressedArray, damaged: NDArray[np.int64]) -> None:
        if self._stamp < 0 and len(damaged):
            chunk, rows = int(damaged[0]), array.layout.chunk_rows
            raise corrupt(
                self._path,
                f"is damaged: chunk {chunk} of its field {array.layout.spec.name!r}, with the rows from "
                f"{chunk * rows} to {(chunk + 1) * rows - 1}, does not match its checksum",
            )

    def _announce(self, rows: Rows) -> None:
        shared = self._enter()
        owners = rows // shared.cache.chunk_rows
        chunks = owners[run_bounds(owners)[:-1]]
        with shared.lock:
            missing = chunks[shared.cache.find(chunks) < 0]
        # Announcing is advice; what is wrong with a file shows when it is read.
        with contextlib.suppress(OSError, StateCorruptError):
            for array in self._arrays:
                array.announce(missing)
