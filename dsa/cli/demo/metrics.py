"""How well distances tell a node's ancestors from the rest: MAP and mean rank.

References:
    Nickel & Kiela (2017), Poincaré Embeddings for Learning Hierarchical Representations, section 4.1
    (reconstruction): https://arxiv.org/abs/1705.08039
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsa.cli.demo.graph import Graph, Nodes
from dsa.kernels.compiled import compiled

__all__ = ["Reconstruction", "reconstruction", "sample_nodes"]

Points = NDArray[np.float64]


class Reconstruction(NamedTuple):
    """The two measures and what they were taken over.

    mean_average_precision: mean over nodes with an ancestor; 1 is perfect.
    mean_rank: mean over edges; 1 is perfect.
    nodes, edges: how many of each were counted.
    """

    mean_average_precision: float
    mean_rank: float
    nodes: int
    edges: int


def sample_nodes(graph: Graph, limit: int, seed: int) -> Nodes:
    """Return the nodes with an ancestor, or a uniform sample of `limit` of them, ascending."""
    nodes = np.flatnonzero(np.diff(graph.offsets))
    if len(nodes) <= limit:
        return nodes
    return np.sort(np.random.default_rng(seed).choice(nodes, limit, replace=False))


def reconstruction(
    graph: Graph, points: NDArray[np.floating], k: float, nodes: Nodes | None = None, threads: int = 1
) -> Reconstruction:
    """Rank the ancestors of each node by distance among the nodes that aren't its ancestors.

    The positives of u are its ancestors only, so its descendants count against it; u itself is left out. A
    true ancestor's rank is one more than the number of non-positives that are as near or nearer: ties count
    against the embedding. The average precision of u is taken over all other nodes.

    Distances from one u are compared through ``|x - u|^2 / (1 - k|x|^2)``, of which the asinh distance is an
    increasing function; memory is O(N) per thread.

    Args:
        graph: The N nodes and their ancestors.
        points: `(N, D)` positions in the ball of curvature -k.
        k: Positive.
        nodes: `(M,)` the nodes u to rank for; all that have an ancestor if left out.
        threads: Threads that share the nodes.
    """
    nodes = np.flatnonzero(np.diff(graph.offsets)) if nodes is None else nodes
    positions = np.ascontiguousarray(points, np.float64)
    precision = np.zeros(len(nodes))
    ranks = np.zeros(len(nodes))

    def rank(part: Nodes) -> None:
        _rank(part, nodes, positions, k, graph.offsets, graph.ancestors, precision, ranks)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(rank, np.array_split(np.arange(len(nodes)), threads)))
    edges = int((graph.offsets[nodes + 1] - graph.offsets[nodes]).sum())
    return Reconstruction(float(precision.mean()), float(ranks.sum() / edges), len(nodes), edges)


@compiled
def _rank(
    part: Nodes,
    nodes: Nodes,
    points: Points,
    k: float,
    offsets: Nodes,
    ancestors: Nodes,
    precision: Points,
    ranks: Points,
) -> None:
    """Write the average precision and the sum of ranks of ``nodes[part]``."""
    positive_of = np.full(len(points), -1, np.int64)
    nearness = np.empty(len(points))
    gaps = np.empty(len(points))
    for x in range(len(points)):
        gaps[x] = 1.0 - k * np.sum(points[x] * points[x])
    for entry in part:
        node = nodes[entry]
        mine = ancestors[offsets[node] : offsets[node + 1]]
        positive_of[mine] = node
        _nearness(points, gaps, node, nearness)
        true = np.sort(nearness[mine])
        before = np.zeros(len(true) + 1, np.int64)
        for x in range(len(points)):
            # The usual non-positive is farther than every true ancestor; only the others need a place.
            if nearness[x] <= true[-1] and x != node and positive_of[x] != node:
                before[np.searchsorted(true, nearness[x])] += 1
        ahead = 0
        for position in range(len(true)):
            ahead += before[position]
            precision[entry] += (position + 1) / (position + 1 + ahead) / len(true)
            ranks[entry] += 1 + ahead


@compiled
def _nearness(points: Points, gaps: Points, node: int, out: Points) -> None:
    for x in range(len(points)):
        total = 0.0
        for i in range(points.shape[1]):
            delta = points[x, i] - points[node, i]
            total += delta * delta
        out[x] = total / gaps[x]
