"""A new table's content: its first weights, and no moments."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from dsa.errors import StateWarning, notify
from dsa.rules.init import FromArray
from dsa.schema import Records, store_numbers
from dsa.state.content import TableContent
from dsa.state.storage import TableSpec

__all__ = ["first_content"]

_BLOCK_BYTES: Final = 8 << 20


def first_content(spec: TableSpec) -> TableContent:
    """Return the content of a table that is to be made: an array's rows, or nothing but a rule.

    On the ball the whole array is scaled by one factor when its longest row exceeds
    ``init_max_norm_fraction`` of the radius, with a warning, so that no row starts near the boundary, where
    learning is slow; a rule's rows are clipped one by one instead, since their maximum isn't known.

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
        store_numbers(records, "w", weights if factor == 1.0 else weights * np.float64(factor))
        records["s"] = 1
        yield start, records


def _ball_factor(spec: TableSpec, source: FromArray, block: int) -> float:
    k, fraction = spec.facts.k, spec.facts.init_max_norm_fraction
    if k == 0.0:
        return 1.0
    longest = 0.0
    for _, weights in source.blocks(block):
        wide = weights.astype(np.float64)
        longest = max(longest, float(np.sqrt(np.einsum("ij,ij->i", wide, wide)).max()))
    limit = fraction / math.sqrt(k)
    if longest <= limit * (1.0 + 1e-6):
        return 1.0
    notify(
        f"the longest row of table {spec.name!r} has norm {longest:.4g}, beyond "
        f"{fraction:g} of the radius of the ball with k={k:g}: all its rows are "
        f"scaled by {limit / longest:.4g}; pass smaller weights, or another init_max_norm_fraction",
        StateWarning,
    )
    return limit / longest
