"""Every dialect of Adam against its restatement, and torch's against torch."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from dialects import (
    DECAY,
    DIALECTS,
    NAMES,
    ROWS,
    End,
    batches_of,
    drop_in,
    errors,
    explicit,
    in_memory,
    parameters_of,
    restated,
)

from dsa import DiskEmbedding, DiskSparseAdam, DiskSparseRiemannianAdam, conventions, init
from dsa.inspection import open_state
from dsa.rules.conventions import Convention

named = pytest.mark.parametrize("dialect", DIALECTS, ids=[each.name for each in DIALECTS])
ROUNDING = 2e-6
"""float32 roundings of a hundred steps; a decay's factor is one of them and always off to the same side."""


def test_every_convention_has_a_restatement():
    constants = {name for name in conventions.__all__ if name.isupper()}
    assert constants == {dialect.name for dialect in DIALECTS}
    assert all(isinstance(dialect.convention, Convention) for dialect in DIALECTS)


def test_the_batches_are_irregular():
    seen = [batches_of(step) for step in range(100)]
    rows = [given[NAMES[0]][0] for given in seen if NAMES[0] in given]
    assert 80 < len(rows) < 90
    assert sum(len(each) == 0 for each in rows) > 10
    assert any(len(np.unique(each)) < len(each) for each in rows)
    assert [step for step, given in enumerate(seen) if ROWS - 1 in given.get(NAMES[0], ((),))[0]] == [0, 99]


@named
def test_weights_on_disk(tmp_path, dialect):
    assert max(errors(explicit(dialect, tmp_path), restated(dialect))) < ROUNDING


@named
def test_weights_in_memory(tmp_path, dialect):
    assert max(errors(drop_in(dialect, tmp_path), restated(dialect))) < ROUNDING


def test_the_restatements_are_told_apart():
    """A dialect that were another one in disguise would be found out."""
    ends = [(dialect, restated(dialect._replace(numbers=DECAY))) for dialect in DIALECTS]
    for (one, at), (other, there) in combinations(ends, 2):
        if replace(one.convention, beta_powers="float64") != replace(other.convention, beta_powers="float64"):
            assert max(errors(at, there)) > 100 * ROUNDING, (one.name, other.name)


# --- torch's own optimizers ---------------------------------------------------------------------------


class Lazy:
    """A dense optimizer of torch's of which the rows outside the batch stay as they were."""

    def __init__(self, make, parameters):
        self.parameters = parameters
        self.optimizer = make(parameters.values())

    def step(self):
        before = {}
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                given = parameter.grad.coalesce()
                others = np.setdiff1d(np.arange(ROWS), given.indices()[0].numpy())
                before[name] = others, [each[others].clone() for each in self.tensors(parameter)]
                parameter.grad = given.to_dense()
        self.optimizer.step()
        for name, (others, kept) in before.items():
            for tensor, old in zip(self.tensors(self.parameters[name]), kept, strict=False):
                tensor[others] = old
            for tensor in self.tensors(self.parameters[name])[len(kept) :]:  # made in this step
                tensor[others] = 0.0

    def tensors(self, parameter):
        state = self.optimizer.state[parameter]
        return [parameter.detach(), *(state[key] for key in ("exp_avg", "exp_avg_sq") if key in state)]


def torchs(make, wrap):
    parameters = parameters_of()
    optimizer = wrap(make, parameters)
    in_memory(optimizer, parameters)
    states = getattr(optimizer, "optimizer", optimizer).state
    return {
        name: End(*(t.detach().numpy() for t in (p, states[p]["exp_avg"], states[p]["exp_avg_sq"])))
        for name, p in parameters.items()
    }


def plain(make, parameters):
    return make(parameters.values())


