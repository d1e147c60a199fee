"""Making the files of a state, and beginning a life of it: what every switch of the whole ends with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from dsa.backends import system
from dsa.backends.base import Growing
from dsa.backends.writer import WriteBehind
from dsa.errors import DiskSpaceError, StateCorruptError
from dsa.rules.init import FromArray
from dsa.schema import Records, is_keyed
from dsa.state.content import TableContent, recast
from dsa.state.first_weights import first_content
from dsa.state.holding import HeldDirectory
from dsa.state.journal import Journal
from dsa.state.keys import Keys, require_owners
from dsa.state.metadata import (
    METADATA_NAME,
    Metadata,
    journal_files,
    read_metadata,
    unmark_failed,
    write_metadata,
)
from dsa.state.state_directory import StateDirectory, describe_files
from dsa.state.storage import Storage, TableSpec
from dsa.state.table import Table, describe_table, stamp_of
from dsa.state.table_files import (
    drain_backend,
    file_of,
    make_backend,
    new_file,
    probe_table,
    remove_table_file,
    sweep,
    table_bytes,
)

__all__ = [
    "add_table",
    "begin_life",
    "check_sources",
    "create_state",
    "is_current",
    "make_table",
    "queue_writes",
    "require_space",
    "start",
]

# Entries that are let go after each step use the same memory again and again: it stays in the cache if it is
# small.
_CHECK_BYTES: Final = 8 << 20
_FIRST_BYTES: Final = 1 << 20
_RETAINING_BYTES: Final = 64 << 20


def require_space(path: Path, specs: Sequence[TableSpec], storage: Storage) -> None:
    """Raise `DiskSpaceError` when tables with reserved space don't fit."""
    needed = sum(table_bytes(spec.facts.rows, spec.schema, storage.layout) for spec in specs)
    available = system.available_bytes(path)
    if storage.allocate == "reserve" and needed > available:
        raise DiskSpaceError(needed, available, str(path))


