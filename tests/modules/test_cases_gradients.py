"""Cases from the field about gradients and the mathematics of an update, with the values reported there."""

import numpy as np
import pytest
import torch
from layers import MEMORY_AND_DISK, backward, row, step, weights

from dsa import conventions

both = pytest.mark.parametrize("kind", MEMORY_AND_DISK)


@both
def test_c01_two_backwards_before_one_step(make, kind):
    layer, optimizer = make.pair(kind, 10, 3)
    backward(layer, [7, 1, 3])
    backward(layer, [8, 1, 3])
    optimizer.step()
    expected = np.zeros((10, 3))
    expected[[1, 3]], expected[[7, 8]] = -0.09999998, -0.09999996
    np.testing.assert_allclose(weights(layer), expected, rtol=1e-7)
    assert not weights(layer)[[0, 2, 4, 5, 6, 9]].any()
    records = make.records(layer, 10, 3)
    assert records["t"].tolist() == [0, 1, 0, 1, 0, 0, 0, 1, 1, 0]
    np.testing.assert_allclose(records["v"][[1, 3]], 0.004, rtol=1e-5)


@pytest.mark.parametrize("order", [[1.0, 2.0, -4.0], [2.0, -4.0, 1.0], [-4.0, 1.0, 2.0]])
@both
def test_c02_duplicates_are_summed_and_then_squared(make, kind, order):
    layer, optimizer = make.pair(kind, 5, 1)
    (layer(torch.tensor([2, 2, 2]))[:, 0] * torch.tensor(order)).sum().backward()
    optimizer.step()
    record = make.records(layer, 5, 1)[2]
    assert record["m"][0] == np.float32(-0.1)
    np.testing.assert_allclose(record["v"][0], 0.001, rtol=1e-5)
    assert record["t"] == 1
    np.testing.assert_allclose(row(layer, 2), 0.09999996, rtol=1e-7)


@both
def test_c02_permutations_give_the_same_bits(make, kind):
    results = set()
    for number, order in enumerate([[1.0, 2.0, -4.0], [-4.0, 2.0, 1.0], [2.0, 1.0, -4.0]]):
        where = f"state{number}"
        layer = make.plain(5, 1) if kind == "memory" else make.disk(5, 1, where=where)
        optimizer = make.adam(layer, where=where)
        (layer(torch.tensor([2, 2, 2]))[:, 0] * torch.tensor(order)).sum().backward()
        optimizer.step()
        results.add((make.records(layer, 5, 1, where=where).tobytes(), weights(layer).numpy().tobytes()))
    assert len(results) == 1


@both
def test_c03_one_table_looked_up_several_times(make, kind):
    layer, optimizer = make.pair(kind, 5, 1)
    loss = sum(layer(torch.tensor(ids)).sum() for ids in ([1, 2], [2, 3], [3, 1]))
    loss.backward()
    assert layer.weight.grad.to_dense()[:, 0].tolist() == [0.0, 2.0, 2.0, 2.0, 0.0]
    optimizer.step()
    assert make.records(layer, 5, 1)["t"].tolist() == [0, 1, 1, 1, 0]


@both
def test_c03_micro_batches(make, kind):
    layer, optimizer = make.pair(kind, 4, 1)
    for k in range(4):
        (layer(torch.tensor([k % 2, k % 3])).sum() / 4).backward()
    np.testing.assert_allclose(layer.weight.grad.to_dense()[:, 0], [1.0, 0.75, 0.25, 0.0])
    optimizer.step()
    records = make.records(layer, 4, 1)
    assert records["t"].tolist() == [1, 1, 1, 0]
    np.testing.assert_allclose(records["m"][:, 0], [0.1, 0.075, 0.025, 0.0], rtol=1e-6)


@both
def test_c03_a_row_is_read_and_written_once_a_step(make, kind):
    layer, optimizer = make.pair(kind, 1000, 2)
    draws = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 1000, (10_000,), generator=draws) for _ in range(64)]
    for batch in batches:
        backward(layer, batch)
    before = optimizer.stats()
    optimizer.step()
    after = optimizer.stats()
    assert after["rows_read"] - before["rows_read"] == 1000
    assert after["rows_written"] == 1000
    if kind == "disk":
        assert before["rows_read"] == sum(len(batch.unique()) for batch in batches)
        assert layer.weight.grad._nnz() == 1000, "gradients of several lookups are merged as they arrive"


@pytest.mark.parametrize("ids", [[0, 0], []])
@both
def test_c04_an_empty_gradient_changes_nothing(make, kind, ids):
    layer = make.layer(kind, 5, 1, 0.25, padding_idx=0)
    optimizer = make.adam(layer)
    step(layer, optimizer, [1, 2])
    before, records = weights(layer), make.records(layer, 5, 1).tobytes()
    step(layer, optimizer, torch.tensor(ids, dtype=torch.int64))
    assert layer.weight.grad._nnz() == 0
    assert torch.equal(weights(layer), before)
    assert make.records(layer, 5, 1).tobytes() == records
    step(layer, optimizer, [3])
    assert make.records(layer, 5, 1)["t"].tolist() == [0, 1, 1, 1, 0]


