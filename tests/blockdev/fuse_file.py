"""A file system with one file, served over ``/dev/fuse`` in the kernel's own protocol.

Nothing is cached on this side of the kernel: every read and write of the file is a request that arrives here.
The numbers are those of ``linux/fuse.h``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable
from typing import Protocol

__all__ = ["FILE", "Disk", "mount", "serve"]

FILE = "disk"
_ROOT, _NODE = 1, 2
_IN, _OUT = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ")
_MOST = 1 << 20
_FOREVER = 1 << 31
_BIG_WRITES, _MAX_PAGES, _DIRECT_IO = 1 << 5, 1 << 22, 1

_LOOKUP, _FORGET, _GETATTR, _SETATTR = 1, 2, 3, 4
_OPEN, _READ, _WRITE, _STATFS, _RELEASE, _FSYNC, _FLUSH, _INIT = 14, 15, 16, 17, 18, 20, 25, 26
_OPENDIR, _RELEASEDIR, _INTERRUPT, _DESTROY, _BATCH_FORGET = 27, 29, 36, 38, 42
_UNANSWERED = (_FORGET, _BATCH_FORGET, _INTERRUPT)


class Disk(Protocol):
    """What the file's bytes are."""

    size: int

    def read(self, start: int, size: int) -> bytes:
        """Return bytes."""

    def write(self, start: int, data: bytes) -> None:
        """Take bytes, or raise OSError."""

    def flush(self) -> None:
        """Make them durable, or raise OSError."""


def mount(directory: str) -> int:
    """Mount the file system and return the descriptor to serve it over.

    Raises:
        OSError: the system doesn't allow it.
    """
    descriptor = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={descriptor},rootmode=40000,user_id=0,group_id=0,allow_other,max_read={_MOST}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"dsa-blockdev", directory.encode(), b"fuse", 0, options.encode()):
        code = ctypes.get_errno()
        os.close(descriptor)
        raise OSError(code, f"FUSE can't be mounted at {directory!r}: {os.strerror(code)}")
    return descriptor


def serve(descriptor: int, disk: Disk) -> None:
    """Answer requests until the file system is unmounted."""
    while True:
        try:
            request = os.read(descriptor, _MOST + 4096)
        except OSError as error:
            if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                continue
            return
        length, kind, unique, node = _IN.unpack_from(request)[:4]
        if kind == _DESTROY:
            return
        if kind in _UNANSWERED:
            continue
        try:
            code, answer = 0, _answer(kind, node, request[_IN.size : length], disk)
        except OSError as error:
            code, answer = -(error.errno or errno.EIO), b""
        try:
            os.write(descriptor, _OUT.pack(_OUT.size + len(answer), code, unique) + answer)
        except OSError as error:  # whoever asked was interrupted
            if error.errno not in (errno.ENOENT, errno.EINTR):
                return


def _answer(kind: int, node: int, body: bytes, disk: Disk) -> bytes:
    answers: dict[int, Callable[[], bytes]] = {
        _INIT: lambda: struct.pack(
            "<IIIIHHIIHH8I", 7, 31, _MOST, _BIG_WRITES | _MAX_PAGES, 64, 48, _MOST, 1, _MOST // 4096, *[0] * 9
        ),
        _LOOKUP: lambda: _lookup(body, disk),
        _GETATTR: lambda: struct.pack("<QII", _FOREVER, 0, 0) + _attributes(node, disk),
        _SETATTR: lambda: struct.pack("<QII", _FOREVER, 0, 0) + _attributes(node, disk),
        _OPEN: lambda: struct.pack("<QII", 1, _DIRECT_IO, 0),
        _OPENDIR: lambda: struct.pack("<QII", 1, 0, 0),
        _READ: lambda: disk.read(*struct.unpack_from("<QI", body, 8)),
        _WRITE: lambda: _write(body, disk),
        _FSYNC: lambda: _flush(disk),
        _STATFS: lambda: struct.pack(
            "<QQQQQIIII6I", disk.size // 4096, 0, 0, 2, 0, 4096, 255, 4096, 0, *[0] * 6
        ),
        _FLUSH: lambda: b"",
        _RELEASE: lambda: b"",
        _RELEASEDIR: lambda: b"",
    }
    if kind not in answers:
        raise OSError(errno.ENOSYS, "not offered")
    return answers[kind]()


def _lookup(body: bytes, disk: Disk) -> bytes:
    if body.rstrip(b"\0") != FILE.encode():
        raise OSError(errno.ENOENT, "no such file")
    return struct.pack("<QQQQII", _NODE, 0, _FOREVER, _FOREVER, 0, 0) + _attributes(_NODE, disk)


def _attributes(node: int, disk: Disk) -> bytes:
    size, mode, links = (0, 0o40755, 2) if node == _ROOT else (disk.size, 0o100600, 1)
    return struct.pack("<QQQQQQIIIIIIIIII", node, size, size // 512, *[0] * 6, mode, links, 0, 0, 0, 4096, 0)


def _write(body: bytes, disk: Disk) -> bytes:
    start, size = struct.unpack_from("<QI", body, 8)
    disk.write(start, body[40 : 40 + size])
    return struct.pack("<II", size, 0)


def _flush(disk: Disk) -> bytes:
    disk.flush()
    return b""
