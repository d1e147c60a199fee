"""Cases from the field about the contract of `torch.optim`, with the values that were reported."""

import copy
import gc
import io
import pickle

import numpy as np
import pytest
import torch
from layers import MEMORY_AND_DISK, backward, contents, fit, row, step, weights
from torch.optim import lr_scheduler

from dsa.errors import StateMismatchError, TrainingWarning

both = pytest.mark.parametrize("kind", MEMORY_AND_DISK)

SCHEDULERS = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: epoch / 10),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, 0.01, 0.1, step_size_up=4, cycle_momentum=True
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@both
def test_c10_schedulers_act_as_on_torch(make, kind, scheduler):
    torch.manual_seed(0)
    reference, target = torch.nn.Embedding(10, 2, sparse=True), torch.randn(10, 2)
    layer = copy.deepcopy(reference) if kind == "memory" else make.pretrained(reference)
    optimizers = [torch.optim.SparseAdam(reference.parameters(), lr=0.1), make.adam(layer)]
    assert isinstance(optimizers[1], torch.optim.Optimizer)
    schedulers = [SCHEDULERS[scheduler](optimizer) for optimizer in optimizers]
    for _ in range(9):
        fit(reference, optimizers[0], target, 1, schedulers[0])
        fit(layer, optimizers[1], target, 1, schedulers[1])
        np.testing.assert_allclose(weights(layer), weights(reference), rtol=1e-5, atol=1e-7)
    first, second = (optimizer.param_groups[0] for optimizer in optimizers)
    assert (first["lr"], first["betas"]) == (second["lr"], second["betas"])


@both
def test_c10_a_plateau_lowers_the_rate(make, kind):
    layer, optimizer = make.pair(kind, 3, 1)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for loss in (1.0, 2.0):
        step(layer, optimizer, [0])
        scheduler.step(loss)
    assert optimizer.param_groups[0]["lr"] == 0.05
    before = row(layer, 1)[0]
    step(layer, optimizer, [1])
    np.testing.assert_allclose(row(layer, 1)[0] - before, -0.05, rtol=1e-5)


@both
def test_c11_warm_up_from_zero(make, kind):
    layer, optimizer = make.pair(kind, 1, 1)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: [0.0, 0.5, 1.0, 1.0][epoch])
    values = []
    for _ in range(3):
        step(layer, optimizer, [0])
        scheduler.step()
        values.append(row(layer, 0)[0])
        if len(values) == 1:
            assert make.records(layer, 1, 1)["m"][0, 0] == np.float32(0.1)
    assert values[0] == 0.0
    np.testing.assert_allclose(values[1:], [-0.04999998, -0.14999996], atol=2e-7)


@pytest.mark.parametrize("lr", [0.0, -0.1])
def test_c11_the_first_rate_is_positive(make, lr):
    with pytest.raises(ValueError, match=f"lr={lr} is out of range"):
        make.adam(make.plain(2, 1), lr)


@both
def test_c12_a_closure_runs_once_with_gradients(make, kind):
    layer, optimizer = make.pair(kind, 3, 1)
    seen = []

    def closure():
        optimizer.zero_grad()
        loss = layer(torch.tensor([1])).sum()
        loss.backward()
        seen.append((torch.is_grad_enabled(), loss))
        return loss

    with torch.no_grad():
        returned = optimizer.step(closure)
    assert len(seen) == 1
    assert seen[0][0]
    assert returned is seen[0][1]
    np.testing.assert_allclose(row(layer, 1), -0.09999996, rtol=1e-6)
    assert optimizer.step() is None


@both
def test_c13_a_group_is_added_later(make, kind):
    options = (
        {"first": {"name": "a"}, "second": {"name": "b"}} if kind == "disk" else {"first": {}, "second": {}}
    )

    def layers(**resume):
        sizes = {"first": (10, 2), "second": (6, 2)}
        return {
            key: make.layer(kind, *size, **options[key], **(resume if kind == "disk" else {}))
            for key, size in sizes.items()
        }

    def work(layers, optimizer, *names):
        optimizer.zero_grad()
        sum(layers[name](torch.tensor([0])).sum() for name in names).backward()
        optimizer.step()

    used = layers()
    optimizer = make.adam(used["first"])
    for _ in range(2):
        work(used, optimizer, "first")
    optimizer.add_param_group({"params": used["second"].parameters(), "lr": 0.01})
    work(used, optimizer, "first", "second")
    np.testing.assert_allclose(row(used["second"], 0), -0.01, rtol=1e-5)
    np.testing.assert_allclose(row(used["first"], 0), -0.3, rtol=1e-5)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": used["first"].parameters()})
    held = {name: weights(layer) for name, layer in used.items()}
    optimizer.close()

    if kind == "disk":
        used = layers(resume=True)
        assert all(torch.equal(weights(layer), held[name]) for name, layer in used.items())
    groups = [{"params": used["first"].parameters()}, {"params": used["second"].parameters(), "lr": 0.01}]
    optimizer = make.adam(groups, resume=True)
    work(used, optimizer, "first", "second")
    np.testing.assert_allclose(row(used["first"], 0), -0.4, rtol=1e-5)
    np.testing.assert_allclose(row(used["second"], 0), -0.02, rtol=1e-5)
    assert make.records("a" if kind == "disk" else "param_0", 10, 2, weights=kind == "disk")["t"][0] == 4


def test_c14_a_state_dict_is_small_and_plain(make):
    layer = make.disk(1_000_000, 128, allocate="sparse")
    optimizer = make.adam(layer)
    step(layer, optimizer, [5, 999_999])
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "model": layer.state_dict()}, file)
    assert file.tell() < 10_000
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    optimizer.load_state_dict(loaded["optimizer"])
    layer.load_state_dict(loaded["model"])
    assert loaded["optimizer"]["dsa"]["global_step"] == 1
    assert loaded["optimizer"]["param_groups"][0]["lr"] == 0.1


