"""`DiskSparseAdagrad` beside `torch.optim.Adagrad`, and row-wise beside a program in float64."""

import copy

import numpy as np
import pytest
import torch
from layers import MEMORY_AND_DISK, row, step, weights

import dsa
from dsa import DiskSparseAdagrad, DiskSparseAdam
from dsa.errors import StateMismatchError

ROWS, DIM, STEPS = 60, 5, 100
OPTIONS = {
    "defaults": {},
    "decayed rate": {"lr_decay": 0.05},
    "sums that begin high": {"initial_accumulator_value": 0.3},
    "ascent": {"maximize": True},
    "eps": {"eps": 1e-2},
}


def batches(seed=0):
    """Ids and their gradients: batches of 0 to 40 with repeats; some rows come once in a hundred steps."""
    draws = np.random.default_rng(seed)
    for number in range(STEPS):
        count = 0 if number % 17 == 5 else int(draws.integers(1, 41))
        ids = draws.integers(0, ROWS // 2 if number % 10 else ROWS, count)
        yield ids, draws.normal(size=(count, DIM)).astype(np.float32) * 10.0 ** draws.integers(-4, 3)


def train(layer, optimizer, given):
    for ids, grad in given:
        optimizer.zero_grad()
        (layer(torch.from_numpy(ids)) * torch.from_numpy(grad)).sum().backward()
        optimizer.step()


def start():
    return torch.nn.Embedding.from_pretrained(
        torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(3)), freeze=False, sparse=True
    )


@pytest.fixture
def adagrad(make):
    """Makes layers of a kind with the weights of `start`, and their optimizers."""

    def made(kind, where="state", row_wise=False, resume=None, **options):
        layer = start()
        if kind == "disk":
            state = "rowwise_adagrad" if row_wise else "adagrad"
            layer = make.pretrained(layer, where, state=state, resume=resume)
        optimizer = DiskSparseAdagrad(
            layer.parameters(), row_wise=row_wise, state_dir=make.directory(where), resume=resume, **options
        )
        make.callback(optimizer.close)
        return layer, optimizer

    return made


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's own Adagrad
@pytest.mark.parametrize("kind", MEMORY_AND_DISK)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_hundred_steps_agree_with_torch(adagrad, kind, name):
    layer, optimizer = adagrad(kind, lr=0.1, **OPTIONS[name])
    theirs = start()
    reference = torch.optim.Adagrad(theirs.parameters(), lr=0.1, **OPTIONS[name])
    for given in batches():
        train(layer, optimizer, [given])
        train(theirs, reference, [given])
    expected = theirs.weight.detach()
    assert float((weights(layer) - expected).abs().max() / expected.abs().max()) < 2e-7
    (sums,) = (each["sum"] for each in reference.state.values())
    optimizer.close()
    with dsa.open_state(optimizer.state_dict()["dsa"]["directory"]) as view:
        begun = np.float32(OPTIONS[name].get("initial_accumulator_value", 0.0))
        np.testing.assert_allclose(view[optimizer.param_names[0]]["h"][:] + begun, sums.numpy(), rtol=1e-5)


