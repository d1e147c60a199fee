"""A stream of ids that come and go, killed again and again: equal to a dictionary that is never killed.

Step n is a function of n: ids are drawn from a window that moves on, some are deleted, old ones are evicted,
and the cap takes others. The dictionary tells of each id its row, how often it was trained and its stamp; the
weights, moments and all are those of a run that was left alone.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
from faults import Stop, die, end_trace, points, trace_lines, watch
from harness import Child, Figures, Report, Timer, messages
from tables import BACKENDS, stored_tables

from dsa import DiskSparseRiemannianAdam, IdPolicy, init
from dsa.state.opening import opened
from dsa.state.table import content_of

__all__ = ["Model", "kill_streams"]

_DIM = 2
_BATCH = 24
_POLICY = IdPolicy(max_rows=170, evict_after=20)
_FILES = ("keys", "keyed_rows", "id_policy", "growth", "id_map", "id_map_file", "progress", "transactions")
_PACE = 50
"""Steps between two kills, about."""

Found = tuple[int, int, int, bytes]
"""The row of an id, its updates, its stamp, and the record."""


class Model:
    """What the rules of the documentation make of the stream, in a dictionary.

    Args:
        seed: Of the stream.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.step = seed, 0
        self.rows: dict[int, tuple[int, int, int]] = {}  # row, updates, stamp
        self._freed: list[int] = []
        self._used = 0

    def advance(self) -> None:
        """Take the next step."""
        deleted, ids, _ = stream(self.seed, self.step)
        self._delete(np.unique(deleted).tolist())
        self._delete(
            sorted(id for id, (_, _, s) in self.rows.items() if self.step - (s - 1) > _POLICY.evict_after)
        )
        new = [id for id in dict.fromkeys(ids.tolist()) if id not in self.rows]
        if (needed := len(self.rows) + len(new) - _POLICY.max_rows) > 0:
            given = set(ids.tolist())
            others = sorted((s, row, id) for id, (row, _, s) in self.rows.items() if id not in given)
            self._delete(sorted(id for _, _, id in others[:needed]))
        for id in new:
            if not self._freed:
                self._freed.append(self._used)
                self._used += 1
            self.rows[id] = self._freed.pop(), 0, self.step + 1
        for id in set(ids.tolist()):
            row, updates, _ = self.rows[id]
            self.rows[id] = row, updates + 1, self.step + 2
        self.step += 1

    def _delete(self, ids: list[int]) -> None:
        self._freed += [self.rows.pop(id)[0] for id in ids if id in self.rows]


def stream(seed: int, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what a step deletes first, the ids that it trains, and their gradients."""
    rng = np.random.default_rng([seed, step])
    window = np.arange(3 * step, 3 * step + 400, dtype=np.uint64)
    ids = (window * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)  # of every size and sign
    deleted = rng.choice(ids, 4) if step % 5 == 0 else ids[:0]
    return deleted, rng.choice(ids, _BATCH), rng.normal(size=(_BATCH, _DIM)).astype(np.float32)


def run(
    directory: Path,
    seed: int,
    steps: int,
    backend: str,
    durability: str,
    report: Report,
    lasts: int | None = None,
) -> None:
    """Take the steps that are left, or die after so many."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = DiskSparseRiemannianAdam(
            {"entity": init.Normal(None, _DIM, seed=seed)},
            lr=0.05,
            k=0.0,
            disk_dir=directory,
            backend=BACKENDS[backend],
            durability=durability,
            ids={"entity": _POLICY},
            resume=bool(stored_tables(directory)) or None,
        )
    report(("stands", optimizer.global_step))
    last = None if lasts is None else optimizer.global_step + lasts
    with optimizer:
        for step in range(optimizer.global_step, steps):
            deleted, ids, gradients = stream(seed, step)
            optimizer.delete(deleted, "entity")
            optimizer.step({"entity": (ids, gradients)})
            report(("done", step + 1))
            if step + 1 == last:
                die("a step's end")
    report(("closed", steps))


