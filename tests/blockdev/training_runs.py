"""Runs of random configurations: what they do, and what the state holds after each of their operations."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scenarios import Op, Scenario
from state_files import rows_of
from tables import BACKENDS

import dsa
from dsa import DiskSparseRiemannianAdam, init

__all__ = ["POLICIES", "Content", "Reference", "Run", "content_of", "draw_run", "matches"]

POLICIES = ("power", "process", "none")

Fields = dict[str, np.ndarray]


@dataclass(frozen=True)
class Content:
    """What a state holds: counts of steps, curvatures, and the fields of every row of each table.

    Args:
        counts: The state's steps, and each table's name, steps and curvature.
        tables: By table and field.
    """

    counts: tuple[object, ...]
    tables: dict[str, Fields]

    @property
    def rows(self) -> dict[str, int]:
        """The rows of each table."""
        return {name: len(next(iter(fields.values()))) for name, fields in self.tables.items()}

    def equals(self, other: Content) -> bool:
        """Compare bit for bit."""
        return (
            self.counts == other.counts
            and self.rows == other.rows
            and all(
                value.tobytes() == other.tables[name][each].tobytes()
                for name, fields in self.tables.items()
                for each, value in fields.items()
            )
        )

    def differing_rows(self, other: Content) -> dict[str, int]:
        """Count the rows of each table in which two states differ; all, where they have not as many."""
        if self.rows != other.rows:
            return self.rows
        return {
            name: int(
                np.any(
                    [
                        (value.view(np.uint8) != other.tables[name][each].view(np.uint8))
                        .reshape(len(value), -1)
                        .any(1)
                        for each, value in fields.items()
                    ],
                    axis=0,
                ).sum()
            )
            for name, fields in self.tables.items()
        }


def content_of(state: Path) -> Content:
    """Read a state that is closed, or was left by a killed process."""
    with dsa.open_state(state) as view:
        counts = (view.global_step, *((name, view[name].steps, view[name].k) for name in view))
        tables: dict[str, Fields] = {}
        for name in view:
            records = view[name].read(np.arange(view[name].rows))
            wanted = [each for each in ("w", "m", "v", "t") if each in view[name].fields]
            tables[name] = {each: np.ascontiguousarray(records[each]) for each in wanted}
        return Content(counts, tables)


@dataclass(frozen=True)
class Run(Scenario):
    """A scenario of other sizes, which also grows, exports, imports, and closes and opens again.

    Args:
        rows: Of the two tables, before they grow.
        dims: Of the two tables.
        threads: That a step may use.
        queue: Batches that may wait, with `async_writes`.
        allocate: As the optimizer has it.
    """

    rows: dict[str, int] = field(default_factory=dict)
    dims: dict[str, int] = field(default_factory=dict)
    threads: int = 1
    queue: int = 4
    allocate: str = "reserve"

    def __str__(self) -> str:
        parts = [self.durability, self.backend, self.second_moment, self.allocate, f"seed {self.seed}"]
        parts += [f"rows {self.rows} x {self.dims}, k {self.curvatures}, journal {self.journal}"]
        parts += [f"queue {self.queue}"] * self.async_writes + [f"{self.threads} threads"]
        parts += ["eager"] * self.eager
        return ", ".join(parts) + " | " + " ".join(op.kind for op in self.ops)

    def source(self, name: str, salt: int, rows: int | None = None) -> Any:
        rows, dim = self.rows[name] if rows is None else rows, self.dims[name]
        if not self.eager or name != "right":
            return init.Normal(rows, dim, std=0.1, seed=self.seed + salt)
        rng = np.random.default_rng(self.seed + salt)
        return rng.uniform(-0.1, 0.1, (rows, dim)).astype(np.float32)

    def rows_before(self, number: int, name: str) -> int:
        """Return the rows that a table has before the operation of a number, if none was imported."""
        grown = [op for op in self.ops if op.kind == "grow" and op.table == name and op.number < number]
        return self.rows[name] + sum(map(self._growth, grown))

    def _growth(self, op: Op) -> int:
        """Return how many rows are added, from one to several times as many as there were."""
        rng = np.random.default_rng([self.seed, op.number, 7])
        return int(np.exp(rng.uniform(0.0, np.log(4.0 * self.rows[op.table] + 1.0))))

    def build(self, directory: Path, *, resume: bool | None, salt: int = 0) -> DiskSparseRiemannianAdam:
        """Open the optimizer of a directory. Its warnings are the caller's."""
        torch.set_num_threads(self.threads)
        there = rows_of(directory) if resume else {}
        return DiskSparseRiemannianAdam(
            {name: self.source(name, salt, there.get(name)) for name in self.rows},
            lr=0.02,
            k=self.curvatures,
            disk_dir=directory,
            resume=resume,
            backend=BACKENDS[self.backend],
            allocate=self.allocate,
            durability=self.durability,
            second_moment=self.second_moment,
            async_writes=self.async_writes,
            max_queue_size=self.queue,
        )

    def batch(self, number: int, names: tuple[str, ...] = ("left", "right")) -> dict[str, Any]:
        rng = np.random.default_rng([self.seed, number])
        updates = {}
        for name in names:
            size = int(np.exp(rng.uniform(0.0, np.log(self.largest_batch))))
            # Half of them near each other: whole pages of rows, and rows of many pages.
            rows = self.rows_before(number, name)
            first = int(rng.integers(rows)) if rng.random() < 0.5 else None
            ids = np.arange(size) + first if first is not None else rng.zipf(1.3, size) - 1
            grad = rng.normal(0.0, 0.1, (size, self.dims[name])).astype(np.float32)
            updates[name] = (ids % rows, grad)
        return updates

    def do(self, optimizer: DiskSparseRiemannianAdam, op: Op, checkpoints: Path) -> None:
        """Make one call; ``close`` is the caller's."""
        if op.kind == "step":
            optimizer.step(self.batch(op.number))
        elif op.kind == "curve":
            optimizer.set_curvature(op.k, op.reset, name=op.table, map=op.map)
        elif op.kind == "grow":
            before = self.rows_before(op.number, op.table)
            more = self._growth(op)
            array = self.eager and op.table == "right"
            optimizer.grow(op.table, before + more, self.source(op.table, 1, more) if array else None)
        elif op.kind == "export":
            optimizer.export_checkpoint(checkpoints / str(op.number), overwrite=True)
        elif op.kind == "import":
            optimizer.import_checkpoint(checkpoints / str(op.number))
        elif op.kind == "flush":
            optimizer.flush()


