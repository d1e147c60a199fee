"""Directories open in this process: modules and optimizers with one `state_dir` share its state.

A directory has one lock, one journal and one count of steps, however many tables of however many modules lie
in it. Whoever comes first opens it and its options hold; whoever comes later gets the same state.
"""

from __future__ import annotations

import os
import warnings
import weakref
from dataclasses import fields
from typing import Final, NamedTuple

from dsa.creation import Storage, StorageChoice, TableSpec, add_table
from dsa.errors import StateWarning
from dsa.opening import open_state
from dsa.recovery import match_table, warn_of_curvature
from dsa.state import StateDirectory
from dsa.table import Table

__all__ = ["join_table"]


class _Opening(NamedTuple):
    resume: bool | None
    storage: Storage


_SHARED: Final[weakref.WeakValueDictionary[str, StateDirectory]] = weakref.WeakValueDictionary()
_OPENINGS: Final[weakref.WeakKeyDictionary[StateDirectory, _Opening]] = weakref.WeakKeyDictionary()


def join_table(
    directory: str | os.PathLike[str], spec: TableSpec, resume: bool | None, choice: StorageChoice
) -> tuple[StateDirectory, Table]:
    """Return the state of a directory, opened now or before, and the table asked for, stored or made now.

    Args:
        directory: The state directory.
        spec: The table.
        resume: As for `dsa.opening.open_state`; the same for all that share the directory.
        choice: Storage options; None means the default, or what the directory was opened with.

    Raises:
        ValueError: the name is taken in this process, or an option differs from what the directory was opened
            with.
        StateError: as for `dsa.opening.open_state`.
    """
    path = os.path.realpath(directory)
    state = _SHARED.get(path)
    if state is None or not state.is_open:
        storage = choice.complete()
        state = open_state(directory, [spec], resume, storage, exact=False)
        _SHARED[path] = state
        _OPENINGS[state] = _Opening(resume, storage)
    else:
        _check_same(path, _OPENINGS[state], resume, choice)
    if spec.name in state.claimed:
        raise ValueError(
            f"the table name {spec.name!r} is taken in {path!r}: give each module a name= of its own"
        )
    table = _claim(state, spec, _OPENINGS[state])
    state.claimed.add(spec.name)
    return state, table


def _claim(state: StateDirectory, spec: TableSpec, opening: _Opening) -> Table:
    table = state.tables.get(spec.name)
    if table is not None:
        match_table(table, spec)
        warn_of_curvature(table, spec)
        return table
    if opening.resume:
        warnings.warn(
            f"the state in {str(state.path)!r} holds no table {spec.name!r} but {sorted(state.tables)}: a "
            "new one is made; if that is not meant, check the name",
            StateWarning,
            stacklevel=6,
        )
    return add_table(state, spec, opening.storage)


def _check_same(path: str, opening: _Opening, resume: bool | None, choice: StorageChoice) -> None:
    given = {field.name: getattr(choice, field.name) for field in fields(choice)}
    opened = {field.name: getattr(opening.storage, field.name) for field in fields(opening.storage)}
    for name, value in given.items():
        if value is not None and value != opened[name]:
            raise ValueError(
                f"{name}={value!r} differs from {opened[name]!r}, with which {path!r} was opened: whoever "
                "opens a directory chooses; leave it out"
            )
    if resume != opening.resume:
        raise ValueError(
            f"resume={resume!r} differs from resume={opening.resume!r}, with which {path!r} was opened: pass "
            "the same to all that share it"
        )
