"""Opening the files of an existing state: matching what is asked for, and recovery from the journal."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsa import system
from dsa.content import TableContent
from dsa.creation import JOURNAL_NAME, start
from dsa.errors import StateCorruptError, StateMismatchError, StateWarning
from dsa.init import from_json
from dsa.journal import Journal
from dsa.manifolds import curvature_from_json
from dsa.metadata import METADATA_NAME, Metadata, write_metadata
from dsa.notices import notify
from dsa.progress import Progress
from dsa.schema import Schema
from dsa.state import StateDirectory, apply_entry
from dsa.storage import Storage, TableSpec
from dsa.table import Table
from dsa.table_files import drain_backend, match_kind, match_layout, open_backend, stored_layout, sweep

__all__ = ["continue_state", "match_content", "match_table", "warn_of_curvature"]


def continue_state(
    path: Path,
    lock: int,
    specs: Sequence[TableSpec],
    stored: Metadata,
    storage: Storage,
    *,
    exact: bool,
    last_step: int | None,
) -> StateDirectory:
    """Open the tables of a stored state, recovered to the last committed step.

    Args:
        path: The directory.
        lock: The descriptor that holds its lock.
        specs: The tables asked for.
        stored: The description of the state.
        storage: How to go on.
        exact: Refuse a state that holds other tables than those asked for.
        last_step: Recover steps up to this one only.

    Raises:
        StateMismatchError: the stored tables differ from `specs`.
        StateCorruptError: a file is damaged, truncated, extended, missing or foreign.
    """
    by_name = {str(table.get("name")): table for table in stored.tables}
    if exact:
        _match_names(path, specs, by_name)
    for spec in specs:
        if spec.name in by_name:
            _match_table(path, spec, by_name[spec.name], storage)
    for name, description in by_name.items():
        match_kind(name, description["backend"], storage.backend)
    if storage.backend is None and stored.tables:
        storage = replace(storage, backend=stored_layout(stored.tables[0]))
    with contextlib.ExitStack() as opened:
        tables: list[Table] = []
        for name, description in by_name.items():
            tables.append(_open_table(path, name, description, storage))
            opened.callback(tables[-1].backend.close)
        if stored.status == "open":
            _recover(path, stored, tables, last_step)
            if storage.durability == "power" and stored.durability != "power":
                # What the process before this one has written may be in the page cache only.
                _flush(tables)
        for spec in specs:
            for table in tables:
                if table.name == spec.name:
                    warn_of_curvature(table, spec, stored.change)
        sweep(path, [(table.name, table.generation) for table in tables])
        state = start(path, lock, stored, tables, storage)
        opened.pop_all()
    return state


def _recover(path: Path, stored: Metadata, tables: Sequence[Table], last_step: int | None) -> None:
    """Bring tables and metadata of a directory that was not closed to its last committed step, durably."""
    if stored.durability == "none":
        stored.exports = {}
        notify(
            f"the state in {str(path)!r} was not closed and has no journal (durability='none'): the rows of "
            "its last steps may be partly new, and the count of steps is that of the last flush, "
            f"{stored.global_step}",
            StateWarning,
        )
        return
    restarted = stored.durability == "process" and stored.boot != system.boot_identity()
    if restarted:
        stored.exports = {}
        notify(
            f"the machine was restarted while the state in {str(path)!r} was open: with durability='process' "
            "that may have lost or torn steps; durability='power' survives it",
            StateWarning,
        )
    try:
        _replay_file(path, stored, tables, last_step)
    except StateCorruptError as error:
        # Nobody synced the journal. Without it a change of a whole table can't be finished, a step can.
        if not restarted or stored.change is not None:
            raise
        notify(
            f"{error}; the restart has left the tables as they are on disk, at about step "
            f"{stored.global_step}: go on if that will do, or import a checkpoint",
            StateWarning,
        )
    if stored.durability == "power":
        _flush(tables)
    # What was exported at a later step is not of this history any more.
    stored.exports = {root: at for root, at in stored.exports.items() if at <= stored.global_step}
    # From here on the tables and the description say it all, and a new journal may take the old one's place.
    stored.status = "closed"
    write_metadata(path, stored)


def _replay_file(path: Path, stored: Metadata, tables: Sequence[Table], last_step: int | None) -> None:
    journal = Journal.open(path / JOURNAL_NAME, stored.identity, durable=False)
    try:
        _replay(journal, stored, tables, last_step)
        for table in tables:
            drain_backend(table.backend)
    finally:
        journal.close(remove=False)


def _flush(tables: Sequence[Table]) -> None:
    for table in tables:
        table.backend.flush()


def _replay(journal: Journal, stored: Metadata, tables: Sequence[Table], last_step: int | None) -> None:
    for entry in journal.entries():
        progress = Progress.from_bytes(entry.note, len(tables))
        if last_step is not None and progress.global_step > last_step:
            break
        apply_entry(tables, entry)
        stored.global_step, stored.change = progress.global_step, progress.change
        # A table that was added later is not in the entry.
        for table, steps, k in zip(tables, progress.steps, progress.curvatures, strict=False):
            table.steps, table.k = steps, k
    stored.tables = [
        {**old, "k": t.k, "steps": t.steps} for old, t in zip(stored.tables, tables, strict=True)
    ]


def _match_names(path: Path, specs: Sequence[TableSpec], by_name: dict[str, dict[str, Any]]) -> None:
    wanted = {spec.name for spec in specs}
    if wanted != set(by_name):
        raise StateMismatchError(
            f"the state in {str(path)!r} holds the tables {sorted(by_name)} but {sorted(wanted)} are asked "
            "for: pass the stored ones, or another directory"
        )


def _open_table(path: Path, name: str, stored: dict[str, Any], storage: Storage) -> Table:
    try:
        fraction, steps, second_moment = (
            stored["init_max_norm_fraction"],
            stored["steps"],
            stored["second_moment"],
        )
        return Table(
            name,
            open_backend(path, name, stored, storage),
            None if stored["init"] is None else from_json(stored["init"]),
            str(second_moment),
            float(fraction),
            curvature_from_json(stored["k"]),
            int(steps),
            generation=stored.get("generation", 0),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, StateCorruptError):
            raise
        raise StateCorruptError(
            f"the description of table {name!r} in {str(path)!r} can't be read ({error!r}): restore "
            f"{METADATA_NAME} from a copy"
        ) from error


def warn_of_curvature(table: Table, spec: TableSpec, change: dict[str, Any] | None = None) -> None:
    """Warn when the curvature asked for is not the stored one, which is kept."""
    stored = table.k
    if change is not None and change.get("table") == table.name:
        stored = change.get("k", stored)  # an interrupted set_curvature is finished at the first use
    if stored != spec.k:
        notify(
            f"table {table.name!r} was stored with k={stored!r}, which is kept; the k={spec.k!r} asked for "
            f"is ignored: call set_curvature({spec.k!r}) to change it",
            StateWarning,
        )


def match_table(table: Table, spec: TableSpec) -> None:
    """Raise `StateMismatchError` when an open table is not the one asked for."""
    _match(len(table), table.backend.schema, table.second_moment, spec)


def match_content(content: TableContent, spec: TableSpec) -> None:
    """Raise `StateMismatchError` when a table of older state is not the one asked for."""
    _match(content.rows, content.schema, content.second_moment, spec)


def _match_table(path: Path, spec: TableSpec, stored: dict[str, Any], storage: Storage) -> None:
    description = stored.get("backend")
    if not isinstance(description, dict) or not isinstance(description.get("rows"), int):
        raise StateCorruptError(
            f"the description of table {spec.name!r} in {str(path)!r} lacks its backend: restore "
            f"{METADATA_NAME} from a copy"
        )
    schema = Schema.from_json(description.get("schema"))
    try:
        _match(description["rows"], schema, str(stored.get("second_moment")), spec)
        match_layout(spec.name, spec.source.rows, schema, description, storage.backend)
    except StateMismatchError as error:
        raise StateMismatchError(f"in {str(path)!r}, {error}") from None


def _match(rows: int, schema: Schema, second_moment: str, spec: TableSpec) -> None:
    if (rows, schema.dim) != (spec.source.rows, spec.schema.dim):
        raise StateMismatchError(
            f"table {spec.name!r} is stored as {rows} x {schema.dim} but {spec.source.rows} x "
            f"{spec.schema.dim} is asked for: pass a table of the stored shape, or another directory"
        )
    if schema != spec.schema or second_moment != spec.second_moment:
        raise StateMismatchError(
            f"table {spec.name!r} is stored with second_moment={second_moment!r} and the fields "
            f"{_fields(schema)} but second_moment={spec.second_moment!r} with {_fields(spec.schema)} is "
            "asked for: the stored moments would be misread; pass the stored options, or another directory"
        )


def _fields(schema: Schema) -> str:
    return ", ".join(f"{field.name} {field.dtype} per {field.per}" for field in schema.fields)
