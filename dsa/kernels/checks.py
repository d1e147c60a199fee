"""Is a stored record plausible? Asked of every row that is read, before its numbers are used.

Implausible is what no training produces: a non-finite number, a negative second moment, a negative counter or
stamp. Everything is decided on the bit patterns, so any bytes are safe to ask about, and the loops vectorise.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from dsa.kernels.compiled import compiled
from dsa.kernels.layout import WordLayout, Words, as_words, word_layout
from dsa.schema import TORN, Records

__all__ = [
    "LAST_COUNT",
    "all_finite",
    "any_sign",
    "describe_fault",
    "first_implausible",
]

LAST_COUNT: Final = 2**31 - 1
"""The largest count that an int32 holds. Bias corrections are 1 long before, so counters may rest there."""

# Typed as int32: with Python's integers numba widens the loops to 64 bits, eight times slower.
_MAGNITUDE: Final = np.int32(0x7FFFFFFF)
_INFINITY: Final = np.int32(0x7F800000)
_ZERO: Final = np.int32(0)


@compiled(_nrt=False)
def all_finite(patterns: Words) -> bool:
    """Tell whether float32 bit patterns are all finite."""
    largest = _ZERO
    for j in range(patterns.shape[0]):
        largest = max(largest, patterns[j] & _MAGNITUDE)
    return bool(largest < _INFINITY)


@compiled(_nrt=False)
def any_sign(patterns: Words) -> bool:
    """Tell whether one of some words has its sign bit set: a negative number, or -0.0."""
    lowest = _ZERO
    for j in range(patterns.shape[0]):
        lowest = min(lowest, patterns[j])
    return bool(lowest < _ZERO)


@compiled
def _first_implausible(words: Words, layout: WordLayout) -> int:
    for i in range(words.shape[0]):
        if any_sign(words[i, layout.v : layout.s + 1]) or not all_finite(words[i, layout.first : layout.t]):
            return i
    return -1


def first_implausible(records: Records) -> int:
    """Return the position of the first implausible record, or -1.

    Args:
        records: ``(B,)`` records of `dsa.schema.adam_schema`, C-contiguous.
    """
    words, _ = as_words(records)
    return int(_first_implausible(words, word_layout(records.dtype)))


def describe_fault(records: Records, position: int) -> str:
    """Name what is wrong with a record, for an error message; empty when it is plausible."""
    record = records[position]
    if record["s"] == TORN:
        return (
            "the checksum of its record does not match: it was torn by a loss of power or damaged on the disk"
        )
    for name in sorted({"w", "m", "v"} & set(record.dtype.names or ()), reverse=True):
        if not np.isfinite(record[name]).all():
            return f"field {name!r} holds a number that is not finite"
    smallest = np.min(record["v"])
    if np.signbit(record["v"]).any():
        return f"field 'v' holds {float(smallest)!r}, a negative second moment"
    for name in ("t", "s"):
        if record[name] < 0:
            return f"field {name!r} holds {int(record[name])}, a negative count"
    return ""
