"""Whether memory that somebody hands over can be written to; numpy and torch may not know."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from pathlib import Path
from typing import Final

__all__ = ["is_writable"]

_MAPPINGS: Final = Path("/proc/self/maps")


def is_writable(start: int, size: int) -> bool:
    """Tell whether the system lets this process write to some of its memory.

    An array's flag says less: a tensor forgets that it was made over a file that was mapped for reading, and
    its arrays are writable by their flags. Where it can't be found out, as on Windows, the answer is yes.

    Args:
        start: The address of the first byte.
        size: How many bytes, at least one; they can be read.

    Example:
        >>> import numpy as np
        >>> array = np.zeros(4)
        >>> is_writable(array.ctypes.data, array.nbytes)
        True
    """
    if _has_mappings():
        return _lies_in_writable(start, start + size)
    return not hasattr(os, "readv") or _takes_a_byte(start)


@lru_cache(maxsize=1)
def _has_mappings() -> bool:
    return _MAPPINGS.exists()


def _lies_in_writable(start: int, stop: int) -> bool:
    """Look memory up in the list of mappings; what is not in it can't be told and counts as writable."""
    with _MAPPINGS.open() as lines:
        for line in lines:
            bounds, rights = line.split(maxsplit=2)[:2]
            first, last = (int(bound, 16) for bound in bounds.split("-"))
            if first >= stop:  # they are in order
                return True
            if start < last and rights[1] != "w":
                return False
    return True


def _takes_a_byte(start: int) -> bool:
    """Let the system write the first byte over itself: it refuses, where this process would be killed."""
    byte = (ctypes.c_char * 1).from_address(start)
    source, sink = os.pipe()
    try:
        os.write(sink, byte)
        os.readv(source, [byte])
    except OSError:
        return False
    finally:
        os.close(source)
        os.close(sink)
    return True
