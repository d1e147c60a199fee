"""Changing the curvature of a table: what becomes of weights and moments.

The gradient *covector* of a loss does not depend on the metric, and ``lambda^2 m`` is the moving average of
it. At a fixed point ``m`` therefore changes by the ratio ``(lambda / lambda')^2``, and every other field of a
record by what its update rule makes of that: moments rescaled so equal moments accumulated under the new
curvature.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from dsa.rules.manifolds import Manifold
from dsa.rules.updates import AnyRule
from dsa.schema import DECAY, Records, read_numbers, store_numbers

__all__ = ["CurvatureMap", "map_weights", "recurve"]

CurvatureMap = Literal["clip", "log0"]
Doubles = NDArray[np.float64]
_KEPT: Final = {"id", "live", "w", DECAY, "s"}
"""The fields that no moments are: whose the row is, its weight and what that is to decay by, its stamp."""


def recurve(
    records: Records,
    old: Manifold,
    new: Manifold,
    rule: AnyRule,
    mapping: CurvatureMap,
    reset_moments: bool,
) -> Records:
    """Return records of a space of one curvature as records of another.

    Args:
        records: ``(B,)`` of the rule's schema, with weights; not changed.
        old: The space they are in.
        new: The space to put them in.
        rule: What the fields beside the weight mean.
        mapping: ``"clip"`` keeps the coordinates and clips; ``"log0"`` keeps the tangent vector at the
            origin, hence every distance to the origin.
        reset_moments: Zero the moments and counts instead of rescaling the moments.
    """
    changed = records.copy()
    w = old.project(read_numbers(records, "w").astype(np.float64))[0]
    moved = map_weights(w, old, new, mapping)
    store_numbers(changed, "w", moved)
    if reset_moments:
        for name in set(changed.dtype.names or ()) - _KEPT:
            changed[name] = 0
        return changed
    # Flat space is scaled by 1, not by the 2 that the ball tends to, as `Manifold.scale` has it.
    ratio = (old.scale(w) / new.scale(moved)) ** 2
    rule.rescale(changed, ratio, old, new)
    return changed


def map_weights(w: Doubles, old: Manifold, new: Manifold, mapping: CurvatureMap) -> Doubles:
    """Return points of one space as points of another.

    Args:
        w: ``(B, D)`` float64.
        old: The space they are in.
        new: The space to put them in.
        mapping: See `recurve`.
    """
    if mapping == "log0":
        origin = np.zeros_like(w)
        tangent = old.log(origin, w) * old.scale(origin) / new.scale(origin)
        w = new.step(origin, tangent)[0]
    return new.project(w)[0]
