"""The fused pass on the ball against the per-row oracle with 120 digits, and against numbers by hand."""

from __future__ import annotations

import numpy as np
import pytest
from ball_records import MODES, RADII, batch, oracle_rows
from oracles import BALL_EPS, exp_map
from sampling import ULP32, at_radius, fresh_records, hand_options, off_by_ulps

from dsa.kernels.adam import adam_step
from dsa.kernels.poincare import riemannian_adam_step
from dsa.rules.conventions import AdamOptions

DIALECTS = {
    "defaults": {},
    "uncorrected, parameter counter": {
        "eps_placement": "uncorrected",
        "bias_correction": "parameter",
        "eps": 1e-3,
    },
    "large eps": {"eps": 1e-3},
    "l2": {"weight_decay": 0.1},
    "decoupled": {"weight_decay": 2e-3, "weight_decay_mode": "decoupled"},
    "ascent, l2": {"maximize": True, "weight_decay": 0.1},
    "ascent, decoupled": {"maximize": True, "weight_decay": 2e-3, "weight_decay_mode": "decoupled"},
    "no memory": {"beta1": 0.0, "beta2": 0.0},
    "long memory": {"beta2": 0.99999},
    "large rate": {"lr": 0.03},
    "short steps": {"max_step": 0.25, "lr": 0.1},
    "short steps, decoupled": {"max_step": 0.5, "weight_decay": 0.5, "weight_decay_mode": "decoupled"},
}


@pytest.mark.parametrize("k", [1.0, 25.0])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("mode", MODES)
def test_one_step_equals_the_oracle(mode, dialect, k):
    rng = np.random.default_rng(11)
    dialect = DIALECTS[dialect]
    # A step's length is lr lambda sqrt(k) in coordinate mode: equal for all k when lr scales with the ball.
    options = hand_options(**MODES[mode] | dialect | {"lr": dialect.get("lr", 1e-2) / np.sqrt(k)})
    records, grad = batch(rng, options, k)
    before = records.copy()
    w, m, v, clamped, far = oracle_rows(records, grad, options, k, 37)
    report = riemannian_adam_step(records, grad, options, k=k, stamp=38, step=37)
    assert report[:3] == (-1, clamped, far)
    assert off_by_ulps(records["w"], w) <= 1
    assert off_by_ulps(records["m"], m) <= 1
    assert off_by_ulps(records["v"], v) <= 1
    np.testing.assert_array_equal(records["t"], before["t"] + 1)
    np.testing.assert_array_equal(records["s"], 38)


@pytest.mark.parametrize("dim", [1, 2, 33])
@pytest.mark.parametrize("mode", MODES)
def test_other_dimensions(mode, dim):
    rng = np.random.default_rng(dim)
    options = hand_options(**MODES[mode], lr=1e-3)
    records, grad = batch(rng, options, 1.0, dim)
    records, grad = records[[1, 3, 5]], grad[[1, 3, 5]]
    w, m, v, clamped, far = oracle_rows(records, grad, options, 1.0)
    assert riemannian_adam_step(records, grad, options, k=1.0, stamp=1)[:3] == (-1, clamped, far)
    assert max(off_by_ulps(records["w"], w), off_by_ulps(records["m"], m), off_by_ulps(records["v"], v)) <= 1


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1e4])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_any_size(mode, size):
    rng = np.random.default_rng(5)
    options = hand_options(**MODES[mode], lr=1e-3)
    records, grad = batch(rng, options, 1.0, size=size)
    w, m, v, clamped, far = oracle_rows(records, grad, options, 1.0)
    assert riemannian_adam_step(records, grad, options, k=1.0, stamp=1)[:3] == (-1, clamped, far)
    assert max(off_by_ulps(records["w"], w), off_by_ulps(records["m"], m), off_by_ulps(records["v"], v)) <= 1


# --- numbers worked out by hand -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "k", "expected"),
    [
        ([0.0, 0.0], 1.0, [-0.0996679946, 0.0]),
        ([0.1, 0.1], 1.0, [-0.00066751, 0.10103419]),
        ([0.0, 0.0], 4.0, [-0.0986876601, 0.0]),
    ],
)
def test_exact_first_step(weight, k, expected):  # case C54
    records = fresh_records(weight)
    grad = np.array([[1.0, 0.0]], np.float32)
    assert riemannian_adam_step(records, grad, AdamOptions(lr=0.1), k=k, stamp=1).bad == -1
    np.testing.assert_allclose(records["w"], [expected], rtol=1e-5, atol=1e-8)


def test_first_step_with_one_second_moment_per_row():  # case C54, geoopt's algorithm
    records = fresh_records([0.1, 0.1], "row")
    grad = np.array([[1.0, 0.0]], np.float32)
    riemannian_adam_step(records, grad, AdamOptions(lr=0.1, second_moment="row"), k=1.0, stamp=1)
    np.testing.assert_allclose(records["w"][0, 0], 0.051, atol=5e-4)


@pytest.mark.parametrize("mode", MODES)
def test_zero_gradient_at_the_origin(mode):  # case C54
    records = fresh_records([0.0, 0.0], MODES[mode].get("second_moment", "coordinate"))
    options = AdamOptions(lr=0.1, **MODES[mode])
    assert riemannian_adam_step(records, np.zeros((1, 2), np.float32), options, k=1.0, stamp=1)[:3] == (
        -1,
        0,
        0,
    )
    assert not records["w"].any()
    assert not records["m"].any()
    assert not records["v"].any()


