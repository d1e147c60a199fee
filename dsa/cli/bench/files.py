"""Small operations on the contenders' files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from dsa.backends import system

__all__ = ["drop_pages", "total_size"]


def drop_pages(paths: Iterable[Path]) -> None:
    """Drop the clean pages of files from the page cache; they must be neither dirty nor mapped."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            system.drop_cache(descriptor)
        finally:
            os.close(descriptor)


def total_size(paths: Iterable[Path]) -> int:
    """Return the bytes of some files together."""
    return sum(path.stat().st_size for path in paths)
