"""Clipping, clearing and splitting where some gradients are sparse."""

import copy

import numpy as np
import pytest
import torch
from layers import MEMORY_AND_DISK, backward, step, weights

from dsa import clip_grad_norm_, split_parameters

both = pytest.mark.parametrize("kind", MEMORY_AND_DISK)
norms = pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, 3.0, float("inf")])


def mixed_model(make, kind):
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"table": make.layer(kind, 10, 3), "top": torch.nn.Linear(3, 2)})


def mixed_loss(model):
    ids = torch.tensor([1, 4, 1, 2])
    rows = model["table"](ids) + model["table"](ids[:2].repeat(2))
    return (model["top"](rows + 0.5) * torch.arange(1.0, 9.0).reshape(4, 2)).sum()


def dense_twin(model):
    twin = torch.nn.ModuleDict({"table": torch.nn.Embedding(10, 3), "top": copy.deepcopy(model["top"])})
    twin["table"].weight.data = weights(model["table"])
    return twin


def dense_gradients(model):
    return [
        gradient.to_dense() if gradient.is_sparse else gradient
        for gradient in (each.grad for each in model.parameters())
    ]


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
@norms
@both
def test_clipping_is_torchs_of_the_dense_gradients(make, kind, norm_type, max_norm):
    model = mixed_model(make, kind)
    twin = dense_twin(model)
    for each in (model, twin):
        mixed_loss(each).backward()
    expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), max_norm, norm_type)
    norm = clip_grad_norm_(model.parameters(), max_norm, norm_type)
    np.testing.assert_allclose(norm, expected, rtol=1e-5)
    for ours, theirs in zip(dense_gradients(model), dense_gradients(twin), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    assert model["table"].weight.grad.is_sparse


@norms
def test_clipping_of_empty_gradients(make, norm_type):
    layer = make.disk(5, 2)
    layer(torch.tensor([], dtype=torch.int64)).sum().backward()
    assert clip_grad_norm_(layer.parameters(), 1.0, norm_type) == 0.0
    other = make.plain(5, 2)
    backward(other, [1])
    expected = torch.linalg.vector_norm(torch.ones(2), norm_type)
    np.testing.assert_allclose(
        clip_grad_norm_([*layer.parameters(), other.weight], 10.0, norm_type), expected
    )


def test_clipping_without_gradients(make):
    assert clip_grad_norm_(make.plain(5, 2).parameters(), 1.0) == 0.0
    assert clip_grad_norm_([], 1.0) == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_clipping_of_one_parameter_with_half_gradients(make, dtype):
    layer = make.disk(5, 2, dtype=dtype)
    backward(layer, [1, 2], 100.0)
    np.testing.assert_allclose(clip_grad_norm_(layer.weight, 1.0), 200.0, rtol=1e-2)
    np.testing.assert_allclose(layer.weight.grad.to_dense()[1].float(), 0.5, rtol=1e-2)
    layer.weight.grad = None
    backward(layer, [1, 2, 3], 30_000.0)
    assert torch.isfinite(clip_grad_norm_(layer.weight, 1.0)), "the norm is taken in float32"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_lookups_in_other_dtypes_are_merged(make, dtype):
    """torch's CPU kernels add neither float16 gradients nor, if not coalesced, bfloat16 ones."""
    layer = make.disk(5, 2, dtype=dtype)
    optimizer = make.adam(layer)
    backward(layer, [1, 2, 2])
    backward(layer, [2, 3])
    clip_grad_norm_(layer.parameters(), 1e6)
    optimizer.step()
    np.testing.assert_allclose(make.records(layer, 5, 2)["m"][:, 0], [0.0, 0.1, 0.3, 0.1, 0.0], rtol=1e-6)


def test_a_clipped_gradient_is_the_one_that_is_used(make):
    layer, optimizer = make.pair("disk", 5, 1)
    backward(layer, [1, 1, 1])
    clip_grad_norm_(layer.parameters(), 1.5)
    optimizer.step()
    np.testing.assert_allclose(make.records(layer, 5, 1)["m"][1], 0.15, rtol=1e-5)


ORDERS = {
    "cleared to None": "bnsbs",
    "cleared to zero": "bzsbs",
    "zero, then a step": "bszsbs",
    "zero twice": "bszszsbzs",
    "an empty batch first": "esbsebs",
    "accumulated over steps": "bsbsbs",
    "coalesced by the caller": "bcsbczsbs",
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@both
def test_ways_to_clear_and_accumulate(make, kind, order):
    """Compared with SparseAdam: backward, empty backward, step, zero_grad to None or to zero, coalesce."""
    reference = make.plain(6, 2)
    ours = make.layer(kind, 6, 2)
    optimizers = (
        torch.optim.SparseAdam(reference.parameters(), lr=0.1),
        make.adam(ours, bias_correction="parameter"),
    )
    for number, action in enumerate(order):
        for layer, optimizer in zip((reference, ours), optimizers, strict=True):
            if action == "b":
                backward(layer, [1, 3, 3], 1.0 + number)
            elif action == "e":
                backward(layer, torch.tensor([], dtype=torch.int64))
            elif action == "s":
                optimizer.step()
            elif action == "c":
                layer.weight.grad = layer.weight.grad.coalesce()
            else:
                optimizer.zero_grad(set_to_none=action == "n")
    np.testing.assert_allclose(weights(ours), weights(reference), rtol=1e-5, atol=1e-7)


@both
def test_a_step_leaves_the_gradient_as_it_is(make, kind):
    layer, optimizer = make.pair(kind, 6, 2)
    backward(layer, [1, 3, 3])
    before = layer.weight.grad.to_dense()
    optimizer.step()
    assert torch.equal(layer.weight.grad.to_dense(), before)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@both
def test_a_gradient_with_a_graph_can_be_used(make, kind):
    layer, optimizer = make.pair(kind, 6, 2, 0.5)
    layer(torch.tensor([1, 2])).square().sum().backward(create_graph=True)
    np.testing.assert_allclose(clip_grad_norm_(layer.parameters(), 100.0), 2.0)
    optimizer.step()
    layer.weight.grad = None
    np.testing.assert_allclose(make.records(layer, 6, 2)["m"][1], 0.1, rtol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@both
def test_a_gradient_that_is_not_finite_changes_nothing(make, kind, value):
    layer, optimizer = make.pair(kind, 6, 2)
    step(layer, optimizer, [1])
    before, records = weights(layer), make.records(layer, 6, 2).tobytes()
    optimizer.zero_grad()
    (layer(torch.tensor([1, 2])) * torch.tensor([[1.0], [value]])).sum().backward()
    with pytest.raises(
        ValueError,
        match="can't represent in row 1 of the batch, which is row 2 of the table: nothing was changed",
    ):
        optimizer.step()
    assert torch.equal(weights(layer), before)
    assert make.records(layer, 6, 2).tobytes() == records
    step(layer, optimizer, [1])
    assert optimizer.global_step == 2


def test_one_bad_table_stops_the_step_of_all(make):
    good, bad = make.plain(4, 2), make.disk(4, 2)
    optimizer = make.adam([good.weight, bad.weight])
    (good(torch.tensor([1])).sum() + bad(torch.tensor([1])).sum() * float("nan")).backward()
    with pytest.raises(ValueError, match="'embedding'"):
        optimizer.step()
    assert not weights(good).any()
    assert not make.records("param_0", 4, 2, weights=False)["t"].any()


def test_splitting_a_model(make):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.disk = make.disk(4, 2)
            self.top = torch.nn.Linear(2, 1)
            self.inner = torch.nn.Sequential(make.plain(4, 2), torch.nn.EmbeddingBag(4, 2, sparse=True))
            self.dense = torch.nn.Embedding(4, 2)
            self.tied = self.inner[0]
            self.free = torch.nn.Parameter(torch.zeros(3, 3))

    model = Model()
    sparse, dense = split_parameters(model)
    assert [id(each) for each in sparse] == [
        id(each.weight) for each in (model.disk, model.inner[0], model.inner[1])
    ]
    assert [id(each) for each in dense] == [
        id(each) for each in (model.free, *model.top.parameters(), model.dense.weight)
    ]
    assert {id(each) for each in (*sparse, *dense)} == {id(each) for each in model.parameters()}
    assert split_parameters(torch.nn.Linear(2, 1))[0] == []


def test_the_recipe_of_two_optimizers(make):
    model = mixed_model(make, "disk")
    sparse, dense = split_parameters(model)
    optimizers = make.adam(sparse), torch.optim.AdamW(dense, lr=0.1)
    before = [each.clone() for each in (weights(model["table"]), model["top"].weight.detach())]
    mixed_loss(model).backward()
    for optimizer in optimizers:
        optimizer.step()
    after = weights(model["table"]), model["top"].weight
    assert [torch.equal(old, new) for old, new in zip(before, after, strict=True)] == [False, False]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_torchs_own_clipping_is_that_of_dsa(make, norm_type):
    """Trainers call it. Two lookups leave duplicates in a gradient."""
    layer, head = make.disk(9, 4, 0.5), torch.nn.Linear(4, 1)
    parameters = [layer.weight, *head.parameters()]
    found = []
    for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        for parameter in parameters:
            parameter.grad = None
        (head(layer(torch.tensor([1, 2, 1]))).sum() + head(layer(torch.tensor([2, 5]))).sum()).backward()
        total = clip(parameters, 0.7, norm_type)
        found.append([total, *(parameter.grad.to_dense() for parameter in parameters)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(torch.nn.utils.clip_grad_norm_(parameters, 9.0, norm_type), torch.tensor(0.7))


def test_torchs_clipping_of_values(make):
    layer = make.disk(9, 2)
    (
        layer(torch.tensor([1])) * 0.3 + layer(torch.tensor([1])) * 0.4 - 3.0 * layer(torch.tensor([2]))
    ).sum().backward()
    torch.nn.utils.clip_grad_value_(layer.parameters(), 0.5)
    assert layer.weight.grad.to_dense()[:3, 0].tolist() == [0.0, 0.5, -0.5]


def test_a_gradient_that_was_looked_at_is_the_same_one(make):
    layer = make.disk(9, 2)
    layer(torch.tensor([1])).sum().backward()
    gradient = layer.weight.grad
    layer(torch.tensor([1])).sum().backward()
    assert gradient is layer.weight.grad
    assert layer.weight.grad.to_dense()[1].tolist() == [2.0, 2.0]
    gradient.zero_()
    assert layer.weight.grad._nnz() == 0
    assert type(gradient + gradient) is torch.Tensor
