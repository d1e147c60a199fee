"""What all pictures share: axes to draw on, colours, a quiet frame."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
else:
    Axes = Axis = Any  # so that annotations can be looked up where matplotlib is not installed

__all__ = ["COLOURS", "GREY", "INK", "REMEDY", "axes_for", "log_ticks", "quiet", "require_matplotlib"]

REMEDY: Final = "pip install matplotlib"

COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#8c6d31")
"""Eight hues of similar lightness that stay apart for colour-blind readers (after Okabe and Ito)."""

GREY: Final = "#8a8a8a"
INK: Final = "#1a1a1a"


def require_matplotlib() -> None:
    """Raise an ImportError that says how to get matplotlib, if it is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f"plots need matplotlib, which can't be imported ({error}): {REMEDY}") from error


def axes_for(ax: Axes | None, width: float, height: float) -> Axes:
    """Return the axes that were given, or those of a new figure.

    Args:
        ax: Where to draw, or None.
        width: Of a new figure, in inches.
        height: Likewise.

    Raises:
        ImportError: matplotlib is not installed.
    """
    require_matplotlib()
    if ax is not None:
        return ax
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height), layout="constrained")[1]


def quiet(axes: Axes, *, grid: Literal["x", "y", "both"] = "y") -> None:
    """Leave only what is needed of a frame: two spines and a faint grid.

    Args:
        axes: To change.
        grid: Along which axes lines are drawn: ``"x"``, ``"y"`` or ``"both"``.
    """
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(which="both", color=GREY)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color="#e4e4e0", linewidth=0.8)


def log_ticks(axis: Axis) -> None:
    """Write plain numbers beside a logarithmic axis, as many as there is room for.

    Args:
        axis: The x or y axis, with its final limits.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    decades = math.log10(high / low)
    steps = (1.0, 2.0, 5.0) if decades < 2.0 else (1.0, 3.0) if decades < 3.0 else (1.0,)
    axis.set_major_locator(LogLocator(subs=steps, numticks=12 if decades < 3.0 else 8))
    axis.set_major_formatter(FuncFormatter(_plain))
    axis.set_minor_formatter(NullFormatter())


def _plain(value: float, place: int | None = None) -> str:
    """Return a number as it is written, or a power of ten.

    Example:
        >>> _plain(0.05), _plain(20_000.0), _plain(1e-7)
        ('0.05', '20,000', '$10^{-7}$')
    """
    del place  # among the ticks, which a formatter is told
    if 1e-3 <= value < 1e6:
        return f"{value:,.6g}"
    power = math.floor(math.log10(value) + 1e-9)
    factor = value / 10.0**power
    return f"$10^{{{power}}}$" if abs(factor - 1.0) < 1e-6 else f"${factor:.2g}{{\\cdot}}10^{{{power}}}$"
