"""Euclidean Adam against the per-row oracle and against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import adam_row
from sampling import fresh_records, hand_options, off_by_ulps, used_records

from dsa.kernels.adam import adam_step
from dsa.rules.conventions import AdamOptions

DIALECTS = {
    "paper": {},
    "torch sparse": {"eps_placement": "uncorrected", "bias_correction": "parameter"},
    "large eps": {"eps": 1e-3},
    "large eps, uncorrected": {"eps": 1e-3, "eps_placement": "uncorrected"},
    "l2": {"weight_decay": 0.1},
    "decoupled": {"weight_decay": 0.1, "weight_decay_mode": "decoupled"},
    "ascent": {"maximize": True},
    "ascent, l2": {"maximize": True, "weight_decay": 0.1},
    "ascent, decoupled": {"maximize": True, "weight_decay": 0.1, "weight_decay_mode": "decoupled"},
    "no momentum": {"beta1": 0.0},
    "no memory": {"beta1": 0.0, "beta2": 0.0},
    "long memory": {"beta2": 0.99999},
    "huge rate": {"lr": 10.0},
    "parameter counter": {"bias_correction": "parameter"},
    "frame": {"second_moment": "frame"},
    "row": {"second_moment": "row"},
    "row, uncorrected": {"second_moment": "row", "eps_placement": "uncorrected", "eps": 1e-3},
    "row, l2": {"second_moment": "row", "weight_decay": 0.1},
    "row, decoupled": {"second_moment": "row", "weight_decay": 0.1, "weight_decay_mode": "decoupled"},
    "row, ascent": {"second_moment": "row", "maximize": True},
    "row, parameter counter": {"second_moment": "row", "bias_correction": "parameter"},
    "rate zero": {"lr": 0.0},
}


def oracle_rows(records, grad, options, step):
    """Return w, m, v (float64) of every record after the oracle's step."""
    rows = [
        adam_row(
            *(np.asarray(r[f], np.float64) for f in "wmv"), int(r["t"]), g.astype(np.float64), options, step
        )
        for r, g in zip(records, grad, strict=True)
    ]
    return tuple(np.array([getattr(row, name) for row in rows]) for name in "wmv")


@pytest.mark.parametrize("dim", [1, 2, 7, 64])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_one_step_equals_the_oracle(dialect, dim):
    rng = np.random.default_rng(dim)
    options = hand_options(**DIALECTS[dialect])
    for size in (1.0, 1e-4, 1e-9, 1e6):
        records = used_records(rng, rng.normal(size=(20, dim)), options.second_moment, size)
        grad = (size * rng.normal(size=(20, dim))).astype(np.float32)
        before = records.copy()
        w, m, v = oracle_rows(records, grad, options, 37)
        report = adam_step(records, grad, options, stamp=38, step=37)
        assert report[:3] == (-1, 0, 0)
        off_m = off_by_ulps(records["m"], m, scale=before["m"])
        off_v = off_by_ulps(records["v"], v)
        off_w = off_by_ulps(records["w"], w, scale=before["w"])
        assert (off_m <= 2, off_v <= 4, off_w <= 4) == (True, True, True), (size, off_m, off_v, off_w)
        np.testing.assert_array_equal(records["t"], before["t"] + 1)
        np.testing.assert_array_equal(records["s"], 38)


@pytest.mark.parametrize("placement", ["corrected", "uncorrected"])
@pytest.mark.parametrize("second_moment", ["coordinate", "row"])
def test_many_steps_stay_with_the_oracle(second_moment, placement):
    rng = np.random.default_rng(3)
    options = hand_options(second_moment=second_moment, eps_placement=placement, lr=0.1)
    records = fresh_records(rng.normal(size=(6, 5)), second_moment)
    w, m, v = (records[name].astype(np.float64) for name in "wmv")
    for step in range(1, 301):
        grad = rng.normal(size=w.shape).astype(np.float32)
        rows = [adam_row(w[i], m[i], v[i], step - 1, grad[i].astype(float), options) for i in range(len(w))]
        w, m, v = (np.array([getattr(row, name) for row in rows]) for name in "wmv")
        assert adam_step(records, grad, options, stamp=step).bad == -1
    # 300 roundings of w, each of half an ulp of at most 2, and as many of the moments.
    np.testing.assert_allclose(records["w"], w, rtol=0, atol=2e-5)
    np.testing.assert_allclose(records["v"], v, rtol=2e-5)
    np.testing.assert_array_equal(records["t"], 300)


