"""Ctrl-C for real: SIGINT from another process or thread, at random instants of steps on cold rows.

Several threads share each step, and while they wait for the disk the signal comes; sometimes two of them. The
next step is taken at once. In the end the tables, and the weights in memory, are those of a whole number of
steps: of all that have returned, and of some that were interrupted.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import random
import select
import shutil
import signal
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from harness import Child, Figures, Report, messages
from standings import Standing, stand

from dsa import DiskEmbedding, DiskSparseAdam, DiskSparseRiemannianAdam, init
from dsa.state.state_directory import StateDirectory

__all__ = ["Setting", "Signals", "drop_pages", "interrupt_for_real"]

ROWS, DIM, BATCH = 24_000, 16, 6_000
_STEPS = 9
_AIM = struct.Struct("<dd")


class Setting(NamedTuple):
    """How a run is made: of tables or of modules, by which backend and policy, with a queue or not."""

    modules: bool
    backend: str
    durability: str
    queued: bool


class Run:
    """An optimizer over two tables, and what it is given.

    Args:
        setting: How it is made.
        path: The state directory.
        resume: As for the optimizers.
    """

    def __init__(self, setting: Setting, path: Path, resume: bool | None) -> None:
        options: dict[str, Any] = {
            "resume": resume,
            "backend": setting.backend,
            "durability": setting.durability,
            "async_writes": setting.queued,
        }
        self.setting = setting
        first = init.Normal(ROWS, DIM, std=0.1, seed=3)
        self.parameters: list[torch.Tensor] = []
        if setting.modules:
            disk = DiskEmbedding(ROWS, DIM, name="disk", init=first, state_dir=path, **options)
            memory = torch.nn.Embedding(ROWS, DIM, sparse=True)
            with torch.no_grad():
                memory.weight.zero_()
            self.modules = disk, memory
            self.parameters = [disk.weight, memory.weight]
            named = list(zip(("disk", "memory"), self.parameters, strict=True))
            self.optimizer: Any = DiskSparseAdam(named, lr=0.02, state_dir=path, **options)
        else:
            tables = {"flat": first, "ball": first}
            self.optimizer = DiskSparseRiemannianAdam(
                tables, lr=0.02, k={"flat": 0.0, "ball": 1.0}, disk_dir=path, **options
            )
        self.state: StateDirectory = self.optimizer._portable_state()

    def prepare(self, number: int) -> Callable[[], None]:
        """Return the step of a number, ready to be taken."""
        rng = np.random.default_rng(number)
        batches = [
            (rng.integers(0, ROWS, BATCH), rng.normal(0.0, 0.1, (BATCH, DIM)).astype(np.float32))
            for _ in range(2)
        ]
        if not self.setting.modules:
            updates = dict(zip(("flat", "ball"), batches, strict=True))
            return lambda: self.optimizer.step(updates)
        for parameter, (rows, grad) in zip(self.parameters, batches, strict=True):
            parameter.grad = torch.sparse_coo_tensor(
                torch.from_numpy(rows)[None], torch.from_numpy(grad), (ROWS, DIM), check_invariants=False
            )
        return lambda: self.optimizer.step()

    def stand(self) -> tuple[Standing, bytes]:
        """Return what the tables and the weights in memory are."""
        weights = self.parameters[1].detach().numpy().tobytes() if self.setting.modules else b""
        return stand(self.state), weights


def _settings() -> list[Setting]:
    return [
        Setting(modules, backend, durability, queued)
        for modules in (False, True)
        for backend in ("memmap", "zarr")
        for durability, queued in (("process", False), ("process", True), ("power", False), ("none", False))
    ]


def drop_pages(state: StateDirectory) -> None:
    """Let the tables' pages be read from the disk again."""
    for table in state.tables.values():
        backend = getattr(table.backend, "_backend", table.backend)
        arrays = getattr(backend, "_arrays", None)
        mappings = [backend._mapping] if arrays is None else [m for a in arrays for m in a._mappings]
        files = [backend._path] if arrays is None else [file for array in arrays for file in array._files]
        for mapping, file in zip(mappings, files, strict=True):
            mapping.flush()
            mapping.madvise(mmap.MADV_DONTNEED)
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class Signals:
    """Sends SIGINT to this process, from another one or from a thread.

    Args:
        threaded: From a thread.
    """

    def __init__(self, threaded: bool) -> None:
        self._acknowledged, acknowledge = os.pipe()
        aims, self._aim = os.pipe()
        target = os.getpid()
        if threaded:
            self._thread = threading.Thread(target=_send, args=(aims, acknowledge, target), daemon=True)
            self._thread.start()
        elif os.fork() == 0:
            os.close(self._aim)
            with contextlib.suppress(BaseException):
                _send(aims, acknowledge, target)
            os._exit(0)
        else:
            os.close(aims)

    def aim(self, delay: float, again: float) -> None:
        """Have a signal sent after a delay, and a second one after another, unless that is negative."""
        os.write(self._aim, _AIM.pack(delay, again))

    def wait(self) -> None:
        """Return once the signals of the last aim were sent; may be interrupted and called again."""
        select.select([self._acknowledged], [], [])

    def forget(self) -> None:
        """Make ready for the next aim, when no signal is on its way any more."""
        os.read(self._acknowledged, 1)

    def end(self) -> None:
        """Send no more."""
        os.close(self._aim)


def _send(aims: int, acknowledge: int, target: int) -> None:
    while len(data := os.read(aims, _AIM.size)) == _AIM.size:
        delay, again = _AIM.unpack(data)
        for each in (delay, again):
            if each >= 0.0:
                _pass_time(each)
                os.kill(target, signal.SIGINT)
        os.write(acknowledge, b"x")


