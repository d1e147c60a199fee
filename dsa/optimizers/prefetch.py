"""Announcing rows ahead of the step that needs them.

Asking the system to read pages can itself wait for a full device queue, so a thread does it. A hint is only
ever that: it is dropped when the thread is behind, and never changes a result.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, Final, Generic, Protocol, TypeVar, cast, final

import numpy as np

from dsa.schema import Rows
from dsa.state.table import Table

__all__ = ["Prefetcher", "Prefetching", "lookahead"]

Batch = TypeVar("Batch")

_BEHIND: Final = 4


@final
class Prefetcher:
    """Hands hints to the backends from a thread of its own, started by the first one."""

    def __init__(self) -> None:
        self._hints: queue.Queue[tuple[Table, Rows] | None] = queue.Queue(_BEHIND)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._announced: dict[str, deque[Rows]] = {}
        self.announced_rows = 0
        self.dropped_rows = 0
        self.hit_rows = 0

    def announce(self, table: Table, rows: Rows) -> None:
        """Announce checked rows; returns at once."""
        if os.getpid() != self._process:
            return
        # The rows may be the caller's own memory, which is used again while the hint waits.
        rows = rows.copy()
        with self._lock:
            self._start_thread()
            try:
                self._hints.put_nowait((table, rows))
            except queue.Full:
                self.dropped_rows += len(rows)
                return
            self.announced_rows += len(rows)
            self._announced.setdefault(table.name, deque(maxlen=_BEHIND)).append(rows)

    def note_use(self, table: Table, rows: Rows) -> None:
        """Count how many of a step's rows hints had named; a hint that has named some is used up."""
        waiting = self._announced.get(table.name)
        if not waiting:
            return
        named = np.zeros(len(rows), np.bool_)
        with self._lock:
            for hint in list(waiting):
                hits = np.isin(rows, hint)
                if hits.any():
                    waiting = deque((other for other in waiting if other is not hint), _BEHIND)
                    self._announced[table.name] = waiting
                    named |= hits
        self.hit_rows += int(named.sum())

    def close(self) -> None:
        """End the thread; hints that wait are dropped."""
        if self._thread is None or os.getpid() != self._process:
            return
        _stop(self._hints, self._process)
        self._thread.join()
        self._thread = None

    def _start_thread(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=_work, args=(self._hints,), name="dsa-prefetch", daemon=True)
            thread.start()
            self._thread = thread
            weakref.finalize(self, _stop, self._hints, self._process)


def _work(hints: queue.Queue[tuple[Table, Rows] | None]) -> None:
    while (hint := hints.get()) is not None:
        table, rows = hint
        # A hint has nobody to tell: a disk that fails will fail the step that needs the rows.
        with contextlib.suppress(Exception):
            table.backend.hint(np.unique(rows))
        del table, hint


def _stop(hints: queue.Queue[tuple[Table, Rows] | None], process: int) -> None:
    """End the thread that reads from a queue of hints; those that wait are dropped."""
    if os.getpid() != process:
        return
    while True:
        try:
            while True:
                hints.get_nowait()
        except queue.Empty:
            pass
        try:
            hints.put_nowait(None)
            return
        except queue.Full:
            continue


class Prefetching(Protocol):
    """What `lookahead` needs of an optimizer."""

    def prefetch(self, indices: Any, name: str | None = None) -> None:  # noqa: ANN401 - what the optimizer takes
        """Announce rows of a table."""
        ...


def lookahead(
    loader: Iterable[Batch], optimizer: Prefetching, ids: Callable[[Batch], Any | Mapping[str, Any]]
) -> Iterable[Batch]:
    """Wrap a loader: the rows of the next batch are announced while the current one is worked on.

    What is returned is what the loader is: of an iterator one more, to be used once; of a `DataLoader` or a
    list something to be iterated again in each epoch, with the loader's length and attributes.

    Args:
        loader: Any iterable of batches, such as a `torch.utils.data.DataLoader`.
        optimizer: The optimizer whose tables the batches touch.
        ids: Gives the rows of a batch: indices as `prefetch` takes them, or ``{table: indices}``.

    Example:
        >>> class Recorder:
        ...     def prefetch(self, indices, name=None):
        ...         print("announced", indices)
        >>> for batch in lookahead([[1, 2], [3]], Recorder(), ids=lambda batch: batch):
        ...     print("working on", batch)
        announced [3]
        working on [1, 2]
        working on [3]
    """
    if isinstance(loader, Iterator):
        return _ahead(loader, optimizer, ids)
    return _Lookahead(loader, optimizer, ids)


class _Lookahead(Generic[Batch]):
    """A loader that announces rows, see `lookahead`."""

    def __init__(
        self, loader: Iterable[Batch], optimizer: Prefetching, ids: Callable[[Batch], Any | Mapping[str, Any]]
    ) -> None:
        self._loader, self._optimizer, self._ids = loader, optimizer, ids

    def __iter__(self) -> Iterator[Batch]:
        return _ahead(self._loader, self._optimizer, self._ids)

    def __len__(self) -> int:
        return len(cast("Sized", self._loader))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the loader's
        if name.startswith("_"):  # nothing of its own is missing, but while it is copied
            return object.__getattribute__(self, name)
        return getattr(self._loader, name)


def _ahead(
    loader: Iterable[Batch], optimizer: Prefetching, ids: Callable[[Batch], Any | Mapping[str, Any]]
) -> Iterator[Batch]:
    batches = iter(loader)
    try:
        current = next(batches)
    except StopIteration:
        return
    while True:
        error = None
        try:
            following = next(batches)
        except StopIteration:
            break
        except Exception as raised:
            error = raised
            break
        _announce(optimizer, ids(following))
        yield current
        current = following
    yield current
    if error is not None:
        raise error


def _announce(optimizer: Prefetching, wanted: Any | Mapping[str, Any]) -> None:  # noqa: ANN401
    if isinstance(wanted, Mapping):
        for name, indices in wanted.items():
            optimizer.prefetch(indices, name)
    else:
        optimizer.prefetch(wanted)
