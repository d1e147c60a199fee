"""What a pass asks of words on the way, see `dsa.kernels.plausible`, and the largest count.

Everything is decided on the bit patterns, so any bytes are safe to ask about, and the loops vectorise.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from dsa.kernels.compiled import inlined
from dsa.kernels.layout import Words

__all__ = [
    "LAST_COUNT",
    "all_finite",
    "any_sign",
]

LAST_COUNT: Final = 2**31 - 1
"""The largest count that an int32 holds. Bias corrections are 1 long before, so counters may rest there."""

# Typed as int32: with Python's integers numba widens the loops to 64 bits, eight times slower.
_MAGNITUDE: Final = np.int32(0x7FFFFFFF)
_INFINITY: Final = np.int32(0x7F800000)
_ZERO: Final = np.int32(0)


@inlined
def all_finite(patterns: Words) -> bool:
    """Tell whether float32 bit patterns are all finite."""
    largest = _ZERO
    for j in range(patterns.shape[0]):
        largest = max(largest, patterns[j] & _MAGNITUDE)
    return bool(largest < _INFINITY)


@inlined
def any_sign(patterns: Words) -> bool:
    """Tell whether one of some words has its sign bit set: a negative number, or -0.0."""
    lowest = _ZERO
    for j in range(patterns.shape[0]):
        lowest = min(lowest, patterns[j])
    return bool(lowest < _ZERO)
