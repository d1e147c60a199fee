"""RecIS's Adagrads: formulas, defaults and refusals, compared with numbers worked out here in float64."""

import inspect
import math

import numpy as np
import pytest
import torch

from dsa import DiskEmbedding, recis

ROWS, DIM = 12, 3
PLAIN = [recis.SparseAdagrad, recis.SparseRowWiseAdagrad]
SUMS = [recis.SparseAdagradSum, recis.SparseRowWiseAdagradSum]
ROW_WISE = {recis.SparseRowWiseAdagrad, recis.SparseRowWiseAdagradSum}
every = pytest.mark.parametrize("make", [*PLAIN, *SUMS])


def table(path, make, weights=None, name="items", **options):
    start = np.zeros((ROWS, 1), np.float32) if weights is None else weights
    state = "rowwise_adagrad" if make in ROW_WISE else "adagrad"
    init = torch.from_numpy(start.copy())
    return DiskEmbedding(*start.shape, init=init, state_dir=path, name=name, state=state, **options)


def micro_batch(embedding, ids, grads):
    rows = embedding(torch.as_tensor(ids))
    (rows * torch.as_tensor(grads, dtype=torch.float32).reshape(len(ids), -1)).sum().backward()


@every
def test_several_tables_with_schedules_and_resumed(tmp_path, make):
    """Each table counts its own steps, in which it has a gradient, for the decay of the rate."""
    options = {"lr": 0.1, "lr_decay": 0.05, "initial_accumulator_value": 0.25, "eps": 1e-3}
    decay = 0.0 if make in SUMS else 0.2
    start = np.random.default_rng(0).normal(size=(2, ROWS, DIM)).astype(np.float32)
    w, h, steps = start.astype(float), np.full_like(start, 0.25, dtype=float), [0, 0]
    for life in range(2):
        resume = {"resume": True} if life else {}
        tables = {
            name: table(tmp_path, make, weights, name, **resume)
            for name, weights in zip("ab", start, strict=True)
        }
        with make(tables, weight_decay=decay, **options) as optimizer:
            for step in range(life * 10, life * 10 + 10):
                draws = np.random.default_rng(step)
                optimizer.zero_grad()
                for i, embedding in enumerate(tables.values()):
                    if step % (i + 2) == 1:
                        continue
                    ids = np.unique(draws.integers(0, ROWS, 5))
                    grads = draws.normal(size=(len(ids), DIM)).astype(np.float32)
                    micro_batch(embedding, ids, grads)
                    g = grads + decay * w[i, ids]
                    h[i, ids] += np.mean(g**2, axis=1, keepdims=True) if make in ROW_WISE else g**2
                    rate = 0.1 / (1 + steps[i] * 0.05)
                    w[i, ids] -= rate * g / (np.sqrt(h[i, ids]) + 1e-3)
                    steps[i] += 1
                optimizer.step()
            found = [embedding(torch.arange(ROWS)).detach().numpy() for embedding in tables.values()]
    np.testing.assert_allclose(found, w, rtol=0, atol=2e-6)


@pytest.mark.parametrize("make", PLAIN)
def test_micro_batches_are_summed_before_they_are_squared(tmp_path, make):
    embedding = table(tmp_path, make)
    with make({"items": embedding}, lr=1.0, initial_accumulator_value=1.0) as optimizer:
        optimizer.set_grad_accum_steps(2)
        for ids, grads in (([7, 3], [1, 4]), ([9, 3], [4, 6])):
            optimizer.zero_grad()
            micro_batch(embedding, ids, grads)
            optimizer.step()
        assert optimizer.global_step == 1
        found = embedding(torch.tensor([3, 7, 9, 0])).flatten().tolist()
    wanted = [-g / math.sqrt(1 + g * g) for g in (10, 1, 4, 0)]
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("make", SUMS)
def test_sums_over_workers_have_one_worker_and_one_micro_batch(tmp_path, make):
    optimizer = make({"items": table(tmp_path, make)})
    with optimizer:
        optimizer.set_grad_accum_steps(1)
        with pytest.raises(ValueError, match=f"steps=2 would need the squares.*{make.__name__}"):
            optimizer.set_grad_accum_steps(2)


@every
def test_the_defaults_and_what_is_refused(tmp_path, make):
    parameters = inspect.signature(make).parameters
    named = {"lr": 1e-3, "lr_decay": 0, "initial_accumulator_value": 0, "eps": 1e-10, "weight_decay": 0}
    last = "maximize" if make in ROW_WISE else "save_update_info_interval"
    assert list(parameters)[:7] == ["param_dict", *named, last]
    assert {name: parameters[name].default for name in named} == named
    refused = [{name: -1.0} for name in named]
    refused += [] if make in ROW_WISE else [{last: 10}]
    refused += [{"weight_decay": 0.1}] if make in SUMS else []
    for options in refused:
        with pytest.raises(ValueError, match=r"is out of range|is not computed: leave it out"):
            make({"items": torch.nn.Embedding(3, 2, sparse=True)}, state_dir=tmp_path, **options)
    with pytest.raises(TypeError, match="param_dict is a list: pass a dict"):
        make([torch.nn.Embedding(3, 2, sparse=True)], state_dir=tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("make", sorted(ROW_WISE, key=str))
def test_ascent_and_weights_in_memory(tmp_path, make):
    layer = torch.nn.Embedding.from_pretrained(torch.zeros(5, 2), freeze=False, sparse=True)
    with make({"items": layer}, lr=0.5, maximize=True, state_dir=tmp_path) as optimizer:
        micro_batch(layer, [4], [[3.0, 4.0]])
        optimizer.step()
        assert make.__name__ in repr(optimizer)
    root = math.sqrt(12.5)
    assert layer.weight[4].tolist() == pytest.approx([1.5 / root, 2.0 / root])