def _pass_time(seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0.0:
        time.sleep(left)


def _attempt(aim: Callable[[], None], call: Callable[[], None], signals: Signals) -> str:
    """Make a call into which signals come, and return whether it returned or was interrupted."""
    outcome, waiting = "interrupted", True
    try:
        aim()
        call()
        outcome = "returned"
    except KeyboardInterrupt:
        pass
    while waiting:
        try:
            signals.wait()
            waiting = False
            for _ in range(200):  # the interpreter calls the handler between two instructions
                pass
        except KeyboardInterrupt:
            continue
    signals.forget()
    return outcome


def _take_steps(run: Run, rng: random.Random, report: Report) -> None:
    signals = Signals(threaded=rng.random() < 0.5)
    usual = 0.0
    for number in range(_STEPS):
        step = run.prepare(number)
        if rng.random() < 0.8:
            drop_pages(run.state)
            if rng.random() < 0.5:
                _warm(run.state)
        if number >= 2 and rng.random() < 0.8:
            again = rng.uniform(0.0, 0.3 * usual) if rng.random() < 0.25 else -1.0
            aim = functools.partial(signals.aim, rng.uniform(0.0, 1.1 * usual), again)
            report(("step", number, _guarded(aim, step, signals)))
        else:
            started = time.monotonic()
            step()
            usual = time.monotonic() - started if number == 1 else usual
            report(("step", number, "returned"))
    signals.end()


def _warm(state: StateDirectory) -> None:
    """Read the rows of the first slice, whose thread then waits for the others."""
    for table in state.tables.values():
        table.backend.read(np.arange(ROWS // 4))


def _guarded(aim: Callable[[], None], step: Callable[[], None], signals: Signals) -> str:
    # A second signal may fall between the first one's handler and the loop that waits for it.
    try:
        return _attempt(aim, step, signals)
    except KeyboardInterrupt:
        return _attempt(_nothing, _interrupt, signals)


def _nothing() -> None:
    return


def _interrupt() -> None:
    raise KeyboardInterrupt


class Truths:
    """What steps leave that nobody interrupted, computed once each."""

    def __init__(self, space: Path) -> None:
        self._space, self._known = space, dict[tuple[bool, tuple[int, ...]], tuple[Standing, bytes]]()

    def after(self, modules: bool, steps: tuple[int, ...]) -> tuple[Standing, bytes]:
        """Return what some steps leave."""
        if (modules, steps) not in self._known:
            path = self._space / "truth"
            run = Run(Setting(modules, "memmap", "none", queued=False), path, None)
            for number in steps:
                run.prepare(number)()
            self._known[modules, steps] = run.stand()
            run.optimizer.close()
            shutil.rmtree(path)
        return self._known[modules, steps]


def interrupt_for_real(space: Path, disk: Path, seed: int, interrupts: int, threads: int) -> Figures:
    """Interrupt steps so often in all.

    Args:
        space: A directory in memory.
        disk: One on a disk, where reading takes its time.
        seed: Of everything but the instants.
        interrupts: How many steps are to be interrupted.
        threads: Of each step.
    """
    figures, rng, truths = Figures(), random.Random(f"signals {seed}"), Truths(space)
    settings = itertools.cycle(_settings())
    torch.set_num_threads(1)
    while figures.total < interrupts and figures.runs < 20 * interrupts:
        setting = next(settings)
        figures.runs += 1
        path = disk / f"run-{figures.runs}"
        log = _trial(setting, path, random.Random(rng.random()), threads)
        shutil.rmtree(path, ignore_errors=True)
        _judge(setting, log, truths, figures)
    return figures


def _trial(setting: Setting, path: Path, rng: random.Random, threads: int) -> list[tuple[Any, ...]]:
    def body(report: Report) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(threads)
        run = Run(setting, path, None)
        _take_steps(run, rng, report)
        run.optimizer.flush()
        here = run.stand()
        run.optimizer.close()
        again = _stand_on_disk(setting, path)
        report(("stands", here, again))

    child = Child(body)
    log = list(messages(child))
    log.append(("status", child.wait()))
    return log


def _stand_on_disk(setting: Setting, path: Path) -> Standing:
    """Return what is found by the next opening."""
    run = Run(setting, path, True)
    found = stand(run.state)
    run.optimizer.close()
    return found


def _judge(setting: Setting, log: list[tuple[Any, ...]], truths: Truths, figures: Figures) -> None:
    steps = [(each[1], each[2]) for each in log if each[0] == "step"]
    interrupted = [number for number, outcome in steps if outcome == "interrupted"]
    figures.kills["interrupt"] += len(interrupted)
    told = log[-2] if len(log) > 1 else ("nothing",)
    if log[-1] != ("status", 0) or told[0] != "stands":
        kind = "refused" if told[0] == "failed" else "died"
        figures.fail(kind, f"{setting}, {steps}: {log[-1]} {told[2] if told[0] == 'failed' else ''}")
        return
    (here, weights), again = told[1:]
    count = here.step - (len(steps) - len(interrupted))
    for some in itertools.combinations(interrupted, max(0, count)):
        taken = tuple(number for number, outcome in steps if outcome == "returned" or number in some)
        if truths.after(setting.modules, taken) == (here, weights) and again == here:
            figures.finished += 1
            figures.in_progress += len(some)
            return
    figures.fail("torn", f"{setting}, {steps}: step {here.step} is no whole number of them")