@pytest.mark.parametrize(
    ("name", "kind", "wrap"),
    [
        ("TORCH_SPARSE_ADAM", torch.optim.SparseAdam, plain),
        ("RECIS_SPARSE_ADAM", torch.optim.SparseAdam, plain),
        ("TORCH_ADAM", torch.optim.Adam, Lazy),
        ("TORCH_ADAMW", torch.optim.AdamW, Lazy),
    ],
)
def test_torch_itself(tmp_path, name, kind, wrap):
    (dialect,) = (each for each in DIALECTS if each.name == name)
    n = dialect.numbers
    decay = {"weight_decay": n.decay} if wrap is Lazy else {}
    expected = torchs(lambda ps: kind(list(ps), n.lr, (n.beta1, n.beta2), n.eps, **decay), wrap)
    assert max(errors(drop_in(dialect, tmp_path), expected)) < ROUNDING


# --- one point at a time ------------------------------------------------------------------------------


def build(path, **options):
    tables = {name: init.Zeros(4, 1) for name in NAMES}
    return DiskSparseRiemannianAdam(tables, **({"lr": 1.0, "k": 0.0, "disk_dir": path} | options))


ONE = np.ones((1, 1), np.float32)


@pytest.mark.parametrize(("powers", "off"), [("float64", 0.0), ("float32", -6.68e-6)])
def test_beta_powers_show_in_the_first_step(tmp_path, powers, off):
    convention = Convention("uncorrected", "parameter", beta_powers=powers)
    with build(tmp_path, convention=convention, eps=1e-30) as optimizer:
        optimizer.step({"first": ([0], ONE)})
        step = -optimizer.read_rows([0], "first").item()
        assert step - 1.0 == pytest.approx(off, abs=2e-7)


@pytest.mark.parametrize(("rule", "count"), [("counts", 3), ("skipped", 1)])
def test_an_empty_batch_counts_or_is_skipped(tmp_path, rule, count):
    convention = replace(conventions.TORCH_SPARSE_ADAM, empty_batch=rule)
    nothing = np.empty(0, np.int64), np.empty((0, 1), np.float32)
    with build(tmp_path, convention=convention, eps=1e-30) as optimizer:
        for _ in range(2):
            optimizer.step({"first": nothing})
        optimizer.step({"first": ([0], ONE)})
        assert optimizer.global_step == 3
        expected = 0.1 / (1 - 0.9**count) / np.sqrt(0.001 / (1 - 0.999**count))
        assert -optimizer.read_rows([0], "first").item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("counter", "count"), [("row", 1), ("parameter", 2), ("global", 4)])
def test_whose_steps_are_counted(tmp_path, counter, count):
    with build(tmp_path, bias_correction=counter, eps=1e-30) as optimizer:
        optimizer.step({"second": ([0], ONE)})
        optimizer.step({"first": ([1], ONE)})
        optimizer.step({"second": ([0], ONE)})
    with build(tmp_path, bias_correction=counter, eps=1e-30, resume=True) as optimizer:
        optimizer.step({"first": ([0], ONE)})
        expected = 0.1 / (1 - 0.9**count) / np.sqrt(0.001 / (1 - 0.999**count))
        assert -optimizer.read_rows([0], "first").item() == pytest.approx(expected, rel=1e-6)


def test_a_mean_of_duplicates_tells_which_gradient_is_bad(tmp_path):
    grads = np.array([[1.0], [np.nan], [3.0]], np.float32)
    with build(tmp_path, convention=conventions.DGL_SPARSE_ADAM) as optimizer:
        with pytest.raises(ValueError, match="in row 1 of the batch, which is row 2 of the table"):
            optimizer.step({"first": ([2, 2, 0], grads)})
        optimizer.step({"first": ([2, 2, 0], np.nan_to_num(grads, nan=7.0))})
        assert np.isnan(grads[1, 0])
    with open_state(tmp_path) as state:
        assert state["first"].read([2, 0])["m"][:, 0] == pytest.approx([0.4, 0.3])


def test_a_decay_that_the_learning_rate_does_not_scale_on_a_ball(tmp_path):
    """At rate zero nothing moves but by the decay, along the geodesic to the origin."""
    weights = torch.tensor([[0.3, 0.4]])
    with DiskSparseRiemannianAdam(
        {"ball": weights}, lr=0.0, weight_decay=0.1, k=1.0, disk_dir=tmp_path,
        weight_decay_mode="unscaled", init_max_norm_fraction=1.0,
    ) as optimizer:  # fmt: skip
        optimizer.step({"ball": ([0], np.zeros((1, 2), np.float32))})
        # The step -0.1 w has the length 0.1 |w| lambda = 0.1 * 0.5 * 2 / (1 - 0.25).
        distance = 2 * np.arctanh(0.5) - 0.1 * 0.5 * 2 / 0.75
        expected = np.tanh(distance / 2) * np.array([0.6, 0.8])
        np.testing.assert_allclose(optimizer.read_rows([0])[0], expected, rtol=1e-6)


