"""Every error that dsa raises on purpose, and how it warns.

The tree; each class also inherits the builtin that callers already catch::

    DSAError
    ├── StateError                    the state directory as a whole
    │   ├── StateExistsError          (FileExistsError)    resume=None met existing state
    │   ├── StateNotFoundError        (FileNotFoundError)  resume=True met none
    │   ├── StateMismatchError        (ValueError)         stored and requested tables differ
    │   ├── StateCorruptError         (ValueError)         damaged, truncated, extended or foreign file
    │   ├── StateIncompleteError      (RuntimeError)       a first creation that was interrupted
    │   ├── StateLockedError          (BlockingIOError)    another process holds the directory
    │   ├── StateMovedError           (FileNotFoundError)  the directory was moved or replaced while open
    │   ├── StateFailedError          (OSError, EIO)       the device refused to sync: open it again
    │   └── StateClosedError          (RuntimeError)       used after close, or in a forked child
    ├── CheckpointError               a checkpoint as a whole
    │   ├── CheckpointExistsError     (FileExistsError)    something is where it is to be written
    │   ├── CheckpointNotFoundError   (FileNotFoundError)  there is none
    │   ├── CheckpointIncompleteError (RuntimeError)       an interrupted export or copy, or no checkpoint
    │   ├── CheckpointCorruptError    (ValueError)         content or description changed, or files missing
    │   ├── CheckpointMismatchError   (ValueError)         another format, or a version not known here
    │   ├── CheckpointReadError       (OSError)            the store refused or failed while it was read
    │   └── CheckpointWriteError      (OSError)            the disk or the store refused while it was written
    ├── CorruptRowError               (ValueError)         a stored row holds implausible values
    ├── DiskSpaceError                (OSError, ENOSPC)    not enough room; raised before a byte is written
    ├── RowIndexError                 (IndexError)         a row outside [0, N)
    ├── RowTypeError                  (TypeError)          rows or gradients of a kind that has no meaning
    ├── GradientError                 (ValueError)         a gradient of another shape, or not finite
    └── GraphError                    (ValueError)         an edge list that can't be read or used

Warnings::

    DSAWarning (UserWarning)
    ├── StateWarning                  something about the directory that the caller should know
    └── TrainingWarning               something about the run: steps that hit the edge of the ball, ...
"""

from __future__ import annotations

import errno
import sys
import warnings
from typing import Final

__all__ = [
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointIncompleteError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointReadError",
    "CheckpointWriteError",
    "CorruptRowError",
    "DSAError",
    "DSAWarning",
    "DiskSpaceError",
    "GradientError",
    "GraphError",
    "RowIndexError",
    "RowTypeError",
    "StateClosedError",
    "StateCorruptError",
    "StateError",
    "StateExistsError",
    "StateFailedError",
    "StateIncompleteError",
    "StateLockedError",
    "StateMismatchError",
    "StateMovedError",
    "StateNotFoundError",
    "StateWarning",
    "TrainingWarning",
    "notify",
]


class DSAError(Exception):
    """Base of every error raised on purpose by dsa."""


class StateError(DSAError):
    """A state directory can't be used as it is."""


class StateExistsError(StateError, FileExistsError):
    """The directory already holds state and the caller did not say what to do with it."""


class StateNotFoundError(StateError, FileNotFoundError):
    """There is no state to continue from."""


class StateMismatchError(StateError, ValueError):
    """The stored tables are not the ones asked for."""


class StateCorruptError(StateError, ValueError):
    """A file of the state is damaged, truncated, extended or not ours."""


class StateIncompleteError(StateError, RuntimeError):
    """The first creation of a state was interrupted; there is nothing in it."""


class StateLockedError(StateError, BlockingIOError):
    """Another process holds the directory."""


class StateMovedError(StateError, FileNotFoundError):
    """What lies at the path of a state directory is not what this process holds any more."""


class StateFailedError(StateError, OSError):
    """The device refused to sync, so that nothing of the open state can be relied on: open it again."""


class StateClosedError(StateError, RuntimeError):
    """The object was closed, or belongs to another process (a fork)."""


class CheckpointError(DSAError):
    """A checkpoint can't be written or read as it is."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """Where a checkpoint is to be written there is something that must not be lost."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint."""


class CheckpointIncompleteError(CheckpointError, RuntimeError):
    """Writing or copying the checkpoint was interrupted, or it is none."""


class CheckpointCorruptError(CheckpointError, ValueError):
    """What the checkpoint holds is not what was written, or a part of it is missing."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """The checkpoint is of another format or of a version that this release doesn't know."""


class CheckpointReadError(CheckpointError, OSError):
    """The place where a checkpoint is refused, failed or can't be reached: its content is not in question."""


class CheckpointWriteError(CheckpointError, OSError):
    """The place where a checkpoint was being written refused: full, at a limit, or failing."""


class CorruptRowError(DSAError, ValueError):
    """A stored row holds values that no training produces: non-finite, v < 0, a negative counter."""


class DiskSpaceError(DSAError, OSError):
    """The file system has too little room.

    Args:
        needed: Bytes that the operation would occupy.
        available: Bytes that are free for this user.
        where: The directory concerned.
        remedy: What to do beside freeing space and choosing another directory.
    """

    def __init__(
        self,
        needed: int,
        available: int,
        where: str,
        remedy: str = "store fewer fields, or pass allocate='sparse' if few rows will ever be touched",
    ) -> None:
        super().__init__(
            errno.ENOSPC,
            f"{needed:,} bytes are needed in {where!r} but only {available:,} are available: free space, "
            f"choose another directory, {remedy}",
        )
        self.needed = needed
        self.available = available


class RowIndexError(DSAError, IndexError):
    """A row lies outside its table."""


class RowTypeError(DSAError, TypeError):
    """Rows or gradients are of a type that can't be used."""


class GradientError(DSAError, ValueError):
    """A gradient has the wrong shape or is not finite."""


class GraphError(DSAError, ValueError):
    """An edge list can't be read, or is not what the caller says it is."""


class DSAWarning(UserWarning):
    """Base of every warning raised by dsa."""


class StateWarning(DSAWarning):
    """Something about the state directory that the caller should know."""


class TrainingWarning(DSAWarning):
    """Something about the run that the caller should know."""


# An optimizer's constructor runs through torch's; a kernel is compiled by numba.
_INSIDE: Final = ("dsa", "torch", "numba")


def notify(message: str, category: type[DSAWarning]) -> None:
    """Warn at the innermost call from outside the package."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
