"""Opening a state directory: the lock, the policy for what is already there, creation, recovery.

Every mismatch, and every partial, truncated or foreign file, is an error before anything is changed.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from dsa.backends import system
from dsa.backends.base import Layout
from dsa.errors import (
    DiskSpaceError,
    StateCorruptError,
    StateError,
    StateExistsError,
    StateIncompleteError,
    StateNotFoundError,
    StateWarning,
    notify,
)
from dsa.state.creation import check_sources, create_state
from dsa.state.directories import local_directory
from dsa.state.holding import HeldDirectory
from dsa.state.legacy import Curvatures, Shapes, find_legacy, read_legacy
from dsa.state.matching import match_content
from dsa.state.metadata import METADATA_NAME, Metadata, journal_files, owned_files, read_metadata
from dsa.state.migration import migrate_in_place, set_aside
from dsa.state.recovery import continue_state
from dsa.state.state_directory import StateDirectory
from dsa.state.storage import Durability, Storage, StorageChoice, TableSpec
from dsa.state.table_files import remove_table_file

__all__ = ["migrate_directory", "open_directory", "opened"]


def open_directory(
    directory: str | os.PathLike[str],
    specs: Sequence[TableSpec],
    resume: bool | None,
    storage: Storage,
    *,
    exact: bool = True,
) -> StateDirectory:
    """Open, continue or replace the state in a directory.

    Args:
        directory: Made when it does not exist; an empty one is as good as none. Files that are not dsa's are
            left alone.
        specs: The tables asked for, in order.
        resume: None refuses to guess when there is state; True continues it; False replaces it, with a
            warning, once the new one is whole.
        storage: Layout of new tables, and the durability from now on.
        exact: Refuse state that holds other tables than `specs`; otherwise those are opened too, and tables
            that are missing are left to `dsa.state.creation.add_table`.

    Raises:
        StateExistsError: there is state and `resume` is None.
        StateNotFoundError: there is none and `resume` is True.
        StateMismatchError: the stored tables differ from `specs`.
        StateCorruptError: a file is damaged, truncated, extended, missing or foreign.
        StateIncompleteError: the creation of the state was interrupted, and `resume` is True.
        StateLockedError: another process holds the directory.
        DiskSpaceError: there is not enough room for new tables.
    """
    if not (resume is None or resume is True or resume is False):
        raise TypeError(f"resume={resume!r} is not a choice: pass None, True or False")
    path = Path(local_directory(directory, "disk_dir")).absolute()
    if resume and not path.is_dir():
        raise _nothing_to_resume(path)
    _refuse_checkpoint(path)
    _make_directories(path)
    held = HeldDirectory.take(path)
    try:
        if resume is False:
            return _replace(held, specs, storage)
        if resume:
            _migrate(held, specs, storage)
        stored = read_metadata(path)
        _refuse_leftovers(path, stored)
        if stored is None or stored.status == "creating":
            if resume:
                raise _nothing_to_resume(path, stored)
            return create_state(held, specs, storage, _fresh_metadata())
        if resume is None:
            raise StateExistsError(
                f"{_summary(path, stored)}: pass resume=True to continue it or resume=False to start over"
            )
        return continue_state(held, specs, stored, storage, exact=exact)
    except BaseException:
        held.release()
        raise


@contextmanager
def opened(directory: str | os.PathLike[str], backend: Layout | None) -> Iterator[StateDirectory]:
    """Open a state directory as it is, and close it at the end."""
    path = Path(local_directory(directory))
    stored = read_metadata(path) if path.is_dir() else None
    if stored is None:
        raise StateNotFoundError(
            f"there is no state of this release in {str(directory)!r}: check the path, or migrate the state "
            "of an older one with dsa.migrate"
        )
    durability = cast("Durability", stored.durability)  # checked when read
    storage = StorageChoice(backend=backend, durability=durability).complete()
    state = open_directory(directory, [], True, storage, exact=False)
    try:
        yield state
    finally:
        state.close()


def _make_directories(path: Path) -> None:
    """Make a directory and those above it, durably."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        system.sync_directory(each.parent)