# --- options beside a convention ----------------------------------------------------------------------


def test_an_option_beside_a_convention_wins_and_is_shown(tmp_path):
    given = {"convention": conventions.FBGEMM_ADAM, "bias_correction": "row", "weight_decay_mode": "l2"}
    in_force = Convention("corrected", "row", "l2")
    with build(tmp_path / "a", **given) as optimizer:
        assert optimizer.convention == in_force
        assert repr(in_force) in repr(optimizer)
    parameters = [torch.nn.Parameter(torch.zeros(3, 2))]
    with DiskSparseAdam(parameters, state_dir=tmp_path / "b", **given) as optimizer:
        assert optimizer.convention == in_force
        assert repr(in_force) in repr(optimizer)
        assert optimizer.param_groups[0]["weight_decay_mode"] == "l2"
        assert optimizer.state_dict()["param_groups"][0]["weight_decay_mode"] == "l2"


def test_what_holds_without_a_convention(tmp_path):
    with build(tmp_path / "a") as optimizer:
        assert optimizer.convention == conventions.DSA_ADAM
    with DiskSparseAdam([torch.nn.Parameter(torch.zeros(3, 2))], state_dir=tmp_path / "b") as optimizer:
        assert optimizer.convention == Convention("uncorrected", "row")


def test_a_convention_chooses_the_second_moment(tmp_path):
    embedding = DiskEmbedding(9, 2, state="rowwise_adam", state_dir=tmp_path)
    optimizer = DiskSparseAdam(embedding.parameters(), convention=conventions.FBGEMM_PARTIAL_ROWWISE_ADAM)
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert optimizer.global_step == 1
    optimizer.close()


def test_a_mean_where_duplicates_cannot_be_counted(tmp_path):
    embedding = DiskEmbedding(9, 2, state_dir=tmp_path)
    plain = torch.nn.Parameter(torch.zeros(3, 2))
    match = "duplicates='mean' can't be had for DiskParameter"
    with pytest.raises(ValueError, match=match):
        DiskSparseAdam(embedding.parameters(), convention=conventions.DGL_SPARSE_ADAM)
    optimizer = DiskSparseAdam([plain], state_dir=tmp_path, convention=conventions.DGL_SPARSE_ADAM)
    with pytest.raises(ValueError, match=match):
        optimizer.add_param_group({"params": embedding.parameters()})
    assert len(optimizer.param_groups) == 1
    embedding.close()


@pytest.mark.parametrize("make", [DiskSparseAdam, DiskSparseRiemannianAdam])
def test_what_a_dialect_has_no_place_for_is_refused(tmp_path, make):
    if make is DiskSparseAdam:
        given = {"params": [torch.nn.Parameter(torch.zeros(3, 2))], "state_dir": tmp_path}
    else:
        given = {"params": [torch.zeros(3, 2)], "disk_dir": tmp_path, "k": 0.0}
    with pytest.raises(ValueError, match=r"weight_decay=0\.1 would have no effect"):
        make(**given, weight_decay=0.1, convention=conventions.TORCH_SPARSE_ADAM)
    near_one = {"betas": (0.9, 1 - 1e-9)} if make is DiskSparseAdam else {"beta2": 1 - 1e-9}
    with pytest.raises(ValueError, match=r"beta2=0\.999999999 is 1 in float32"):
        make(**given, **near_one, convention=conventions.RECIS_SPARSE_ADAMW)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("field", ["duplicates", "empty_batch", "beta_powers", "weight_decay_mode"])
def test_a_value_that_is_not_known_is_refused(field):
    with pytest.raises(ValueError, match=f"{field}='other' is not known: use one of"):
        replace(conventions.DSA_ADAM, **{field: "other"})
