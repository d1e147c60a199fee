"""Kills inside resume=False, and inside the making of a new state."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

from faults import Stop, die, watch
from harness import Child, Figures, Report, Timer, messages
from lives import Plan, Profile, count_passages, draw
from references import Reference, Snapshot, WrongState, counts_of, records_of

from dsa.errors import StateIncompleteError, StateNotFoundError

__all__ = ["Replacement"]

_SALT = 100
_STEPS = 3


class Replacement:
    """An old state that resume=False replaces by one with other weights, or a new directory that is made.

    Args:
        reference: A scenario and its directory to start from.
        directory: Where to work.
        replacing: Whether there is an old state, of three steps.
        left_open: Whether its process died instead of closing it.
    """

    def __init__(
        self, reference: Reference, directory: Path, replacing: bool, left_open: bool = False
    ) -> None:
        self.scenario, self.directory, self.replacing = reference.scenario, directory, replacing
        self.reference, self.left_open = reference, left_open
        self.path, self._old = directory / "state", directory / "old"
        self.old_states: list[Snapshot] = []
        if replacing:
            self.old_states = self._train(reference.copy(self.path), resume=True, salt=0)
            shutil.copytree(self.path, self._old)
        shutil.rmtree(self.path, ignore_errors=True)
        self.new_states = self._train(self.path, resume=None, salt=_SALT)
        self.profiled = Profile(*(count_passages(self._once, lines) for lines in (False, True)))

    def _train(self, path: Path, resume: bool | None, salt: int) -> list[Snapshot]:
        states = []
        with self.scenario.build(path, resume=resume, salt=salt) as optimizer:
            for number in range(_STEPS + 1):
                optimizer.flush()
                states.append(Snapshot(records_of(path), counts_of(optimizer)))
                if number < _STEPS:
                    optimizer.step(self.scenario.batch(number))
        return states

    def _restore(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self.replacing and self.left_open:
            self._leave_open()
        elif self.replacing:
            shutil.copytree(self._old, self.path)

    def _leave_open(self) -> None:
        """Let a process die after the steps of the old state; a copy of what it leaves is none of it."""
        self.reference.copy(self.path)

        def body(report: Report) -> None:
            optimizer = self.scenario.build(self.path, resume=True)
            for number in range(_STEPS):
                optimizer.step(self.scenario.batch(number))
            os.kill(os.getpid(), signal.SIGKILL)

        child = Child(body)
        told = list(messages(child))
        assert (told, child.wait()) == ([], -signal.SIGKILL), told

    def _once(self) -> None:
        self._restore()
        self._body(lambda message: None)

    def _body(self, report: Report) -> None:
        optimizer = self.scenario.build(self.path, resume=False if self.replacing else None, salt=_SALT)
        report(("opened",))
        optimizer.step(self.scenario.batch(0))
        report(("stepped",))
        optimizer.close()
        report(("closed",))

    def draw(self, rng: random.Random) -> Plan:
        """Draw what ends a trial."""
        plan = draw(rng, self.profiled, frozenset())
        if isinstance(plan.stop, Timer):
            return plan._replace(stop=plan.stop._replace(reports=rng.randint(0, 1)))
        return plan

    def run(self, stop: Stop | Timer, figures: Figures) -> None:
        """Kill once and look at what is left."""
        self._restore()

        def body(report: Report) -> None:
            if isinstance(stop, Stop):
                watch.arm(stop, die)
            self._body(report)

        child = Child(body)
        told = list(messages(child, stop if isinstance(stop, Timer) else None))
        child.wait()
        if told and told[-1][0] == "failed":
            raise AssertionError(told[-1][2])
        reached = len(told)
        if reached == 3:
            return
        what = "replacing" if self.replacing else "making"
        figures.kills["timer" if isinstance(stop, Timer) else stop.place] += 1
        figures.phases[f"{what}, {('not yet open', 'in the first step', 'closing')[reached]}"] += 1
        try:
            self._check(reached)
            figures.reopened += 1
        except Exception as error:
            kind = getattr(error, "kind", "refused")
            figures.fail(kind, f"{self.scenario.name}, {what}, {stop}, {reached} reports: {error!r}")

    def _check(self, reached: int) -> None:
        allowed = self.new_states[max(0, reached - 1) : reached + 1]
        if reached == 0:
            allowed = self.new_states[:1] + self.old_states[_STEPS:]
        try:
            optimizer = self.scenario.build(self.path, resume=True, salt=_SALT)
        except (StateIncompleteError, StateNotFoundError) as error:
            if reached > 0 or (self.replacing and isinstance(error, StateNotFoundError)):
                raise
            if self.replacing:
                raise AssertionError("the old state is gone before the new one is there") from error
            if isinstance(error, StateIncompleteError) and "leave resume out to make it" not in str(error):
                raise AssertionError("the error does not say how to go on") from error
            optimizer = self.scenario.build(self.path, resume=None, salt=_SALT)
            allowed = self.new_states[:1]
        with optimizer:
            found = Snapshot(records_of(self.path), counts_of(optimizer))
        if found not in allowed:
            raise WrongState("torn", f"{found.counts} is neither the old state nor the new one")
