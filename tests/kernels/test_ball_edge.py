"""The fused pass near the edge of the ball: the clamp, its report, the trust region, long steps inward."""

from __future__ import annotations

import numpy as np
import pytest
from ball_records import MODES, batch, oracle_rows, oracle_states
from oracles import BALL_EPS, distance, exact, rounded
from sampling import ULP32, at_radius, fresh_records, hand_options, off_by_ulps

from dsa.kernels.poincare import riemannian_adam_step
from dsa.rules.conventions import AdamOptions


@pytest.mark.parametrize("k", [1.0, 0.01, 100.0])
@pytest.mark.parametrize("mode", MODES)
def test_outward_pushes_end_on_the_clamp(mode, k):
    rng = np.random.default_rng(4)
    options = AdamOptions(lr=1.0 / np.sqrt(k), **MODES[mode])
    weights = at_radius(rng, 8, 5, 0.99, k)
    records = fresh_records(weights, options.second_moment)
    for step in range(1, 21):
        grad = (-records["w"]).astype(np.float32)
        report = riemannian_adam_step(records, grad, options, k=k, stamp=step)
        assert report.bad == -1
    assert report.clamped == 8
    radius = np.sqrt(k) * np.linalg.norm(records["w"].astype(float), axis=1)
    np.testing.assert_allclose(radius, 1 - BALL_EPS, rtol=ULP32)
    assert np.isfinite(records["m"]).all()
    assert (records["v"] >= 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_clipping_keeps_the_riemannian_length_of_the_moment(mode):
    rng = np.random.default_rng(6)
    options = AdamOptions(lr=0.0, beta1=0.5, weight_decay=0.0, **MODES[mode])
    weights = at_radius(rng, 10, 5, 0.9999, 1.0)
    pushed = AdamOptions(lr=50.0, beta1=0.5, **MODES[mode])
    start = fresh_records(weights, options.second_moment)
    start["m"] = -weights * 1e-6 * rng.uniform(0.5, 2, (10, 1))
    start["v"] = 1e-12
    still, moved = start.copy(), start.copy()
    grad = (-weights).astype(np.float32)
    riemannian_adam_step(still, grad, options, k=1.0, stamp=1)
    assert riemannian_adam_step(moved, grad, pushed, k=1.0, stamp=1).clamped == 10

    def lengths(records, radius):
        return 2 / (1 - radius**2) * np.linalg.norm(records["m"].astype(float), axis=1)

    before = lengths(still, np.linalg.norm(start["w"].astype(float), axis=1))
    np.testing.assert_allclose(lengths(moved, 1 - BALL_EPS), before, rtol=4 * ULP32)


@pytest.mark.parametrize("mode", MODES)
def test_report_counts_clamped_rows_and_those_that_came_from_far(mode):
    second_moment = MODES[mode].get("second_moment", "coordinate")
    # Along the axis, a step of length lr lambda from the origin side: short ones clamp only next to the edge.
    lam_edge = 2 / (1 - 0.99998**2)
    records = fresh_records([[0.99998, 0.0], [0.5, 0.0], [0.99998, 0.0], [0.0, 0.0]], second_moment)
    grad = np.array([[-1.0, 0.0]] * 4, np.float32)
    fine = MODES[mode] | {"eps": 1e-30}  # at the edge a gradient of 1 is a Riemannian one of 4e-10
    near = AdamOptions(lr=0.9 / lam_edge if second_moment == "coordinate" else 0.9, **fine)
    assert riemannian_adam_step(records.copy(), grad, near, k=1.0, stamp=1)[:3] == (-1, 2, 0)
    everywhere = AdamOptions(lr=30.0, **fine)
    assert riemannian_adam_step(records.copy(), grad, everywhere, k=1.0, stamp=1)[:3] == (-1, 4, 4)
    beyond = AdamOptions(lr=30.0, max_step=1.01, **fine)
    assert riemannian_adam_step(records.copy(), grad, beyond, k=1.0, stamp=1)[:3] == (-1, 2, 2)
    restrained = AdamOptions(lr=30.0, max_step=0.99, **fine)
    assert riemannian_adam_step(records.copy(), grad, restrained, k=1.0, stamp=1)[:3] == (-1, 2, 0)
    inward = riemannian_adam_step(records, -grad, restrained, k=1.0, stamp=1)
    assert inward[:3] == (-1, 0, 0)


@pytest.mark.parametrize("limit", [None, 0.3])
@pytest.mark.parametrize("mode", MODES)
def test_report_names_the_longest_step(mode, limit):
    options = hand_options(**MODES[mode], lr=1e-3, max_step=limit)
    records, grad = batch(np.random.default_rng(10), options, 4.0)
    expected = max(float(row.length) for row in oracle_states(records, grad, options, 4.0))
    report = riemannian_adam_step(records, grad, options, k=4.0, stamp=1)
    assert report.longest == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("limit", [1e-3, 0.5, 3.0])
@pytest.mark.parametrize("mode", MODES)
def test_max_step_bounds_the_distance_travelled(mode, limit):
    rng = np.random.default_rng(9)
    options = AdamOptions(lr=10.0, max_step=limit, **MODES[mode])
    for k in (1.0, 0.25):
        weights = at_radius(rng, 6, 4, [0.0, 0.1, 0.3, 0.5, 0.6, 0.7], k).astype(np.float32)
        records = fresh_records(weights, options.second_moment)
        riemannian_adam_step(records, rng.normal(size=(6, 4)).astype(np.float32), options, k=k, stamp=1)
        for old, new in zip(weights, records["w"], strict=True):
            travelled = np.sqrt(k) * rounded(distance(exact(old), exact(new), exact(k)))
            np.testing.assert_allclose(travelled, limit, rtol=1e-6, atol=40 * ULP32)


@pytest.mark.parametrize("mode", MODES)
def test_a_row_outside_the_ball_is_brought_back_first(mode):
    options = hand_options(**MODES[mode])
    outside = fresh_records([[0.8, 0.8], [3.0, 0.0], [0.0, -1.0], [0.0, 0.999995]], options.second_moment)
    grad = np.array([[1.0, 0.5], [2.0, -1.0], [0.3, -4.0], [1.0, 0.0]], np.float32)
    w, m, v, clamped, far = oracle_rows(outside, grad, options, 1.0)
    assert riemannian_adam_step(outside, grad, options, k=1.0, stamp=1)[:3] == (-1, clamped, far)
    assert max(off_by_ulps(outside["w"], w), off_by_ulps(outside["m"], m), off_by_ulps(outside["v"], v)) <= 1


@pytest.mark.parametrize("radius", [0.9, 0.999, 0.9999, 0.99998, 1.0])
@pytest.mark.parametrize("length", [1.0, 6.0, 10.0, 30.0, 1e4])
@pytest.mark.parametrize("mode", MODES)
def test_a_radial_step_through_the_origin_ends_where_it_should(mode, length, radius):
    """Decoupled decay alone moves a row straight inward; a long step comes out on the other side."""
    start = min(radius, 1 - BALL_EPS)
    lam = 2 / (1 - start**2)
    decay = {"weight_decay": length / lam / start / 1e-2, "weight_decay_mode": "decoupled"}
    options = hand_options(**MODES[mode], **decay)
    for weight in ([radius], [0.6 * radius, -0.8 * radius]):
        records = fresh_records(weight, options.second_moment)
        grad = np.zeros(records["w"].shape, np.float32)
        w, _, _, clamped, far = oracle_rows(records, grad, options, 1.0) if length < 100 else (None,) * 5
        report = riemannian_adam_step(records, grad, options, k=1.0, stamp=1)
        end = np.linalg.norm(records["w"].astype(float))
        assert end <= (1 - BALL_EPS) * (1 + ULP32)
        if w is None:
            assert report[:3] == (-1, 1, 1)
            np.testing.assert_allclose(end, 1 - BALL_EPS, rtol=ULP32)
        else:
            assert report[:3] == (-1, clamped, far)
            assert off_by_ulps(records["w"], w) <= 2
