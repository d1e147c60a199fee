"""An open state directory: its tables, and the transactions that change them.

Nothing is stored but through `begin` and `commit`. With a journal, a committed transaction survives the death
of the process at any instant, and an uncommitted one leaves no trace; see `dsa.journal`. `dsa.opening` opens
directories.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, final

import numpy as np

from dsa.errors import StateClosedError, StateCorruptError
from dsa.journal import Journal
from dsa.journal_format import Entry, Part
from dsa.metadata import Metadata, write_metadata
from dsa.progress import Progress, progress_of
from dsa.schema import Records, Rows
from dsa.storage import Storage
from dsa.table import Table, describe_table

__all__ = ["Observer", "StateDirectory", "apply_entry"]


class Observer(Protocol):
    """Is told of every change of a table's rows before it happens."""

    def before_replacement(self) -> None:
        """Let everything go: all tables are about to be replaced."""
        ...

    def before_write(self, table: Table, rows: Rows) -> None:
        """Look at rows of a table for the last time before they change."""
        ...


class _Transaction(NamedTuple):
    progress: Progress
    parts: list[tuple[Table, Rows, Records]]


@final
class StateDirectory:
    """The tables of one directory, open. Made by `dsa.opening.open_state`; closed by `close`.

    Args:
        path: The directory.
        lock: The descriptor that holds the directory's lock.
        metadata: The content of the description file; kept up to date here.
        tables: The open tables, in the description's order.
        journal: The journal, or None for the durability ``"none"``.
        storage: How it is stored.
    """

    def __init__(
        self,
        path: Path,
        lock: int,
        metadata: Metadata,
        tables: Sequence[Table],
        journal: Journal | None,
        storage: Storage,
    ) -> None:
        self.path = path
        self.storage = storage
        self.tables = {table.name: table for table in tables}
        self.global_step = metadata.global_step
        self.change: dict[str, Any] | None = metadata.change
        self.exclusive = threading.RLock()
        # By whom each table is used; a table is free again when its user is gone.
        self.users: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()
        self.steps_taken = 0
        self.observers: list[Observer] = []
        self.replacements = 0
        self._metadata = metadata
        self._lock: int | None = lock
        self._process = os.getpid()
        self._order = list(tables)
        self._journal = journal
        self._draft: _Transaction | None = None
        self._pending: _Transaction | None = None
        self._flush_failed = False
        _OPEN.add(self)

    def progress(self) -> Progress:
        """Return the counts, curvatures and pending change that the state stands at."""
        return progress_of(self._order, self.global_step, self.change)

    @property
    def is_open(self) -> bool:
        """Whether the state can be used by this process."""
        return self._lock is not None and os.getpid() == self._process

    @property
    def is_settled(self) -> bool:
        """Whether no transaction waits to be completed."""
        return self._pending is None

    @property
    def identity(self) -> str:
        """The random name of this state."""
        return self._metadata.identity

    @property
    def exports(self) -> dict[str, int]:
        """Checkpoints of this history: their content roots, and the step each was made at."""
        return dict(self._metadata.exports)

    @property
    def journal_bytes(self) -> int:
        """Bytes written to the journal since the state was opened."""
        return 0 if self._journal is None else self._journal.bytes_written

    def index(self, table: Table) -> int:
        """Return a table's position in the state."""
        return self._order.index(table)

    def add(self, table: Table) -> None:
        """Take in one more table, whose file is complete."""
        self.settle()
        self.tables[table.name] = table
        self._order.append(table)
        self._save("open")

    def begin(self, progress: Progress, batches: Sequence[tuple[Table, Rows]]) -> list[Records]:
        """Start a transaction and return the memory of its records, to be filled before `commit`.

        Args:
            progress: What the state will stand at.
            batches: The rows of each table that will change; one array of records is returned for each.

        Raises:
            DiskSpaceError: the journal has to grow and the disk is full. Nothing has changed.
        """
        self.settle()
        # The rows may be the caller's own memory, and are needed until the batch is written.
        batches = [(table, rows.copy()) for table, rows in batches]
        if self._journal is None:
            buffers = [np.empty(len(rows), table.backend.schema.dtype) for table, rows in batches]
        else:
            buffers = self._begin_entry(self._journal, progress, batches)
        parts = [(table, rows, records) for (table, rows), records in zip(batches, buffers, strict=True)]
        self._draft = _Transaction(progress, parts)
        return buffers

    def commit(self) -> None:
        """Make the transaction begun last happen.

        Raises:
            OSError: the disk failed. Whether the transaction counts is then open until the next call of any
                method, or `flush`, has completed it; `global_step` tells afterwards.
        """
        self._pending, self._draft = self._draft, None
        self.settle()

    def settle(self) -> None:
        """Complete a transaction whose commit was interrupted by an error or a signal, if there is one."""
        pending = self._pending
        if pending is None:
            return
        if self._journal is not None:
            self._journal.commit()
        for table, rows, records in pending.parts:
            for observer in tuple(self.observers):
                observer.before_write(table, rows)
            table.backend.write(rows, records)
        for table, rows, _ in pending.parts:
            table.rows_written += len(rows)
        self.steps_taken += pending.progress.global_step - self.global_step
        self._adopt(pending.progress)
        self._pending = None
        if self._journal is not None and not self._journal.durable and not self._queued():
            self._journal.release()

    def flush(self) -> None:
        """Return once the state is durable, whatever the durability."""
        self.require_open()
        self._drain_tables()
        self.settle()
        self._flush_tables()
        if self._journal is not None and not self._journal.durable:
            self._journal.sync()
        self._save("open")

    def mark_change(self, change: dict[str, Any] | None) -> None:
        """Record that a whole-table change starts or has ended. With a journal its entries say so too."""
        if change is None and self._journal is None:
            # Nothing but the description will tell that the change is over: it must be.
            self._drain_tables()
        self.change = change
        self._save("open")

    def close(self) -> None:
        """Flush, mark the directory as closed and release it; silent when repeated, and in a forked child."""
        if self._lock is None or os.getpid() != self._process:
            return
        # What fails here can be tried again; nothing is closed yet.
        self._drain_tables()
        self.settle()
        self._flush_tables()
        self._draft = None
        lock, self._lock = self._lock, None
        saved = False
        with contextlib.ExitStack() as stack:
            # Every file is let go, whichever fails; then the state is as after a kill, and the journal stays.
            # The lock goes last: whoever opens the directory next makes a journal of that name.
            stack.callback(os.close, lock)
            if (journal := self._journal) is not None:
                stack.callback(lambda: journal.close(remove=saved))
            with contextlib.ExitStack() as tables:
                for table in self._order:
                    tables.callback(table.backend.close)
            self._save("closed")
            saved = True

    def require_open(self) -> None:
        """Raise `StateClosedError` when the state was closed or belongs to another process."""
        if os.getpid() != self._process:
            raise StateClosedError(
                f"the state directory {str(self.path)!r} belongs to process {self._process} and this is a "
                "fork of it: use the optimizer in the process that made it"
            )
        if self._lock is None:
            raise StateClosedError(
                f"the state directory {str(self.path)!r} was closed: build the optimizer again with "
                "resume=True to go on"
            )

    def note_export(self, root: str, step: int) -> None:
        """Remember a checkpoint, so that later ones may hold only what has changed since."""
        self._metadata.exports = {**self._metadata.exports, root: step}
        self._save("open")

    def release_files(self) -> None:
        """Let the tables' files and the journal go; `replace` is to follow."""
        for observer in tuple(self.observers):
            observer.before_replacement()
        if self._journal is not None:
            self._journal.close(remove=False)
            self._journal = None
        for table in self._order:
            table.backend.close()

    def replace(self, metadata: Metadata, tables: Sequence[Table], journal: Journal | None) -> None:
        """Go on with other content, which the description on disk names already.

        Tables that have the name of an open one take its place in it, so that whoever holds it sees the new
        content.

        Args:
            metadata: The new description.
            tables: The new tables, in the state's order.
            journal: Their journal, which is empty.
        """
        self.replacements += 1
        self._metadata, self._journal = metadata, journal
        self.global_step, self.change = metadata.global_step, metadata.change
        for table in tables:
            known = self.tables.setdefault(table.name, table)
            if known is not table:
                known.take_over(table)
        self._order = [self.tables[table.name] for table in tables]
        self._save("open")

    def abandon(self) -> None:
        """Let everything go as a kill would: what is in memory may differ from what is on disk."""
        if self._lock is None:
            return
        lock, self._lock = self._lock, None
        if self._journal is not None:
            self._journal.close(remove=False)
        os.close(lock)

    def disown(self) -> None:
        """Leave the lock to whoever opened the directory, because opening failed."""
        self._lock = None
        if self._journal is not None:
            self._journal.close(remove=False)

    def abandon_in_child(self) -> None:
        """Let go of the lock in a forked child, so that a child that outlives its parent does not keep it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        # A thread that does not exist in the child may have held it.
        self.exclusive = threading.RLock()

    def __del__(self) -> None:
        if getattr(self, "_lock", None) is not None and os.getpid() == self._process:
            # A thread that is writing keeps its queue, and with it the lock, until the write has ended.
            lock = _Lock(self._lock)  # type: ignore[arg-type]  # not None: tested above
            for table in self._order:
                if table.writer is not None:
                    table.writer.held = lock
            warnings.warn(
                f"the state directory {str(self.path)!r} was never closed: call close(), or use the "
                "optimizer in a with statement",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def _begin_entry(
        self, journal: Journal, progress: Progress, batches: Sequence[tuple[Table, Rows]]
    ) -> list[Records]:
        note = progress.to_bytes()
        parts = [(self._order.index(table), rows, table.backend.schema.dtype) for table, rows in batches]
        buffers = journal.begin(note, parts)
        if buffers is None:
            # The older entries may go once the tables hold what they say, as durably as the policy has it.
            self._flush_tables() if journal.durable else self._drain_tables()
            journal.release()
            buffers = journal.begin(note, parts)
        assert buffers is not None, "a journal that keeps one entry grows instead of refusing"
        return buffers

    def _queued(self) -> bool:
        return any(table.writer is not None and table.writer.queued for table in self._order)

    def _drain_tables(self) -> None:
        for table in self._order:
            if table.writer is not None and table.writer.status != "stopped":
                table.writer.drain()

    def _flush_tables(self) -> None:
        self._drain_tables()
        if self._flush_failed and self._journal is not None:
            # After a failed sync the system may count pages as clean that never reached the device: write
            # them again.
            _write_newest(self._order, list(self._journal.entries()))
        self._flush_failed = True
        for table in self._order:
            table.backend.flush()
        self._flush_failed = False

    def _adopt(self, progress: Progress) -> None:
        self.global_step, self.change = progress.global_step, progress.change
        for table, steps, k in zip(self._order, progress.steps, progress.curvatures, strict=True):
            table.steps, table.k = steps, k

    def _save(self, status: str) -> None:
        metadata = self._metadata
        metadata.status, metadata.global_step, metadata.change = status, self.global_step, self.change
        metadata.tables = [describe_table(table) for table in self._order]
        write_metadata(self.path, metadata)


class _Lock:
    """A descriptor that is closed with the last reference to it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __del__(self) -> None:
        os.close(self._descriptor)


