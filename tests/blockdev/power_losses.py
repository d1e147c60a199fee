"""Power is lost at random instants of random runs on a real file system."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from device import BlockDevice
from filesystems import mounted, new
from harness import Child, Figures, Report
from images import Moment, examine, judge
from references import tuned
from state_files import restarted
from training_runs import Reference, content_of, draw_run

__all__ = ["lose_power"]

_IMAGES = 3


def lose_power(
    device: BlockDevice,
    filesystem: str,
    rng: random.Random,
    policy: str,
    images: int,
    figures: Figures,
    kills: bool = True,
) -> None:
    """Examine so many images of runs of one policy, of which some are killed and go on, if that is wanted."""
    left = images
    while left > 0:
        run = draw_run(rng, policy)
        work = device.directory / "reference"
        with tuned(run):
            reference = Reference(run, work)
            shutil.rmtree(work)
            try:
                trial = _Trial(reference, device, rng, left, kills=kills and policy != "none")
                left -= _follow(trial, filesystem, figures)
            except AssertionError as error:
                figures.fail(f"{policy}: the run", f"{run}\n{error}")
                left -= 1


def _follow(trial: _Trial, filesystem: str, figures: Figures) -> int:
    """Run once, with an examination of what was taken on the way; return how many images that were.

    With ``"power"``, where a run can go on after it, power is lost for good in half of them, and lost again.
    """
    reference, device, rng, most = trial.reference, trial.device, trial.rng, trial.most
    point = device.directory / "mounted"
    with new(device, filesystem, point):
        trial.run(point)
    count = len(trial.taken)
    again = [taken for taken in trial.taken if taken.moment.made and taken.moment.done < taken.moment.begun]
    if reference.run.durability == "power" and again and count < most and rng.random() < 0.5:
        chosen = rng.choice(again)
        device.load(chosen.image)
        second = _Trial(reference, device, rng, most - count, moment=chosen.moment, restarts=1)
        with mounted(device.file, filesystem, point):
            second.run(point)
        trial.taken += second.taken
    for taken in trial.taken:
        _examine(reference, filesystem, taken, figures)
    return len(trial.taken)


class _Taken(NamedTuple):
    """An image, how far the run was, and what the loss of power was like."""

    image: Path
    moment: Moment
    how: str
    restarts: int


def _examine(reference: Reference, filesystem: str, taken: _Taken, figures: Figures) -> None:
    policy = reference.run.durability
    finding = examine(taken.image, filesystem, reference.run, taken.moment.exported, taken.restarts)
    verdict = judge(finding, reference, taken.moment)
    figures.kills[f"power lost, {taken.how}"] += 1
    figures.phases[f"{policy}: {verdict.kind}"] += 1
    figures.reopened += finding.kind == "opened"
    if verdict.bad:
        told = f"{reference.run}\n{taken.how}, {taken.moment}\n{verdict.text}\nwarned: {finding.warned}"
        figures.fail(f"{policy}: {verdict.kind}", f"{verdict.kind.upper()}: {told}")


class _Plan(NamedTuple):
    """Something that happens so many seconds after the n-th report."""

    reports: int
    delay: float
    call: Callable[[], None]


@dataclass
class _Trial:
    """One run, of which images are taken; now and then it is killed and goes on.

    Args:
        reference: What to do, and what it leaves.
        device: Where.
        rng: Draws the instants.
        most: Images to take.
        kills: Whether it may be killed, which tears steps with ``durability="none"``.
        moment: How far it is when it begins.
        restarts: How often the machine was started again before.
    """

    reference: Reference
    device: BlockDevice
    rng: random.Random
    most: int
    kills: bool = True
    moment: Moment = field(default_factory=Moment)
    restarts: int = 0
    taken: list[_Taken] = field(default_factory=list)
    reports: int = 0
    ended: bool = False
    killed: bool = False

    def run(self, point: Path) -> None:
        """Run to the end, in as many processes as it takes."""
        plans = [self._plan(self._take) for _ in range(self.rng.randint(1, 4))]
        if self.restarts:
            plans.append(_Plan(0, 0.05 * self.rng.random(), self._take))  # while it is opened
        if self.kills:
            for kill in [self._plan(self._kill) for _ in range(self.rng.choice([0, 0, 1, 2]))]:
                opening = _Plan(kill.reports, 0.05 * self.rng.random(), self._take)
                plans += [kill, opening] if self.rng.random() < 0.7 else [kill]
        plans.sort(key=lambda plan: plan.reports)
        while not self.ended:
            self._live(point, plans)
        if not self.taken:
            self._take()

    def _plan(self, call: Callable[[], None]) -> _Plan:
        reports = self.rng.randint(0, 2 * len(self.reference.run.ops) + 2)
        return _Plan(reports, self.rng.choice([0.0, 0.003, 0.02]) * self.rng.random(), call)

    def _live(self, point: Path, plans: list[_Plan]) -> None:
        """Follow one process to its end."""
        moment, restarts, self.killed = self.moment, self.restarts, False
        found_by_content = restarts > 0 and self.reports == 0

        def body(report: Report) -> None:
            with restarted(restarts):
                _train(self.reference, point, moment, found_by_content, report)

        self.child = Child(body)
        try:
            self._watch(plans)
        finally:
            self.child.kill()
            self.child.wait()
        assert self.ended or self.killed, "a run ended that nobody killed"

    def _watch(self, plans: list[_Plan]) -> None:
        """Take in what a process reports until it ends, and do what was planned on the way."""
        while True:
            due = self._due(plans)
            while (message := self.child.next(due)) is not None:
                self._note(message)
                due = due or self._due(plans)
            if due is None or time.monotonic() < due:
                return
            plans.pop(0).call()

    def _due(self, plans: list[_Plan]) -> float | None:
        if not plans or self.killed or self.reports < plans[0].reports:
            return None
        return time.monotonic() + plans[0].delay

    def _note(self, message: tuple[Any, ...]) -> None:
        kind, *value = message
        self.reports += 1
        moment = self.moment
        if kind == "failed":
            raise AssertionError(value[1])
        if kind == "made":
            self.moment = replace(moment, made=True)
        elif kind == "stands":
            self.moment = replace(moment, done=value[0], begun=value[0])
        elif kind == "begin":
            exported = moment.exported - {value[0]}
            self.moment = replace(moment, begun=value[0] + 1, exported=exported)
        elif kind == "done":
            op = self.reference.run.ops[value[0] - 1]
            floor = value[0] if op.kind in ("flush", "close") else moment.floor
            exported = moment.exported | ({op.number} if op.kind == "export" else frozenset())
            self.moment = replace(moment, done=value[0], floor=floor, exported=exported)
        elif kind == "closed":
            self.ended = True
            self.moment = replace(moment, floor=moment.done)

    def _drain(self) -> None:
        while (message := self.child.next(time.monotonic())) is not None:
            self._note(message)

    def _take(self) -> None:
        """Draw what may be left if power is lost now."""
        if not self.ended:
            self._drain()
        before = self.moment
        self.device.hold()
        if not self.ended:
            self._drain()
        # What had returned before this instant, and what had been begun after it.
        moment = replace(before, begun=max(before.begun, self.moment.begun))
        if self.moment.exported < before.exported:
            moment = replace(moment, exported=self.moment.exported)
        for _ in range(min(_IMAGES, self.most - len(self.taken))):
            image = self.device.directory / f"image-{self.restarts}-{len(self.taken)}"
            chosen = self.device.draw(self.rng, image)
            grain = chosen.grain or "whole writes"
            how = f"grain {grain}, {chosen.share:.0%} arrived{', again' * self.restarts}"
            self.taken.append(_Taken(image, moment, how, self.restarts + 1))

    def _kill(self) -> None:
        os.kill(self.child.pid, signal.SIGKILL)
        self.killed = True


def _train(reference: Reference, point: Path, moment: Moment, found_by_content: bool, report: Report) -> None:
    """Begin a run, or go on with one that was killed or lost power."""
    warnings.simplefilter("ignore")
    run, state = reference.run, point / "state"
    if found_by_content:
        with run.build(state, resume=True) as optimizer:
            for name in run.rows:
                optimizer.read_rows([0], name)  # finishes what was interrupted
        found = reference.indices(content_of(state), moment.done, moment.begun)
        assert found, f"nothing between {moment.done} and {moment.begun}"
        optimizer, done = run.build(state, resume=True), found[0]
    elif moment.made:
        optimizer = run.build(state, resume=True)
        done = _standing(reference, optimizer.global_step, moment)
    else:
        shutil.rmtree(state, ignore_errors=True)
        optimizer, done = run.build(state, resume=None), 0
        report(("made",))
    report(("stands", done))
    for number in range(done, len(run.ops)):
        report(("begin", number))
        op = run.ops[number]
        if op.kind == "close":
            optimizer.close()
        else:
            run.do(optimizer, op, point / "checkpoints")
        report(("done", number + 1))
        if op.kind == "close":
            optimizer = run.build(state, resume=True)
    optimizer.close()
    report(("closed",))


def _standing(reference: Reference, step: int, moment: Moment) -> int:
    """Return after how many operations a killed run stands; all but a step may be made again."""
    done, states = moment.done, reference.states
    if moment.begun > done and reference.run.ops[done].kind == "step":
        if step == states[done + 1].counts[0]:
            return done + 1
        assert step == states[done].counts[0], f"step {step} after a kill, {moment}, {reference.run}"
    return done
