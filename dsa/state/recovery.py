"""Opening the files of an existing state: matching what is asked for, and recovery to the last whole step.

How a state that was not closed is recovered depends on what its process could promise:

- The process died, or power was lost under ``"power"``: the journal is replayed, and the state is whole.
- Power was lost, or may have been, under ``"process"``: journal and tables are what the device happens to
  hold. Of the journal's rows those are taken that are newer than the tables'; torn records are known by their
  checksums, and how much may be missing by the stamps of the rest. That is told, never guessed.
- Without a journal the last step may be torn, and how many there were only the rows tell. That is told, too.
- The device has refused to sync: the tables are made anew, since their files can't be relied on. But under
  ``"power"``, tables and journal may have gone back as after a loss of power, and are taken likewise.
- A copy of a directory that was open is refused: its files are of different moments.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dsa.backends import system
from dsa.backends.base import StateBackend
from dsa.backends.births import is_same_file
from dsa.errors import StateCorruptError, StateError, StateWarning, notify
from dsa.state.creation import make_table, start
from dsa.state.facts import stored_facts, unreadable_table
from dsa.state.holding import HeldDirectory, file_numbers
from dsa.state.indexing import make_keys, open_keys
from dsa.state.journal import Journal
from dsa.state.journal_format import Entry
from dsa.state.journal_salvage import salvage_journal
from dsa.state.keys import KeyChange
from dsa.state.matching import match_names, match_stored_table, warn_of_curvature
from dsa.state.metadata import Metadata, mark_failed, read_metadata, write_metadata
from dsa.state.progress import Progress, progress_of
from dsa.state.state_directory import StateDirectory
from dsa.state.storage import Storage, TableSpec
from dsa.state.survey import Loss, adopt_newest, survey
from dsa.state.table import Table, content_of
from dsa.state.table_files import drain_backend, match_layout, open_backend, stored_layout
from dsa.state.write_back import look_at

__all__ = [
    "continue_state",
    "defects",
    "doubts",
    "is_copy",
    "make_anew",
    "open_tables",
    "replay",
    "require_fitting",
]


Which = Literal["all", "not older", "newer"]
"""Which rows of a journal entry are taken: all, those not older than the table's, those newer."""


def continue_state(
    held: HeldDirectory, specs: Sequence[TableSpec], stored: Metadata, storage: Storage, *, exact: bool
) -> StateDirectory:
    """Open the tables of a stored state, recovered to the last committed step.

    Args:
        held: The directory.
        specs: The tables asked for.
        stored: The description of the state.
        storage: How to go on.
        exact: Refuse a state that holds other tables than those asked for.

    Raises:
        StateMismatchError: the stored tables differ from `specs`.
        StateCorruptError: a file is damaged, truncated, extended, missing or foreign, or the directory is a
            copy that was made while it was open.
    """
    path = held.path
    by_name = {str(table.get("name")): table for table in stored.tables}
    if exact:
        match_names(path, specs, by_name)
    for spec in specs:
        if spec.name in by_name:
            match_stored_table(path, spec, by_name[spec.name], storage)
    for name, description in by_name.items():
        match_layout(name, description["backend"], storage.backend)
    if stored.tables:
        storage = replace(storage, backend=stored_layout(stored.tables[0], storage.backend))
    if is_copy(path, stored):
        raise StateCorruptError(
            f"{str(path)!r} is a copy that was made while a process had the state open, so that its files "
            "are of different moments: copy it when it is closed, or export a checkpoint from the process "
            f"that trains; `dsa repair {path}` takes what is whole of this one and says what is not"
        )
    with contextlib.ExitStack() as opened:
        if stored.status == "open" and not stored.failed:
            _look_back(held, stored)
        tables = open_tables(path, stored, storage)
        for table in tables:
            opened.callback(_close, table)
        open_keys(path, stored, tables)
        if stored.status == "open":
            _secure_journal(held, stored)
            if stored.failed:
                make_anew(path, tables, storage)
            _recover(path, stored, tables)
            for table in tables:
                drain_backend(table.backend)
        make_keys(path, tables)
        if stored.status == "open" and (stored.failed or "power" in (stored.durability, storage.durability)):
            # The journal goes, and what the process before this one has written may be in the page cache
            # only.
            with _noting_failure(held, stored):
                for table in tables:
                    table.backend.flush()
        for spec in specs:
            for table in tables:
                if table.name == spec.name:
                    warn_of_curvature(table, spec)
        state = start(held, stored, tables, storage)
        opened.pop_all()
    return state


