"""Holding a state directory: one process at a time, and the directory itself rather than its path.

The lock lies on the directory, which can't be swapped under its holder, and on the file ``dsa.lock`` for the
systems that lock files only. Whoever holds it looks, before each use, whether the path still leads to what it
holds: a directory that was moved away and made anew belongs to somebody else.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final, final

from dsa.backends import system
from dsa.backends.births import file_number
from dsa.errors import StateError, StateLockedError, StateMovedError

__all__ = ["LOCK_NAME", "HeldDirectory", "file_numbers"]

LOCK_NAME: Final = "dsa.lock"

_Identity = tuple[int, int]


@final
class HeldDirectory:
    """A directory that this process holds. Made by `take`; let go by `release`, or when nobody refers to it.

    Args:
        path: The directory.
        directory: A descriptor of it, or None on systems that have none.
        lock: A descriptor of the locked file in it.
        watched: What must stay where it is, and how it is recognised.
    """

    def __init__(self, path: Path, directory: int | None, lock: int, watched: dict[Path, _Identity]) -> None:
        self.path = path
        self._directory = directory
        self._watched = {str(each): identity for each, identity in watched.items()}
        self._descriptors = [lock] if directory is None else [lock, directory]
        self._process = os.getpid()
        _DESCRIPTORS.update(self._descriptors)

    @classmethod
    def take(cls, path: Path) -> HeldDirectory:
        """Lock a directory that exists, without waiting.

        Raises:
            StateLockedError: another process, or another object of this one, holds it.
            StateError: the file system has no locks.
            OSError: the lock can't be made.
        """
        with contextlib.ExitStack() as opened, _GUARD:
            lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
            opened.callback(os.close, lock)
            directory = system.open_directory(path)
            watched = {path: _identity(os.stat(path) if directory is None else os.fstat(directory))}
            if directory is not None:
                opened.callback(os.close, directory)
            if directory is None or not _lock_directory(path, directory, lock):
                watched[path / LOCK_NAME] = _identity(os.fstat(lock))
            if not _locked(path, lock):
                raise _in_use(path, lock)
            with contextlib.suppress(OSError):  # a hint for people, which a full disk may refuse
                os.ftruncate(lock, 0)
                os.write(lock, f"{os.getpid()}\n".encode())
            held = cls(path, directory, lock, watched)
            opened.pop_all()
        return held

    @property
    def directory(self) -> int | None:
        """A descriptor of the directory, or None on systems that have none."""
        return self._directory

    @property
    def process(self) -> int:
        """The process that took it."""
        return self._process

    @property
    def is_held(self) -> bool:
        """Whether this process holds the directory."""
        return bool(self._descriptors) and os.getpid() == self._process

    def check(self) -> None:
        """Raise `StateMovedError` unless the path leads to the directory that is held."""
        for path, identity in self._watched.items():
            try:
                found = _identity(os.stat(path))
            except (FileNotFoundError, NotADirectoryError):
                found = None
            if found != identity:
                what = "is not there any more" if found is None else "is another one now"
                raise StateMovedError(
                    f"{path!r} {what}: it was moved, removed or replaced while this process had the "
                    "state open, and nothing more is written; the state is whole up to the last step that "
                    "returned: open it with resume=True where it is now"
                )

    def release(self) -> None:
        """Let the directory go; silent when repeated, and in a forked child, which holds nothing."""
        with _GUARD:
            if os.getpid() != self._process:
                self._descriptors = []
                return
            # Unlocked first: an interrupt may then cost a descriptor, and not the directory.
            for descriptor in self._descriptors:
                system.unlock_file(descriptor)
            descriptors, self._descriptors = self._descriptors, []
            _DESCRIPTORS.difference_update(descriptors)
            for descriptor in descriptors:
                os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptors", None):
            self.release()


def file_numbers(directory: Path, names: Iterable[str]) -> dict[str, int]:
    """Return what tells files of a directory from others and, as ``"."``, the directory.

    Files that are not there are left out. Devices are not told apart: after a restart a disk may be another
    one. A mark in the files would tell nothing more, since whoever writes into a file that is there, and so
    keeps its number, overwrites the mark as well.
    """
    numbers = {}
    for name in (".", *names):
        with contextlib.suppress(FileNotFoundError):
            numbers[name] = file_number(directory / name)
    return numbers


def _identity(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino


def _lock_directory(path: Path, directory: int, lock: int) -> bool:
    """Lock the directory itself; return False on a file system that locks files only."""
    try:
        locked = system.lock_file(directory)
    except OSError:
        return False
    if not locked:
        raise _in_use(path, lock)
    return True


def _locked(path: Path, lock: int) -> bool:
    try:
        return system.lock_file(lock)
    except OSError as error:
        raise StateError(
            f"the file system of {str(path)!r} refuses to lock a file ({error.strerror or error}), which "
            "keeps two processes from writing to one state: use a local file system, or mount this one "
            "with locks"
        ) from error


def _in_use(path: Path, lock: int) -> StateLockedError:
    holder = os.read(lock, 32).decode("ascii", "replace").strip()
    who = "this very process" if holder == str(os.getpid()) else f"process {holder or 'unknown'}"
    return StateLockedError(
        f"the state directory {str(path)!r} is in use by {who}: close the optimizer that holds it, end that "
        "process, or choose another directory"
    )


# Held while a descriptor is opened and noted, so that a child forked by another thread knows each of them and
# can close it: a child that outlives its parent must not keep the lock.
_GUARD = threading.RLock()
_DESCRIPTORS: Final[set[int]] = set()


def _close_in_child() -> None:
    global _GUARD
    _GUARD = threading.RLock()
    for descriptor in _DESCRIPTORS:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _DESCRIPTORS.clear()


def _release_guard() -> None:
    with contextlib.suppress(RuntimeError):  # not acquired: a signal came first
        _GUARD.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _GUARD.acquire() and None,
        after_in_parent=_release_guard,
        after_in_child=_close_in_child,
    )
