"""A disk that fails for a while under random runs on a real file system, and then works again."""

from __future__ import annotations

import os
import random
import shutil
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from device import BlockDevice
from filesystems import extents, forget, mounted, new, sync
from harness import Child, Figures, Report, messages
from images import Finding, Moment, Verdict, examine, judge, look, tells, told_of
from references import tuned
from scenarios import Op
from state_files import journal_files, table_files
from training_runs import Reference, Run, draw_run

from dsa.errors import DSAError

__all__ = ["Fault", "fail_writes", "try_fault"]

_TRIES = 8
_MOST_IMAGES = 5
TARGETS = ("tables", "tables", "journal", "journal", "both", "flushes")


@dataclass(frozen=True)
class Fault:
    """What fails, and when.

    Args:
        target: Whose blocks can't be written, or ``flushes``.
        at: The operation before which it begins.
        written: Whether the blocks that were used were written back before; otherwise many never were.
        times: How often.
        heal: After so many calls that raised, or operations that did not, it works again.
    """

    target: str
    at: int
    written: bool
    times: int
    heal: int


def fail_writes(
    device: BlockDevice, filesystem: str, rng: random.Random, policy: str, trials: int, figures: Figures
) -> None:
    """Let a disk fail in so many runs of one policy."""
    for _ in range(trials):
        run = _draw(rng, policy)
        fault = Fault(
            target=rng.choice(TARGETS),
            at=rng.randrange(len(run.ops) - 2),
            written=rng.random() < 0.5,
            times=rng.choice([1, 3, 1 << 40]),
            heal=rng.randint(1, 5),
        )
        with tuned(run):
            reference = Reference(run, device.directory / "reference")
            shutil.rmtree(device.directory / "reference")
            try_fault(device, filesystem, reference, fault, rng, figures)


def _draw(rng: random.Random, policy: str) -> Run:
    drawn = draw_run(rng, policy, ("memmap", "memmap", "memmap", "zarr", "zstd"))
    kinds = ["step"] * 6 + ["flush", "close"]
    ops = tuple(Op(rng.choice(kinds), number) for number in range(rng.randint(6, 16)))
    return replace(drawn, ops=(Op("step", 99), *ops, Op("step", 100)))


def try_fault(
    device: BlockDevice,
    filesystem: str,
    reference: Reference,
    fault: Fault,
    rng: random.Random,
    figures: Figures,
) -> None:
    seed = rng.getrandbits(32)
    with new(device, filesystem, device.directory / "mounted") as point:
        child = Child(lambda report: _Stubborn(reference, device, point, fault, seed, report).run())
        told = list(messages(child))
        status = child.wait()
        device.fail(())
        device.fail_flushes(0)
    trial = _Told(reference, filesystem, f"{reference.run}\n{fault}", figures)
    if not trial.take(told, status):
        return
    # The file system was unmounted in between, so that no page is left in memory.
    with mounted(device.file, filesystem, device.directory / "mounted") as point:
        trial.end(look(reference.run, point))


@dataclass
class _Told:
    """What a run has reported, and what it means.

    Args:
        reference: What the run did.
        filesystem: Where.
        where: Describes the trial.
        figures: Where to count.
        moment: How far it was.
        told: Whether an error was raised since something succeeded that promises to be durable.
    """

    reference: Reference
    filesystem: str
    where: str
    figures: Figures
    moment: Moment = field(default_factory=Moment)
    told: bool = False

    @property
    def policy(self) -> str:
        """The run's."""
        return self.reference.run.durability

    def take(self, messages: list[Any], status: int) -> bool:
        """Take in all that was reported; return whether that was as it should be."""
        gave_up, failed = False, 0
        for kind, *values in messages:
            if kind == "failed":
                self.figures.fail(f"{self.policy}: the run", f"{self.where}\n{values[1]}")
                return False
            if kind == "progress":
                self.moment, self.told, failed = values
            elif kind == "gave up":
                gave_up = True
            elif kind == "image":
                self._examine(*values)
            elif kind == "rows":
                self._compare(values[0])
        if status == -signal.SIGBUS:  # what a mapping of a file system that was shut down comes to
            self.figures.phases[f"{self.policy}: the process died of SIGBUS"] += 1
        elif status:
            self.figures.fail(f"{self.policy}: the run", f"{self.where}\nended with status {status}")
            return False
        self.figures.kills["disk failed" if failed else "disk failed where nothing was written"] += 1
        self.figures.phases[f"{self.policy}: {'never worked again' if gave_up else 'went on'}"] += bool(
            failed
        )
        return True

    def _examine(self, image: Path, moment: Moment, returned: str) -> None:
        finding = examine(image, self.filesystem, self.reference.run)
        what = f"power lost after {returned} returned"
        self._note(what, judge(finding, self.reference, moment), finding, moment)

    def _compare(self, wrong: int) -> None:
        what = "rows went back in the running process" if wrong else "rows stayed in the running process"
        self.figures.phases[f"{self.policy}: {what}"] += 1
        if wrong:
            self.figures.fail(f"{self.policy}: {what}", f"{self.where}\n{wrong} rows after flush returned")

    def end(self, finding: Finding) -> None:
        """Judge what was found in the end, without a restart."""
        verdict = judge(finding, self.reference, self.moment)
        if verdict.kind == "silent" and self.told:
            verdict = Verdict("told by an error")
        self._note("opened again", verdict, finding, self.moment)

    def _note(self, what: str, verdict: Verdict, finding: Finding, moment: Moment) -> None:
        kind = f"{self.policy}: {what}: {verdict.kind}"
        self.figures.phases[kind] += 1
        self.figures.reopened += finding.kind == "opened"
        if verdict.bad:
            told = f"{'told' if told_of(finding) else 'not told'}, warned: {finding.warned}"
            self.figures.fail(kind, f"{kind.upper()}: {self.where}\n{moment}\n{verdict.text}\n{told}")


