"""A file layer whose n-th operation fails, and interrupts between two instructions."""

from __future__ import annotations

import builtins
import contextlib
import dis
import errno
import functools
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any
from unittest import mock

from faults import PACKAGE

import dsa.backends.memmap
import dsa.backends.system
import dsa.state.journal

__all__ = ["FileLayer", "trace_calls"]

_OPERATIONS = ("fsync", "fdatasync", "posix_fallocate", "write", "replace", "ftruncate", "open", "unlink")


class FileLayer:
    """Numbers the file operations of the package and makes some fail.

    Args:
        failing: Numbers, from 0, of the operations that fail; the others happen.
        code: The error's number.
    """

    def __init__(self, failing: frozenset[int] = frozenset(), code: int = errno.EIO) -> None:
        self.failing, self.code = failing, code
        self.count = 0
        self.kinds: Counter[str] = Counter()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Stand between the package and the system."""
        with contextlib.ExitStack() as stack:
            for name in _OPERATIONS:
                stack.enter_context(mock.patch.object(os, name, self._operation(name, getattr(os, name))))
            opening = self._operation("open file", builtins.open)
            stack.enter_context(mock.patch.object(dsa.backends.system, "open", opening, create=True))
            for module in (dsa.state.journal, dsa.backends.memmap):
                stack.enter_context(
                    mock.patch.object(module.mmap, "mmap", self._operation("map", module.mmap.mmap))
                )
            yield

    def _operation(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: object, **options: object) -> Any:
            if not _from_package(sys._getframe(1)):
                return function(*arguments, **options)
            number, self.count = self.count, self.count + 1
            self.kinds[name] += 1
            if number in self.failing:
                raise OSError(self.code, f"injected: {name} {number}")
            return function(*arguments, **options)

        return wrapper


def _from_package(frame: FrameType | None) -> bool:
    # What the standard library does for the package (Path.unlink, say) counts; what the tests do does not.
    for _ in range(4):
        if frame is None:
            return False
        if frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


_INTERRUPTIBLE = frozenset({"CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD", "RESUME"})


def trace_calls(passing: Callable[[], None]) -> None:
    """Call `passing` in the main thread wherever the interpreter may run a signal's handler: in the package,
    after a call, at the start of a function and on the way back in a loop. `sys.settrace(None)` ends it.
    """
    last: dict[FrameType, int] = {}

    def enter(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        return inside

    def inside(frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            before, last[frame] = last.get(frame), frame.f_lasti
            if before is not None and _interruptible(frame, before) and not _collecting(frame):
                passing()
        elif event == "return":
            last.pop(frame, None)
        return inside

    sys.settrace(enter)


def _interruptible(frame: FrameType, before: int) -> bool:
    code = frame.f_code
    if dis.opname[code.co_code[before]] not in _INTERRUPTIBLE:
        return False
    # A signal's exception belongs to the instruction before, one raised here to the next: what differs is who
    # handles it. At the end of a `with` they differ, and no signal ever comes between.
    handlers = _handlers(code)
    return _handler(handlers, before) == _handler(handlers, frame.f_lasti)


@functools.cache
def _handlers(code: CodeType) -> list[tuple[int, int, int]]:
    return [(entry.start, entry.end, entry.target) for entry in dis._parse_exception_table(code)]


def _handler(handlers: list[tuple[int, int, int]], at: int) -> int:
    return next((target for start, end, target in handlers if start <= at < end), -1)


def _collecting(frame: FrameType | None) -> bool:
    # What is raised there is printed and forgotten, by any program.
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code.co_filename == weakref.__file__:
            return True
        frame = frame.f_back
    return False
