"""Is a stored record plausible? Asked of every row that is read, before its numbers are used.

Implausible is what no training produces: a number that is not finite, a negative one in a field where none
is, a negative count or stamp. Everything is decided on the bit patterns, so any bytes are safe to ask about,
and the loops vectorise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from dsa.kernels.checks import all_finite, all_pairs_finite, any_sign, any_sign_in_pairs
from dsa.kernels.compiled import compiled
from dsa.kernels.layout import Words, as_words
from dsa.schema import TORN, Records, floating_fields, read_numbers

__all__ = ["describe_fault", "first_implausible"]

# The field of which every value is plausible, see `dsa.schema.keyed`.
_ANY: Final = "id"

# The passes over records are compiled without counts of references: counting those of a view of each record
# takes longer than looking at it.


@compiled(_nrt=False)
def _first_infinite(words: Words, start: int, stop: int) -> int:
    for i in range(words.shape[0]):
        if not all_finite(words[i, start:stop]):
            return i
    return -1


@compiled(_nrt=False)
def _first_infinite_pair(words: Words, start: int, stop: int) -> int:
    for i in range(words.shape[0]):
        if not all_pairs_finite(words[i, start:stop]):
            return i
    return -1


@compiled(_nrt=False)
def _first_negative(words: Words, start: int, stop: int) -> int:
    for i in range(words.shape[0]):
        if any_sign(words[i, start:stop]):
            return i
    return -1


@compiled(_nrt=False)
def _first_negative_pair(words: Words, start: int, stop: int) -> int:
    for i in range(words.shape[0]):
        if any_sign_in_pairs(words[i, start:stop]):
            return i
    return -1


class _Question(NamedTuple):
    """What is asked of consecutive words of every record: the first one for which it is answered by yes."""

    first: Callable[[Words, int, int], int]
    start: int
    stop: int


def first_implausible(records: Records, non_negative: Iterable[str]) -> int:
    """Return the position of the first implausible record, or -1.

    Args:
        records: ``(B,)`` records of an update rule's schema, C-contiguous.
        non_negative: The floating-point fields that are never negative.

    Raises:
        ValueError: a field is neither float32 nor bfloat16 nor int32.
    """
    words, _ = as_words(records)
    bad = len(words)
    for question in _questions(records.dtype, tuple(non_negative)):
        position = question.first(words[:bad], question.start, question.stop)
        bad = position if position >= 0 else bad
    return bad if bad < len(words) else -1


def describe_fault(records: Records, position: int, non_negative: Mapping[str, str]) -> str:
    """Name what is wrong with a record, for an error message; empty when it is plausible.

    Args:
        records: ``(B,)`` records of an update rule's schema.
        position: Which of them.
        non_negative: The floating-point fields that are never negative, each with what it is in words.
    """
    record = records[position : position + 1]
    names = record.dtype.names or ()
    if "s" in names and record["s"][0] == TORN:
        return (
            "the checksum of its record does not match: it was torn by a loss of power or damaged on the disk"
        )
    numbers = {name: read_numbers(record, name)[0] for name in names}
    floating = floating_fields(record.dtype)
    for name in floating:
        if not np.isfinite(numbers[name]).all():
            return f"field {name!r} holds a number that is not finite"
    for name in floating:
        if name in non_negative and np.signbit(numbers[name]).any():
            return f"field {name!r} holds {float(np.min(numbers[name]))!r}, a negative {non_negative[name]}"
    for name in names:
        if name not in (*floating, _ANY) and np.min(numbers[name]) < 0:
            return f"field {name!r} holds {int(np.min(numbers[name]))}, a negative count"
    return ""


@lru_cache(maxsize=64)
def _questions(dtype: np.dtype[np.void], non_negative: tuple[str, ...]) -> list[_Question]:
    """Return what is asked of float32 and int32 word by word, of bfloat16 in pairs."""
    fields: Any = dtype.fields
    asked: list[_Question] = []
    for name in dtype.names or ():
        if name == _ANY:
            continue
        kind, start = fields[name][0], fields[name][1] // 4
        stop = start - (-kind.itemsize // 4)
        if kind.base not in (np.dtype("<f4"), np.dtype("<i4"), np.dtype("<u2")):
            raise ValueError(
                f"field {name!r} of {kind.base} is not one that an update rule may have: use float32, "
                "bfloat16 or int32"
            )
        paired = kind.base.itemsize == 2
        if kind.base.kind != "i":
            asked.append(_Question(_first_infinite_pair if paired else _first_infinite, start, stop))
        if kind.base.kind == "i" or name in non_negative:
            asked.append(_Question(_first_negative_pair if paired else _first_negative, start, stop))
    return _joined(asked)


def _joined(questions: list[_Question]) -> list[_Question]:
    """Ask of adjoining words at once what is asked of both."""
    joined: dict[tuple[Callable[[Words, int, int], int], int], _Question] = {}
    for each in questions:
        before = joined.pop((each.first, each.start), None)
        start = each.start if before is None else before.start
        joined[each.first, each.stop] = _Question(each.first, start, each.stop)
    return list(joined.values())
