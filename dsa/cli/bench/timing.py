"""Timing contenders in turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from dsa.cli.bench.batches import Batch, UniformBatches
from dsa.cli.bench.machine import page_faults
from dsa.cli.bench.results import Duration, Footprint

__all__ = ["Contender", "Entry", "alternate", "timed_step"]

_WARM_UP_STEPS = 3
_FEWEST_ROUNDS = 3


class Contender(Protocol):
    """One way of taking a step."""

    @property
    def key(self) -> str:
        """A short name."""

    @property
    def what(self) -> str:
        """The same for people."""

    def prepare(self, batch: Batch) -> None:
        """Take a batch in the form in which training would hand it over. Not timed."""

    def step(self) -> None:
        """Take one step with the batch prepared, and return once it is done. Timed."""

    def flush(self) -> None:
        """Write every changed page of its files to the device."""

    def file_bytes(self) -> int:
        """Return the size of its files."""

    def close(self) -> None:
        """Let its memory and files go; the files stay where they are."""


class Entry(NamedTuple):
    """A contender that is ready.

    Args:
        contender: The contender.
        footprint: Its memory.
        one_thread: Whether torch is kept to one thread while it steps. Where other processes want the cores
            too, torch's threads wait for one another longer than they work: a comparison is only fair with
            the better of the two.
    """

    contender: Contender
    footprint: Footprint
    one_thread: bool = False

    @property
    def key(self) -> str:
        """A short name."""
        return f"{self.contender.key}_one_thread" if self.one_thread else self.contender.key

    @property
    def what(self) -> str:
        """The same for people."""
        return f"{self.contender.what}, one thread" if self.one_thread else self.contender.what


def timed_step(contender: Contender, batch: Batch) -> Duration:
    """Take one step; return what it took."""
    contender.prepare(batch)
    traps, cpu, wall = page_faults(), time.process_time(), time.perf_counter()
    contender.step()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Duration(wall, cpu, page_faults() - traps)


def alternate(
    entries: Sequence[Entry],
    batches: UniformBatches,
    *,
    seconds: float,
    steps: int = 30,
) -> list[list[Duration]]:
    """Time contenders in turn, so that what else the machine does falls on all of them.

    A round gives each a block of consecutive steps over the same batches; who begins changes from round to
    round.

    Args:
        entries: Who takes part.
        batches: Where the batches come from.
        seconds: In all. No round begins after that, but at least three are run.
        steps: Steps of a block; those of slow contenders end earlier, but not before one step.

    Returns:
        What every step took, for each contender.
    """
    deadline = time.perf_counter() + seconds
    block_seconds = seconds / (_FEWEST_ROUNDS * len(entries))
    times: list[list[Duration]] = [[] for _ in entries]
    for entry in entries:
        _block(entry, batches, 0, _WARM_UP_STEPS, block_seconds)
    number = 0
    while number < _FEWEST_ROUNDS or time.perf_counter() < deadline:
        for turn in range(len(entries)):
            i = (number + turn) % len(entries)
            times[i] += _block(entries[i], batches, 1 + number * steps, steps, block_seconds)
        number += 1
    return times


def _block(entry: Entry, batches: UniformBatches, first: int, steps: int, seconds: float) -> list[Duration]:
    times: list[Duration] = []
    threads = torch.get_num_threads()
    deadline = time.perf_counter() + seconds
    if entry.one_thread:
        torch.set_num_threads(1)
    try:
        for number in range(first, first + steps):
            times.append(timed_step(entry.contender, batches.make(number)))
            if time.perf_counter() > deadline:
                break
    finally:
        torch.set_num_threads(threads)
    return times
