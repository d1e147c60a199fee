"""The transactions that change the rows of a state's tables.

Nothing is stored but through a transaction, which has four moments, each of which may be repeated:

    prepare   hand out the memory of the new records, in the journal where there is one
    seal      complete the journal's entry: from here on the transaction has happened
    apply     write the records to the tables, and whatever else changes with them
    release   let the journal's entry go, once the tables hold it

With a journal, a sealed transaction survives the death of the process at any instant, and another leaves no
trace; see `dsa.state.journal`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, final

import numpy as np

from dsa.schema import Records, Rows
from dsa.state.journal import Journal
from dsa.state.progress import Progress, progress_of
from dsa.state.table import Table

__all__ = ["Effect", "Observer", "Transactions"]

Effect = Callable[[], None]
"""What a transaction changes beside rows of tables, such as weights in memory. May be called again."""


class Observer(Protocol):
    """Is told of every change of a table's rows before it happens."""

    def before_write(self, table: Table, rows: Rows) -> None:
        """Look at rows of a table for the last time before they change."""
        ...

    def takes_over(self, table: Table, let_go: Callable[[], None]) -> bool:
        """Say whether a table that is being replaced is still read.

        Args:
            table: The table as it was; its files are complete and don't change any more.
            let_go: Closes and removes its files. To be called once they are not needed, if this returns True.
        """
        ...

    def before_close(self) -> None:
        """Let everything go: the state is about to be closed."""
        ...


class _Transaction(NamedTuple):
    progress: Progress
    parts: list[tuple[Table, Rows, Records]]
    effects: Sequence[Effect] = ()


@final
class Transactions:
    """The open tables of a state, where they stand, and how they change. One thread at a time.

    Args:
        tables: The tables, in the state's order.
        journal: The journal, or None for the durability ``"none"``.
        global_step: Steps that the state has taken.
        refused: Gives whom to tell when the device has refused to sync, if there still is somebody.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        journal: Journal | None,
        global_step: int,
        refused: Callable[[], Callable[[OSError], None] | None],
    ) -> None:
        self.tables = list(tables)
        self.journal = journal
        self.global_step = global_step
        self.steps_taken = 0
        self.observers: list[Observer] = []
        self._refused = refused
        self._draft: _Transaction | None = None
        self._pending: _Transaction | None = None

    @property
    def is_settled(self) -> bool:
        """Whether no transaction waits to be completed."""
        return self._pending is None

    def progress(self) -> Progress:
        """Return the counts that the state stands at."""
        return progress_of(self.tables, self.global_step)

    def prepare(self, progress: Progress, batches: Sequence[tuple[Table, Rows]]) -> list[Records]:
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
        if self.journal is None:
            buffers = [np.empty(len(rows), table.backend.schema.dtype) for table, rows in batches]
        else:
            buffers = self._prepare_entry(self.journal, progress, batches)
        parts = [(table, rows, records) for (table, rows), records in zip(batches, buffers, strict=True)]
        self._draft = _Transaction(progress, parts)
        return buffers

    def commit(self, effects: Sequence[Effect] = ()) -> None:
        """Make the transaction prepared last happen: seal, apply and release it.

        Args:
            effects: What it changes beside the rows.

        Raises:
            DiskSpaceError: the rows' place on disk can't be had; nothing has changed.
            OSError: the disk failed. Whether the transaction counts is then open until the next call of any
                method has completed it; `global_step` tells afterwards.
        """
        draft = self._draft
        assert draft is not None, "prepare comes first"
        for table, rows, _ in draft.parts:
            table.backend.reserve(rows)
        self._pending, self._draft = draft._replace(effects=effects), None
        self.settle()

    def settle(self) -> None:
        """Complete a transaction whose commit was interrupted by an error or a signal, if there is one."""
        if self._pending is not None:
            self.seal()
            self.apply()
            self.release()

    def seal(self) -> None:
        """Complete the journal's entry: from here on the transaction has happened, whatever dies."""
        if self.journal is not None:
            with self._refusals():
                self.journal.commit()

    def apply(self) -> None:
        """Write the sealed transaction to the tables, and adopt its counts."""
        pending = self._pending
        if pending is None:
            return
        for table, rows, records in pending.parts:
            for observer in tuple(self.observers):
                observer.before_write(table, rows)
            table.backend.write(rows, records)
        for effect in pending.effects:
            effect()
        for table, rows, _ in pending.parts:
            table.rows_written += len(rows)
        self.steps_taken += pending.progress.global_step - self.global_step
        self.global_step = pending.progress.global_step
        for table, steps in zip(self.tables, pending.progress.steps, strict=True):
            table.steps = steps
        self._pending = None

    def release(self) -> None:
        """Let the journal's entries go, if the tables hold them as surely as the policy has it."""
        if self.journal is not None and not self.journal.durable and not self._queued():
            self.journal.release()

    def drain(self) -> None:
        """Hand whatever is queued to the tables' files, and settle."""
        for table in self.tables:
            if table.writer is not None and table.writer.status != "stopped":
                table.writer.drain()
        self.settle()

    def sync(self) -> None:
        """Return once the device holds tables and journal.

        Raises:
            OSError: it refused.
        """
        with self._refusals():
            self._flush()
            if self.journal is not None:
                self.journal.release()
                self.journal.sync()

    def go_on_with(
        self, tables: Sequence[Table], journal: Journal | None, global_step: int, effects: Sequence[Effect]
    ) -> None:
        """Stand where other content stands; the effects that belong to it are completed by `settle`."""
        self.tables, self.journal, self.global_step = list(tables), journal, global_step
        self._draft, self._pending = None, _Transaction(self.progress(), [], effects)

    def forget(self) -> None:
        """Drop a transaction that was begun, and one that waits to be completed."""
        self._draft = self._pending = None

    def _prepare_entry(
        self, journal: Journal, progress: Progress, batches: Sequence[tuple[Table, Rows]]
    ) -> list[Records]:
        note = progress.to_bytes()
        parts = [(self.tables.index(table), rows, table.backend.schema.dtype) for table, rows in batches]
        buffers = journal.begin(note, parts)
        if buffers is None:
            # The older entries may go once the tables hold what they say, as durably as the policy has it.
            self.drain()
            with self._refusals():
                if journal.durable:
                    self._flush()
                journal.release()
            buffers = journal.begin(note, parts)
        assert buffers is not None, "a journal that keeps one entry grows instead of refusing"
        return buffers

    def _queued(self) -> bool:
        return any(table.writer is not None and table.writer.queued for table in self.tables)

    def _flush(self) -> None:
        for table in self.tables:
            table.backend.flush()

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            tell = self._refused()
            if tell is not None:
                tell(error)
            raise
