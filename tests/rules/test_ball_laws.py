"""Isometries, symmetries and closed forms of the Poincare ball, in float64.

Tolerances are multiples of lambda(w) where the point itself, rounded to float64, can't be placed better.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from oracles import carry, exact, log_map, mobius_add, rounded
from sampling import at_radius
from tangents import (
    CURVATURES,
    EPS,
    RADII,
    assert_rows_close,
    every_k,
    every_length,
    every_radius,
    lambda_at,
    points,
    row_norm,
    tangents,
)

from dsa.kernels.poincare import exp_transport, transport_diagonal
from dsa.rules.manifolds import BALL_EPS, PoincareBall

# --- isometry ---------------------------------------------------------------------------


@every_k
@pytest.mark.parametrize("radius", [*RADII, 1 - BALL_EPS])
@every_length
def test_transport_turns_and_scales_only(radius, length, k):  # oracle 2
    """Inner products keep their proportions at any radius; the common factor is the ratio of the metrics."""
    ball = PoincareBall(k)
    w = points(ball, radius)
    u = tangents(ball, w, length)
    a, b = (np.random.default_rng(seed).normal(size=w.shape) for seed in (3, 4))
    _, (pa, pb) = exp_transport(w, u, [a, b], k)
    cosine = (a * b).sum(axis=1) / row_norm(a) / row_norm(b)
    turned = (pa * pb).sum(axis=1) / row_norm(pa) / row_norm(pb)
    # The terms of G grow with lambda h before they cancel.
    tolerance = 4e-15 * max(1.0, lambda_at(radius) * length)
    np.testing.assert_allclose(turned, cosine, rtol=0, atol=tolerance)
    np.testing.assert_allclose(row_norm(pa) / row_norm(a), row_norm(pb) / row_norm(b), rtol=tolerance)


@every_k
@pytest.mark.parametrize("radius", RADII)
@every_length
def test_transport_keeps_riemannian_inner_products(
    radius, length, k
):  # oracle 2, with the metric of the stored point
    ball = PoincareBall(k)
    w = points(ball, radius)
    u = tangents(ball, w, length)
    a, b = (np.random.default_rng(seed).normal(size=w.shape) for seed in (3, 4))
    end, (pa, pb) = exp_transport(w, u, [a, b], k)
    ratio = (ball.scale(end) / ball.scale(w)) ** 2
    lam = max(lambda_at(radius), float(ball.scale(end).max()))
    off = np.abs((ratio * pa * pb).sum(axis=1) - (a * b).sum(axis=1)) / row_norm(a) / row_norm(b)
    assert off.max() <= 8 * EPS * lam


@every_k
@pytest.mark.parametrize("radius", [0.1, 0.9, 0.999, 0.9999])
@every_length
def test_transport_of_the_diagonal_tensor(radius, length, k):  # oracle 12
    ball = PoincareBall(k)
    w = points(ball, radius)
    u = tangents(ball, w, length)
    v = np.random.default_rng(5).uniform(1e-3, 1.0, w.shape)
    moved = transport_diagonal(w, u, v, k)
    _, (probe,) = exp_transport(w, u, [v], k)
    rho2 = (row_norm(probe) / row_norm(v)) ** 2
    lam = lambda_at(radius)
    np.testing.assert_allclose(
        moved.sum(axis=1), rho2 * v.sum(axis=1), rtol=1e-13 * max(1.0, 0.1 * lam * length)
    )
    assert outside_bounds(moved, v, rho2) <= 1e-10


def outside_bounds(moved, v, rho2):
    """Return how far the entries lie beyond rho^2 [min v, max v], relatively.

    G is orthogonal: its squared entries sum to 1 in each row, so every new entry averages the old ones.
    """
    low, high = rho2 * v.min(axis=1), rho2 * v.max(axis=1)
    return float(np.maximum(1 - moved.min(axis=1) / low, moved.max(axis=1) / high - 1).max())


@pytest.mark.parametrize("length", [0.01, 1.0, 6.0, 12.0, 30.0, 200.0])
@pytest.mark.parametrize("radius", [0.5, 0.99, 0.9999, 0.99998])
def test_second_moment_stays_between_its_bounds_on_radial_steps(radius, length):
    """A long step through the origin is where the terms of the tensor's transport cancel most."""
    ball = PoincareBall(1.0)
    w = points(ball, radius, rows=20)
    u = -w / row_norm(w)[:, None] / ball.scale(w) * length
    v = np.random.default_rng(5).uniform(0.2, 3.0, w.shape)
    moved = transport_diagonal(w, u, v, 1.0)
    _, (probe,) = exp_transport(w, u, [v], 1.0)
    rho2 = (row_norm(probe) / row_norm(v)) ** 2
    assert outside_bounds(moved, v, rho2) <= 1e-5


# --- closed forms and symmetries --------------------------------------------------------


