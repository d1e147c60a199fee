"""Kills in numbers: over every scenario, and inside the changes of whole tables."""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from endurance import Endurance
from faults import Stop, end_trace, points, watch
from harness import Figures
from lives import Life, Plan, draw, profile
from losses import lose_power
from references import Reference, tuned
from refusals import FileLayer, trace_calls
from replacement import Replacement
from scenarios import CHANGING, ENDURING, STEPPING, Scenario, over

__all__ = [
    "CHANGES",
    "every_place",
    "interrupt",
    "kill_changes",
    "kill_replacements",
    "kill_steps",
    "lose_power_everywhere",
    "prepared",
    "refuse",
]

CHANGES = frozenset({"curve", "curves", "reproject", "add"})


def kill_steps(
    space: Path, seed: int, kills: int, per_life: int = 12, scenarios: Sequence[Scenario] = STEPPING
) -> Figures:
    """Kill ordinary runs so often in all, at random moments, and follow each to its end."""
    return _kill(space, seed, kills, per_life, scenarios, frozenset())


def kill_changes(
    space: Path, seed: int, kills: int, per_life: int = 4, scenarios: Sequence[Scenario] = CHANGING
) -> Figures:
    """Kill so often inside set_curvature, reproject_all and the making of one more table."""
    return _kill(space, seed, kills, per_life, scenarios, CHANGES)


def kill_replacements(space: Path, seed: int, kills: int, backend: str = "memmap") -> Figures:
    """Kill so often inside resume=False, and inside the making of a new state."""
    figures = Figures()
    changing, stepping = over(backend, CHANGING), over(backend, STEPPING)
    choices = [
        (changing[0], True, False),
        (changing[1], True, True),
        (stepping[1], False, False),
        (stepping[5], False, False),
    ]
    for number, (scenario, replacing, left_open) in enumerate(choices):
        target = figures.total + (kills - figures.total) // (len(choices) - number)
        rng = random.Random(f"{seed} {number}")
        with prepared(space / f"replace-{seed}-{number}", scenario) as (reference, directory):
            trial = Replacement(reference, directory, replacing, left_open)
            while figures.total < target:
                trial.run(trial.draw(rng).stop, figures)
    return figures


