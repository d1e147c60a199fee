"""Is what is on disk whole? Every block of a checkpoint, every record of a state directory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from dsa.backends.base import Layout
from dsa.checkpoint import Checkpoint, OpenedContent, open_content
from dsa.checkpoint.meter import Advance, Progress, metered
from dsa.checkpoint.places import StorageOptions
from dsa.checkpoint.reading import StoredTable, verify_tables
from dsa.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointIncompleteError,
    CheckpointNotFoundError,
    StateClosedError,
    StateCorruptError,
    StateIncompleteError,
)
from dsa.inspection import StateView, TableView
from dsa.inspection.id_checks import OwnersCheck, bad_owners
from dsa.inspection.sources import table_path
from dsa.inspection.subjects import Kind, find_checkpoint, state_directory
from dsa.kernels.plausible import describe_fault, first_implausible
from dsa.schema import Records, is_keyed
from dsa.state.metadata import journal_files, owned_files
from dsa.state.recovery import defects, doubts
from dsa.state.table import lost_rows, outside_rows

__all__ = ["Verification", "verify"]

_MOST_PER_TABLE: Final = 5
_TRIES: Final = 5

_Damage = (StateCorruptError, StateIncompleteError, CheckpointCorruptError, CheckpointIncompleteError)


@final
@dataclass(frozen=True, slots=True)
class Verification:
    """What a verification found.

    Args:
        url: What was looked at.
        kind: ``"state"``, or the kind of the checkpoint; None when that can't be told any more.
        global_step: Steps that the state has taken; None likewise.
        tables: How many tables were read.
        nbytes: Bytes of content that were read and compared or judged.
        problems: What is wrong, the first ones of each table; empty when nothing is.
        remarks: What is no damage but good to know.
    """

    url: str
    kind: Kind | None
    global_step: int | None
    tables: int
    nbytes: int
    problems: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return everything by name, as what `json.dumps` takes."""
        return {"ok": self.ok, **asdict(self)}


def verify(
    url: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    progress: Progress = False,
    storage_options: StorageOptions | None = None,
    backend: Layout | None = None,
) -> Verification:
    """Find out whether a state directory or a checkpoint is whole; nothing of it is changed.

    Of a checkpoint every block is compared with its checksum, and of a differential one its base's too. Of a
    state directory, description, headers and sizes of files and the journal are checked, and of every record
    its checksum and whether its values are some that training produces. What can't be found is a record that
    is whole and of an earlier step than it should be; where a rule gives first weights, also one of zeros.

    Args:
        url: A state directory, or a checkpoint at a path or an fsspec URL.
        base: The full checkpoint that a differential one is relative to, if it isn't beside it.
        progress: True for a bar, or a function of the bytes done and their total.
        storage_options: For fsspec.
        backend: The layout of tables whose kind is not one of the package's, see `dsa.backends.Layout`.

    Raises:
        CheckpointNotFoundError: nothing is there, or a differential checkpoint's base is not.
        StateMismatchError, CheckpointMismatchError: it is of another format, of another release, or
            holds tables of a kind that is not known.

    Example:
        >>> import tempfile
        >>> from dsa import DiskSparseRiemannianAdam, init
        >>> path = tempfile.mkdtemp()
        >>> tables = {"entity": init.Zeros(1000, 2)}
        >>> with DiskSparseRiemannianAdam(tables, k=0.0, disk_dir=f"{path}/run") as optimizer:
        ...     _ = optimizer.export_checkpoint(f"{path}/checkpoint")
        >>> verify(f"{path}/run").ok, verify(f"{path}/checkpoint").ok
        (True, True)
    """
    name = os.fspath(url)
    directory = state_directory(url, storage_options)
    if directory is not None:
        return _verified_directory(directory, progress, backend)
    try:
        checkpoint = find_checkpoint(url, storage_options)
    except _Damage as error:
        return Verification(name, None, None, 0, 0, (str(error),))
    return _verified_checkpoint(checkpoint, base, progress, storage_options)


