import numpy as np
import pytest

from dsa.cli.demo.closure import transitive_closure
from dsa.cli.demo.graph import EdgeList, parse_edges
from dsa.errors import GraphError


def pairs(edges):
    return sorted(zip(edges.children.tolist(), edges.ancestors.tolist(), strict=True))


def closure_by_search(nodes, edges):
    """Follow every path from every node."""
    parents = [{v for u, v in edges if u == node} for node in range(nodes)]
    found = []
    for node in range(nodes):
        seen, waiting = set(), list(parents[node])
        while waiting:
            ancestor = waiting.pop()
            if ancestor not in seen:
                seen.add(ancestor)
                waiting.extend(parents[ancestor])
        found.extend((node, ancestor) for ancestor in seen)
    return sorted(found)


@pytest.mark.parametrize("seed", range(8))
def test_it_agrees_with_a_search_from_every_node(seed):
    random = np.random.default_rng(seed)
    nodes = int(random.integers(2, 40))
    order = random.permutation(nodes)
    later = [(i, j) for i in range(nodes) for j in range(i) if random.random() < 0.15] or [(1, 0)]
    edges = [(int(order[i]), int(order[j])) for i, j in later]
    children, ancestors = np.array(edges).T
    closed = transitive_closure(EdgeList(tuple(map(str, range(nodes))), children, ancestors))
    assert pairs(closed) == closure_by_search(nodes, edges)


def test_a_closure_is_its_own_closure():
    closed = transitive_closure(parse_edges(["a\tb", "b\tc", "c\td", "x\tc"]))
    assert pairs(transitive_closure(closed)) == pairs(closed)
    assert len(closed.children) == 3 + 2 + 1 + 2


def test_a_long_chain_needs_no_recursion():
    nodes = 3000
    edges = EdgeList(tuple(map(str, range(nodes))), np.arange(nodes - 1), np.arange(1, nodes))
    assert len(transitive_closure(edges).children) == nodes * (nodes - 1) // 2


def test_self_loops_stay_counted():
    assert transitive_closure(parse_edges(["a\ta", "a\tb"])).self_loops == 1


def test_a_cycle_is_shown():
    with pytest.raises(
        GraphError, match=r"form a cycle of 3: (b -> c -> d -> b|c -> d -> b -> c|d -> b -> c -> d): "
    ) as caught:
        transitive_closure(parse_edges(["a\tb", "b\tc", "c\td", "d\tb", "d\te"]))
    assert "remove one of these edges" in str(caught.value)


def test_a_long_cycle_is_shown_in_part():
    lines = [f"n{i}\tn{(i + 1) % 50}" for i in range(50)]
    with pytest.raises(GraphError, match=r"cycle of 50: n0 -> .* -> n7 -> \.\.\.: "):
        transitive_closure(parse_edges(lines))


def test_a_closure_beyond_the_bound_is_refused():
    edges = parse_edges(["a\tb", "b\tc", "c\td"])
    assert len(transitive_closure(edges, max_edges=6).children) == 6
    with pytest.raises(GraphError, match="more than 5 edges: take a part of the graph"):
        transitive_closure(edges, max_edges=5)
