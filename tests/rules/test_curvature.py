"""What becomes of points and moments when the curvature of a table changes."""

from __future__ import annotations

import numpy as np
import pytest
from sampling import at_radius, fresh_records, off_by_ulps

from dsa.rules.adam import adam_rule
from dsa.rules.curvature import map_weights, recurve
from dsa.rules.manifolds import BALL_EPS, manifold_of

CHANGES = [(1.0, 0.25), (0.5, 2.0), (1.0, 1e-6), (0.0, 1.0), (1.0, 0.0)]
every_change = pytest.mark.parametrize(("old", "new"), CHANGES)


def accumulated(weights, gradients, manifold, mode):
    """Return the moving averages of gradients at a fixed point, in the given space."""
    m, v = np.zeros_like(weights), 0.0
    for gradient in gradients:
        grad, scale = manifold.rgrad(weights, gradient), manifold.scale(weights)
        if mode == "row":
            flat = manifold.k == 0.0
            squares = (gradient**2).mean(axis=1) if flat else ((scale * grad) ** 2).sum(axis=1)
        else:
            squares = {"coordinate": grad, "frame": scale * grad}[mode] ** 2
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * squares
    return m, v


@every_change
@pytest.mark.parametrize("mode", ["coordinate", "frame", "row"])
def test_rescaled_moments_equal_moments_accumulated_under_the_new_curvature(mode, old, new):  # oracle 20
    rng = np.random.default_rng(0)
    records = fresh_records(at_radius(rng, 12, 5, 0.6, max(old, new)), mode)
    weights = records["w"].astype(float)
    gradients = rng.normal(size=(30, 12, 5))
    records["m"], records["v"] = accumulated(weights, gradients, manifold_of(old), mode)
    records["t"] = 30
    changed = recurve(records, manifold_of(old), manifold_of(new), adam_rule(mode), "clip", False)
    m, v = accumulated(weights, gradients, manifold_of(new), mode)
    np.testing.assert_array_equal(changed["w"], records["w"])
    assert off_by_ulps(changed["m"], m) <= 1.5
    assert off_by_ulps(changed["v"], v) <= 1.5
    np.testing.assert_array_equal(changed["t"], 30)


@every_change
def test_log0_keeps_the_distance_to_the_origin(old, new):  # oracle 20
    before, after = manifold_of(old), manifold_of(new)
    w = at_radius(np.random.default_rng(1), 10, 4, np.linspace(0.01, 0.99, 10), old or 1.0)
    moved = map_weights(w, before, after, "log0")
    origin = np.zeros_like(w)
    np.testing.assert_allclose(after.dist(origin, moved), before.dist(origin, w), rtol=1e-12)
    cosine = (w * moved).sum(axis=1) / np.linalg.norm(w, axis=1) / np.linalg.norm(moved, axis=1)
    np.testing.assert_allclose(cosine, 1.0, rtol=1e-14)


def test_clip_keeps_coordinates_inside_and_clips_others():
    w = at_radius(np.random.default_rng(2), 4, 3, [0.1, 0.4, 0.6, 0.9], 1.0)
    moved = map_weights(w, manifold_of(1.0), manifold_of(4.0), "clip")
    np.testing.assert_array_equal(moved[:2], w[:2])
    np.testing.assert_allclose(2 * np.linalg.norm(moved[2:], axis=1), 1 - BALL_EPS, rtol=1e-15)


def test_reset_clears_moments_and_counters_only():
    records = fresh_records(at_radius(np.random.default_rng(3), 4, 3, 0.3, 1.0))
    records["m"], records["v"], records["t"], records["s"] = 1.0, 2.0, 3, 4
    before = records.copy()
    changed = recurve(records, manifold_of(1.0), manifold_of(0.5), adam_rule("coordinate"), "clip", True)
    for name in ("m", "v", "t"):
        assert not changed[name].any()
    np.testing.assert_array_equal(changed["w"], before["w"])
    np.testing.assert_array_equal(changed["s"], 4)
    assert records.tobytes() == before.tobytes()
