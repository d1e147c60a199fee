"""The Poincaré disk: points, geodesics between them, names.

Everything is drawn in the unit disk, whatever the curvature. Positions of more than two dimensions are
projected: a point keeps its distance to the origin, and its angle is that of its direction's components
along the two principal axes of all directions.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsa.inspection import TableView
from dsa.inspection.plots.sampling import touched_rows
from dsa.inspection.plots.style import COLOURS, GREY, INK, axes_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox, BboxBase
else:
    Axes = Annotation = Bbox = BboxBase = (
        Any  # so that annotations can be looked up where it is not installed
    )

__all__ = [
    "HEIGHT",
    "WIDTH",
    "draw_edges",
    "draw_names",
    "draw_points",
    "draw_rim",
    "flatten",
    "geodesics",
    "poincare_disk",
]

Points = NDArray[np.float64]

WIDTH: Final = 1.24
HEIGHT: Final = 1.08
"""Half of the frame: the unit disk and room for names outside of it."""

_MOST_ROWS: Final = 5_000
_MOST_NAMES: Final = 40
_MOST_NAMES_TRIED: Final = 300
_ARC_POINTS: Final = 32
_INCHES: Final = 3.6
# A point may lie on the rim by rounding.
_ROUNDING: Final = 1e-6
# Points farther out than this have their names outside.
_RIM: Final = 0.94
# Where a name may stand, in typographic points from its point, with its alignment.
_PLACES: Final = (
    (0.0, 5.0, "center", "bottom"),
    (0.0, -5.0, "center", "top"),
    (6.0, 0.0, "left", "center"),
    (-6.0, 0.0, "right", "center"),
)


def poincare_disk(
    points: NDArray[np.floating] | TableView,
    *,
    k: float | None = None,
    rows: NDArray[np.integer] | None = None,
    edges: NDArray[np.integer] | None = None,
    groups: NDArray[np.integer] | None = None,
    sizes: NDArray[np.floating] | None = None,
    names: Mapping[int, str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw points of the Poincaré ball in the unit disk.

    Points of more than two dimensions keep their distance to the centre; their angles are projected.

    Args:
        points: ``(N, D)`` in the ball of curvature -k, or a table on a ball.
        k: Of an array; 1 when None. A table knows its own.
        rows: Of a table, the rows to draw, ``(N,)``; when None, all that were touched, or 5,000 of them.
        edges: ``(E, 2)``, numbers of points to join by geodesics.
        groups: ``(N,)``, what colour each point has; -1 is grey. An edge has the colour of its first point.
        sizes: ``(N,)``, areas of the points in square typographic points.
        names: What to write beside points, by their number, the most important first. A name that finds no
            free place is left out.
        ax: Where to draw; on a new figure when None.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a point lies outside the ball, or the table is flat.
    """
    axes = axes_for(ax, 2 * WIDTH * _INCHES, 2 * HEIGHT * _INCHES)
    whole = _positions(points, k, rows)
    flat = flatten(whole)
    draw_rim(axes)
    axes.set_title(_title(points, whole), fontsize=10)
    numbers = np.zeros(len(flat), np.int64) if groups is None else np.asarray(groups)
    if edges is not None and len(edges):
        pairs = np.asarray(edges)
        draw_edges(axes, flat[pairs[:, 0]], flat[pairs[:, 1]], numbers[pairs[:, 0]])
    areas = np.full(len(flat), _area(len(flat))) if sizes is None else np.asarray(sizes)
    draw_points(axes, flat, numbers, areas)
    if names:
        draw_names(axes, flat, names)
    return axes


def flatten(points: Points) -> Points:
    """Return `(N, 2)` positions in the unit disk that keep each point's norm.

    Args:
        points: `(N, D)` in the unit ball.
    """
    if points.shape[1] == 1:
        return np.column_stack([points, np.zeros(len(points))])
    if points.shape[1] == 2:
        return points
    norms = np.linalg.norm(points, axis=1, keepdims=True)
    directions = points / np.maximum(norms, np.finfo(np.float64).tiny)
    _, axes = np.linalg.eigh(directions.T @ directions)
    plane = directions @ axes[:, -2:]
    lengths = np.linalg.norm(plane, axis=1, keepdims=True)
    return np.asarray(norms * plane / np.maximum(lengths, np.finfo(np.float64).tiny))


def geodesics(start: Points, end: Points, count: int = _ARC_POINTS) -> Points:
    """Return points on the geodesics of the unit disk, `(E, count, 2)`, evenly spaced to the eye.

    A geodesic is a circular arc. The one from x to y leaves x in the direction of the Möbius sum ``(-x) + y
    = (y - x) / (1 - conj(x) y)``, hence at the angle ``a = -arg(1 - conj(x) y)`` to its chord, and the
    chord from x to the point at the fraction t of the arc is ``(y - x) exp(i a (1 - t)) sin(a t) /
    sin(a)``.

    Args:
        start: `(E, 2)`.
        end: `(E, 2)`.
        count: Points per geodesic.
    """
    x, y = start @ np.array([1, 1j]), end @ np.array([1, 1j])
    angle = -np.angle(1.0 - np.conj(x) * y)[:, None] / np.pi
    t = np.linspace(0.0, 1.0, count)
    chord = (
        (y - x)[:, None] * np.exp(1j * np.pi * angle * (1.0 - t)) * t * np.sinc(angle * t) / np.sinc(angle)
    )
    arcs = x[:, None] + chord
    return np.stack([arcs.real, arcs.imag], axis=-1)


