"""Losses of power that a policy does not promise to survive, and what the next opening makes of them.

Under ``"process"`` a loss of power may cost steps, and may tear them. It must cost nothing else: the state
opens, whatever is not whole is told in a warning, and no row passes for sound that was never written like
that. Each case runs something in a model of the device and takes images on the way; what may be left of each
is opened in another run of the operating system, and a verdict is given.
"""

from __future__ import annotations

import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from harness import Figures
from power import Device, Image, after_outage, die_in_place
from tables import BACKENDS

import dsa.state.metadata
from dsa import DiskSparseRiemannianAdam, init
from dsa.errors import CorruptRowError, StateIncompleteError, StateNotFoundError, StateWarning
from dsa.state.table import implausible_rows

__all__ = ["CASES", "lose_power_unpromised"]

_ROWS, _DIM, _NAMES = 400, 4, ("a", "b")

Take = Callable[[], None]


@dataclass
class Scene:
    """Where a case is played.

    Args:
        directory: Of the state.
        backend: See `tables.BACKENDS`.
        durability: Of the state.
        queued: Whether it writes in a thread.
    """

    directory: Path
    backend: str = "memmap"
    durability: str = "process"
    queued: bool = False
    history: list[dict[str, np.ndarray]] = field(default_factory=list)

    def open(self, resume: bool | None, path: Path | None = None) -> DiskSparseRiemannianAdam:
        """Open the state, or what is left of it."""
        return DiskSparseRiemannianAdam(
            {name: init.Zeros(_ROWS, _DIM) for name in _NAMES},
            lr=0.5,
            k={"a": 0.0, "b": 0.5},
            disk_dir=path or self.directory,
            resume=resume,
            backend=BACKENDS[self.backend],
            durability=self.durability,
            async_writes=self.queued,
        )

    def step(self, optimizer: DiskSparseRiemannianAdam, number: int) -> None:
        """Take the step of a number, and note what it leaves."""
        rows = np.arange(number % 3, _ROWS, 3)
        grad = np.random.default_rng(number).normal(size=(len(rows), _DIM)).astype(np.float32)
        optimizer.step({name: (rows, grad) for name in _NAMES})
        self.note(optimizer)

    def note(self, optimizer: DiskSparseRiemannianAdam) -> None:
        """Remember every record as it is now."""
        self.history.append(_records(optimizer))


def _records(optimizer: DiskSparseRiemannianAdam) -> dict[str, np.ndarray]:
    tables = optimizer._state.tables
    return {name: tables[name].backend.read(np.arange(_ROWS)) for name in _NAMES}


def _never_flushed(scene: Scene, take: Take) -> None:
    """Nothing but the creation has been synced."""
    optimizer = scene.open(None)
    scene.note(optimizer)
    for number in range(10):
        scene.step(optimizer, number)
        take()
    die_in_place(optimizer._state)


def _flushed(scene: Scene, take: Take) -> None:
    """Steps after a flush."""
    optimizer = scene.open(None)
    scene.note(optimizer)
    for number in range(8):
        scene.step(optimizer, number)
        if number == 4:
            optimizer.flush()
        if number > 4:
            take()
    die_in_place(optimizer._state)


def _killed_and_recovered(scene: Scene, take: Take) -> None:
    """The process dies; power is lost while the next one opens the state, or after that."""
    optimizer = scene.open(None)
    scene.note(optimizer)
    optimizer.flush()
    for number in range(10):
        scene.step(optimizer, number)
    die_in_place(optimizer._state)
    with _at_each_description(take):
        optimizer = scene.open(True)
    take()
    scene.step(optimizer, 10)
    take()
    die_in_place(optimizer._state)


def _imported(scene: Scene, take: Take) -> None:
    """A checkpoint is imported, and a step taken."""
    optimizer = scene.open(None)
    for number in range(3):
        scene.step(optimizer, number)
    checkpoint = scene.directory.with_name("checkpoint")
    optimizer.export_checkpoint(checkpoint)
    wanted = _records(optimizer)
    for number in range(3, 20):
        scene.step(optimizer, number)
    optimizer.flush()
    optimizer.import_checkpoint(checkpoint)
    scene.history = [wanted]
    take()
    scene.step(optimizer, 21)
    take()
    die_in_place(optimizer._state)
    shutil.rmtree(checkpoint)


def _curved(scene: Scene, take: Take) -> None:
    """Both curvatures change at once, and a step is taken."""
    optimizer = scene.open(None)
    for number in range(3):
        scene.step(optimizer, number)
    optimizer.set_curvature({"a": 1.0, "b": 2.0})
    scene.history.clear()
    scene.note(optimizer)
    take()
    scene.step(optimizer, 4)
    take()
    die_in_place(optimizer._state)