@pytest.mark.parametrize("named", [False, True])
def test_c05_a_dense_gradient_names_its_parameter(make, named):
    layer = torch.nn.Embedding(10, 4)
    parameters = layer.named_parameters() if named else layer.parameters()
    optimizer = make.adam(parameters)
    backward(layer, [1])
    name = "weight" if named else "param_0"
    with pytest.raises(
        RuntimeError,
        match=rf"{name!r} of shape \(10, 4\) got a dense gradient.*sparse=True.*another optimizer",
    ):
        optimizer.step()
    assert not make.records(name, 10, 4, weights=False)["t"].any()
    assert optimizer.global_step == 0


def test_c05_a_dense_gradient_stops_the_whole_step(make):
    sparse, dense = make.plain(10, 4), torch.nn.Embedding(10, 4)
    optimizer = make.adam([sparse.weight, dense.weight])
    (sparse(torch.tensor([1])).sum() + dense(torch.tensor([1])).sum()).backward()
    with pytest.raises(RuntimeError, match="'param_1'"):
        optimizer.step()
    assert not weights(sparse).any()


def test_c05_a_layer_of_another_kind_is_refused(make):
    layers = torch.nn.Sequential(make.plain(10, 4), torch.nn.Linear(4, 1))
    optimizer = make.adam(layers.named_parameters())
    layers(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"'1.weight' of shape \(1, 4\).*split_parameters"):
        optimizer.step()
    layers[1].weight.grad = None
    with pytest.raises(RuntimeError, match=r"'1.bias' of shape \(1,\).*split_parameters"):
        optimizer.step()
    assert optimizer.global_step == 0
    assert not weights(layers[0]).any()


def late_update(make, others, **options):
    """The first step of row 0 after `others` steps of row 1, in memory."""
    parameter = torch.nn.Parameter(torch.zeros(2, 1))
    optimizer = make.adam([parameter], lr=1e-3, where=f"late{others}", **options)
    for index in [1] * others + [0]:
        parameter.grad = torch.sparse_coo_tensor([[index]], [[1.0]], (2, 1), check_invariants=True)
        optimizer.step()
    return parameter[0].item()


def test_c06_late_rows_take_a_normal_first_step_by_default(make):
    for others in (0, 9, 999):
        np.testing.assert_allclose(late_update(make, others), -0.000999999684, rtol=1e-6)


def test_c06_late_rows_follow_torch_on_request(make):
    expected = {0: -0.000999999684, 9: -0.000484426233, 999: -0.00251456592}
    for others, value in expected.items():
        update = late_update(make, others, bias_correction="parameter")
        np.testing.assert_allclose(update, value, rtol=2e-6)


EPS = {
    conventions.TORCH_SPARSE_ADAM: [-0.00099999968, -0.00099684769, -0.00024025307, -3.1523e-6],
    None: [-0.00099999968, -0.00099684769, -0.00024025307, -3.1523e-6],
    conventions.DSA_ADAM: [-0.00099999999, -0.0009999, -0.00090909, -9.0909e-5],
}


@pytest.mark.parametrize("convention", EPS, ids=["torch", "default", "paper"])
@both
def test_c07_where_epsilon_sits(make, kind, convention):
    layer, optimizer = make.pair(kind, 4, 1, lr=1e-3, convention=convention)
    (layer(torch.arange(4))[:, 0] * torch.tensor([1.0, 1e-4, 1e-7, 1e-9])).sum().backward()
    optimizer.step()
    np.testing.assert_allclose(weights(layer)[:, 0], EPS[convention], rtol=1e-5)


@both
def test_c07_three_steps(make, kind):
    layer, optimizer = make.pair(kind, 1, 1)
    for gradient, expected in ((1.0, -0.0999999683772), (1.0, -0.199999946011), (-4.0, -0.165516589465)):
        step(layer, optimizer, [0], gradient)
        np.testing.assert_allclose(row(layer, 0), expected, rtol=1e-6)


@pytest.mark.parametrize(("mode", "expected"), [("decoupled", 0.89), ("l2", 0.9)])
@both
def test_c08_weight_decay_of_the_rows_of_a_batch(make, kind, mode, expected):
    layer, optimizer = make.pair(kind, 2, 1, 1.0, weight_decay=0.1, weight_decay_mode=mode)
    step(layer, optimizer, [0])
    np.testing.assert_allclose(row(layer, 0), expected, rtol=1e-6)
    assert row(layer, 1) == [1.0]


def test_c08_an_unknown_mode_is_refused(make):
    with pytest.raises(ValueError, match="weight_decay_mode='adamw' is not known"):
        make.adam(make.plain(2, 1), weight_decay_mode="adamw")


def test_c08_decoupled_decay_equals_adamw_where_every_row_is_touched(make):
    layer, optimizer = make.pair(
        "disk", 6, 3, 1.0, weight_decay=0.1, weight_decay_mode="decoupled", eps=1e-15
    )
    dense = torch.nn.Embedding(6, 3)
    torch.nn.init.ones_(dense.weight)
    reference = torch.optim.AdamW(dense.parameters(), lr=0.1, weight_decay=0.1, eps=1e-15)
    for k in range(5):
        for each, method in ((layer, optimizer), (dense, reference)):
            method.zero_grad()
            (each(torch.arange(6)) * torch.linspace(-1, 2 + k, 18).reshape(6, 3)).sum().backward()
            method.step()
    np.testing.assert_allclose(weights(layer), dense.weight.detach(), rtol=1e-5, atol=1e-6)
