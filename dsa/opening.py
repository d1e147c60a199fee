"""Opening a state directory: the lock, the policy for what is already there, creation, recovery.

Every mismatch, and every partial, truncated or foreign file, is an error before anything is changed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from dsa import system
from dsa.creation import JOURNAL_NAME, check_sources, create_state, require_space
from dsa.errors import (
    StateCorruptError,
    StateExistsError,
    StateIncompleteError,
    StateLockedError,
    StateMismatchError,
    StateNotFoundError,
    StateWarning,
)
from dsa.metadata import METADATA_NAME, Metadata, owned_files, read_metadata, write_metadata
from dsa.notices import notify
from dsa.recovery import continue_state
from dsa.state import StateDirectory
from dsa.storage import Storage, TableSpec
from dsa.table_files import remove_table_file

__all__ = ["open_state"]

_LOCK_NAME: Final = "dsa.lock"


def open_state(
    directory: str | os.PathLike[str],
    specs: Sequence[TableSpec],
    resume: bool | None,
    storage: Storage,
    *,
    exact: bool = True,
    last_step: int | None = None,
) -> StateDirectory:
    """Open, continue or replace the state in a directory.

    Args:
        directory: Made when it does not exist; an empty one is as good as none. Files that are not dsa's are
            left alone.
        specs: The tables asked for, in order.
        resume: None refuses to guess when there is state; True continues it; False replaces it, with a
            warning.
        storage: Layout of new tables, and the durability from now on.
        exact: Refuse state that holds other tables than `specs`; otherwise those are opened too, and tables
            that are missing are left to `dsa.creation.add_table`.
        last_step: Recover steps of the journal up to this one only.

    Raises:
        StateExistsError: there is state and `resume` is None.
        StateNotFoundError: there is none and `resume` is True.
        StateMismatchError: the stored tables differ from `specs`.
        StateCorruptError: a file is damaged, truncated, extended, missing or foreign.
        StateIncompleteError: a creation was interrupted, or a whole-table change without a journal.
        StateLockedError: another process holds the directory.
        DiskSpaceError: there is not enough room for new tables.
    """
    if not (resume is None or resume is True or resume is False):
        raise TypeError(f"resume={resume!r} is not a choice: pass None, True or False")
    path = Path(directory).absolute()
    if resume and not path.is_dir():
        raise _nothing_to_resume(path)
    path.mkdir(parents=True, exist_ok=True)
    lock = _take_lock(path)
    try:
        if resume is False:
            return _replace(path, lock, specs, storage)
        stored = read_metadata(path)
        _refuse_leftovers(path, stored)
        if stored is None:
            if resume:
                raise _nothing_to_resume(path)
            return create_state(path, lock, specs, storage)
        _refuse_unfinished(path, stored)
        if resume is None:
            raise StateExistsError(
                f"{_summary(path, stored)}: pass resume=True to continue it or resume=False to start over"
            )
        return continue_state(path, lock, specs, stored, storage, exact=exact, last_step=last_step)
    except BaseException:
        os.close(lock)
        raise


def _nothing_to_resume(path: Path) -> StateNotFoundError:
    return StateNotFoundError(
        f"there is no state to resume in {str(path)!r}: pass resume=None to start there, or correct the path"
    )


def _take_lock(path: Path) -> int:
    lock = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    if not system.lock_file(lock):
        holder = os.read(lock, 32).decode("ascii", "replace").strip()
        os.close(lock)
        who = "this very process" if holder == str(os.getpid()) else f"process {holder or 'unknown'}"
        raise StateLockedError(
            f"the state directory {str(path)!r} is in use by {who}: close the optimizer that holds it, end "
            "that process, or choose another directory"
        )
    try:
        with contextlib.suppress(OSError):  # a hint for people, which a full disk may refuse
            os.ftruncate(lock, 0)
            os.write(lock, f"{os.getpid()}\n".encode())
    except BaseException:
        os.close(lock)
        raise
    return lock


def _refuse_leftovers(path: Path, stored: Metadata | None) -> None:
    _refuse_legacy(path)
    files = owned_files(path)
    if stored is None and files:
        raise StateCorruptError(
            f"{str(path)!r} holds the table file {files[0].name!r} but no {METADATA_NAME}: restore the "
            "description from a copy, or pass resume=False to start over"
        )


def _refuse_legacy(path: Path) -> None:
    legacy = [*path.glob("dsa_global_meta.json"), *path.glob("*_w.dat")]
    if legacy:
        raise StateMismatchError(
            f"{str(path)!r} holds state of an older release ({legacy[0].name!r}), which this one does not "
            "read: choose another directory, or move the old files away"
        )


def _refuse_unfinished(path: Path, stored: Metadata) -> None:
    if stored.status == "creating":
        raise StateIncompleteError(
            f"the creation of the state in {str(path)!r} was interrupted ({stored.note}): nothing in it can "
            "be used; pass resume=False to start over"
        )
    if stored.status == "open" and stored.change is not None and stored.durability == "none":
        raise StateIncompleteError(
            f"a change of the whole state in {str(path)!r} was interrupted ({stored.change}) and there is no "
            "journal to finish it by: some rows have it and others do not; restore the directory from a "
            "copy, or pass resume=False to start over"
        )


def _summary(path: Path, stored: Metadata) -> str:
    tables = ", ".join(f"{table.get('name')!r} ({_shape(table)})" for table in stored.tables)
    held = f"state at step {stored.global_step}, with the tables {tables or 'none'}"
    return f"the directory {str(path)!r} already holds {held}"


def _shape(table: dict[str, Any]) -> str:
    backend = table.get("backend", {})
    return f"{backend.get('rows')} x {backend.get('schema', {}).get('dim')}"


def _replace(path: Path, lock: int, specs: Sequence[TableSpec], storage: Storage) -> StateDirectory:
    _refuse_legacy(path)
    files = owned_files(path)
    if not files and not (path / METADATA_NAME).exists():
        return create_state(path, lock, specs, storage)
    check_sources(path, specs, storage)
    require_space(path, specs, storage, freed=sum(_occupied(file) for file in files))
    notify(f"resume=False replaces the state in {str(path)!r}: what it held is lost", StateWarning)
    write_metadata(path, Metadata("creating", "", note="replacing an older state, which is lost"))
    for file in files:
        remove_table_file(file)
    (path / JOURNAL_NAME).unlink(missing_ok=True)
    return create_state(path, lock, specs, storage)


def _occupied(file: Path) -> int:
    status = file.stat()
    return int(getattr(status, "st_blocks", -(-status.st_size // 512))) * 512
