"""A picture of the ball: nodes, geodesics to their nearest ancestors, names of the most general ones.

What is drawn and how is said in `dsa.plots.disk`.
"""

from __future__ import annotations

import importlib.util
import math
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dsa.cli.demo.graph import Graph, Nodes
from dsa.inspection.plots.disk import HEIGHT, WIDTH, draw_edges, draw_names, draw_points, draw_rim, flatten
from dsa.inspection.plots.style import REMEDY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["REMEDY", "available", "branches", "draw", "nearest_ancestors", "readable"]

_MOST_NODES = 5_000
_BRANCHES = 8
_INCHES = 3.9
_DPI = 140
_LONGEST_NAME = 24


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
    size = (2 * WIDTH * _INCHES, 2 * HEIGHT * _INCHES)
    figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw_rim(axes)
    axes.set_title(_title(graph, positions.shape[1], len(shown)), fontsize=10)
    _draw_tree(axes, graph, points, shown)
    draw_names(axes, points, _names(graph, shown))
    with warnings.catch_warnings():
        # A name may have letters that the font lacks; they appear as boxes.
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(path, format="png")


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


def _draw_tree(axes: Axes, graph: Graph, points: NDArray[np.float64], shown: Nodes) -> None:
    groups = branches(graph)
    nearest = nearest_ancestors(graph)
    joined = shown[nearest[shown] >= 0]
    draw_edges(axes, points[joined], points[nearest[joined]], groups[joined])
    sizes = 2.5 + 5.0 * np.log1p(graph.descendant_counts()[shown])
    draw_points(axes, points[shown], groups[shown], sizes)


def _names(graph: Graph, shown: Nodes) -> dict[int, str]:
    """Return the names of nodes that have descendants, from the most general on."""
    general = shown[graph.descendant_counts()[shown] > 0]
    return {int(node): readable(graph.names[node]) for node in general}


def readable(name: str) -> str:
    """Return a WordNet name as it is read, other names as they are, both cut to what a picture has room for.

    Example:
        >>> readable("big_cat.n.01"), readable("Q42_x")
        ('big cat', 'Q42_x')
    """
    match = re.fullmatch(r"(.+)\.[nvars]\.\d+", name)
    text = match[1].replace("_", " ") if match else name
    return text if len(text) <= _LONGEST_NAME else f"{text[: _LONGEST_NAME - 1]}…"
