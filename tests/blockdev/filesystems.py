"""Real file systems on a block device, and where on it the bytes of a file lie."""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import shutil
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from device import BlockDevice, attached, command

__all__ = ["FILESYSTEMS", "SIZE", "extents", "forget", "mounted", "new", "offered", "sync", "unavailable"]

SIZE = 320 << 20
"""Bytes of a device: the least that xfs is made on is 300 MB."""

_MAKE = {
    # Small and complete at once: nothing is left for a thread of the kernel to write later.
    "ext4": "mkfs.ext4 -q -F -b 4096 -N 2048 -J size=4 -E lazy_itable_init=0,lazy_journal_init=0,nodiscard",
    "xfs": "mkfs.xfs -q -f -K",
    "btrfs": "mkfs.btrfs -q -f -K",
}
_MOUNT = {"ext4": "nodiscard", "xfs": "nodiscard,nouuid", "btrfs": "nodiscard"}  # images share one uuid
FILESYSTEMS = tuple(_MAKE)

_FIEMAP, _FIEMAP_SYNC, _MOST_EXTENTS = 0xC020660B, 1, 256
_HEADER, _EXTENT = struct.Struct("<QQIIII"), struct.Struct("<QQQQQIIII")
_UNPLACED = 0x1 << 1 | 0x1 << 2  # unknown, or not allocated yet


def offered() -> list[str]:
    """Return the file systems whose programs are installed."""
    return [name for name in FILESYSTEMS if _program(name)]


def _program(filesystem: str) -> str | None:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return shutil.which(_MAKE[filesystem].split()[0], path=path)


@functools.cache
def unavailable(filesystem: str = "ext4") -> str:
    """Return why a file system can't be had here, which is tried; empty when it can."""
    if sys.platform != "linux":
        return "block devices in user space need Linux"
    if os.geteuid() != 0:
        return "mounting file systems needs root"
    for node in ("/dev/fuse", "/dev/loop-control"):
        if not os.access(node, os.R_OK | os.W_OK):
            return f"there is no {node}"
    if not _program(filesystem):
        return f"there is no {_MAKE[filesystem].split()[0]}"
    try:
        with BlockDevice(SIZE) as device, new(device, filesystem, device.directory / "trial"):
            return ""
    except OSError as error:
        return f"{filesystem} can't be mounted on a loop device: {error}"


@contextlib.contextmanager
def mounted(file: Path, filesystem: str, point: Path) -> Iterator[Path]:
    """Mount the file system in a file at a directory, which is made."""
    point.mkdir(exist_ok=True)
    with attached(file) as node:
        _mount(node, filesystem, point)
        try:
            yield point
        finally:
            _unmount(point)


def _mount(node: str, filesystem: str, point: Path) -> None:
    words = ("mount", "-t", filesystem, "-o", _MOUNT[filesystem], node, point)
    try:
        command(*words)
    except OSError:
        if filesystem != "ext4":
            raise
        # It looks at group descriptors before it replays its journal, which has them if they are torn. Where
        # a machine starts, e2fsck comes first and replays it.
        command("e2fsck", "-p", node, good=(0, 1))
        command(*words)


@contextlib.contextmanager
def new(device: BlockDevice, filesystem: str, point: Path) -> Iterator[Path]:
    """Make a file system on a device, cleared before, and mount it; all that is in it then is durable."""
    device.clear()
    with attached(device.file) as node:
        command(*_MAKE[filesystem].split(), node)
    with mounted(device.file, filesystem, point):
        sync(point)
        yield point


def _unmount(point: Path) -> None:
    limit = time.monotonic() + 10.0
    while True:
        try:
            command("umount", point)
            return
        except OSError:  # a child that was killed a moment ago may still be going
            if time.monotonic() > limit:
                command("umount", "--lazy", point)
                raise
        time.sleep(0.01)


def sync(point: Path) -> None:
    """Write back all that a file system has in memory, as the kernel does from time to time."""
    descriptor = os.open(point, os.O_RDONLY)
    try:
        ctypes.CDLL(None).syncfs(descriptor)  # what fails is told to those who have the files open
    finally:
        os.close(descriptor)


def forget(point: Path) -> None:
    """Let clean pages leave the memory, as they do when it is needed for something else.

    Those that this process has mapped from a file system are let go of first.
    """
    libc = ctypes.CDLL(None)
    with open("/proc/self/maps", encoding="utf-8") as lines:
        mapped = [line.split(maxsplit=5) for line in lines if f" {point}/" in line]
    for bounds, *_ in mapped:
        start, stop = (int(bound, 16) for bound in bounds.split("-"))
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)
    Path("/proc/sys/vm/drop_caches").write_text("1")


def extents(path: Path) -> list[tuple[int, int]]:
    """Return the ranges of bytes of the device where a file lies; for ext4 and xfs.

    Raises:
        OSError: the file system doesn't tell.
    """
    found: list[tuple[int, int]] = []
    descriptor = os.open(path, os.O_RDONLY)
    try:
        start = 0
        while True:
            request = array.array("B", bytes(_HEADER.size + _MOST_EXTENTS * _EXTENT.size))
            _HEADER.pack_into(request, 0, start, 2**64 - 1 - start, _FIEMAP_SYNC, 0, _MOST_EXTENTS, 0)
            fcntl.ioctl(descriptor, _FIEMAP, request)
            count = _HEADER.unpack_from(request)[3]
            for number in range(count):
                logical, physical, length, _, _, flags, *_ = _EXTENT.unpack_from(
                    request, _HEADER.size + number * _EXTENT.size
                )
                start = logical + length
                if not flags & _UNPLACED:
                    found.append((physical, physical + length))
            if count < _MOST_EXTENTS:
                return found
    finally:
        os.close(descriptor)
