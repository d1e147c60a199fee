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
    "all_packable",
    "all_pairs_finite",
    "any_sign",
    "any_sign_in_pairs",
]

LAST_COUNT: Final = 2**31 - 1
"""The largest count that an int32 holds. Bias corrections are 1 long before, so counters may rest there."""

# Typed as int32: with Python's integers numba widens the loops to 64 bits, eight times slower.
_MAGNITUDE: Final = np.int32(0x7FFFFFFF)
_INFINITY: Final = np.int32(0x7F800000)
_ZERO: Final = np.int32(0)
# Of the lower half of a word, a bfloat16.
_SIXTEEN: Final = np.int32(16)
_LAST_PAIRED: Final = np.int32(0x7F7F0000)
_PAIR_MAGNITUDE: Final = np.int32(0x7FFF)
_PAIR_INFINITY: Final = np.int32(0x7F80)
_PAIR_SIGN: Final = np.int32(0x8000)


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


@inlined
def all_packable(patterns: Words) -> bool:
    """Tell whether float32 bit patterns are all of numbers up to the largest bfloat16, 3.39e38."""
    largest = _ZERO
    for j in range(patterns.shape[0]):
        largest = max(largest, patterns[j] & _MAGNITUDE)
    return bool(largest <= _LAST_PAIRED)


@inlined
def all_pairs_finite(patterns: Words) -> bool:
    """Tell whether the bfloat16 bit patterns in words, two in each, are all finite."""
    largest = _ZERO
    for j in range(patterns.shape[0]):
        largest = max(largest, patterns[j] & _PAIR_MAGNITUDE)
        largest = max(largest, (patterns[j] >> _SIXTEEN) & _PAIR_MAGNITUDE)
    return bool(largest < _PAIR_INFINITY)


@inlined
def any_sign_in_pairs(patterns: Words) -> bool:
    """Tell whether one of the halves of some words has its sign bit set."""
    largest = _ZERO
    for j in range(patterns.shape[0]):
        largest = max(largest, patterns[j] & _PAIR_SIGN)
    return bool(largest > _ZERO) or any_sign(patterns)
