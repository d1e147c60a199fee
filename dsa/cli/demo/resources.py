"""What a run takes of the machine: disk and memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

from dsa.backends.system import resource

__all__ = ["DiskUse", "anonymous_memory", "disk_use", "peak_memory"]


class DiskUse(NamedTuple):
    """Bytes of the files of a directory.

    apparent: the sum of the files' lengths.
    occupied: the sum of their blocks on disk; the length where the system doesn't tell.
    """

    apparent: int
    occupied: int


def disk_use(directory: Path) -> DiskUse:
    """Measure all files under a directory."""
    stats = [path.stat() for path in directory.rglob("*") if path.is_file()]
    apparent = sum(stat.st_size for stat in stats)
    return DiskUse(apparent, sum(_occupied(stat) for stat in stats))


def _occupied(stat: os.stat_result) -> int:
    return stat.st_blocks * 512 if hasattr(stat, "st_blocks") else stat.st_size


def anonymous_memory() -> int | None:
    """Return the bytes of memory that no file backs, None where the system doesn't tell (only Linux does)."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return None


def peak_memory() -> int | None:
    """Return the largest resident size so far in bytes, None where the system doesn't tell."""
    if not hasattr(resource, "getrusage"):
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024
