"""How rows are distributed: their norms, the number of their updates, the scales of their moments."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from dsa.inspection import Spread, TableSummary, TableView, summarize_table
from dsa.inspection.plots.sampling import touched_rows
from dsa.inspection.plots.style import COLOURS, GREY, INK, axes_for, log_ticks, quiet
from dsa.inspection.sketch import Sketch, count_scale, norm_scale
from dsa.rules.adam import AdamRule
from dsa.rules.updates import label_of
from dsa.schema import read_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
else:
    Axes = Any  # so that annotations can be looked up where matplotlib is not installed

__all__ = ["moment_scales", "row_norms", "touch_counts"]

_SIZE: Final = (6.4, 4.0)
_MOST_ROWS: Final = 50_000
_WIDE: Final = 30.0
# Norms as parts of the radius that are marked above distances.
_MARKS: Final = (0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999)


def row_norms(
    source: NDArray[np.floating] | TableView | TableSummary,
    *,
    k: float | None = None,
    bins: int = 60,
    ax: Axes | None = None,
) -> Axes:
    """Draw how long the rows are.

    On a ball that is the hyperbolic distance from its centre; the Euclidean norm, as a part of the radius, is
    marked above.

    Args:
        source: Weights ``(N, D)``; or a table, of which every touched row is read once; or its summary.
        k: Of an array, the curvature magnitude; flat when None. A table knows its own.
        bins: Bars, at most; a table has 40.
        ax: Where to draw; on a new figure when None.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is nothing to draw.
    """
    axes = axes_for(ax, *_SIZE)
    if isinstance(source, np.ndarray):
        name, curvature = "", 0.0 if k is None else k
        spread = _spread(_lengths(source, curvature), bins)
    else:
        summary = source if isinstance(source, TableSummary) else summarize_table(source)
        name, curvature = summary.name, summary.k
        spread = summary.distances if curvature > 0.0 else summary.weight_norms
    drawn = _draw(axes, spread, COLOURS[0], "rows have no weights")
    what = "hyperbolic distance of a row from the centre" if curvature > 0.0 else "Euclidean norm of a row"
    axes.set(xlabel=what, ylabel="rows", title=_title(name, drawn))
    if curvature > 0.0:
        _mark_norms(axes, curvature)
    return axes


def touch_counts(
    source: NDArray[np.integer] | TableView | TableSummary, *, bins: int = 60, ax: Axes | None = None
) -> Axes:
    """Draw how often the rows were updated. Rows that never were are left out.

    Args:
        source: Counters ``(N,)``, the field ``t``; or a table, which is read once; or its summary.
        bins: Bars, at most; a table has 40.
        ax: Where to draw; on a new figure when None.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no row was ever updated.
    """
    axes = axes_for(ax, *_SIZE)
    if isinstance(source, np.ndarray):
        name, rows = "", len(source)
        spread = _spread(source[source > 0], bins, integers=True)
    else:
        summary = source if isinstance(source, TableSummary) else summarize_table(source)
        name, rows, spread = summary.name, summary.rows, summary.updates
    drawn = _draw(axes, spread, COLOURS[2], "no row was ever updated")
    share = f"{drawn.count:,} of {rows:,} rows" if drawn.count < rows else f"{rows:,} rows"
    title = f"{share}, median {drawn.median:,.0f}"
    axes.set(xlabel="updates of a row", ylabel="rows", title=f"{name}: {title}" if name else title)
    counts = np.array(drawn.histogram.counts)
    if counts.max() > _WIDE * max(1, np.median(counts[counts > 0])):
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.7)
        log_ticks(axes.yaxis)
    return axes


def moment_scales(
    source: NDArray[np.floating] | TableView,
    v: NDArray[np.floating] | None = None,
    *,
    counts: NDArray[np.integer] | None = None,
    beta1: float = 0.9,
    beta2: float = 0.999,
    ax: Axes | None = None,
) -> Axes:
    """Draw the first moment of each row against the root of its second, both as root mean squares.

    Of a table on a ball with one second moment per row or per frame component, both are in hyperbolic units.

    Both are corrected for their start at zero where the number of updates is known. Gradients that always
    point the same way put a row on the diagonal; independent ones of mean zero put it near the lower line.

    Args:
        source: First moments ``(N, D)``; or a table, of whose updated rows 50,000 are read, or all if fewer.
        v: With an array, second moments ``(N, D)`` or ``(N,)``.
        counts: With an array, updates of each row ``(N,)``.
        beta1: Decay of the first moment that the rows were trained with.
        beta2: Decay of the second.
        ax: Where to draw; on a new figure when None.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is nothing to draw, or `v` is missing.
    """
    axes = axes_for(ax, 5.8, 4.6)
    first, second, name = _moments(source, v, counts, beta1, beta2)
    drawn = (first > 0.0) & (second > 0.0)
    if not drawn.any():
        raise ValueError("no row has moments that are not zero: train first")
    first, second = first[drawn], second[drawn]
    picture = axes.hexbin(
        second, first, xscale="log", yscale="log", gridsize=48, mincnt=1, bins="log", cmap="viridis", lw=0.1
    )
    figure = axes.get_figure()
    assert figure is not None, "axes belong to a figure"
    figure.colorbar(picture, ax=axes, label="rows").outline.set_visible(False)
    _draw_guides(axes, second, beta1)
    quiet(axes, grid="both")
    sampled = isinstance(source, TableView) and len(first) < source.rows
    count = f"{'a sample of ' if sampled else ''}{len(first):,} rows"
    axes.set(
        xlabel="root mean square of √v",
        ylabel="root mean square of m",
        title=f"{name}: {count}" if name else count,
    )
    return axes


def _lengths(weights: NDArray[np.floating], k: float) -> NDArray[np.float64]:
    norms = np.linalg.norm(np.asarray(weights, np.float64), axis=1)
    if k == 0.0:
        return np.asarray(norms)
    root = math.sqrt(k)
    if (outside := np.flatnonzero(root * norms >= 1.0)).size:
        raise ValueError(
            f"row {int(outside[0])} has norm {norms[outside[0]]:.4g}, outside the ball of k={k!r}: pass "
            "the k that the rows were trained with"
        )
    return np.asarray((2.0 / root) * np.arctanh(root * norms))


def _spread(values: NDArray[Any], bins: int, *, integers: bool = False) -> Spread | None:
    sketch = Sketch(integers=integers)
    sketch.add(values)
    return sketch.spread(bins, count_scale(sketch) if integers else norm_scale(sketch))


def _draw(axes: Axes, spread: Spread | None, colour: str, lacking: str) -> Spread:
    """Draw a distribution with its median."""
    if spread is None:
        raise ValueError(f"{lacking}, so that there is nothing to draw: train first, or pass other rows")
    from matplotlib.ticker import MaxNLocator

    histogram = spread.histogram
    axes.stairs(histogram.counts, histogram.edges, fill=True, color=colour, alpha=0.85)
    axes.set_xlim(histogram.edges[0], histogram.edges[-1])
    if histogram.scale == "log":
        axes.set_xscale("log")
        log_ticks(axes.xaxis)
    axes.axvline(spread.median, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
    quiet(axes)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    return spread


def _title(name: str, spread: Spread) -> str:
    rows = f"{spread.count:,} rows, median {spread.median:.3g}"
    return f"{name}: {rows}" if name else rows


def _mark_norms(axes: Axes, k: float) -> None:
    """Mark above hyperbolic distances which parts of the ball's radius they are."""
    root = math.sqrt(k)
    low, high = axes.get_xlim()
    places = [(2.0 / root) * math.atanh(part) for part in _MARKS]
    shown = [(place, part) for place, part in zip(places, _MARKS, strict=True) if low <= place <= high]
    above = axes.secondary_xaxis("top")
    above.set_xticks([place for place, _ in shown], [f"{part:g}" for _, part in shown])
    above.set_xlabel("norm as a part of the radius", color=GREY, fontsize=9)
    above.tick_params(colors=GREY, labelsize=8)
    above.spines["top"].set_visible(False)


