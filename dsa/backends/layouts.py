"""The layouts of the package: how a table becomes one mapped file, or a Zarr group of shards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, final

from dsa.backends.base import GROWING, Layout, Sizes, Source, StateBackend
from dsa.backends.mapping import Allocate
from dsa.backends.memmap import MemmapBackend, Stride, choose_stride, file_bytes, stored_bytes
from dsa.backends.shards.documents import Compression
from dsa.backends.zarr import ZarrBackend
from dsa.backends.zarr_compressed import CACHE_BYTES, OVERLAY_BYTES, CompressedZarrBackend
from dsa.backends.zarr_group import describe_group, disk_bytes, open_field
from dsa.schema import Schema

__all__ = ["BUILT_IN", "Memmap", "Zarr"]


@final
@dataclass(frozen=True, slots=True)
class Memmap:
    """The memmap backend with a layout of your own, for a ``backend`` argument.

    Args:
        stride: Distance between records: None for the rule, ``"packed"``, ``"page"``, or bytes.
    """

    kind: ClassVar[str] = "memmap"
    collect_bytes: ClassVar[int] = 0
    stride: Stride = None

    def sizes(self, rows: int, schema: Schema) -> Sizes:
        """Return the size of the file; a row is one record in it."""
        size, record = file_bytes(rows, schema, self.stride), stored_bytes(schema)
        return Sizes(size, size, size, ((record, choose_stride(record, self.stride)),))

    def create(self, path: Path, rows: int, schema: Schema, allocate: Allocate) -> MemmapBackend:
        """Make the file of a table; see `MemmapBackend.create`."""
        return MemmapBackend.create(path, rows, schema, stride=self.stride, allocate=allocate)

    def open(self, path: Path, description: dict[str, Any]) -> MemmapBackend:
        """Open the file of a table; see `MemmapBackend.open`."""
        return MemmapBackend.open(path, description)

    def look(self, path: Path, description: dict[str, Any]) -> Source:
        """Open the file for reading; a field is an array over the mapping."""
        backend = MemmapBackend.open(path, description, writable=False)
        return Source(backend, lambda name: backend.records[name])

    def like(self, description: dict[str, Any]) -> Memmap:
        """Return the layout with the stride that was asked for when the table was made."""
        return Memmap(description.get("layout"))

    def refusal(self, description: dict[str, Any]) -> str:
        """Return in what the stride differs."""
        stride = description.get("stride")
        record = stored_bytes(Schema.from_json(description["schema"]))
        if self.stride is None or choose_stride(record, self.stride) == stride:
            return ""
        return (
            f"is stored with a stride of {stride} bytes, which stride={self.stride!r} is not: leave the "
            "stride out"
        )


@final
@dataclass(frozen=True, slots=True)
class Zarr:
    """The Zarr backends, for an optimizer's ``backend`` argument.

    Args:
        shard_bytes: About how large the data of a shard is, before compression. None: 256 MiB or more, so
            that a table has at most a hundred files, and 16 MiB with compression, where a shard is rewritten
            for any of its rows.
        compression: None maps the shards and is nearly as fast as memmap. ``"zstd"`` saves disk where most
            rows are rarely touched, and is ten to hundreds of times slower.
        cache_bytes: With compression: memory for decompressed chunks, 128 MiB when None.
        overlay_bytes: With compression: new records that are collected before shards are rewritten, 128 MiB
            when None. The journal holds them, and takes that much disk, for all tables of a directory
            together. Without a journal (``durability="none"``) memory does, for each table, and a killed
            process loses them.

    Example:
        >>> Zarr(compression="zstd", cache_bytes=1 << 30).compression
        'zstd'
    """

    kind: ClassVar[str] = "zarr"
    shard_bytes: int | None = None
    compression: Compression = None
    cache_bytes: int | None = None
    overlay_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.compression not in (None, "zstd"):
            raise ValueError(f"compression={self.compression!r} is not known: use None or 'zstd'")
        for name in ("shard_bytes", "cache_bytes", "overlay_bytes"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} is out of range: pass a number of bytes >= 1")
            if name != "shard_bytes" and self.compression is None:
                raise ValueError(f"{name}={value!r} is for compressed shards: leave it out, or compress them")

    @property
    def collect_bytes(self) -> int:
        """Bytes of new records that are collected: none without compression."""
        return 0 if self.compression is None else self.overlay_bytes or OVERLAY_BYTES

    def sizes(self, rows: int, schema: Schema) -> Sizes:
        """Return the sizes of the shards; a row lies in as many places as there are fields."""
        made, largest = disk_bytes(describe_group(rows, schema, self.compression, self.shard_bytes))
        filled, _ = disk_bytes(describe_group(rows, schema, None, self.shard_bytes))
        parts = [schema.field_bytes(field) for field in schema.fields]
        parts.append(stored_bytes(schema) - schema.dtype.itemsize)
        return Sizes(made, filled, largest, tuple((size, size) for size in parts if size))

    def create(self, path: Path, rows: int, schema: Schema, allocate: Allocate) -> StateBackend:
        """Make the directory of a table; compressed, it takes room as rows are written."""
        if self.compression is None:
            return ZarrBackend.create(path, rows, schema, shard_bytes=self.shard_bytes, allocate=allocate)
        cache = self.cache_bytes or CACHE_BYTES
        return CompressedZarrBackend.create(
            path, rows, schema, shard_bytes=self.shard_bytes, cache_bytes=cache
        )

    def open(self, path: Path, description: dict[str, Any]) -> StateBackend:
        """Open the directory of a table, compressed or not as it is."""
        if description["compression"] is None:
            return ZarrBackend.open(path, description)
        return CompressedZarrBackend.open(path, description, cache_bytes=self.cache_bytes or CACHE_BYTES)

    def look(self, path: Path, description: dict[str, Any]) -> Source:
        """Open the directory for reading; a field is a `zarr.Array`."""
        field = partial(open_field, path)
        if description["compression"] is None:
            return Source(ZarrBackend.open(path, description, writable=False), field)
        opened = CompressedZarrBackend.open(path, description, writable=False)
        growing = {**description, GROWING: True}  # it may grow as long as it is looked at
        return Source(opened, field, partial(CompressedZarrBackend.open, path, growing, writable=False))

    def like(self, description: dict[str, Any]) -> Zarr:
        """Return the layout with the compression of the table, and the shards that were asked for."""
        shard_bytes = description.get("shard_bytes")
        if description.get("compression") is None:
            return Zarr(shard_bytes)
        return replace(self, shard_bytes=shard_bytes, compression=description["compression"])

    def refusal(self, description: dict[str, Any]) -> str:
        """Return in what compression or shards differ."""
        compression = description.get("compression")
        if compression != self.compression:
            return (
                f"is stored with compression={compression!r}, which compression={self.compression!r} is not: "
                "leave the backend out, or carry the state over to a new directory through a checkpoint"
            )
        if self.shard_bytes in (None, description.get("shard_bytes")):
            return ""  # a table that has grown keeps the shards of its first rows
        schema = Schema.from_json(description["schema"])
        asked = describe_group(description["rows"], schema, compression, self.shard_bytes)
        if description.get("cuts") == asked["cuts"]:
            return ""
        return (
            f"is stored in other shards than those of shard_bytes={self.shard_bytes!r}: leave shard_bytes out"
        )


BUILT_IN: Final[tuple[Layout, ...]] = (Memmap(), Zarr())
"""One of each kind that the package knows: a state of these opens without being told its layout."""
