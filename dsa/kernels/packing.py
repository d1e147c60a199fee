"""Records of which some fields hold bfloat16: into words of their own for an update, and back by dithering.

A bfloat16 is the upper half of a float32, with 8 significant bits. Rounded to the nearest of them, a number
that moves by less than half a unit in the last place, 2^-9 of its size or 2^-8, does not move at all: a
second moment that decays by a thousandth in every step stays where it is for good. Rounding is therefore
random (Gupta, Agrawal, Gopalan and Narayanan, "Deep learning with limited numerical precision", ICML 2015,
section 3): a number x between its neighbours a and b becomes b with the probability ``(x - a) / (b - a)``, so
that its mean is x. It takes one addition: 16 random bits are added to the bit pattern, and its lower half is
dropped.

The bits are those of `dsa.kernels.random`, and a function of the table's seed, the row and the step's stamp:
neither threads nor the order of rows nor a kill and a resumption change them. The counter's words are::

    (low word of the row, high word of the row, stamp, 1 + n // 4)

for the n-th word of the record that holds two numbers; its lower half is added to the first of them. Initial
weights have 0 in the last place.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from dsa.kernels.checks import all_finite, all_pairs_finite, any_sign, any_sign_in_pairs
from dsa.kernels.compiled import inlined
from dsa.kernels.layout import PackedLayout, Words
from dsa.kernels.random import philox4x32

__all__ = ["any_negative", "fill_dither", "finite_numbers", "pack", "unpack", "unpack_pairs"]

_MASK: Final = np.uint64(0xFFFFFFFF)
_WORD: Final = np.uint64(32)
_FIRST: Final = np.uint64(1)
# Typed as int32, or numba widens the loops to 64 bits.
_SIXTEEN: Final = np.int32(16)
_LOW: Final = np.int32(0xFFFF)
_HIGH: Final = np.int32(-0x10000)


@inlined
def fill_dither(row: int, stamp: int, seed: int, words: Words) -> None:
    """Write the random words of a row and a step, as many as there is room for, four by four."""
    key, table = np.uint64(row), np.uint64(seed)
    low, high, step = key & _MASK, key >> _WORD, np.uint64(stamp)
    k0, k1 = table & _MASK, table >> _WORD
    for block in range(words.shape[0] // 4):
        w0, w1, w2, w3 = philox4x32(low, high, step, np.uint64(block) + _FIRST, k0, k1)
        words[4 * block] = np.int32(w0)
        words[4 * block + 1] = np.int32(w1)
        words[4 * block + 2] = np.int32(w2)
        words[4 * block + 3] = np.int32(w3)


@inlined
def unpack(stored: Words, layout: PackedLayout, wide: Words) -> None:
    """Write a record with a word for each number."""
    for f in range(layout.fields.shape[0]):
        start, wide_start, count, paired = layout.fields[f]
        target = wide[wide_start : wide_start + count]
        if paired:
            unpack_pairs(stored[start : start + (count + 1) // 2], target)
        else:
            source = stored[start : start + count]
            for j in range(count):
                target[j] = source[j]


@inlined
def unpack_pairs(pairs: Words, wide: Words) -> None:
    """Write the float32 bit patterns of bfloat16 numbers."""
    for j in range(wide.shape[0] // 2):
        wide[2 * j] = np.int32(pairs[j] << _SIXTEEN)
        wide[2 * j + 1] = pairs[j] & _HIGH
    if wide.shape[0] % 2:
        wide[wide.shape[0] - 1] = np.int32(pairs[wide.shape[0] // 2] << _SIXTEEN)


@inlined
def pack(wide: Words, layout: PackedLayout, dither: Words, stored: Words) -> None:
    """Write a record as it is stored, its bfloat16 rounded at random.

    Args:
        wide: A record with a word for each number, all of them finite.
        layout: Of both.
        dither: A random word for each that holds two numbers, see `fill_dither`.
        stored: Output.
    """
    drawn = 0
    for f in range(layout.fields.shape[0]):
        start, wide_start, count, paired = layout.fields[f]
        source = wide[wide_start : wide_start + count]
        if paired:
            words = (count + 1) // 2
            _pack_pairs(source, dither[drawn : drawn + words], stored[start : start + words])
            drawn += words
        else:
            target = stored[start : start + count]
            for j in range(count):
                target[j] = source[j]


@inlined
def _pack_pairs(wide: Words, dither: Words, pairs: Words) -> None:
    for j in range(wide.shape[0] // 2):
        first = np.int32(wide[2 * j] + (dither[j] & _LOW))
        second = np.int32(wide[2 * j + 1] + ((dither[j] >> _SIXTEEN) & _LOW))
        pairs[j] = ((first >> _SIXTEEN) & _LOW) | (second & _HIGH)
    if wide.shape[0] % 2:
        last = wide.shape[0] // 2
        alone = np.int32(wide[2 * last] + (dither[last] & _LOW))
        pairs[last] = (alone >> _SIXTEEN) & _LOW


@inlined
def any_negative(stored: Words, layout: PackedLayout) -> bool:
    """Tell whether a record holds a negative number where none is: a second moment, a count, the stamp."""
    for f in range(layout.fields.shape[0]):
        start, wide_start, count, paired = layout.fields[f]
        if wide_start < layout.wide.v:
            continue
        if paired:
            if any_sign_in_pairs(stored[start : start + (count + 1) // 2]):
                return True
        elif any_sign(stored[start : start + count]):
            return True
    return False


@inlined
def finite_numbers(stored: Words, layout: PackedLayout) -> bool:
    """Tell whether the floating-point numbers of a record are all finite."""
    for f in range(layout.fields.shape[0]):
        start, wide_start, count, paired = layout.fields[f]
        if wide_start >= layout.wide.t:
            continue
        if paired:
            if not all_pairs_finite(stored[start : start + (count + 1) // 2]):
                return False
        elif not all_finite(stored[start : start + count]):
            return False
    return True