def _fresh_metadata() -> Metadata:
    return Metadata("open", secrets.token_hex(8))


def _refuse_checkpoint(path: Path) -> None:
    if (path / "zarr.json").exists() and not (path / METADATA_NAME).exists():
        raise StateExistsError(
            f"{str(path)!r} is a Zarr group, such as a checkpoint, not a state directory: open another "
            "directory and call import_checkpoint, which only reads the checkpoint"
        )


def _nothing_to_resume(path: Path, stored: Metadata | None = None) -> StateError:
    if stored is not None:
        return StateIncompleteError(
            f"the creation of the state in {str(path)!r} was interrupted ({stored.note}): there is nothing "
            "in it to continue; leave resume out to make it again"
        )
    return StateNotFoundError(
        f"there is no state to resume in {str(path)!r}: pass resume=None to start there, or correct the path"
    )


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
        shapes: See `dsa.state.legacy.read_legacy`.
        k: The same.

    Raises:
        StateNotFoundError: there is no state of an older release.
        StateLockedError: another process holds the directory.
        StateError: the old state can't be used; nothing has changed.
        DiskSpaceError: there is no room for both; nothing has changed.
    """
    path = Path(local_directory(directory)).absolute()
    if find_legacy(path) is None:
        raise StateNotFoundError(
            f"there is no state of an older release in {str(path)!r}: pass its directory"
        )
    held = HeldDirectory.take(path)
    try:
        if not _set_aside_if_migrated(path):
            migrate_in_place(held, storage, read_legacy(path, shapes, k=k))
    finally:
        held.release()


def _migrate(held: HeldDirectory, specs: Sequence[TableSpec], storage: Storage) -> None:
    """Bring state of an older release, if there is some, into the form of this one."""
    path = held.path
    if find_legacy(path) is None or _set_aside_if_migrated(path):
        return
    shapes = {spec.name: (spec.facts.rows, spec.schema.dim) for spec in specs}
    content = read_legacy(path, shapes or None, k={spec.name: spec.facts.k for spec in specs})
    for table in content.tables:
        for spec in specs:
            if spec.name == table.name:
                match_content(table, spec)
    migrate_in_place(held, storage, content)


def _set_aside_if_migrated(path: Path) -> bool:
    """Move older files away that a migration, killed after its end, has left; tell whether it had ended."""
    stored = read_metadata(path)
    if stored is None or not stored.tables:
        return False
    set_aside(path)
    return True


def _summary(path: Path, stored: Metadata) -> str:
    tables = ", ".join(f"{table.get('name')!r} ({_shape(table)})" for table in stored.tables)
    step = f"step {stored.global_step}" + (" or later (it was not closed)" if stored.status == "open" else "")
    held = f"state at {step}, with the tables {tables or 'none'}"
    return f"the directory {str(path)!r} already holds {held}"


def _shape(table: dict[str, Any]) -> str:
    backend = table.get("backend", {})
    return f"{backend.get('rows')} x {backend.get('schema', {}).get('dim')}"


def _replace(held: HeldDirectory, specs: Sequence[TableSpec], storage: Storage) -> StateDirectory:
    path = held.path
    if find_legacy(path) is not None:
        set_aside(path)
    old = [*owned_files(path), *journal_files(path)]
    if not old and not (path / METADATA_NAME).exists():
        return create_state(held, specs, storage, _fresh_metadata())
    check_sources(path, specs, storage)
    notify(f"resume=False replaces the state in {str(path)!r}: what it held is lost", StateWarning)
    try:
        state = create_state(held, specs, storage, _fresh_metadata())
    except DiskSpaceError as error:
        remedy = "or remove the directory first: the old state is there until the new one is whole"
        raise DiskSpaceError(error.needed, error.available, str(path), remedy) from error
    for file in old:
        remove_table_file(file)
    return state
