"""Steps whose rows come from the disk.

Before a cold step the files are flushed, unmapped and dropped from the page cache by `posix_fadvise`, which
needs no privilege, and opened again. How much was really read is counted, so that a figure that is not cold
can't pass for one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from dsa.backends.memmap import choose_stride, stored_bytes
from dsa.backends.system import PAGE
from dsa.cli.bench.baselines import SPARSE_ADAM
from dsa.cli.bench.batches import Batch, apart_rows, batch_of
from dsa.cli.bench.device import DeviceSpeed
from dsa.cli.bench.machine import bytes_read
from dsa.cli.bench.results import Duration, Footprint, Group, Line, line_from_times, set_ratio
from dsa.cli.bench.settings import Settings
from dsa.cli.bench.timing import Contender, timed_step
from dsa.schema import adam_schema

__all__ = ["Reopenable", "cold_group"]

_TRIALS: Final = 7
_STEPS: Final = 20
_COLD_PAGES: Final = 0.5
"""Fewer pages read for a row than this, and the rows were in memory after all."""


class Reopenable(Contender, Protocol):
    """A contender whose files can leave the page cache."""

    def reopen(self, *, drop: bool) -> None:
        """Close and open the files; with `drop`, their pages leave the page cache."""


class _Series(NamedTuple):
    """What some steps took.

    Args:
        times: Of each step.
        rows: Of all steps.
        pages: Read from the disk; -1 where that is not counted.
    """

    times: list[Duration]
    rows: int
    pages: float


def cold_group(
    settings: Settings,
    batch: int,
    ours: Reopenable,
    naive: Reopenable,
    device: DeviceSpeed | None,
    borrowed: Sequence[Line],
    seconds: float,
) -> Group:
    """Compare cold steps of one batch size.

    Args:
        settings: The sizes.
        batch: B.
        ours: dsa, its table written.
        naive: The naive layout, its table written.
        device: The disk's limits, if measured.
        borrowed: The warm lines of the same batch size, to compare with.
        seconds: For each contender's trials; one is run at least.
    """
    rows, dim = settings.rows, settings.dim
    group = Group("cold", f"cold, {rows:,} x {dim} float32, B = {batch:,}", rows, dim, batch)
    record = stored_bytes(adam_schema(dim))
    apart = apart_rows(rows, record, choose_stride(record), batch, _STEPS, settings.seed)
    batches = [batch_of(chosen, dim, settings.seed + i) for i, chosen in enumerate(apart)]
    files = {"naive": Footprint(file=naive.file_bytes()), "dsa": Footprint(file=ours.file_bytes())}
    trials = (("naive", naive, "four np.memmap files, numpy"), ("dsa", ours, "dsa"))
    for key, contender, what in trials:
        series = _trials(contender, batches, seconds)
        text = f"{what}: first step after a drop"
        group.lines.append(_line(f"{key}_cold", text, batch, series, files[key]))
    group.lines.append(_sustained(ours, batches, device, files["dsa"]))
    group.lines += _faults(ours, batches, files["dsa"])
    for line in group.lines:
        set_ratio(line, [other for other in borrowed if other.key in SPARSE_ADAM])
    group.notes = _doubts(group)
    return group


def _faults(ours: Reopenable, batches: Sequence[Batch], footprint: Footprint) -> list[Line]:
    """Measure what the first access to a page in memory costs: after opening, and after writing back."""
    size = len(batches[0].indices)
    opened = _steps(ours, batches, drop=False)._replace(pages=-1.0)
    ours.flush()
    written = _Series([timed_step(ours, batch) for batch in batches], opened.rows, -1.0)
    again = _Series([timed_step(ours, batch) for batch in batches], opened.rows, -1.0)
    return [
        _line("dsa_opened", "dsa: in memory, first access since opening", size, opened, footprint),
        _line("dsa_written_back", "dsa: in memory, first write since written back", size, written, footprint),
        _line("dsa_again", "dsa: in memory, the same rows again", size, again, footprint),
    ]


def _trials(contender: Reopenable, batches: Sequence[Batch], seconds: float) -> _Series:
    """Drop, take one step, and again: what an earlier step read ahead is of no use to a later one."""
    series = [_steps(contender, batches[:1], drop=True)]
    start = time.perf_counter()
    for number in range(1, _TRIALS):
        if time.perf_counter() - start > seconds:
            break
        chosen = number % len(batches)
        series.append(_steps(contender, batches[chosen : chosen + 1], drop=True))
    return _Series(
        [t for one in series for t in one.times],
        sum(one.rows for one in series),
        sum(one.pages for one in series),
    )


def _steps(contender: Reopenable, batches: Sequence[Batch], *, drop: bool) -> _Series:
    contender.reopen(drop=drop)
    before = bytes_read()
    times = [timed_step(contender, batch) for batch in batches]
    pages = (bytes_read() - before) / PAGE if before >= 0 else -1.0
    return _Series(times, sum(len(batch.indices) for batch in batches), pages)


def _line(key: str, what: str, batch: int, series: _Series, footprint: Footprint) -> Line:
    line = line_from_times(key, what, batch, series.times, footprint)
    if series.pages >= 0.0:
        line.details["pages_per_row"] = series.pages / series.rows
    return line


def _sustained(
    ours: Reopenable, batches: Sequence[Batch], device: DeviceSpeed | None, footprint: Footprint
) -> Line:
    """Take cold steps on rows whose pages no earlier one read, and write everything back."""
    start = time.perf_counter()
    series = _steps(ours, batches, drop=True)
    # Closing and opening are not part of the steps, but the writing back that the page cache puts off is.
    opening = time.perf_counter() - start - sum(t.wall for t in series.times)
    ours.flush()
    mean = Duration(
        (time.perf_counter() - start - opening) / len(batches),
        sum(t.cpu for t in series.times) / len(batches),
    )
    dim = batches[0].grad.shape[1]
    what = f"dsa: {len(batches)} steps on untouched pages, and their flush"
    line = _line("dsa_sustained", what, len(batches[0].indices), series._replace(times=[mean]), footprint)
    line.steps = len(batches)
    line.details["step_milliseconds"] = 1e3 * sum(t.wall for t in series.times) / len(batches)
    if device is not None and line.details.get("pages_per_row", 0.0) >= _COLD_PAGES:
        limit = device.limit(float(np.mean([_pages_touched(batch, dim) for batch in batches])))
        line.details["device_limit_rows_per_second"] = limit
        line.details["share_of_device_limit"] = line.rows_per_second / limit
    return line


def _pages_touched(batch: Batch, dim: int) -> float:
    """Return the pages on which a row's record lies, on average."""
    record = stored_bytes(adam_schema(dim))
    first = batch.indices.numpy() * choose_stride(record)
    return float(np.mean((first + record - 1) // PAGE - first // PAGE)) + 1.0


def _doubts(group: Group) -> list[str]:
    return [
        f"{line.what}: only {line.details['pages_per_row']:.2f} pages were read for a row, so this was not "
        "cold (a file system in memory, or one that keeps its pages)"
        for line in group.lines
        if line.details.get("pages_per_row", 1.0) < _COLD_PAGES
    ]