def check_sources(path: Path, specs: Sequence[TableSpec], storage: Storage) -> None:
    """Look at everything that could keep tables from being made, before anything is made for them.

    Raises:
        ValueError: an array of first weights holds a value that is not finite.
        OSError: the file system can't hold a file of a table's size.
    """
    for spec in specs:
        probe_table(path, spec.facts.rows, spec.schema, storage.layout)
        if isinstance(spec.source, FromArray):
            for _ in spec.source.blocks(max(1, _CHECK_BYTES // (4 * spec.source.dim))):
                pass


def create_state(
    held: HeldDirectory, specs: Sequence[TableSpec], storage: Storage, metadata: Metadata
) -> StateDirectory:
    """Make the files of every table and open them; nothing is left behind when that fails.

    An older state in the directory is replaced at the one instant when the description is.

    Args:
        held: The directory.
        specs: The tables.
        storage: How to store them.
        metadata: The description of a state without tables.

    Raises:
        DiskSpaceError: there is not enough room.
        ValueError: an array of first weights holds a value that is not finite.
    """
    path = held.path
    require_space(path, specs, storage)
    tables: list[Table] = []
    first = not (path / METADATA_NAME).exists()
    try:
        if first:
            write_metadata(path, Metadata("creating", "", note="making a new state"), held.directory)
        # In place, one by one: what is made before a failure has to be undone.
        tables.extend(make_table(path, first_content(spec), storage) for spec in specs)
        return start(held, metadata, tables, storage)
    except BaseException:
        if not is_current(path, metadata):
            _discard(path, tables, [path / METADATA_NAME] if first else [])
        for table in tables:
            with contextlib.suppress(OSError):
                table.close()
        raise


def make_table(
    path: Path,
    content: TableContent,
    storage: Storage,
    global_step: int | None = None,
    *,
    indexed: bool = True,
) -> Table:
    """Make the file of a table with some content, durably; nothing is left behind when that fails.

    Args:
        path: The state directory.
        content: The table.
        storage: How to store it.
        global_step: The step whose stamp the written rows get; None keeps their stamps.
        indexed: Whether ids are to be found in it, where rows belong to some; else it has no `Table.keys`,
            and takes rows as they are.

    Raises:
        CheckpointCorruptError: rows don't say clearly to which ids they belong, or two belong to one.
    """
    file, generation = new_file(path, content.name, storage.layout)
    facts = replace(content.facts, schema=content.stored or content.schema)
    backend = make_backend(file, facts.rows, facts.schema, storage)
    table = Table(facts, backend, generation=generation)
    keyed = indexed and is_keyed(facts.schema)
    try:
        expect_growth(table)
        for first, records in content.blocks():
            if keyed:
                require_owners(table.name, first, records)
            _write_block(table, first, records, global_step)
        drain_backend(backend)
        if keyed:
            table.keys = Keys.make(file, backend, mend=False)
        # Under every policy: what the description names is whole even if power is lost the moment after.
        backend.flush()
    except BaseException:
        _discard(path, [table], [])
        raise
    return table


def _write_block(table: Table, first: int, records: Records, global_step: int | None) -> None:
    # A rule gives untouched rows their weights: they stay holes.
    schema = table.backend.schema
    lazy = table.initializer is not None or "w" not in schema.names
    chosen = np.flatnonzero(records["s"] != 0) if lazy else np.arange(len(records))
    if len(chosen) == 0:
        return
    kept = records
    if len(chosen) < len(records) or records.dtype != schema.dtype:
        kept = recast(records[chosen], schema)
    if not lazy:
        kept["s"][kept["s"] == 0] = 1  # without a rule every row is one that was written
    if global_step is not None:
        kept["s"] = stamp_of(global_step)
    table.backend.reserve(first + chosen)
    table.backend.write(first + chosen, kept)
    table.rows_written += len(chosen)


def add_table(state: StateDirectory, spec: TableSpec, storage: Storage) -> Table:
    """Make one more table in an open state.

    Raises:
        DiskSpaceError: there is not enough room.
        ValueError: an array of first weights holds a value that is not finite.
    """
    require_space(state.path, [spec], storage)
    table = make_table(state.path, first_content(spec), storage)
    queue_writes(table, storage)
    table.rows_written = 0
    try:
        state.add(table)
    except BaseException:
        if table.name not in state.tables:
            _discard(state.path, [table], [])
        raise
    return table


def start(
    held: HeldDirectory, metadata: Metadata, tables: Sequence[Table], storage: Storage
) -> StateDirectory:
    """Open a state whose tables are ready: write queues, and a life of its own."""
    for table in tables:
        queue_writes(table, storage)
        table.rows_written = 0  # counted from the opening on
    journal = begin_life(held, metadata, tables, storage)
    try:
        for table in tables:
            expect_growth(table)  # now that the description says so
        unmark_failed(held.path)
        for file in journal_files(held.path):
            if journal is None or file.name != metadata.journal_name:
                system.retried(file.unlink, True)
        sweep(held.path, [(table.name, table.generation) for table in tables])
    except BaseException:
        if journal is not None:
            journal.close(remove=False)
        raise
    return StateDirectory(held, metadata, tables, journal, storage)


def begin_life(
    held: HeldDirectory, metadata: Metadata, tables: Sequence[Table], storage: Storage
) -> Journal | None:
    """Switch a directory to some tables, with an empty journal, at one instant.

    The tables' files and the journal's are complete and on the device before; the description is then
    replaced once. A kill or a loss of power at any moment leaves what was there before, or this; whose files
    are whose the description tells.

    Args:
        held: The directory.
        metadata: What the description is to say; brought up to date.
        tables: The open tables, in the state's order.
        storage: How to go on.

    Returns:
        The journal, or None where the durability asks for none.

    Raises:
        DiskSpaceError: there is no room for the journal; nothing has changed.
        OSError: the system refused; `is_current` tells whether the switch has happened.
    """
    path = held.path
    numbers = [int(each.suffix[1:] or 0) for each in journal_files(path) if each.suffix[1:].isdigit()]
    metadata.life = max([metadata.life, *numbers]) + 1
    metadata.status, metadata.note, metadata.failed = "open", "", ""
    metadata.durability, metadata.boot = storage.durability, system.boot_identity()
    metadata.journal = storage.durability != "none"
    metadata.tables = [describe_table(table) for table in tables]
    journal = _make_journal(path, metadata, storage) if metadata.journal else None
    try:
        metadata.files = describe_files(path, metadata, tables)
        system.sync_directory(path)  # the new names, before the description says them
        held.check()
        write_metadata(path, metadata, held.directory)
    except BaseException:
        if journal is not None:
            journal.close(remove=not is_current(path, metadata))
        raise
    return journal


def is_current(path: Path, metadata: Metadata) -> bool:
    """Tell whether the description in a directory is of this life of this state."""
    try:
        stored = read_metadata(path)
    except StateCorruptError:
        return False
    return stored is not None and (stored.identity, stored.life) == (metadata.identity, metadata.life)


def _make_journal(path: Path, metadata: Metadata, storage: Storage) -> Journal:
    durable, collected = storage.durability == "power", storage.layout.collect_bytes
    keeps = durable or storage.queue is not None or collected > 0
    limit = (collected or _RETAINING_BYTES) if keeps else 0
    first = min(_FIRST_BYTES, limit or _FIRST_BYTES)
    file = path / metadata.journal_name
    return Journal.create(file, metadata.journal_identity, first, durable, limit)


def expect_growth(table: Table) -> None:
    """Make growing a table cheap, where its backend can; its description doesn't name it, or as `GROWING`."""
    if isinstance(table.backend, Growing):
        table.backend.make_room(len(table))


def queue_writes(table: Table, storage: Storage) -> None:
    """Put a write queue in front of a table's backend, if the storage asks for one."""
    if isinstance(table.backend, WriteBehind):
        table.writer = table.backend  # which collects, see `Layout.collect_bytes`
    elif storage.queue is not None:
        options = storage.queue
        queue = WriteBehind(table.backend, max_queue_size=options.max_size, put_timeout=options.put_timeout)
        table.wrap(queue, queue)


def _discard(path: Path, tables: Sequence[Table], others: Sequence[Path]) -> None:
    """Remove what an unfinished creation has made, whatever state it is in."""
    steps: list[Callable[[], object]] = [table.close for table in tables]
    steps += [partial(remove_table_file, file_of(path, table)) for table in tables]
    steps += [other.unlink for other in others]
    for step in steps:
        with contextlib.suppress(OSError):
            step()
