"""Writing a checkpoint into a directory: it appears as a whole, or not at all.

Everything is written into a directory beside the final one, ``.<name>.tmp-<host>-<random>``, made durable,
and renamed. To replace a checkpoint the two directories exchange their names, and the old one is deleted
under the temporary name (see `dsa.checkpoint.exchange`). Whoever looks at any moment, also after a kill,
sees the old checkpoint, the new one, or none where there was none.

A temporary directory is locked as long as its writer lives. The next export to the same place removes those
that a killed one has left: at once when they are of this host and not locked, otherwise when nothing in them
has changed for an hour.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, final

from dsa.backends.shards.documents import DOCUMENT
from dsa.backends.system import boot_identity, lock_file, retried, sync_directory, sync_file
from dsa.checkpoint.exchange import replace_directory
from dsa.checkpoint.occupied import check_inside_nothing, check_local, is_committed, is_vacant
from dsa.checkpoint.places import Place
from dsa.checkpoint.workers import Workers
from dsa.errors import CheckpointExistsError, CheckpointWriteError, DSAError, StateWarning, notify

__all__ = ["LocalTarget", "left_aside"]

_IDLE_SECONDS: Final = 3600.0
_LONGEST_STEM: Final = 160
_SYNCING_THREADS: Final = 4
_DISK_ERRORS: Final = {
    errno.ENOSPC: "the disk is full: free space",
    errno.EDQUOT: "the disk quota is used up: free space",
    errno.EFBIG: "a file would be larger than the system or the process's limit (ulimit -f) allows: raise it",
    errno.EIO: "the device failed: check it",
}


@final
class LocalTarget:
    """A checkpoint that is being written into a directory.

    Args:
        path: Where it will be.
        overwrite: Whether it may replace a checkpoint.
        durable: Whether `commit` waits until everything is on the device.

    Raises:
        CheckpointExistsError: something is there that may not be replaced, or that the place lies inside of.
    """

    def __init__(self, path: Path, *, overwrite: bool, durable: bool) -> None:
        self.path = Path(os.path.realpath(path))
        self._overwrite = overwrite
        self._durable = durable
        check_inside_nothing(self.path)
        _recover(self.path)
        self._check()
        self._made = [parent for parent in self.path.parents if not parent.exists()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(self.path)
        self._temporary, self._lock = _make_temporary(self.path)
        self._files: list[Path] = []
        self._directories = {self._temporary}

    def _check(self) -> None:
        if not self.path.is_symlink() and not self.path.exists():
            return
        if self.path.is_dir() and is_vacant(self.path):
            return
        check_local(self.path, self._overwrite)

    def create(self, key: str) -> _LocalFile:
        """Begin a file; see `dsa.checkpoint.targets.Target`."""
        path = self._temporary.joinpath(*key.split("/"))
        with _explained(self.path):
            if path.parent not in self._directories:
                path.parent.mkdir(parents=True, exist_ok=True)
                for parent in path.parents:
                    self._directories.add(parent)
                    if parent == self._temporary:
                        break
            file = _LocalFile(path, self.path)
        self._files.append(path)
        return file

    def put(self, key: str, data: bytes) -> None:
        """Write a whole file."""
        file = self.create(key)
        try:
            file.write(data)
        finally:
            file.close()

    def written(self) -> Place:
        """Return where the files can be read before they are committed."""
        return Place(str(self._temporary), self._temporary)

    def commit(self, root: bytes) -> str:
        """Make the checkpoint appear under its name and return its path."""
        self.put(DOCUMENT, root)
        with _explained(self.path):
            if self._durable:
                self._sync()
            old = self._install()
            if self._durable:
                sync_directory(self.path.parent)
        if old is not None:
            _remove(old)
        self._release()
        return str(self.path)

    def _sync(self) -> None:
        with Workers("dsa-sync", _SYNCING_THREADS) as workers:
            for task in [workers.submit(_sync_path, path) for path in self._files]:
                task.result()
        for directory in sorted(self._directories, key=lambda path: len(path.parts), reverse=True):
            sync_directory(directory)

    def _install(self) -> Path | None:
        self._check()
        if self.path.is_dir() and any(self.path.iterdir()):
            return replace_directory(self._temporary, self.path, _free_name(self.path, "old"))
        try:
            if self.path.is_dir():
                retried(self.path.rmdir)
            retried(os.rename, self._temporary, self.path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise CheckpointExistsError(
                    f"something else was written to {str(self.path)!r} meanwhile: choose another directory"
                ) from error
            raise
        return None

    def _release(self) -> None:
        # Forgotten first: closed twice, another file of that number would be closed.
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def abort(self) -> None:
        """Remove what was written; after `commit` nothing of it is left here."""
        _remove(self._temporary)
        self._release()
        if not self.path.exists():
            for parent in self._made:
                with suppress(OSError):
                    parent.rmdir()


@final
class _LocalFile:
    """A file that is written with one system call per piece, and has holes where it is zero."""

    def __init__(self, path: Path, target: Path) -> None:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0)
        self._file = os.open(path, flags, 0o666)
        self._target = target
        self._skipped = 0

    def write(self, data: Any) -> None:  # noqa: ANN401 - any buffer
        if self._skipped:
            os.lseek(self._file, self._skipped, os.SEEK_CUR)
            self._skipped = 0
        view = memoryview(data)
        with _explained(self._target):
            while view:
                view = view[os.write(self._file, view) :]

    def skip(self, size: int) -> None:
        self._skipped += size

    def close(self) -> None:
        if self._file < 0:
            return
        file, self._file = self._file, -1
        try:
            if self._skipped:
                with _explained(self._target):
                    os.ftruncate(file, os.lseek(file, 0, os.SEEK_CUR) + self._skipped)
        finally:
            os.close(file)


@contextmanager
def _explained(target: Path) -> Iterator[None]:
    """Say which checkpoint it was and what can be done, when the disk refuses."""
    try:
        yield
    except DSAError:
        raise
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        raise CheckpointWriteError(
            error.errno,
            f"the checkpoint {str(target)!r} can't be written: {_DISK_ERRORS[error.errno]} or choose another "
            f"directory; what was there before is untouched ({error})",
        ) from error


def left_aside(path: Path) -> Path | None:
    """Return the checkpoint that was being replaced when its writer was killed, if it isn't at its place.

    Args:
        path: Its place.
    """
    if path.exists():
        return None
    asides = [each for each in _siblings(path, "old") if is_committed(each)]
    return max(asides, key=lambda each: each.stat().st_mtime, default=None)


def _recover(path: Path) -> None:
    aside = left_aside(path)
    if aside is not None:
        retried(os.rename, aside, path)


def _sweep(path: Path) -> None:
    """Remove what killed exports to the same place have left."""
    for sibling in [*_siblings(path, "tmp"), *_siblings(path, "old")]:
        lock = _lock(sibling)
        foreign = lock is None or f"-{_host()}-" not in sibling.name
        if lock != -1 and (not foreign or _is_idle(sibling)):
            _remove(sibling)
        if lock is not None and lock >= 0:
            os.close(lock)


def _siblings(path: Path, kind: str) -> list[Path]:
    pattern = re.compile(re.escape(_prefix(path, kind)) + "[0-9a-f]{8}-[0-9a-f]{8}")
    try:
        with os.scandir(path.parent) as entries:
            return [Path(entry.path) for entry in entries if pattern.fullmatch(entry.name)]
    except OSError:
        return []


def _prefix(path: Path, kind: str) -> str:
    stem = path.name
    if len(os.fsencode(stem)) > _LONGEST_STEM:
        digest = hashlib.sha256(os.fsencode(stem)).hexdigest()[:16]
        stem = f"{stem[: _LONGEST_STEM // 4]}-{digest}"
    return f".{stem}.{kind}-"


def _free_name(path: Path, kind: str) -> Path:
    return path.with_name(f"{_prefix(path, kind)}{_host()}-{secrets.token_hex(4)}")


@lru_cache(maxsize=1)
def _host() -> str:
    return hashlib.sha256(f"{platform.node()} {boot_identity()}".encode()).hexdigest()[:8]


def _make_temporary(path: Path) -> tuple[Path, int]:
    """Make and lock a temporary directory; -1 for the lock where directories can't be locked."""
    while True:
        temporary = _free_name(path, "tmp")
        with _explained(path):
            temporary.mkdir()
        lock = _lock(temporary)
        if lock is None:
            return temporary, -1
        if lock == -1 or not _is_same(lock, temporary):  # another export swept it before it was locked
            if lock >= 0:
                os.close(lock)
            continue
        return temporary, lock


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _lock(directory: Path) -> int | None:
    """Return a descriptor that holds the lock, -1 when somebody else does, None where there are no locks."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except FileNotFoundError:
        return -1
    except OSError:  # Windows can't open directories
        return None
    try:
        if lock_file(descriptor):
            return descriptor
    except OSError:
        os.close(descriptor)
        return None
    os.close(descriptor)
    return -1


def _is_idle(directory: Path) -> bool:
    newest = 0.0
    for folder, _, names in os.walk(directory):
        for name in (".", *names):
            with suppress(OSError):
                newest = max(newest, os.stat(os.path.join(folder, name)).st_mtime)
    return time.time() - newest > _IDLE_SECONDS


def _remove(directory: Path) -> None:
    """Delete a directory under its temporary name; what can't be deleted is reported."""
    if not directory.exists():
        return
    for folder, _, _ in os.walk(directory):
        with suppress(OSError):
            os.chmod(folder, 0o700)
    with suppress(OSError):
        retried(shutil.rmtree, directory)
    with suppress(OSError):  # interrupted, it may close a descriptor twice
        shutil.rmtree(directory, ignore_errors=True)
    if directory.exists():
        notify(f"{str(directory)!r} is of no use any more but can't be deleted: do it by hand", StateWarning)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)