@pytest.mark.parametrize("kind", MEMORY_AND_DISK)
@pytest.mark.parametrize(
    "options", [{}, {"lr_decay": 0.05, "weight_decay": 0.01}, {"initial_accumulator_value": 0.3}]
)
def test_row_wise_agrees_with_float64(adagrad, kind, options):
    layer, optimizer = adagrad(kind, row_wise=True, lr=0.1, **options)
    w, h = start().weight.detach().double().numpy(), np.zeros(ROWS)
    for number, (ids, grad) in enumerate(batches(), 1):
        for each in np.unique(ids):
            g = grad[ids == each].astype(np.float64).sum(0) + options.get("weight_decay", 0.0) * w[each]
            h[each] += np.mean(g**2)
            rate = 0.1 / (1 + (number - 1) * options.get("lr_decay", 0.0))
            w[each] -= rate * g / (np.sqrt(options.get("initial_accumulator_value", 0.0) + h[each]) + 1e-10)
    train(layer, optimizer, batches())
    np.testing.assert_allclose(weights(layer), w, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("maximize", [False, True])
def test_weight_decay_is_that_of_dense_adagrad_where_all_rows_are_in_a_batch(adagrad, maximize):
    layer, optimizer = adagrad("disk", lr=0.1, weight_decay=0.1, maximize=maximize)
    dense = torch.nn.Parameter(start().weight.detach().clone())
    reference = torch.optim.Adagrad([dense], lr=0.1, weight_decay=0.1, maximize=maximize)
    draws = np.random.default_rng(1)
    for _ in range(20):
        grad = draws.normal(size=(ROWS, DIM)).astype(np.float32)
        train(layer, optimizer, [(np.arange(ROWS), grad)])
        dense.grad = torch.from_numpy(grad)
        reference.step()
    np.testing.assert_allclose(weights(layer), dense.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", MEMORY_AND_DISK)
def test_c59_row_wise_adagrad(make, kind):
    layer = make.layer(kind, 3, 2, **({"state": "rowwise_adagrad"} if kind == "disk" else {}))
    optimizer = DiskSparseAdagrad(layer.parameters(), 0.1, row_wise=True, state_dir=make.directory())
    make.callback(optimizer.close)
    for expected in ([-0.0848528, -0.1131371], [-0.1448528, -0.1931371]):
        optimizer.zero_grad()
        (layer(torch.tensor([1])) * torch.tensor([3.0, 4.0])).sum().backward()
        optimizer.step()
        np.testing.assert_allclose(row(layer, 1), expected, rtol=1e-6)
    optimizer.close()
    with dsa.open_state(make.directory()) as view:
        assert view[optimizer.param_names[0]]["h"].dtype == np.float32
        assert view[optimizer.param_names[0]]["h"][:].tolist() == [0.0, 25.0, 0.0]


def test_c58_state_per_row_does_not_mix_with_state_per_element(make, adagrad):
    layer, optimizer = adagrad("disk", row_wise=True)
    step(layer, optimizer, [1])
    layer.close()
    match = (
        "stored with the update rule 'row_wise_adagrad' .* h float32 per row, .* but 'adagrad' .* asked for"
    )
    with pytest.raises(StateMismatchError, match=match):
        make.pretrained(start(), state="adagrad", resume=True)
    again = make.pretrained(start(), state="rowwise_adagrad", resume=True)
    with pytest.raises(StateMismatchError, match="holds the state of the update rule 'row_wise_adagrad'"):
        DiskSparseAdagrad(again.parameters())
    with pytest.raises(StateMismatchError, match="use DiskSparseAdagrad, row_wise=True, or make the table"):
        DiskSparseAdam(again.parameters())


@pytest.mark.parametrize("kind", MEMORY_AND_DISK)
@pytest.mark.parametrize("row_wise", [False, True])
def test_training_goes_on_bit_for_bit(adagrad, make, kind, row_wise):
    options = {"row_wise": row_wise, "lr": 0.1, "lr_decay": 0.05, "initial_accumulator_value": 0.1}
    given = list(batches())
    whole, optimizer = adagrad(kind, "whole", **options)
    train(whole, optimizer, given)
    layer, optimizer = adagrad(kind, "parts", **options)
    train(layer, optimizer, given[:40])
    saved, held = optimizer.state_dict(), copy.deepcopy(layer.state_dict())
    optimizer.export_checkpoint(make.directory("checkpoint"))
    optimizer.close()
    layer, optimizer = adagrad(kind, "parts", resume=True, **{**options, "initial_accumulator_value": 9.0})
    layer.load_state_dict(held)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["initial_accumulator_value"] == 0.1
    train(layer, optimizer, given[40:])
    assert torch.equal(weights(layer), weights(whole))
    layer, optimizer = adagrad(kind, "other", **options)
    optimizer.import_checkpoint(make.directory("checkpoint"))
    train(layer, optimizer, given[40:])
    assert torch.equal(weights(layer), weights(whole))


def test_groups_schedules_and_counts(make):
    first, second = make.plain(6, 2), make.disk(6, 2, name="second", state="adagrad")
    groups = [{"params": [first.weight]}, {"params": [second.weight], "lr": 1.0}]
    optimizer = DiskSparseAdagrad(groups, lr=0.5, state_dir=make.directory())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(2):
        optimizer.zero_grad()
        (first(torch.tensor([1])) + second(torch.tensor([2]))).sum().backward()
        optimizer.prefetch([2], "second")
        optimizer.step()
        scheduler.step()
    expected = 1.0 + 0.5 / np.sqrt(2.0)
    np.testing.assert_allclose(row(second, 2), [-expected] * 2, rtol=1e-6)
    np.testing.assert_allclose(row(first, 1), [-0.5 * expected] * 2, rtol=1e-6)
    assert optimizer.stats()["logical_bytes_written"] == 2 * (2 * 2 * 4 + 2 * 4)
    optimizer.close()


def test_a_row_whose_weight_was_set_starts_as_any_other(make):
    """The padding row is written without a step, and so are the rows of an array."""
    layer = make.disk(4, 2, 1.0, padding_idx=0, state="adagrad")
    optimizer = DiskSparseAdagrad(layer.parameters(), 1.0, initial_accumulator_value=3.0)
    assert row(layer, 0) == [0.0, 0.0]
    layer.weight.grad = torch.sparse_coo_tensor([[0, 1]], torch.ones(2, 2), (4, 2))
    optimizer.step()
    assert row(layer, 0) == [-0.5, -0.5]
    assert row(layer, 1) == [0.5, 0.5]
    optimizer.close()


@pytest.mark.parametrize("name", ["lr_decay", "weight_decay", "initial_accumulator_value", "eps"])
def test_options_out_of_range(make, name):
    with pytest.raises(ValueError, match=rf"{name}=-1\.0 is out of range"):
        DiskSparseAdagrad(make.plain(2, 2).parameters(), state_dir=make.directory(), **{name: -1.0})
    with pytest.raises(TypeError, match=rf"{name}='a' is of type str: pass a number"):
        DiskSparseAdagrad(make.plain(2, 2).parameters(), state_dir=make.directory(), **{name: "a"})
    with pytest.raises(ValueError, match=r"lr=0\.0 is out of range: pass a number > 0"):
        DiskSparseAdagrad(make.plain(2, 2).parameters(), 0.0, state_dir=make.directory())
    assert not make.directory().exists()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's own Adagrad
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_the_state_of_torchs_adagrad_is_taken_over(adagrad, where):
    """Half of the steps are torch's; all options come with its state, and its count of steps."""
    options = {"lr": 0.1, "lr_decay": 0.05, "initial_accumulator_value": 0.3, "eps": 1e-3}
    given, half = list(batches()), STEPS // 2
    twin = start()
    theirs = torch.optim.Adagrad(twin.parameters(), **options)
    train(twin, theirs, given[:half])
    if where == "memory":
        layer, ours = adagrad("plain")
        layer.load_state_dict(twin.state_dict())
    else:
        layer, ours = adagrad("disk")
        layer.load_state_dict({"weight": twin.weight.detach().clone()})
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert {name: ours.param_groups[0][name] for name in options} == options
    train(twin, theirs, given[half:])
    train(layer, ours, given[half:])
    torch.testing.assert_close(weights(layer), twin.weight.detach(), rtol=0, atol=2e-6)
    sums = theirs.state_dict()["state"][0]["sum"].numpy()
    with dsa.open_state(ours.state_dict()["dsa"]["directory"]) as view:
        (name,) = ours.param_names
        np.testing.assert_allclose(view[name].read(np.arange(ROWS))["h"] + 0.3, sums, rtol=2e-6)
    ours.close()


@pytest.mark.parametrize(
    ("row_wise", "change", "match"),
    [
        (True, {}, r"'row_wise_adagrad'.*does not keep a sum per element as Adagrad does.*row_wise=False"),
        (False, {"sum": -torch.ones(ROWS, DIM)}, "'sum' of parameter 0 holds a negative number"),
        (False, {"sum": torch.ones(DIM, ROWS)}, "'sum' of parameter 0 is"),
        (False, {"step": torch.tensor(-1.0)}, "'step' of parameter 0 is -1"),
        (False, {"exp_avg": 0}, r"torch.optim.Adagrad stores \['step', 'sum'\].*DiskSparseAdagrad"),
    ],
)
def test_what_is_not_taken_over(adagrad, row_wise, change, match):
    layer, ours = adagrad("plain", row_wise=row_wise)
    before = weights(layer).clone()
    saved = torch.optim.Adagrad(layer.parameters(), lr=0.5).state_dict()
    saved["state"][0].update(change)
    with pytest.raises(ValueError, match=match):
        ours.load_state_dict(saved)
    assert ours.param_groups[0]["lr"] != 0.5
    assert torch.equal(weights(layer), before)
    ours.close()
