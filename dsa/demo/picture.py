"""A picture of the ball: nodes, geodesics to their nearest ancestors, names of the most general ones.

Everything is drawn in the unit disk, whatever the curvature. Positions of more than two dimensions are
projected: a point keeps its distance to the origin, and its angle is that of its direction's components
along the two principal axes of all directions.
"""

from __future__ import annotations

import importlib.util
import math
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsa.demo.graph import Graph, Nodes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["REMEDY", "available", "branches", "draw", "flatten", "geodesics", "nearest_ancestors", "readable"]

REMEDY = "pip install 'dsa[plot]'"

Points = NDArray[np.float64]

_MOST_NODES = 5_000
_MOST_LABELS = 40
_MOST_LABELS_TRIED = 300
_BRANCHES = 8
_ARC_POINTS = 32
_INCHES = 3.9
_DPI = 140
_LONGEST_NAME = 24
_GREY = "#8a8a8a"
# Half of the frame: the unit disk and room for names outside of it.
_WIDTH, _HEIGHT = 1.24, 1.08
# Nodes farther out than this have their names outside.
_RIM = 0.94
# Where a name may stand, in points from its node, with its alignment.
_PLACES = (
    (0.0, 5.0, "center", "bottom"),
    (0.0, -5.0, "center", "top"),
    (6.0, 0.0, "left", "center"),
    (-6.0, 0.0, "right", "center"),
)
# Eight hues of similar lightness that stay apart for colour-blind readers (after Okabe and Ito).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#8c6d31")


def available() -> bool:
    """Tell whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(graph: Graph, positions: NDArray[np.floating], k: float, path: Path) -> None:
    """Write the picture as PNG.

    Args:
        graph: The nodes.
        positions: `(N, D)` in the ball of curvature -k.
        k: Positive.
        path: The file, replaced if it exists.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = flatten(np.asarray(positions, np.float64) * math.sqrt(k))
    shown = _shown(graph)
    size = (2 * _WIDTH * _INCHES, 2 * _HEIGHT * _INCHES)
    figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot(aspect="equal")
    axes.set_axis_off()
    axes.set(xlim=(-_WIDTH, _WIDTH), ylim=(-_HEIGHT, _HEIGHT))
    axes.set_title(_title(graph, positions.shape[1], len(shown)), fontsize=10)
    _draw_disk(axes)
    _draw_tree(axes, graph, points, shown)
    canvas.draw()  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        # A name may have letters that the font lacks; they appear as boxes.
        warnings.filterwarnings("ignore", message="Glyph")
        _draw_labels(axes, graph, points, shown)
        figure.savefig(path, format="png")


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


def nearest_ancestors(graph: Graph) -> Nodes:
    """Return for each node its ancestor with the most ancestors, -1 where there is none, `(N,)` int64."""
    depth = np.diff(graph.offsets)
    order = np.lexsort((depth[graph.ancestors], graph.children))
    nearest = np.full(len(graph), -1, np.int64)
    nearest[graph.children[order]] = graph.ancestors[order]
    return nearest


def branches(graph: Graph, count: int = _BRANCHES) -> Nodes:
    """Return for each node the number of the large branch that it belongs to, -1 where there is none.

    Branches are nodes with many descendants, but fewer than a third of all, none an ancestor of another.
    """
    descendants = graph.descendant_counts()
    branch = np.full(len(graph), -1, np.int64)
    heads: list[int] = []
    for node in np.argsort(-descendants, kind="stable"):
        if len(heads) == count or descendants[node] == 0:
            break
        if descendants[node] > len(graph) / 3 or _related(graph, int(node), heads):
            continue
        members = graph.children[graph.ancestors == node]
        free = np.append(members, node)
        free = free[branch[free] < 0]
        branch[free] = len(heads)
        heads.append(int(node))
    return branch


def _related(graph: Graph, node: int, others: list[int]) -> bool:
    return any(other in graph.ancestors_of(node) or node in graph.ancestors_of(other) for other in others)


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


def _shown(graph: Graph) -> Nodes:
    """Return the nodes to draw, most general first."""
    return np.argsort(-graph.descendant_counts(), kind="stable")[:_MOST_NODES]


