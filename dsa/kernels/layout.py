"""Records as a matrix of 32-bit words: the form in which kernels see them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsa.schema import Records

__all__ = ["Floats", "WordLayout", "Words", "as_words", "word_layout"]

Words = NDArray[np.int32]
Floats = NDArray[np.float32]


class WordLayout(NamedTuple):
    """Where Adam's fields lie in a record, in 32-bit words.

    The fields follow one another in the order ``w m v t s``. ``w`` is -1 in records without weights, those of
    a parameter that stays in memory; `first` is where the floating-point fields begin.
    ``v_length`` is D when the second moment is stored per element and 1 when it is stored per row.
    """

    w: int
    m: int
    v: int
    t: int
    s: int
    dim: int
    v_length: int
    first: int


@lru_cache(maxsize=64)
def word_layout(dtype: np.dtype[np.void]) -> WordLayout:
    """Return where the fields ``m v t s``, and ``w`` if there is one, of a record dtype lie.

    Raises:
        KeyError: a field is missing.
        ValueError: the fields are in another order.

    Example:
        >>> from dsa.schema import adam_schema
        >>> word_layout(adam_schema(dim=2).dtype)
        WordLayout(w=0, m=2, v=4, t=6, s=7, dim=2, v_length=2, first=0)
    """
    fields: Any = dtype.fields
    m, v, t, s = (fields[name][1] // 4 for name in ("m", "v", "t", "s"))
    w = fields["w"][1] // 4 if "w" in fields else -1
    dim, v_length = _length(fields["m"][0]), _length(fields["v"][0])
    first = w if w >= 0 else m
    if (m, v, t, s) != (first + dim * (w >= 0), m + dim, v + v_length, v + v_length + 1):
        raise ValueError(
            f"the fields of {dtype} do not follow one another as w m v t s: use dsa.schema.adam_schema"
        )
    return WordLayout(w, m, v, t, s, dim, v_length, first)


def as_words(records: Records) -> tuple[Words, Floats]:
    """View C-contiguous records as ``(B, itemsize / 4)`` matrices of int32 and of float32, without a copy."""
    raw = records.view(np.uint8).reshape(len(records), records.dtype.itemsize)
    return raw.view(np.int32), raw.view(np.float32)


def _length(dtype: np.dtype[Any]) -> int:
    return int(dtype.shape[0]) if dtype.shape else 1
