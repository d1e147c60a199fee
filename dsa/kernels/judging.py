"""Whether a pass may use a record, and copying the weights of those that it may."""

from __future__ import annotations

from typing import Final

import numpy as np

from dsa.kernels.checks import all_finite, any_sign
from dsa.kernels.checksums import add_word
from dsa.kernels.compiled import compiled, inlined
from dsa.kernels.layout import PackedLayout, WordLayout, Words
from dsa.kernels.packing import any_negative, finite_numbers, unpack_pairs
from dsa.kernels.prefetching import AHEAD, LINE_WORDS, prefetch_word
from dsa.schema import Rows

__all__ = ["FRESH", "UNUSABLE", "USABLE", "copy_weights", "judge", "judge_packed"]

USABLE: Final = 0
FRESH: Final = 1
UNUSABLE: Final = 2

_ZERO: Final = np.int32(0)  # typed, or the loop is widened to 64 bits, eight times slower


@inlined
def judge(image: Words, layout: WordLayout, factors: Words, unwritten: int) -> int:
    """Tell whether an update may use a record.

    It may not when the record does not match its checksum, or has a negative number where none is, such as a
    second moment, a counter or the stamp.
    A number that is not finite needs no question: it stays so through every update, and the result is
    checked.
    """
    width = layout.s + 1
    if not _matches(image, width, factors) or any_sign(image[layout.v : width]):
        return UNUSABLE
    return unwritten if image[layout.s] == _ZERO else USABLE


@inlined
def judge_packed(image: Words, layout: PackedLayout, factors: Words, unwritten: int) -> int:
    """Do as `judge` does for a packed record."""
    if not _matches(image, layout.s + 1, factors) or any_negative(image, layout):
        return UNUSABLE
    return unwritten if image[layout.s] == _ZERO else USABLE


@inlined
def _matches(image: Words, width: int, factors: Words) -> bool:
    """Tell whether a record matches the checksum behind it, if there is one."""
    if not factors.shape[0]:
        return True
    total = _ZERO
    for j in range(width):
        total = add_word(total, image[j], factors[j])
    return bool(total == image[width])


def copy_weights(
    table: Words,
    places: Rows,
    layout: WordLayout | PackedLayout,
    factors: Words,
    unwritten: int,
    weights: Words,
    since: Words,
    fresh: Rows,
    start: int,
    stop: int,
) -> tuple[int, int]:
    """Copy the weights of rows, each record being judged where it is.

    Args:
        table: See `dsa.kernels.visiting.Visit`, likewise the others that are there.
        places: ``(U,)`` int64.
        layout: Where the fields are.
        factors: Of the checksum.
        unwritten: What becomes of a record that was never written.
        weights: ``(U, D)`` words of float32, output.
        since: ``(U,)`` words of float32, output: what was the decay when each was written, see
            `dsa.kernels.decay`; ``(0,)`` where rows don't tell.
        fresh: ``(U,)`` int64, output: positions that are left out, from `start` on.
        start: The first position.
        stop: Where to end.

    Returns:
        The first position whose record can't be used, or -1, and how many were left out.
    """
    copy = _copy_weights if isinstance(layout, WordLayout) else _copy_packed_weights
    return copy(table, places, layout, factors, unwritten, weights, since, fresh, start, stop)  # type: ignore[arg-type]


@compiled(_nrt=False)
def _copy_weights(
    table: Words,
    places: Rows,
    layout: WordLayout,
    factors: Words,
    unwritten: int,
    weights: Words,
    since: Words,
    fresh: Rows,
    start: int,
    stop: int,
) -> tuple[int, int]:
    left_out = 0
    for p in range(start, stop):
        _ask_for_row(table, places, p, stop, layout.s + 2)
        record = table[places[p]]
        state = judge(record, layout, factors, unwritten)
        if state == FRESH:
            fresh[start + left_out] = p
            left_out += 1
            continue
        if state == UNUSABLE or not all_finite(record[layout.first : layout.t]):
            return p, left_out
        if since.shape[0]:
            since[p] = record[layout.t - 1]  # the last of the numbers
        source, target = record[layout.w : layout.w + layout.dim], weights[p]
        for j in range(source.shape[0]):
            target[j] = source[j]
    return -1, left_out


@compiled(_nrt=False)
def _copy_packed_weights(
    table: Words,
    places: Rows,
    layout: PackedLayout,
    factors: Words,
    unwritten: int,
    weights: Words,
    since: Words,
    fresh: Rows,
    start: int,
    stop: int,
) -> tuple[int, int]:
    left_out, dim = 0, weights.shape[1]
    first, paired = layout.fields[0, 0], layout.fields[0, 3]  # those of the weight
    for p in range(start, stop):
        _ask_for_row(table, places, p, stop, layout.s + 2)
        record = table[places[p]]
        state = judge_packed(record, layout, factors, unwritten)
        if state == FRESH:
            fresh[start + left_out] = p
            left_out += 1
            continue
        if state == UNUSABLE or not finite_numbers(record, layout):
            return p, left_out
        if since.shape[0]:
            since[p] = record[layout.t - 1]
        if paired:
            unpack_pairs(record[first : first + (dim + 1) // 2], weights[p])
        else:
            source, target = record[first : first + dim], weights[p]
            for j in range(dim):
                target[j] = source[j]
    return -1, left_out


@inlined
def _ask_for_row(table: Words, places: Rows, p: int, stop: int, width: int) -> None:
    if p + AHEAD < stop:
        for column in range(0, width, LINE_WORDS):
            prefetch_word(table, places[p + AHEAD], column)  # type: ignore[call-arg]