def _verified_directory(directory: Path, progress: Progress, backend: Layout | None) -> Verification:
    for _ in range(_TRIES):
        # A process that trains may replace whole tables meanwhile.
        with contextlib.suppress(StateClosedError):
            return _verified_once(directory, progress, backend)
    return _verified_once(directory, progress, backend)


def _verified_once(directory: Path, progress: Progress, backend: Layout | None) -> Verification:
    try:
        with StateView(directory.absolute(), tolerant=True, backend=backend) as view:
            return _verified_state(view, progress)
    except _Damage as error:
        return Verification(str(directory), "state", None, 0, 0, (str(error),))


def _verified_checkpoint(
    checkpoint: Checkpoint,
    base: str | os.PathLike[str] | None,
    progress: Progress,
    storage_options: StorageOptions | None,
) -> Verification:
    problems: list[str] = []
    opened = None
    expected = checkpoint.nbytes
    if checkpoint.kind == "delta":
        try:
            opened = open_content(checkpoint.url, base=base, storage_options=storage_options)
            expected += opened.nbytes
        except CheckpointNotFoundError:
            raise  # without its base nobody can tell
        except CheckpointError as error:
            problems.append(str(error))
    read = 0
    with metered(progress, expected, "verify") as advance:

        def count(size: int) -> None:
            nonlocal read
            read += size
            advance(size)

        problems = [*_bad_blocks(checkpoint, count), *problems]
        if opened is not None and not problems:
            problems += _bad_together(opened, count)
        if not problems and any(is_keyed(table.schema) for table in checkpoint.tables):
            content = checkpoint.stored_content(verify=False) if opened is None else opened.content
            problems += [each for table in content.tables for each in bad_owners(table)]
    manifest = checkpoint.manifest
    return Verification(
        checkpoint.url, manifest.kind, manifest.global_step, len(checkpoint.tables), read, tuple(problems)
    )


def _bad_together(opened: OpenedContent, advance: Advance) -> list[str]:
    """Return what is wrong with a delta over its base, which an import would read just so."""
    tables = opened.content.tables
    share = opened.nbytes / sum(table.rows * table.schema.dtype.itemsize for table in tables)
    try:
        for table in tables:
            for _, records in table.blocks():
                advance(round(records.nbytes * share))
    except _Damage as error:
        return [f"together with its base: {error}"]
    return []


def _bad_blocks(checkpoint: Checkpoint, advance: Advance) -> Iterator[str]:
    """Yield what is wrong with the first bad block of each field."""
    for table in checkpoint.stored:
        for name, array in table.arrays.items():
            try:
                verify_tables(checkpoint.source, [StoredTable(table.entry, {name: array})], advance)
            except CheckpointCorruptError as error:
                yield str(error)


def _verified_state(view: StateView, progress: Progress) -> Verification:
    nbytes = sum(table.rows * table.schema.dtype.itemsize for table in view.tables.values())
    problems: list[str] = []
    remarks: list[str] = []
    with metered(progress, nbytes, "verify") as advance:
        for table in view.tables.values():
            try:
                with OwnersCheck(table.name) as owners:
                    wrong = _bad_rows(view, table, owners, advance)
                    problems += wrong
                    if is_keyed(table.schema) and not wrong:
                        others, told = _compared(view, table, owners)
                        problems, remarks = [*problems, *others], [*remarks, *told]
            except StateCorruptError as error:
                problems.append(str(error))
    interrupted, standing = _standing(view)
    return Verification(
        str(view.path),
        "state",
        view.global_step,
        len(view.tables),
        nbytes,
        (*interrupted, *problems),
        (*standing, *remarks),
    )


def _compared(view: StateView, table: TableView, owners: OwnersCheck) -> tuple[list[str], list[str]]:
    """Compare the index of a table's ids with its records, where nobody has them open."""
    stored = view.observed.metadata()
    if stored.status != "closed":
        return [], []  # the index follows the records, or is put right by the next opening
    described = next(each for each in stored.tables if each["name"] == table.name)
    return owners.compare(table_path(view.path, described), stored.journal_identity)


