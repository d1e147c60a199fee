"""Runs a scenario through errors and interrupts in this process, as a stubborn user would.

A call that raises is followed by `flush` until that returns; the optimizer's counts then tell whether the
call counts, and if not it is made again. A close that raises is made again until it returns.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

from faults import watch
from harness import Report
from references import Reference, WrongState, counts_of, locate, records_of
from scenarios import Op

from dsa import DiskSparseRiemannianAdam

__all__ = ["Endurance", "is_injected"]

_PATIENCE = 20
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
    """One run. `errors` counts what it met.

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

    def run(self) -> None:
        """Run to the end and compare it with an uninterrupted run's."""
        first = True
        while first or self.done < len(self.reference.scenario.ops):
            optimizer = self._open()
            found = locate(self.reference, optimizer, self.directory, self.done, self.done)
            assert found == self.done
            first = False
            for op in self.reference.scenario.ops[self.done : self.done + self.pause]:
                self._apply(optimizer, op)
            self._close(optimizer)
        watch.phase = "end"
        optimizer = self._open()
        end = (records_of(self.directory), counts_of(optimizer))
        self._close(optimizer)
        if end != self.reference.states[-1]:
            raise WrongState("different end", f"{end[1]} after {self.errors}")

    def _open(self) -> DiskSparseRiemannianAdam:
        watch.phase = "open"
        optimizer = self._insist(lambda: self.reference.scenario.build(self.directory, resume=True))
        watch.phase = ""
        return optimizer

    def _apply(self, optimizer: DiskSparseRiemannianAdam, op: Op) -> None:
        before, after = self.reference.states[self.done : self.done + 2]
        self.report(("begin", self.done))
        for _ in range(_PATIENCE):
            watch.phase = op.kind
            try:
                self.reference.scenario.apply(optimizer, op)
                break
            except BaseException as error:
                self._note(error)
            self._insist(optimizer.flush)
            if op.kind == "curve":
                self._insist(lambda: self._finish_change(optimizer, op.table))
            self._insist(optimizer.flush)
            counts = counts_of(optimizer)
            assert counts in (before.counts, after.counts), f"{counts} after {self.errors[-1]!r} in {op}"
            if counts == after.counts != before.counts:
                break
        else:
            raise AssertionError(f"{op} went on failing: {self.errors}")
        watch.phase = ""
        self.done += 1
        self.report(("done", self.done))

    def _finish_change(self, optimizer: DiskSparseRiemannianAdam, table: str) -> None:
        # Any use of the optimizer carries a change on; a write that failed has to be made up for before.
        optimizer.flush()
        optimizer.read_rows([0], table)

    def _close(self, optimizer: DiskSparseRiemannianAdam) -> None:
        watch.phase = "close"
        self.report(("close", self.done))
        self._insist(optimizer.close)
        watch.phase = ""

    def _insist(self, call: Callable[[], object]) -> object:
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
