"""How a run went: its losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from dsa.inspection.plots.style import COLOURS, axes_for, log_ticks, quiet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
else:
    Axes = Any  # so that annotations can be looked up where matplotlib is not installed

__all__ = ["loss"]

_WINDOWS: Final = 50
_MOST_POINTS: Final = 20_000
_SINGLE: Final = "dsa-losses"
_MEAN: Final = "dsa-mean-loss"


def loss(
    losses: Sequence[float] | NDArray[np.floating],
    *,
    steps: Sequence[int] | NDArray[np.integer] | None = None,
    smoothing: float | None = None,
    label: str | None = None,
    log: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """Draw the losses of a run, faint, and their running mean.

    Called again with the same `ax`, it adds another run in another colour.

    Args:
        losses: One per step, in order. Those that are not finite are left out.
        steps: The step of each; 1, 2, 3, ... when None.
        smoothing: Steps after which a loss counts for half in the mean; 0 draws the losses alone; None takes
            a fiftieth of the run.
        label: What the run is called in a legend.
        log: Whether the losses have a logarithmic scale.
        ax: Where to draw; on a new figure when None.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is not one step for each loss, or `smoothing` is negative.
    """
    values = np.asarray(losses, np.float64)
    places = np.arange(1, len(values) + 1) if steps is None else np.asarray(steps)
    if values.ndim != 1 or places.shape != values.shape:
        raise ValueError(f"{places.shape} steps don't fit losses of shape {values.shape}: pass one for each")
    half_life = max(1.0, len(values) / _WINDOWS) if smoothing is None else smoothing
    if not half_life >= 0.0:
        raise ValueError(f"smoothing={smoothing!r} is out of range: pass a number of steps >= 0")
    axes = axes_for(ax, 7.2, 4.2)
    fresh = not axes.has_data()
    colour = COLOURS[sum(line.get_gid() == _MEAN for line in axes.lines) % len(COLOURS)]
    kept = np.isfinite(values)
    values, places = values[kept], places[kept]
    smooth = _running_mean(values, half_life) if half_life > 0.0 else values
    thin = slice(None, None, max(1, len(values) // _MOST_POINTS))
    if half_life > 0.0:
        axes.plot(places[thin], values[thin], color=colour, alpha=0.22, linewidth=0.7, gid=_SINGLE)
    axes.plot(places[thin], smooth[thin], color=colour, linewidth=1.8, label=label, gid=_MEAN)
    if fresh:
        quiet(axes)
        axes.set(xlabel="step", ylabel="loss")
        axes.margins(x=0.01)
    _set_scale(axes, log)
    if label is not None:
        axes.legend(frameon=False, loc="upper right")
    return axes


def _running_mean(values: NDArray[np.float64], half_life: float) -> NDArray[np.float64]:
    """Return the exponentially weighted mean of all values so far."""
    keep = 0.5 ** (1.0 / half_life)
    means = np.empty_like(values)
    total = weight = 0.0
    for place, value in enumerate(values.tolist()):
        total, weight = keep * total + value, keep * weight + 1.0
        means[place] = total / weight
    return means


def _set_scale(axes: Axes, log: bool) -> None:
    """Choose limits that a few enormous losses don't decide."""
    lines = [np.asarray(line.get_ydata()) for line in axes.lines if line.get_gid() in (_SINGLE, _MEAN)]
    values = np.concatenate(lines)
    positive = values[values > 0.0]
    log = log and len(positive) > 0
    if log:
        axes.set_yscale("log")
        values = positive
    if len(values):
        low, high = np.quantile(values, [0.0, 0.998])
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        axes.set_ylim(low / 1.1 if log else low - room, high * 1.1 if log else high + room)
    if log:
        log_ticks(axes.yaxis)
