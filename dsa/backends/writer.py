"""Write-behind: a backend that queues writes for a thread and serves reads of queued rows from the queue.

A step then does not wait for the disk, and rows that are touched again soon are never waited for either: with
popular ids almost every batch meets the one before it, so that a queue which had to drain before such a read
would be no queue.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple, final

import numpy as np

from dsa.backends.base import Growing, StateBackend
from dsa.backends.overlay import lay_over
from dsa.errors import StateClosedError, StateError, TrainingWarning, notify
from dsa.kernels.row_index import RowIndex
from dsa.kernels.rows import sort_stable
from dsa.schema import Records, Rows, Schema

__all__ = ["WriteBehind", "WriterStatus"]

WriterStatus = Literal["running", "draining", "stopped", "failed"]

_MERGED_BATCHES: Final = 64


class _Batch(NamedTuple):
    first_value: int
    rows: Rows
    records: Records


@final
class WriteBehind:
    """A `StateBackend` around another one.

    Writes are handed to a thread in order. Batches that wait together are merged, the last record of a row
    winning, sorted, and written at once, so that a backend with chunks writes each of them once. A read
    returns what was written last, queued or not.

    `write` takes ownership of its array. The queue is bounded; when it stays full for `put_timeout` the
    caller writes the oldest batches itself, in order, before its own is queued.

    For a backend that writes many rows at little more cost than a few there is `collect_bytes`: batches wait
    until they take that many bytes together, however many they are, and all are written at once, by the
    thread or, without one, by the `write` that filled the measure.

    An error of the thread stops it. The batch is kept; the error is raised from the next `read` or `write`
    and from `flush`, `drain` and `close`, and the last three first try again.

    `status` is ``"running"``, ``"draining"`` while someone waits for the queue to empty, ``"failed"`` after
    an error, ``"stopped"`` once closed.

    Args:
        backend: Where the records go; owned from here on.
        max_queue_size: Batches that may wait, >= 1.
        put_timeout: Seconds to wait for room, >= 0.
        collect_bytes: Bytes of records that are collected before they are written, >= 0.
        threaded: Whether a thread writes; without one, batches are collected.

    Example:
        >>> from dsa.backends.memory import MemoryBackend
        >>> from dsa.schema import adam_schema
        >>> backend = WriteBehind(MemoryBackend(4, adam_schema(dim=1)))
        >>> records = backend.read(np.array([2]))
        >>> records["w"] = 5
        >>> backend.write(np.array([2]), records)
        >>> backend.read(np.array([2]))["w"].item()
        5.0
        >>> backend.close()
    """

    def __init__(
        self,
        backend: StateBackend,
        *,
        max_queue_size: int = 150,
        put_timeout: float = 5.0,
        collect_bytes: int = 0,
        threaded: bool = True,
    ) -> None:
        if max_queue_size < 1:
            raise ValueError(f"max_queue_size={max_queue_size!r} is out of range: pass at least 1")
        if collect_bytes < 0 or (collect_bytes == 0 and not threaded):
            raise ValueError(
                f"collect_bytes={collect_bytes!r} is out of range: pass at least 0, or 1 without a thread"
            )
        if not put_timeout >= 0.0:
            raise ValueError(f"put_timeout={put_timeout!r} is out of range: pass a number of seconds >= 0")
        self._backend = backend
        self._limit = max_queue_size
        self._collected = collect_bytes
        self._threaded = threaded
        self._timeout = min(put_timeout, threading.TIMEOUT_MAX)
        # The lock itself is taken by with statements: a signal can't be handled between that and the block,
        # as it can in a condition's Python code.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._writing = threading.Lock()
        self._queue: list[_Batch] = []
        self._taken = 0
        self._index = RowIndex()
        self._next_value = 0
        self._error: BaseException | None = None
        self._draining = 0
        self._stopped = self._closed = False
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self.held: object = None
        self.stalls = 0
        self.sync_fallbacks = 0
        self.overlay_rows = 0
        _LIVE.add(self)

    @property
    def schema(self) -> Schema:
        """The layout of one record."""
        return self._backend.schema

    def __len__(self) -> int:
        return len(self._backend)

    @property
    def status(self) -> WriterStatus:
        """What the writer is doing; see the class."""
        if self._stopped:
            return "stopped"
        if self._error is not None:
            return "failed"
        return "draining" if self._draining else "running"

    @property
    def queued(self) -> int:
        """Batches that are not yet written."""
        return len(self._queue)

    def read(self, rows: Rows, out: Records | None = None) -> Records:
        """Return the records of `rows` as they were written last.

        Raises:
            OSError: an earlier write has failed; the records themselves are kept.
        """
        self._require_running()
        # The queue is looked at first: a batch that is written meanwhile holds the values that it will leave.
        with self._lock:
            found = self._index.get(rows) if len(self._index) else None
            batches = self._waiting() if found is not None else []
        records = self._backend.read(rows, out)
        if found is not None:
            firsts = [batch.first_value for batch in batches]
            count = lay_over(records, found, firsts, [batch.records for batch in batches])
            # Several threads do this; no call stands between reading and storing it.
            self.overlay_rows += count
        return records

    def write(self, rows: Rows, records: Records) -> None:
        """Queue the records of `rows`, taking ownership of the array.

        Raises:
            OSError: an earlier write has failed, or writing to make room did. Nothing is queued. Without a
                thread, writing what was collected may fail too: the batch is then queued with the others.
        """
        self._require_running()
        if len(rows) == 0:
            return
        if self._threaded:
            self._make_room()
        with self._lock:
            batch = _Batch(self._next_value, rows, records)
            self._next_value += len(rows)
            # An interrupt may fall between any two of these: what the index knows is always in the queue.
            self._queue.append(batch)
            self._index.put(rows, batch.first_value)
            if self._threaded:
                self._start_thread()
            self._changed.notify_all()
        if not self._threaded and _bytes_of(self._queue) >= self._collected:
            self._write_oldest()

    def reserve(self, rows: Rows) -> None:
        """Pass on the rows that are not waiting: those were reserved before they were queued.

        The thread may be storing them at this moment.

        Raises:
            DiskSpaceError: there is not enough room.
        """
        self._require_process()
        with self._lock:
            rows = rows[self._index.get(rows) < 0] if len(self._index) else rows
        self._backend.reserve(rows)

    def make_room(self, rows: int) -> bool:
        """Pass it on between two writes of the thread; a backend that is no `Growing` has none."""
        self._require_process()
        with self._writing:
            return isinstance(self._backend, Growing) and self._backend.make_room(rows)

    def adopt_rows(self, rows: int) -> None:
        """Pass it on between two writes of the thread."""
        self._require_process()
        assert isinstance(self._backend, Growing), "there is no room in others"
        with self._writing:
            self._backend.adopt_rows(rows)

    def write_through(self, rows: Rows, records: Records) -> None:
        """Drain, and write the records of `rows` at once: after an error none of them is queued."""
        self.drain()
        with self._writing:
            self._backend.write(rows, records)

    def scan(self, start: int, stop: int) -> Iterator[tuple[int, Records]]:
        """Yield consecutive blocks of ``[start, stop)``, queued records included."""
        self._require_running()
        blocks = self._backend.scan(start, stop)
        while True:
            # As in `read`: what waits is noted before the block is read, since it may be written meanwhile.
            batches = self._waiting()
            block = next(blocks, None)
            if block is None:
                return
            first, records = block
            for batch in batches:
                low, high = np.searchsorted(batch.rows, [first, first + len(records)])
                records[batch.rows[low:high] - first] = batch.records[low:high]
            yield first, records

    def hint(self, rows: Rows) -> None:
        """Pass the announcement on."""
        self._backend.hint(rows)

    def drain(self) -> None:
        """Return once the queue is empty and everything is handed to the backend.

        Raises:
            OSError: a write has failed, again if it had failed before.
        """
        self._require_process()
        self._error = None
        self._draining += 1
        try:
            while self.queued:
                self._write_oldest()
        finally:
            self._draining -= 1

    def flush(self) -> None:
        """Drain and return once everything is durable."""
        self._require_process()
        self.drain()
        self._backend.flush()

    def close(self) -> None:
        """Flush, stop the thread and close the backend; closing twice is silent.

        When a write fails again the error is raised and nothing is closed: the records are kept, and closing
            can be tried again.
        """
        if self._closed or os.getpid() != self._process:
            return
        if not self._stopped:
            self.drain()
        with self._lock:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        try:
            self._backend.close()
        finally:
            self._closed = True

    def abandon(self) -> None:
        """Forget what is queued and close; a write that is under way ends first, and no error is raised."""
        with self._writing, self._lock:
            self._queue.clear()
            self._index = RowIndex()
            self._stopped = self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._backend.close()

    def describe(self) -> dict[str, Any]:
        """Return the description of the backend inside."""
        return self._backend.describe()

    def _waiting(self) -> list[_Batch]:
        with self._lock:
            return list(self._queue)

    def _make_room(self) -> None:
        with self._lock:
            if self._has_room():
                return
            self.stalls += 1
            self._changed.wait_for(lambda: self._has_room() or self._error is not None, self._timeout)
        self._require_running()
        if not self._has_room():
            self._fall_back()

    def _has_room(self) -> bool:
        if self._collected:
            return _bytes_of(self._queue[self._taken :]) < self._collected
        return len(self._queue) - self._taken < self._limit

    def _fall_back(self) -> None:
        if self.sync_fallbacks == 0 and not self._collected:
            notify(
                f"the write queue stayed full ({self._limit} batches) for {self._timeout:g} s, so that a "
                "step writes them itself: the disk is slower than training; raise max_queue_size to absorb "
                "bursts, or use a faster disk",
                TrainingWarning,
            )
        self.sync_fallbacks += 1
        self._write_oldest()

    def _write_oldest(self) -> None:
        """Write the batches that have waited longest, in order and one at a time, whoever calls this."""
        with self._writing:
            with self._lock:
                count = len(self._queue)
                self._taken = count if self._collected else min(count, _MERGED_BATCHES)
                batches = self._queue[: self._taken]
            if not batches:
                return
            try:
                self._backend.write(*_merged(batches))
            except Exception as error:
                with self._lock:
                    self._error = error
                    self._changed.notify_all()
                raise
            with self._lock:
                for batch in batches:
                    self._index.remove(batch.rows, batch.first_value)
                del self._queue[: len(batches)]
                self._taken, self._error = 0, None
                self._changed.notify_all()

    def _start_thread(self) -> None:
        if self._thread is None:
            thread = threading.Thread(
                target=_work, args=(weakref.ref(self), self._changed), name="dsa-writer", daemon=True
            )
            thread.start()
            self._thread = thread
            weakref.finalize(self, _wake, self._changed, self._process)

    def _has_work(self) -> bool:
        return bool(self._queue) and _bytes_of(self._queue) >= self._collected and self._error is None

    def _require_running(self) -> None:
        self._require_process()
        if self._error is not None:
            raise _again(self._error) from self._error

    def _require_process(self) -> None:
        if os.getpid() != self._process:
            raise StateClosedError(
                f"the write queue belongs to process {self._process} and this is a fork: use it there"
            )
        if self._stopped:
            raise StateClosedError("the write queue was closed: open the state directory again")


def _work(reference: weakref.ref[WriteBehind], lock: threading.Condition) -> None:
    """Write batches as they come, until the writer is closed or gone."""
    while True:
        with lock:
            writer = reference()
            while writer is not None and not writer._stopped and not writer._has_work():
                del writer
                lock.wait()
                writer = reference()
            if writer is None or writer._stopped:
                return
        # An error is kept for whoever calls next.
        with contextlib.suppress(Exception):
            writer._write_oldest()
        del writer


def _wake(lock: threading.Condition, process: int) -> None:
    if os.getpid() != process:
        return  # a thread of the parent may have held the lock when the child was made
    with lock:
        lock.notify_all()


def _bytes_of(batches: list[_Batch]) -> int:
    return sum(batch.records.nbytes for batch in batches)


def _merged(batches: list[_Batch]) -> tuple[Rows, Records]:
    """Return the rows of all batches, sorted and distinct, with the record that the last batch gives each."""
    if len(batches) == 1:
        return batches[0].rows, batches[0].records
    rows = np.concatenate([batch.rows for batch in batches])
    order = sort_stable(rows, int(rows.max()))
    ordered = rows[order]
    last = order[np.append(ordered[1:] != ordered[:-1], True)]
    # As bytes: numpy drops the padding of structured arrays when it joins them.
    dtype = batches[0].records.dtype
    raw = np.concatenate([batch.records.view(np.uint8).reshape(-1, dtype.itemsize) for batch in batches])
    return rows[last], raw[last].view(dtype)[:, 0]


def _again(error: BaseException) -> Exception:
    """Return the error that later calls raise: of the operating system's kind if the first was."""
    text = f"a queued write has failed ({error}), its records are kept: remove the cause and call flush()"
    if isinstance(error, OSError):
        return OSError(error.errno, text)
    return StateError(text)


_LIVE: Final[weakref.WeakSet[WriteBehind]] = weakref.WeakSet()


def _drain_at_exit() -> None:
    # A disk that fails keeps none of the others from being written; its error is raised after that.
    with contextlib.ExitStack() as drains:
        for writer in list(_LIVE):
            if writer.queued and os.getpid() == writer._process:
                drains.callback(writer.drain)


atexit.register(_drain_at_exit)
