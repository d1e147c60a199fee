"""RecIS's surface: its formulas, its accumulation, its defaults, compared with numbers worked out here."""

import copy
import inspect
import math
import pickle

import numpy as np
import pytest
import torch

import dsa
from dsa import DiskEmbedding, conventions, init, recis
from dsa.errors import GradientError, TrainingWarning
from dsa.inspection import open_state

SPARSE = [recis.SparseAdam, recis.SparseAdamW, recis.SparseAdamWTF]
every = pytest.mark.parametrize("make", SPARSE)


def table(path, rows=12, dim=1, name="items", weights=None):
    source = init.Zeros(rows, dim) if weights is None else torch.from_numpy(weights)
    return DiskEmbedding(rows, dim, init=source, state_dir=path, name=name)


def micro_batch(embedding, ids, grads):
    """Let the rows of `ids` get the gradients, added to those that are there."""
    rows = embedding(torch.tensor(ids))
    (rows * torch.tensor(grads, dtype=torch.float32).reshape(len(ids), -1)).sum().backward()


def first_moments(path, rows):
    with open_state(path) as state:
        return state["items"].read(rows)["m"][:, 0].tolist()


# --- accumulation -------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize(
    "split",
    [[([7, 3], [1, 4]), ([9, 3], [4, 6])], [([7, 3, 9, 3], [1, 4, 4, 6])]],
    ids=["two micro-batches", "one batch"],
)
def test_repeated_ids_are_summed_on_their_rows(tmp_path, make, split):
    """Not divided by the number of micro-batches, nor on rows 0, 1 and 2, as a release of RecIS had it."""
    embedding = table(tmp_path)
    with make({"items": embedding}) as optimizer:
        optimizer.set_grad_accum_steps(len(split))
        for ids, grads in split:
            optimizer.zero_grad()
            micro_batch(embedding, ids, grads)
            optimizer.step()
        assert optimizer.global_step == 1
    assert first_moments(tmp_path, [3, 7, 9]) == pytest.approx([1.0, 0.1, 0.4])  # 0.1 g
    assert first_moments(tmp_path, [0, 1, 2]) == [0.0, 0.0, 0.0]


def test_only_every_nth_call_updates_and_clears(tmp_path):
    embedding = table(tmp_path)
    with recis.SparseAdam({"items": embedding}) as optimizer:
        optimizer.set_grad_accum_steps(3)
        seen = []
        for _ in range(7):
            optimizer.zero_grad()
            before = embedding.weight.grad is not None
            micro_batch(embedding, [1], [1.0])
            optimizer.step()
            seen.append((before, optimizer.global_step))
        assert seen == [
            (False, 0), (True, 0), (True, 1), (False, 1), (True, 1), (True, 2), (False, 2),
        ]  # fmt: skip


