"""The file of a table in a state directory: made, opened and removed by the kind of its backend."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dsa.backends import system
from dsa.backends.base import StateBackend
from dsa.backends.memmap import Memmap, MemmapBackend, choose_stride, file_bytes, stored_bytes
from dsa.backends.writer import WriteBehind
from dsa.backends.zarr import Zarr, ZarrBackend
from dsa.backends.zarr_compressed import CACHE_BYTES, OVERLAY_BYTES, CompressedZarrBackend
from dsa.backends.zarr_group import describe_group, disk_bytes
from dsa.errors import StateMismatchError
from dsa.schema import Schema
from dsa.state.metadata import owned_files, table_file_name
from dsa.state.storage import Layout, Storage
from dsa.state.table import Table

__all__ = [
    "drain_backend",
    "file_of",
    "make_backend",
    "match_kind",
    "match_layout",
    "new_file",
    "open_backend",
    "probe_table",
    "remove_table_file",
    "stored_layout",
    "sweep",
    "table_bytes",
]


def table_bytes(rows: int, schema: Schema, layout: Layout) -> int:
    """Return the size of the file of a table; of compressed shards, that of one without rows."""
    if isinstance(layout, Memmap):
        return file_bytes(rows, schema, layout.stride)
    return disk_bytes(describe_group(rows, schema, layout.compression, layout.shard_bytes))[0]


def probe_table(directory: Path, rows: int, schema: Schema, layout: Layout) -> None:
    """Find out whether the file system can hold the largest file of a table.

    Raises:
        OSError: it can't.
    """
    if isinstance(layout, Memmap):
        size = file_bytes(rows, schema, layout.stride)
    else:
        size = disk_bytes(describe_group(rows, schema, layout.compression, layout.shard_bytes))[1]
    system.probe_size(directory, size)


def new_file(directory: Path, name: str, layout: Layout) -> tuple[Path, int]:
    """Return where a table is to be made, and as which generation: one after those that are there."""
    kind = "memmap" if isinstance(layout, Memmap) else "zarr"
    stem = table_file_name(name).partition(".")[0]
    taken = [_generation(file) for file in owned_files(directory) if file.name.partition(".")[0] == stem]
    generation = max(taken, default=-1) + 1
    return directory / table_file_name(name, generation, kind), generation


def _generation(file: Path) -> int:
    return int(file.stem.partition(".")[2] or 0)


def file_of(directory: Path, table: Table) -> Path:
    """Return where an open table is."""
    return directory / table_file_name(table.name, table.generation, table.backend.describe()["kind"])


def make_backend(file: Path, rows: int, schema: Schema, storage: Storage) -> StateBackend:
    """Make the file of a table, none of whose rows is written.

    Whatever an interrupted creation has left under that name goes: no description names it.

    Raises:
        DiskSpaceError: there is not enough room; nothing is left behind.
    """
    remove_table_file(file)
    layout, allocate = storage.layout, storage.allocate
    if isinstance(layout, Memmap):
        return MemmapBackend.create(file, rows, schema, stride=layout.stride, allocate=allocate)
    if layout.compression is None:
        return ZarrBackend.create(file, rows, schema, shard_bytes=layout.shard_bytes, allocate=allocate)
    cache = layout.cache_bytes or CACHE_BYTES
    backend = CompressedZarrBackend.create(
        file, rows, schema, shard_bytes=layout.shard_bytes, cache_bytes=cache
    )
    return _collecting(backend, storage)


def open_backend(directory: Path, name: str, stored: Mapping[str, Any], storage: Storage) -> StateBackend:
    """Open the file of a table.

    Args:
        directory: The state directory.
        name: The table's name.
        stored: Its description in the metadata, which says what it is.
        storage: How to go on.

    Raises:
        StateCorruptError: the file is missing, damaged, or another table's.
    """
    description = stored["backend"]
    file = directory / table_file_name(name, stored.get("generation", 0), description["kind"])
    if description["kind"] == "memmap":
        return MemmapBackend.open(file, description)
    if description["compression"] is None:
        return ZarrBackend.open(file, description)
    layout = storage.layout
    cache = layout.cache_bytes if isinstance(layout, Zarr) else None
    return _collecting(
        CompressedZarrBackend.open(file, description, cache_bytes=cache or CACHE_BYTES), storage
    )


def _collecting(backend: CompressedZarrBackend, storage: Storage) -> WriteBehind:
    """Return a queue that spares the backend small writes.

    With a journal, its room is what fills first, and all tables are then written together. A thread begins
    when half of the room is used.
    """
    overlay = storage.overlay_bytes or OVERLAY_BYTES
    if storage.queue is None:
        return WriteBehind(backend, collect_bytes=overlay, threaded=False)
    return WriteBehind(backend, put_timeout=storage.queue.put_timeout, collect_bytes=max(1, overlay // 2))


def drain_backend(backend: StateBackend) -> None:
    """Return once the backend's files, or the page cache, hold everything that was written."""
    if isinstance(backend, WriteBehind):
        backend.drain()


