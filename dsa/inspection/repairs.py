"""A way on for a state that can't be opened, or not silently: what is whole is taken, the rest is listed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from dsa.backends import system
from dsa.backends.base import Layout, StateBackend
from dsa.backends.writer import WriteBehind
from dsa.checkpoint.meter import Progress, metered
from dsa.errors import StateIncompleteError
from dsa.inspection.directory import nothing_there
from dsa.schema import Rows, Schema
from dsa.state.holding import HeldDirectory
from dsa.state.keys import remove_index
from dsa.state.metadata import Metadata, journal_files, read_metadata, unmark_failed, write_metadata
from dsa.state.recovery import defects, doubts, is_copy, make_anew, open_tables, replay
from dsa.state.storage import Storage, as_layout
from dsa.state.survey import Loss, adopt_newest, survey
from dsa.state.table import Table, blank_records, describe_table, fill_untouched, stamp_of
from dsa.state.table_files import drain_backend, file_of, stored_layout, sweep

__all__ = ["Repair", "RepairedTable", "repair"]

_BLOCK_BYTES: Final = 4 << 20
_EVERYTHING: Final = 1 << 62


@final
@dataclass(frozen=True, slots=True)
class RepairedTable:
    """What a repair has found in a table.

    Args:
        name: The user's name for it.
        rows: N.
        reset: The rows that were not whole and have their first weights and no moments now.
        later_rows: Rows that were written after `Repair.durable_step`.
    """

    name: str
    rows: int
    reset: tuple[int, ...]
    later_rows: int


@final
@dataclass(frozen=True, slots=True)
class Repair:
    """What a repair has found and done.

    Args:
        directory: The state directory.
        dry_run: Whether nothing was changed.
        problems: Why the state may lack steps, in words; empty when it lacks none.
        tables: What was found in each table, in the state's order.
        durable_step: The last step that the device is known to have held: the state is whole up to there, but
            for rows that were reset.
        global_step: The step that the state stands at now. Of the steps after `durable_step` all rows may be
            there, or some.
        newest_step: The newest step that has written a row which is there.
        exports_forgotten: Checkpoints that differential ones can't be relative to any more.
        changed: Whether anything was changed, or would be but for `dry_run`.
        report: The file that lists the same; None when there was nothing to list, or for `dry_run`.
    """

    directory: str
    dry_run: bool
    problems: tuple[str, ...]
    tables: tuple[RepairedTable, ...]
    durable_step: int
    global_step: int
    newest_step: int
    exports_forgotten: int
    changed: bool
    report: str | None = None

    @property
    def whole(self) -> bool:
        """Whether nothing was lost and no row reset."""
        return not self.problems and not self.reset_rows

    @property
    def reset_rows(self) -> int:
        """How many rows were reset."""
        return sum(len(table.reset) for table in self.tables)

    @property
    def later_rows(self) -> int:
        """How many rows were written after `durable_step`."""
        return sum(table.later_rows for table in self.tables)

    def to_json(self) -> dict[str, Any]:
        """Return everything by name, as what `json.dumps` takes."""
        return {
            "whole": self.whole,
            "reset_rows": self.reset_rows,
            "later_rows": self.later_rows,
            **asdict(self),
        }


def repair(
    directory: str | os.PathLike[str],
    *,
    dry_run: bool = False,
    progress: Progress = False,
    backend: Layout | None = None,
) -> Repair:
    """Make of a state directory, whatever has happened to it, one that is closed and opens silently.

    For a copy that was made while a process had the state open, a journal that is lost or damaged, bits that
    the disk has lost, a loss of power that cost steps, a device that has refused to sync. Of the journal
    everything is taken that is whole, unless a table holds a later record. Rows that are not whole are reset:
    to their first weights where a rule gives these, otherwise to zero, without moments. They are listed in a
    file ``dsa-repair-<n>.json`` in the directory, which is written before the first of them is changed. Of a
    state that is whole only what has to be is changed: nothing, or the mark that it was closed.

    The description, ``dsa.json``, is replaced at the end; killed before, the state can be repaired again.

    Args:
        directory: The state directory. Its description must be readable, and its table files of their
            length: rows that are not there can't be told from others.
        dry_run: Say what would be done, and change nothing.
        progress: True for a bar, or a function of the bytes done and their total.
        backend: The layout of tables whose kind is not one of the package's, see `dsa.backends.Layout`.

    Raises:
        StateNotFoundError: there is no state.
        StateCorruptError: the description is damaged or missing, or a table's file is missing, truncated,
            extended, or another's; nothing has changed.
        StateIncompleteError: there is nothing in the state yet.
        StateMismatchError: it is of an older release, or a checkpoint, or holds tables of a kind that is not
            known.
        StateLockedError: a process holds the directory.
        DiskSpaceError: there is no room.

    Example:
        >>> import tempfile
        >>> from dsa import DiskSparseRiemannianAdam, init
        >>> path = tempfile.mkdtemp()
        >>> tables = {"entity": init.Zeros(1000, 2)}
        >>> with DiskSparseRiemannianAdam(tables, k=0.0, disk_dir=path) as optimizer:
        ...     optimizer.step({"entity": ([1], [[1.0, 2.0]])})
        >>> found = repair(path)
        >>> found.whole, found.changed, found.global_step
        (True, False, 1)
    """
    layout = None if backend is None else as_layout(backend)
    path = Path(directory).absolute()
    _read(path)  # before a lock is made where no state is
    held = HeldDirectory.take(path)
    try:
        return _repair(held, _read(path), dry_run, progress, layout)
    finally:
        held.release()


def _read(path: Path) -> Metadata:
    stored = read_metadata(path) if path.is_dir() else None
    if stored is None:
        raise nothing_there(path)
    if stored.status == "creating":
        raise StateIncompleteError(
            f"the creation of the state in {str(path)!r} was interrupted ({stored.note}), so that there is "
            "nothing in it to repair: make it again, where it was to be made"
        )
    return stored


def _repair(
    held: HeldDirectory, stored: Metadata, dry_run: bool, progress: Progress, layout: Layout | None
) -> Repair:
    path = held.path
    problems = [*defects(stored, copied=is_copy(path, stored)), *doubts(stored)]
    storage = _storage_of(stored, layout)
    with contextlib.ExitStack() as opened:
        tables = open_tables(path, stored, storage)
        for table in tables:
            if dry_run:
                table.wrap(_Unwritten(table.backend))
            opened.callback(_let_go, table)
        steps = [table.steps for table in tables]
        if stored.status == "open" and stored.journal:
            same_system = stored.boot == system.boot_identity() and not is_copy(path, stored)
            fault = replay(path, stored, tables, by_stamp=True, same_system=same_system)
            problems += [f"its journal {fault}"] if fault else []
        losses = _survey(tables, stored, progress)
        newest = max([loss.newest - 1 for loss in losses] + [0])
        if newest > stored.global_step:
            problems = problems or [
                f"rows were written in step {newest}, where its description and journal know of "
                f"{stored.global_step} steps"
            ]
        adopt_newest(stored, tables, losses)
        found = _found(held, stored, problems, tables, losses, newest, dry_run)
        if dry_run or not found.changed:
            return found
        found = _report(held, found)
        for table in tables:
            remove_index(file_of(path, table))  # the next opening makes another
        if stored.failed:
            make_anew(path, tables, storage)
        for table, loss, before in zip(tables, losses, steps, strict=True):
            _reset(table, loss.torn, stored.global_step)
            if table.awaited is not None and (problems or table.steps != before):
                table.awaited = ""  # the fingerprint of its weights is older than the moments
        _close(held, stored, tables, found)
    return found


def _storage_of(stored: Metadata, layout: Layout | None) -> Storage:
    """Return how files are made anew: as they were."""
    if not stored.tables:
        return Storage()
    sparse = stored.tables[0]["backend"].get("allocate") == "sparse"
    return Storage("sparse" if sparse else "reserve", stored_layout(stored.tables[0], layout))


def _let_go(table: Table) -> None:
    table.close()


@final
class _Unwritten:
    """A `StateBackend` around another one, in which what is written waits and is then forgotten."""

    def __init__(self, backend: StateBackend) -> None:
        self._queue = WriteBehind(backend, collect_bytes=_EVERYTHING, threaded=False)
        self.hint, self.describe, self.close = self._queue.hint, self._queue.describe, self._queue.abandon
        self.read, self.write, self.scan = self._queue.read, self._queue.write, self._queue.scan

    @property
    def schema(self) -> Schema:
        """The layout of one record."""
        return self._queue.schema

    def __len__(self) -> int:
        return len(self._queue)

    def reserve(self, rows: Rows) -> None:
        """Do nothing: nothing is written."""

    def flush(self) -> None:
        """Do nothing: nothing is written."""


def _survey(tables: Sequence[Table], stored: Metadata, progress: Progress) -> list[Loss]:
    total = sum(len(table) * table.backend.schema.dtype.itemsize for table in tables)
    with metered(progress, total, "repair") as advance:
        return [survey(table, stored.durable_step, advance) for table in tables]


def _found(
    held: HeldDirectory,
    stored: Metadata,
    problems: Sequence[str],
    tables: Sequence[Table],
    losses: Sequence[Loss],
    newest: int,
    dry_run: bool,
) -> Repair:
    each = tuple(
        RepairedTable(table.name, len(table), tuple(loss.torn.tolist()), loss.unsure)
        for table, loss in zip(tables, losses, strict=True)
    )
    unsure = bool(problems) or any(table.reset for table in each)
    return Repair(
        str(held.path),
        dry_run,
        tuple(problems),
        each,
        stored.durable_step,
        stored.global_step,
        newest,
        len(stored.exports) if unsure else sum(at > stored.global_step for at in stored.exports.values()),
        unsure or stored.status != "closed",
    )


def _report(held: HeldDirectory, found: Repair) -> Repair:
    """Write down what is about to be done, unless there is nothing to tell."""
    if found.whole:
        return found
    numbers = [each.stem.rpartition("-")[2] for each in held.path.glob("dsa-repair-*.json")]
    number = max([int(each) for each in numbers if each.isdigit()] + [0]) + 1
    file = held.path / f"dsa-repair-{number}.json"
    found = replace(found, report=str(file))
    system.write_atomically(file, json.dumps(found.to_json(), indent=1).encode(), held.directory)
    return found


def _reset(table: Table, rows: Rows, global_step: int) -> None:
    """Give rows their first weights, or zeros, without moments."""
    block = max(1, _BLOCK_BYTES // table.backend.schema.dtype.itemsize)
    for start in range(0, len(rows), block):
        some = rows[start : start + block]
        records = fill_untouched(table, some, blank_records(table, len(some), 0))
        # A stamp: the next differential checkpoint has to hold them.
        records["s"] = np.int32(stamp_of(global_step))
        table.backend.reserve(some)
        table.backend.write(some, records)


def _close(held: HeldDirectory, stored: Metadata, tables: Sequence[Table], found: Repair) -> None:
    """Mark a state whose tables are in order as closed, at one instant."""
    path = held.path
    for table in tables:
        drain_backend(table.backend)
        table.backend.flush()
    stored.exports = (
        {root: at for root, at in stored.exports.items() if at <= stored.global_step} if found.whole else {}
    )
    stored.status, stored.journal, stored.files, stored.failed = "closed", False, {}, ""
    stored.durable_step = stored.global_step
    stored.tables = [describe_table(table) for table in tables]
    system.sync_directory(path)
    held.check()
    write_metadata(path, stored, held.directory)
    unmark_failed(path)
    for file in journal_files(path):
        system.retried(file.unlink, True)
    sweep(path, [(table.name, table.generation) for table in tables])
