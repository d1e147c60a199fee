"""Records as a matrix of 32-bit words: the form in which kernels see them."""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsa.schema import Records, is_bfloat16

__all__ = [
    "Floats",
    "PackedLayout",
    "WordLayout",
    "Words",
    "as_words",
    "record_layout",
    "wide_words",
    "word_layout",
]

Words = NDArray[np.int32]
Floats = NDArray[np.float32]

_STAMP: Final = 5
_KEYS: Final = ("id", "live")


class WordLayout(NamedTuple):
    """Where the fields lie in a record, in 32-bit words.

    A record is a sequence of six runs of fields: whose row it is, see `dsa.schema.keyed`, which no pass
    touches, the weight, the numbers of its update rule that may have either sign, those that are never
    negative, its counts, and the stamp. The letters are those of Adam, whose record ``w m v t s`` has one
    field in each run but the first. All but the last may be empty: the letter of an empty run is where the
    next one begins.

    Args:
        w: The weight; -1 in records without weights, those of a parameter that stays in memory.
        m: The numbers of either sign.
        v: The numbers that are never negative.
        t: The counts, of which the first is that of the row's updates: every pass counts them.
        s: The stamp.
        dim: Elements of a field that is stored per element; 1 where there is none.
        first: Where the numbers begin.
    """

    w: int
    m: int
    v: int
    t: int
    s: int
    dim: int
    first: int


class PackedLayout(NamedTuple):
    """Where the fields lie in a record of which some hold bfloat16, two numbers in a word.

    A field begins on a word; where its numbers are odd, the upper half of its last word is zero.

    Args:
        wide: Where they lie in the record with a word for each number: the one that an update sees.
        fields: ``(F, 4)`` int64: of each field, but for those that say whose row it is, its first word here,
            its first word in the wide record, how many numbers it has, and 1 where two of them share a word,
            else 0.
        t: The first word of the counts here.
        s: The stamp's here.
        halves: How many words hold two numbers.
    """

    wide: WordLayout
    fields: NDArray[np.int64]
    t: int
    s: int
    halves: int


@lru_cache(maxsize=64)
def record_layout(dtype: np.dtype[np.void], non_negative: tuple[str, ...]) -> WordLayout | PackedLayout:
    """Return where the fields of a record dtype lie: `word_layout`, or with bfloat16 the packed form of it.

    Args:
        dtype: That of an update rule's schema, in which every field is float32, bfloat16 or int32.
        non_negative: The floating-point fields that are never negative.

    Raises:
        ValueError: a field is of another kind, or the fields are in another order.

    Example:
        >>> from dsa.schema import adam_schema, with_dtypes
        >>> layout = record_layout(with_dtypes(adam_schema(dim=3), {"v": "bfloat16"}).dtype, ("v",))
        >>> layout.fields.tolist()
        [[0, 0, 3, 0], [3, 3, 3, 0], [6, 6, 3, 1], [8, 9, 1, 0], [9, 10, 1, 0]]
    """
    names, fields = dtype.names or (), _fields_of(dtype)
    if not any(is_bfloat16(fields[name]) for name in names):
        return word_layout(dtype, non_negative)
    own = [name for name in names if name not in _KEYS]
    wide = word_layout(np.dtype([(name, _widened(fields[name])) for name in own]), non_negative)
    start, wide_start = sum(fields[name].itemsize // 4 for name in names if name in _KEYS), 0
    found = []
    for name in own:
        count, paired = fields[name].shape[0] if fields[name].shape else 1, is_bfloat16(fields[name])
        found.append((start, wide_start, count, int(paired)))
        start += -(-count // 2) if paired else count
        wide_start += count
    halves = sum(-(-count // 2) for _, _, count, paired in found if paired)
    t = next(first for first, wide_first, _, _ in found if wide_first >= wide.t)
    return PackedLayout(wide, np.array(found, np.int64), t, start - 1, halves)


def wide_words(layout: WordLayout | PackedLayout) -> tuple[int, int]:
    """Return the words of a wide record and those that hold two numbers in a packed one, 0 without any."""
    return (0, 0) if isinstance(layout, WordLayout) else (layout.wide.s + 1, layout.halves)


def _fields_of(dtype: np.dtype[np.void]) -> dict[str, np.dtype[Any]]:
    fields: Any = dtype.fields
    return {name: fields[name][0] for name in dtype.names or ()}


def _widened(dtype: np.dtype[Any]) -> Any:  # noqa: ANN401 - numpy's dtype-like
    return ("<f4", dtype.shape) if is_bfloat16(dtype) else dtype


@lru_cache(maxsize=64)
def word_layout(dtype: np.dtype[np.void], non_negative: tuple[str, ...]) -> WordLayout:
    """Return where the fields of a record dtype lie.

    Args:
        dtype: That of an update rule's schema, in which every field is float32 or int32, but for an ``id``.
        non_negative: The floating-point fields that are never negative.

    Raises:
        ValueError: a field is of another kind, or the fields are in another order.

    Example:
        >>> from dsa.schema import adam_schema
        >>> word_layout(adam_schema(dim=2).dtype, ("v",))
        WordLayout(w=0, m=2, v=4, t=6, s=7, dim=2, first=0)
    """
    fields: Any = dtype.fields
    names = dtype.names or ()
    runs = [_run(fields[name][0], name, name in non_negative) for name in names]
    lengths = [fields[name][0].itemsize // 4 for name in names]
    starts = [sum(lengths[:i]) for i in range(len(names))]
    adjoining = starts == [fields[name][1] // 4 for name in names]
    if not adjoining or runs != sorted(runs) or runs[-1:] != [_STAMP]:
        raise ValueError(
            f"the fields of {dtype} do not follow one another as w m v t s: put the weight first, then the "
            "numbers of either sign, those that are never negative, counts and the stamp, in 32 bits each"
        )
    w, m, v, t, s = (starts[bisect_left(runs, run)] for run in (1, 2, 3, 4, _STAMP))
    dim = max(1, *(length for length, run in zip(lengths, runs, strict=True) if run))
    return WordLayout(w if "w" in names else -1, m, v, t, s, dim, w)


def _run(dtype: np.dtype[Any], name: str, non_negative: bool) -> int:
    """Return which of the six runs a field belongs to; a number beyond them where to none."""
    if name in _KEYS:
        return 0
    if dtype.base == np.dtype("<i4"):
        return _STAMP if name == "s" else 4
    if dtype.base != np.dtype("<f4"):
        return _STAMP + 1
    return 1 if name == "w" else 3 if non_negative else 2


def as_words(records: Records) -> tuple[Words, Floats]:
    """View C-contiguous records as ``(B, itemsize / 4)`` matrices of int32 and of float32, without a copy."""
    raw = records.view(np.uint8).reshape(len(records), records.dtype.itemsize)
    return raw.view(np.int32), raw.view(np.float32)
