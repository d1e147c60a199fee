"""A checksum of records for the journal, at the speed of memory.

It tells torn, stale and damaged bytes from whole ones; it is no defence against an adversary. Each 32-bit
word is multiplied by an odd constant of its column and the products of a row are summed; the sums of the rows
are chained by a multiplication, so that no two places count alike (Knuth, The Art of Computer Programming 3,
6.4; Dietzfelbinger et al. 1997 on multiply-add hashing).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dsa.kernels.compiled import compiled
from dsa.kernels.layout import Words

__all__ = ["hash_words"]

_CHAIN: Final = np.uint64(0x9E3779B97F4A7C15)


def hash_words(words: Words, start: int = 0) -> int:
    """Return a 64-bit hash of a ``(B, W)`` matrix of 32-bit words, continued from the hash `start`.

    Example:
        >>> words = np.arange(6, dtype=np.int32).reshape(2, 3)
        >>> hash_words(words) == hash_words(words.copy()), hash_words(words) == hash_words(words[::-1])
        (True, False)
    """
    return int(_hash_rows(words, _multipliers(words.shape[1]), np.uint64(start)))


@lru_cache(maxsize=64)
def _multipliers(width: int) -> NDArray[np.uint64]:
    # SplitMix64 (Steele, Lea & Flood 2014): part of the journal's format, so not left to a library's
    # generator.
    z = np.arange(1, width + 1, dtype=np.uint64) * _CHAIN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    multipliers = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    multipliers.flags.writeable = False
    return multipliers


@compiled
def _hash_rows(words: Words, multipliers: NDArray[np.uint64], start: np.uint64) -> np.uint64:
    state = start
    for i in range(words.shape[0]):
        row = words[i]
        total = np.uint64(i + 1)
        for j in range(row.shape[0]):
            total += np.uint64(np.uint32(row[j])) * multipliers[j]
        state = (state ^ (state >> np.uint64(29)) ^ total) * _CHAIN
    return state
