"""Warnings that point at the line of the user who caused them."""

from __future__ import annotations

import sys
import warnings
from typing import Final

from dsa.errors import DSAWarning

__all__ = ["notify"]

# An optimizer's constructor runs through torch's; a kernel is compiled by numba.
_INSIDE: Final = ("dsa", "torch", "numba")


def notify(message: str, category: type[DSAWarning]) -> None:
    """Warn at the innermost call from outside the package."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
