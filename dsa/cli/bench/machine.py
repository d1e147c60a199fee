"""What is known of the machine, and the process's own counters. Off Linux, parts are missing."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any, Final

import dsa
from dsa.backends import system
from dsa.backends.system import resource

__all__ = [
    "anonymous_bytes",
    "available_memory",
    "bytes_read",
    "describe_machine",
    "file_system",
    "page_faults",
    "peak_bytes",
    "read_ahead_kib",
]

_PROC: Final = Path("/proc")
_SYS: Final = Path("/sys")


def describe_machine(directory: Path) -> dict[str, Any]:
    """Return processor, cores, memory, system, versions, and the file system of a directory.

    Args:
        directory: Where the tables will be.
    """
    # Here, so that whoever asks for the memory alone doesn't wait for them.
    import numba
    import numpy as np
    import torch

    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": _meminfo("MemTotal"),
        "available_memory_bytes": available_memory(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.system(),
        "kernel": platform.release(),
        "file_system": file_system(directory),
        "read_ahead_kib": read_ahead_kib(directory),
        "versions": {
            "dsa": dsa.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "numba": numba.__version__,
        },
    }


def anonymous_bytes() -> int | None:
    """Return the process's resident memory that no file backs, or None where the system doesn't tell."""
    value = _field(_PROC / "self" / "status", "RssAnon")
    return None if value is None else value * 1024


def available_memory() -> int | None:
    """Return the bytes that programs can have without swapping, or None where the system doesn't tell."""
    return _meminfo("MemAvailable")


def bytes_read() -> int:
    """Return the bytes that this process has made disks read; -1 where that is not counted."""
    value = _field(_PROC / "self" / "io", "read_bytes")
    if value is not None:
        return value
    blocks = system.blocks_read()
    return -1 if blocks < 0 else blocks * 512


def page_faults() -> int:
    """Return how often this process has trapped on a page that was in memory; 0 where that is not counted."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def peak_bytes() -> int | None:
    """Return the largest resident size of this process so far, or None where the system doesn't tell."""
    if not hasattr(resource, "getrusage"):
        return None
    peak = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return peak if sys.platform == "darwin" else peak * 1024


def file_system(directory: Path) -> str | None:
    """Return the type of the file system that holds a directory, such as ``ext4``."""
    mounts = _text(_PROC / "self" / "mounts")
    path = str(directory.resolve())
    best, found = "", None
    for line in mounts.splitlines():
        _, point, kind = line.split(" ")[:3]
        point = point.replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, found = point, kind
    return found


def read_ahead_kib(directory: Path) -> int | None:
    """Return how far the system reads ahead in files of a directory, in KiB, or None if it doesn't tell."""
    device = directory.stat().st_dev
    if not hasattr(os, "major"):
        return None
    name = f"{os.major(device)}:{os.minor(device)}"
    text = _text(_SYS / "class" / "bdi" / name / "read_ahead_kb").strip()
    return int(text) if text.isdigit() else None


def _cpu() -> str:
    for line in _text(_PROC / "cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _meminfo(name: str) -> int | None:
    value = _field(_PROC / "meminfo", name)
    return None if value is None else value * 1024


def _field(path: Path, name: str) -> int | None:
    for line in _text(path).splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
