"""Making the files of a new state directory."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from dsa import system
from dsa.errors import DiskSpaceError
from dsa.init import FromArray, Initializer
from dsa.journal import Journal
from dsa.metadata import METADATA_NAME, Metadata, write_metadata
from dsa.state import StateDirectory
from dsa.storage import Storage, TableSpec
from dsa.table import Table
from dsa.table_files import (
    drain_backend,
    file_of,
    make_backend,
    new_file,
    probe_table,
    remove_table_file,
    table_bytes,
)
from dsa.weights import write_initial_weights
from dsa.writer import WriteBehind

__all__ = [
    "JOURNAL_NAME",
    "add_table",
    "check_sources",
    "create_state",
    "make_journal",
    "make_table",
    "queue_writes",
    "require_space",
    "start",
]

JOURNAL_NAME: Final = "dsa.journal"
# Entries that are let go after each step use the same memory again and again: it stays in the cache if it is
# small.
_CHECK_BYTES: Final = 8 << 20
_HOT_BYTES: Final = 1 << 20
_RETAINING_BYTES: Final = 64 << 20


def require_space(path: Path, specs: Sequence[TableSpec], storage: Storage, freed: int = 0) -> None:
    """Raise `DiskSpaceError` when tables with reserved space don't fit, counting `freed` bytes as free."""
    needed = sum(table_bytes(spec.source.rows, spec.schema, storage.layout) for spec in specs)
    if storage.allocate != "reserve":
        return
    available = system.available_bytes(path) + freed
    if needed > available:
        raise DiskSpaceError(needed, available, str(path))


def check_sources(path: Path, specs: Sequence[TableSpec], storage: Storage) -> None:
    """Look at everything that could keep tables from being made, before older state is removed for them.

    Raises:
        ValueError: an array of first weights holds a value that is not finite.
        OSError: the file system can't hold a file of a table's size.
    """
    for spec in specs:
        probe_table(path, spec.source.rows, spec.schema, storage.layout)
        if isinstance(spec.source, FromArray):
            for _ in spec.source.blocks(max(1, _CHECK_BYTES // (4 * spec.source.dim))):
                pass


def create_state(path: Path, lock: int, specs: Sequence[TableSpec], storage: Storage) -> StateDirectory:
    """Make the files of every table and open them; nothing is left behind when that fails.

    Raises:
        DiskSpaceError: there is not enough room.
        ValueError: an array of first weights holds a value that is not finite.
    """
    require_space(path, specs, storage)
    tables: list[Table] = []
    try:
        if not (path / METADATA_NAME).exists():
            write_metadata(path, Metadata("creating", "", note="making a new state"))
        # In place, one by one: what is made before a failure has to be undone.
        tables.extend(make_table(path, spec, storage) for spec in specs)
        return start(path, lock, Metadata("open", secrets.token_hex(8)), tables, storage)
    except BaseException:
        _discard(path, tables)
        raise


def make_table(path: Path, spec: TableSpec, storage: Storage) -> Table:
    """Make the file of one table and open it; nothing is left behind when that fails."""
    file = new_file(path, spec.name, storage.layout)
    backend = make_backend(file, spec.source.rows, spec.schema, storage)
    lazy = spec.source if isinstance(spec.source, Initializer) and "w" in spec.schema.names else None
    table = Table(spec.name, backend, lazy, spec.second_moment, spec.init_max_norm_fraction, spec.k)
    try:
        write_initial_weights(table, spec.source)
        drain_backend(backend)  # no journal knows of them
        if storage.durability == "power":
            backend.flush()
    except BaseException:
        with contextlib.suppress(OSError):
            backend.close()
        remove_table_file(file)
        raise
    return table


def add_table(state: StateDirectory, spec: TableSpec, storage: Storage) -> Table:
    """Make one more table in an open state.

    Raises:
        DiskSpaceError: there is not enough room.
        ValueError: an array of first weights holds a value that is not finite.
    """
    require_space(state.path, [spec], storage)
    table = make_table(state.path, spec, storage)
    queue_writes(table, storage)
    state.add(table)
    return table


def _discard(path: Path, tables: Sequence[Table]) -> None:
    """Remove what an unfinished creation has made, whatever state it is in."""
    steps: list[Callable[[], object]] = [table.backend.close for table in tables]
    steps += [partial(remove_table_file, file_of(path, table)) for table in tables]
    steps += [(path / JOURNAL_NAME).unlink, (path / METADATA_NAME).unlink]
    for step in steps:
        with contextlib.suppress(OSError):
            step()


def start(
    path: Path, lock: int, metadata: Metadata, tables: Sequence[Table], storage: Storage
) -> StateDirectory:
    """Begin to work with tables that are ready: an empty journal, write queues, the mark of an open state."""
    journal = make_journal(path / JOURNAL_NAME, metadata.identity, storage)
    for table in tables:
        queue_writes(table, storage)
    metadata.durability, metadata.boot = storage.durability, system.boot_identity()
    state = StateDirectory(path, lock, metadata, tables, journal, storage)
    try:
        state.mark_change(metadata.change)
    except BaseException:
        state.disown()
        raise
    return state


def make_journal(file: Path, identity: str, storage: Storage) -> Journal | None:
    """Make an empty journal in place of any file there; none where the durability asks for none.

    Raises:
        DiskSpaceError: there is not enough room.
    """
    if storage.durability == "none":
        file.unlink(missing_ok=True)
        return None
    durable = storage.durability == "power"
    hot = not durable and storage.queue is None and not storage.overlay_bytes
    capacity = storage.overlay_bytes or (_HOT_BYTES if hot else _RETAINING_BYTES)
    return Journal.create(file, identity, capacity, durable, hot)


def queue_writes(table: Table, storage: Storage) -> None:
    """Put a write queue in front of a table's backend, if the storage asks for one."""
    if isinstance(table.backend, WriteBehind):
        table.writer = table.backend  # that of compressed shards
    elif storage.queue is not None:
        options = storage.queue
        table.writer = WriteBehind(
            table.backend, max_queue_size=options.max_size, put_timeout=options.put_timeout
        )
        table.backend = table.writer
