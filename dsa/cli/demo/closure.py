"""The transitive closure of a list of direct parents."""

from __future__ import annotations

import numpy as np

from dsa.cli.demo.graph import EdgeList, Nodes, build_graph
from dsa.errors import GraphError
from dsa.kernels.compiled import compiled

__all__ = ["MAX_CLOSURE_EDGES", "transitive_closure"]

MAX_CLOSURE_EDGES = 20_000_000
"""Edges above which a closure is refused: 16 bytes each in memory, and hours of training."""

_SHOWN_IN_CYCLE = 8


def transitive_closure(edges: EdgeList, max_edges: int = MAX_CLOSURE_EDGES) -> EdgeList:
    r"""Return the edges from every node to each of its ancestors, direct or not.

    A node's ancestors are its parents and theirs, so one visit per node in an order that puts ancestors first
    suffices; the cost is the sum over edges of the parent's ancestors.

    Args:
        edges: Edges of a graph without cycles.
        max_edges: Refuse a closure with more edges than this.

    Raises:
        GraphError: the edges form a cycle (the message shows one), or the closure is too large.

    Example:
        >>> from dsa.cli.demo.graph import parse_edges
        >>> closed = transitive_closure(parse_edges(["cat\tfeline", "feline\tmammal"]))
        >>> [(closed.names[u], closed.names[v]) for u, v in zip(closed.children, closed.ancestors)]
        [('feline', 'mammal'), ('cat', 'feline'), ('cat', 'mammal')]
    """
    graph = build_graph(edges)
    order, cycle = _ancestors_first(graph.offsets, graph.ancestors)
    if len(cycle):
        raise GraphError(
            f"the edges form a cycle of {len(cycle)}: {_cycle_text(edges.names, cycle)}: a closure needs a "
            "graph without cycles, remove one of these edges or leave --closure out"
        )
    lengths, ancestors = _close(order, graph.offsets, graph.ancestors, max_edges)
    if not len(lengths):
        raise GraphError(
            f"the closure has more than {max_edges:,} edges: take a part of the graph, or train on the "
            "direct edges without --closure"
        )
    return EdgeList(edges.names, np.repeat(order, lengths), ancestors, edges.self_loops)


def _cycle_text(names: tuple[str, ...], cycle: Nodes) -> str:
    shown = [names[node] for node in cycle[:_SHOWN_IN_CYCLE]]
    end = ["..."] if len(cycle) > len(shown) else [shown[0]]
    return " -> ".join(shown + end)


@compiled
def _ancestors_first(offsets: Nodes, parents: Nodes) -> tuple[Nodes, Nodes]:
    """Return the nodes in an order that puts ancestors first, and a cycle (empty if there is none).

    Depth-first search with an explicit stack; the stack is the path from the root of the search, so a parent
    that is on it closes a cycle.
    """
    fresh, on_path, done = 0, 1, 2
    nodes = len(offsets) - 1
    state = np.full(nodes, fresh, np.int8)
    cursor = offsets[:-1].copy()
    path = np.empty(nodes, np.int64)
    order = np.empty(nodes, np.int64)
    finished = 0
    for start in range(nodes):
        if state[start] != fresh:
            continue
        path[0] = start
        state[start] = on_path
        depth = 1
        while depth > 0:
            node = path[depth - 1]
            if cursor[node] == offsets[node + 1]:
                state[node] = done
                order[finished] = node
                finished += 1
                depth -= 1
                continue
            parent = parents[cursor[node]]
            cursor[node] += 1
            if state[parent] == on_path:
                first = depth - 1
                while path[first] != parent:
                    first -= 1
                return order[:0].copy(), path[first:depth].copy()
            if state[parent] == fresh:
                state[parent] = on_path
                path[depth] = parent
                depth += 1
    return order, path[:0].copy()


@compiled
def _close(order: Nodes, offsets: Nodes, parents: Nodes, max_edges: int) -> tuple[Nodes, Nodes]:
    """Return per node of `order` the number of its ancestors, and these one after the other.

    Both results are empty when there are more than `max_edges`.
    """
    nodes = len(offsets) - 1
    begin = np.zeros(nodes + 1, np.int64)
    place = np.zeros(nodes, np.int64)
    seen_by = np.full(nodes, -1, np.int64)
    found = np.empty(2 * len(parents) + 16, np.int64)
    used = 0
    for position in range(nodes):
        node = order[position]
        place[node] = position
        for edge in range(offsets[node], offsets[node + 1]):
            parent = parents[edge]
            first, last = begin[place[parent]], begin[place[parent] + 1]
            # -1 stands for the parent itself, the rest are its ancestors.
            for source in range(first - 1, last):
                ancestor = parent if source == first - 1 else found[source]
                if seen_by[ancestor] == node:
                    continue
                seen_by[ancestor] = node
                if used == max_edges:
                    return order[:0].copy(), found[:0].copy()
                if used == len(found):
                    grown = np.empty(2 * used, np.int64)
                    grown[:used] = found
                    found = grown
                found[used] = ancestor
                used += 1
        begin[position + 1] = used
    return np.diff(begin), found[:used].copy()
