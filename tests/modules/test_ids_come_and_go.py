"""Ids that lose their rows, or get others, between forward and step: no gradient reaches another id."""

import numpy as np
import pytest
import torch

import dsa
from dsa import IdPolicy, init

DIM = 2
LR = 0.5


def layer(path, **options):
    zeros = init.Zeros(None, DIM)
    return dsa.DiskEmbedding(None, DIM, init=zeros, state="sgd", state_dir=path, **options)


def descent(module):
    return dsa.DiskSparseOptimizer(module.parameters(), "sgd", lr=LR)


def weights(module, ids):
    with torch.no_grad():
        return module.weight[torch.tensor(ids)].detach()[:, 0].tolist()


class Dictionary:
    """What a layer of ids is to do under gradient descent with gradients of ones, as a dictionary."""

    def __init__(self):
        self.weights, self.gradients = {}, {}

    def forward(self, ids):
        for each in ids:
            self.weights.setdefault(each, 0.0)
            self.gradients[each] = self.gradients.get(each, 0.0) + 1.0

    def delete(self, ids):
        for each in ids:
            self.weights.pop(each, None)

    def step(self):
        for each, gradient in self.gradients.items():
            if each in self.weights:
                self.weights[each] -= LR * gradient
        self.gradients = {}


@pytest.mark.parametrize("between", ["forward and backward", "backward and step"])
@pytest.mark.parametrize("successors", [[], [70, -80]])
def test_a_gradient_of_a_deleted_id_changes_no_row(tmp_path, between, successors):
    module = layer(tmp_path)
    optimizer = descent(module)
    loss = module(torch.tensor([7, 8, 7])).sum()
    if between == "backward and step":
        loss.backward()
    module.delete(torch.tensor([7]))
    module.insert(torch.tensor(successors, dtype=torch.int64))
    if between == "forward and backward":
        loss.backward()
    optimizer.step()
    assert weights(module, [8, 7, *successors]) == [-LR, 0.0, *(0.0 for _ in successors)]
    module.insert(torch.tensor([7, 9]))
    assert weights(module, [7, 9]) == [0.0, 0.0]
    module.close()


def test_what_an_eviction_by_the_cap_leaves_of_accumulated_gradients(tmp_path):
    module = layer(tmp_path, ids=IdPolicy(max_rows=3))
    optimizer = descent(module)
    module(torch.tensor([1, 2, 3])).sum().backward()
    module(torch.tensor([4, 5])).sum().backward()
    optimizer.step()
    left = module.ids().tolist()
    assert len(left) == 3
    assert set(left) > {4, 5}
    assert weights(module, left) == [-LR] * 3
    module.close()


def test_an_id_that_comes_again_in_another_row_keeps_its_gradient(tmp_path):
    module = layer(tmp_path)
    optimizer = descent(module)
    loss = module(torch.tensor([1, 2])).sum()
    module.delete(torch.tensor([1, 2]))
    module(torch.tensor([3, 1])).sum().backward()
    loss.backward()
    optimizer.step()
    assert weights(module, [1, 2, 3]) == [-2 * LR, 0.0, -LR]
    module.close()


def test_ids_in_any_order_accumulate_as_in_a_dictionary(tmp_path):
    generator = np.random.default_rng(5)
    module, model = layer(tmp_path), Dictionary()
    optimizer = descent(module)
    universe = np.concatenate([generator.integers(-(2**63), 2**63 - 1, 20), [-(2**63), 2**63 - 1, 0, -1]])
    for _ in range(120):
        ids = generator.choice(universe, generator.integers(1, 7)).tolist()
        action = generator.choice(["forward", "forward", "delete", "clip", "step"])
        if action == "forward":
            module(torch.tensor(ids)).sum().backward()
            model.forward(ids)
        elif action == "delete":
            module.delete(torch.tensor(ids))
            model.delete(ids)
        elif action == "clip":
            dsa.clip_grad_norm_(module.parameters(), 1e6)
        else:
            optimizer.step()
            optimizer.zero_grad()
            model.step()
        assert sorted(module.ids().tolist()) == sorted(model.weights)
        assert weights(module, list(model.weights)) == list(model.weights.values())
    module.close()
