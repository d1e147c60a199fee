"""What differs between operating systems: page advice, reservation, locks, durability.

Everything here works with `posix_fadvise`, `posix_fallocate`, `madvise`, `fcntl` and the thread's resource
counters missing: advice is then not given, reservation writes zeros, and the lock uses what the platform has.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from dsa.errors import DiskSpaceError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

__all__ = [
    "PAGE",
    "advise_random",
    "allocate_range",
    "announce_ranges",
    "available_bytes",
    "blocks_read",
    "boot_identity",
    "drop_cache",
    "extend",
    "is_allocated",
    "lock_file",
    "open_directory",
    "populate",
    "probe_size",
    "read_at",
    "refused_write_back",
    "reserve",
    "resource",
    "retried",
    "sync_directory",
    "sync_file",
    "sync_mapped",
    "sync_mapping",
    "unlock_file",
    "write_at",
    "write_atomically",
]

PAGE: Final = 4096
"""Bytes of a page as the layouts assume it; larger pages only make some advice coarser."""

_ZEROS: Final = bytes(1 << 20)
_POPULATE_WRITE: Final = 23
"""MADV_POPULATE_WRITE of Linux 5.14 and later, which Python has no name for."""
_WAIT_BEFORE: Final = 1
"""SYNC_FILE_RANGE_WAIT_BEFORE of Linux."""
_BEYOND: Final = 1 << 62
"""Where no file has pages: waiting for those to be written back takes no time."""
_CAN_NOT_TELL: Final = (errno.EBADF, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ESPIPE)
_PAUSES: Final = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
"""Seconds between attempts that the system refuses for a moment; 0.6 together."""

T = TypeVar("T")


def advise_random(mapping: mmap.mmap) -> None:
    """Turn read-ahead off for a mapping: the default was measured to fetch 2.9 MB for one row."""
    if hasattr(mapping, "madvise") and hasattr(mmap, "MADV_RANDOM"):
        mapping.madvise(mmap.MADV_RANDOM)


def announce_ranges(descriptor: int, starts: list[int], lengths: list[int]) -> None:
    """Ask the system to start reading ranges of a file, without waiting for any of it.

    `os.posix_fadvise` is used because it releases the interpreter's lock, which `mmap.madvise` does not.
    """
    advise = getattr(os, "posix_fadvise", None)
    if advise is None:
        return
    for start, length in zip(starts, lengths, strict=True):
        advise(descriptor, start, length, os.POSIX_FADV_WILLNEED)


def drop_cache(descriptor: int) -> None:
    """Drop a file's clean pages from the page cache; for measuring cold reads."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def blocks_read() -> int:
    """Return how many 512-byte blocks this thread has made the disk read; -1 where that is not counted."""
    if resource is None or not hasattr(resource, "RUSAGE_THREAD"):
        return -1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock


def available_bytes(directory: str | os.PathLike[str]) -> int:
    """Return the bytes free for this user on the file system of an existing directory."""
    return shutil.disk_usage(directory).free


