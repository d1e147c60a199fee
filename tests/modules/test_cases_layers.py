"""Cases from the field about layers and about loading state, with the values that were reported."""

import numpy as np
import pytest
import torch
from layers import MEMORY_AND_DISK, fit, row, step, weights

both = pytest.mark.parametrize("kind", MEMORY_AND_DISK)

BAG_IDS, BAG_OFFSETS = torch.tensor([1, 2, 2, 4]), torch.tensor([0, 3])
BAGS = [
    ("sum", None, {1: 1.0, 2: 2.0, 4: 1.0}),
    ("mean", None, {1: 1 / 3, 2: 2 / 3, 4: 1.0}),
    ("sum", [0.5, 1.0, 2.0, -1.0], {1: 0.5, 2: 3.0, 4: -1.0}),
]


def bag(make, kind, mode):
    if kind == "disk":
        return make.bag(6, 2, mode=mode)
    layer = torch.nn.EmbeddingBag(6, 2, mode=mode, sparse=True)
    torch.nn.init.zeros_(layer.weight)
    return layer


@pytest.mark.parametrize(("mode", "factors", "expected"), BAGS)
@both
def test_c22_gradients_of_bags(make, kind, mode, factors, expected):
    layer = bag(make, kind, mode)
    optimizer = make.adam(layer)
    layer(BAG_IDS, BAG_OFFSETS, None if factors is None else torch.tensor(factors)).sum().backward()
    gradient = layer.weight.grad.to_dense()
    assert {
        index: value.tolist() for index, value in enumerate(gradient) if value.any()
    }.keys() == expected.keys()
    optimizer.step()
    values = layer(torch.arange(6)[:, None]).detach()
    for index in range(6):
        given = expected.get(index, 0.0)
        np.testing.assert_allclose(gradient[index], given, rtol=1e-6)
        np.testing.assert_allclose(values[index], -0.1 * np.sign(given), rtol=1e-5)


def test_c22_torch_refuses_the_maximum_of_sparse_bags(make):
    layer = bag(make, "memory", "max")
    optimizer = make.adam(layer)
    with pytest.raises(ValueError, match="max mode does not support sparse weights"):
        layer(BAG_IDS, BAG_OFFSETS)
    optimizer.step()
    assert not layer.weight.any()


@both
def test_c23_max_norm_rewrites_the_rows_looked_up(make, kind):
    layer = make.layer(kind, 4, 2, 3.0, max_norm=1.0)
    optimizer = make.adam(layer)
    output = layer(torch.tensor([1]))
    np.testing.assert_allclose(output.detach(), [[0.7071068] * 2], rtol=1e-6)
    output.sum().backward()
    optimizer.step()
    if kind == "disk":
        np.testing.assert_allclose(make.records(layer, 4, 2)["w"][1], 0.6071068, rtol=1e-6)
    np.testing.assert_allclose(layer(torch.tensor([1])).detach(), [[0.6071068] * 2], rtol=1e-6)
    assert layer(torch.tensor([1])).norm() <= 1.0
    layer.max_norm = None
    assert [row(layer, index) for index in (0, 2, 3)] == [[3.0, 3.0]] * 3
    np.testing.assert_allclose(row(layer, 1), 0.6071068, rtol=1e-6)


def test_c24_a_penalty_on_a_whole_table(make):
    layer, optimizer = make.pair("memory", 10, 4)
    (layer(torch.tensor([1])).sum() + 0.01 * layer.weight.pow(2).sum()).backward()
    with pytest.raises(
        RuntimeError, match="tied to another layer or penalised as a whole: penalise the rows looked up"
    ):
        optimizer.step()
    assert not layer.weight.any()


def test_c24_a_tied_output_layer(make):
    layer, optimizer = make.pair("memory", 10, 4, 0.1)
    output = torch.nn.Linear(4, 10, bias=False)
    output.weight = layer.weight
    output(layer(torch.tensor([1]))).sum().backward()
    with pytest.raises(RuntimeError, match=r"got a dense gradient.*tied to another layer"):
        optimizer.step()


def test_c24_a_table_on_disk_can_be_neither_penalised_nor_tied(make):
    layer = make.disk(10, 4)
    with pytest.raises(
        RuntimeError,
        match=r"'pow' was called on the weight of a table on disk.*penalise or tie those instead",
    ):
        layer.weight.pow(2)
    with pytest.raises(RuntimeError, match="'norm'"):
        layer.weight.norm()
    output = torch.nn.Linear(4, 10, bias=False)
    output.weight = layer.weight
    with pytest.raises(RuntimeError, match="'linear'"):
        output(layer(torch.tensor([1])))
    for spelling in ("T", "mT", "H", "mH"):
        with pytest.raises(RuntimeError, match=f"{spelling!r} .*table on disk"):
            layer(torch.tensor([1])) @ getattr(layer.weight, spelling)
    assert layer.weight.grad is None