def every_place(space: Path, scenario: Scenario, phases: frozenset[str] = frozenset()) -> Figures:
    """Kill at every named point and every line of the package that the scenario passes: at the first passage
    after its first reopening, and at one in its middle.
    """
    figures = Figures()
    with prepared(space / "places", scenario) as (reference, directory):
        profiled = profile(reference, directory / "profile", phases)
        for place, count in sorted({**profiled.points, **profiled.lines}.items()):
            plans = iter([Plan(Stop(place, 1, phases), 5), Plan(Stop(place, max(1, count // 3), phases), 5)])
            Life(reference, directory / "run", figures, lambda plans=plans: next(plans)).run(2)
    return figures


def lose_power_everywhere(
    space: Path, seed: int, losses: int, draws: int, failing: float = 0.0, backend: str = "memmap"
) -> Figures:
    """Lose power so often in each scenario that promises to survive it, after a share of failed syncs."""
    figures = Figures()
    scenarios = over(backend, [one for one in (*STEPPING, *CHANGING) if one.durability == "power"])
    for number, scenario in enumerate(scenarios):
        rng = random.Random(f"{seed} {scenario.name}")
        with prepared(space / f"power-{seed}-{number}", scenario) as (reference, directory):
            lose_power(reference, directory, rng, losses, draws, failing, figures)
    return figures


def refuse(space: Path, seed: int, trials: int, scenarios: Sequence[Scenario] = ENDURING) -> Figures:
    """Let file operations fail, one or three in a row, in so many runs of each scenario (0: in all)."""
    figures = Figures()
    for number, scenario in enumerate(scenarios):
        rng = random.Random(f"{seed} {scenario.name}")
        with prepared(space / f"refuse-{seed}-{number}", scenario) as (reference, directory):
            counting = FileLayer()
            _endure(reference, directory, counting, Figures())
            every = [
                (first, width, code)
                for first in range(counting.count)
                for width in (1, 3)
                for code in (errno.EIO, errno.ENOSPC)
            ]
            wanted = figures.total + trials
            for first, width, code in rng.sample(every, len(every)) if trials else every:
                # A run with a queue may come to its end before the operation of a number.
                if trials and figures.total >= wanted:
                    break
                layer = FileLayer(frozenset(range(first, first + width)), code)
                _endure(reference, directory, layer, figures)
    return figures


def _endure(reference: Reference, directory: Path, layer: FileLayer, figures: Figures) -> None:
    run = Endurance(reference, reference.copy(directory / "run"), pause=4)
    try:
        with layer.installed():
            run.run()
    except Exception as error:
        figures.fail(type(error).__name__, f"{reference.scenario.name}, after {run.errors}: {error!r}")
    else:
        figures.finished += 1
    figures.kills["failed operation"] += len(run.errors)


def interrupt(
    space: Path,
    seed: int,
    trials: int,
    phases: frozenset[str] = frozenset({"step", "flush", "curve", "curves"}),
    scenarios: Sequence[Scenario] = ENDURING,
) -> Figures:
    """Interrupt, as Ctrl-C does, in so many runs of each scenario (at every possible place for 0)."""
    figures = Figures()
    for number, scenario in enumerate(scenarios):
        rng = random.Random(f"{seed} {scenario.name}")
        with prepared(space / f"interrupt-{seed}-{number}", scenario) as (reference, directory):
            # Counted in the second run: the first of a process also passes what fills its caches.
            _interrupted(reference, directory, 0, phases, Figures())
            count = _interrupted(reference, directory, 0, phases, Figures())
            places = rng.sample(range(1, count + 1), count) if trials else range(1, count + 1)
            wanted = figures.kills["interrupt"] + (trials or count)
            for at in places:
                # A run with a queue may pass fewer places than another, and so miss one of the last.
                if figures.kills["interrupt"] >= wanted:
                    break
                _interrupted(reference, directory, at, phases, figures)
    return figures


def _interrupted(
    reference: Reference, directory: Path, at: int, phases: frozenset[str], figures: Figures
) -> int:
    count = 0

    def passing() -> None:
        nonlocal count
        if watch.phase in phases:
            count += 1
            if count == at:
                raise KeyboardInterrupt

    run = Endurance(reference, reference.copy(directory / "run"), pause=4)
    trace_calls(passing)
    try:
        run.run()
        figures.finished += 1
    except Exception as error:
        figures.fail(type(error).__name__, f"{reference.scenario.name}, interrupted at {at}: {error!r}")
    finally:
        end_trace()
        watch.reset()
    figures.kills["interrupt"] += len(run.errors)
    return count


def _kill(
    space: Path, seed: int, kills: int, per_life: int, scenarios: Sequence[Scenario], phases: frozenset[str]
) -> Figures:
    figures = Figures()
    for number, scenario in enumerate(scenarios):
        # What an earlier scenario missed falls to the later ones.
        target = figures.total + (kills - figures.total) // (len(scenarios) - number)
        rng = random.Random(f"{seed} {scenario.name}")
        with prepared(space / f"kill-{seed}-{number}", scenario) as (reference, directory):
            profiled = profile(reference, directory / "profile", phases)
            idle = 0
            while figures.total < target and idle < 20:
                before = figures.total
                life = Life(
                    reference, directory / "run", figures, lambda p=profiled, r=rng: draw(r, p, phases)
                )
                life.run(min(per_life, target - figures.total))
                idle = idle + 1 if figures.total == before else 0
    return figures


@contextlib.contextmanager
def prepared(directory: Path, scenario: Scenario) -> Iterator[tuple[Reference, Path]]:
    """Yield what an uninterrupted run leaves, with the points in place, and a directory to work in."""
    directory.mkdir(parents=True)
    reference = Reference(scenario, directory)
    try:
        with tuned(scenario), points():
            yield reference, directory
    finally:
        watch.reset()
        shutil.rmtree(directory)