@every_k
@pytest.mark.parametrize("radius", [-0.999, -0.9, -0.3, 0.0, 0.5, 0.99])
@pytest.mark.parametrize("length", [-2.0, -0.1, 0.01, 1.0])
def test_one_dimension(radius, length, k):  # oracle 5
    root = math.sqrt(k)
    w = np.array([[radius / root]])
    u = length * (1 - k * w * w) / 2 / root
    end, (moved,) = exp_transport(w, u, [np.ones((1, 1))], k)
    position = math.atanh(root * w[0, 0]) + length / 2
    np.testing.assert_allclose(root * end[0, 0], math.tanh(position), rtol=0, atol=2e-15)
    ratio = math.cosh(math.atanh(radius)) ** 2 / math.cosh(position) ** 2
    np.testing.assert_allclose(
        moved[0, 0], ratio, rtol=8 * EPS * max(lambda_at(radius), 2 * math.cosh(position) ** 2)
    )


@pytest.mark.parametrize("scale", [1e-3, 1 / 3, 7.0, 1e4])
@every_radius
def test_scaling_the_ball_scales_the_step(radius, scale):  # oracle 6
    ball = PoincareBall(1.0)
    w = points(ball, radius)
    u, v = tangents(ball, w, 0.5), tangents(ball, w, 1.0, seed=2)
    end, (moved,) = exp_transport(w, u, [v], 1.0)
    scaled, (scaled_moved,) = exp_transport(scale * w, scale * u, [v], 1.0 / scale**2)
    lam = max(lambda_at(radius), float(ball.scale(end).max()))
    assert_rows_close(scaled / scale, end, 1e-14)
    assert_rows_close(scaled_moved, moved, 1e-14 * lam)
    v2 = v * v
    scaled_v2 = transport_diagonal(scale * w, scale * u, v2, 1.0 / scale**2)
    assert_rows_close(scaled_v2, transport_diagonal(w, u, v2, 1.0), 1e-14 * lam)


@every_radius
def test_rotating_the_ball_rotates_the_step(radius):  # oracle 7
    ball = PoincareBall(1.0)
    w = points(ball, radius)
    u, v = tangents(ball, w, 0.5), tangents(ball, w, 1.0, seed=2)
    turn, _ = np.linalg.qr(np.random.default_rng(9).normal(size=(5, 5)))
    end, (moved,) = exp_transport(w, u, [v], 1.0)
    turned_end, (turned,) = exp_transport(w @ turn, u @ turn, [v @ turn], 1.0)
    lam = max(lambda_at(radius), float(ball.scale(end).max()))
    assert_rows_close(turned_end, end @ turn, 1e-14)
    assert_rows_close(turned, moved @ turn, 1e-14 * lam)


def test_order_and_signs_of_the_coordinates_do_not_matter():  # oracle 7
    ball = PoincareBall(1.0)
    w = points(ball, 0.95)
    u, v = tangents(ball, w, 0.5), tangents(ball, w, 1.0, seed=2)
    signs, order = np.array([1, -1, -1, 1, -1.0]), np.array([3, 0, 4, 1, 2])
    end, (moved,) = exp_transport(w, u, [v], 1.0)
    flipped, (flipped_v,) = exp_transport(w * signs, u * signs, [v * signs], 1.0)
    np.testing.assert_array_equal(flipped, end * signs)
    np.testing.assert_array_equal(flipped_v, moved * signs)
    np.testing.assert_array_equal(
        transport_diagonal(w * signs, u * signs, v * v, 1.0), transport_diagonal(w, u, v * v, 1.0)
    )
    mixed, (mixed_v,) = exp_transport(w[:, order], u[:, order], [v[:, order]], 1.0)
    assert_rows_close(mixed, end[:, order], 1e-15)
    assert_rows_close(mixed_v, moved[:, order], 1e-13)
    mixed_v2 = transport_diagonal(w[:, order], u[:, order], (v * v)[:, order], 1.0)
    assert_rows_close(mixed_v2, transport_diagonal(w, u, v * v, 1.0)[:, order], 1e-13)


@every_k
def test_transport_round_a_triangle_turns_by_its_area(k):  # oracle 10
    """pi minus the angles, clockwise for a triangle that is walked counter-clockwise."""
    ball = PoincareBall(k)
    corners = np.array([[0.3, 0.1], [-0.2, 0.5], [-0.4, -0.3]]) / math.sqrt(k)
    start = np.array([[1.0, 0.0]])
    vector, angles = start, 0.0
    for i in range(3):
        here, ahead, behind = (corners[[(i + j) % 3]] for j in (0, 1, 2))
        angles += _angle(ball.log(here, behind), ball.log(here, ahead))
        end, (vector,) = ball.step(here, ball.log(here, ahead), vector)
        np.testing.assert_allclose(end, ahead, rtol=0, atol=4 * EPS / math.sqrt(k))
    turned = math.atan2(vector[0, 1], vector[0, 0])
    assert turned == pytest.approx(-(math.pi - abs(angles)), abs=1e-14)
    np.testing.assert_allclose(row_norm(vector), 1.0, rtol=1e-14)


