"""A checksum of 32 bits over the words of a record, cheap enough to be part of copying it.

Each word is folded onto itself, ``x = w ^ (w >> 16) ^ (w >> 23)`` with logical shifts, so that its exponent
and leading digits reach the lowest bits; the checksum is the sum of ``x * factor``, each place having an odd
factor of its own, modulo 2^32. It has no order of evaluation, so the loop vectorises: reading and writing
2,048 records of 128 elements from memory were measured to take 3 to 9 % longer with it.

What it detects: every change that is confined to one word, hence every flipped bit, and any flipped bit of
the checksum itself, always (folding and odd factors are bijections); two words that are swapped, a part that
is zeroed or belongs to an older version, and any other change of several words but for one in 2^32 (swapped
words: 2^31). A record of zeros has the checksum 0, as a hole of a sparse file has. What it can't detect is a
whole record, checksum included, that is an older version or another row's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dsa.kernels.compiled import compiled

__all__ = ["add_word", "factors"]

_LOW_16: Final = np.int32(0xFFFF)
_LOW_9: Final = np.int32(0x1FF)
_LARGEST: Final = 1 << 12


def factors(count: int) -> NDArray[np.int32]:
    """Return the factors of the first `count` places: MurmurHash3's finaliser of 1, 2, ..., made odd.

    Example:
        >>> factors(3).view(np.uint32).tolist()
        [1364076727, 821347079, 2247144487]
    """
    # One array for all tables of usual sizes; a view of it costs nothing.
    return _factors(max(_LARGEST, count))[:count]


@lru_cache(maxsize=4)
def _factors(count: int) -> NDArray[np.int32]:
    hashed = np.arange(1, count + 1, dtype=np.uint32)
    for shift, multiplier in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        hashed ^= hashed >> np.uint32(shift)
        hashed *= np.uint32(multiplier)
    return (hashed | np.uint32(1)).view(np.int32)


@compiled
def add_word(total: np.int32, word: np.int32, factor: np.int32) -> np.int32:
    """Return a checksum to which one more word has been added."""
    # Shifts of int32 drag the sign in: the masks make them logical. Typed as int32, or numba widens the loop.
    folded = np.int32(word ^ ((word >> 16) & _LOW_16) ^ ((word >> 23) & _LOW_9))
    return np.int32(total + np.int32(folded * factor))