def _look_back(held: HeldDirectory, stored: Metadata) -> None:
    """Take in what could not be written back of what a process has left, if the system still knows."""
    error = look_at(held.path, stored.files)
    if error is not None:
        with contextlib.suppress(OSError), _noting_failure(held, stored):
            raise error


def _secure_journal(held: HeldDirectory, stored: Metadata) -> None:
    """Bring the entries of a durable journal onto the device before the tables are to hold them.

    The last one may be in the page cache only. Were its rows on the device without it, another loss of power
    would leave a torn step. A device that refuses, or has refused before, will never have it for certain:
    the tables' files then stay as they are until others take their place.
    """
    if stored.journal and stored.durability == "power" and not stored.failed:
        journal = Journal.open(held.path / stored.journal_name, stored.journal_identity, durable=False)
        try:
            with contextlib.suppress(OSError), _noting_failure(held, stored):
                journal.sync()
        finally:
            journal.close(remove=False)


@contextlib.contextmanager
def _noting_failure(held: HeldDirectory, stored: Metadata) -> Iterator[None]:
    """Remember that the device has refused a sync: the next one would return, and mean nothing."""
    try:
        yield
    except OSError as error:
        stored.failed = f"{error}"
        # What recovery has brought up to date in memory is not on the device.
        known = read_metadata(held.path)
        if known is not None:
            mark_failed(held.path, held.directory)
            write_metadata(held.path, replace(known, failed=stored.failed), held.directory)
        raise


def _close(table: Table) -> None:
    table.close()


def open_tables(path: Path, stored: Metadata, storage: Storage) -> list[Table]:
    """Open the files of all tables.

    Raises:
        StateCorruptError: one is damaged, truncated, extended, missing or foreign; none stays open.
    """
    with contextlib.ExitStack() as opened:
        tables: list[Table] = []
        for description in stored.tables:
            tables.append(_open_table(path, str(description["name"]), description, storage))
            opened.callback(tables[-1].close)
        opened.pop_all()
    return tables


def is_copy(path: Path, stored: Metadata) -> bool:
    """Tell whether the files in a directory are other ones than those that a process had open."""
    if stored.status != "open":
        return False
    found = file_numbers(path, [name for name in stored.files if name != "."])
    return any(not is_same_file(found.get(name, number), number) for name, number in stored.files.items())


def defects(stored: Metadata, *, copied: bool) -> list[str]:
    """Return what is wrong with a state by its description, in words.

    Args:
        stored: The description.
        copied: Whether its files are other ones, see `is_copy`.
    """
    found = []
    if stored.failed:
        found.append(
            f"the device refused to keep it ({stored.failed}): what was written after step "
            f"{stored.durable_step} may be gone"
        )
    if copied:
        found.append(
            "it is a copy that was made while a process had the state open: its files are of different "
            "moments"
        )
    return found


def doubts(stored: Metadata) -> list[str]:
    """Return why a state may lack steps of which nobody can tell, in words."""
    if stored.status != "open":
        return []
    found = []
    if not stored.journal:
        found.append(
            "it was not closed and has no journal (durability='none'): its last steps may be there in part, "
            f"and of those after step {stored.global_step} only its rows tell; the next opening counts them"
        )
    if stored.boot != system.boot_identity() and stored.durability != "power":
        found.append(
            "the machine was restarted while it was open: with "
            f"durability={stored.durability!r} that may have lost or torn steps"
        )
    return found