def draw_rim(axes: Axes) -> None:
    """Draw the empty disk and leave room for names around it."""
    from matplotlib.patches import Circle

    axes.set_axis_off()
    axes.set(xlim=(-WIDTH, WIDTH), ylim=(-HEIGHT, HEIGHT), aspect="equal")
    axes.add_patch(Circle((0.0, 0.0), 1.0, facecolor="#fbfbf9", edgecolor="#444444", linewidth=0.8, zorder=0))


def draw_edges(axes: Axes, start: Points, end: Points, groups: NDArray[np.integer]) -> None:
    """Join points by geodesics.

    Args:
        axes: With a rim.
        start: ``(E, 2)`` in the unit disk.
        end: ``(E, 2)``.
        groups: ``(E,)``, see `poincare_disk`.
    """
    from matplotlib.collections import LineCollection

    arcs = list(geodesics(start, end))
    axes.add_collection(LineCollection(arcs, colors=_colours(groups), linewidths=0.45, alpha=0.5, zorder=1))


def draw_points(axes: Axes, points: Points, groups: NDArray[np.integer], sizes: NDArray[np.floating]) -> None:
    """Draw points.

    Args:
        axes: With a rim.
        points: ``(N, 2)`` in the unit disk.
        groups: ``(N,)``, see `poincare_disk`.
        sizes: ``(N,)``, see `poincare_disk`.
    """
    x, y = points[:, 0], points[:, 1]
    axes.scatter(x, y, s=sizes, c=_colours(groups), linewidths=0.3, edgecolors="white", zorder=2)


def _colours(groups: NDArray[np.integer]) -> list[str]:
    return [GREY if group < 0 else COLOURS[group % len(COLOURS)] for group in groups.tolist()]


def draw_names(axes: Axes, points: Points, names: Mapping[int, str]) -> None:
    """Write names beside points, leaving out a name that has no free place.

    The places are found for the figure as large as it is now.

    Args:
        axes: With a `poincare_disk`.
        points: ``(N, 2)`` in the unit disk.
        names: By number of the point, the most important first.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None, "axes belong to a figure"
    figure.draw_without_rendering()
    taken: list[Bbox] = []
    with warnings.catch_warnings():
        # A name may have letters that the font lacks; they appear as boxes.
        warnings.filterwarnings("ignore", message="Glyph")
        for number, name in [*names.items()][:_MOST_NAMES_TRIED]:
            if len(taken) == _MOST_NAMES:
                break
            for place in _places(points[number]):
                label = _label(axes, name, place)
                box = label.get_window_extent().expanded(1.04, 1.15)
                if _holds(figure.bbox, box) and not any(box.overlaps(other) for other in taken):
                    taken.append(box)
                    break
                label.remove()


def _positions(
    points: NDArray[np.floating] | TableView, k: float | None, rows: NDArray[Any] | None
) -> Points:
    """Return the points in the unit ball."""
    if isinstance(points, TableView):
        if points.k == 0.0:
            raise ValueError(f"table {points.name!r} is flat and lies in no ball: pass a table with k > 0")
        scale = math.sqrt(points.k)
        chosen = touched_rows(points, _MOST_ROWS) if rows is None else rows
        positions = scale * points.weights(chosen).astype(np.float64)
    else:
        positions = math.sqrt(1.0 if k is None else k) * np.asarray(points, np.float64)
    norms = np.linalg.norm(positions, axis=1)
    outside = np.flatnonzero(~(norms <= 1.0 + _ROUNDING))
    if len(outside):
        raise ValueError(
            f"point {int(outside[0])} has {norms[outside[0]]:.4g} times the radius of the ball: pass the k "
            "that the points were trained with"
        )
    return positions


def _title(points: NDArray[np.floating] | TableView, positions: Points) -> str:
    count, dim = positions.shape
    what, of = "points", ""
    if isinstance(points, TableView):
        what = f"rows of {points.name}"
        of = "" if count == points.rows else f" (of {points.rows:,})"
    title = f"{count:,} {what}{of} in the Poincaré disk"
    if dim > 2:
        title += f"\n{dim} dimensions: distances to the centre are true, angles are projected"
    return title


def _area(count: int) -> float:
    return min(max(12_000.0 / max(count, 1), 3.0), 30.0)


def _holds(frame: BboxBase, box: BboxBase) -> bool:
    return frame.x0 <= box.x0 and frame.y0 <= box.y0 and box.x1 <= frame.x1 and box.y1 <= frame.y1


class _Place(NamedTuple):
    x: float
    y: float
    offset: tuple[float, float]
    horizontal: str
    vertical: str


def _places(point: Points) -> list[_Place]:
    """Return where a name may stand, best first: outside the disk if the point is near its edge."""
    x, y = float(point[0]), float(point[1])
    near = [_Place(x, y, (right, up), h, v) for right, up, h, v in _PLACES]
    norm = math.hypot(x, y)
    if norm < _RIM:
        return near
    cosine, sine = x / norm, y / norm
    horizontal = "center" if abs(cosine) < 0.2 else "left" if cosine > 0.0 else "right"
    vertical = "center" if abs(sine) < 0.2 else "bottom" if sine > 0.0 else "top"
    return [_Place(cosine, sine, (6.0 * cosine, 6.0 * sine), horizontal, vertical)]


def _label(axes: Axes, text: str, place: _Place) -> Annotation:
    from matplotlib.patheffects import withStroke

    label = axes.annotate(
        text,
        (place.x, place.y),
        xytext=place.offset,
        textcoords="offset points",
        ha=place.horizontal,
        va=place.vertical,
        fontsize=7.5,
        color=INK,
        zorder=3,
        parse_math=False,
        path_effects=[withStroke(linewidth=2.2, foreground="white", alpha=0.85)],
    )
    # Otherwise the layout would move the disk after the names have found their places.
    label.set_in_layout(False)
    return label