def test_the_learning_rate_is_that_of_the_call_that_updates(tmp_path):
    embedding = table(tmp_path)
    with recis.SparseAdam({"items": embedding}, lr=0.5) as optimizer:
        assert len(optimizer.param_groups) == 1
        optimizer.set_grad_accum_steps(2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        for _ in range(2):
            micro_batch(embedding, [1], [1.0])
            optimizer.step()
            schedule.step()
        assert embedding(torch.tensor([1])).item() == pytest.approx(-0.25)  # read before the second schedule
        assert optimizer.param_groups[0]["lr"] == 0.125


def test_a_closure_is_one_micro_batch(tmp_path):
    embedding = table(tmp_path)
    with recis.SparseAdam({"items": embedding}) as optimizer:

        def closure():
            loss = embedding(torch.tensor([1])).sum()
            loss.backward()
            return loss

        optimizer.set_grad_accum_steps(2)
        assert optimizer.step(closure).item() == 0.0
        assert optimizer.global_step == 0
        optimizer.step(closure)
        assert optimizer.global_step == 1
    assert first_moments(tmp_path, [1]) == pytest.approx([0.2])


@pytest.mark.parametrize("steps", [0, -1, 1.5, "2", None])
def test_a_number_of_micro_batches_that_is_none(tmp_path, steps):
    message = f"steps={steps!r} can't be counted up to: pass an integer >= 1"
    optimizer = recis.SparseAdam({"items": table(tmp_path)})
    with optimizer, pytest.raises(ValueError, match=message):
        optimizer.set_grad_accum_steps(steps)


def test_a_refused_step_changes_nothing(tmp_path):
    embedding = table(tmp_path)
    with recis.SparseAdam({"items": embedding}) as optimizer:
        micro_batch(embedding, [1], [math.inf])
        with pytest.raises(GradientError):
            optimizer.step()
        assert optimizer.global_step == 0


# --- formulas -----------------------------------------------------------------------------------------

FORMULAS = {
    recis.SparseAdam: (np.float64, lambda lr, decay: 1.0),
    recis.SparseAdamW: (np.float32, lambda lr, decay: 1 - lr * decay),
    recis.SparseAdamWTF: (np.float32, lambda lr, decay: 1 - decay),
}


@every
def test_several_tables_with_the_defaults_and_resumed(tmp_path, make):
    """Each table has a counter of its own, which goes on where it was left."""
    number, factor = FORMULAS[make]
    weights = np.random.default_rng(0).normal(size=(2, 12, 3)).astype(np.float32)
    w, m, v = weights.astype(np.float64), np.zeros_like(weights, float), np.zeros_like(weights, float)
    powers = np.ones((2, 2), number)
    start = dict(zip("ab", weights, strict=True))
    for life in range(2):
        resume = {"resume": True} if life else {}
        tables = {
            name: DiskEmbedding(12, 3, init=torch.from_numpy(first), state_dir=tmp_path, name=name, **resume)
            for name, first in start.items()
        }
        with make(tables) as optimizer:
            for step in range(life * 10, life * 10 + 10):
                draws = np.random.default_rng(step)
                optimizer.zero_grad()
                for i, embedding in enumerate(tables.values()):
                    if step % (i + 2) == 1:
                        continue
                    ids = np.unique(draws.integers(0, 12, 5))
                    grads = draws.normal(size=(len(ids), 3)).astype(np.float32)
                    micro_batch(embedding, ids, grads)
                    powers[i] *= np.array([0.9, 0.999], number)
                    alpha = 1e-3 * math.sqrt(1 - float(powers[i, 1])) / (1 - float(powers[i, 0]))
                    w[i, ids] *= factor(1e-3, 1e-2)
                    m[i, ids] = 0.9 * m[i, ids] + 0.1 * grads
                    v[i, ids] = 0.999 * v[i, ids] + 0.001 * grads.astype(float) ** 2
                    w[i, ids] -= alpha * m[i, ids] / (np.sqrt(v[i, ids]) + 1e-8)
                optimizer.step()
            found = [embedding(torch.arange(12)).detach().numpy() for embedding in tables.values()]
    np.testing.assert_allclose(found, w, rtol=0, atol=2e-6)


def test_weights_in_memory(tmp_path):
    model = torch.nn.Sequential(torch.nn.Embedding(9, 2, sparse=True), torch.nn.Linear(2, 1))
    torch.nn.init.constant_(model[0].weight, 2.0)  # what is left of it is not near 0
    before = model[0].weight.detach().clone()
    with recis.SparseAdamWTF(recis.filter_out_sparse_param(model), lr=0.5, state_dir=tmp_path) as optimizer:
        model[0](torch.tensor([4])).sum().backward()
        optimizer.step()
        assert optimizer.disk.param_names == ["0.weight"]
    torch.testing.assert_close(model[0].weight[4], 0.99 * before[4] - 0.5, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(model[0].weight[5], before[5], rtol=0, atol=0)


def dense_reference(w, grads, lr, betas, eps, decay):
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(grads, 1):
        p1, p2 = (float(np.float32(float(np.float32(beta)) ** t)) for beta in betas)
        w = w * (1 - decay)
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g**2
        w = w - lr * math.sqrt(1 - p2) / (1 - p1) * m / (np.sqrt(v) + eps)
    return w


@pytest.mark.parametrize("sign", [1, -1])
def test_the_dense_optimizer(sign):
    draws = np.random.default_rng(1)
    first, grads = draws.normal(size=(4, 3)), draws.normal(size=(30, 4, 3))
    parameter = torch.nn.Parameter(torch.from_numpy(first.copy()))
    other = torch.nn.Parameter(torch.ones(2))  # gets no gradient
    optimizer = recis.AdamWTF([parameter, other], lr=0.01, weight_decay=0.05, maximize=sign < 0)
    for grad in grads:
        parameter.grad = torch.from_numpy(sign * grad)
        optimizer.step()
    expected = dense_reference(first, grads, 0.01, (0.9, 0.999), 1e-8, 0.05)
    np.testing.assert_allclose(parameter.detach(), expected, rtol=1e-12)
    assert other.tolist() == [1.0, 1.0]
    again = torch.nn.Parameter(parameter.detach().clone())
    resumed = recis.AdamWTF([again, other], lr=0.01, weight_decay=0.05, maximize=sign < 0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, which in ((parameter, optimizer), (again, resumed)):
        each.grad = torch.ones_like(each)
        which.step()
    torch.testing.assert_close(again, parameter, rtol=0, atol=0)


def test_what_the_dense_optimizer_refuses():
    embedding = torch.nn.Embedding(3, 2, sparse=True)
    layer = torch.nn.Linear(2, 1)
    optimizer = recis.AdamWTF([*layer.parameters(), *embedding.parameters()])
    before = layer.weight.detach().clone()
    layer(embedding(torch.tensor([1]))).sum().backward()
    with pytest.raises(RuntimeError, match=r"got a sparse gradient.*SparseAdamWTF"):
        optimizer.step()
    torch.testing.assert_close(layer.weight, before, rtol=0, atol=0)
    with pytest.raises(ValueError, match="use_nesterov=True is not computed"):
        recis.AdamWTF(layer.parameters(), use_nesterov=True)
    with pytest.raises(ValueError, match=r"complex64.*of real numbers"):
        recis.AdamWTF([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    for options in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1e-8}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match="is out of range"):
            recis.AdamWTF(layer.parameters(), **options)


# --- what users see -----------------------------------------------------------------------------------


@every
def test_the_defaults(tmp_path, make):
    parameters = inspect.signature(make).parameters
    named = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2}
    last = "use_nesterov" if make is recis.SparseAdamWTF else "amsgrad"
    assert list(parameters)[:7] == ["param_dict", *named, last]
    assert {name: parameters[name].default for name in named} == named
    with pytest.raises(ValueError, match=f"{last}=True is not computed"):
        make({"items": torch.nn.Embedding(3, 2, sparse=True)}, state_dir=tmp_path, **{last: True})
    for options in ({"lr": -1.0}, {"beta1": 1.0}, {"eps": -1.0}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match="is out of range"):
            make({"items": torch.nn.Embedding(3, 2, sparse=True)}, state_dir=tmp_path, **options)
    with pytest.raises(TypeError, match="param_dict is a list: pass a dict"):
        make([torch.nn.Embedding(3, 2, sparse=True)], state_dir=tmp_path)
    with pytest.raises(TypeError, match="the table 'items' is of type Identity"):
        make({"items": torch.nn.Identity()}, state_dir=tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_decay_without_effect_is_warned_of(tmp_path):
    embedding = table(tmp_path)
    with pytest.warns(TrainingWarning, match=r"weight_decay=0\.1 has no effect in SparseAdam"):
        optimizer = recis.SparseAdam({"items": embedding}, weight_decay=0.1)
    assert optimizer.disk.convention == conventions.RECIS_SPARSE_ADAM
    optimizer.close()


def test_saving_and_loading(tmp_path):
    embedding = table(tmp_path)
    with recis.SparseAdamW({"items": embedding}, lr=0.25) as optimizer:
        micro_batch(embedding, [1], [1.0])
        optimizer.step()
        saved = optimizer.state_dict()
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 0.25
        optimizer.param_groups[0]["lr"] = 1.0
        before = embedding(torch.tensor([1])).item()
        optimizer.step()
        assert before - embedding(torch.tensor([1])).item() > 0.9
        assert "SparseAdamW of 1 micro-batches" in repr(optimizer)
        with pytest.raises(TypeError, match="can't be copied or pickled"):
            pickle.dumps(optimizer)


def test_what_a_model_has_of_tables(tmp_path):
    model = torch.nn.ModuleDict(
        {"disk": table(tmp_path), "head": torch.nn.Linear(1, 1), "dense": torch.nn.Embedding(3, 1)}
    )
    assert list(recis.filter_out_sparse_param(model)) == ["disk.weight"]
    assert recis.filter_out_sparse_param(model)["disk.weight"] is model["disk"].weight
    model["disk"].close()


@pytest.mark.parametrize("given", ["module", "weight", "both"])
def test_clipping_by_the_norm_of_everything(tmp_path, given):
    embedding = table(tmp_path)
    dense = torch.nn.Parameter(torch.zeros(2))
    dense.grad = torch.tensor([3.0, 0.0])
    micro_batch(embedding, [1, 1], [1.0, 3.0])
    tables = [embedding] if given == "module" else [embedding.weight]
    parameters = [dense, embedding.weight] if given == "both" else [dense]
    total = recis.clip_grad_by_global_norm_(parameters, 2.5, sparse_hashtables=tables)
    assert total.item() == pytest.approx(5.0)  # the root of 9 and (1 + 3)^2
    assert dense.grad.tolist() == pytest.approx([1.5, 0.0])
    assert embedding.weight.grad.coalesce().values().item() == pytest.approx(2.0)
    embedding.close()


@pytest.mark.parametrize("clip", [recis.clip_grad_by_global_norm_, dsa.clip_grad_norm_])
def test_a_norm_that_is_not_finite(clip):
    dense = torch.nn.Parameter(torch.zeros(2))
    dense.grad = torch.tensor([math.inf, 1.0])
    with pytest.raises(RuntimeError, match="the norm of all gradients is inf"):
        clip([dense], 1.0, error_if_nonfinite=True)
    assert dense.grad.tolist() == [math.inf, 1.0]
    assert clip([dense], 1.0).item() == math.inf
