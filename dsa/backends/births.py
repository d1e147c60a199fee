"""Which file a file is: its number in the file system, and when it was made.

A number alone would not do: ext4 gives that of a file that was removed to the next one that is made.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

__all__ = ["file_number", "is_same_file"]

_WITH_BIRTH: Final = 64
_HERE: Final = -100
"""AT_FDCWD."""
_BIRTH: Final = 0x800
"""STATX_BTIME."""
_AT: Final = 80
"""Where ``struct statx`` has the time of birth: seconds, int64, and nanoseconds, uint32."""


def _find_statx() -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    try:
        found = ctypes.CDLL(None, use_errno=True).statx
    except (OSError, AttributeError):
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p)
    return found


_STATX: Final = _find_statx()


def file_number(path: Path) -> int:
    """Return what tells a file from others, as long as it exists and is not moved to another file system.

    Raises:
        FileNotFoundError: there is none.
    """
    return os.stat(path).st_ino | _birth(path) << _WITH_BIRTH


def is_same_file(one: int, other: int) -> bool:
    """Tell whether two numbers are those of one file; births are compared where both are known."""
    mask = (1 << _WITH_BIRTH) - 1
    births = one >> _WITH_BIRTH, other >> _WITH_BIRTH
    return one & mask == other & mask and (0 in births or births[0] == births[1])


def _birth(path: Path) -> int:
    """Return when a file was made, in nanoseconds; 0 where the system or the file system doesn't tell."""
    if _STATX is None:
        return int(getattr(os.stat(path), "st_birthtime", 0) * 1e9)
    buffer = ctypes.create_string_buffer(256)
    if _STATX(_HERE, os.fsencode(path), 0, _BIRTH, buffer) != 0:
        return 0
    (mask,) = struct.unpack_from("=I", buffer, 0)
    seconds, nanoseconds = struct.unpack_from("=qI", buffer, _AT)
    return max(0, int(seconds) * 10**9 + int(nanoseconds)) if mask & _BIRTH else 0
