"""What the harness runs: two or three tables, and batches that are a function of the step.

A scenario is a list of operations on an optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tables import BACKENDS, stored_tables

from dsa import DiskSparseRiemannianAdam, init
from dsa.errors import GradientError
from dsa.rules.adam import adam_rule
from dsa.state.creation import add_table
from dsa.state.storage import table_spec

__all__ = ["CHANGING", "ENDURING", "ROWS", "STEPPING", "Op", "Scenario", "over", "steps"]

ROWS = {"left": 400, "right": 250, "extra": 90}
DIMS = {"left": 6, "right": 5, "extra": 3}
_FIRST = ("left", "right")
_QUEUE = 4


class Op(NamedTuple):
    """One call: ``step`` with the batch of a number, ``refused`` with one that can't be used, ``curve`` to a
    curvature, ``curves`` of two tables at once, ``reproject``, ``flush``, or ``add`` for one more table.
    """

    kind: str
    number: int = 0
    table: str = "left"
    k: float = 0.0
    reset: bool = False
    map: str = "clip"


def steps(first: int, count: int) -> tuple[Op, ...]:
    """Return consecutive steps."""
    return tuple(Op("step", number) for number in range(first, first + count))


@dataclass(frozen=True)
class Scenario:
    """A run.

    `journal` is the size that the journal starts with: small ones grow and wrap within a few steps.
    `spoiled` puts rows outside the ball and rows that are no numbers into the tables before the run.
    """

    name: str
    durability: str = "process"
    curvatures: dict[str, float] = field(default_factory=lambda: FLAT)
    second_moment: str = "coordinate"
    eager: bool = False
    async_writes: bool = False
    journal: int = 1 << 20
    largest_batch: int = 300
    seed: int = 0
    spoiled: bool = False
    ops: tuple[Op, ...] = ()
    backend: str = "memmap"
    catches_up: bool = False

    def source(self, name: str, salt: int):
        """Return a table's first weights."""
        if name != "right":
            return init.Normal(ROWS[name], DIMS[name], std=0.1, seed=self.seed + salt + len(name))
        if not self.eager:
            return init.Uniform(ROWS[name], DIMS[name], -0.1, 0.1, seed=9 + salt)
        rng = np.random.default_rng(self.seed + salt)
        return rng.uniform(-0.1, 0.1, (ROWS[name], DIMS[name])).astype(np.float32)

    def build(self, directory: Path, *, resume: bool | None, salt: int = 0) -> DiskSparseRiemannianAdam:
        """Open the scenario's optimizer. Warnings are not the harness's subject."""
        names = list(stored_tables(directory)) if resume else []
        decay = {"weight_decay": 0.3, "weight_decay_mode": "decoupled", "weight_decay_catch_up": True}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return DiskSparseRiemannianAdam(
                {name: self.source(name, salt) for name in names or _FIRST},
                lr=0.02,
                k={name: self.curvatures[name] for name in names or _FIRST},
                disk_dir=directory,
                resume=resume,
                backend=BACKENDS[self.backend],
                durability=self.durability,
                second_moment=self.second_moment,
                async_writes=self.async_writes,
                max_queue_size=_QUEUE,
                **(decay if self.catches_up else {}),
            )

    def batch(self, number: int, names: tuple[str, ...] = _FIRST) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return the updates of a step: Zipf-distributed rows with duplicates, none to several hundred."""
        rng = np.random.default_rng([self.seed, number])
        updates = {}
        for name in names:
            if rng.random() < 0.1:
                continue
            size = int(np.exp(rng.uniform(0.0, np.log(self.largest_batch)))) if rng.random() > 0.05 else 0
            ids = (rng.zipf(1.3, size) - 1) % ROWS[name]
            grad = rng.normal(0.0, 0.1, (size, DIMS[name])).astype(np.float32)
            updates[name] = (ids, grad)
        return updates

    def apply(self, optimizer: DiskSparseRiemannianAdam, op: Op) -> None:
        """Make one call."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if op.kind == "step":
                optimizer.step(self.batch(op.number, tuple(optimizer._state.tables)))
            elif op.kind == "refused":
                self._be_refused(optimizer)
            elif op.kind == "curve":
                optimizer.set_curvature(op.k, op.reset, name=op.table, map=op.map)
            elif op.kind == "curves":
                optimizer.set_curvature({"left": op.k, "right": 2.0 * op.k}, op.reset, map=op.map)
            elif op.kind == "reproject":
                optimizer.reproject_all()
            elif op.kind == "add":
                self._add(optimizer, op.table)
            else:
                optimizer.flush()

    def _be_refused(self, optimizer: DiskSparseRiemannianAdam) -> None:
        """Change rows of every table, up to a last gradient that is infinite."""
        updates = {
            name: (np.arange(0, ROWS[name], 2), np.ones((-(-ROWS[name] // 2), DIMS[name]), np.float32))
            for name in optimizer._state.tables
        }
        updates["right"][1][-1] = np.inf
        try:
            optimizer.step(updates)
        except GradientError:
            return
        raise AssertionError("a gradient that is infinite was taken")

    def _add(self, optimizer: DiskSparseRiemannianAdam, name: str) -> None:
        rule, k = adam_rule(self.second_moment, self.catches_up), self.curvatures[name]
        spec = table_spec(name, self.source(name, 0), rule, k=k, init_max_norm_fraction=0.5)
        add_table(optimizer._state, spec, optimizer._state.storage)


def over(backend: str, scenarios: Sequence[Scenario]) -> tuple[Scenario, ...]:
    """Return scenarios with their tables in another backend."""
    return tuple(
        replace(each, name=f"{each.name}, {backend}", backend=backend) if backend != "memmap" else each
        for each in scenarios
    )


FLAT = {"left": 0.0, "right": 0.0, "extra": 0.0}
BALL = {"left": 1.0, "right": 1.0, "extra": 1.0}
MIXED = {"left": 0.0, "right": 1.0, "extra": 1.0}

_STEPS = (*steps(0, 13), Op("flush"), *steps(13, 4), Op("refused"), *steps(17, 23))

STEPPING = (
    Scenario("flat", curvatures=FLAT, seed=1, ops=_STEPS),
    Scenario("flat, growing journal", curvatures=FLAT, seed=2, journal=2048, eager=True, ops=_STEPS),
    Scenario("ball by rows", curvatures=BALL, second_moment="row", seed=3, journal=2048, ops=_STEPS),
    Scenario("mixed by frames", curvatures=MIXED, second_moment="frame", seed=4, eager=True, ops=_STEPS),
    Scenario("power, flat", "power", FLAT, seed=5, journal=1 << 16, ops=_STEPS),
    Scenario("power, ball", "power", BALL, seed=6, journal=2048, eager=True, ops=_STEPS),
    Scenario("queue, mixed", curvatures=MIXED, async_writes=True, seed=7, journal=1 << 15, ops=_STEPS),
    Scenario("queue, power, ball", "power", BALL, async_writes=True, seed=8, journal=1 << 15, ops=_STEPS),
    Scenario("catching up", seed=9, journal=2048, catches_up=True, ops=_STEPS),
)

_CHANGES = (
    *steps(0, 3),
    Op("curve", table="right", k=4.0),
    *steps(3, 2),
    Op("curve", table="left", k=0.5, map="log0"),
    *steps(5, 2),
    Op("curve", table="right", k=0.25, reset=True),
    *steps(7, 2),
    Op("curves", k=0.75, map="log0"),
    *steps(9, 1),
)
_REPAIRS = (Op("reproject"), *steps(0, 3))

_ADDING = (*steps(0, 3), Op("add", table="extra"), *steps(3, 4))

CHANGING = (
    Scenario("curvature", curvatures=MIXED, eager=True, seed=11, journal=2048, ops=_CHANGES),
    Scenario("curvature, power", "power", BALL, "row", eager=True, seed=12, journal=1 << 15, ops=_CHANGES),
    Scenario("curvature, queue", curvatures=BALL, async_writes=True, seed=13, journal=1 << 15, ops=_CHANGES),
    Scenario("reproject", curvatures=BALL, eager=True, seed=14, journal=2048, spoiled=True, ops=_REPAIRS),
    Scenario("reproject, power", "power", BALL, "frame", eager=True, seed=15, spoiled=True, ops=_REPAIRS),
    Scenario("adding", curvatures=MIXED, seed=16, journal=2048, ops=_ADDING),
    Scenario("adding, power", "power", MIXED, seed=17, journal=1 << 15, ops=_ADDING),
)

_SHORT = (
    *steps(0, 2),
    Op("refused"),
    *steps(2, 1),
    Op("flush"),
    Op("curve", table="right", k=2.0),
    *steps(3, 1),
    Op("curves", k=0.5),
    *steps(4, 1),
)

ENDURING = (
    Scenario("short", curvatures=MIXED, eager=True, seed=21, journal=2048, ops=_SHORT),
    Scenario("short, power", "power", MIXED, eager=True, seed=22, journal=2048, ops=_SHORT),
    Scenario("short, queue", curvatures=BALL, async_writes=True, seed=23, journal=4096, ops=_SHORT),
)
