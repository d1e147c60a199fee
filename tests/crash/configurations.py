"""Runs that nobody thought of: drawn backends, policies, threads, tables, and sequences of calls.

A configuration is everything that a run is made of. `Configuration.build` opens it as a program does, and
`apply` makes one of its calls; every call can be made again after it was cut off in the middle.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import harness
import numpy as np
import torch
from faults import watch
from tables import BACKENDS, stored_tables

from dsa import DiskEmbedding, DiskEmbeddingBag, DiskSparseAdam, DiskSparseRiemannianAdam, init
from dsa.errors import CheckpointMismatchError, StateClosedError
from dsa.rules.adam import adam_rule
from dsa.state.creation import add_table
from dsa.state.state_directory import StateDirectory
from dsa.state.storage import table_spec

__all__ = ["Call", "Configuration", "Opened", "Shape"]

_OUTLIVES = 0.4
"""Seconds that a forked child lives on, whatever becomes of its parent."""


class Shape(NamedTuple):
    """A table: of weights in rows of a module in memory (``ram``), in one on disk, or in the optimizer's."""

    name: str
    rows: int
    dim: int
    k: float = 0.0
    max_norm: float | None = None


class Call(NamedTuple):
    """One call: its kind, a number that its data is drawn from, and a former call that it refers to."""

    kind: str
    number: int
    refers: int = -1


@dataclass(frozen=True)
class Configuration:
    """A run. `modules` tells whether its tables are those of a torch model."""

    seed: int
    modules: bool
    backend: str
    durability: str
    async_writes: bool
    threads: int
    journal: int
    second_moment: str
    shapes: tuple[Shape, ...]
    calls: tuple[Call, ...]
    state_dtype: str | None = None

    @property
    def name(self) -> str:
        """What tells it apart, in words."""
        kind = "modules" if self.modules else "tables"
        how = f"{self.backend}, {self.durability}{', queue' if self.async_writes else ''}"
        how = f"{how}, {self.state_dtype}" if self.state_dtype else how
        calls = " ".join(f"{call.kind}:{call.number}" for call in self.calls)
        return f"configuration {self.seed}: {kind}, {how}, {self.threads} threads, {self.shapes}, {calls}"

    def build(self, directory: Path, *, resume: bool | None, heard: bool = False) -> Opened:
        """Open it; warnings are ignored, or left to the caller."""
        torch.set_num_threads(self.threads)
        with contextlib.nullcontext() if heard else warnings.catch_warnings():
            if not heard:
                warnings.simplefilter("ignore")
            return (_Modules if self.modules else _Tables)(self, directory, resume)

    def ids(self, call: Call, shape: Shape) -> np.ndarray:
        """Return the rows that a call touches: none to all of them, in any order, many of them again."""
        rng = np.random.default_rng([self.seed, call.number, shape.rows])
        size = int(np.exp(rng.uniform(0.0, np.log(1.6 * shape.rows)))) if rng.random() > 0.05 else 0
        if rng.random() < 0.3:
            return (rng.zipf(1.3, size) - 1) % shape.rows
        return rng.integers(0, shape.rows, size)

    def values(self, call: Call, size: int, dim: int) -> np.ndarray:
        """Return numbers for a call."""
        rng = np.random.default_rng([self.seed, call.number, dim, 7])
        return rng.normal(0.0, 0.1, (size, dim)).astype(np.float32)