def probe_size(directory: Path, size: int) -> None:
    """Find out whether a file may have a size, with a sparse one that is removed again.

    Raises:
        OSError: it may not: the file system, a quota or a limit of the process forbids it.
    """
    with tempfile.TemporaryFile(dir=directory) as file:
        file.truncate(size)


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """Return bytes of a file from an offset on; fewer where it ends."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.read(descriptor, size)


def reserve(descriptor: int, size: int, directory: str) -> None:
    """Give a file its full size with every block allocated: writes to a mapping then can't run out of disk.

    Args:
        descriptor: Open for writing.
        size: Bytes.
        directory: Where the file is, for the message and for the free space.

    Raises:
        DiskSpaceError: there is not enough room; tested before any block is taken and again by the system.
    """
    free = available_bytes(directory)
    needed = size - _occupied_bytes(descriptor)
    if needed > free:
        raise DiskSpaceError(needed, free, directory)
    try:
        _allocate(descriptor, size)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DiskSpaceError(needed, available_bytes(directory), directory) from error
        raise


def is_allocated(descriptor: int, size: int) -> bool:
    """Tell whether a file has as many blocks as so many bytes take; where that is not counted, it has."""
    return not hasattr(os.fstat(descriptor), "st_blocks") or _occupied_bytes(descriptor) >= size


def populate(mapping: mmap.mmap, start: int, length: int) -> bool:
    """Make the pages of a shared mapping ready to be stored to, without storing: no later store can fail.

    Args:
        mapping: Writable.
        start: Where the pages begin, a multiple of the system's page size.
        length: Bytes.

    Returns:
        Whether the system can do that.

    Raises:
        OSError: storing would raise SIGBUS (EFAULT), as it does where a full disk has no block for the page.
    """
    if sys.platform != "linux":
        return False
    try:
        mapping.madvise(_POPULATE_WRITE, start, length)
    except OSError as error:
        if error.errno == errno.EINVAL:  # an older kernel
            return False
        raise
    return True


def allocate_range(descriptor: int, start: int, length: int) -> bool:
    """Give blocks to a range of a file, changing nothing that is stored.

    Returns:
        Whether the system can do that.

    Raises:
        OSError: there are none (ENOSPC), or the file can't be written.
    """
    if not hasattr(os, "posix_fallocate"):
        return False
    try:
        os.posix_fallocate(descriptor, start, length)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            return False
        raise
    return True


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write a few bytes to a place in a file."""
    os.lseek(descriptor, offset, os.SEEK_SET)
    os.write(descriptor, data)


def _occupied_bytes(descriptor: int) -> int:
    return int(getattr(os.fstat(descriptor), "st_blocks", 0)) * 512


def _allocate(descriptor: int, size: int) -> None:
    if not allocate_range(descriptor, 0, size):
        _write_zeros(descriptor, 0, size)


def extend(descriptor: int, size: int, directory: str) -> None:
    """Lengthen a file with zeros that are really written; what it holds is not touched.

    Args:
        descriptor: Open for writing.
        size: Bytes that it is to have; a file that is as long already stays as it is.
        directory: Where the file is, for the message and for the free space.

    Raises:
        DiskSpaceError: there is not enough room; the file is as long as before.
    """
    before = os.fstat(descriptor).st_size
    free = available_bytes(directory)
    if size - before > free:
        raise DiskSpaceError(size - before, free, directory)
    try:
        _write_zeros(descriptor, before, size)
    except OSError as error:
        os.ftruncate(descriptor, before)
        if error.errno == errno.ENOSPC:
            raise DiskSpaceError(size - before, available_bytes(directory), directory) from error
        raise


def _write_zeros(descriptor: int, start: int, stop: int) -> None:
    os.lseek(descriptor, start, os.SEEK_SET)
    left = stop - start
    while left > 0:
        left -= os.write(descriptor, _ZEROS[: min(left, len(_ZEROS))])


def sync_file(descriptor: int) -> None:
    """Return once a file's data is on the device."""
    getattr(os, "fdatasync", os.fsync)(descriptor)


def sync_mapping(mapping: mmap.mmap, descriptor: int) -> None:
    """Return once everything written to a mapping is on the device."""
    mapping.flush()
    sync_file(descriptor)


