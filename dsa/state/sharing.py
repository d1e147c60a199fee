"""Directories open in this process: modules and optimizers with one `state_dir` share its state.

A directory has one lock, one journal and one count of steps, however many tables of however many modules lie
in it. Whoever comes first opens it and its options hold; whoever comes later gets the same state.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Sequence
from dataclasses import fields
from typing import Final

from dsa.backends.base import Layout
from dsa.errors import StateWarning, notify
from dsa.state.creation import add_table
from dsa.state.directories import local_directory
from dsa.state.matching import match_table, warn_of_curvature
from dsa.state.opening import open_directory
from dsa.state.state_directory import StateDirectory
from dsa.state.storage import StorageChoice, TableSpec, is_part_of
from dsa.state.table import Table

__all__ = ["check_choice", "check_resume", "join_tables"]


_SHARED: Final[weakref.WeakValueDictionary[str, StateDirectory]] = weakref.WeakValueDictionary()


def join_tables(
    directory: str | os.PathLike[str],
    specs: Sequence[TableSpec],
    user: object,
    resume: bool | None,
    choice: StorageChoice,
) -> tuple[StateDirectory, list[Table]]:
    """Return the state of a directory, opened now or before, and the tables asked for, stored or made now.

    Nothing is made, and nothing stays open that was not, when one of them can't be had.

    Args:
        directory: The state directory.
        specs: The tables.
        user: Who uses them: as long as it lives, nobody else gets them.
        resume: As for `dsa.state.opening.open_directory`; the same for all that share the directory.
        choice: Storage options; None means the default, or what the directory was opened with.

    Raises:
        ValueError: a name is taken in this process, or an option differs from what the directory was opened
            with; or the directory can't be meant, see `dsa.state.directories.local_directory`.
        StateError: as for `dsa.state.opening.open_directory`.
    """
    directory = local_directory(directory)
    path = os.path.realpath(directory)
    state = _open_state(path, specs, resume)
    if state is None:
        state = open_directory(directory, specs, resume, choice.complete(), exact=False)
        state.resume = resume
        _SHARED[path] = state
        try:
            return state, _claim(state, specs, user)
        except BaseException:
            state.close()
            raise
    check_choice(state, choice)
    check_resume(state, resume)
    with state.use():  # another thread may be training
        return state, _claim(state, specs, user)


def _open_state(path: str, specs: Sequence[TableSpec], resume: bool | None) -> StateDirectory | None:
    """Return the state of a directory if it is open, and somebody uses it or it may go on as it is.

    What was only dropped, as when a notebook's cell is run again, must not block whoever comes next.
    """
    state = _SHARED.get(path)
    if state is not None and (state.resume != resume or any(spec.name in state.users for spec in specs)):
        del state  # or it would not go
        gc.collect()
        state = _SHARED.get(path)
    if state is None or not state.is_open:
        return None
    if state.resume != resume and not state.users:
        if resume is False:
            state.close()
            return None
        if resume:
            state.resume = True
    return state


def check_resume(state: StateDirectory, resume: bool | None) -> None:
    """Check an option against the one that an open directory was opened with.

    Raises:
        ValueError: it differs.
    """
    if resume != state.resume:
        raise ValueError(
            f"resume={resume!r} differs from resume={state.resume!r}, with which {str(state.path)!r} was "
            f"opened by what holds its tables {sorted(state.users)} in this process: pass the same to all "
            "that share it, or call close() on that"
        )


def check_choice(state: StateDirectory, choice: StorageChoice) -> None:
    """Check storage options that were given against those that an open directory was opened with.

    Raises:
        ValueError: one differs.
    """
    for field in fields(choice):
        value, opened = getattr(choice, field.name), getattr(state.storage, field.name)
        if value is None or (field.name == "backend" and _is_backend_of(state, value)):
            continue
        if value != opened:
            raise ValueError(
                f"{field.name}={value!r} differs from {opened!r}, with which {str(state.path)!r} was opened: "
                "whoever opens a directory chooses; leave it out"
            )


def _is_backend_of(state: StateDirectory, asked: Layout) -> bool:
    stored = [table.backend.describe() for table in state.tables.values()]
    return is_part_of(asked, state.storage.backend) and not any(map(asked.refusal, stored))


def _claim(state: StateDirectory, specs: Sequence[TableSpec], user: object) -> list[Table]:
    for spec in specs:
        if spec.name in state.users:
            raise ValueError(
                f"the table name {spec.name!r} is taken in {str(state.path)!r} by a "
                f"{type(state.users[spec.name]).__name__} of this process that was built earlier, such as by "
                "a notebook's cell that was run before: call close() on it and pass resume=True to go on "
                "with its table, or give each module a name= of its own"
            )
    tables = [_table(state, spec) for spec in specs]
    for spec in specs:
        state.users[spec.name] = user
    return tables


def _table(state: StateDirectory, spec: TableSpec) -> Table:
    table = state.tables.get(spec.name)
    if table is not None:
        match_table(table, spec)
        warn_of_curvature(table, spec)
        return table
    if state.resume:
        notify(
            f"the state in {str(state.path)!r} holds no table {spec.name!r} but {sorted(state.tables)}: a "
            "new one is made; if that is not meant, check the name",
            StateWarning,
        )
    return add_table(state, spec, state.storage)
