"""Announcing rows ahead of the step that needs them.

Asking the system to read pages can itself wait for a full device queue, so a thread does it. A hint is only
ever that: it is dropped when the thread is behind, and never changes a result.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Protocol, TypeVar, final

import numpy as np

from dsa.schema import Rows
from dsa.table import Table

__all__ = ["Prefetcher", "Prefetching", "lookahead"]

Batch = TypeVar("Batch")

_BEHIND: Final = 4


@final
class Prefetcher:
    """Hands hints to the backends from a thread of its own, started by the first one."""

    def __init__(self) -> None:
        self._hints: queue.Queue[tuple[Table, Rows] | None] = queue.Queue(_BEHIND)
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._announced: dict[str, Rows] = {}
        self.announced_rows = 0
        self.dropped_rows = 0
        self.hit_rows = 0

    def announce(self, table: Table, rows: Rows) -> None:
        """Announce checked rows; returns at once."""
        if os.getpid() != self._process:
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._hints,), name="dsa-prefetch", daemon=True
            )
            self._thread.start()
        try:
            self._hints.put_nowait((table, rows))
        except queue.Full:
            self.dropped_rows += len(rows)
            return
        self.announced_rows += len(rows)
        self._announced[table.name] = rows

    def note_use(self, table: Table, rows: Rows) -> None:
        """Count how many of a step's rows the last hint had named."""
        announced = self._announced.pop(table.name, None)
        if announced is not None:
            self.hit_rows += int(np.isin(rows, announced).sum())

    def close(self) -> None:
        """End the thread; hints that wait are dropped."""
        if self._thread is None or os.getpid() != self._process:
            return
        while self._thread.is_alive():
            try:
                self._hints.put_nowait(None)
                break
            except queue.Full:
                self._discard_one()
        self._thread.join()
        self._thread = None

    def _discard_one(self) -> None:
        try:
            self._hints.get_nowait()
        except queue.Empty:
            return


def _work(hints: queue.Queue[tuple[Table, Rows] | None]) -> None:
    while (hint := hints.get()) is not None:
        table, rows = hint
        table.backend.hint(np.unique(rows))
        del table, hint


class Prefetching(Protocol):
    """What `lookahead` needs of an optimizer."""

    def prefetch(self, indices: Any, name: str | None = None) -> None:  # noqa: ANN401 - what the optimizer takes
        """Announce rows of a table."""
        ...


def lookahead(
    loader: Iterable[Batch], optimizer: Prefetching, ids: Callable[[Batch], Any | Mapping[str, Any]]
) -> Iterator[Batch]:
    """Yield the batches of a loader, announcing the rows of the next one while the current one is worked on.

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
    batches = iter(loader)
    try:
        current = next(batches)
    except StopIteration:
        return
    for following in batches:
        _announce(optimizer, ids(following))
        yield current
        current = following
    yield current


def _announce(optimizer: Prefetching, wanted: Any | Mapping[str, Any]) -> None:  # noqa: ANN401
    if isinstance(wanted, Mapping):
        for name, indices in wanted.items():
            optimizer.prefetch(indices, name)
    else:
        optimizer.prefetch(wanted)
