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
    StateNotFoundError,
    StateWarning,
)
from dsa.legacy import Curvatures, Shapes, find_legacy, read_legacy
from dsa.metadata import METADATA_NAME, Metadata, owned_files, read_metadata, write_metadata
from dsa.migration import migrate_in_place, set_aside
from dsa.notices import notify
from dsa.recovery import continue_state, match_content
from dsa.state import StateDirectory
from dsa.storage import Storage, TableSpec
from dsa.table_files import remove_table_file

__all__ = ["migrate_directory", "open_state"]

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
    _refuse_checkpoint(path)
    path.mkdir(parents=True, exist_ok=True)
    lock = _take_lock(path)
    try:
        if resume is False:
            return _replace(path, lock, specs, storage)
        if resume:
            _migrate(path, lock, specs, storage)
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


def _refuse_checkpoint(path: Path) -> None:
    if (path / "zarr.json").exists() and not (path / METADATA_NAME).exists():
        raise StateExistsError(
            f"{str(path)!r} is a Zarr group, such as a checkpoint, not a state directory: open another "
            "directory and call import_checkpoint, which only reads the checkpoint"
        )


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
    release = find_legacy(path)
    if release is not None:
        raise StateExistsError(
            f"{str(path)!r} holds state of release {release}: pass resume=True to migrate and go on, or "
            "choose another directory"
        )
    files = owned_files(path)
    if stored is None and files:
        raise StateCorruptError(
            f"{str(path)!r} holds the table file {files[0].name!r} but no {METADATA_NAME}: restore the "
            "description from a copy, or pass resume=False to start over"
        )


def migrate_directory(
    directory: str | os.PathLike[str],
    storage: Storage,
    shapes: Shapes | None,
    k: Curvatures | None,
) -> None:
    """Bring the state of an older release into the form of this one, in place.

    Args:
        directory: The state directory.
        storage: How to store the tables.
        shapes: See `dsa.legacy.read_legacy`.
        k: The same.

    Raises:
        StateNotFoundError: there is no state of an older release.
        StateLockedError: another process holds the directory.
        StateError: the old state can't be used; nothing has changed.
        DiskSpaceError: there is no room for both; nothing has changed.
    """
    path = Path(directory).absolute()
    if find_legacy(path) is None:
        raise StateNotFoundError(
            f"there is no state of an older release in {str(path)!r}: pass its directory"
        )
    lock = _take_lock(path)
    try:
        if not _set_aside_if_migrated(path):
            migrate_in_place(path, lock, storage, read_legacy(path, shapes, k=k))
    finally:
        os.close(lock)


def _migrate(path: Path, lock: int, specs: Sequence[TableSpec], storage: Storage) -> None:
    """Bring state of an older release, if there is some, into the form of this one."""
    if find_legacy(path) is None or _set_aside_if_migrated(path):
        return
    shapes = {spec.name: (spec.source.rows, spec.schema.dim) for spec in specs}
    content = read_legacy(path, shapes or None, k={spec.name: spec.k for spec in specs})
    for table in content.tables:
        for spec in specs:
            if spec.name == table.name:
                match_content(table, spec)
    migrate_in_place(path, lock, storage, content)


def _set_aside_if_migrated(path: Path) -> bool:
    """Move older files away that a migration, killed after its end, has left; tell whether it had ended."""
    stored = read_metadata(path)
    if stored is None or not stored.tables:
        return False
    set_aside(path)
    return True


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
    step = f"step {stored.global_step}" + (" or later (it was not closed)" if stored.status == "open" else "")
    held = f"state at {step}, with the tables {tables or 'none'}"
    return f"the directory {str(path)!r} already holds {held}"


def _shape(table: dict[str, Any]) -> str:
    backend = table.get("backend", {})
    return f"{backend.get('rows')} x {backend.get('schema', {}).get('dim')}"


def _replace(path: Path, lock: int, specs: Sequence[TableSpec], storage: Storage) -> StateDirectory:
    if find_legacy(path) is not None:
        set_aside(path)
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
    if file.is_dir():
        return sum(_occupied(each) for each in file.rglob("*") if each.is_file())
    status = file.stat()
    return int(getattr(status, "st_blocks", -(-status.st_size // 512))) * 512
