"""Records as a matrix of 32-bit words: the form in which kernels see them."""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsa.schema import Records

__all__ = ["Floats", "WordLayout", "Words", "as_words", "word_layout"]

Words = NDArray[np.int32]
Floats = NDArray[np.float32]

_STAMP: Final = 5


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
    if name in ("id", "live"):
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