def _bad_rows(view: StateView, table: TableView, owners: OwnersCheck, advance: Advance) -> list[str]:
    """Return what is wrong with the first bad rows of a table."""
    problems: list[str] = []
    latest = _Latest()
    for first, records in table.scan():
        start = 0
        while len(problems) < _MOST_PER_TABLE:
            position = first_implausible(records[start:], table.rule.non_negative)
            if position < 0:
                break
            start += position
            fault = describe_fault(records, start, table.rule.non_negative)
            problems.append(f"row {first + start} of table {table.name!r} can't be used: {fault}")
            start += 1
        if not problems:
            problems += _outside(table, first, records) or _lost(table, first, records)
            latest.take(first, records)
            if is_keyed(table.schema) and (wrong := owners.take(first, records)):
                # Beside a process that trains an id may have got another row since: it is looked at again.
                problems += wrong if view.status == "closed" else bad_owners(table.content())
        advance(records.nbytes)
        if problems:
            return problems
    # A process that trains may have gone on since: the step is asked for last.
    if latest.stamp > view.global_step + 1 and not _is_unsure(view):
        problems.append(
            f"row {latest.row} of table {table.name!r} was written in step {latest.stamp - 1}, and the state "
            f"is at step {view.global_step}: its description or the table is not of this state"
        )
    return problems


@final
class _Latest:
    """The row that was written last."""

    def __init__(self) -> None:
        self.stamp = 0
        self.row = 0

    def take(self, first: int, records: Records) -> None:
        """Take in a block."""
        position = int(np.argmax(records["s"]))
        if records["s"][position] > self.stamp:
            self.stamp, self.row = int(records["s"][position]), first + position


def _outside(table: TableView, first: int, records: Records) -> list[str]:
    """Return what is wrong with the first row outside the ball, if there is one."""
    places = np.flatnonzero(outside_rows(records, table.k))
    if not len(places):
        return []
    norm = float(np.linalg.norm(records["w"][places[0]].astype(np.float64)))
    return [
        f"row {first + int(places[0])} of table {table.name!r} can't be used: its norm {norm:.6g} is outside "
        f"the ball of radius {table.k**-0.5:.6g}"
    ]


def _lost(table: TableView, first: int, records: Records) -> list[str]:
    """Return what is wrong with the first row that can't be as it is, if there is one."""
    places = np.flatnonzero(lost_rows(records, table.initializer is not None))
    if not len(places):
        return []
    return [
        f"row {first + int(places[0])} of table {table.name!r} can't be used: it is zero, as if it had never "
        "been written, and every row of this table was"
    ]


def _is_unsure(view: StateView) -> bool:
    """Tell whether rows may be of later steps than the state is known to stand at."""
    stored = view.observed.metadata()
    return bool(view.observed.fault or defects(stored, copied=view.copied) or doubts(stored))


def _standing(view: StateView) -> tuple[list[str], list[str]]:
    """Return what is wrong with the state as a whole, and what is good to know of it."""
    stored = view.observed.metadata()
    problems = defects(stored, copied=view.copied)
    if fault := view.observed.fault:
        problems.append(f"its journal {fault}, so that its last steps may be lost, or there in part")
    problems = [f"{each}; `dsa repair {view.path}` takes what is whole of it" for each in problems]
    remarks: list[str] = []
    if stored.status == "open" and stored.journal and not problems:
        remarks.append(
            "it was not closed: a process has it open, or was killed; the next opening replays its journal, "
            "which is whole"
        )
    remarks += doubts(stored)
    if view.observed.spared:
        remarks.append("its journal is damaged in records that the tables hold, so that nothing is lost")
    names = {table_path(view.path, table).name for table in stored.tables}
    left = [each.name for each in owned_files(view.path) if each.name not in names]
    if left:
        remarks.append(f"table files that no description names: {', '.join(left)}")
    journal = stored.journal_name if stored.journal else ""
    left = [each.name for each in journal_files(view.path) if each.name != journal]
    if left:
        remarks.append(f"journals of an earlier or later time: {', '.join(left)}")
    return problems, remarks
