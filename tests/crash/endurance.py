"""Runs a scenario through errors and interrupts in this process, as a stubborn user would.

A call that raises is followed by `flush` until that returns; the optimizer's counts then tell whether the
call counts, and if not it is made again. Where nothing helps any more, because the device has refused a sync
or a change of whole tables was interrupted between disk and memory, the state is closed and opened again. A
close that raises is made again until it returns.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from faults import watch
from harness import Report
from references import Reference, WrongState, counts_of, locate, records_of
from scenarios import Op

from dsa import DiskSparseRiemannianAdam
from dsa.errors import StateClosedError, StateFailedError

__all__ = ["Endurance", "is_injected"]

_PATIENCE = 40
_MARK = "injected"


def is_injected(error: BaseException) -> bool:
    """Tell whether an error, or one that it comes from, was injected."""
    chain: BaseException | None = error
    while chain is not None:
        if _MARK in str(chain) or isinstance(chain, KeyboardInterrupt):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


class Endurance:
    """One run. `errors` counts what it met, `reopened` how often only a new opening helped.

    Args:
        reference: What it must agree with.
        directory: A copy of the reference's template.
        report: Told of what is begun and done.
        pause: Operations between a close and the next open.
    """

    def __init__(
        self, reference: Reference, directory: Path, report: Report = lambda message: None, pause: int = 100
    ) -> None:
        self.reference, self.directory, self.report, self.pause = reference, directory, report, pause
        self.done = 0
        self.errors: list[BaseException] = []
        self.reopened = 0

    def run(self) -> None:
        """Run to the end and compare it with an uninterrupted run's."""
        first = True
        while first or self.done < len(self.reference.scenario.ops):
            optimizer = self._open()
            found = locate(self.reference, optimizer, self.directory, self.done, self.done)
            assert found == self.done
            first = False
            for op in self.reference.scenario.ops[self.done : self.done + self.pause]:
                optimizer = self._apply(optimizer, op)
            self._close(optimizer)
        watch.phase = "end"
        optimizer = self._open()
        end = (records_of(self.directory), counts_of(optimizer))
        self._close(optimizer)
        if end != self.reference.states[-1]:
            raise WrongState("different end", f"{end[1]} after {self.errors}")

    def _open(self) -> DiskSparseRiemannianAdam:
        with self._phase("open"):
            return self._insist(lambda: self.reference.scenario.build(self.directory, resume=True))

    def _apply(self, optimizer: DiskSparseRiemannianAdam, op: Op) -> DiskSparseRiemannianAdam:
        before, after = self.reference.states[self.done : self.done + 2]
        self.report(("begin", self.done))
        for _ in range(_PATIENCE):
            try:
                with self._phase(op.kind):
                    self.reference.scenario.apply(optimizer, op)
                break
            except BaseException as error:
                self._note(error)
            with self._phase(op.kind):
                optimizer = self._made_sound(optimizer)
            counts = counts_of(optimizer)
            assert counts in (before.counts, after.counts), f"{counts} after {self.errors[-1]!r} in {op}"
            if counts == after.counts != before.counts:
                break
        else:
            raise AssertionError(f"{op} went on failing: {self.errors}")
        watch.phase = ""
        self.done += 1
        self.report(("done", self.done))
        return optimizer

    def _made_sound(self, optimizer: DiskSparseRiemannianAdam) -> DiskSparseRiemannianAdam:
        """Return an optimizer that stands at a whole operation: the same, or one that was opened anew."""
        for _ in range(_PATIENCE):
            if not is_sound(optimizer):
                optimizer = self._opened_again(optimizer)
            try:
                optimizer.flush()
                return optimizer
            except BaseException as error:
                self._note(error)
        raise AssertionError(f"it went on failing: {self.errors}")

    def _opened_again(self, optimizer: DiskSparseRiemannianAdam) -> DiskSparseRiemannianAdam:
        self._require_refusals(optimizer)
        self._close(optimizer)
        optimizer = self._open()
        self.reopened += 1
        locate(self.reference, optimizer, self.directory, self.done, self.done + 1)
        return optimizer

    def _require_refusals(self, optimizer: DiskSparseRiemannianAdam) -> None:
        """Nothing that a device has refused to keep is handed out or built upon."""
        for call in (lambda: optimizer.step({}), optimizer.flush, lambda: optimizer.read_rows([0], "right")):
            try:
                with self._phase("refusal"):
                    call()
            except (StateFailedError, StateClosedError):
                continue
            raise AssertionError(f"a state that has failed is used: {self.errors}")

    def _close(self, optimizer: DiskSparseRiemannianAdam) -> None:
        self.report(("close", self.done))
        with self._phase("close"):
            self._insist(optimizer.close)

    def _insist(self, call: Callable[[], Any]) -> Any:
        for _ in range(_PATIENCE):
            try:
                return call()
            except BaseException as error:
                self._note(error)
        raise AssertionError(f"it went on failing: {self.errors}")

    def _note(self, error: BaseException) -> None:
        if not is_injected(error):
            raise error
        # Without its frames, which hold what the failed call has opened.
        self.errors.append(error.with_traceback(None))
        if watch.phase == "open" and isinstance(error, KeyboardInterrupt):
            gc.collect()

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        before, watch.phase = watch.phase, name
        yield
        watch.phase = before  # after an error the caller looks at what was under way


def is_sound(optimizer: DiskSparseRiemannianAdam) -> bool:
    """Tell whether a state is open and its device has refused nothing."""
    return optimizer._state.is_open and not optimizer._state.metadata.failed
