"""One scenario from its first operation to its last, however often it is killed on the way."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from faults import Stop, die, end_trace, trace_lines, watch
from harness import Child, Figures, Report, Timer, messages
from references import Reference, counts_of, locate, records_of

__all__ = ["Life", "Plan", "Profile", "count_passages", "draw", "profile"]


def session(
    reference: Reference, directory: Path, done: int, started: int, pause: int, report: Report
) -> None:
    """Open, check what is there, and go on to the end, closing and opening again every `pause` operations."""
    scenario = reference.scenario
    found = None
    while found is None or done < len(scenario.ops):
        watch.phase = "open"
        report(("open", done))
        optimizer = scenario.build(directory, resume=True)
        if found is None:
            watch.phase = "check"
            done = found = locate(reference, optimizer, directory, done, started)
            report(("stands", found))
        for op in scenario.ops[done : done + pause]:
            watch.phase = op.kind
            report(("begin", done))
            scenario.apply(optimizer, op)
            watch.phase = ""
            done += 1
            report(("done", done))
        watch.phase = "close"
        report(("close", done))
        optimizer.close()
    report(("closed", done))


class Profile(NamedTuple):
    """How often something passes each named point and each line of the package."""

    points: Counter[str]
    lines: Counter[str]


def count_passages(
    run: Callable[[], None], lines: bool, phases: frozenset[str] = frozenset()
) -> Counter[str]:
    """Call a function and return how often it passed each line, or else each named point, in some phases."""
    counts: Counter[str] = Counter()

    def count(place: str) -> None:
        if not phases or watch.phase in phases:
            counts[place] += 1

    if lines:
        trace_lines(count)
    else:
        watch.every = count
    try:
        run()
    finally:
        end_trace()
        watch.reset()
    return counts


def profile(reference: Reference, directory: Path, phases: frozenset[str]) -> Profile:
    """Count what a scenario passes when it dies in the middle, so that recovery is counted as well."""
    middle = len(reference.scenario.ops) // 2
    counted: list[Counter[str]] = []
    for lines in (False, True):
        reference.copy(directory)
        total: Counter[str] = Counter()
        for done, last in ((0, middle), (middle, len(reference.scenario.ops))):

            def body(report: Report, lines: bool = lines, done: int = done, last: int = last) -> None:
                report(
                    (
                        "counts",
                        count_passages(lambda: _until(reference, directory, done, last), lines, phases),
                    )
                )

            child = Child(body)
            for message in messages(child):
                if message[0] == "failed":
                    raise AssertionError(message[2])
                total += message[1]
            child.wait()
        counted.append(total)
    return Profile(*counted)


class _Enough(BaseException):
    """Ends a session without closing anything."""


def _until(reference: Reference, directory: Path, done: int, last: int) -> None:
    def stop(message: tuple[Any, ...]) -> None:
        if message == ("done", last) and last < len(reference.scenario.ops):
            raise _Enough

    try:
        session(reference, directory, done, done, 7, stop)
    except _Enough as error:
        # The child ends right after this; until then nothing may be closed or collected.
        _KEPT.append(error)


_KEPT: list[object] = []


class Plan(NamedTuple):
    """How a trial goes: what ends it (None: nothing does), and how often it closes and opens again."""

    stop: Stop | Timer | None
    pause: int


def draw(rng: random.Random, profiled: Profile, phases: frozenset[str]) -> Plan:
    """Draw a timer, a named point or a line, rare ones as likely as frequent ones."""
    pause, lot = rng.randint(3, 15), rng.random()
    if lot < 0.3 and not phases:
        return Plan(Timer(rng.randint(0, 2 * pause), rng.uniform(0.0, 0.004)), pause)
    counts = profiled.points if lot < 0.65 else profiled.lines
    place = rng.choice(sorted(counts))
    # The passages of a whole scenario were counted; most trials should end early in it.
    return Plan(Stop(place, max(1, int(counts[place] * rng.random() ** 3)), phases), pause)


@dataclass
class Life:
    """A run of a scenario.

    Args:
        reference: What it must agree with.
        directory: Where it lives.
        figures: Where it counts.
        plans: Gives the next trial's.
    """

    reference: Reference
    directory: Path
    figures: Figures
    plans: Callable[[], Plan]
    done: int = 0
    started: int = 0

    def run(self, kills: int) -> None:
        """Run to the end, being killed at most so many times; what goes wrong ends it and is counted."""
        self.reference.copy(self.directory)
        outcome = "killed"
        while outcome == "killed":
            plan = self.plans() if kills > 0 else Plan(None, 10)
            outcome = self._trial(plan)
            kills -= 1
        if outcome == "closed":
            self._compare_end()

    def _trial(self, plan: Plan) -> str:
        def body(report: Report) -> None:
            if isinstance(plan.stop, Stop):
                watch.arm(plan.stop, die)
            session(self.reference, self.directory, self.done, self.started, plan.pause, report)

        child = Child(body)
        phase, outcome = "start", "killed"
        for message in messages(child, plan.stop if isinstance(plan.stop, Timer) else None):
            phase, outcome = self._note(message, phase, plan)
        status = child.wait()
        if outcome == "killed":
            assert status == -signal.SIGKILL, f"a child ended with status {status} in {phase}, {plan}"
            self.figures.kills["timer" if isinstance(plan.stop, Timer) else plan.stop.place] += 1
            self.figures.phases[phase] += 1
        return outcome

    def _note(self, message: tuple[Any, ...], phase: str, plan: Plan) -> tuple[str, str]:
        kind, value = message[:2]
        if kind == "failed":
            where = f"{self.reference.scenario.name}, {self.done} operations done, {self.started} begun"
            self.figures.fail(value, f"{where}, {plan} in {phase}\n{message[2]}")
            return phase, "failed"
        if kind == "stands":
            self.figures.reopened += 1
            self.figures.in_progress += value > self.done
            self.done = self.started = value
        elif kind == "begin":
            self.started = value + 1
            return self.reference.scenario.ops[value].kind, "killed"
        elif kind == "done":
            self.done = value
        return kind, "closed" if kind == "closed" else "killed"

    def _compare_end(self) -> None:
        end = self.reference.states[-1]
        scenario = self.reference.scenario
        with scenario.build(self.directory, resume=True) as optimizer:
            same = (records_of(self.directory), counts_of(optimizer)) == end
        if same:
            self.figures.finished += 1
        else:
            self.figures.fail(
                "different end", f"{scenario.name}: the end is not that of an uninterrupted run"
            )
