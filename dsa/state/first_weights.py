"""A new table's content: its first weights, and no moments."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dsa.errors import StateWarning, notify
from dsa.rules.init import FromArray
from dsa.rules.manifolds import manifold_of
from dsa.schema import Records, store_numbers
from dsa.state.content import TableContent
from dsa.state.storage import TableSpec

__all__ = ["first_content"]

_BLOCK_BYTES: Final = 8 << 20


def first_content(spec: TableSpec) -> TableContent:
    """Return the content of a table that is to be made: an array's rows, or nothing but a rule.

    On the ball the whole array is scaled by one factor when its longest row exceeds
    ``init_max_norm_fraction`` of the radius, with a warning, so that no row starts near the boundary, where
    learning is slow; a rule's rows are clipped one by one instead, since their maximum isn't known. An array
    whose rows are all inside the ball is taken as it is where the fraction was left out.

    Reading the blocks raises `ValueError` when the array holds a value that is not finite.
    """
    return TableContent(spec.facts, lambda: _blocks(spec))


def _blocks(spec: TableSpec) -> Iterator[tuple[int, Records]]:
    source = spec.source
    if not isinstance(source, FromArray):
        return
    block = max(1, _BLOCK_BYTES // spec.schema.dtype.itemsize)
    factor = _ball_factor(spec, source, block)
    for start, weights in source.blocks(block):
        records = np.zeros(len(weights), spec.schema.dtype)
        store_numbers(records, "w", _inside(spec, weights, factor))
        records["s"] = 1
        yield start, records


def _inside(spec: TableSpec, weights: NDArray[np.float32], factor: float) -> NDArray[np.floating[Any]]:
    """Return the weights as a table holds them: scaled, and on the ball none too close to its edge."""
    if spec.facts.k == 0.0:
        return weights
    wide = weights * np.float64(factor)
    projected, outside = manifold_of(spec.facts.k).project(wide)
    return projected if outside.any() else wide


def _ball_factor(spec: TableSpec, source: FromArray, block: int) -> float:
    k, fraction = spec.facts.k, spec.facts.init_max_norm_fraction
    if k == 0.0:
        return 1.0
    longest = 0.0
    for _, weights in source.blocks(block):
        wide = weights.astype(np.float64)
        longest = max(longest, float(np.sqrt(np.einsum("ij,ij->i", wide, wide)).max()))
    limit, inside = fraction / math.sqrt(k), longest * math.sqrt(k) < 1.0
    if longest <= limit * (1.0 + 1e-6) or (spec.keeps_inside and inside):
        return 1.0
    remedy = "init_max_norm_fraction=1.0 to keep them" if inside else "weights that are inside the ball"
    notify(
        f"the longest row of table {spec.name!r} has norm {longest:.4g}, beyond {fraction:g} of the radius "
        f"of the ball with k={k:g}: all its rows are scaled by {limit / longest:.4g}; pass {remedy}",
        StateWarning,
    )
    return limit / longest
