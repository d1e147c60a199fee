"""Points and tangent vectors for the laws of manifolds, and how results are compared."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sampling import at_radius

EPS = float(np.finfo(np.float64).eps)
RADII = (0.1, 0.5, 0.9, 0.99, 0.999, 0.9999)
CURVATURES = (1.0, 0.01, 30.0)
LENGTHS = (0.01, 0.3, 2.0)


def points(manifold, radius, rows=8, dim=5, seed=0):
    """Return points at a radius of the ball, or of that norm in flat space."""
    return at_radius(np.random.default_rng(seed), rows, dim, radius, manifold.k or 1.0)


def tangents(manifold, w, length, seed=1):
    """Return tangent vectors of a dimensionless length; steps up to 2 from RADII do not reach the clamp."""
    u = np.random.default_rng(seed).normal(size=w.shape)
    u /= np.linalg.norm(u, axis=1, keepdims=True) * manifold.scale(w) * math.sqrt(manifold.k or 1.0)
    return length * u


def lambda_at(radius):
    return 2 / (1 - radius**2)


def row_norm(x):
    return np.linalg.norm(x, axis=1)


def assert_rows_close(actual, expected, relative):
    """Compare in units of each row's norm."""
    off = row_norm(actual - expected) / row_norm(expected)
    assert off.max() <= relative, f"{off.max():.2e} > {relative:.2e}"


every_radius = pytest.mark.parametrize("radius", RADII)
every_length = pytest.mark.parametrize("length", LENGTHS)
every_k = pytest.mark.parametrize("k", CURVATURES)