def _moments(
    source: NDArray[np.floating] | TableView,
    v: NDArray[np.floating] | None,
    counts: NDArray[np.integer] | None,
    beta1: float,
    beta2: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64], str]:
    """Return the corrected root mean squares of each row's moments, and what they are of."""
    name = ""
    if isinstance(source, TableView):
        name = source.name
        if not {"m", "v", "t"} <= set(source.fields):
            raise ValueError(
                f"table {name!r} has the update rule {label_of(source.rule)}, which keeps no "
                "first and second moments: pass another table"
            )
        rows = touched_rows(source, _MOST_ROWS, "t")
        records = source.read(rows)
        m, v, counts = read_numbers(records, "m"), read_numbers(records, "v"), records["t"]
        if source.k > 0.0 and isinstance(source.rule, AdamRule) and source.rule.second_moment != "coordinate":
            # There `v` is of gradients in hyperbolic units (see dsa.kernels.poincare), `m` in coordinates.
            weights = np.asarray(source.weights(rows), np.float64)
            scale = 2.0 / (1.0 - source.k * np.sum(np.square(weights), axis=1))
            m = m * scale[:, None]
            v = v / m.shape[1] if v.ndim == 1 else v
    else:
        m = np.asarray(source)
    if v is None:
        raise ValueError("first moments were given without second ones: pass v, or a table")
    wide = np.asarray(v, np.float64)
    means = wide if wide.ndim == 1 else wide.mean(axis=1)
    first = np.sqrt(np.mean(np.square(m, dtype=np.float64), axis=1))
    second = np.sqrt(means)
    if counts is not None:
        updates = np.maximum(np.asarray(counts, np.float64), 1.0)
        first = first / -np.expm1(updates * math.log(beta1))
        second = second / np.sqrt(-np.expm1(updates * math.log(beta2)))
    return first, second, name


def _draw_guides(axes: Axes, second: NDArray[np.float64], beta1: float) -> None:
    """Draw where rows lie whose gradients always agree, and where those whose gradients are noise."""
    ends = np.array([second.min() / 1.5, second.max() * 1.5])
    noise = math.sqrt((1.0 - beta1) / (1.0 + beta1))
    for factor, style, label in ((1.0, "-", "steady gradients"), (noise, (0, (4, 3)), "noise alone")):
        axes.plot(ends, factor * ends, color=INK, linewidth=1.0, linestyle=style, label=label)
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    axes.set_xlim(*ends)
    log_ticks(axes.xaxis)
    log_ticks(axes.yaxis)