def _recover(path: Path, stored: Metadata, tables: Sequence[Table]) -> None:
    """Bring tables and description of a directory that was not closed to where they can go on."""
    before = [table.steps for table in tables]
    restarted = stored.boot != system.boot_identity()
    found = ""
    if not stored.journal:
        _count_anew(path, stored, tables)
    elif stored.durability == "process" and (restarted or stored.failed):
        found = _salvage(path, stored, tables, restarted)
    else:
        replay(path, stored, tables)
        # What was exported at a later step is not of this history any more.
        stored.exports = {root: at for root, at in stored.exports.items() if at <= stored.global_step}
    for table, steps in zip(tables, before, strict=True):
        if table.awaited is not None and not (stored.journal and table.steps == steps and not restarted):
            table.awaited = ""  # the fingerprint is older than the moments
    if stored.failed and stored.durability != "power":
        stored.exports = {}
        notify(
            f"the device refused to keep the state in {str(path)!r} ({stored.failed}): rows that were "
            f"written after step {stored.durable_step} may have gone back to what they were then; its "
            f"files are made anew{found}; import a checkpoint if that will not do",
            StateWarning,
        )
    elif found:
        notify(
            f"the machine was restarted while the state in {str(path)!r} was open, with "
            f"durability='process', which may have lost or torn steps: {found}; import a checkpoint if that "
            "will not do, and see durability='power'",
            StateWarning,
        )


def replay(
    path: Path,
    stored: Metadata,
    tables: Sequence[Table],
    *,
    by_stamp: bool = False,
    same_system: bool = False,
) -> str:
    """Write what the journal says to the tables, and bring the description to the last step in it.

    Args:
        path: The state directory.
        stored: Its description, brought up to date.
        tables: The open tables.
        by_stamp: Take whatever is whole of the journal, and leave rows alone that the tables hold of a later
            step: the journal on disk may be an old one.
        same_system: With `by_stamp`, whether these are the very files of a process that died, and the machine
            was not restarted: what a step was changing in place is then undone.

    Returns:
        What is wrong with the journal, see `Salvaged`. Always nothing unless `by_stamp`.

    Raises:
        StateCorruptError: the journal is missing, damaged, another one's, or does not fit the tables; with
            `by_stamp` only the last.
        DiskSpaceError: there is no room for rows in a sparse file.
    """
    file, identity = path / stored.journal_name, stored.journal_identity
    if by_stamp:
        entries, fault, unfinished = salvage_journal(file, identity)
        for entry, followed in entries:
            _take(stored, tables, entry, "not older" if followed else "newer")
        if unfinished is not None and same_system:
            _undo(tables, unfinished)
        return fault
    journal = Journal.open(file, identity, durable=False)
    try:
        for entry in journal.entries():
            _take(stored, tables, entry, "all")
        unfinished = journal.open_entry()
        if unfinished is not None:
            _undo(tables, unfinished)
    finally:
        journal.close(remove=False)
    return ""


def _take(stored: Metadata, tables: Sequence[Table], entry: Entry, which: Which) -> None:
    """Write a journal entry's rows to the tables, and adopt its counts; doing so again changes nothing."""
    progress = Progress.from_bytes(entry.note, progress_of(tables, stored.global_step))
    _apply(tables, entry, which)
    exact = which == "all"
    stored.global_step = progress.global_step if exact else max(stored.global_step, progress.global_step)
    for table, steps, decay in zip(tables, progress.steps, progress.decays, strict=True):
        table.steps = steps if exact else max(table.steps, steps)
        table.decay = decay if exact else max(table.decay, decay)
    for index, change in progress.keys.items():
        if isinstance(change, KeyChange) and len(change.rows) and change.rows.max() >= len(tables[index]):
            raise StateCorruptError(
                f"entry {entry.sequence} of the journal gives ids rows outside table {index}: restore the "
                "directory from a copy"
            )
        if (keys := tables[index].keys) is not None:
            keys.apply(change)


def require_fitting(entry: Entry, tables: Sequence[StateBackend]) -> None:
    """Raise `StateCorruptError` when a journal entry is about other tables than a state's."""
    for index, rows, raw in entry.parts:
        table = tables[index] if index < len(tables) else None
        if table is None or raw.shape[1] != _stored_bytes(entry, table):
            raise StateCorruptError(
                f"entry {entry.sequence} of the journal does not fit the state's tables: restore the "
                "directory from a copy"
            )
        if len(rows) and not (rows[0] >= 0 and rows[-1] < len(table)):
            raise StateCorruptError(
                f"entry {entry.sequence} of the journal names rows outside table {index}: restore the "
                "directory from a copy"
            )


