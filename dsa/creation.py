"""Making the files of a new state directory."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from dsa import system
from dsa.backends.base import StateBackend
from dsa.backends.memmap import MemmapBackend, file_bytes
from dsa.errors import DiskSpaceError
from dsa.init import FromArray, Initializer
from dsa.journal import Journal
from dsa.metadata import METADATA_NAME, Metadata, table_file_name, write_metadata
from dsa.state import StateDirectory
from dsa.storage import Storage, TableSpec
from dsa.table import Table
from dsa.weights import write_initial_weights
from dsa.writer import WriteBehind

__all__ = [
    "JOURNAL_NAME",
    "add_table",
    "check_sources",
    "create_state",
    "make_table",
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
    needed = sum(file_bytes(spec.source.rows, spec.schema, storage.stride) for spec in specs)
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
        system.probe_size(path, file_bytes(spec.source.rows, spec.schema, storage.stride))
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
    file = path / table_file_name(spec.name)
    file.unlink(missing_ok=True)  # what an interrupted creation may have left: no description names it
    backend: StateBackend = MemmapBackend.create(
        file, spec.source.rows, spec.schema, stride=storage.stride, allocate=storage.allocate
    )
    lazy = spec.source if isinstance(spec.source, Initializer) and "w" in spec.schema.names else None
    table = Table(spec.name, backend, lazy, spec.second_moment, spec.init_max_norm_fraction, spec.k)
    try:
        write_initial_weights(table, spec.source)
        if storage.durability == "power":
            backend.flush()
    except BaseException:
        with contextlib.suppress(OSError):
            backend.close()
        file.unlink()
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
    _queue_writes(table, storage)
    state.add(table)
    return table


def _discard(path: Path, tables: Sequence[Table]) -> None:
    """Remove what an unfinished creation has made, whatever state it is in."""
    steps: list[Callable[[], object]] = [table.backend.close for table in tables]
    steps += [(path / table_file_name(table.name)).unlink for table in tables]
    steps += [(path / JOURNAL_NAME).unlink, (path / METADATA_NAME).unlink]
    for step in steps:
        with contextlib.suppress(OSError):
            step()


def start(
    path: Path, lock: int, metadata: Metadata, tables: Sequence[Table], storage: Storage
) -> StateDirectory:
    """Begin to work with tables that are ready: an empty journal, write queues, the mark of an open state."""
    journal = None
    if storage.durability == "none":
        (path / JOURNAL_NAME).unlink(missing_ok=True)
    else:
        durable = storage.durability == "power"
        hot = not durable and storage.queue is None
        capacity = _HOT_BYTES if hot else _RETAINING_BYTES
        journal = Journal.create(path / JOURNAL_NAME, metadata.identity, capacity, durable, hot)
    for table in tables:
        _queue_writes(table, storage)
    metadata.durability, metadata.boot = storage.durability, system.boot_identity()
    state = StateDirectory(path, lock, metadata, tables, journal)
    try:
        state.mark_change(metadata.change)
    except BaseException:
        state.disown()
        raise
    return state


def _queue_writes(table: Table, storage: Storage) -> None:
    if storage.queue is not None:
        options = storage.queue
        table.writer = WriteBehind(
            table.backend, max_queue_size=options.max_size, put_timeout=options.put_timeout
        )
        table.backend = table.writer