def test_first_step_without_decay_is_the_sign_of_the_gradient():
    """u_i = -lr g_i / (|g_i| + eps) with g = gradient / lambda^2: the logarithm of the new point shows u."""
    rng = np.random.default_rng(2)
    weights = at_radius(rng, 6, 3, [0.1, 0.3, 0.5, 0.7, 0.9, 0.0], 1.0).astype(np.float32)
    grad = rng.normal(size=(6, 3)).astype(np.float32)
    records = fresh_records(weights)
    riemannian_adam_step(records, grad, AdamOptions(lr=1e-3, eps=1e-2), k=1.0, stamp=1)
    for w, g, new in zip(weights.astype(float), grad.astype(float), records["w"].astype(float), strict=True):
        scaled = g * (1 - w @ w) ** 2 / 4
        u = -1e-3 * scaled / (np.abs(scaled) + 1e-2)
        np.testing.assert_allclose(new, exp_map(w, u, 1.0), rtol=0, atol=ULP32 * np.abs(new).max())


# --- what must not change -------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1.0, 0.37])
@pytest.mark.parametrize("mode", MODES)
def test_zero_gradient_with_zero_moments_keeps_every_bit_of_w(mode, k):
    rng = np.random.default_rng(13)
    options = hand_options(**MODES[mode])
    # Half of the rows on the clamp lie outside by their rounding.
    radii = np.concatenate([RADII, np.full(2000, 1 - BALL_EPS)])
    weights = at_radius(rng, len(radii), 2, radii, k).astype(np.float32)
    records = fresh_records(weights, options.second_moment)
    assert riemannian_adam_step(records, np.zeros_like(weights), options, k=k, stamp=1).bad == -1
    changed = (records["w"].view(np.int32) != weights.view(np.int32)).any(axis=1)
    assert changed.sum() == 0
    assert not records["m"].any()
    assert not records["v"].any()


@pytest.mark.parametrize("second_moment", ["coordinate", "frame", "row"])
def test_decay_that_balances_the_moment_is_a_step_of_nothing(second_moment):
    """lr (m_hat / root + decay w) = 0 up to rounding, of either sign where it is squared."""
    rng = np.random.default_rng(14)
    weights = at_radius(rng, 2000, 5, 0.3, 1.0).astype(np.float32)
    records = fresh_records(weights, second_moment)
    records["t"] = 1000
    records["m"] = -2 * weights
    records["v"] = 2.0
    options = AdamOptions(
        lr=0.1,
        beta1=0.5,
        beta2=0.5,
        weight_decay=1.0,
        weight_decay_mode="decoupled",
        second_moment=second_moment,
    )
    assert riemannian_adam_step(records, np.zeros_like(weights), options, k=1.0, stamp=1)[:3] == (-1, 0, 0)
    np.testing.assert_allclose(records["w"], weights, rtol=0, atol=1e-8)


def test_duplicates_summed_before_the_step_count_once():  # case C55, after the sum
    one, two = fresh_records([0.1, 0.1]), fresh_records([0.1, 0.1])
    halves = np.array([[0.5, 0.0]], np.float32)
    options = AdamOptions(lr=0.1)
    riemannian_adam_step(one, np.array([[1.0, 0.0]], np.float32), options, k=1.0, stamp=1)
    riemannian_adam_step(two, halves + halves, options, k=1.0, stamp=1)
    assert one.tobytes() == two.tobytes()
    assert one["t"] == 1


# --- flat limit -----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1e-6, 1e-10, 1e-14])
@pytest.mark.parametrize(
    "decay", [{}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "weight_decay_mode": "decoupled"}]
)
@pytest.mark.parametrize("second_moment", ["coordinate", "frame"])
def test_small_curvature_is_adam_with_a_larger_eps(second_moment, decay, k):
    """The step tends to lr g/4 / (|g|/4 + eps) in coordinates, lr g/4 / (|g|/2 + eps) in the frame."""
    rng = np.random.default_rng(21)
    factor = {"coordinate": 4.0, "frame": 2.0}[second_moment]
    ball = fresh_records(rng.normal(size=(5, 3)), second_moment)
    flat = ball.copy()
    curved = AdamOptions(lr=1e-2, eps=1e-2, second_moment=second_moment, **decay)
    flat_decay = decay | ({"weight_decay": 0.4 / factor} if "weight_decay_mode" in decay else {})
    plain = AdamOptions(lr=1e-2 * factor / 4, eps=factor * 1e-2, **flat_decay)
    for step in range(1, 21):
        grad = rng.normal(size=(5, 3)).astype(np.float32)
        assert riemannian_adam_step(ball, grad, curved, k=k, stamp=step)[:3] == (-1, 0, 0)
        adam_step(flat, grad, plain, stamp=step)
    np.testing.assert_allclose(ball["w"], flat["w"], rtol=0, atol=0.1 * k + 20 * ULP32 * 2)


def test_small_curvature_with_one_second_moment_per_row_differs_by_the_root_of_d():
    """On the ball v sums the squares, in flat space it averages them."""
    rng = np.random.default_rng(22)
    dim = 9
    ball = fresh_records(rng.normal(size=(5, dim)), "row")
    flat = ball.copy()
    curved = AdamOptions(lr=3e-2, eps=1e-12, second_moment="row")
    # The Riemannian gradient is a quarter of the Euclidean one and its length a half.
    plain = AdamOptions(lr=3e-2 / np.sqrt(dim) / 2, eps=1e-12, second_moment="row")
    for step in range(1, 21):
        grad = rng.normal(size=(5, dim)).astype(np.float32)
        riemannian_adam_step(ball, grad, curved, k=1e-12, stamp=step)
        adam_step(flat, grad, plain, stamp=step)
    np.testing.assert_allclose(ball["w"], flat["w"], rtol=0, atol=20 * ULP32 * 2)
