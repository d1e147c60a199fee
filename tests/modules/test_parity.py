"""One run with the same seeds and batches: SparseAdam, and ours with weights in memory and on disk."""

import numpy as np
import pytest
import torch
from layers import weights

USERS, ITEMS, DIM, BATCH, EPOCHS = 300, 200, 16, 256, 10


def ratings():
    """Who liked what, and something each of them was not shown, drawn from hidden tastes."""
    draws = np.random.default_rng(0)
    tastes = draws.normal(size=(USERS, 4)) @ draws.normal(size=(4, ITEMS))
    liked = np.argwhere(tastes > np.quantile(tastes, 0.95, axis=1, keepdims=True))
    others = draws.integers(0, ITEMS, len(liked))
    return torch.from_numpy(np.column_stack([liked, others]))


def train(users, items, optimizer, scheduler):
    """Bayesian personalised ranking; returns the loss of every step."""
    data, losses = ratings(), []
    order = torch.Generator().manual_seed(1)
    for _ in range(EPOCHS):
        for batch in data[torch.randperm(len(data), generator=order)].split(BATCH):
            optimizer.zero_grad()
            user, better, worse = users(batch[:, 0]), items(batch[:, 1]), items(batch[:, 2])
            loss = -torch.nn.functional.logsigmoid((user * (better - worse)).sum(1)).mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def reference():
    torch.manual_seed(0)
    layers = [torch.nn.Embedding(rows, DIM, sparse=True) for rows in (USERS, ITEMS)]
    for layer in layers:
        torch.nn.init.normal_(layer.weight, std=0.1)
    start = [layer.weight.detach().clone() for layer in layers]
    optimizer = torch.optim.SparseAdam([layer.weight for layer in layers], lr=0.01)
    losses = train(*layers, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.7))
    return start, losses, [weights(layer) for layer in layers]


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_ten_epochs_agree_at_every_step(make, reference, kind):
    start, expected, trained = reference
    if kind == "memory":
        layers = [
            torch.nn.Embedding.from_pretrained(each.clone(), freeze=False, sparse=True) for each in start
        ]
    else:
        layers = [
            make.pretrained(each, name=name) for name, each in zip(("users", "items"), start, strict=True)
        ]
    optimizer = make.adam([layer.weight for layer in layers], lr=0.01, bias_correction="parameter")
    losses = train(*layers, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.7))
    assert len(losses) == len(expected) > 100
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    for layer, values in zip(layers, trained, strict=True):
        np.testing.assert_allclose(weights(layer), values, rtol=1e-4, atol=1e-6)
    assert expected[-1] < 0.5 * expected[0], "the task is one that is learned"
