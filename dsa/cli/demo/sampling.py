"""Which edges a step sees and against which negatives: a pure function of the seed and the epoch.

The edges of a batch share one pool of negatives, so that a step touches a few hundred rows of the table
instead of more than a thousand; each edge walks the pool from a place of its own and takes the first nodes
that aren't ancestors of its child. Descendants stay among the negatives, since the metric counts them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, final

import numpy as np

from dsa.cli.demo.graph import Graph, Nodes
from dsa.cli.demo.settings import Settings
from dsa.kernels.compiled import compiled

__all__ = ["Batch", "Sampler"]


class Batch(NamedTuple):
    """The rows of a step and the batch in terms of them.

    rows: `(R,)` int64, strictly increasing node numbers.
    children: `(B,)` int64, positions in `rows`.
    candidates: `(B, 1 + n)` int64, positions in `rows`: the true ancestor, then negatives, -1 where
        there is none.
    """

    rows: Nodes
    children: Nodes
    candidates: Nodes


@final
class Sampler:
    """Batches of a graph's edges with their negatives.

    Args:
        graph: The edges.
        settings: Seed, batch size, negatives, burn-in.
    """

    def __init__(self, graph: Graph, settings: Settings) -> None:
        self._graph = graph
        self._settings = settings
        self._weight_below = np.cumsum(graph.descendant_counts() + 1)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `start` on; those left out change none of the others."""
        settings, graph = self._settings, self._graph
        burning = epoch < settings.burn_in
        count = settings.burn_in_negatives if burning else settings.negatives
        steps = settings.steps_per_epoch(graph.edges)
        random = np.random.default_rng([settings.seed, epoch])
        order = random.permutation(graph.edges)
        pools = self._draw(random, (steps, settings.pool), burning)
        starts = random.integers(settings.pool, size=graph.edges)
        for number in range(start, steps):
            part = slice(number * settings.batch_size, (number + 1) * settings.batch_size)
            edges = order[part]
            yield _assemble(graph, edges, pools[number], starts[part], count)

    def _draw(self, random: np.random.Generator, shape: tuple[int, int], burning: bool) -> Nodes:
        if burning and self._settings.burn_in_sampling == "degree":
            return np.searchsorted(
                self._weight_below, random.integers(self._weight_below[-1], size=shape), "right"
            )
        return random.integers(len(self._graph), size=shape)


def _assemble(graph: Graph, edges: Nodes, pool: Nodes, starts: Nodes, count: int) -> Batch:
    children, ancestors = graph.children[edges], graph.ancestors[edges]
    picks, used = _choose(children, pool, starts, count, graph.offsets, graph.ancestors)
    parts = (children, ancestors, pool[used])
    rows, position = np.unique(np.concatenate(parts), return_inverse=True)
    size = len(children)
    of_pool = np.full(len(pool) + 1, -1)
    of_pool[:-1][used] = position[2 * size :]
    # A pick of -1 finds the last place, which stays -1.
    candidates = np.concatenate([position[size : 2 * size, None], of_pool[picks]], axis=1)
    return Batch(rows, position[:size], candidates)


@compiled
def _choose(
    children: Nodes, pool: Nodes, starts: Nodes, count: int, offsets: Nodes, ancestors: Nodes
) -> tuple[Nodes, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Return `(B, count)` places in the pool, -1 where the pool ran out, and which of its places are used."""
    picks = np.full((len(children), count), -1, np.int64)
    used = np.zeros(len(pool), np.bool_)
    for edge in range(len(children)):
        child = children[edge]
        mine = ancestors[offsets[child] : offsets[child + 1]]
        taken = 0
        for step in range(len(pool)):
            place = (starts[edge] + step) % len(pool)
            node = pool[place]
            found = np.searchsorted(mine, node)
            if node == child or (found < len(mine) and mine[found] == node):
                continue
            picks[edge, taken] = place
            used[place] = True
            taken += 1
            if taken == count:
                break
    return picks, used