class Opened:
    """A configuration that is open.

    Args:
        configuration: What it is.
        directory: Of the state; checkpoints are made beside it.
        resume: As for the optimizers.
    """

    state: StateDirectory

    def __init__(self, configuration: Configuration, directory: Path, resume: bool | None) -> None:
        self.configuration, self.directory = configuration, directory
        self.optimizer = self._open(resume)

    def _open(self, resume: bool | None) -> DiskSparseAdam | DiskSparseRiemannianAdam:
        raise AssertionError("a kind of program opens itself")

    def step(self, call: Call) -> None:
        """Take one step."""
        raise AssertionError("a kind of program steps itself")

    def weights(self) -> dict[str, np.ndarray]:
        """Return the weights that are in memory."""
        return {}

    def put_weights(self, weights: dict[str, np.ndarray]) -> None:
        """Bring the weights in memory to those of another moment."""

    def apply(self, call: Call, skip: int, check: Callable[[Path], None]) -> None:
        """Make one call.

        Args:
            call: The call.
            skip: How many of its transactions have happened.
            check: Called with a checkpoint that the call has made.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(self, f"_{call.kind}")(call, skip, check)

    def _plain(self, call: Call, skip: int, check: Callable[[Path], None]) -> None:
        self.step(call)

    def _prefetched(self, call: Call, skip: int, check: Callable[[Path], None]) -> None:
        for shape in self.configuration.shapes:
            self.optimizer.prefetch(self.configuration.ids(call, shape), shape.name)
        self.step(call)

    def _flush(self, call: Call, skip: int, check: Callable[[Path], None]) -> None:
        self.optimizer.flush()

    def _reopen(self, call: Call, skip: int, check: Callable[[Path], None]) -> None:
        weights = self.weights()
        self.optimizer.close()
        self.optimizer = self._open(True)
        self.put_weights(weights)

    def _checkpoint(self, number: int) -> Path:
        return self.directory.with_name(f"{self.directory.name}-checkpoint-{number}")

    def _export(self, call: Call, skip: int, check: Callable[[Path], None]) -> None:
        path = self._checkpoint(call.number)
        self.optimizer.export_checkpoint(path, overwrite=True)
        check(path)

    def _difference(self, call: Call, skip: int, check: Callable[[Path], None]) -> None:
        path, base = self._checkpoint(call.number), self._checkpoint(call.refers)
        try:
            self.optimizer.export_checkpoint(path, base=base, overwrite=True)
        except CheckpointMismatchError:
            self.optimizer.export_checkpoint(path, overwrite=True)
        check(path)

    def _beside(self, call: Call, skip: int, check: Callable[[Path], None]) -> None:
        """Export in a thread while steps are taken."""
        path, raised = self._checkpoint(call.number), []

        def export() -> None:
            try:
                self.optimizer.export_checkpoint(path, overwrite=True)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=export)
        thread.start()
        steps = [call] if self.configuration.modules else [call, call._replace(number=call.number + 500)]
        for each in steps[0 if self.configuration.modules else skip :]:
            self.step(each)
        thread.join()
        if raised:
            raise raised[0]
        check(path)

    def _import(self, call: Call, skip: int, check: Callable[[Path], None]) -> None:
        self.optimizer.import_checkpoint(self._checkpoint(call.refers))

    def _fork(self, call: Call, skip: int, check: Callable[[Path], None]) -> None:
        """A child that does nothing and ends, or lives on; it holds nothing either way."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: the process may have threads
            pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                watch.reset()  # what is to die is the parent
                harness.stop_reporting()
                code = self._in_child(outlives=call.number % 2 == 0)
            os._exit(code)
        if call.number % 2 and os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise AssertionError("a forked child could use the state")

    def _in_child(self, outlives: bool) -> int:
        if outlives:
            select.select([], [], [], _OUTLIVES)
            return 0
        self.optimizer.close()
        try:
            self.optimizer.flush()
        except StateClosedError:
            return 0
        return 1

    def close(self) -> None:
        """Close it."""
        self.optimizer.close()


class _Tables(Opened):
    """Tables of `DiskSparseRiemannianAdam`."""

    def _open(self, resume: bool | None) -> DiskSparseRiemannianAdam:
        made = self.configuration
        shapes = made.shapes
        if resume and (names := list(stored_tables(self.directory))):
            extra = _extra_shape(made)
            shapes = tuple({each.name: each for each in (*shapes, extra)}[name] for name in names)
        optimizer = DiskSparseRiemannianAdam(
            {shape.name: _first_weights(made, shape) for shape in shapes},
            lr=0.02,
            k={shape.name: shape.k for shape in shapes},
            disk_dir=self.directory,
            resume=resume,
            backend=BACKENDS[made.backend],
            durability=made.durability,
            second_moment=made.second_moment,
            async_writes=made.async_writes,
            max_queue_size=4,
            state_dtype=made.state_dtype,
        )
        self.state = optimizer._state
        return optimizer

    def step(self, call: Call) -> None:
        """Take one step."""
        self.optimizer.step(self._updates(call))

    def _updates(self, call: Call) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        made = self.configuration
        shapes = {shape.name: shape for shape in (*made.shapes, _extra_shape(made))}
        updates = {}
        for name in self.state.tables:
            ids = made.ids(call, shapes[name])
            if (call.number + len(name)) % 5:
                updates[name] = ids, made.values(call, len(ids), shapes[name].dim)
        return updates

    def _curve(self, call: Call, skip: int, check: Callable[[Path], None]) -> None:
        """Change the curvature of all tables at once."""
        rng = random.Random(f"{self.configuration.seed} {call.number}")
        wanted = {name: rng.choice([0.0, 0.5, 1.0, 2.0]) for name in sorted(self.state.tables)}
        self.optimizer.set_curvature(wanted, map=rng.choice(["clip", "log0"]))

    def _curving(self, call: Call, skip: int, check: Callable[[Path], None]) -> None:
        """Change it with a step."""
        curved = any(shape.k for shape in self.configuration.shapes)
        k = 0.5 + (call.number % 7) / 4
        self.optimizer.step(self._updates(call), current_k=k if curved and self._is_curved() else None)

    def _is_curved(self) -> bool:
        return any(table.k > 0.0 for table in self.state.tables.values())

    def _reproject(self, call: Call, skip: int, check: Callable[[Path], None]) -> None:
        self.optimizer.reproject_all()

    def _add(self, call: Call, skip: int, check: Callable[[Path], None]) -> None:
        shape = _extra_shape(self.configuration)
        if shape.name not in self.state.tables:
            source = _first_weights(self.configuration, shape)
            spec = table_spec(
                shape.name,
                source,
                adam_rule(self.configuration.second_moment),
                k=shape.k,
                init_max_norm_fraction=0.5,
                state_dtype=self.configuration.state_dtype,
            )
            add_table(self.state, spec, self.state.storage)