def _title(graph: Graph, dim: int, shown: int) -> str:
    parts = [f"{len(graph):,} nodes in the Poincaré disk, each joined to its nearest ancestor"]
    if dim > 2:
        parts.append(
            f"{dim} dimensions: distances to the centre are true, angles are projected on two principal axes"
        )
    if shown < len(graph):
        parts.append(f"the {shown:,} nodes with the most descendants are drawn")
    return "\n".join(parts)


def _draw_disk(axes: Axes) -> None:
    from matplotlib.patches import Circle

    axes.add_patch(Circle((0.0, 0.0), 1.0, facecolor="#fbfbf9", edgecolor="#444444", linewidth=0.8, zorder=0))


def _draw_tree(axes: Axes, graph: Graph, points: Points, shown: Nodes) -> None:
    from matplotlib.collections import LineCollection

    palette = np.array([*_COLOURS, _GREY])
    colours = palette[branches(graph)]
    nearest = nearest_ancestors(graph)
    joined = shown[nearest[shown] >= 0]
    arcs = geodesics(points[joined], points[nearest[joined]])
    axes.add_collection(
        LineCollection(list(arcs), colors=colours[joined], linewidths=0.45, alpha=0.5, zorder=1)
    )
    sizes = 2.5 + 5.0 * np.log1p(graph.descendant_counts()[shown])
    axes.scatter(
        points[shown, 0],
        points[shown, 1],
        s=sizes,
        c=colours[shown],
        linewidths=0.3,
        edgecolors="white",
        zorder=2,
    )


def _draw_labels(axes: Axes, graph: Graph, points: Points, shown: Nodes) -> None:
    """Name nodes from the most general on, leaving out a name that has no free place beside its node."""
    taken: list[Any] = []
    descendants = graph.descendant_counts()
    for node in shown[descendants[shown] > 0][:_MOST_LABELS_TRIED]:
        if len(taken) == _MOST_LABELS:
            break
        for place in _places(points[node]):
            label = _label(axes, readable(graph.names[node]), place)
            box = label.get_window_extent().expanded(1.04, 1.15)
            if not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            label.remove()


class _Place(NamedTuple):
    x: float
    y: float
    offset: tuple[float, float]
    horizontal: str
    vertical: str


def _places(point: Points) -> list[_Place]:
    """Return where a node's name may stand, best first: outside the disk if the node is near its edge."""
    x, y = float(point[0]), float(point[1])
    near = [_Place(x, y, (right, up), h, v) for right, up, h, v in _PLACES]
    norm = math.hypot(x, y)
    if norm < _RIM:
        return near
    cosine, sine = x / norm, y / norm
    horizontal = "center" if abs(cosine) < 0.2 else "left" if cosine > 0.0 else "right"
    vertical = "center" if abs(sine) < 0.2 else "bottom" if sine > 0.0 else "top"
    return [_Place(cosine, sine, (6.0 * cosine, 6.0 * sine), horizontal, vertical)]


def _label(axes: Axes, text: str, place: _Place) -> Any:  # noqa: ANN401 - matplotlib is untyped
    from matplotlib.patheffects import withStroke

    label = axes.annotate(
        text,
        (place.x, place.y),
        xytext=place.offset,
        textcoords="offset points",
        ha=place.horizontal,
        va=place.vertical,
        fontsize=7.5,
        color="#1a1a1a",
        zorder=3,
        parse_math=False,
        path_effects=[withStroke(linewidth=2.2, foreground="white", alpha=0.85)],
    )
    # Otherwise the layout would move the disk after the names have found their places.
    label.set_in_layout(False)
    return label


def readable(name: str) -> str:
    """Return a WordNet name as it is read, other names as they are, both cut to what a picture has room for.

    Example:
        >>> readable("big_cat.n.01"), readable("Q42_x")
        ('big cat', 'Q42_x')
    """
    match = re.fullmatch(r"(.+)\.[nvars]\.\d+", name)
    text = match[1].replace("_", " ") if match else name
    return text if len(text) <= _LONGEST_NAME else f"{text[: _LONGEST_NAME - 1]}…"
