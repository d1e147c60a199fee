"""One field of a compressed live Zarr table: shards of small chunks that are replaced as a whole.

A shard is written under another name, synced, and renamed: whoever reads the group, and whoever opens it
after a kill or a loss of power, sees the old shard or the new one, whole. The places of all chunks are kept
in memory, 16 bytes for each.

A chunk that can't be decompressed, or fails zstd's checksum, is damage to its rows: whoever asked for it is
told. Of a shard that was replaced since its index was read the new index is read with it; to whoever is about
to rewrite it, that somebody else has is an error.
"""

from __future__ import annotations

import io
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from dsa.backends import system
from dsa.backends.chunk_cache import run_bounds
from dsa.backends.shards.encoding import decode_chunk, encode_chunk, index_bytes, place_index, read_index
from dsa.backends.shards.layout import ArrayLayout
from dsa.backends.zarr_group import LABEL_BYTES, corrupt, shard_files, shard_label
from dsa.backends.zarr_growth import remove_rest
from dsa.errors import StateCorruptError
from dsa.kernels.checksums import factors
from dsa.kernels.columns import Units, scatter_column, sum_column, unit_of, units_of
from dsa.kernels.layout import Words
from dsa.kernels.threads import run_slices
from dsa.schema import TORN, Rows

__all__ = ["CompressedArray", "Replacement", "make_empty_shards", "mark_torn", "sums_of"]

_Identity = tuple[int, int, int, int]

_BINARY: Final = getattr(os, "O_BINARY", 0)


class Replacement(NamedTuple):
    """A shard that is written and not yet in its place.

    Args:
        shard: Its number.
        chunks: The chunks that differ, as numbers in the table, increasing.
        rows: Their rows, one chunk after the other.
        damaged: Those of the chunks whose other rows are lost, and zero.
        places: Where the chunks of the shard are.
    """

    shard: int
    chunks: NDArray[np.int64]
    rows: Units
    damaged: list[int]
    places: _Places


class _Places(NamedTuple):
    """Where the chunks of a shard are.

    Args:
        file: Device, number, length and time of change of the file that this is true of.
        spans: ``(chunks, 2)``, offset and length of each.
    """

    file: _Identity
    spans: NDArray[np.int64]


