"""The distribution of a stream of numbers in bounded memory: quantiles and histograms.

Numbers are counted in bins that divide each power of two into 1,024 parts, taken from the bits of their
float64 form. A quantile is then known to a thousandth of itself whatever the distribution, integers up to
2,048 exactly; and a histogram whose edges are edges of bins is exact (the idea of the HDR histogram; compare
Masson, Rim & Lee 2019, DDSketch).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal, final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Histogram", "Scale", "Sketch", "Spread", "count_scale", "norm_scale"]

Scale = Literal["linear", "log"]

_PARTS: Final = 10
_OCTAVES: Final = (-100, 156)
_SHIFT: Final = 52 - _PARTS
_BIAS: Final = 1023
_FIRST: Final = (_OCTAVES[0] + _BIAS) << _PARTS
# Bin 0 is for zero and whatever is smaller than the first octave.
_BINS: Final = ((_OCTAVES[1] - _OCTAVES[0]) << _PARTS) + 1
# From which factor on numbers get a logarithmic scale: between the counters of a table, and of the longest
# norm to the median.
_WIDE: Final = 30.0
_LONG_TAIL: Final = 8.0

_LEVELS: Final = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@final
@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of numbers between edges.

    Args:
        edges: ``(B + 1)``, increasing; a number on an edge belongs to the bin above it.
        counts: ``(B)``.
        scale: How the edges were spaced, about.
        below: How many numbers are less than the first edge: on a logarithmic scale, zeros and the smallest
            thousandth.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    scale: Scale
    below: int = 0


@final
@dataclass(frozen=True, slots=True)
class Spread:
    """How one number per row is distributed over the rows.

    The quantiles are numbers of the distribution, or within a thousandth of one.

    Args:
        count: Rows.
        mean: Their mean.
        minimum: The least number.
        q05: 5 % of the rows have at most this number; likewise the others.
        q25: See `q05`.
        median: See `q05`.
        q75: See `q05`.
        q95: See `q05`.
        q99: See `q05`.
        maximum: The largest number.
        histogram: The whole distribution.
    """

    count: int
    mean: float
    minimum: float
    q05: float
    q25: float
    median: float
    q75: float
    q95: float
    q99: float
    maximum: float
    histogram: Histogram


@final
class Sketch:
    """Takes in numbers and tells their distribution, in two megabytes.

    Args:
        integers: Whether all numbers are integers.

    Example:
        >>> sketch = Sketch()
        >>> sketch.add(np.arange(1.0, 1001.0))
        >>> sketch.count, round(sketch.quantile(0.5), -1), sketch.maximum
        (1000, 500.0, 1000.0)
    """

    def __init__(self, *, integers: bool = False) -> None:
        self.count = 0
        self.total = 0.0
        self.minimum = np.inf
        self.maximum = -np.inf
        self._integers = integers
        self._counts = np.zeros(_BINS, np.int64)
        self._sums: NDArray[np.int64] | None = None

    def add(self, values: NDArray[Any]) -> None:
        """Take in numbers that are finite and not negative, ``(B,)``."""
        if len(values) == 0:
            return
        wide = np.ascontiguousarray(values, np.float64)
        np.add.at(self._counts, _bins(wide), 1)
        self._sums = None
        self.count += len(wide)
        self.total += float(wide.sum())
        self.minimum = min(self.minimum, float(wide.min()))
        self.maximum = max(self.maximum, float(wide.max()))

    def quantile(self, level: float) -> float:
        """Return the least number that at least this share of all numbers does not exceed, about.

        Args:
            level: In ``[0, 1]``; there is at least one number.
        """
        needed = max(1, int(np.ceil(level * self.count)))
        bin_ = int(np.searchsorted(self._cumulative(), needed))
        low, high = _edge(bin_), _edge(bin_ + 1)
        inside = np.ceil(low) if self._integers else 0.5 * (low + high)
        return float(min(max(inside, self.minimum), self.maximum))

    def histogram(self, bins: int, scale: Scale) -> Histogram:
        """Return counts between about evenly spaced edges; there are fewer bins if the numbers lie close.

        Args:
            bins: How many, at most; integers on a logarithmic scale are divided at powers of two.
            scale: ``"linear"`` starts at zero, or at the smallest number where that is more than half of the
                largest or all are integers; ``"log"`` at the smallest number but for a thousandth of them.
        """
        if self.count == 0:
            return Histogram((), (), scale)
        last = int(_bins(np.array([self.maximum]))[0]) + 1
        if self._integers:
            wanted = self._whole_edges(bins, scale)
            last = max(last, int(_bins(np.array([self.maximum + 1.0]))[0]))
        elif scale == "log":
            low = max(self.quantile(0.001), _edge(1))
            wanted = np.geomspace(low, max(self.maximum, low), bins, endpoint=False)
        else:
            low = self.minimum if self.minimum > 0.5 * self.maximum else 0.0
            wanted = np.linspace(low, self.maximum, bins, endpoint=False)
        places = np.unique(np.append(_bins(wanted), last))
        sums = np.append(0, self._cumulative())[places]
        edges = tuple(_edge(int(place)) for place in places)
        return Histogram(edges, tuple(np.diff(sums).tolist()), scale, int(sums[0]))

    def _whole_edges(self, bins: int, scale: Scale) -> NDArray[np.float64]:
        """Return where bins begin: as many integers apart, or at powers of two. Others would look uneven."""
        if scale == "log":
            first, last = (math.floor(math.log2(max(end, 1.0))) for end in (self.minimum, self.maximum))
            return np.array([2.0**power for power in range(first, last + 1)])
        width = math.ceil((self.maximum - self.minimum + 1.0) / bins)
        return np.arange(self.minimum, self.maximum + 1.0, width)

    def spread(self, bins: int, scale: Scale) -> Spread | None:
        """Return the distribution, or None when there are no numbers.

        Args:
            bins: Of the histogram.
            scale: Of the histogram.
        """
        if self.count == 0:
            return None
        q05, q25, median, q75, q95, q99 = (self.quantile(level) for level in _LEVELS)
        return Spread(
            count=self.count,
            mean=self.total / self.count,
            minimum=self.minimum,
            q05=q05,
            q25=q25,
            median=median,
            q75=q75,
            q95=q95,
            q99=q99,
            maximum=self.maximum,
            histogram=self.histogram(bins, scale),
        )

    def _cumulative(self) -> NDArray[np.int64]:
        if self._sums is None:
            self._sums = np.cumsum(self._counts)
        return self._sums


def count_scale(counts: Sketch) -> Scale:
    """Return the scale on which counters are shown."""
    return "log" if counts.maximum > _WIDE * counts.minimum else "linear"


def norm_scale(norms: Sketch) -> Scale:
    """Return the scale on which norms are shown: logarithmic for a long tail, unless there are zeros."""
    if norms.count == 0 or norms.quantile(0.001) <= _edge(1):
        return "linear"
    return "log" if norms.maximum > _LONG_TAIL * norms.quantile(0.5) else "linear"


def _bins(values: NDArray[np.float64]) -> NDArray[np.int64]:
    places = (values.view(np.int64) >> _SHIFT) - (_FIRST - 1)
    return np.asarray(np.clip(places, 0, _BINS - 1))


def _edge(bin_: int) -> float:
    """Return the least number of a bin."""
    return 0.0 if bin_ == 0 else float((np.array([bin_ + _FIRST - 1]) << _SHIFT).view(np.float64)[0])
