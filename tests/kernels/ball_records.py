"""Records in the ball for the fused pass, and what the oracle makes of them."""

from __future__ import annotations

import numpy as np
from oracles import exact, riemannian_adam_row, rounded
from sampling import at_radius, used_records

MODES = {
    "coordinate": {},
    "coordinate, sqrt": {"v_transport": "sqrt"},
    "frame": {"second_moment": "frame"},
    "frame, sqrt": {"second_moment": "frame", "v_transport": "sqrt"},
    "row": {"second_moment": "row"},
}
RADII = (0.0, 0.1, 0.9, 0.99, 0.999, 0.9999, 0.99998)


def metric_size(second_moment: str, weights: np.ndarray, k: float) -> np.ndarray:
    """Return what a Euclidean gradient of size 1 is divided by before it is averaged, per row."""
    lam = 2 / (1 - k * (weights * weights).sum(axis=1, keepdims=True))
    return lam**2 if second_moment == "coordinate" else lam


def batch(rng, options, k, dim=4, size=1.0):
    """Return records at all radii in the middle of a run, with a gradient of the given size."""
    weights = at_radius(rng, len(RADII), dim, RADII, k)
    records = used_records(rng, weights, options.second_moment, 1.0)
    lam2 = metric_size("coordinate", weights, k)
    records["m"] *= size / lam2
    squares = (size / metric_size(options.second_moment, weights, k)) ** 2
    records["v"] *= squares[:, 0] if options.second_moment == "row" else squares
    return records, (size * rng.normal(size=weights.shape)).astype(np.float32)


def oracle_states(records, grad, options, k, step=None):
    """Return the oracle's state of each row after its step."""
    return [
        riemannian_adam_row(
            *(exact(np.asarray(r[f], np.float64)) for f in "wmv"),
            int(r["t"]),
            exact(g),
            options,
            exact(k),
            step,
        )
        for r, g in zip(records, grad, strict=True)
    ]


def oracle_rows(records, grad, options, k, step=None):
    """Return w, m, v after the oracle's step, and how many rows were clamped, and from far."""
    rows = oracle_states(records, grad, options, k, step)
    clamped = sum(row.clamped for row in rows)
    far = sum(row.clamped and row.length > 1 for row in rows)
    return *(np.array([rounded(getattr(row, name)) for row in rows]) for name in "wmv"), clamped, far
