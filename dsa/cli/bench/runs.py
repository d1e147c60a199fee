"""The order of a run: what is made, measured and removed when."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Final

import numpy as np

from dsa.cli.bench.ball import ball_groups
from dsa.cli.bench.baselines import Naive
from dsa.cli.bench.cold import cold_group
from dsa.cli.bench.device import DeviceSpeed, measure_device
from dsa.cli.bench.entry import enter
from dsa.cli.bench.flat import first_step, gpu_groups, small_groups, warm_groups
from dsa.cli.bench.limited import limited_group
from dsa.cli.bench.loop import loop_groups
from dsa.cli.bench.machine import describe_machine
from dsa.cli.bench.ours import Ours
from dsa.cli.bench.results import Results
from dsa.cli.bench.settings import Settings
from dsa.cli.bench.timing import Entry
from dsa.cli.bench.verdict import goals, losses
from dsa.rules.init import Zeros

__all__ = ["measure"]

# Shares of the time.
_WARM: Final = 0.3
_LOOP: Final = 0.12
_SMALL: Final = 0.1
_GPU: Final = 0.1
_BALL: Final = 0.15
_DEVICE: Final = 0.08
_COLD: Final = 0.2

Say = Callable[[str], None]


def measure(settings: Settings, directory: Path, say: Say) -> Results:
    """Run everything that the settings ask for.

    Args:
        settings: What to measure.
        directory: An empty directory for files; each table is removed once it is done with.
        say: Called with a line of text as each part begins.
    """
    results = Results(describe_machine(directory), settings.to_json())
    results.notes.append(
        "medians over fresh uniform batches, contenders taking turns; CPU ms are of all threads together"
    )
    say("first steps")
    duplicates = np.array([5, 3, 5])
    with _folder(directory) as folder:
        results.first_step_seconds["flat"] = first_step(folder / "flat", duplicates, k=0.0)
        results.first_step_seconds["ball"] = first_step(folder / "ball", duplicates, k=1.0)
    if {"warm", "cold"} & set(settings.kinds):
        with _folder(directory) as folder:
            _large_table(settings, folder, results, say)
    if "loop" in settings.kinds:
        say("whole training steps")
        with _folder(directory) as folder:
            results.groups += loop_groups(settings, folder, _LOOP * settings.seconds)
    if "small" in settings.kinds:
        say("small rows")
        with _folder(directory) as folder:
            results.groups += small_groups(settings, folder, _SMALL * settings.seconds)
    if "gpu" in settings.kinds:
        with _folder(directory) as folder:
            groups, reason = gpu_groups(settings, folder, _GPU * settings.seconds)
        results.groups += groups
        results.notes += [reason] if reason else []
    if "hyperbolic" in settings.kinds:
        say("steps on the ball")
        with _folder(directory) as folder:
            results.groups += ball_groups(settings, folder, _BALL * settings.seconds)
    results.goals, results.losses = goals(results), losses(results)
    return results


def _large_table(settings: Settings, folder: Path, results: Results, say: Say) -> None:
    rows, dim = settings.rows, settings.dim
    say("writing the large tables")
    for name in ("naive", "dsa", "warm"):
        (folder / name).mkdir()
    with ExitStack() as stack:
        naive, ours = Naive(folder / "naive", rows, dim), Ours(folder / "dsa", Zeros(rows, dim))
        entries = [enter(stack, lambda: naive, rows, dim), enter(stack, lambda: ours, rows, dim)]
        if "warm" in settings.kinds:
            say("warm steps")
            _warm(settings, folder / "warm", results, entries)
        if "cold" in settings.kinds:
            say("random reads and writes of the disk")
            device = measure_device(folder, size=settings.scratch_bytes, seconds=_DEVICE * settings.seconds)
            results.device = None if device is None else asdict(device)
            say("cold steps")
            _cold(settings, results, ours, naive, device)
    if "cold" in settings.kinds and settings.memory_limit is not None:
        say("steps under the memory limit")
        _limited(settings, folder, results)


def _warm(settings: Settings, folder: Path, results: Results, entries: list[Entry]) -> None:
    results.groups += warm_groups(settings, folder, entries, _WARM * settings.seconds)
    shutil.rmtree(folder)


def _cold(settings: Settings, results: Results, ours: Ours, naive: Naive, device: DeviceSpeed | None) -> None:
    share = _COLD * settings.seconds / len(settings.batches) / 3
    for batch in settings.batches:
        warm = [line for group in results.find("warm", batch) for line in group.lines]
        results.groups.append(cold_group(settings, batch, ours, naive, device, warm, share))


def _limited(settings: Settings, folder: Path, results: Results) -> None:
    batch = max(b for b in settings.batches if b <= max(2048, min(settings.batches)))
    share = _COLD * settings.seconds / 2
    group, reason = limited_group(settings, batch, folder / "dsa", folder / "naive", share)
    results.groups += [] if group is None else [group]
    results.notes += [reason] if reason else []


@contextmanager
def _folder(parent: Path) -> Iterator[Path]:
    folder = parent / "tables"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
