import numpy as np
import pytest

from dsa.cli.demo.graph import EdgeList, build_graph, parse_edges
from dsa.cli.demo.sampling import Sampler
from dsa.cli.demo.settings import default_settings


@pytest.fixture(scope="module")
def graph():
    """A binary tree's closure: node i is below (i - 1) // 2."""
    pairs, nodes = [], 127
    for node in range(nodes):
        ancestor = node
        while ancestor:
            ancestor = (ancestor - 1) // 2
            pairs.append((node, ancestor))
    children, ancestors = np.array(pairs).T
    return build_graph(EdgeList(tuple(map(str, range(nodes))), children, ancestors))


def sampler(graph, **given):
    return Sampler(graph, default_settings(graph.edges, {"epochs": 10, "burn_in": 4, **given}))


def flat(batches):
    return [array.tolist() for batch in batches for array in batch]


@pytest.mark.parametrize("epoch", [0, 7])
def test_an_epoch_is_a_pure_function_of_seed_and_epoch(graph, epoch):
    first = flat(sampler(graph, seed=5).batches(epoch))
    assert flat(sampler(graph, seed=5).batches(epoch)) == first
    assert flat(sampler(graph, seed=6).batches(epoch)) != first
    assert flat(sampler(graph, seed=5).batches(epoch + 1)) != first


def test_a_later_start_gives_the_same_remaining_batches(graph):
    whole = list(sampler(graph).batches(2))
    for start in (0, 1, len(whole) - 1, len(whole)):
        assert flat(sampler(graph).batches(2, start)) == flat(whole[start:])


@pytest.mark.parametrize("batch_size", [1, 64, 100, 10_000])
def test_every_edge_is_seen_once_an_epoch(graph, batch_size):
    source = sampler(graph, batch_size=batch_size)
    batches = list(source.batches(5))
    assert len(batches) == -(-graph.edges // batch_size)
    seen = [
        (int(b.rows[child]), int(b.rows[true]))
        for b in batches
        for child, true in zip(b.children, b.candidates[:, 0], strict=True)
    ]
    assert sorted(seen) == sorted(zip(graph.children.tolist(), graph.ancestors.tolist(), strict=True))


@pytest.mark.parametrize("epoch", [0, 7])
def test_negatives_are_neither_the_child_nor_its_ancestors(graph, epoch):
    kinds = set()
    for batch in sampler(graph).batches(epoch):
        for child, row in zip(batch.rows[batch.children], batch.candidates[:, 1:], strict=True):
            negatives = batch.rows[row[row >= 0]]
            assert not set(negatives.tolist()) & {int(child), *graph.ancestors_of(child).tolist()}
            kinds |= {int(child) in graph.ancestors_of(node) for node in negatives}
    assert kinds == {False, True}, "descendants of the child belong to the negatives"


def test_a_batch_holds_the_rows_it_uses_and_no_others(graph):
    for epoch in (0, 7):
        for batch in sampler(graph).batches(epoch):
            used = np.union1d(batch.children, batch.candidates[batch.candidates >= 0])
            assert used.tolist() == list(range(len(batch.rows)))
            assert np.all(np.diff(batch.rows) > 0)


def test_the_burn_in_has_its_own_number_of_negatives(graph):
    source = sampler(graph, negatives=20, burn_in_negatives=3, batch_size=50)
    for epoch, count in ((3, 3), (4, 20)):
        for batch in source.batches(epoch):
            assert batch.candidates.shape[1] == 1 + count
            assert np.all(batch.candidates >= 0)


def test_a_pool_bounds_the_rows_of_a_step(graph):
    for batch in sampler(graph, pool=30, batch_size=16, negatives=25).batches(6):
        assert len(batch.rows) <= 16 + 16 + 30


def frequencies(source, epochs):
    drawn = [
        batch.rows[batch.candidates[:, 1:][batch.candidates[:, 1:] >= 0]]
        for e in epochs
        for batch in source.batches(e)
    ]
    return np.bincount(np.concatenate(drawn), minlength=127)


def test_the_burn_in_prefers_general_nodes(graph):
    """Nodes 1 and 2 have 62 descendants each, a leaf none; uniform sampling knows no such difference."""
    by_degree = frequencies(sampler(graph, burn_in=10), range(10))
    uniform = frequencies(sampler(graph, burn_in=10, burn_in_sampling="uniform"), range(10))
    inner, leaves = slice(1, 3), slice(63, 127)
    assert by_degree[inner].mean() > 15 * by_degree[leaves].mean()
    assert uniform[inner].mean() < 2 * uniform[leaves].mean()


def test_a_graph_too_small_for_negatives_has_gaps():
    graph = build_graph(parse_edges(["a\tb", "c\tb"]))
    batch = next(sampler(graph, negatives=4, pool=50, burn_in=0).batches(9))
    # The only node that is neither a nor above it is c, drawn again and again.
    for child, row in zip(batch.children, batch.candidates, strict=True):
        assert set(row[1:].tolist()) <= {-1, 0, 1, 2} - {int(child), int(row[0])}
    alone = build_graph(parse_edges(["a\tb"]))
    only = next(sampler(alone, burn_in=0).batches(9))
    assert only.rows.tolist() == [0, 1]
    assert np.all(only.candidates[:, 1:] == -1)
