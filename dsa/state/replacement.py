"""Changes of whole tables: the new ones are made beside the old, then one switch makes them the state's.

Every change that concerns more than the rows of a batch goes this way, whatever its name: a checkpoint is
imported, the curvature changes, weights or moments are loaded. A kill or a loss of power at any instant
leaves the old state or the new one, whole, under every durability; the files that are not in use go
afterwards, if need be with the next opening. The disk has to hold both for a while.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np

from dsa.backends import system
from dsa.errors import DiskSpaceError
from dsa.rules.curvature import CurvatureMap, recurve
from dsa.rules.init import FromArray
from dsa.rules.manifolds import manifold_of
from dsa.schema import Records
from dsa.state.content import StateContent, TableContent
from dsa.state.creation import begin_life, is_current, make_table, queue_writes
from dsa.state.holding import HeldDirectory
from dsa.state.metadata import METADATA_NAME, Metadata, write_metadata
from dsa.state.state_directory import StateDirectory
from dsa.state.storage import Storage
from dsa.state.table import Table, content_of, describe_table, require_plausible, set_weights, stamp_of
from dsa.state.table_files import file_of, remove_table_file, table_bytes
from dsa.state.transactions import Effect

__all__ = [
    "change_curvature",
    "replace_content",
    "replace_tables",
    "replace_weights",
    "transformed",
    "write_content",
]

Transform = Callable[[int, Records], Records]
"""Returns what a block of records from a row on becomes; untouched ones keep their stamp 0."""


def change_curvature(
    state: StateDirectory,
    wanted: Sequence[tuple[Table, float]],
    mapping: CurvatureMap,
    reset_moments: bool,
) -> None:
    """Carry every row of some tables over to other curvatures, of all tables or of none.

    Rows that were never written stay so: their first weights are drawn for the new space.

    Args:
        state: The state of the tables.
        wanted: Each table with its new curvature magnitude.
        mapping: See `dsa.rules.curvature.recurve`.
        reset_moments: See `dsa.rules.curvature.recurve`.

    Raises:
        ValueError: a curvature is out of range.
        CorruptRowError: a row holds implausible values; nothing has changed.
        DiskSpaceError: there is no room for both; nothing has changed.
    """
    changes = [(table, k) for table, k in wanted if k != table.k or reset_moments]
    replace_tables(state, [_recurved(table, k, mapping, reset_moments) for table, k in changes])


def _recurved(table: Table, k: float, mapping: CurvatureMap, reset_moments: bool) -> TableContent:
    old, new = table.space, manifold_of(k)

    def recurved(first: int, records: Records) -> Records:
        return recurve(records, old, new, table.rule, mapping, reset_moments)

    return replace(transformed(table, recurved), facts=replace(table.facts, k=k))


def replace_weights(state: StateDirectory, table: Table, source: FromArray) -> None:
    """Set the weights of all rows, brought into the table's space; moments and counters stay.

    Raises:
        ValueError: a weight is not finite; nothing has changed.
        CorruptRowError: a stored row is implausible; nothing has changed.
        DiskSpaceError: there is no room for both; nothing has changed.
    """

    def loaded(first: int, records: Records) -> Records:
        weights = source.rows_of(first, first + len(records)).astype(np.float64)
        set_weights(table, records, table.space.project(weights)[0], stamp_of(state.global_step))
        return records

    replace_tables(state, [transformed(table, loaded)])


def transformed(table: Table, transform: Transform) -> TableContent:
    """Return a table's content with each block of records changed, and the written ones checked before.

    A record that is changed keeps its stamp; the switch gives it the state's step.
    """
    content = content_of(table)

    def blocks() -> Iterator[tuple[int, Records]]:
        for first, records in content.blocks():
            require_plausible(table, first, records)
            yield first, transform(first, records)

    return replace(content, blocks=blocks)


def replace_tables(state: StateDirectory, contents: Sequence[TableContent]) -> None:
    """Replace some tables of an open state, all of them or none; the others and the step stay.

    The state is to be held (`StateDirectory.exclusive`). Rows that are written get the stamp of the state's
    step: differential checkpoints hold what has changed.

    Args:
        state: The state.
        contents: The new content of tables of the state.

    Raises:
        DiskSpaceError: there is no room for both; nothing has changed.
        Exception: reading the content failed; nothing has changed.
    """
    if not contents:
        return
    state.flush()
    made = _make_tables(state.path, contents, state.storage, state.global_step)
    fresh = {table.name: table for table in made}
    metadata = replace(deepcopy(state.metadata), global_step=state.global_step)
    _switch(state, metadata, [fresh.get(name, table) for name, table in state.tables.items()], made)


def replace_content(state: StateDirectory, content: StateContent, effects: Sequence[Effect] = ()) -> None:
    """Replace everything that a state holds, wholly or not at all.

    The state is to be held (`StateDirectory.exclusive`). Tables keep their places; those of a state without
    any are made.

    Args:
        state: The state.
        content: Tables of the names and shapes of the state's own, or any for a state without tables.
        effects: What changes with it beside the tables.

    Raises:
        DiskSpaceError: there is no room for both; nothing has changed.
        Exception: reading `content` failed; nothing has changed.
    """
    made = _make_tables(state.path, content.tables, state.storage)
    _switch(state, replace(_metadata_of(content), life=state.metadata.life), made, made, effects)
    state.settle()


def write_content(held: HeldDirectory, content: StateContent, storage: Storage) -> None:
    """Make a closed state of some content in a directory that holds none, wholly or not at all.

    Raises:
        DiskSpaceError: there is no room; nothing has changed.
        Exception: reading `content` failed; nothing has changed.
    """
    path = held.path
    if not (path / METADATA_NAME).exists():
        # Killed before the end, the new files must not pass for those of a state whose description is lost.
        write_metadata(path, Metadata("creating", "", note="making it of other content"), held.directory)
    metadata, made = _metadata_of(content), []
    try:
        made = _make_tables(path, content.tables, storage)
        metadata.tables = [describe_table(table, closing=True) for table in made]
        metadata.durability = storage.durability
        system.sync_directory(path)
        write_metadata(path, metadata, held.directory)
        for table in made:
            table.close(metadata.journal_identity)
    except BaseException:
        if not is_current(path, metadata):
            _unmake(path, made)
            (path / METADATA_NAME).unlink(missing_ok=True)
        raise


def _metadata_of(content: StateContent) -> Metadata:
    return Metadata(
        "closed",
        content.identity or secrets.token_hex(8),
        content.global_step,
        exports=dict(content.exports),
        durable_step=content.global_step,
    )


def _make_tables(
    path: Path, contents: Sequence[TableContent], storage: Storage, global_step: int | None = None
) -> list[Table]:
    """Make the files of new tables, durably; none is left behind when that fails."""
    needed = sum(table_bytes(table.rows, table.stored or table.schema, storage.layout) for table in contents)
    available = system.available_bytes(path)
    if storage.allocate == "reserve" and needed > available:
        raise DiskSpaceError(
            needed,
            available,
            str(path),
            "or export a checkpoint and import it elsewhere (old and new tables lie side by side for a "
            "while)",
        )
    made: list[Table] = []
    try:
        # In place, one by one: what is made before a failure has to be undone.
        made.extend(make_table(path, content, storage, global_step) for content in contents)
    except BaseException:
        _unmake(path, made)
        raise
    return made


def _switch(
    state: StateDirectory,
    metadata: Metadata,
    tables: Sequence[Table],
    made: Sequence[Table],
    effects: Sequence[Effect] = (),
) -> None:
    for table in made:
        queue_writes(table, state.storage)
    try:
        journal = begin_life(state.held, metadata, tables, state.storage)
        state.adopt(metadata, tables, journal, effects)
    except BaseException:
        if is_current(state.path, metadata):
            state.abandon()  # the directory says what memory does not: whoever opens it next will see
        else:
            _unmake(state.path, made)
        raise


def _unmake(path: Path, made: Sequence[Table]) -> None:
    for table in made:
        with contextlib.suppress(OSError):
            table.close()
        remove_table_file(file_of(path, table))