def taken_over(make, kind, steps=5, **options):
    """A SparseAdam in memory after some steps, and ours over the same weights, not yet told of its state."""
    torch.manual_seed(0)
    layer, target = torch.nn.Embedding(6, 3, sparse=True), torch.randn(6, 3)
    reference = torch.optim.SparseAdam(layer.parameters(), lr=0.1)
    fit(layer, reference, target, steps)
    if kind == "memory":
        copy = make.plain(6, 3)
        copy.load_state_dict(layer.state_dict())
    else:
        copy = make.pretrained(layer)
    return layer, reference, target, copy, make.adam(copy, lr=0.5, **options)


@pytest.mark.parametrize("bias_correction", ["row", "parameter"])
@both
def test_c52_import_from_sparse_adam(make, kind, bias_correction):
    layer, reference, target, copy, optimizer = taken_over(make, kind, bias_correction=bias_correction)
    optimizer.load_state_dict(reference.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert make.records(copy, 6, 3)["t"].tolist() == [5] * 6
    for _ in range(5):
        fit(layer, reference, target, 1)
        fit(copy, optimizer, target, 1)
        np.testing.assert_allclose(weights(copy), weights(layer), rtol=1e-6, atol=1e-7)
    assert make.records(copy, 6, 3)["t"].tolist() == [10] * 6


def without(entry, *keys):
    return {key: value for key, value in entry.items() if key not in keys}


DAMAGES = {
    "no state": (lambda state: {}, "holds nothing for parameter 0"),
    "a key is missing": (lambda state: {0: without(state[0], "exp_avg")}, r"holds \['exp_avg_sq', 'step'\]"),
    "a key too many": (
        lambda state: {0: {**state[0], "max_exp_avg_sq": state[0]["exp_avg_sq"]}},
        "max_exp_avg_sq",
    ),
    "another shape": (
        lambda state: {0: {**state[0], "exp_avg": torch.zeros(6, 2)}},
        r"\(6, 2\) but table .* is \(6, 3\)",
    ),
    "a parameter too many": (lambda state: {**state, 1: state[0]}, "1"),
    "not finite": (lambda state: {0: {**state[0], "exp_avg": torch.full((6, 3), torch.nan)}}, "nan"),
    "a negative second moment": (
        lambda state: {0: {**state[0], "exp_avg_sq": torch.full((6, 3), -1.0)}},
        "exp_avg_sq",
    ),
    "a negative step": (lambda state: {0: {**state[0], "step": -3}}, "step"),
    "a step beyond int32": (lambda state: {0: {**state[0], "step": 2**31}}, "step"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@both
def test_c52_what_does_not_fit_is_refused(make, kind, damage):
    change, message = DAMAGES[damage]
    _, reference, _, copy, optimizer = taken_over(make, kind)
    fit(copy, optimizer, torch.zeros(6, 3), 2)
    saved = reference.state_dict()
    before, values = make.records(copy, 6, 3).tobytes(), weights(copy)
    with pytest.raises((ValueError, KeyError), match=message):
        optimizer.load_state_dict({**saved, "state": change(saved["state"])})
    assert make.records(copy, 6, 3).tobytes() == before
    assert torch.equal(weights(copy), values)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_c52_nothing_is_imported_when_a_later_parameter_does_not_fit(make):
    first, second = make.plain(4, 2), make.plain(4, 2)
    reference = torch.optim.SparseAdam([first.weight, second.weight])
    (first(torch.arange(4)).sum() + second(torch.arange(4)).sum()).backward()
    reference.step()
    saved = reference.state_dict()
    saved["state"][1]["exp_avg"] = torch.full((4, 2), torch.inf)
    optimizer = make.adam([first.weight, second.weight])
    with pytest.raises(ValueError, match="inf"):
        optimizer.load_state_dict(saved)
    assert not make.records("param_0", 4, 2, weights=False)["t"].any()


@pytest.mark.parametrize("one_group", [True, False])
def test_c52_moments_go_to_the_parameter_of_the_same_place(make, one_group):
    """An ordinary parameter before a table on disk of the same shape: only the order tells them apart."""
    first, second = make.plain(4, 2), make.plain(4, 2)
    reference = torch.optim.SparseAdam([first.weight, second.weight])
    (first(torch.tensor([0])).sum() + 5 * second(torch.tensor([1])).sum()).backward()
    reference.step()
    disk = make.pretrained(second)
    parameters = [first.weight, disk.weight]
    optimizer = make.adam(parameters if one_group else [{"params": [each]} for each in parameters])
    saved = reference.state_dict()
    groups = [{**saved["param_groups"][0], "params": [number]} for number in range(2)]
    optimizer.load_state_dict(saved if one_group else {**saved, "param_groups": groups})
    np.testing.assert_allclose(make.records(disk, 4, 2)["m"], [[0, 0], [0.5, 0.5], [0, 0], [0, 0]], rtol=1e-6)


@both
def test_c53_saved_options_win_over_the_constructor(make, kind):
    layer, optimizer = make.pair(kind, 4, 2, betas=(0.8, 0.99))
    step(layer, optimizer, [1])
    saved = optimizer.state_dict()
    optimizer.close()
    if kind == "disk":
        layer = make.disk(4, 2, resume=True)
    optimizer = make.adam(layer, lr=0.7, resume=True)
    assert optimizer.param_groups[0]["lr"] == 0.7
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)
