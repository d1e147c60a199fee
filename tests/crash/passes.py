"""Kills while a large batch is changed in place: from outside at random instants, and at every line.

Most of such a step is spent inside one compiled pass, on several threads. Whatever the instant, the next
opening finds the state after a whole number of steps, and so does whoever only looks at what was left.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from faults import die, end_trace, trace_lines
from harness import Child, Figures, Report, Timer, messages
from interrupts import drop_pages

from dsa import DiskSparseRiemannianAdam, open_state
from dsa.backends import Layout, Memmap, Zarr
from dsa.state.journal import Journal
from dsa.state.metadata import read_metadata
from dsa.state.state_directory import StateDirectory

__all__ = ["BACKENDS", "Size", "kill_at_lines", "kill_passes"]

_DIM = 16
_STEPS = 30
"""Of a directory, before the next one is begun."""
BACKENDS = {"memmap": Memmap(), "zarr": Zarr(shard_bytes=1 << 18)}
"""The tables of kills at random instants are in several shards."""
_CURVATURES = {"flat": 0.0, "ball": 1.0}

Digests = Mapping[str, bytes]


class Size(NamedTuple):
    """How large the two tables are, and the batches."""

    rows: int
    batch: int


class Look(NamedTuple):
    """What a killed process has left, for one who only reads: a step, the tables, and rows half-way."""

    step: int
    tables: Digests
    noted: int
    begun: bool


@dataclass
class Run:
    """Steps over the same batches again and again, and what each of them leaves.

    Args:
        space: A directory to work in.
        size: Of tables and batches.
        threads: Of each step.
        backend: Where the tables are.
    """

    space: Path
    size: Size
    threads: int
    backend: Layout

    def __post_init__(self) -> None:
        rng = np.random.default_rng(5)
        rows, count = self.size
        self.first = {name: rng.uniform(-0.1, 0.1, (rows, _DIM)).astype(np.float32) for name in _CURVATURES}
        self.batches = [
            {
                name: (rng.integers(0, rows, count), rng.normal(0.0, 0.1, (count, _DIM)).astype(np.float32))
                for name in _CURVATURES
            }
            for _ in range(3)
        ]
        self.usual = 0.0
        self.template = self.space / "template"
        self.build(self.template, None).close()
        self.truth = self._run_staged()

    def build(self, path: Path, resume: bool | None, durability: str = "process") -> DiskSparseRiemannianAdam:
        """Open it."""
        return DiskSparseRiemannianAdam(
            self.first,
            lr=0.02,
            k=_CURVATURES,
            disk_dir=path,
            resume=resume,
            durability=durability,
            backend=self.backend,
        )

    def step(self, optimizer: DiskSparseRiemannianAdam, number: int) -> None:
        """Take the step of a number."""
        optimizer.step(self.batches[number % len(self.batches)])

    def _run_staged(self) -> list[Digests]:
        """Return what each step leaves when its records go through the journal, and note how long one takes
        in place.
        """
        torch.set_num_threads(self.threads)
        with self.build(self.space / "timed", None) as optimizer:
            for number in range(4):
                started = time.monotonic()
                self.step(optimizer, number)
                self.usual = time.monotonic() - started
        torch.set_num_threads(1)
        with self.build(self.space / "staged", None, "power") as optimizer:
            truth = [digests_of(optimizer._state)]
            for number in range(_STEPS):
                self.step(optimizer, number)
                truth.append(digests_of(optimizer._state))
        shutil.rmtree(self.space / "timed")
        shutil.rmtree(self.space / "staged")
        return truth


def digests_of(state: StateDirectory) -> Digests:
    """Return what tells the records of each open table from others."""
    return {name: _digest(table.backend.read(np.arange(len(table)))) for name, table in state.tables.items()}


def _digest(records: np.ndarray) -> bytes:
    return hashlib.blake2b(records.tobytes(), digest_size=16).digest()


def look(path: Path, rows: int) -> Look:
    """Read what a killed process has left, without changing it."""
    with open_state(path) as state:
        tables = {name: _digest(state[name].read(np.arange(rows))) for name in _CURVATURES}
        step = state.global_step
    metadata = read_metadata(path)
    assert metadata is not None
    journal = Journal.open(path / metadata.journal_name, metadata.journal_identity, durable=False)
    for _ in journal.entries():
        pass
    unfinished = journal.open_entry()
    noted = 0 if unfinished is None else sum(len(part.rows) for part in unfinished.parts)
    begun = unfinished is not None
    del unfinished
    journal.close(remove=False)
    return Look(step, tables, noted, begun)


def kill_passes(space: Path, disk: Path, seed: int, kills: int, threads: int, backend: Layout) -> Figures:
    """Kill so often from outside, half of the time with tables that are not in memory.

    Args:
        space: A directory in memory.
        disk: One on a disk.
        seed: Of everything but the instants.
        kills: How many.
        threads: Of each step.
        backend: Where the tables are.
    """
    figures, rng = Figures(), random.Random(f"passes {seed}")
    with _directory(space / "passes") as own:
        run = Run(own, Size(24_000, 20_000), threads, backend)
        _kill_from_outside(run, disk, rng, kills, figures)
    return figures


@contextlib.contextmanager
def _directory(path: Path) -> Iterator[Path]:
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path)


def _kill_from_outside(run: Run, disk: Path, rng: random.Random, kills: int, figures: Figures) -> None:
    while figures.total < kills and not figures.failures:
        cold = rng.random() < 0.5
        path = shutil.copytree(run.template, (disk if cold else run.space) / "run")
        acknowledged = 0
        while acknowledged < _STEPS - 5 and figures.total < kills and not figures.failures:
            timer = Timer(2 * rng.randint(1, 4), 1.2 * run.usual * rng.random())
            acknowledged = _trial(run, path, acknowledged, _stepping(cold), timer, figures)
        shutil.rmtree(path)


def kill_at_lines(space: Path, figures: Figures, backend: Layout, stride: int = 1) -> int:
    """Kill at every line, or every n-th, that a step in place runs; return how many there are."""
    with _directory(space / "lines") as own:
        run = Run(own, Size(60, 40), 1, backend)
        lines = _count_lines(run)
        for line in range(1, lines + 1, stride):
            if figures.failures:
                break
            path = shutil.copytree(run.template, own / "run")
            _trial(run, path, 0, _dying_at(line), None, figures)
            shutil.rmtree(path)
    return lines


Going = Callable[[Run, DiskSparseRiemannianAdam, int, Report], None]


def _stepping(cold: bool) -> Going:
    """Take steps for as long as one lives."""

    def go(run: Run, optimizer: DiskSparseRiemannianAdam, done: int, report: Report) -> None:
        for number in range(done, _STEPS):
            if cold:
                drop_pages(optimizer._state)
            report(("begin", number))
            run.step(optimizer, number)
            report(("done", number + 1))

    return go


def _dying_at(line: int) -> Going:
    """Take a step, and another one up to its n-th line; by its end nothing of it may be undone."""

    def go(run: Run, optimizer: DiskSparseRiemannianAdam, done: int, report: Report) -> None:
        run.step(optimizer, done)
        report(("done", done + 1))
        left = line

        def passing(place: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                die(place)

        trace_lines(passing)
        run.step(optimizer, done + 1)
        end_trace()
        report(("done", done + 2))
        die("the end of the step")

    return go


def _count_lines(run: Run) -> int:
    count = 0

    def passing(place: str) -> None:
        nonlocal count
        count += 1

    with run.build(run.space / "counted", None) as optimizer:
        run.step(optimizer, 0)
        trace_lines(passing)
        run.step(optimizer, 1)
        end_trace()
    shutil.rmtree(run.space / "counted")
    return count


def _trial(run: Run, path: Path, acknowledged: int, go: Going, timer: Timer | None, figures: Figures) -> int:
    """Let a process open a state, go on, and be killed; look at what it leaves; return where it stands."""

    def body(report: Report) -> None:
        torch.set_num_threads(run.threads)
        optimizer = run.build(path, True)
        report(("stands", optimizer.global_step))
        go(run, optimizer, acknowledged, report)

    child = Child(body)
    returned = acknowledged
    for message in messages(child, timer):
        if message[0] == "failed":
            figures.fail(message[1], message[2])
        elif message[0] == "done":
            returned = message[1]
    if child.wait() == 0:
        return returned
    seen = look(path, run.size.rows)
    figures.kills["open entry" if seen.begun else "no open entry"] += 1
    if seen.noted:
        figures.phases["rows half-way"] += 1
    return _judge(run, path, returned, seen, figures)


def _judge(run: Run, path: Path, returned: int, seen: Look, figures: Figures) -> int:
    with run.build(path, True) as optimizer:
        step, tables = optimizer.global_step, digests_of(optimizer._state)
    wrong: list[Any] = []
    if step not in (returned, returned + 1):
        wrong.append(f"step {step} where {returned} had returned")
    elif tables != run.truth[step]:
        wrong.append(f"the tables of step {step} are not those of {step} steps")
    if (seen.step, seen.tables) != (step, tables):
        wrong.append(f"read before recovery it was another state, of step {seen.step}")
    if wrong:
        figures.fail("lost" if step < returned else "torn", "; ".join(wrong))
    figures.reopened += 1
    figures.in_progress += step > returned
    return step
