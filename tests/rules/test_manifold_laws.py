"""Laws that every manifold obeys, in float64.

Tolerances are multiples of lambda(w) where the point itself, rounded to float64, can't be placed better.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from tangents import (
    CURVATURES,
    EPS,
    assert_rows_close,
    every_length,
    every_radius,
    lambda_at,
    points,
    row_norm,
    tangents,
)

from dsa.rules.manifolds import Euclidean, PoincareBall, manifold_of

MANIFOLDS = [Euclidean(), *map(PoincareBall, CURVATURES)]
every_manifold = pytest.mark.parametrize("manifold", MANIFOLDS, ids=repr)


# ------------------------------------------------------------------------


@every_manifold
@every_radius
@every_length
def test_distance_to_the_end_of_a_step_is_its_length(manifold, radius, length):  # oracle 1
    w = points(manifold, radius)
    u = tangents(manifold, w, length)
    end, _ = manifold.step(w, u)
    expected = (manifold.scale(w)[:, 0]) * row_norm(u)
    lam = max(lambda_at(radius), float(manifold.scale(end).max()))
    np.testing.assert_allclose(manifold.dist(w, end), expected, rtol=8 * EPS * lam / length)


@every_manifold
@every_radius
@every_length
def test_log_undoes_a_step_and_points_back_from_its_end(manifold, radius, length):  # oracle 3
    w = points(manifold, radius)
    u = tangents(manifold, w, length)
    end, (moved,) = manifold.step(w, u, u)
    lam = max(lambda_at(radius), float(manifold.scale(end).max()))
    assert_rows_close(manifold.log(w, end), u, 40 * EPS * lam / length)
    assert_rows_close(-manifold.log(end, w), moved, 40 * EPS * lam / length)


@every_manifold
@every_radius
@every_length
def test_round_trip(manifold, radius, length):  # oracle 4
    w = points(manifold, radius)
    u, v = tangents(manifold, w, length), tangents(manifold, w, 1.0, seed=2)
    end, (back, moved) = manifold.step(w, u, u, v)
    again, (returned,) = manifold.step(end, -back, moved)
    lam = max(lambda_at(radius), float(manifold.scale(end).max()))
    hyperbolic = manifold.scale(w)[:, 0] * row_norm(again - w) * math.sqrt(manifold.k or 1.0)
    assert hyperbolic.max() <= 16 * EPS * lam * math.exp(length)
    assert_rows_close(returned, v, 16 * EPS * lam * math.exp(length))


@every_manifold
def test_no_step_changes_nothing(manifold):
    w = points(manifold, np.linspace(0.0, 0.99, 8))
    v = tangents(manifold, w, 1.0)
    end, (moved,) = manifold.step(w, np.zeros_like(w), v)
    np.testing.assert_array_equal(end, w)
    np.testing.assert_array_equal(moved, v)
    np.testing.assert_array_equal(manifold.dist(w, w), 0.0)
    np.testing.assert_array_equal(manifold.log(w, w), 0.0)


@every_manifold
def test_a_step_and_its_arguments_are_separate(manifold):
    w = points(manifold, 0.5)
    u, v = tangents(manifold, w, 0.5), tangents(manifold, w, 1.0, seed=2)
    copies = [x.copy() for x in (w, u, v)]
    manifold.step(w, u, v, max_step=0.1)
    manifold.project(3 * w)
    for argument, copy in zip((w, u, v), copies, strict=True):
        np.testing.assert_array_equal(argument, copy)


@every_manifold
def test_riemannian_gradient_gives_the_derivative_along_a_step(manifold):
    """A Taylor remainder: f(exp_w(s u)) - f(w) - s lambda^2 <grad, u> shrinks with s^2."""
    w = points(manifold, 0.6)
    u = tangents(manifold, w, 1.0)
    target = points(manifold, 0.3, seed=5)
    grad = manifold.rgrad(w, w - target)

    def loss(x):
        return 0.5 * ((x - target) ** 2).sum(axis=1)

    slope = manifold.scale(w)[:, 0] ** 2 * (grad * u).sum(axis=1)
    remainders = [np.abs(loss(manifold.step(w, s * u)[0]) - loss(w) - s * slope) for s in (1e-3, 1e-4)]
    np.testing.assert_allclose(remainders[0] / remainders[1], 100.0, rtol=0.1)


@every_manifold
@pytest.mark.parametrize("limit", [1e-3, 0.5])
def test_max_step_shortens_only_long_steps(manifold, limit):
    w = points(manifold, 0.7)
    root = math.sqrt(manifold.k or 1.0)
    long, _ = manifold.step(w, tangents(manifold, w, 5.0), max_step=limit)
    np.testing.assert_allclose(root * manifold.dist(w, long), limit, rtol=1e-11)
    short = tangents(manifold, w, 0.5 * limit)
    np.testing.assert_array_equal(manifold.step(w, short, max_step=limit)[0], manifold.step(w, short)[0])


@every_manifold
def test_distance_is_symmetric_and_obeys_the_triangle_inequality(manifold):
    x, y, z = (points(manifold, 0.8, rows=100, seed=seed) for seed in range(3))
    np.testing.assert_array_equal(manifold.dist(x, y), manifold.dist(y, x))
    assert (manifold.dist(x, z) <= (manifold.dist(x, y) + manifold.dist(y, z)) * (1 + 1e-14)).all()


def test_manifold_of_a_curvature():
    assert manifold_of(0.0) == Euclidean()
    assert manifold_of(2.5) == PoincareBall(2.5)
    assert manifold_of(0.0).k == 0.0
    for k in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"k=.* is not the curvature of a ball"):
            manifold_of(k)