def _closed(scene: Scene, take: Take) -> None:
    """The state is closed, and opened again."""
    optimizer = scene.open(None)
    for number in range(6):
        scene.step(optimizer, number)
    with _at_each_description(take):
        optimizer.close()
        take()
        optimizer = scene.open(True)
    take()
    die_in_place(optimizer._state)


CASES: dict[str, Callable[[Scene, Take], None]] = {
    "never flushed": _never_flushed,
    "flushed": _flushed,
    "killed and recovered": _killed_and_recovered,
    "imported": _imported,
    "curved": _curved,
    "closed": _closed,
}


class _at_each_description:
    """Take an image before and after each replacement of the description."""

    def __init__(self, take: Take) -> None:
        self._take = take

    def __enter__(self) -> None:
        self._before = dsa.state.metadata.write_atomically

        def wrapper(*arguments: object) -> None:
            self._take()
            self._before(*arguments)
            self._take()

        dsa.state.metadata.write_atomically = wrapper

    def __exit__(self, *error: object) -> None:
        dsa.state.metadata.write_atomically = self._before


class Moment(NamedTuple):
    """What may be on the device, and how many records of the history were there to be lost."""

    image: Image
    known: int


def lose_power_unpromised(
    space: Path,
    seed: int,
    images: int,
    backend: str = "memmap",
    queued: bool = False,
    cases: Sequence[str] = tuple(CASES),
) -> Figures:
    """Play each case and open so many of its images."""
    figures = Figures()
    for number, name in enumerate(cases):
        rng = random.Random(f"outage {seed} {name} {backend}")
        directory = space / f"outage-{number}"
        directory.mkdir()
        (directory / "state").mkdir()
        scene = Scene(directory / "state", backend, queued=queued)
        moments = _play(scene, CASES[name])
        found: Counter[str] = Counter()
        for draw in range(images):
            moment = moments[draw % len(moments)]
            found[_judge(scene, moment, directory / f"image-{draw}", rng)] += 1
        _count(figures, name, found)
        shutil.rmtree(directory)
    return figures


def _play(scene: Scene, play: Callable[[Scene, Take], None]) -> list[Moment]:
    device = Device(scene.directory)
    moments: list[Moment] = []
    with warnings.catch_warnings(), device.following():
        warnings.simplefilter("ignore")
        play(scene, lambda: moments.append(Moment(device.image(), len(scene.history))))
    device.close()
    return moments


def _judge(scene: Scene, moment: Moment, path: Path, rng: random.Random) -> str:
    moment.image.draw(rng, path)
    with after_outage(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            optimizer = scene.open(True, path)
        except (StateIncompleteError, StateNotFoundError):
            shutil.rmtree(path)
            return "nothing was there yet"
        except Exception as error:
            shutil.rmtree(path)
            return f"refused: {type(error).__name__} {str(error)[-60:]}"
        told = any(issubclass(each.category, StateWarning) for each in caught)
        verdict = _verdict(scene, moment, optimizer, told)
        die_in_place(optimizer._state)
    shutil.rmtree(path)
    return verdict


def _verdict(scene: Scene, moment: Moment, optimizer: DiskSparseRiemannianAdam, told: bool) -> str:
    found = _records(optimizer)
    history = scene.history[: moment.known]
    last = all(_equal(found[name], history[-1][name]).all() for name in _NAMES)
    if last:
        return "whole, told" if told else "whole"
    if not told:
        return "SILENT"
    unknown = 0
    for name in _NAMES:
        torn = implausible_rows(found[name], optimizer._state.tables[name].rule)
        written = np.any([_equal(found[name], each[name]) for each in history], axis=0)
        unknown += int((~torn & ~written & (found[name]["s"] != 0)).sum())
        if torn.any() and not _is_refused(optimizer, name, int(np.flatnonzero(torn)[0])):
            return "torn rows that are USED"
    return "torn rows that pass for SOUND" if unknown else "told"


def _equal(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    same = np.ones(len(some), np.bool_)
    for name in some.dtype.names or ():
        same &= (some[name] == others[name]).reshape(len(some), -1).all(axis=1)
    return same


def _is_refused(optimizer: DiskSparseRiemannianAdam, name: str, row: int) -> bool:
    try:
        optimizer.step({name: ([row], np.ones((1, _DIM), np.float32))})
    except CorruptRowError:
        return True
    return False


def _count(figures: Figures, case: str, found: Counter[str]) -> None:
    figures.finished += 1
    for verdict, number in found.items():
        figures.kills[f"{case}: {verdict}"] += number
        if verdict in ("whole", "whole, told", "told", "nothing was there yet"):
            figures.reopened += number
            figures.told += number if verdict.endswith("told") else 0
        else:
            kind = "silent" if verdict == "SILENT" else verdict.split()[0].strip(":")
            figures.failures[kind] += number
            figures.details.append(f"{case}: {number} times {verdict}")
