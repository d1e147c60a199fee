"""Making contenders ready, and racing them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import final

import torch

from dsa.cli.bench.batches import UniformBatches, whole_table
from dsa.cli.bench.machine import anonymous_bytes
from dsa.cli.bench.results import Duration, Footprint, Group, Line, line_from_times, set_ratio
from dsa.cli.bench.timing import Contender, Entry, alternate, timed_step

__all__ = ["Tournament", "enter", "settle", "with_one_thread"]


def enter(stack: ExitStack, make: Callable[[], Contender], rows: int, dim: int, device: str = "cpu") -> Entry:
    """Make a contender, update every row once, and measure what it took.

    Args:
        stack: Closes the contender.
        make: The constructor.
        rows: N.
        dim: D.
        device: Where its gradients are.
    """
    gc.collect()
    before, video = anonymous_bytes(), _video_bytes()
    contender = make()
    stack.callback(contender.close)
    _update_all(contender, rows, dim, device)
    after = anonymous_bytes()
    anonymous = None if before is None or after is None else max(0, after - before)
    return Entry(contender, Footprint(anonymous, contender.file_bytes(), _video_bytes() - video))


def settle(contender: Contender, rows: int, dim: int, device: str = "cpu") -> None:
    """Write the files, then update every row once more.

    The system makes a page read-only when it writes it back, so that the next write to it traps. After this,
    no page is due for that for a while (30 s on Linux, unless other processes write a lot), and none traps:
    the steady state of a table that is updated faster than it is written back. What a trap costs is measured
    with the cold steps.

    Args:
        contender: Who is to race.
        rows: N.
        dim: D.
        device: Where its gradients are.
    """
    contender.flush()
    if contender.file_bytes():
        _update_all(contender, rows, dim, device)


def with_one_thread(entry: Entry) -> list[Entry]:
    """Return an entry, and where torch has several threads the same kept to one."""
    if torch.get_num_threads() == 1:
        return [entry]
    return [entry, entry._replace(one_thread=True)]


@final
class Tournament:
    """Races of challengers, one after another, against the same baselines.

    A challenger's ratio refers to the baselines' times in its own races. The baselines' own lines are made of
    all their times.

    Args:
        groups: One per batch size, of the same table sizes; the lines go there.
        baselines: The faster of these in a race counts.
        seed: Of the batches.
        device: Where the gradients are.
    """

    def __init__(
        self, groups: Sequence[Group], baselines: Sequence[Entry], seed: int, device: str = "cpu"
    ) -> None:
        self._groups = groups
        self._baselines = list(baselines)
        self._seed = seed
        self._device = device
        self._times: list[list[list[Duration]]] = [[[] for _ in baselines] for _ in groups]

    def race(self, challengers: Sequence[Entry], seconds: float) -> None:
        """Race contenders at every batch size, each time settled, and write their files.

        Args:
            challengers: Who takes part besides the baselines.
            seconds: In all.
        """
        for group, pool in zip(self._groups, self._times, strict=True):
            batches = UniformBatches(group.rows, group.dim, group.batch, self._seed, self._device)
            entries = [*self._baselines, *challengers]
            for entry in challengers:
                settle(entry.contender, group.rows, group.dim, self._device)
            times = alternate(entries, batches, seconds=seconds / len(self._groups))
            lines = _lines(entries, group.batch, times)
            count = len(self._baselines)
            for line in lines[count:]:
                set_ratio(line, lines[:count])
            group.lines += lines[count:]
            for seen, new in zip(pool, times[:count], strict=True):
                seen += new
        for entry in challengers:
            entry.contender.flush()

    def finish(self) -> None:
        """Put the baselines' lines in front."""
        for group, pool in zip(self._groups, self._times, strict=True):
            group.lines[:0] = _lines(self._baselines, group.batch, pool)


def _lines(entries: Sequence[Entry], batch: int, times: Sequence[Sequence[Duration]]) -> list[Line]:
    return [
        line_from_times(entry.key, entry.what, batch, series, entry.footprint)
        for entry, series in zip(entries, times, strict=True)
    ]


def _update_all(contender: Contender, rows: int, dim: int, device: str) -> None:
    with _one_thread():
        for batch in whole_table(rows, dim, device=device):
            timed_step(contender, batch)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _video_bytes() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