def stored_layout(stored: Mapping[str, Any]) -> Layout:
    """Return the layout that new tables beside a stored one have.

    Args:
        stored: The stored table's description in the metadata.
    """
    description = stored["backend"]
    if description.get("kind") == "zarr":
        return Zarr(compression=description.get("compression"), shard_bytes=description.get("shard_bytes"))
    return Memmap(stride=description.get("layout"))


def match_kind(name: str, description: Mapping[str, Any], asked: Layout | None) -> None:
    """Raise `StateMismatchError` when a table is stored by another backend than the one asked for.

    All tables of a directory have one backend.

    Args:
        name: The table's.
        description: That of its backend.
        asked: The layout; None asks for nothing.
    """
    kind, compression = description.get("kind"), description.get("compression")
    if asked is None or (kind == "memmap" and isinstance(asked, Memmap)):
        return
    if kind == "zarr" and isinstance(asked, Zarr) and asked.compression == compression:
        return
    what = f"{kind!r} with compression={compression!r}" if kind == "zarr" else f"{kind!r}"
    raise StateMismatchError(
        f"table {name!r} is stored by the backend {what}, which backend={asked!r} is not: leave the backend "
        "out, or carry the state over to a new directory through a checkpoint"
    )


def match_layout(
    name: str, rows: int, schema: Schema, description: Mapping[str, Any], asked: Layout | None
) -> None:
    """Raise `StateMismatchError` when a table is laid out in another way than the one asked for.

    Args:
        name: The table's.
        rows: Its rows.
        schema: Its schema.
        description: That of its backend.
        asked: The layout; None asks for nothing.
    """
    match_kind(name, description, asked)
    if isinstance(asked, Memmap) and asked.stride is not None:
        stride = description.get("stride")
        if choose_stride(stored_bytes(schema), asked.stride) != stride:
            raise StateMismatchError(
                f"table {name!r} is stored with a stride of {stride} bytes, which stride={asked.stride!r} is "
                "not: leave the stride out"
            )
    if isinstance(asked, Zarr) and asked.shard_bytes is not None:
        cuts = describe_group(rows, schema, asked.compression, asked.shard_bytes)["cuts"]
        if description.get("cuts") != cuts:
            raise StateMismatchError(
                f"table {name!r} is stored in other shards than those of shard_bytes={asked.shard_bytes!r}: "
                "leave it out"
            )


def remove_table_file(file: Path) -> None:
    """Remove the file of a table, if it is there."""
    if file.is_dir() and not file.is_symlink():
        system.retried(shutil.rmtree, file)
    else:
        system.retried(file.unlink, True)


def sweep(directory: Path, in_use: Iterable[tuple[str, int]]) -> None:
    """Remove what a replacement of whole tables has left: generations that are not in use.

    Args:
        directory: The state directory.
        in_use: Name and generation of each table.
    """
    current = {table_file_name(*each).rpartition(".")[0] for each in in_use}
    stems = {name.partition(".")[0] for name in current}
    for file in owned_files(directory):
        if file.stem not in current and file.name.partition(".")[0] in stems:
            remove_table_file(file)
