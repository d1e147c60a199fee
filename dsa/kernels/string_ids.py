"""Ids of strings, for tables whose rows are told by names."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsa.errors import RowTypeError

__all__ = ["find_collision", "hash_strings"]


def hash_strings(strings: Sequence[str]) -> NDArray[np.int64]:
    """Return an id of 64 bits for each string, the same on every machine and in every release.

    It is BLAKE2b (RFC 7693) with a digest of 8 bytes, read as a little-endian integer, of the string in UTF-8
    (half surrogates as if they were characters). Strings are taken as they are: what looks the same in
    another Unicode form has another id. Two of n strings share an id with probability n^2 / 2^65: for ten
    million that is one in 370,000. `find_collision` tells.

    Args:
        strings: B strings.

    Returns:
        ``(B,)`` int64.

    Raises:
        RowTypeError: one of them is no string.

    Example:
        >>> hash_strings(["cat", "dog", "cat"]).tolist()
        [3429664268601861939, -6945572266024926151, 3429664268601861939]
    """
    digests = bytearray()
    for string in strings:
        if not isinstance(string, str):
            raise RowTypeError(f"{string!r} has no id as a string: pass a sequence of str")
        digests += hashlib.blake2b(string.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return np.frombuffer(bytes(digests), "<i8").astype(np.int64)


def find_collision(strings: Sequence[str], ids: NDArray[np.int64]) -> tuple[str, str] | None:
    """Return two different strings that have one id, or None.

    Args:
        strings: B strings; they may repeat.
        ids: ``(B,)`` int64, those of the strings.

    Example:
        >>> find_collision(["a", "b", "a", "c"], np.array([1, 2, 1, 2]))
        ('b', 'c')
    """
    order = np.argsort(ids, kind="stable")
    equal = np.flatnonzero(ids[order[1:]] == ids[order[:-1]])
    for one, other in zip(order[equal].tolist(), order[equal + 1].tolist(), strict=True):
        if strings[one] != strings[other]:
            return strings[one], strings[other]
    return None
