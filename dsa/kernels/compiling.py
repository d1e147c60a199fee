"""Saying that kernels are being compiled, so that the first step of a machine does not look like a hang.

numba compiles a kernel when it is first called and keeps the result on disk: later processes load it in
milliseconds and nothing is said.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, Final, final

from numba.core import event

__all__ = ["announce_compilation"]

_PATIENCE: Final = 1.0
"""Seconds of compiling before something is said."""


@final
class _Announcer(event.Listener):
    """Prints one line once this package's kernels have been compiling for a while."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spent = 0.0
        self._since: dict[int, float] = {}
        self._said = False

    def on_start(self, event: Any) -> None:  # noqa: ANN401 - numba's
        """A kernel begins to be compiled."""
        if not _is_ours(event):
            return
        with self._lock:
            self._since[threading.get_ident()] = time.monotonic()
            if self._spent >= _PATIENCE:
                self._say()
                return
        timer = threading.Timer(_PATIENCE - self._spent, self._look)
        timer.daemon = True
        timer.start()

    def on_end(self, event: Any) -> None:  # noqa: ANN401 - numba's
        """A kernel is compiled."""
        with self._lock:
            began = self._since.pop(threading.get_ident(), None)
            if _is_ours(event) and began is not None:
                self._spent += time.monotonic() - began

    def _look(self) -> None:
        with self._lock:
            if self._since:
                self._say()

    def _say(self) -> None:
        if not self._said:
            self._said = True
            print("dsa: compiling its kernels, once on this machine ...", file=sys.stderr, flush=True)


def _is_ours(compiled: Any) -> bool:  # noqa: ANN401 - numba's event
    dispatcher = (compiled.data or {}).get("dispatcher")
    return str(getattr(getattr(dispatcher, "py_func", None), "__module__", "")).startswith("dsa.")


def announce_compilation() -> None:
    """Print a line to standard error when kernels of this package take longer than a second to compile."""
    event.register("numba:compile", _Announcer())  # type: ignore[no-untyped-call]