class _Modules(Opened):
    """Embeddings of a torch model, with weights in memory and on disk."""

    def _open(self, resume: bool | None) -> DiskSparseAdam:
        made = self.configuration
        options = {
            "state_dir": self.directory,
            "resume": resume,
            "backend": BACKENDS[made.backend],
            "durability": made.durability,
            "async_writes": made.async_writes,
            "state_dtype": made.state_dtype,
        }
        self.modules: dict[str, torch.nn.Module] = {}
        for shape in made.shapes:
            source = init.Normal(shape.rows, shape.dim, std=0.3, seed=made.seed)
            if shape.name.startswith("ram"):
                module = torch.nn.Embedding(shape.rows, shape.dim, sparse=True)
                with torch.no_grad():
                    module.weight.copy_(torch.from_numpy(made.values(Call("", 0), shape.rows, shape.dim)))
            else:
                kind = DiskEmbeddingBag if shape.name.startswith("bag") else DiskEmbedding
                module = kind(
                    shape.rows, shape.dim, name=shape.name, init=source, max_norm=shape.max_norm, **options
                )
            self.modules[shape.name] = module
        named = [(name, module.weight) for name, module in self.modules.items()]
        optimizer = DiskSparseAdam(named, lr=0.02, **options)
        self.state = optimizer._portable_state()
        return optimizer

    def step(self, call: Call) -> None:
        """Look rows up, and take one step with what they get back."""
        made = self.configuration
        self.optimizer.zero_grad()
        loss = torch.zeros(())
        for shape in made.shapes:
            ids = torch.from_numpy(made.ids(call, shape))
            if len(ids) == 0 or (call.number + len(shape.name)) % 5 == 0:
                continue
            if shape.name.startswith("bag"):
                found = self.modules[shape.name](ids, torch.arange(0, len(ids), 3))
            else:
                found = self.modules[shape.name](ids)
            factors = torch.from_numpy(made.values(call, len(found), shape.dim))
            loss = loss + (found * factors).sum()
        if loss.requires_grad:
            loss.backward()
        self.optimizer.step()

    def weights(self) -> dict[str, np.ndarray]:
        """Return the weights that are in memory."""
        return {
            name: module.weight.detach().numpy().copy()
            for name, module in self.modules.items()
            if name.startswith("ram")
        }

    def put_weights(self, weights: dict[str, np.ndarray]) -> None:
        """Bring the weights in memory to those of another moment."""
        with torch.no_grad():
            for name, each in weights.items():
                self.modules[name].weight.copy_(torch.from_numpy(each))

    def _load(self, call: Call, skip: int, check: Callable[[Path], None]) -> None:
        """Load weights into a module on disk."""
        shapes = [shape for shape in self.configuration.shapes if not shape.name.startswith("ram")]
        shape = shapes[call.number % len(shapes)]
        weights = torch.from_numpy(self.configuration.values(call, shape.rows, shape.dim))
        self.modules[shape.name].load_state_dict({"weight": weights}, strict=False)

    def _moments(self, call: Call, skip: int, check: Callable[[Path], None]) -> None:
        """Load the moments of all tables."""
        made, state = self.configuration, {}
        for number, shape in enumerate(made.shapes):
            values = torch.from_numpy(made.values(call, shape.rows, shape.dim))
            state[number] = {"step": 3 + call.number, "exp_avg": values, "exp_avg_sq": values.square()}
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _first_weights(made: Configuration, shape: Shape) -> object:
    if shape.name.startswith("array"):
        return made.values(Call("", 0), shape.rows, shape.dim)
    return init.Normal(shape.rows, shape.dim, std=0.1, seed=made.seed)


def _extra_shape(made: Configuration) -> Shape:
    return Shape("extra", 90, 4, made.shapes[0].k)
