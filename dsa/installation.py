"""Giving an open state other content: a checkpoint's, or that of an older release's directory.

The new tables are written beside the old ones. Then one replacement of the description makes them the
state's, so that a kill at any instant leaves the old state or the new one, whole; the files that are not in
use go afterwards, if need be with the next opening. The disk has to hold both for a while.
"""

from __future__ import annotations

import contextlib
import secrets

import numpy as np

from dsa import system
from dsa.content import StateContent, TableContent
from dsa.creation import JOURNAL_NAME, make_journal, queue_writes
from dsa.errors import DiskSpaceError
from dsa.metadata import Metadata, write_metadata
from dsa.schema import Records
from dsa.state import StateDirectory
from dsa.table import Table, describe_table
from dsa.table_files import file_of, make_backend, new_file, remove_table_file, sweep, table_bytes

__all__ = ["install_content"]


def install_content(state: StateDirectory, content: StateContent) -> None:
    """Replace everything that a state holds, wholly or not at all.

    The state is to be held (`StateDirectory.exclusive`) with nothing pending. Tables keep their places; those
    of a state without any are made.

    Args:
        state: The state.
        content: Tables of the names and shapes of the state's own, or any for a state without tables.

    Raises:
        DiskSpaceError: there is no room for both; nothing has changed.
        Exception: reading `content` failed; nothing has changed.
    """
    _require_space(state, content)
    made: list[Table] = []
    try:
        # In place, one by one: what is made before a failure has to be undone.
        made.extend(_make_table(state, each) for each in content.tables)
        system.sync_directory(state.path)
    except BaseException:
        for table in made:
            _remove(state, table)
        raise
    metadata = Metadata(
        "closed",
        content.identity or secrets.token_hex(8),
        content.global_step,
        [describe_table(table) for table in made],
        None,
        state.storage.durability,
        system.boot_identity(),
        exports=dict(content.exports),
    )
    try:
        write_metadata(state.path, metadata)
        state.release_files()
        journal = make_journal(state.path / JOURNAL_NAME, metadata.identity, state.storage)
        for table in made:
            queue_writes(table, state.storage)
        state.replace(metadata, made, journal)
    except BaseException:
        # Which of the two is on disk can't be told from here: whoever opens the directory next will see.
        state.abandon()
        raise
    sweep(state.path, [(table.name, table.generation) for table in made])


def _require_space(state: StateDirectory, content: StateContent) -> None:
    needed = sum(
        table_bytes(table.rows, table.stored or table.schema, state.storage.layout)
        for table in content.tables
    )
    available = system.available_bytes(state.path)
    if state.storage.allocate == "reserve" and needed > available:
        raise DiskSpaceError(needed, available, str(state.path))


def _make_table(state: StateDirectory, content: TableContent) -> Table:
    old = state.tables.get(content.name)
    generation = 0 if old is None else old.generation + 1
    file = new_file(state.path, content.name, state.storage.layout, generation)
    backend = make_backend(file, content.rows, content.stored or content.schema, state.storage)
    table = Table(
        content.name,
        backend,
        content.initializer,
        content.second_moment,
        content.init_max_norm_fraction,
        content.k,
        content.steps,
        generation=generation,
    )
    try:
        for first, records in content.blocks():
            _write_block(table, first, records)
        backend.flush()
    except BaseException:
        _remove(state, table)
        raise
    return table


def _write_block(table: Table, first: int, records: Records) -> None:
    # A rule gives untouched rows their weights: they stay holes.
    lazy = table.initializer is not None
    chosen = np.flatnonzero(records["s"] != 0) if lazy else np.arange(len(records))
    if len(chosen) == 0:
        return
    if records.dtype == table.backend.schema.dtype:
        kept = records if len(chosen) == len(records) else records[chosen]
    else:
        kept = np.zeros(len(chosen), table.backend.schema.dtype)
        for name in kept.dtype.names or ():
            kept[name] = records[name][chosen]
    if not lazy and "w" in table.backend.schema.names:
        kept = kept.copy()
        kept["s"] = np.maximum(kept["s"], 1)  # without a rule every row is one that was written
    table.backend.write(first + chosen, np.ascontiguousarray(kept))


def _remove(state: StateDirectory, table: Table) -> None:
    with contextlib.suppress(OSError):
        table.backend.close()
    remove_table_file(file_of(state.path, table))
