"""Kills of configurations that were drawn, each against what an uninterrupted run of it stood at.

The run that it is held against has no journal, no queue, one thread and tables in memory's cache, and notes
what it stands at after every transaction. Whatever another run goes through, it stands at one of these; which
ones are allowed depends on what has returned.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from configurations import Configuration, Opened
from drawing import draw_configuration
from faults import Stop, die, points, watch
from harness import Child, Figures, Report, Timer, messages
from lives import Plan
from references import WrongState, tuned
from standings import Standing, stand, stand_exported, stand_to_export

from dsa.errors import StateExistsError, StateIncompleteError, StateNotFoundError, StateWarning
from dsa.state.state_directory import StateDirectory

__all__ = ["Wild", "kill_configurations", "prepared_wild"]


class Moment(NamedTuple):
    """What an uninterrupted run stands at after a transaction, on disk and in memory."""

    standing: Standing
    exported: Standing
    weights: dict[str, np.ndarray]


@dataclass
class Truth:
    """An uninterrupted run.

    Args:
        moments: After each of its transactions; what changed nothing is left out.
        bounds: For each call the moment before it, and the last of all.
    """

    moments: list[Moment] = field(default_factory=list)
    bounds: list[int] = field(default_factory=list)


def uninterrupted(configuration: Configuration, directory: Path) -> Truth:
    """Run a configuration plainly and return what it stood at."""
    plain = replace(configuration, durability="none", async_writes=False, backend="memmap", threads=1)
    truth = Truth()
    with contextlib.ExitStack() as stack:
        opened = plain.build(directory / "plain", resume=None)
        note = _noting(truth, opened)
        note()
        for method in ("commit", "adopt", "add"):
            stack.enter_context(mock.patch.object(StateDirectory, method, _then(method, note)))
        for call in plain.calls:
            truth.bounds.append(len(truth.moments) - 1)
            opened.apply(call, 0, lambda path: None)
            note()
        truth.bounds.append(len(truth.moments) - 1)
        opened.close()
    for path in directory.iterdir():
        shutil.rmtree(path)
    return truth


def _noting(truth: Truth, opened: Opened) -> Callable[[], None]:
    def note() -> None:
        standing = stand(opened.state)
        moment = Moment(standing, stand_to_export(opened.state), opened.weights())
        if truth.moments and truth.moments[-1].standing == standing:
            truth.moments[-1] = moment  # what is in memory may have come after
        else:
            truth.moments.append(moment)

    return note


def _then(method: str, note: Callable[[], None]) -> Callable[..., object]:
    function = getattr(StateDirectory, method)

    def wrapper(self: StateDirectory, *arguments: object, **options: object) -> object:
        result = function(self, *arguments, **options)
        note()
        return result

    return wrapper


@dataclass
class Wild:
    """One configuration, killed again and again until it has come to its end.

    Args:
        configuration: The run.
        directory: Where it lives.
        figures: Where it counts.
    """

    configuration: Configuration
    directory: Path
    figures: Figures
    done: int = 0
    started: int = 0
    floor: int = 0
    made: bool = False

    def __post_init__(self) -> None:
        self.truth = uninterrupted(self.configuration, self.directory)
        self.path = self.directory / "run"

    def run(self, rng: random.Random, kills: int, lives: int = 6) -> None:
        """Run to the end a few times, killed so often in all at most; what goes wrong ends that."""
        self._before = sum(self.figures.failures.values())
        counts = self._count()
        target = self.figures.total + kills
        while counts and lives > 0 and self.figures.total < target and not self._failed():
            lives -= 1
            self._start_over()
            self._live(lambda: _draw(rng, counts) if self.figures.total < target else Plan(None, 0))

    def run_stopped(self, place: str, passage: int) -> None:
        """Run to the end once, killed at one place."""
        plans = iter([Plan(Stop(place, passage), 0)])
        self._live(lambda: next(plans, Plan(None, 0)))

    def _failed(self) -> bool:
        return sum(self.figures.failures.values()) > self._before

    def _live(self, plans: Callable[[], Plan]) -> None:
        outcome = "killed"
        while outcome == "killed":
            outcome = self._trial(plans())
            if self.configuration.durability == "none" and outcome == "killed":
                outcome = self._hear()
        if outcome == "closed":
            self._compare_end()

    def _start_over(self) -> None:
        self.done = self.started = self.floor = 0
        self.made = False
        for path in self.directory.iterdir():
            shutil.rmtree(path)

    def _count(self) -> Counter[str]:
        """Run it undisturbed, and return what it passes; nothing if that went wrong."""

        def body(report: Report) -> None:
            watch.counts = Counter()
            self._session(lambda message: None)
            report(("counts", watch.counts))

        child = Child(body)
        told = list(messages(child))
        child.wait()
        if told and told[-1][0] == "counts":
            self._compare_end()
            return told[-1][1]
        self.figures.fail("undisturbed", f"{self.configuration.name}\n{told[-1][2] if told else ''}")
        return Counter()

    def _session(self, report: Report) -> None:
        calls = self.configuration.calls
        report(("open", 0))
        opened = self._open()
        found = self._locate(opened, self.floor, self.truth.bounds[self.started])
        done = self.done
        if self.started > done and found == self.truth.bounds[done + 1] > self.truth.bounds[done]:
            done += 1
        opened.put_weights(self.truth.moments[found].weights)
        report(("stands", done, found))
        skip = found - self.truth.bounds[done]
        for number in range(done, len(calls)):
            report(("begin", number))
            span = range(self.truth.bounds[number], self.truth.bounds[number + 1] + 1)
            opened.apply(calls[number], skip, self._checking(span))
            skip = 0
            report(("done", number + 1))
        report(("close", 0))
        opened.close()
        report(("closed", 0))

    def _open(self) -> Opened:
        if not self.made:
            try:
                return self.configuration.build(self.path, resume=None)
            except StateExistsError:
                pass
        try:
            return self.configuration.build(self.path, resume=True)
        except (StateIncompleteError, StateNotFoundError):
            assert not self.made, "a state that was open is gone"
            raise

    def _locate(self, opened: Opened, floor: int, ceiling: int) -> int:
        standing = stand(opened.state)
        moments = self.truth.moments
        for number in range(floor, ceiling + 1):
            if moments[number].standing == standing:
                return number
        for number, moment in enumerate(moments):
            if moment.standing == standing:
                raise WrongState("lost", f"moment {number} where {floor} to {ceiling} are allowed")
        raise WrongState("torn", self._describe(standing, moments[floor : ceiling + 1]))

    def _describe(self, standing: Standing, allowed: list[Moment]) -> str:
        lines = [f"step {standing.step}, allowed {[moment.standing.step for moment in allowed]}"]
        for name, (steps, k, hashes) in standing.tables.items():
            for moment in allowed:
                wanted = moment.standing.tables.get(name)
                if wanted is None:
                    lines.append(f"{name} is not there yet")
                    continue
                differ = np.flatnonzero(np.frombuffer(hashes, "u8") != np.frombuffer(wanted[2], "u8"))
                lines.append(
                    f"{name}: {steps} steps, k={k}, where {wanted[:2]}; {len(differ)} rows: {differ[:9]}"
                )
        return "; ".join(lines)

    def _checking(self, span: range) -> Callable[[Path], None]:
        def check(path: Path) -> None:
            found = stand_exported(path)
            if not any(self.truth.moments[number].exported == found for number in span):
                raise WrongState("checkpoint", f"{path.name} is of step {found.step} and of no moment {span}")

        return check

    def _trial(self, plan: Plan) -> str:
        def body(report: Report) -> None:
            if isinstance(plan.stop, Stop):
                watch.arm(plan.stop, die)
            self._session(report)

        child = Child(body)
        phase, outcome = "start", "killed"
        for message in messages(child, plan.stop if isinstance(plan.stop, Timer) else None):
            phase, outcome = self._note(message, phase, plan)
        status = child.wait()
        if outcome == "killed":
            assert status == -signal.SIGKILL, f"status {status} in {phase}, {plan}, {self.configuration.name}"
            self.figures.kills["timer" if isinstance(plan.stop, Timer) else plan.stop.place] += 1
            self.figures.phases[phase] += 1
        return outcome

    def _note(self, message: tuple[Any, ...], phase: str, plan: Plan) -> tuple[str, str]:
        kind, value = message[:2]
        if kind == "failed":
            where = f"{self.done} calls done, {self.started} begun, {plan} in {phase}"
            self.figures.fail(value, f"{self.configuration.name}\n{where}\n{message[2]}")
            return phase, "failed"
        if kind == "stands":
            self.made = True
            self.figures.reopened += 1
            self.figures.in_progress += message[2] > self.floor
            self.done = self.started = value
            self.floor = message[2]
        elif kind == "begin":
            self.started = value + 1
            return self.configuration.calls[value].kind, "killed"
        elif kind == "done":
            self.done = value
            self.floor = self.truth.bounds[value]
        return kind, "closed" if kind == "closed" else "killed"

    def _hear(self) -> str:
        """A state without a journal opens after a kill, and says what that means."""

        def body(report: Report) -> None:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                opened = self.configuration.build(self.path, resume=True, heard=True)
            told = [each for each in caught if issubclass(each.category, StateWarning)]
            heard = any("has no journal" in str(each.message) for each in told)
            if not heard:  # it had just been closed, and is whole
                self._locate(opened, self.floor, self.truth.bounds[self.started])
            report(("told", heard))
            opened.close()

        child = Child(body)
        told = list(messages(child))
        child.wait()
        if not self.made and told[0][0] == "failed":
            return "told"
        if told[0][0] == "failed":
            kind = "silent" if told[0][1] in ("torn", "lost") else told[0][1]
            self.figures.fail(kind, f"{self.configuration.name}\n{told[0][2]}")
            return "failed"
        self.figures.told += told[0][1]
        return "told"

    def _compare_end(self) -> None:
        def body(report: Report) -> None:
            opened = self.configuration.build(self.path, resume=True)
            opened.put_weights(self.truth.moments[-1].weights)
            found = self._locate(opened, len(self.truth.moments) - 1, len(self.truth.moments) - 1)
            opened.close()
            report(("same", found))

        child = Child(body)
        told = list(messages(child))
        child.wait()
        if told and told[0][0] == "same":
            self.figures.finished += 1
        else:
            self.figures.fail("different end", f"{self.configuration.name}\n{told[0][2] if told else ''}")


def _draw(rng: random.Random, counts: Counter[str]) -> Plan:
    if rng.random() < 0.45:
        return Plan(Timer(rng.randint(0, 30), rng.choice([0.0005, 0.003, 0.02]) * rng.random()), 0)
    place = rng.choice(sorted(counts))
    return Plan(Stop(place, max(1, int(counts[place] * rng.random() ** 3))), 0)


@contextlib.contextmanager
def prepared_wild(space: Path, configuration: Configuration) -> Iterator[Path]:
    """Put the points in place, and yield a directory to work in."""
    directory = space / f"wild-{configuration.seed}"
    directory.mkdir()
    try:
        with tuned(configuration), points():
            yield directory
    finally:
        watch.reset()
        shutil.rmtree(directory)


def kill_configurations(space: Path, seed: int, kills: int, per_run: int = 12) -> Figures:
    """Draw configurations and kill them so often in all."""
    figures = Figures()
    number = 0
    while figures.total < kills:
        configuration = draw_configuration(seed * 100_000 + number)
        number += 1
        with prepared_wild(space, configuration) as directory:
            rng = random.Random(f"wild {configuration.seed}")
            figures.runs += 1
            Wild(configuration, directory, figures).run(rng, min(per_run, kills - figures.total))
    return figures
