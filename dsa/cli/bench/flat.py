"""Warm steps on flat tables: rows in the page cache, mapped, written lately."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import torch

from dsa.cli.bench.baselines import SparseAdam, Touch
from dsa.cli.bench.batches import batch_of
from dsa.cli.bench.entry import Tournament, enter, with_one_thread
from dsa.cli.bench.ours import Ours
from dsa.cli.bench.results import Group
from dsa.cli.bench.settings import Settings
from dsa.cli.bench.timing import Contender, Entry
from dsa.rules.init import Zeros
from dsa.schema import Rows
from dsa.state.storage import Durability

__all__ = ["first_step", "gpu_groups", "small_groups", "warm_groups"]

_RACES: Final = 6


def first_step(directory: Path, rows: Rows, *, k: float) -> float:
    """Return the seconds of a first step, in which the kernels are compiled or loaded from numba's cache.

    Args:
        directory: An empty or missing one.
        rows: ``(B,)``, below 1000.
        k: 0 for the flat kernel, above 0 for the ball's.
    """
    ours = Ours(directory, Zeros(1000, 8), k=k)
    try:
        ours.prepare(batch_of(rows, 8, seed=0))
        start = time.perf_counter()
        ours.step()
        return time.perf_counter() - start
    finally:
        ours.close()


def warm_groups(settings: Settings, directory: Path, kept: Sequence[Entry], seconds: float) -> list[Group]:
    """Compare on the large table, at every batch size.

    One table with files races at a time: several would exceed what the system lets be unwritten, and their
    pages would be written back, and made read-only, all the while.

    Args:
        settings: The sizes.
        directory: For further files.
        kept: Contenders that are needed later, ready: the naive layout and dsa.
        seconds: In all.
    """
    rows, dim = settings.rows, settings.dim
    groups = _groups("warm", "warm", rows, dim, settings.batches)
    with ExitStack() as stack:
        sparse = enter(stack, lambda: SparseAdam(rows, dim), rows, dim)
        tournament = Tournament(groups, with_one_thread(sparse), settings.seed)
        for entry in kept:
            tournament.race([entry], seconds / _RACES)
        makers: list[Callable[[], Contender]] = [
            lambda: _with_durability("none", directory, rows, dim),
            lambda: _with_durability("power", directory, rows, dim, resume=True),
            lambda: _in_zarr(directory, rows, dim),
            lambda: Touch(directory, rows, dim),
        ]
        for make in makers:
            with ExitStack() as inner:
                tournament.race([enter(inner, make, rows, dim)], seconds / _RACES)
        tournament.finish()
    return groups


def small_groups(settings: Settings, directory: Path, seconds: float) -> list[Group]:
    """Compare with torch on rows of few elements, where the costs of a call and of a row weigh most."""
    rows, dim = settings.rows, settings.small_dim
    groups = _groups("small", "small rows, warm", rows, dim, settings.batches)
    _one_race(groups, settings.seed, directory, seconds)
    return groups


def gpu_groups(
    settings: Settings, directory: Path, seconds: float, device: str = "cuda"
) -> tuple[list[Group], str]:
    """Compare with torch's parameter in the GPU's memory; dsa gets its gradients from there.

    Args:
        settings: The sizes.
        directory: For files.
        seconds: In all.
        device: Where the gradients are.

    Returns:
        The groups, and the reason if there are none.
    """
    if not torch.cuda.is_available():
        return [], "no GPU is present: nothing was measured there"
    rows, dim = settings.rows, settings.dim
    needed, free = 4 * 4 * rows * dim, torch.cuda.mem_get_info()[0]
    if needed > free:
        return (
            [],
            f"the GPU has {free:,} bytes free and SparseAdam takes {needed:,}: nothing was measured there",
        )
    groups = _groups("gpu", "gradients on the GPU, warm", rows, dim, settings.batches)
    _one_race(groups, settings.seed, directory, seconds, device)
    return groups, ""


def _one_race(
    groups: Sequence[Group], seed: int, directory: Path, seconds: float, device: str = "cpu"
) -> None:
    rows, dim = groups[0].rows, groups[0].dim
    with ExitStack() as stack:
        sparse = enter(stack, lambda: SparseAdam(rows, dim, device), rows, dim, device)
        ours = enter(stack, lambda: Ours(directory, Zeros(rows, dim)), rows, dim, device)
        baselines = with_one_thread(sparse) if device == "cpu" else [sparse]
        tournament = Tournament(groups, baselines, seed, device)
        tournament.race([ours], seconds)
        tournament.finish()


def _groups(kind: str, what: str, rows: int, dim: int, batches: Sequence[int]) -> list[Group]:
    return [
        Group(kind, f"{what}, {rows:,} x {dim} float32, B = {batch:,}", rows, dim, batch) for batch in batches
    ]


def _with_durability(
    durability: Durability, directory: Path, rows: int, dim: int, resume: bool | None = None
) -> Ours:
    key, what = f"dsa_{durability}", f"dsa, durability={durability!r}"
    table = Zeros(rows, dim)
    return Ours(directory / "plain", table, key=key, what=what, durability=durability, resume=resume)


def _in_zarr(directory: Path, rows: int, dim: int) -> Ours:
    what = "dsa, backend='zarr'"
    return Ours(directory / "zarr", Zeros(rows, dim), key="dsa_zarr", what=what, backend="zarr")