@both
def test_c14_a_state_dict_of_another_step_is_refused(make, kind):
    layer, optimizer = make.pair(kind, 4, 2)
    saved = optimizer.state_dict()
    step(layer, optimizer, [1])
    with pytest.raises(
        StateMismatchError, match=r"saved at step 0 but the state in .* is at step 1: save both together"
    ):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("copying", [copy.deepcopy, copy.copy, pickle.dumps])
@both
def test_c15_an_optimizer_cannot_be_copied(make, kind, copying):
    layer, optimizer = make.pair(kind, 4, 2)
    with pytest.raises(TypeError, match=r"two of them would write to one directory: use state_dict\(\)"):
        copying(optimizer)
    step(layer, optimizer, [1])
    assert optimizer.global_step == 1


@pytest.mark.parametrize("copying", [copy.deepcopy, pickle.dumps])
def test_c15_a_layer_on_disk_cannot_be_copied(make, copying):
    layer = make.disk(4, 2)
    with pytest.raises(TypeError, match="two owners would write to one directory"):
        copying(torch.nn.Sequential(layer, torch.nn.Linear(2, 1)))
    assert weights(layer).shape == (4, 2)


@both
def test_c16_zero_grad_and_frozen_parameters(make, kind):
    layer, optimizer = make.pair(kind, 5, 1)
    step(layer, optimizer, [1])
    optimizer.zero_grad(set_to_none=False)
    assert layer.weight.grad._nnz() == 0
    before = weights(layer)
    optimizer.step()
    assert torch.equal(weights(layer), before)
    assert make.records(layer, 5, 1)["t"].tolist() == [0, 1, 0, 0, 0]
    backward(layer, [3])
    optimizer.step()
    assert make.records(layer, 5, 1)["t"].tolist() == [0, 1, 0, 1, 0]
    assert weights(layer)[1] == before[1]

    layer.weight.requires_grad_(False)
    optimizer.zero_grad()
    other = make.plain(3, 1)
    optimizer.add_param_group({"params": other.parameters()})
    before = weights(layer)
    (layer(torch.tensor([2])) * other(torch.tensor([0]))).sum().backward()
    optimizer.step()
    assert torch.equal(weights(layer), before)
    assert make.records(layer, 5, 1)["t"].tolist() == [0, 1, 0, 1, 0]


def test_c17_everything_at_once_is_refused_with_the_recipe(make):
    model = torch.nn.ModuleDict(
        {"bag": torch.nn.EmbeddingBag(10, 4, sparse=True), "top": torch.nn.Linear(4, 1)}
    )
    optimizer = make.adam(model)
    model["top"](model["bag"](torch.tensor([[1, 2]]))).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"hand dense parameters to another optimizer \(dsa.split_parameters\(model\)"
    ):
        optimizer.step()


def test_c18_weights_loaded_in_place_are_the_ones_stepped_from(make):
    layer, optimizer = make.pair("memory", 10, 4)
    step(layer, optimizer, [1])
    layer.load_state_dict({"weight": torch.ones(10, 4)})
    step(layer, optimizer, [1])
    np.testing.assert_allclose(row(layer, 1), 0.9, rtol=1e-6)


def test_c18_weights_loaded_into_a_layer_on_disk_are_the_ones_stepped_from(make):
    layer, optimizer = make.pair("disk", 10, 4)
    step(layer, optimizer, [1])
    layer.load_state_dict({"weight": torch.ones(10, 4)})
    step(layer, optimizer, [1])
    np.testing.assert_allclose(row(layer, 1), 0.9, rtol=1e-6)
    assert row(layer, 2) == [1.0] * 4


@pytest.mark.parametrize("other", [False, True], ids=["alone", "beside another"])
def test_c18_a_replaced_parameter_is_noticed(make, other):
    layer, optimizer = make.pair("memory", 10, 4)
    beside = make.plain(3, 4)
    if other:
        optimizer.add_param_group({"params": beside.parameters()})
    step(layer, optimizer, [1])
    records = make.records(layer, 10, 4).tobytes()
    layer.weight = torch.nn.Parameter(torch.zeros(12, 4))
    optimizer.zero_grad()
    gc.collect()
    (layer(torch.tensor([1])).sum() + beside(torch.tensor([1])).sum()).backward()
    with pytest.warns(
        TrainingWarning,
        match="'param_0' gets no gradients and nobody but the optimizer holds it.*build a new optimizer",
    ):
        optimizer.step()
    assert make.records(layer, 10, 4).tobytes() == records


@both
def test_c18_parameters_in_use_are_not_reported(make, kind):
    """Parameters that a module or the caller still holds, and whose gradients are merely left out."""
    layer, optimizer = make.pair(kind, 10, 4)
    optimizer.step()
    held = torch.nn.Parameter(torch.zeros(3, 2))
    optimizer.add_param_group({"params": [held]})
    step(layer, optimizer, [1])
    assert optimizer.global_step == 1


@pytest.mark.parametrize("shape", [(12, 4), (8, 4), (10, 2), (10, 6)])
@pytest.mark.parametrize("again", [True, False], ids=["and differentiated again", "under its gradient"])
def test_c18_a_resized_parameter_is_refused(make, shape, again):
    layer, optimizer = make.pair("memory", 10, 4)
    backward(layer, [9])
    if again:
        layer.weight.grad = None
    layer.weight.data = torch.zeros(shape)
    if again:
        backward(layer, [1])
    before = contents(make.directory())
    with pytest.raises(ValueError, match=rf"'param_0' is \({shape[0]}, {shape[1]}\) now"):
        optimizer.step()
    assert contents(make.directory()) == before
