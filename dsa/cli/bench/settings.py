"""The sizes of a run, and what they take."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, final

from dsa.backends import system
from dsa.cli.bench.baselines import naive_bytes, touch_bytes
from dsa.cli.bench.machine import available_memory
from dsa.state.estimation import estimate

__all__ = ["FULL", "KINDS", "QUICK", "Settings", "check_room"]

KINDS: Final = ("warm", "loop", "small", "gpu", "hyperbolic", "cold")
"""The groups that can be chosen; `memory_limit` adds one to the cold group."""

_MIB: Final = 1 << 20
_JOURNAL_BYTES: Final = 128 * _MIB
"""At least what a journal takes on disk; it grows with the batch."""


@final
@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured.

    Args:
        rows: N of the flat tables.
        dim: D of all tables but the small one.
        batches: Batch sizes on flat tables.
        small_dim: D of the table that shows how small rows fare.
        hyperbolic_rows: N of the tables on the ball, at most `rows`.
        hyperbolic_batches: Batch sizes on the ball.
        scratch_bytes: Size of the file on which the disk is measured, a multiple of a MiB.
        seconds: Time for measuring, without preparation, in fixed shares; every comparison gets its fewest
            rounds in any case.
        seed: Of rows and gradients.
        kinds: Which groups.
        directory: Where a temporary folder with all files is made.
        memory_limit: Bytes of a control group in which the cold comparison is repeated, or None.
    """

    rows: int
    dim: int
    batches: tuple[int, ...]
    small_dim: int
    hyperbolic_rows: int
    hyperbolic_batches: tuple[int, ...]
    scratch_bytes: int
    seconds: float
    seed: int = 0
    kinds: tuple[str, ...] = KINDS
    directory: Path = Path()
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "dim", "small_dim", "hyperbolic_rows"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value!r} is out of range: pass at least 1")
        if not self.seconds > 0.0:
            raise ValueError(f"seconds={self.seconds!r} is out of range: pass a number above 0")
        _check_batches(self.batches, self.rows, "rows")
        _check_batches(self.hyperbolic_batches, self.hyperbolic_rows, "hyperbolic rows")
        if not self.directory.is_dir():
            raise ValueError(
                f"the directory {str(self.directory)!r} does not exist: make it, or pass another"
            )

    def with_sizes(self, **sizes: Any) -> Settings:  # noqa: ANN401 - the fields' own types
        """Return the settings with those sizes replaced that are not None."""
        given = {name: value for name, value in sizes.items() if value is not None}
        rows = given.get("rows", self.rows)
        given["hyperbolic_rows"] = min(rows, self.hyperbolic_rows)
        given.setdefault("batches", tuple(b for b in self.batches if b <= rows) or (rows,))
        limit = given["hyperbolic_rows"]
        given["hyperbolic_batches"] = tuple(b for b in self.hyperbolic_batches if b <= limit) or (limit,)
        return replace(self, **given)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain data, without the directory's name."""
        return {name: value for name, value in asdict(self).items() if name != "directory"}

    def disk_bytes(self) -> int:
        """Return the most that lies on disk at a time."""
        flat = 3 * (estimate(self.rows, self.dim).file + _JOURNAL_BYTES)
        flat += naive_bytes(self.rows, self.dim) + touch_bytes(self.rows, self.dim)
        ball = sum(
            estimate(self.hyperbolic_rows, self.dim, second_moment=moment).file + _JOURNAL_BYTES
            for moment in ("coordinate", "coordinate", "frame", "row")
        )
        return max(flat, ball, self.scratch_bytes)

    def memory_bytes(self) -> int:
        """Return the most that has to be in memory at a time, cached files among it."""
        tables = 2 * (
            estimate(self.rows, self.dim).file + _JOURNAL_BYTES
        )  # one racing, one being written back
        largest = max(*self.batches, *self.hyperbolic_batches)
        return 3 * 4 * self.rows * self.dim + tables + 40 * 8 * largest * self.dim


def _check_batches(batches: tuple[int, ...], rows: int, what: str) -> None:
    if not batches:
        raise ValueError(f"batches={batches!r} holds no batch size: pass at least one")
    for batch in batches:
        if not 1 <= batch <= rows:
            raise ValueError(
                f"batch={batch!r} is out of range for {rows} {what}: pass sizes from 1 to the number of rows"
            )


FULL: Final = Settings(
    rows=1_000_000,
    dim=128,
    batches=(64, 2048, 16384),
    small_dim=8,
    hyperbolic_rows=200_000,
    hyperbolic_batches=(4096, 16384),
    scratch_bytes=1024 * _MIB,
    seconds=120.0,
)
"""The sizes that the goals are stated for."""

QUICK: Final = Settings(
    rows=50_000,
    dim=32,
    batches=(64, 1024),
    small_dim=4,
    hyperbolic_rows=10_000,
    hyperbolic_batches=(512,),
    scratch_bytes=16 * _MIB,
    seconds=4.0,
)
"""Sizes for a first look and for small machines."""


def check_room(settings: Settings) -> None:
    """Refuse a run that doesn't fit.

    Raises:
        ValueError: the disk or the memory is too small.
    """
    disk, free = settings.disk_bytes(), system.available_bytes(settings.directory)
    if disk > free:
        raise ValueError(
            f"rows={settings.rows!r} and dim={settings.dim!r} take {disk:,} bytes of disk but only {free:,} "
            f"are free in {str(settings.directory)!r}: pass fewer --rows, or another --dir"
        )
    memory, available = settings.memory_bytes(), available_memory()
    if available is not None and memory > available:
        raise ValueError(
            f"rows={settings.rows!r} and dim={settings.dim!r} take {memory:,} bytes of memory, cached files "
            f"among it, but only {available:,} are available: pass fewer --rows, or --quick"
        )