def _angle(a, b):
    return math.atan2(a[0, 0] * b[0, 1] - a[0, 1] * b[0, 0], float((a * b).sum()))


# --- against 120 digits -----------------------------------------------------------------


@pytest.mark.parametrize("radius", [0.3, 0.99, 0.9999, 1 - BALL_EPS])
def test_distance_and_log_against_120_digits(radius):
    for k in CURVATURES:
        ball = PoincareBall(k)
        x = points(ball, radius, rows=3)
        y, _ = ball.step(x, tangents(ball, x, 0.02))
        for i in range(3):
            expected = log_map(exact(x[i]), exact(y[i]), exact(k))
            length = rounded(
                2 / (1 - exact(k) * exact(x[i]).dot(exact(x[i]))) * exact(row_norm(expected[None])[0])
            )
            lam = float(ball.scale(y).max())
            assert_rows_close(ball.log(x, y)[[i]], rounded(expected)[None], 8 * EPS * lam / 0.02)
            assert ball.dist(x, y)[i] == pytest.approx(length, rel=8 * EPS * lam / 0.02)


@pytest.mark.parametrize("radius", [0.5, 0.9, 0.99, 0.999, 0.9999, 1 - BALL_EPS])
@pytest.mark.parametrize("dim", [2, 8, 64])
def test_storing_a_point_in_float32_moves_it_by_its_rounding(radius, dim):  # oracle 18
    ball = PoincareBall(1.0)
    w = at_radius(np.random.default_rng(8), 500, dim, radius, 1.0)
    moved = ball.dist(w, w.astype(np.float32).astype(float))
    assert moved.max() <= 6e-8 * lambda_at(radius) * radius
    # Half an ulp is 6e-8 of an element at most; over mantissas and roundings 2.0e-8 (D = 2) to 2.5e-8 rms.
    assert np.sqrt((moved**2).mean()) == pytest.approx(2.3e-8 * lambda_at(radius) * radius, rel=0.2)


@pytest.mark.parametrize("k", CURVATURES)
def test_project_brings_rows_back_to_the_clamp_and_leaves_others(k):
    ball = PoincareBall(k)
    limit = 1 - BALL_EPS
    radii = np.array([0.0, 0.5, 0.9999, limit, limit * (1 + 6e-8), 0.999999, 1.0, 40.0])
    w = points(ball, radii)
    projected, changed = ball.project(w)
    np.testing.assert_array_equal(changed, radii > 1 - 0.9e-5)
    np.testing.assert_array_equal(projected[~changed], w[~changed])
    np.testing.assert_allclose(math.sqrt(k) * row_norm(projected[changed]), limit, rtol=4 * EPS)
    inner = (projected * w).sum(axis=1)[changed]
    np.testing.assert_allclose(inner, row_norm(projected)[changed] * row_norm(w)[changed], rtol=1e-14)


@every_k
def test_clamp_leaves_points_on_it_and_vectors_of_their_riemannian_length(k):  # oracle 14
    ball = PoincareBall(k)
    w = points(ball, 0.9, rows=20)
    u, v = 12 * tangents(ball, w, 1.0), tangents(ball, w, 1.0, seed=2)
    end, (moved,) = exp_transport(w, u, [v], k)
    expected = [carry(exact(w[i]), exact(u[i]), exact(k)) for i in range(20)]
    clamped = np.array([e.clamped for e in expected])
    assert clamped.any()
    np.testing.assert_allclose(math.sqrt(k) * row_norm(end)[clamped], 1 - BALL_EPS, rtol=1e-15)
    lam_edge = 2 / (BALL_EPS * (2 - BALL_EPS))
    before = ball.scale(w)[:, 0] * row_norm(v)
    np.testing.assert_allclose((lam_edge * row_norm(moved))[clamped], before[clamped], rtol=1e-12)
    for i in range(20):
        assert_rows_close(end[[i]], rounded(expected[i].point)[None], 1e-14)
        assert_rows_close(moved[[i]], rounded(expected[i].vector(exact(v[i])))[None], 1e-11)


def test_mobius_addition_of_the_oracle_is_an_isometry():
    """The oracle is checked too: translations of the ball keep distances."""
    ball = PoincareBall(2.0)
    a, x, y = (points(ball, radius, rows=3, seed=seed) for seed, radius in enumerate((0.5, 0.4, 0.6)))
    moved = [np.stack([mobius_add(a[i], z[i], 2.0) for i in range(3)]) for z in (x, y)]
    np.testing.assert_allclose(ball.dist(*moved), ball.dist(x, y), rtol=1e-14)
