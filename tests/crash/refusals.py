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

    def enter(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        return _passing(frame, passing)

    sys.settrace(enter)


def _passing(frame: FrameType, passing: Callable[[], None]) -> Callable[..., Any]:
    """Return what follows a frame from one entry to the next way out."""
    if _collecting(frame):
        return lambda frame, event, argument: None
    interruptible, handlers = _interruptible(frame.f_code), _handlers(frame.f_code)
    before = -1

    def inside(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal before
        if event == "opcode":
            last, before = before, frame.f_lasti
            # A signal's exception belongs to the instruction before, one raised here to the next: what
            # differs is who handles it. At the end of a `with` they differ, and no signal ever comes between.
            if last in interruptible and handlers[last] == handlers[before]:
                passing()
        return inside

    return inside


@functools.cache
def _interruptible(code: CodeType) -> frozenset[int]:
    instructions = code.co_code
    every = range(0, len(instructions), 2)
    return frozenset(at for at in every if dis.opname[instructions[at]] in _INTERRUPTIBLE)


@functools.cache
def _handlers(code: CodeType) -> tuple[int, ...]:
    """Return where each byte of a function's code is handled, or -1."""
    entries = dis._parse_exception_table(code)
    return tuple(
        next((entry.target for entry in entries if entry.start <= at < entry.end), -1)
        for at in range(len(code.co_code))
    )


def _collecting(frame: FrameType | None) -> bool:
    # What is raised there is printed and forgotten, by any program.
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code.co_filename == weakref.__file__:
            return True
        frame = frame.f_back
    return False
