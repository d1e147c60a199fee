"""Arrays of integers in the notes of journal entries, which are JSON."""

from __future__ import annotations

import base64

import numpy as np
from numpy.typing import NDArray

__all__ = ["decode_numbers", "encode_numbers"]


def encode_numbers(numbers: NDArray[np.int64]) -> str:
    """Return ``(n,)`` int64 as text.

    Example:
        >>> decode_numbers(encode_numbers(np.array([-1, 2**40]))).tolist()
        [-1, 1099511627776]
    """
    return base64.b64encode(np.ascontiguousarray(numbers, "<i8").tobytes()).decode("ascii")


def decode_numbers(text: str) -> NDArray[np.int64]:
    """Return the array of a text of `encode_numbers`.

    Raises:
        ValueError: it is none.
    """
    return np.frombuffer(base64.b64decode(text, validate=True), "<i8").astype(np.int64)