# --- the field cases: numbers as given there ------------------------------------------------------


def first_steps(gradients, weight=0.0, *, counter=0, step=None, **changes):
    """Return the records of one row after the given gradients."""
    options = AdamOptions(**({"lr": 1e-3} | changes))
    records = fresh_records(weight, options.second_moment)
    records["t"] = counter
    for i, gradient in enumerate(gradients):
        grad = np.atleast_2d(np.asarray(gradient, np.float32))
        number = None if step is None else step + i
        assert adam_step(records, grad, options, stamp=1, step=number).bad == -1
    return records


SPARSE = {"eps_placement": "uncorrected"}


@pytest.mark.parametrize(
    ("step", "update"), [(1, -0.000999999684), (10, -0.000484426233), (1000, -0.00251456592)]
)
def test_late_row_takes_a_longer_step_only_under_the_parameter_counter(step, update):  # case C06
    shared = first_steps([1.0], step=step, bias_correction="parameter", **SPARSE)
    own = first_steps([1.0], step=step, **SPARSE)
    np.testing.assert_allclose(shared["w"][0, 0], update, rtol=1e-6)
    np.testing.assert_allclose(own["w"][0, 0], -0.000999999684, rtol=1e-6)
    assert shared["t"] == own["t"] == 1


@pytest.mark.parametrize(
    ("placement", "gradient", "update"),
    [
        ("uncorrected", 1, -0.00099999968),
        ("uncorrected", 1e-4, -0.00099684769),
        ("uncorrected", 1e-7, -0.00024025307),
        ("uncorrected", 1e-9, -3.1523e-6),
        ("corrected", 1, -0.00099999999),
        ("corrected", 1e-4, -0.0009999),
        ("corrected", 1e-7, -0.00090909),
        ("corrected", 1e-9, -9.0909e-5),
    ],
)
def test_epsilon_placement_shows_in_tiny_gradients(placement, gradient, update):  # case C07
    records = first_steps([gradient], eps_placement=placement)
    np.testing.assert_allclose(records["w"][0, 0], update, rtol=1e-5)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_sequence_of_three(step):  # case C07, to float32
    expected = (-0.0999999683772, -0.199999946011, -0.165516589465)
    gradients = [1.0, 1.0, -4.0]
    for options in (SPARSE, SPARSE | {"bias_correction": "parameter"}):
        records = first_steps(gradients[:step], lr=0.1, step=1, **options)
        np.testing.assert_allclose(records["w"][0, 0], expected[step - 1], rtol=3e-7)


def test_the_oracle_itself_gives_the_sequence_of_three():  # case C07, in float64
    options = AdamOptions(lr=0.1, eps_placement="uncorrected")
    w = m = v = np.zeros(1)
    seen = []
    for t, gradient in enumerate((1.0, 1.0, -4.0)):
        w, m, v, *_ = adam_row(w, m, v, t, np.array([gradient]), options)
        seen.append(w[0])
    np.testing.assert_allclose(seen, [-0.0999999683772, -0.199999946011, -0.165516589465], rtol=1e-11)


@pytest.mark.parametrize(("mode", "weight"), [("decoupled", 0.89), ("l2", 0.9)])
def test_weight_decay_modes(mode, weight):  # case C08
    records = first_steps([1.0], weight=1.0, lr=0.1, weight_decay=0.1, weight_decay_mode=mode)
    np.testing.assert_allclose(records["w"][0, 0], weight, rtol=2e-7)


def test_row_wise_second_moment():  # case C58
    records = first_steps([[3.0, 4.0]], weight=[0.0, 0.0], lr=0.1, second_moment="row")
    np.testing.assert_allclose(records["v"], [0.0125], rtol=2e-7)
    np.testing.assert_allclose(records["m"], [[0.3, 0.4]], rtol=2e-7)
    np.testing.assert_allclose(records["w"], [[-0.0848528, -0.1131371]], rtol=1e-6)
    assert records["v"].nbytes == 4


