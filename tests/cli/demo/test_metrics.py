import math

import numpy as np
import pytest

from dsa.cli.demo.graph import EdgeList, build_graph
from dsa.cli.demo.metrics import reconstruction, sample_nodes


def random_graph(seed, nodes=25):
    random = np.random.default_rng(seed)
    pairs = [(u, v) for u in range(nodes) for v in range(nodes) if u != v and random.random() < 0.12]
    children, ancestors = np.array(pairs).T
    return build_graph(EdgeList(tuple(map(str, range(nodes))), children, ancestors))


def distance(x, y, k):
    gaps = (1 - k * sum(a * a for a in x)) * (1 - k * sum(b * b for b in y))
    square = sum((a - b) ** 2 for a, b in zip(x, y, strict=True))
    return 2 / math.sqrt(k) * math.asinh(math.sqrt(k * square / gaps))


def slow_reconstruction(graph, points, k):
    """The definition, word by word: one list per node, sorted with ties against the embedding."""
    precisions, ranks = [], []
    for u in range(len(graph)):
        true = set(graph.ancestors_of(u).tolist())
        if not true:
            continue
        others = [x for x in range(len(graph)) if x != u]
        length = {x: distance(points[u], points[x], k) for x in others}
        order = sorted(others, key=lambda x: (length[x], x in true))
        hits, total = 0, 0.0
        for place, x in enumerate(order, start=1):
            if x in true:
                hits += 1
                total += hits / place
        precisions.append(total / len(true))
        ranks.extend(1 + sum(length[x] <= length[v] for x in others if x not in true) for v in true)
    return sum(precisions) / len(precisions), sum(ranks) / len(ranks)


@pytest.mark.parametrize("k", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_definition(seed, k):
    graph = random_graph(seed)
    points = np.random.default_rng(seed).normal(size=(len(graph), 3))
    points *= np.random.default_rng(seed + 1).random((len(graph), 1)) / np.linalg.norm(
        points, axis=1, keepdims=True
    )
    points /= math.sqrt(k)
    found = reconstruction(graph, points, k)
    expected = slow_reconstruction(graph, points.tolist(), k)
    assert found[:2] == pytest.approx(expected, rel=1e-12)
    assert found.edges == graph.edges


@pytest.mark.parametrize("seed", range(6))
def test_ties_count_against_the_embedding(seed):
    graph = random_graph(seed)
    # Few distinct positions: most distances are shared, and some are zero.
    places = np.array([[0.0, 0.0], [0.5, 0.0], [-0.5, 0.0], [0.0, 0.5]])
    points = places[np.random.default_rng(seed).integers(4, size=len(graph))]
    found = reconstruction(graph, points, 1.0)
    assert found[:2] == pytest.approx(slow_reconstruction(graph, points.tolist(), 1.0), rel=1e-12)


def test_all_points_equal_is_the_worst():
    graph = build_graph(EdgeList(("a", "b", "c", "d"), np.array([0]), np.array([1])))
    found = reconstruction(graph, np.zeros((4, 2)), 1.0)
    assert found == (1 / 3, 3.0, 1, 1)


def test_descendants_count_against_an_ancestor():
    """b is above a and below c; a is nearer to b than c is."""
    graph = build_graph(EdgeList(("a", "b", "c"), np.array([0, 0, 1]), np.array([1, 2, 2])))
    points = np.array([[0.30], [0.25], [0.0]])
    found = reconstruction(graph, points, 1.0)
    assert found.mean_rank == pytest.approx((1 + 1 + 2) / 3)
    assert found.mean_average_precision == pytest.approx((1.0 + 0.5) / 2)


def test_threads_and_samples_do_not_change_a_node():
    graph = random_graph(3, nodes=60)
    points = np.random.default_rng(0).uniform(-0.5, 0.5, (60, 3))
    whole = reconstruction(graph, points, 1.0)
    assert reconstruction(graph, points.astype(np.float32), 1.0, threads=3)[:2] == pytest.approx(
        whole[:2], abs=1e-3
    )
    assert reconstruction(graph, points, 1.0, threads=4) == whole
    parts = [
        reconstruction(graph, points, 1.0, np.array([node]))
        for node in range(60)
        if len(graph.ancestors_of(node))
    ]
    assert np.mean([part.mean_average_precision for part in parts]) == pytest.approx(
        whole.mean_average_precision
    )
    assert sum(part.mean_rank * part.edges for part in parts) / whole.edges == pytest.approx(whole.mean_rank)


def test_a_sample_is_of_nodes_with_an_ancestor():
    graph = build_graph(EdgeList(tuple("abcdef"), np.array([1, 3, 4, 5]), np.array([0, 0, 0, 0])))
    assert sample_nodes(graph, 10, seed=0).tolist() == [1, 3, 4, 5]
    chosen = sample_nodes(graph, 2, seed=0)
    assert len(set(chosen.tolist()) & {1, 3, 4, 5}) == 2
    assert chosen.tolist() == sample_nodes(graph, 2, seed=0).tolist()