def sync_mapped(mapping: mmap.mmap, path: Path) -> None:
    """Return once everything written to a file's mapping is on the device.

    The file is opened and synced first, which releases the interpreter's lock, as `mmap.flush` does not. The
    mapping is synced in any case: it sees every failure to write back since it was made.

    Raises:
        OSError: writing back has failed.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
    except OSError:  # no descriptor is left, or the file has lost its name
        mapping.flush()
        return
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)
        mapping.flush()


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    try:
        function = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return cast(Callable[[int, int, int, int], int], function)


_SYNC_FILE_RANGE: Final = _find_sync_file_range()


def refused_write_back(file: str) -> OSError | None:
    """Return the error of writing a file's pages back in the background, if it has not been told yet.

    The system keeps such an error for whoever asks first, and for every descriptor that was open when it
    happened. Nothing is written and nothing is waited for. Where the system can't say (it has to be Linux),
    or the file can't be opened, that is nothing.
    """
    if _SYNC_FILE_RANGE is None:
        return None
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError:
        return None
    try:
        refused = _SYNC_FILE_RANGE(descriptor, _BEYOND, 1, _WAIT_BEFORE) != 0
        code = ctypes.get_errno()
    finally:
        os.close(descriptor)
    return OSError(code, os.strerror(code), file) if refused and code not in _CAN_NOT_TELL else None


def boot_identity() -> str:
    """Return what names this run of the operating system, or an empty string where nothing does."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def sync_directory(directory: str | os.PathLike[str]) -> None:
    """Make renames and new names in a directory durable, where the system can."""
    if os.name == "nt":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def retried(action: Callable[..., T], *arguments: Any) -> T:  # noqa: ANN401 - those of `action`
    """Rename or remove something, again for half a second where the system is known to refuse for a moment.

    On Windows a virus scanner or an indexer that looks into a file keeps it from being renamed or removed
    meanwhile. Elsewhere a refusal is one.

    Args:
        action: `os.replace`, `os.rename`, `os.unlink`, ...: what does nothing when it is refused.
        *arguments: Its arguments.

    Raises:
        OSError: it is refused for good.
    """
    pauses = _PAUSES if sys.platform == "win32" or os.name == "nt" else ()
    for pause in pauses:
        try:
            return action(*arguments)
        except PermissionError:
            time.sleep(pause)
    return action(*arguments)


def write_atomically(path: Path, data: bytes, held: int | None = None) -> None:
    """Replace a file's content so that whoever reads it, after a kill too, sees the old or the new, whole.

    Args:
        path: The file.
        data: Its new content.
        held: A descriptor of its directory: the file there is replaced, even if the path leads elsewhere by
            now. Where the system can't do that, the path is used.

    Raises:
        OSError: the system refused. The old content is there, unless syncing the directory was what failed.
    """
    directory = held if held is not None and os.rename in os.supports_dir_fd else None
    target: str | Path = path if directory is None else path.name
    temporary = f"{target}.tmp"
    try:
        with open(temporary, "wb", opener=partial(os.open, mode=0o644, dir_fd=directory)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        retried(partial(os.replace, temporary, target, src_dir_fd=directory, dst_dir_fd=directory))
    except BaseException:
        with contextlib.suppress(OSError):  # what happened before is what the user has to know
            retried(partial(os.unlink, temporary, dir_fd=directory))
        raise
    if directory is None:
        sync_directory(path.parent)
    else:
        os.fsync(directory)


def lock_file(descriptor: int) -> bool:
    """Try to lock an open file without waiting; the system unlocks it when the process ends.

    Raises:
        OSError: the file system has no locks.
    """
    attempt = _lock_with_fcntl if fcntl is not None else _lock_with_msvcrt
    try:
        attempt(descriptor)
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock_file(descriptor: int) -> None:
    """Unlock a file, for the descriptors of forked children too; elsewhere closing it does that."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def open_directory(path: Path) -> int | None:
    """Return a descriptor of a directory, or None on systems that give none."""
    flag = getattr(os, "O_DIRECTORY", None)
    return None if flag is None or os.name == "nt" else os.open(path, os.O_RDONLY | flag)


def _lock_with_fcntl(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _lock_with_msvcrt(descriptor: int) -> None:
    try:
        import msvcrt
    except ImportError:  # neither lock exists: one process is trusted to be alone
        return
    lock: Callable[[int, int, int], Any] = msvcrt.locking  # type: ignore[attr-defined]
    lock(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