@final
class CompressedArray:
    """The shards of one field. `adopt` is to be called with the lock that `decode` is given.

    Args:
        table: The table's directory.
        identity: The table's id.
        layout: How the array is cut.
        field: The field's place in the record.
        offset: Where the field lies in a record, in bytes.
        follows: Whether another process may replace shards.
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
        follows: bool = False,
        units: int = 0,
    ) -> None:
        self._table, self._identity, self._field, self._follows = table, identity, field, follows
        self.layout = layout
        self.unit = unit_of(layout.spec.row_bytes)
        self.column = offset // self.unit.itemsize
        self.width = layout.spec.row_bytes // self.unit.itemsize
        self._factors = factors(units + self.width)[units:]
        self._files = shard_files(table, layout)
        self._places: list[_Places | None] = [None] * layout.shards
        self._unsynced: set[int] = set()
        for shard in range(layout.shards):
            self._known(shard)

    @property
    def files(self) -> Iterator[Path]:
        """The shards' files."""
        return iter(self._files)

    def extend(self, layout: ArrayLayout) -> None:
        """Make the shards that a longer array has more, all of whose chunks are absent.

        Args:
            layout: How it is cut.

        Raises:
            OSError: the system refuses; nothing has changed.
        """
        shards, files = self.layout.shards, shard_files(self._table, layout)
        try:
            make_empty_shards(self._table, self._identity, layout, self._field, shards)
        except BaseException:
            for file in files[shards:]:
                file.unlink(missing_ok=True)
            raise
        self._places += [None] * (layout.shards - shards)
        self.layout, self._files = layout, files

    def shorten(self, layout: ArrayLayout) -> None:
        """Let go of shards that are nobody's.

        Args:
            layout: How the shorter array is cut.
        """
        remove_rest(self._table, layout)
        self.layout, self._files = layout, shard_files(self._table, layout)
        del self._places[layout.shards :]
        self._unsynced = {shard for shard in self._unsynced if shard < layout.shards}

    def decode(self, chunks: NDArray[np.int64], blocks: list[Units], lock: threading.Lock) -> list[int]:
        """Decompress chunks into blocks of rows.

        Args:
            chunks: Numbers in the table, increasing.
            blocks: As many arrays, each of a chunk's rows.
            lock: Taken while it is looked up where chunks are.

        Returns:
            The positions of chunks that are damaged, whose blocks are zero.

        Raises:
            StateCorruptError: a shard is missing, or its index is damaged.
        """
        damaged = []
        for shard, begin, end in self._by_shard(chunks):
            with lock:
                known = self._known(shard)
                opened = self._open(shard)
            with opened as file:
                if _identity(file.fileno()) != known.file:
                    known = self._places_in(shard, file)  # of the very file that is read
                    if self._follows:
                        self._places[shard] = known
                spans = known.spans[chunks[begin:end] % self.layout.chunks_per_shard].tolist()
                for k, (offset, length) in enumerate(spans, begin):
                    data = system.read_at(file.fileno(), length, offset) if length else b""
                    if not self._decode(data, blocks[k]):
                        damaged.append(k)
        return damaged

    def add_to(self, sums: Words, units: Units, column: int = 0) -> None:
        """Add the field of rows to their checksums: its units, or those of records from its column on."""
        sum_column(units, column, self._factors, sums)

    def announce(self, chunks: NDArray[np.int64]) -> None:
        """Announce where chunks lie to the system; see `decode` for them."""
        for shard, begin, end in self._by_shard(chunks):
            known = self._places[shard]  # not read anew: it may be about to change
            if known is None:
                continue
            places = known.spans[chunks[begin:end] % self.layout.chunks_per_shard]
            starts, lengths = places[places[:, 1] > 0].T.tolist()
            with self._open(shard) as file:
                system.announce_ranges(file.fileno(), starts, lengths)

    def prepare(self, shard: int, rows: Rows, records: NDArray[Any], torn: Sequence[int] = ()) -> Replacement:
        """Write a shard anew, in which some rows are other ones, beside the one that is in place.

        Args:
            shard: Its number.
            rows: Rows of it, increasing.
            records: The records that their fields are taken from.
            torn: Chunks whose other rows are set to `TORN`.

        Raises:
            StateCorruptError: the shard is missing, or its index is damaged.
        """
        layout, base = self.layout, shard * self.layout.chunks_per_shard
        owners = rows // layout.chunk_rows
        bounds = run_bounds(owners)
        chunks = owners[bounds[:-1]]
        encoded = self._read_chunks(shard)
        units = units_of(records, self.unit)
        fresh = np.zeros((len(chunks) * layout.chunk_rows, self.width), self.unit)

        def renew(start: int, stop: int) -> list[int]:
            damaged = []
            for k in range(start // layout.chunk_rows, stop // layout.chunk_rows):
                block = fresh[k * layout.chunk_rows : (k + 1) * layout.chunk_rows]
                begin, end, chunk = int(bounds[k]), int(bounds[k + 1]), int(chunks[k])
                if end - begin < layout.chunk_rows and not self._decode(encoded[chunk - base], block):
                    damaged.append(chunk)
                if chunk in torn:
                    block[...] = TORN
                first = chunk * layout.chunk_rows
                scatter_column(block, rows[begin:end], first, units[begin:end], self.column)
                encoded[chunk - base] = encode_chunk(layout, block)
            return damaged

        damaged = [chunk for part in run_slices(renew, len(fresh)) for chunk in part]
        return Replacement(shard, chunks, fresh, damaged, self._write(shard, encoded))

    def adopt(self, replacement: Replacement) -> None:
        """Put a shard that was prepared in its place."""
        shard = replacement.shard
        # Interrupted anywhere, the places are unknown and are read from whichever file is there.
        self._places[shard] = None
        system.retried(os.replace, _temporary(self._files[shard]), self._files[shard])
        self._unsynced.add(shard)
        self._places[shard] = replacement.places

    def discard(self, shard: int) -> None:
        """Remove what `prepare` has left of a shard, if anything."""
        _temporary(self._files[shard]).unlink(missing_ok=True)

    def flush(self) -> None:
        """Return once the names of the shards that were replaced are on the device; their data is."""
        for shard in sorted(self._unsynced):
            self._unsynced.discard(shard)
            try:
                system.sync_directory(self._files[shard].parent)
            except BaseException:
                self._unsynced.add(shard)
                raise

    def _by_shard(self, chunks: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
        shards = chunks // self.layout.chunks_per_shard
        for begin, end in itertools.pairwise(run_bounds(shards).tolist()):
            yield int(shards[begin]), begin, end

    def _name(self, shard: int) -> str:
        return f"shard {shard} of its field {self.layout.spec.name!r}"

    def _open(self, shard: int) -> io.FileIO:
        try:
            return open(self._files[shard], "rb", buffering=0)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise corrupt(self._table, f"lacks {self._name(shard)}") from error

    def _known(self, shard: int) -> _Places:
        places = self._places[shard]
        if places is None:
            with self._open(shard) as file:
                places = self._places[shard] = self._places_in(shard, file)
        return places

    def _places_in(self, shard: int, file: io.FileIO) -> _Places:
        layout = self.layout
        where, path = self._name(shard), self._files[shard]
        tail = LABEL_BYTES + index_bytes(layout.chunks_per_shard)
        identity = _identity(file.fileno())
        data_bytes = identity[2] - tail
        stored = system.read_at(file.fileno(), tail, data_bytes) if data_bytes >= 0 else b""
        sizes = f"{identity[2]:,} bytes, of which the last {tail:,} should be its label and index"
        try:
            places = read_index(layout, stored[LABEL_BYTES:], data_bytes)
        except StateCorruptError as error:
            what = f"is damaged: {where} ({path.name!r} in {str(path.parent)!r}, {sizes}) has no sound index"
            raise corrupt(self._table, what) from error
        if stored[:LABEL_BYTES] != shard_label(self._identity, self._field, shard):
            raise corrupt(self._table, f"has a damaged or foreign file in place of {where}")
        return _Places(identity, np.array(places, np.int64).reshape(-1, 2))

    def _require_same(self, shard: int, file: int, known: _Places) -> None:
        found = _identity(file)
        if found != known.file:
            sizes = f"{found[2]:,} bytes instead of {known.file[2]:,}"
            what = f"is in use: {self._name(shard)} was replaced or cut by somebody else ({sizes})"
            raise corrupt(self._table, what)

    def _read_chunks(self, shard: int) -> list[bytes | memoryview]:
        known = self._known(shard)
        with self._open(shard) as file:
            self._require_same(shard, file.fileno(), known)
            data = memoryview(file.read())
        return [data[offset : offset + length] for offset, length in known.spans.tolist()]

    def _decode(self, data: bytes | memoryview, block: Units) -> bool:
        """Decompress a chunk into a block, which is zero if that can't be done; tell whether it could."""
        try:
            decode_chunk(self.layout, data, out=block)
        except StateCorruptError:
            block[...] = 0
            return False
        return True

    def _write(self, shard: int, encoded: list[bytes | memoryview]) -> _Places:
        label = shard_label(self._identity, self._field, shard)
        lengths = np.array([len(chunk) for chunk in encoded])
        index = place_index(lengths.tolist())
        identity = _write_synced(_temporary(self._files[shard]), b"".join([*encoded, label, index]))
        return _Places(identity, np.stack([np.cumsum(lengths) - lengths, lengths], axis=1))


def sums_of(arrays: Sequence[CompressedArray], records: NDArray[Any]) -> Words:
    """Return the checksums of records, all of whose fields are given."""
    sums = np.zeros(len(records), np.int32)
    for array in arrays:
        array.add_to(sums, units_of(records, array.unit), array.column)
    return sums


def mark_torn(arrays: Sequence[CompressedArray], fields: Sequence[Units], stamp: int) -> bool:
    """Mark the rows that don't match their checksums, and tell whether there are any.

    Args:
        arrays: The fields' arrays.
        fields: The rows of each field, and after them the checksums.
        stamp: Which of the fields is the stamp.
    """
    sums = np.zeros(len(fields[0]), np.int32)
    for array, field in zip(arrays, fields, strict=False):
        array.add_to(sums, field)
    torn = sums != fields[-1][:, 0]
    found = bool(torn.any())
    if found:
        fields[stamp][torn] = TORN
    return found


def _identity(file: int) -> _Identity:
    status = os.fstat(file)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _temporary(file: Path) -> Path:
    return file.with_name(f"{file.name}.tmp")


def _write_synced(path: Path, data: bytes) -> _Identity:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _BINARY, 0o644)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(file, left) :]
        system.sync_file(file)
        return _identity(file)
    finally:
        os.close(file)


def make_empty_shards(table: Path, identity: str, layout: ArrayLayout, field: int, first: int = 0) -> None:
    """Make the files of an array, all of whose chunks are absent: a file that is missing is damage.

    Args:
        table: The table's directory.
        identity: The table's id.
        layout: How the array is cut.
        field: The field's place in the record.
        first: The first shard to be made.
    """
    index = place_index([0] * layout.chunks_per_shard)
    for shard, path in enumerate(shard_files(table, layout)[first:], first):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(shard_label(identity, field, shard) + index)
