"""Putting a directory where another is.

Linux can exchange two names in one step, so that there is no moment without a directory of that name. Where
that is missing (other systems, some network file systems) the old one is renamed aside first; a kill between
the two renames leaves the name empty and the old directory beside it, whole, which `dsa.checkpoint.local`
finds again.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Final, cast

from dsa.backends.system import retried

__all__ = ["exchange_directories", "replace_directory"]

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_UNSUPPORTED: Final = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


def replace_directory(new: Path, old: Path, aside: Path) -> Path:
    """Give `new` the name of `old` and return where the old directory is then.

    Args:
        new: A directory on the same file system.
        old: The directory to replace.
        aside: A free name beside it, for systems that can't exchange.
    """
    if exchange_directories(new, old):
        return new
    retried(os.rename, old, aside)
    try:
        retried(os.rename, new, old)
    except BaseException:
        with suppress(OSError):  # another export may have taken the place
            retried(os.rename, aside, old)
        raise
    return aside


def exchange_directories(first: Path, second: Path) -> bool:
    """Exchange two names in one step; False when the system can't and nothing has happened."""
    rename = _renameat2()
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))


@lru_cache(maxsize=1)
def _renameat2() -> Callable[..., int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return cast("Callable[..., int] | None", function)