@dataclass
class _Stubborn:
    """A user who flushes after each error until that returns, looks whether the step counts, and goes on.

    Args:
        reference: What to do, and what it leaves.
        device: Fails.
        point: Where its file system is mounted.
        fault: How.
        seed: Of what is drawn here.
        report: Told of images and of how it ended.
    """

    reference: Reference
    device: BlockDevice
    point: Path
    fault: Fault
    seed: int
    report: Report
    done: int = 0
    begun: int = 0
    floor: int = 0
    calls: int = 0
    images: int = 0
    failing: bool = False
    told: bool = False
    warned: bool = False
    before: int = 0
    errors: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Run to the end, or to where nothing works."""
        warnings.simplefilter("ignore")
        self.rng = random.Random(self.seed)
        run = self.reference.run
        self.state = self.point / "state"
        self.optimizer = run.build(self.state, resume=None)
        self.before = self._failures()
        for number, op in enumerate(run.ops):
            if number == self.fault.at:
                self._break()
            self.begun = number + 1
            self._tell()
            if not self._apply(op):
                self.report(("gave up",))
                break
            self.done = number + 1
            self._press()
        # What raised, then or in a last operation that was a close, has let go: calling again says nothing.
        let_go = self.begun > self.done and run.ops[self.done].kind == "close"
        closed = self._attempt(self.optimizer.close) and not self.warned and not let_go
        self.floor = self.done if closed else self.floor
        self._heal()
        self.told = not closed
        self._tell()
        if not closed:
            os._exit(0)  # it is abandoned, as by a kill

    def _tell(self) -> None:
        self.report(("progress", self._moment(), self.told, self._failures() - self.before))

    def _failures(self) -> int:
        counted = self.device.figures()
        return counted["failed_writes"] + counted["failed_flushes"]

    def _break(self) -> None:
        if self.fault.written:
            self.optimizer.flush()
            sync(self.point)
        if self.fault.target == "flushes":
            self.device.fail_flushes(min(self.fault.times, 1000))
        else:
            tables, journals = table_files(self.state), journal_files(self.state)
            files = {"tables": tables, "journal": journals, "both": tables + journals}[self.fault.target]
            ranges = [each for file in files for each in extents(file)]
            self.device.fail(ranges, self.fault.times)
        self.failing = True

    def _heal(self) -> None:
        self.device.fail(())
        self.device.fail_flushes(0)
        self.failing = False

    def _attempt(self, call: Callable[[], object]) -> bool:
        if self.failing:
            self.calls += 1
            if self.calls > self.fault.heal:
                self._heal()
        try:
            call()
        except (OSError, DSAError) as error:
            self.errors.append(repr(error))
            self.told = True
            return False
        return True

    def _insist(self, call: Callable[[], object]) -> bool:
        return any(self._attempt(call) for _ in range(_TRIES))

    def _apply(self, op: Op) -> bool:
        for _ in range(_TRIES):
            if self._attempt(lambda: self._call(op)):
                if self.warned:
                    return False  # it goes on from what the device has kept, and not from what was done
                self._returned(op.kind, self.begun)
                return True
            if op.kind == "close":
                continue
            if not self._insist(self.optimizer.flush):
                return False
            counted = self._counts(op)
            self._returned("flush", self.done + counted)
            if counted or op.kind == "flush":
                return True
        return False

    def _counts(self, op: Op) -> bool:
        if op.kind != "step":
            return False
        before, after = self.reference.states[self.done : self.begun + 1]
        step = self.optimizer.global_step
        assert step in (before.counts[0], after.counts[0]), f"step {step} after {self.errors}"
        return step == after.counts[0]

    def _call(self, op: Op) -> None:
        if op.kind == "close":
            self.optimizer.close()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self.optimizer = self.reference.run.build(self.state, resume=True)
            self.warned = tells([str(each.message) for each in caught])
        else:
            self.reference.run.do(self.optimizer, op, self.point)

    def _moment(self, done: int | None = None, begun: int | None = None) -> Moment:
        return Moment(True, self.done if done is None else done, begun or self.begun, self.floor)

    def _returned(self, kind: str, done: int) -> None:
        """Something reported success: what it promises must be there whatever happens now."""
        if kind in ("flush", "close"):
            self.floor, self.told = done, False
        if not self.errors and not self.failing:
            return
        promising = kind in ("flush", "close") or self.reference.run.durability == "power"
        if promising and self.images < _MOST_IMAGES and (kind == "flush" or self.rng.random() < 0.4):
            image = self.device.directory / f"image-{self.images}"
            self.images += 1
            self.device.image(self.rng, image)
            self.report(("image", image, self._moment(done, done), kind))
        if kind in ("flush", "close"):
            self._look(done)

    def _look(self, done: int) -> None:
        """Compare the rows that the running process reads with what they must be."""
        if self.failing:
            return
        forget(self.point)
        wanted = self.reference.states[done].tables
        wrong = 0
        for name, rows in self.reference.run.rows.items():
            found = self.optimizer.read_rows(range(rows), name).numpy()
            wrong += int((found != wanted[name]["w"]).any(1).sum())
        self.report(("rows", wrong))

    def _press(self) -> None:
        """Write back and forget, as the kernel does on its own."""
        if self.failing and self.rng.random() < 0.5:
            sync(self.point)
            if self.rng.random() < 0.5:
                forget(self.point)