def apply_entry(tables: Sequence[Table], entry: Entry) -> None:
    """Write a journal entry's rows to the tables; doing so again changes nothing.

    Raises:
        StateCorruptError: the entry does not fit the tables.
    """
    for index, rows, raw in entry.parts:
        backend = tables[index].backend if index < len(tables) else None
        if backend is None or raw.shape[1] != backend.schema.dtype.itemsize:
            raise StateCorruptError(
                f"entry {entry.sequence} of the journal does not fit the state's tables: restore the "
                "directory from a copy"
            )
        if len(rows) and not (rows[0] >= 0 and rows[-1] < len(backend)):
            raise StateCorruptError(
                f"entry {entry.sequence} of the journal names rows outside table {index}: restore the "
                "directory from a copy"
            )
        backend.write(rows, np.ascontiguousarray(raw).view(backend.schema.dtype)[:, 0])


def _write_newest(tables: Sequence[Table], entries: Sequence[Entry]) -> None:
    """Write what the last of the entries says of each row: at no moment does a row go back."""
    written = {index: np.empty(0, np.int64) for index in range(len(tables))}
    for entry in reversed(entries):
        for index, rows, raw in entry.parts:
            fresh = ~np.isin(rows, written[index])
            apply_entry(tables, entry._replace(parts=[Part(index, rows[fresh], raw[fresh])]))
            written[index] = np.union1d(written[index], rows)


_OPEN: Final[weakref.WeakSet[StateDirectory]] = weakref.WeakSet()


def _abandon_all() -> None:
    for state in list(_OPEN):
        state.abandon_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
