"""The loss of a batch and its gradient by closed formula.

One edge contributes ``-log softmax`` of its true ancestor v among v and the sampled negatives, with minus the
distance from u as the score; a batch's loss is the mean. With ``q = k|x - y|^2 / ((1 - k|x|^2)(1 - k|y|^2))``

    d(x, y)   = 2 / sqrt(k) * asinh(sqrt(q))
    dd/dx     = 2 sqrt(k) / ((1 - k|x|^2)(1 - k|y|^2) sqrt(q (1 + q))) * [x - y + k|x - y|^2 x / (1 - k|x|^2)]

which cancels nowhere; the acosh form loses half of the digits at short distances. The gradient of d has
Riemannian norm 1, hence one edge contributes at most 1/B to a row's gradient: what Adam's eps is compared
with.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dsa.cli.demo.graph import Nodes
from dsa.kernels.compiled import compiled

__all__ = ["softmax_loss"]

Points = NDArray[np.float64]


def softmax_loss(points: Points, k: float, children: Nodes, candidates: Nodes) -> tuple[float, Points]:
    """Return the mean loss and its gradient.

    Args:
        points: `(R, D)` float64, the batch's rows in the ball of curvature -k.
        k: Positive.
        children: `(B,)` int64, positions in `points`.
        candidates: `(B, 1 + n)` int64, positions in `points`: the true ancestor, then negatives; a place
            without a negative holds -1.

    Returns:
        The loss and the Euclidean gradient, `(R, D)` float64.
    """
    gradient = np.zeros_like(points)
    loss = _accumulate(points, k, children, candidates, gradient)
    return loss, gradient


@compiled
def _accumulate(points: Points, k: float, children: Nodes, candidates: Nodes, gradient: Points) -> float:
    dim = points.shape[1]
    share = 1.0 / len(children)
    gaps = np.empty(len(points))
    for row in range(len(points)):
        gaps[row] = 1.0 - k * np.sum(points[row] * points[row])
    distance = np.empty(candidates.shape[1])
    square = np.empty(candidates.shape[1])
    total = 0.0
    for edge in range(len(children)):
        u = children[edge]
        nearest = math.inf
        for place in range(candidates.shape[1]):
            x = candidates[edge, place]
            if x >= 0:
                square[place] = 0.0
                for i in range(dim):
                    delta = points[u, i] - points[x, i]
                    square[place] += delta * delta
                distance[place] = (
                    2.0 / math.sqrt(k) * math.asinh(math.sqrt(k * square[place] / (gaps[u] * gaps[x])))
                )
                nearest = min(nearest, distance[place])
        weight = 0.0
        for place in range(candidates.shape[1]):
            if candidates[edge, place] >= 0:
                weight += math.exp(nearest - distance[place])
        total += distance[0] - nearest + math.log(weight)
        for place in range(candidates.shape[1]):
            x = candidates[edge, place]
            if x >= 0:
                pull = (1.0 if place == 0 else 0.0) - math.exp(nearest - distance[place]) / weight
                _pull(points, gaps, k, u, x, square[place], share * pull, gradient)
    return total * share


@compiled
def _pull(
    points: Points, gaps: Points, k: float, u: int, x: int, square: float, pull: float, gradient: Points
) -> None:
    """Add ``pull`` times the gradient of d(u, x) to both rows; zero where the points coincide."""
    if square == 0.0:
        return
    both = gaps[u] * gaps[x]
    q = k * square / both
    factor = pull * 2.0 * math.sqrt(k) / (both * math.sqrt(q * (1.0 + q)))
    bend_u = k * square / gaps[u]
    bend_x = k * square / gaps[x]
    for i in range(points.shape[1]):
        delta = points[u, i] - points[x, i]
        gradient[u, i] += factor * (delta + bend_u * points[u, i])
        gradient[x, i] += factor * (-delta + bend_x * points[x, i])