@pytest.mark.parametrize(
    ("gradient", "weight", "first", "second"),
    [(2.0, -0.09999998, 0.2, 0.004), (1.0, -0.09999996, 0.1, 0.001), (-1.0, 0.09999996, -0.1, 0.001)],
)
def test_summed_gradients(gradient, weight, first, second):  # cases C01 and C02, after the sum
    records = first_steps([[gradient]], lr=0.1, **SPARSE)
    np.testing.assert_allclose(records["w"], [[weight]], rtol=1e-6)
    np.testing.assert_allclose(records["m"], [[first]], rtol=1e-6)
    np.testing.assert_allclose(records["v"], [[second]], rtol=1e-6)
    assert records["t"] == 1


# --- what must not change -------------------------------------------------------------------------


@pytest.mark.parametrize("second_moment", ["coordinate", "row"])
@pytest.mark.parametrize("placement", ["corrected", "uncorrected"])
def test_zero_gradient_with_zero_moments_keeps_every_bit_of_w(second_moment, placement):
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(50, 9)).astype(np.float32)
    weights[0, :3] = [0.0, -0.0, 1e-42]
    options = hand_options(second_moment=second_moment, eps_placement=placement)
    records = fresh_records(weights, second_moment)
    assert adam_step(records, np.zeros_like(weights), options, stamp=1).bad == -1
    assert records["w"].tobytes() == weights.tobytes()
    assert not records["m"].any()
    assert not records["v"].any()


def test_rate_zero_keeps_w_and_moves_the_moments():
    rng = np.random.default_rng(1)
    records = used_records(rng, rng.normal(size=(10, 4)), "coordinate", 1.0)
    before = records.copy()
    adam_step(records, rng.normal(size=(10, 4)).astype(np.float32), hand_options(lr=0.0), stamp=1)
    assert records["w"].tobytes() == before["w"].tobytes()
    assert (records["m"] != before["m"]).all()


def test_own_counters_differ_between_rows_of_one_batch():
    options = AdamOptions(lr=1e-3)
    records = fresh_records(np.zeros((3, 1)))
    records["t"] = [0, 9, 999]
    adam_step(records, np.ones((3, 1), np.float32), options, stamp=5)
    expected = [
        adam_row(np.zeros(1), np.zeros(1), np.zeros(1), t, np.ones(1), options).w[0] for t in (0, 9, 999)
    ]
    np.testing.assert_allclose(records["w"][:, 0], expected, rtol=1e-6)
    np.testing.assert_array_equal(records["t"], [1, 10, 1000])
    np.testing.assert_array_equal(records["s"], [5, 5, 5])


@pytest.mark.parametrize("beta2", [0.9, 0.999, 0.99999, 0.9999999])
@pytest.mark.parametrize("bias_correction", ["row", "parameter"])
def test_counters_of_any_length(bias_correction, beta2):
    """Corrections come from a table for short counters and from a formula for long ones."""
    counters = np.array([0, 1, 99, 65533, 65534, 65535, 65536, 10**6, 2**31 - 2])
    for counter in counters:
        options = AdamOptions(lr=1e-2, beta1=0.99, beta2=beta2, bias_correction=bias_correction)
        records = used_records(np.random.default_rng(1), np.zeros((1, 3)), "coordinate", 1.0)
        records["t"] = counter if bias_correction == "row" else 7
        fields = [records[0][name].astype(float) for name in "wmv"]
        grad = np.array([[1.0, -0.5, 2.0]], np.float32)
        expected = adam_row(*fields, int(counter), grad[0].astype(float), options, int(counter) + 1)
        assert adam_step(records, grad, options, stamp=1, step=int(counter) + 1).bad == -1
        assert off_by_ulps(records["w"], expected.w[None]) <= 4


def test_an_empty_batch_is_a_step_of_nothing():
    records = fresh_records(np.zeros((1, 3)))[:0]
    assert adam_step(records, np.zeros((0, 3), np.float32), AdamOptions(lr=0.1), stamp=1)[:3] == (-1, 0, 0)
