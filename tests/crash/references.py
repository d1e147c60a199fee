"""What every run must leave.

`Reference` has run a scenario without a journal and without any fault, and holds the bytes of every table
after each operation: whatever happens to another run, its state must be one of these.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
from scenarios import ROWS, Scenario, steps
from tables import change_records, records_in, stored_tables

import dsa.backends.memmap
import dsa.backends.zarr
import dsa.backends.zarr_compressed
from dsa import DiskSparseRiemannianAdam
from dsa.state.journal import Journal

__all__ = ["Reference", "Snapshot", "WrongState", "counts_of", "locate", "records_of", "tuned", "workspace"]


class Snapshot(NamedTuple):
    """A state: the bytes of every table's records, and the counts and curvatures beside them."""

    records: dict[str, bytes]
    counts: tuple[object, ...]


def counts_of(optimizer: DiskSparseRiemannianAdam) -> tuple[object, ...]:
    """Return the steps that the state and each table have taken, curvatures, and what weights decayed by."""
    tables = optimizer._state.tables.values()
    return (optimizer.global_step, *((table.name, table.steps, table.k, table.decay) for table in tables))


def records_of(directory: Path) -> dict[str, bytes]:
    """Return the bytes of each table's records as they lie in its files."""
    return {name: records_in(directory, stored) for name, stored in stored_tables(directory).items()}


class Reference:
    """What an uninterrupted run leaves after each operation, and the directory that every run starts from."""

    def __init__(self, scenario: Scenario, directory: Path) -> None:
        self.scenario = scenario
        self.template = directory / "template"
        with tuned(scenario):
            with scenario.build(self.template, resume=None) as optimizer:
                for op in steps(1_000, 6) if scenario.spoiled else ():
                    scenario.apply(optimizer, op)
            if scenario.spoiled:
                _spoil(self.template)
            self.states = self._run(directory / "plain")

    def copy(self, directory: Path) -> Path:
        """Return a fresh copy of the directory to start from."""
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(self.template, directory)
        return directory

    def _run(self, directory: Path) -> list[Snapshot]:
        plain = replace(self.scenario, durability="none", async_writes=False)
        self.copy(directory)
        with plain.build(directory, resume=True) as optimizer:
            states = [Snapshot(records_of(directory), counts_of(optimizer))]
            for op in plain.ops:
                plain.apply(optimizer, op)
                optimizer.flush()
                states.append(Snapshot(records_of(directory), counts_of(optimizer)))
        shutil.rmtree(directory)
        return states


class WrongState(AssertionError):
    """A state that no uninterrupted run ever stands at. `kind` is ``torn`` or ``lost``."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


def locate(
    reference: Reference, optimizer: DiskSparseRiemannianAdam, directory: Path, done: int, started: int
) -> int:
    """Return how many operations the state of an optimizer just opened holds.

    Args:
        reference: The run that it must agree with.
        optimizer: Open.
        directory: Its directory.
        done: Operations that have returned.
        started: Operations that were begun.

    Raises:
        WrongState: the state is none of those in between.
    """
    ops, states = reference.scenario.ops, reference.states
    found, counts = records_of(directory), counts_of(optimizer)
    if started > done and ops[done].kind == "reproject" and counts == states[done].counts:
        _require_mixture(states[done], states[done + 1], found)
        return done
    return _require_equal(states, list(range(done, started + 1)), found, counts)


def _require_equal(states, allowed: list[int], found: dict[str, bytes], counts: tuple[object, ...]) -> int:
    for index in reversed(allowed):
        if states[index] == (found, counts):
            return index
    for index, state in enumerate(states):
        if state == (found, counts):
            raise WrongState(
                "lost", f"the state is that after {index} operations, where {allowed} are allowed"
            )
    raise WrongState("torn", _describe(states, allowed, found, counts))


def _describe(states, allowed, found, counts) -> str:
    lines = [f"counts {counts}, where {[states[i].counts for i in allowed]} are allowed"]
    for name, data in found.items():
        wanted = [_rows(states[i].records[name], name) for i in allowed]
        rows = _rows(data, name)
        wrong = [
            r for r in range(ROWS[name]) if not any(np.array_equal(rows[r], state[r]) for state in wanted)
        ]
        split = [
            [int(r) for r in range(ROWS[name]) if not np.array_equal(rows[r], state[r])][:20]
            for state in wanted
        ]
        lines.append(
            f"table {name}: rows of no allowed state {wrong[:20]}, rows that differ from each {split}"
        )
    return "; ".join(lines)


def _require_mixture(old: Snapshot, new: Snapshot, found: dict[str, bytes]) -> None:
    for name, data in found.items():
        rows, before, after = (
            _rows(data, name),
            _rows(old.records[name], name),
            _rows(new.records[name], name),
        )
        for r in range(ROWS[name]):
            if not (np.array_equal(rows[r], before[r]) or np.array_equal(rows[r], after[r])):
                raise WrongState("torn", f"row {r} of {name} is neither as before nor as after {old.counts}")


def _rows(data: bytes, name: str) -> np.ndarray:
    return np.frombuffer(data, np.uint8).reshape(ROWS[name], -1)


def _spoil(directory: Path) -> None:
    """Let one row in seven leave the ball and one in eleven be no number."""

    def spoil(records: np.ndarray) -> None:
        written = np.flatnonzero(records["s"])
        records["w"][written[::7]] = 3.0
        records["w"][written[::11], 0] = np.nan

    for stored in stored_tables(directory).values():
        change_records(directory, stored, spoil)


@contextlib.contextmanager
def tuned(scenario: Scenario) -> Iterator[None]:
    """Make journals start small and whole-table changes go in many blocks."""
    create = Journal.create.__func__

    def small(cls, path, identity, capacity, durable, limit=0):
        first = min(capacity, scenario.journal)
        return create(cls, path, identity, first, durable, min(limit, 3 * first))

    with (
        mock.patch.object(Journal, "create", classmethod(small)),
        mock.patch.object(dsa.backends.memmap, "_BLOCK_BYTES", 4096),
        mock.patch.object(dsa.backends.zarr, "_BLOCK_BYTES", 4096),
        mock.patch.object(dsa.backends.zarr_compressed, "_BLOCK_BYTES", 4096),
    ):
        yield


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """Yield a directory, in memory where the system has one, that is removed at the end."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 1 << 28
    with tempfile.TemporaryDirectory(prefix="dsa-crash-", dir=memory if roomy else None) as name:
        yield Path(name)
