"""One state directory: its lock, its metadata, its tables, and the policy for what is already there.

Every mismatch, and every partial, truncated or foreign file, is an error before anything is changed.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, final

from dsa import system
from dsa.backends.base import StateBackend
from dsa.backends.memmap import Allocate, MemmapBackend, Stride, file_bytes
from dsa.errors import (
    DiskSpaceError,
    StateClosedError,
    StateCorruptError,
    StateExistsError,
    StateIncompleteError,
    StateLockedError,
    StateMismatchError,
    StateNotFoundError,
    StateWarning,
)
from dsa.init import FromArray, Initializer, from_json
from dsa.manifolds import curvature_from_json
from dsa.metadata import METADATA_NAME, Metadata, owned_files, read_metadata, table_file_name, write_metadata
from dsa.schema import Records, Rows, Schema
from dsa.table import Table, describe_table
from dsa.weights import write_initial_weights

__all__ = ["Change", "StateDirectory", "Storage", "TableSpec", "open_state"]

_LOCK_NAME: Final = "dsa.lock"


@final
@dataclass(frozen=True, slots=True)
class TableSpec:
    """A table as the caller asks for it.

    Args:
        name: Any non-empty string.
        schema: Layout of a record.
        source: The rule or the array that gives the first weights.
        k: Curvature magnitude.
        second_moment: The meaning of ``v``.
        init_max_norm_fraction: See `dsa.table.Table`.
    """

    name: str
    schema: Schema
    source: Initializer | FromArray
    k: float
    second_moment: str
    init_max_norm_fraction: float


@final
@dataclass(frozen=True, slots=True)
class Storage:
    """How new table files are laid out; see `MemmapBackend.create`.

    Args:
        allocate: ``"reserve"`` or ``"sparse"``.
        stride: None for the rule, ``"packed"``, ``"page"``, or bytes.
    """

    allocate: Allocate = "reserve"
    stride: Stride = None


class Change(NamedTuple):
    """New records of some rows of one table, part of a step."""

    table: Table
    rows: Rows
    records: Records


@final
class StateDirectory:
    """An open state directory. Made by `open_state`; closed by `close`."""

    def __init__(self, path: Path, lock: int, metadata: Metadata, tables: Sequence[Table]) -> None:
        self.path = path
        self.tables = {table.name: table for table in tables}
        self.global_step = metadata.global_step
        self._lock: int | None = lock
        self._process = os.getpid()

    def commit(self, changes: Sequence[Change]) -> None:
        """Store one step: the new records of every table concerned, and the counts."""
        self.require_open()
        for table, rows, records in changes:
            table.backend.write(rows, records)
        for table, _, _ in changes:
            table.steps += 1
        self.global_step += 1

    @contextlib.contextmanager
    def whole_table_change(self, what: str) -> Iterator[None]:
        """Mark the directory while a whole-table change runs, so that the next open can explain a kill.

        Args:
            what: The change in words, for that explanation.
        """
        self.require_open()
        self._save("changing", what)
        yield
        self._save("open")

    def flush(self) -> None:
        """Return once the state is durable."""
        self.require_open()
        for table in self.tables.values():
            table.backend.flush()
        self._save("open")

    def close(self) -> None:
        """Flush, mark the directory as closed and release it; silent when repeated, and in a forked child."""
        if self._lock is None or os.getpid() != self._process:
            return
        lock, self._lock = self._lock, None
        try:
            for table in self.tables.values():
                table.backend.close()
            self._save("closed")
        finally:
            os.close(lock)

    def require_open(self) -> None:
        """Raise `StateClosedError` when the state was closed or belongs to another process."""
        if self._lock is None:
            raise StateClosedError(
                f"the state directory {str(self.path)!r} was closed: build the optimizer again with "
                "resume=True to go on"
            )
        if os.getpid() != self._process:
            raise StateClosedError(
                f"the state directory {str(self.path)!r} belongs to process {self._process} and this is a "
                "fork of it: use the optimizer in the "
                "process that made it"
            )

    def _save(self, status: str, change: str = "") -> None:
        tables = [describe_table(table) for table in self.tables.values()]
        write_metadata(self.path, Metadata(status, self.global_step, tables, change))


def open_state(
    directory: str | os.PathLike[str], specs: Sequence[TableSpec], resume: bool | None, storage: Storage
) -> StateDirectory:
    """Open, continue or replace the state in a directory.

    Args:
        directory: Made when it does not exist; an empty one is as good as none. Files that are not dsa's are
            left alone.
        specs: The tables asked for, in order.
        resume: None refuses to guess when there is state; True continues it; False replaces it, with a
            warning.
        storage: Layout of new tables.

    Raises:
        StateExistsError: there is state and `resume` is None.
        StateNotFoundError: there is none and `resume` is True.
        StateMismatchError: the stored tables differ from `specs`.
        StateCorruptError: a file is damaged, truncated, extended, missing or foreign.
        StateIncompleteError: a creation or a whole-table change was interrupted.
        StateLockedError: another process holds the directory.
        DiskSpaceError: there is not enough room for new tables.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    lock = _take_lock(path)
    try:
        if resume is False:
            return _replace(path, lock, specs, storage)
        stored = read_metadata(path)
        _refuse_leftovers(path, stored)
        if stored is None:
            if resume:
                raise StateNotFoundError(
                    f"there is no state to resume in {str(path)!r}: pass resume=None to start there, or "
                    "correct the path"
                )
            return _create(path, lock, specs, storage)
        _refuse_unfinished(path, stored)
        if resume is None:
            raise StateExistsError(
                f"{_summary(path, stored)}: pass resume=True to continue it or resume=False to start over"
            )
        return _continue(path, lock, specs, stored)
    except BaseException:
        os.close(lock)
        raise


