"""Writing a table's first weights."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from dsa.errors import StateWarning
from dsa.init import FromArray, Initializer
from dsa.notices import notify
from dsa.table import Table, blank_records

__all__ = ["write_initial_weights"]

_BLOCK_BYTES: Final = 8 << 20


def write_initial_weights(table: Table, source: Initializer | FromArray) -> None:
    """Copy an array into a fresh table, block by block; a rule needs no writing.

    On the ball the whole array is scaled by one factor when its longest row exceeds
    ``init_max_norm_fraction`` of the radius, with a warning, so that no row starts near the boundary, where
    learning is slow; a rule's rows are clipped one by one instead, since their maximum isn't known.

    Raises:
        ValueError: the array holds a value that is not finite.
    """
    if not isinstance(source, FromArray):
        return
    block = max(1, _BLOCK_BYTES // table.backend.schema.dtype.itemsize)
    factor = _ball_factor(table, source, block)
    for start, weights in source.blocks(block):
        records = blank_records(table, len(weights), stamp=1)
        records["w"] = weights if factor == 1.0 else weights * np.float64(factor)
        table.backend.write(np.arange(start, start + len(weights)), records)


def _ball_factor(table: Table, source: FromArray, block: int) -> float:
    if table.k == 0.0:
        return 1.0
    longest = 0.0
    for _, weights in source.blocks(block):
        wide = weights.astype(np.float64)
        longest = max(longest, float(np.sqrt(np.einsum("ij,ij->i", wide, wide)).max()))
    limit = table.init_max_norm_fraction / math.sqrt(table.k)
    if longest <= limit * (1.0 + 1e-6):
        return 1.0
    notify(
        f"the longest row of table {table.name!r} has norm {longest:.4g}, beyond "
        f"{table.init_max_norm_fraction:g} of the radius of the ball with k={table.k:g}: all its rows are "
        f"scaled by {limit / longest:.4g}; pass smaller weights, or another init_max_norm_fraction",
        StateWarning,
    )
    return limit / longest
