"""The file of a table in a state directory: named, made, opened and removed, whatever its layout is."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dsa.backends import system
from dsa.backends.base import Layout, StateBackend
from dsa.backends.layouts import BUILT_IN
from dsa.backends.writer import WriteBehind
from dsa.errors import StateMismatchError
from dsa.schema import Schema
from dsa.state.keys import remove_index
from dsa.state.metadata import owned_files, table_file_name, version_of
from dsa.state.storage import Queue, Storage
from dsa.state.table import Table

__all__ = [
    "drain_backend",
    "file_of",
    "layout_for",
    "make_backend",
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
    """Return the bytes that making a table takes; of compressed shards, those of one without rows."""
    return layout.sizes(rows, schema).made


def probe_table(directory: Path, rows: int, schema: Schema, layout: Layout) -> None:
    """Find out whether the file system can hold the largest file of a table.

    Raises:
        OSError: it can't.
    """
    system.probe_size(directory, layout.sizes(rows, schema).largest)


def new_file(directory: Path, name: str, layout: Layout) -> tuple[Path, int]:
    """Return where a table is to be made, and as which generation: one after those that are there."""
    stem = table_file_name(name).partition(".")[0]
    there = [version_of(file) for file in owned_files(directory)]
    generation = max([number for each, number in there if each == stem], default=-1) + 1
    return directory / table_file_name(name, generation, layout.kind), generation


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
    layout = storage.layout
    return _collecting(layout.create(file, rows, schema, storage.allocate), layout, storage.queue)


def open_backend(directory: Path, name: str, stored: Mapping[str, Any], storage: Storage) -> StateBackend:
    """Open the file of a table.

    Args:
        directory: The state directory.
        name: The table's name.
        stored: Its description in the metadata, which says what it is.
        storage: How to go on; its layout opens the table if that is of its kind.

    Raises:
        StateCorruptError: the file is missing, damaged, or another table's.
        StateMismatchError: no layout of its kind is known.
    """
    description = stored["backend"]
    file = directory / table_file_name(name, stored.get("generation", 0), description["kind"])
    layout = layout_for(stored, storage.backend)
    return _collecting(layout.open(file, description), layout, storage.queue)


def layout_for(stored: Mapping[str, Any], given: Layout | None) -> Layout:
    """Return the layout of a stored table's kind: the one given, or one of the package's with its options.

    Args:
        stored: The table's description in the metadata.
        given: What whoever opens the state has passed.

    Raises:
        StateMismatchError: neither is of that kind.
    """
    kind = stored["backend"]["kind"]
    if given is not None and given.kind == kind:
        return given
    for layout in BUILT_IN:
        if layout.kind == kind:
            return layout.like(stored["backend"])
    raise StateMismatchError(
        f"table {stored['name']!r} is stored by a backend of the kind {kind!r}, which is not one of the "
        f"package's ({', '.join(layout.kind for layout in BUILT_IN)}): pass the layout that made it, "
        "backend=..., or --backend MODULE:NAME to a command"
    )


def stored_layout(stored: Mapping[str, Any], given: Layout | None = None) -> Layout:
    """Return the layout that new tables beside a stored one have.

    Args:
        stored: The stored table's description in the metadata.
        given: See `layout_for`.

    Raises:
        StateMismatchError: see `layout_for`.
    """
    return layout_for(stored, given).like(stored["backend"])


def _collecting(backend: StateBackend, layout: Layout, queue: Queue | None) -> StateBackend:
    """Put a queue before a backend that is to be spared small writes.

    With a journal, its room is what fills first, and all tables are then written together. A thread begins
    when half of the room is used.
    """
    room = layout.collect_bytes
    if not room:
        return backend
    if queue is None:
        return WriteBehind(backend, collect_bytes=room, threaded=False)
    return WriteBehind(backend, put_timeout=queue.put_timeout, collect_bytes=max(1, room // 2))


def drain_backend(backend: StateBackend) -> None:
    """Return once the backend's files, or the page cache, hold everything that was written."""
    if isinstance(backend, WriteBehind):
        backend.drain()


def match_layout(name: str, description: dict[str, Any], asked: Layout | None) -> None:
    """Raise `StateMismatchError` when a table is stored in another way than the one asked for.

    All tables of a directory have one layout.

    Args:
        name: The table's.
        description: That of its backend.
        asked: The layout; None asks for nothing.
    """
    if asked is None:
        return
    kind = description.get("kind")
    if kind != asked.kind:
        raise StateMismatchError(
            f"table {name!r} is stored by the backend {kind!r}, which backend={asked!r} is not: leave the "
            "backend out, pass the one that made it, or carry the state over to a new directory through a "
            "checkpoint"
        )
    refusal = asked.refusal(description)
    if refusal:
        raise StateMismatchError(f"table {name!r} {refusal}")


def remove_table_file(file: Path) -> None:
    """Remove the file of a table, if it is there, and its index."""
    system.retried(remove_index, file)
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
    current = {(table_file_name(name).partition(".")[0], generation) for name, generation in in_use}
    stems = {stem for stem, _ in current}
    for file in owned_files(directory):
        version = version_of(file)
        if version not in current and version[0] in stems:
            remove_table_file(file)