def content(directory: Path) -> tuple[int, dict[int, Found]]:
    """Return the step that a directory stands at, and what is there of each id.

    Raises:
        AssertionError: the index says something else than the records.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = opened(directory, None)
    with state as held, held.use():
        table, found = held.tables["entity"], {}
        for first, records in content_of(table).blocks():
            for at in np.flatnonzero(records["live"] == 1).tolist():
                assert int(records["id"][at]) not in found, "an id has two rows"
                record = records[at]
                found[int(record["id"])] = first + at, int(record["t"]), int(record["s"]), record.tobytes()
        indexed = {id: row for ids, rows in table.keys.items() for id, row in zip(ids, rows, strict=True)}
        assert indexed == {id: row for id, (row, *_) in found.items()}, "the index differs from the records"
        free = table.keys.choose(table.keys.freed)
        assert len(set(free.tolist())) == len(free) == table.keys.used - len(found)
        return held.global_step, found


def kill_streams(
    space: Path, seed: int, steps: int, backend: str = "memmap", durability: str = "process"
) -> Figures:
    """Run a stream that is killed about every fifty steps, and compare what is left each time.

    Args:
        space: Where to work.
        seed: Of the stream, and of the kills.
        steps: Its length.
        backend: Where its rows are.
        durability: That of the state.
    """
    rng, figures, model = random.Random(f"ids {seed} {backend}"), Figures(), Model(seed)
    path = space / f"ids-{backend}-{durability}"
    with points():
        places = _places(space / f"{path.name}-profile", seed, backend, durability)
        while model.step < steps:
            stop = _draw(rng, places)
            status, told = _life(path, seed, steps, backend, durability, stop)
            if status == "failed":
                figures.fail("refused", f"{backend}, {durability}, {stop}: {told}")
                return figures
            figures.kills["timer" if isinstance(stop, Timer) else stop.place] += status == "killed"
            if not stored_tables(path):
                continue  # it was being made
            figures.reopened += 1
            try:
                stands, found = content(path)
                assert stands >= told, f"{stands} steps are there, and {told} were told"
                figures.in_progress += stands > told
                while model.step < stands:
                    model.advance()
                _compare(model, found)
            except AssertionError as error:
                figures.fail("torn", f"{backend}, {durability}, {stop}, step {model.step}: {error}")
                return figures
        whole = space / f"{path.name}-whole"
        run(whole, seed, steps, backend, durability, lambda message: None)
        if content(whole) == content(path):
            figures.finished += 1
        else:
            figures.fail(
                "different end", f"{backend}, {durability}: not the end of a run that was left alone"
            )
    return figures


def _life(
    path: Path, seed: int, steps: int, backend: str, durability: str, stop: Stop | Timer
) -> tuple[str, object]:
    def body(report: Report) -> None:
        if isinstance(stop, Stop):
            watch.arm(stop, die)
        run(path, seed, steps, backend, durability, report, 2 * _PACE)

    child = Child(body)
    status, told = "killed", 0
    for message in messages(child, stop if isinstance(stop, Timer) else None):
        if message[0] == "failed":
            status, told = "failed", message[2]
        elif status == "killed":
            status, told = ("closed" if message[0] == "closed" else "killed"), int(message[1])
    child.wait()
    return status, told


def _draw(rng: random.Random, places: Counter[str]) -> Stop | Timer:
    if rng.random() < 0.25:
        return Timer(rng.randint(_PACE // 2, 3 * _PACE // 2), rng.uniform(0.0, 0.004))
    place = rng.choice(sorted(places))
    return Stop(place, rng.randint(1, max(1, 2 * places[place])))


def _places(path: Path, seed: int, backend: str, durability: str) -> Counter[str]:
    """Count how often lines that give rows out and take them back are run in as many steps as a life has."""

    def body(report: Report) -> None:
        counts: Counter[str] = Counter()
        watch.counts = counts
        trace_lines(watch.passing)
        run(path, seed, _PACE, backend, durability, lambda message: None)
        end_trace()
        report(("counts", counts))

    child = Child(body)
    found: Counter[str] = Counter()
    for message in messages(child):
        if message[0] == "failed":
            raise AssertionError(message[2])
        found.update(message[1])
    child.wait()
    return Counter({place: n for place, n in found.items() if Path(place.rpartition(":")[0]).stem in _FILES})


def _compare(model: Model, found: dict[int, Found]) -> None:
    told = {id: each[:3] for id, each in found.items()}
    following = copy.deepcopy(model)
    following.advance()
    # What the next step has let in, or taken away, before it was cut off.
    for id in {id for id in told.keys() | model.rows.keys() if told.get(id) != model.rows.get(id)}:
        row, updates, _ = following.rows.get(id, (-1, 1, 0))
        if id in told:
            assert told[id] == (row, 0, model.step + 1), f"id {id} has {told[id]}, not row {row}"
        else:
            assert updates == 1, f"id {id} has no row, and should have {model.rows[id]}"