def _take_lock(path: Path) -> int:
    lock = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    if not system.lock_file(lock):
        holder = os.read(lock, 32).decode("ascii", "replace").strip()
        os.close(lock)
        raise StateLockedError(
            f"the state directory {str(path)!r} is in use by process {holder or 'unknown'}: close that "
            "optimizer, end that process, or choose another "
            "directory"
        )
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    return lock


def _refuse_leftovers(path: Path, stored: Metadata | None) -> None:
    """Refuse directories that hold table files without a description, or the files of releases up to 0.3."""
    _refuse_legacy(path)
    files = owned_files(path)
    if stored is None and files:
        raise StateCorruptError(
            f"{str(path)!r} holds the table file {files[0].name!r} but no {METADATA_NAME}: restore the "
            "description from a copy, or pass "
            "resume=False to start over"
        )


def _refuse_legacy(path: Path) -> None:
    legacy = [*path.glob("dsa_global_meta.json"), *path.glob("*_w.dat")]
    if legacy:
        raise StateMismatchError(
            f"{str(path)!r} holds state of an older release ({legacy[0].name!r}), which this one does not "
            "read: choose another directory, or move the "
            "old files away"
        )


def _summary(path: Path, stored: Metadata) -> str:
    tables = ", ".join(
        f"{table.get('name')!r} ({table.get('backend', {}).get('rows')} x "
        f"{table.get('backend', {}).get('schema', {}).get('dim')})"
        for table in stored.tables
    )
    held = f"state at step {stored.global_step}, with the tables {tables or 'none'}"
    return f"the directory {str(path)!r} already holds {held}"


def _replace(path: Path, lock: int, specs: Sequence[TableSpec], storage: Storage) -> StateDirectory:
    _refuse_legacy(path)
    files = owned_files(path)
    if not files and not (path / METADATA_NAME).exists():
        return _create(path, lock, specs, storage)
    old = sum(
        file.stat().st_blocks * 512 if hasattr(os.stat_result, "st_blocks") else file.stat().st_size
        for file in files
    )
    _require_space(path, specs, storage, freed=old)
    warnings.warn(
        f"resume=False replaces the state in {str(path)!r}: what it held is lost", StateWarning, stacklevel=5
    )
    write_metadata(path, Metadata("creating", change="replacing an older state, which is lost"))
    for file in files:
        file.unlink()
    return _create(path, lock, specs, storage)


def _require_space(path: Path, specs: Sequence[TableSpec], storage: Storage, freed: int = 0) -> None:
    if storage.allocate != "reserve":
        return
    needed = sum(file_bytes(spec.source.rows, spec.schema, storage.stride) for spec in specs)
    available = system.available_bytes(path) + freed
    if needed > available:
        raise DiskSpaceError(needed, available, str(path))


def _create(path: Path, lock: int, specs: Sequence[TableSpec], storage: Storage) -> StateDirectory:
    _require_space(path, specs, storage)
    made: list[Path] = []
    tables: list[Table] = []
    try:
        if not (path / METADATA_NAME).exists():
            write_metadata(path, Metadata("creating", change="making a new state"))
        for spec in specs:
            file = path / table_file_name(spec.name)
            backend = MemmapBackend.create(
                file, spec.source.rows, spec.schema, stride=storage.stride, allocate=storage.allocate
            )
            made.append(file)
            tables.append(_new_table(spec, backend))
            write_initial_weights(tables[-1], spec.source)
        state = StateDirectory(path, lock, Metadata("open"), tables)
        state._save("open")
    except BaseException:
        _discard(path, tables, made)
        raise
    return state


