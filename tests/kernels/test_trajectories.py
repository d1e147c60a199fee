"""Symmetries of whole runs: what many steps together must not depend on.

Where a tolerance is that of the mathematics, the run is one in float64 (`runs`); the fused pass is asked for
bit-equality.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from oracles import RowState, adam_row, conformal_factor, gyration, mobius_add
from runs import BETA2, Float64Run, pull, start
from sampling import ULP32, at_radius, fresh_records, off_by_ulps

from dsa.kernels.poincare import riemannian_adam_step
from dsa.rules.conventions import AdamOptions
from dsa.rules.manifolds import PoincareBall

# --- scaling, oracle 6 ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["coordinate", "frame", "row"])
@pytest.mark.parametrize("scale", [0.25, 3.0])
def test_whole_runs_scale_with_the_ball(mode, scale):
    """(w, g, k) -> (s w, g / s, k / s^2), eps -> eps / s, lr -> s lr."""
    w, target = start()
    one = Float64Run(w, mode=mode, lr=1e-3, eps=1e-4)
    two = Float64Run(scale * w, k=1 / scale**2, mode=mode, lr=scale * 1e-3, eps=1e-4 / scale)
    for _ in range(50):
        gradient = pull(one.w, target)
        one.step(gradient)
        two.step(gradient / scale)
    np.testing.assert_allclose(two.w / scale, one.w, rtol=0, atol=1e-13)


@pytest.mark.parametrize("second_moment", ["coordinate", "frame", "row"])
def test_fused_steps_scale_with_the_ball(second_moment):
    """By a power of two every float32 scales exactly, so the records agree to the bit."""
    w, target = start(radius=0.99)
    one, two = fresh_records(w, second_moment), fresh_records(4 * w.astype(np.float32), second_moment)
    options = AdamOptions(lr=1e-3, eps=2.0**-20, second_moment=second_moment)
    scaled = AdamOptions(lr=4e-3, eps=2.0**-22, second_moment=second_moment)
    for step in range(1, 31):
        gradient = pull(one["w"].astype(float), target).astype(np.float32)
        riemannian_adam_step(one, gradient, options, k=1.0, stamp=step)
        riemannian_adam_step(two, gradient / 4, scaled, k=1 / 16, stamp=step)
    np.testing.assert_array_equal(two["w"], 4 * one["w"])
    np.testing.assert_array_equal(two["m"], one["m"] / 4)
    np.testing.assert_array_equal(two["v"], one["v"] / 16)


# --- reflections, permutations, rotations: oracle 7 -----------------------------------------------

SIGNS = np.array([1, -1, -1, 1, -1, 1, 1, -1.0])


def mirrored_records(mode, transport, steps=200, radius=0.9):
    """Run a problem and its mirror image; return the final records of both."""
    w, target = (x.astype(np.float32) for x in start(radius))
    flip = SIGNS.astype(np.float32)
    one, two = fresh_records(w, mode), fresh_records(w * flip, mode)
    options = AdamOptions(lr=1e-2, second_moment=mode, v_transport=transport)
    for step in range(1, steps + 1):
        for records, goal in ((one, target), (two, target * flip)):
            gradient = pull(records["w"].astype(float), goal.astype(float)).astype(np.float32)
            assert riemannian_adam_step(records, gradient, options, k=1.0, stamp=step).bad == -1
    return one, two


@pytest.mark.parametrize("mode", ["coordinate", "frame", "row"])
def test_a_mirrored_problem_gives_the_mirrored_run(mode):
    one, two = mirrored_records(mode, "tensor")
    flip = SIGNS.astype(np.float32)
    np.testing.assert_array_equal(two["w"], one["w"] * flip)
    np.testing.assert_array_equal(two["m"], one["m"] * flip)
    np.testing.assert_array_equal(two["v"], one["v"])


def test_the_root_of_v_as_a_vector_breaks_the_mirror():
    """What v_transport="tensor" exists for: the original reading fails the same problem."""
    one, two = mirrored_records("coordinate", "sqrt")
    off = np.abs(two["w"] - one["w"] * SIGNS.astype(np.float32)).max()
    assert off > 1e-2


@pytest.mark.parametrize(("mode", "tolerance"), [("coordinate", 3e-13), ("frame", 3e-13), ("row", 3e-13)])
def test_the_order_of_the_coordinates_does_not_matter(mode, tolerance):
    w, target = start()
    order = np.array([5, 2, 7, 0, 1, 6, 3, 4])
    one, two = Float64Run(w, mode=mode), Float64Run(w[:, order], mode=mode)
    for _ in range(200):
        one.step(pull(one.w, target))
        two.step(pull(two.w, target[:, order]))
    np.testing.assert_allclose(two.w, one.w[:, order], rtol=0, atol=tolerance)


def test_row_mode_commutes_with_rotations():
    w, target = start()
    turn, _ = np.linalg.qr(np.random.default_rng(3).normal(size=(8, 8)))
    one, two = Float64Run(w, mode="row"), Float64Run(w @ turn, mode="row")
    for _ in range(100):
        one.step(pull(one.w, target))
        two.step(pull(two.w, target @ turn))
    np.testing.assert_allclose(two.w, one.w @ turn, rtol=0, atol=1e-13)


# --- translations of the ball, oracle 8 -----------------------------------------------------------


@pytest.mark.parametrize("k", [1.0, 4.0])
def test_row_mode_commutes_with_translations(k):
    rng = np.random.default_rng(5)
    w, target = start(radius=0.4, rows=4, dim=3, k=k)
    shift = at_radius(rng, 1, 3, 0.3, k)[0]

    def moved(x):
        return np.stack([mobius_add(shift, row, k) for row in x])

    one, two = Float64Run(w, k=k, mode="row", lr=2e-2), Float64Run(moved(w), k=k, mode="row", lr=2e-2)
    for _ in range(50):
        gradient = pull(one.w, target)
        pushed = np.stack([_pushed(shift, x, g, k) for x, g in zip(one.w, gradient, strict=True)])
        one.step(gradient)
        two.step(pushed)
    assert (np.linalg.norm(one.w - w, axis=1) > 0.1 / math.sqrt(k)).all()
    np.testing.assert_allclose(two.w, moved(one.w), rtol=0, atol=1e-12)


def _pushed(shift, x, euclidean_gradient, k):
    """Return the Euclidean gradient at shift (+) x of the loss carried along by the translation."""
    there = mobius_add(shift, x, k)
    lam, lam_there = conformal_factor(x, k), conformal_factor(there, k)
    riemannian = euclidean_gradient / lam**2
    return lam_there**2 * (lam / lam_there) * gyration(shift, x, riemannian, k)


# --- flat limit, oracle 9 -------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1e-4, 1e-6, 1e-9, 1e-12])
def test_small_curvature_is_adam_with_four_times_eps(k):
    rng = np.random.default_rng(7)
    w = at_radius(rng, 5, 4, 2.0, 1.0)
    run, options = Float64Run(w, k=k, lr=1e-2, eps=1e-3), AdamOptions(lr=1e-2, eps=4e-3)
    rows = [RowState(row, np.zeros(4), np.zeros(4)) for row in w]
    for t in range(20):
        gradient = rng.normal(size=w.shape)
        run.step(gradient)
        rows = [adam_row(row.w, row.m, row.v, t, g, options) for row, g in zip(rows, gradient, strict=True)]
    np.testing.assert_allclose(run.w, [row.w for row in rows], rtol=0, atol=0.1 * k + 1e-13)


# --- second moments of a run ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["coordinate", "frame"])
def test_without_gradient_the_second_moment_only_decays(mode):  # oracle 12, in the fused pass
    """lambda^2 sum(v) shrinks by beta2 in each step; in the frame the sum of v itself does."""
    rng = np.random.default_rng(6)
    w = at_radius(rng, 20, 6, 0.9, 1.0)
    records = fresh_records(w, mode)
    records["m"] = 1e-3 * rng.normal(size=w.shape)
    records["v"] = 1e-6 * rng.uniform(0.5, 2.0, w.shape)
    records["t"] = 100
    before = records.copy()
    options = AdamOptions(lr=1e-2, second_moment=mode)
    assert riemannian_adam_step(records, np.zeros(w.shape, np.float32), options, k=1.0, stamp=1)[:3] == (
        -1,
        0,
        0,
    )
    assert (np.linalg.norm(records["w"] - before["w"], axis=1) > 1e-4).all()

    def total(batch):
        sums = batch["v"].astype(float).sum(axis=1)
        scale = PoincareBall(1.0).scale(batch["w"].astype(float))[:, 0]
        return sums if mode == "frame" else scale**2 * sums

    # The stored points are rounded, and with them lambda by 6e-8 lambda.
    np.testing.assert_allclose(total(records), BETA2 * total(before), rtol=4 * ULP32 * 10)
    assert (records["v"] >= 0).all()


@pytest.mark.parametrize("mode", ["coordinate", "frame", "row"])
def test_fused_run_stays_with_the_float64_run(mode):
    """100 steps; each rounds w to float32 once."""
    w, target = (x.astype(np.float32).astype(float) for x in start(radius=0.8))
    run, records = Float64Run(w, mode=mode), fresh_records(w, mode)
    options = AdamOptions(lr=1e-2, second_moment=mode)
    for step in range(1, 101):
        gradient = pull(run.w, target).astype(np.float32)
        run.step(gradient.astype(float))
        assert riemannian_adam_step(records, gradient, options, k=1.0, stamp=step).bad == -1
    assert off_by_ulps(records["w"], run.w) <= 50
    np.testing.assert_array_equal(records["t"], 100)
    np.testing.assert_array_equal(records["s"], 100)
