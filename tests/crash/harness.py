"""A function in a forked child that reports through a pipe until it ends or is killed.

A fork costs milliseconds where a new interpreter costs seconds. What a child wrote to the pipe before it died
is read to the end. Every wait has a deadline, after which the child prints where it stands.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import select
import signal
import struct
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from faults import end_trace

__all__ = ["Child", "Figures", "Timer", "complain", "messages", "stop_reporting"]

DEADLINE = 120.0
_GRACE = 5.0
_SIZE = struct.Struct("<I")

Report = Callable[[Any], None]


class Child:
    """A fork that runs a function.

    Args:
        body: Called with a function that sends any object to the parent. An exception is sent as
            ``("failed", kind, traceback)``.
    """

    def __init__(self, body: Callable[[Report], None]) -> None:
        self._input, output = os.pipe()
        self._data = b""
        gc.freeze()  # or the child's collector copies every page that holds an object
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: the process may have threads
            self.pid = os.fork()
        if self.pid == 0:
            os.close(self._input)
            _run(body, output)
        gc.unfreeze()
        os.close(output)
        self._deadline = time.monotonic() + DEADLINE

    def next(self, until: float | None = None) -> Any:
        """Return the next message, or None at the end of all or when the clock has passed `until`."""
        limit = self._deadline if until is None else min(until, self._deadline)
        while (message := self._buffered()) is None:
            if not select.select([self._input], [], [], max(0.0, limit - time.monotonic()))[0]:
                if limit < self._deadline:
                    return None
                self._explain()
                raise TimeoutError(
                    f"child {self.pid} neither reported nor ended in {DEADLINE} s; see its traceback"
                )
            more = os.read(self._input, 1 << 16)
            if not more:
                return None
            self._data += more
        return message

    def _explain(self) -> None:
        """Make it print where it stands, then end it."""
        os.kill(self.pid, signal.SIGUSR1)
        select.select([self._input], [], [], _GRACE)
        self.kill()

    def _buffered(self) -> Any:
        if len(self._data) < _SIZE.size:
            return None
        end = _SIZE.unpack_from(self._data)[0] + _SIZE.size
        if len(self._data) < end:
            return None
        message, self._data = self._data[_SIZE.size : end], self._data[end:]
        return pickle.loads(message)

    def kill(self) -> None:
        """End it now."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Return its exit status once it has ended; negative for a signal."""
        os.close(self._input)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


_reporting = -1


def stop_reporting() -> None:
    """Let go of the pipe, in a fork of a child: whoever reads it waits until nobody holds its other end."""
    if _reporting >= 0:
        os.close(_reporting)


def _run(body: Callable[[Report], None], output: int) -> None:
    global _reporting
    _reporting = output

    def report(message: Any) -> None:
        data = pickle.dumps(message)
        os.write(output, _SIZE.pack(len(data)) + data)

    code = 1
    try:
        # Not `dump_traceback_later`: after a fork it waits for the parent's watchdog, which isn't here.
        faulthandler.register(signal.SIGUSR1, file=2)
        try:
            body(report)
            code = 0
        except BaseException as error:
            end_trace()
            report(("failed", getattr(error, "kind", "refused"), traceback.format_exc()))
    finally:
        os._exit(code)


class Timer(NamedTuple):
    """A kill from outside: so many seconds after the n-th report, or after the start for n = 0."""

    reports: int
    delay: float


def messages(child: Child, timer: Timer | None = None) -> Iterator[tuple[Any, ...]]:
    """Yield what a child reports until it has ended, killing it when its time has come."""
    reports = 0
    until = time.monotonic() + timer.delay if timer and timer.reports == 0 else None
    while True:
        message = child.next(until)
        if message is not None:
            reports += 1
            if timer and reports == timer.reports:
                until = time.monotonic() + timer.delay
            yield message
        elif until is not None and time.monotonic() >= until:
            child.kill()
            until = None
        else:
            return


@dataclass
class Figures:
    """What trials have seen.

    Args:
        kills: By what ended the child.
        phases: By what it was doing.
        reopened: States that opened and were some whole state.
        in_progress: Of these, the ones that held the call under way at the death.
        finished: Runs that went on to the end, which was bit for bit that of an uninterrupted run.
        runs: Runs that were begun, where that is another number.
        told: States that could not be whole, and said so.
        failures: By kind: ``torn``, ``lost``, ``refused`` (an exception) or ``different end``.
        details: Of the failures.
    """

    kills: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    reopened: int = 0
    in_progress: int = 0
    finished: int = 0
    runs: int = 0
    told: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """All kills."""
        return sum(self.kills.values())

    def add(self, other: Figures) -> None:
        """Take in the figures of other trials."""
        self.kills += other.kills
        self.phases += other.phases
        self.failures += other.failures
        self.reopened += other.reopened
        self.in_progress += other.in_progress
        self.finished += other.finished
        self.runs += other.runs
        self.told += other.told
        self.details += other.details

    def fail(self, kind: str, detail: str) -> None:
        """Count a failure."""
        self.failures[kind] += 1
        self.details.append(detail)


def complain(figures: Figures) -> None:
    """Raise what went wrong, if anything did."""
    if figures.failures:
        raise AssertionError(f"{dict(figures.failures)}: " + "\n\n".join(figures.details[:3]))