def _stored_bytes(entry: Entry, table: StateBackend) -> int:
    """Return the bytes that an entry holds of each record: an image has the checksum, too."""
    if not entry.in_place:
        return table.schema.dtype.itemsize
    return table.schema.dtype.itemsize + 4  # of a table with stamps, which all have that are trained


def _apply(tables: Sequence[Table], entry: Entry, which: Which) -> None:
    require_fitting(entry, [table.backend for table in tables])
    for index, rows, raw in entry.parts:
        backend = tables[index].backend
        records = np.ascontiguousarray(raw).view(backend.schema.dtype)[:, 0]
        if which != "all":
            # Of the same step, the journal's is the later one, unless entries after it are lost.
            there = backend.read(rows)["s"]
            wanted = np.flatnonzero(there <= records["s"] if which == "not older" else there < records["s"])
            rows, records = np.ascontiguousarray(rows[wanted]), np.ascontiguousarray(records[wanted])
        backend.reserve(rows)
        backend.write(rows, records)


def _undo(tables: Sequence[Table], entry: Entry) -> None:
    """Put back what a step that was not completed has changed in place; doing so again changes nothing."""
    backends = [table.backend for table in tables]
    require_fitting(entry, backends)
    for index, rows, raw in entry.parts:
        backend, mapped = backends[index], tables[index].mapped
        if mapped is not None:
            mapped.restore(rows, np.ascontiguousarray(raw).view(np.int32))
        else:  # what only seems to be written
            size = backend.schema.dtype.itemsize
            backend.write(rows, np.ascontiguousarray(raw[:, :size]).view(backend.schema.dtype)[:, 0])


def _count_anew(path: Path, stored: Metadata, tables: Sequence[Table]) -> None:
    """Take what a process without a journal has left, count its steps by its rows, and say what may be."""
    stored.exports = {}
    began = time.monotonic()
    losses = [survey(table, stored.durable_step) for table in tables]
    adopt_newest(stored, tables, losses)
    seconds = time.monotonic() - began
    notify(
        f"the state in {str(path)!r} was not closed and has no journal (durability='none'): it is whole up "
        f"to step {stored.durable_step}; its rows, which took {seconds:.1f} s to read, tell of steps up to "
        f"{stored.global_step}, and those may be there in part; {_torn(path, losses)}; import a checkpoint "
        "if that will not do, and see durability='process'",
        StateWarning,
    )


def _torn(path: Path, losses: Sequence[Loss]) -> str:
    torn = sum(len(loss.torn) for loss in losses)
    advice = f": `dsa repair {path}` lists and resets them" if torn else ""
    return f"{torn:,} rows are torn and can't be used{advice}"


def _salvage(path: Path, stored: Metadata, tables: Sequence[Table], restarted: bool) -> str:
    """Take what has been left of a state of which device or journal may have lost something.

    Returns:
        What is there and what is missing, in words.
    """
    stored.exports = {}
    fault = replay(path, stored, tables, by_stamp=True, same_system=not restarted)
    journal = f"the journal {fault}; " if fault else ""
    losses = [survey(table, stored.durable_step) for table in tables]
    adopt_newest(stored, tables, losses)
    unsure = sum(loss.unsure for loss in losses)
    return (
        f"{journal}it is whole up to step {stored.durable_step}; of the steps up to {stored.global_step} "
        f"{unsure:,} rows are there, others may be missing; {_torn(path, losses)}"
    )


def make_anew(path: Path, tables: Sequence[Table], storage: Storage) -> None:
    """Copy each table to a file of its own, whose blocks the device has not refused."""
    for table in tables:
        old = table.backend
        made = make_table(
            path, content_of(table), storage, indexed=False
        )  # rows may change until it is recovered
        table.take_over(made)
        with contextlib.suppress(OSError):
            old.close()


def _open_table(path: Path, name: str, stored: dict[str, Any], storage: Storage) -> Table:
    facts = stored_facts(path, stored)
    try:
        backend = open_backend(path, name, stored, storage)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, StateError):
            raise
        raise unreadable_table(path, name, error) from error
    return Table(facts, backend, generation=stored.get("generation", 0), awaited=stored.get("weights"))
