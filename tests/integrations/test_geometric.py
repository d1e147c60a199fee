"""PyTorch Geometric: Node2Vec, MetaPath2Vec, and models of knowledge graphs."""

import pytest
import torch
from recipes import assert_close, needs, recipe, weights

pytestmark = needs("torch_geometric")
NODES = 60


def edges(rows=NODES, columns=NODES, count=400):
    draws = torch.Generator().manual_seed(1)
    return torch.stack(
        [
            torch.randint(0, rows, (count,), generator=draws),
            torch.randint(0, columns, (count,), generator=draws),
        ]
    )


def node2vec(monkeypatch):
    """The library's class, whose walks come from `pyg-lib` where there is one, or from a walk of ours."""
    from torch_geometric.nn.models import node2vec as home

    if not home.WITH_PYG_LIB:  # its wheels are not on the package index
        monkeypatch.setattr(home, "WITH_PYG_LIB", True)
        monkeypatch.setattr(torch.ops.pyg, "random_walk", walk, raising=False)
    return home.Node2Vec(edges(), 8, 6, 4, num_nodes=NODES, sparse=True)


def walk(rowptr, col, start, length, p, q):
    steps = [start]
    for _ in range(length):
        begin, count = rowptr[steps[-1]], rowptr[steps[-1] + 1] - rowptr[steps[-1]]
        place = begin + (torch.rand(len(start)) * count).long()
        steps.append(torch.where(count > 0, col[place.clamp(max=len(col) - 1)], steps[-1]))
    return torch.stack(steps, dim=1)


def metapath2vec(monkeypatch):
    from torch_geometric.nn import MetaPath2Vec

    graph = {("a", "to", "b"): edges(NODES, 30), ("b", "to", "a"): edges(30, NODES)}
    return MetaPath2Vec(
        graph,
        8,
        [("a", "to", "b"), ("b", "to", "a")],
        6,
        4,
        num_nodes_dict={"a": NODES, "b": 30},
        sparse=True,
    )


def train_walks(model, optimizer, steps=40):
    losses = []
    for number in range(steps):
        torch.manual_seed(number)
        positive, negative = next(iter(model.loader(batch_size=16, shuffle=True)))
        optimizer.zero_grad()
        loss = model.loss(positive, negative)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", [node2vec, metapath2vec])
def test_walks(kind, monkeypatch):
    torch.manual_seed(0)
    own = kind(monkeypatch)
    torch.manual_seed(0)
    model = kind(monkeypatch)
    optimizer = recipe("node2vec")["on_disk"](model)
    expected = train_walks(own, torch.optim.SparseAdam(own.parameters(), lr=0.01))
    assert_close(train_walks(model, optimizer), expected)
    torch.testing.assert_close(weights(model.embedding), own.embedding.weight.data, rtol=1e-3, atol=1e-5)
    optimizer.close()


@pytest.mark.parametrize("name", ["TransE", "DistMult"])
def test_knowledge_graphs(name):
    import torch_geometric.nn.kge as kge

    def made():
        torch.manual_seed(0)
        return getattr(kge, name)(NODES, 3, 8, sparse=True)

    head, tail = edges()
    relation = (head + tail) % 3

    def train(model, optimizer):
        losses = []
        for number in range(40):
            torch.manual_seed(number)
            batch = next(iter(model.loader(head, relation, tail, batch_size=32, shuffle=True)))
            optimizer.zero_grad()
            loss = model.loss(*batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    own, model = made(), made()
    optimizer = recipe("kge")["on_disk"](model)
    expected = train(own, torch.optim.SparseAdam(own.parameters(), lr=0.01))
    assert_close(train(model, optimizer), expected)
    ranks = [each.eval().test(head[:20], relation[:20], tail[:20], 16, log=False) for each in (own, model)]
    assert ranks[1] == pytest.approx(ranks[0])
    optimizer.close()
