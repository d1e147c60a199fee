"""Records to update, and what "equal up to rounding" means for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from dsa.rules.conventions import AdamOptions
from dsa.schema import adam_schema

ULP32 = float(np.finfo(np.float32).eps)


def fresh_records(weights: Any, second_moment: str = "coordinate") -> np.ndarray:
    """Return records of the given weights (B, D) with zero moments and counters."""
    weights = np.atleast_2d(np.asarray(weights, np.float32))
    per = "row" if second_moment == "row" else "element"
    records = np.zeros(len(weights), adam_schema(weights.shape[1], second_moment_per=per).dtype)
    records["w"] = weights
    return records


def used_records(
    rng: np.random.Generator, weights: Any, second_moment: str, scale: Any, longest: int = 50
) -> np.ndarray:
    """Return records in the middle of a run.

    Args:
        rng: Source of the numbers.
        weights: ``(B, D)``.
        second_moment: As in `AdamOptions`.
        scale: ``(B, 1)`` or a number: the size of what the moments average.
        longest: The largest counter.
    """
    records = fresh_records(weights, second_moment)
    shape = records["w"].shape
    records["m"] = scale * rng.normal(size=shape)
    squares = scale**2 * rng.uniform(0.2, 3.0, size=shape)
    records["v"] = squares.sum(axis=1) if second_moment == "row" else squares
    records["t"] = rng.integers(0, longest + 1, len(records))
    records["s"] = rng.integers(0, 1000, len(records))
    return records


def at_radius(rng: np.random.Generator, rows: int, dim: int, radius: Any, k: float) -> np.ndarray:
    """Return float64 points (rows, dim) with sqrt(k) |w| = radius, in random directions."""
    points = rng.normal(size=(rows, dim))
    return points * np.reshape(radius, (-1, 1)) / np.sqrt(k) / np.linalg.norm(points, axis=1, keepdims=True)


def off_by_ulps(actual: Any, expected: Any, scale: Any = None) -> float:
    """Return the largest difference in float32 ulps of each row's largest element.

    Args:
        actual: float32 results of the kernel, ``(B, D)`` or ``(B,)``.
        expected: The same in float64.
        scale: More arrays whose sizes count: numbers that went into a sum.
    """
    actual = np.asarray(actual, np.float64).reshape(len(actual), -1)
    expected = np.asarray(expected, np.float64).reshape(actual.shape)
    largest = np.abs(expected).max(axis=1)
    if scale is not None:
        largest = np.maximum(
            largest, np.abs(np.asarray(scale, np.float64).reshape(len(actual), -1)).max(axis=1)
        )
    largest = np.maximum(largest, np.finfo(np.float32).tiny)
    return float((np.abs(actual - expected).max(axis=1) / (largest * ULP32)).max())


def hand_options(**changes: Any) -> AdamOptions:
    """Return options with lr 1e-2 and the given changes."""
    return AdamOptions(**({"lr": 1e-2} | changes))
