"""How long steps will take whose rows are not in memory, by the disk's random reads and writes."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from dsa.backends import Layout, Memmap
from dsa.backends.system import PAGE
from dsa.cli.bench.device import DeviceSpeed, measure_device
from dsa.rules.conventions import SecondMoment
from dsa.rules.known import rule_of
from dsa.schema import Schema
from dsa.state.storage import narrowed

__all__ = ["BATCHES", "Forecast", "forecast"]

BATCHES: Final = (64, 2_048, 16_384)
_DEPTH: Final = 32


@final
@dataclass(frozen=True, slots=True)
class Forecast:
    """What a short measurement says about steps all of whose rows come from the disk.

    Args:
        device: The disk's random reads and writes.
        pages_per_row: Pages of 4 KiB on which a row lies, on average.
        milliseconds: Of a step, by the number of distinct rows in it.
    """

    device: DeviceSpeed
    pages_per_row: float
    milliseconds: dict[int, float]


def forecast(
    rows: int,
    dim: int,
    directory: Path,
    *,
    second_moment: SecondMoment = "coordinate",
    rule: str | None = None,
    state_dtype: str | Mapping[str, str] | None = None,
    backend: Layout | None = None,
    batches: Sequence[int] = BATCHES,
    seconds: float = 1.0,
    size: int = 64 << 20,
) -> Forecast | None:
    """Measure a disk for a moment, and return what steps of a table there will take.

    A step reads and writes every row's pages once. Rows that are in memory are not waited for, and faster by
    orders of magnitude.

    Args:
        rows: N.
        dim: D.
        directory: Where the table will be; a scratch file is made there and removed again.
        second_moment: See `dsa.estimate`.
        rule: See `dsa.estimate`.
        state_dtype: See `dsa.estimate`.
        backend: The layout; the default one when None.
        batches: Numbers of distinct rows in a step; those above `rows` are left out.
        seconds: For the measurement, beside writing the scratch file.
        size: Bytes of the scratch file, a multiple of a MiB.

    Returns:
        None where the system lacks what measures.
    """
    with tempfile.TemporaryDirectory(prefix="dsa-estimate-", dir=directory) as scratch:
        device = measure_device(Path(scratch), size=size, seconds=seconds, depths=(_DEPTH,))
    if device is None:
        return None
    pages = _pages_per_row(narrowed(rule_of(second_moment, rule).schema(dim), state_dtype), backend)
    limit = device.limit(pages)
    chosen = [batch for batch in batches if batch <= rows] or [rows]
    return Forecast(device, pages, {batch: 1e3 * batch / limit for batch in chosen})


def _pages_per_row(schema: Schema, backend: Layout | None) -> float:
    layout = Memmap() if backend is None else backend
    return sum(_pages(size, distance) for size, distance in layout.sizes(1, schema).pieces)


def _pages(record: int, stride: int) -> float:
    """Return on how many pages one of many records lies, on average.

    Example:
        >>> _pages(1544, 2048), round(_pages(1544, 1544), 2)
        (1.0, 1.38)
    """
    period = PAGE // math.gcd(stride, PAGE)
    starts = [number * stride for number in range(period)]
    return sum((start + record - 1) // PAGE - start // PAGE + 1 for start in starts) / period