class Reference:
    """What an uninterrupted run holds after each operation, the making of the state being the first.

    Args:
        run: What to do.
        directory: Where; it is made.
    """

    def __init__(self, run: Run, directory: Path) -> None:
        self.run = run
        plain = Run(**{**vars(run), "durability": "none", "async_writes": False})
        state, checkpoints = directory / "state", directory / "checkpoints"
        directory.mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain.build(state, resume=None).close()
            self.states = [content_of(state)]
            for op in run.ops:
                with plain.build(state, resume=True) as optimizer:
                    plain.do(optimizer, op, checkpoints)
                self.states.append(content_of(state))

    def indices(self, found: Content, first: int, last: int) -> list[int]:
        """Return after how many operations, of those allowed, the state is what was found."""
        return [index for index in range(first, last + 1) if self.states[index].equals(found)]


def matches(reference: Reference, found: Content) -> str:
    """Describe what was found by the whole state that is most like it."""
    counts = [sum(found.differing_rows(state).values()) for state in reference.states]
    best = min(range(len(counts)), key=counts.__getitem__)
    return (
        f"counts {found.counts}, most like the state after {best} operations "
        f"({reference.states[best].counts}), from which {counts[best]} rows differ"
    )


def draw_run(rng: random.Random, policy: str, backends: tuple[str, ...] = tuple(BACKENDS)) -> Run:
    """Draw a configuration and what it does."""
    names = ("left", "right")
    rows = {"left": rng.choice([300, 3000]), "right": rng.choice([1, 40, 500])}
    return Run(
        name="drawn",
        durability=policy,
        curvatures={name: rng.choice([0.0, 1.0]) for name in names},
        second_moment=rng.choice(["coordinate", "frame", "row"]),
        eager=rng.random() < 0.5,
        async_writes=rng.random() < 0.3,
        journal=rng.choice([1 << 12, 1 << 15, 1 << 20]),
        largest_batch=rng.choice([8, 300, 1500]),
        seed=rng.getrandbits(20),
        backend=rng.choice(backends),
        rows=rows,
        dims={name: rng.choice([2, 5, 16]) for name in names},
        threads=rng.choice([1, 2]),
        queue=rng.choice([1, 4, 50]),
        allocate=rng.choice(["reserve", "reserve", "sparse"]),
        ops=_draw_ops(rng),
    )


def _draw_ops(rng: random.Random) -> tuple[Op, ...]:
    ops: list[Op] = []
    exported: list[int] = []
    kinds = ["step"] * 12 + ["flush", "flush", "close", "curve", "export", "import", "grow", "grow"]
    for number in range(rng.randint(8, 24)):
        kind = rng.choice(kinds)
        if kind == "export":
            exported.append(number)
            ops.append(Op("export", number))
        elif kind == "import" and exported:
            ops.append(Op("import", rng.choice(exported)))
        elif kind == "grow":
            exported.clear()  # a table does not shrink to what a checkpoint has
            ops.append(Op("grow", number, table=rng.choice(["left", "right"])))
        elif kind == "curve":
            k, reset = rng.choice([0.25, 0.5, 2.0]), rng.random() < 0.3
            ops.append(Op("curve", table=rng.choice(["left", "right"]), k=k, reset=reset))
        else:
            ops.append(Op(kind if kind != "import" else "step", number))
    return tuple(ops)