def _new_table(spec: TableSpec, backend: StateBackend) -> Table:
    lazy = None if isinstance(spec.source, FromArray) else spec.source
    return Table(spec.name, backend, lazy, spec.second_moment, spec.init_max_norm_fraction, spec.k)


def _discard(path: Path, tables: Sequence[Table], files: Sequence[Path]) -> None:
    """Remove what an unfinished creation has made, whatever state it is in."""
    steps: list[Callable[[], object]] = [table.backend.close for table in tables]
    steps += [file.unlink for file in files]
    steps.append((path / METADATA_NAME).unlink)
    for step in steps:
        with contextlib.suppress(OSError):
            step()


def _refuse_unfinished(path: Path, stored: Metadata) -> None:
    if stored.status == "creating":
        raise StateIncompleteError(
            f"the creation of the state in {str(path)!r} was interrupted ({stored.change}): nothing in it "
            "can be used; pass resume=False to start over"
        )
    if stored.status == "changing":
        raise StateIncompleteError(
            f"a change of the whole state in {str(path)!r} was interrupted ({stored.change}): some rows have "
            "it and others do not; restore the directory "
            "from a copy, or pass resume=False to start over"
        )


def _continue(path: Path, lock: int, specs: Sequence[TableSpec], stored: Metadata) -> StateDirectory:
    if stored.status == "open":
        warnings.warn(
            f"the state in {str(path)!r} was not closed: its process ended early, and the rows of its last "
            "step may be partly new",
            StateWarning,
            stacklevel=5,
        )
    by_name = _match_names(path, specs, stored)
    with contextlib.ExitStack() as opened:
        tables: list[Table] = []
        for spec in specs:
            tables.append(_open_table(path, spec, by_name[spec.name]))
            opened.callback(tables[-1].backend.close)
        state = StateDirectory(path, lock, stored, tables)
        state._save("open")
        opened.pop_all()
    return state


def _match_names(path: Path, specs: Sequence[TableSpec], stored: Metadata) -> dict[str, dict[str, Any]]:
    by_name = {str(table.get("name")): table for table in stored.tables}
    wanted = {spec.name for spec in specs}
    if wanted != set(by_name):
        raise StateMismatchError(
            f"the state in {str(path)!r} holds the tables {sorted(by_name)} but {sorted(wanted)} are asked "
            "for: pass the stored ones, or another directory"
        )
    return by_name


def _open_table(path: Path, spec: TableSpec, stored: dict[str, Any]) -> Table:
    description = stored.get("backend")
    if not isinstance(description, dict) or not isinstance(description.get("rows"), int):
        raise StateCorruptError(
            f"the description of table {spec.name!r} in {str(path)!r} lacks its backend: restore "
            f"{METADATA_NAME} from a copy"
        )
    _match_table(spec, stored, description)
    initializer = None if stored.get("init") is None else from_json(stored["init"])
    table = Table(
        spec.name,
        MemmapBackend.open(path / table_file_name(spec.name), description),
        initializer,
        spec.second_moment,
        float(stored["init_max_norm_fraction"]),
        curvature_from_json(stored.get("k")),
        int(stored.get("steps", 0)),
    )
    if table.k != spec.k:
        warnings.warn(
            f"table {spec.name!r} was stored with k={table.k!r}, which is kept; the k={spec.k!r} asked for "
            f"is ignored: call set_curvature({spec.k!r}) to "
            "change it",
            StateWarning,
            stacklevel=6,
        )
    return table


def _match_table(spec: TableSpec, stored: dict[str, Any], description: dict[str, Any]) -> None:
    schema = Schema.from_json(description.get("schema"))
    if (description["rows"], schema.dim) != (spec.source.rows, spec.schema.dim):
        raise StateMismatchError(
            f"table {spec.name!r} is stored as {description['rows']} x {schema.dim} but {spec.source.rows} x "
            f"{spec.schema.dim} is asked for: pass a table of "
            "the stored shape, or another directory"
        )
    if schema != spec.schema or stored.get("second_moment") != spec.second_moment:
        raise StateMismatchError(
            f"table {spec.name!r} is stored with second_moment={stored.get('second_moment')!r} and the "
            f"fields {_fields(schema)} but "
            f"second_moment={spec.second_moment!r} with {_fields(spec.schema)} is asked for: the stored "
            "moments would be misread; pass the stored options, or "
            "another directory"
        )


def _fields(schema: Schema) -> str:
    return ", ".join(f"{field.name} {field.dtype} per {field.per}" for field in schema.fields)
