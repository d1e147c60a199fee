"""The transactions that change the rows of a state's tables.

Nothing is stored but through a transaction, which has four moments, each of which may be repeated:

    prepare   hand out the memory of the new records, in the journal where there is one
    seal      complete the journal's entry: from here on the transaction has happened
    apply     write the records to the tables, and whatever else changes with them
    release   let the journal's entry go, once the tables hold it

With a journal, a sealed transaction survives the death of the process at any instant, and another leaves no
trace; see `dsa.state.journal`.

Where records are mapped memory, and the policy asks for no more than surviving the process, a transaction
may change them *in place*: `prepare_in_place` hands out memory for images of the records as they were, and
sealing it says that these are not needed any more. Until then `undo` puts them back, as recovery does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar, final

import numpy as np

from dsa.backends.base import InPlace
from dsa.kernels.layout import Words
from dsa.schema import Records, Rows
from dsa.state.journal import Journal
from dsa.state.progress import Progress, progress_of
from dsa.state.table import Table

__all__ = ["Effect", "Images", "Observer", "Transactions"]

T = TypeVar("T")

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


class Images(NamedTuple):
    """Memory for the records of a table as they were before a step changed them in place.

    Args:
        noted: ``(B,)`` int64, all -1: becomes the row once its image is whole, before the record changes.
        words: ``(B, W)`` words, the images.
    """

    noted: Rows
    words: Words


class _Part(NamedTuple):
    """Rows of a table: the records that they will hold, or images of those that they held."""

    table: Table
    rows: Rows
    memory: Records | Images


class _Transaction(NamedTuple):
    progress: Progress
    parts: list[_Part]
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
        self._spare = np.empty(0, np.int32)

    @property
    def is_settled(self) -> bool:
        """Whether no transaction waits to be completed or undone."""
        return self._pending is None and not self._is_begun_in_place()

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
            buffers = self._prepare_entry(progress, batches)
        parts = [_Part(*batch, records) for batch, records in zip(batches, buffers, strict=True)]
        self._draft = _Transaction(progress, parts)
        return buffers

    def can_be_in_place(self, tables: Sequence[Table]) -> bool:
        """Tell whether `prepare_in_place` may be called for tables.

        Closing its entry lets all older ones go: of none of the state's tables may records be queued, whether
        or not the transaction is about it.
        """
        if self.journal is not None and self.journal.durable:
            return False
        queues = any(table.writer is not None for table in self.tables)
        return not queues and all(table.mapped is not None for table in tables)

    def prepare_in_place(self, progress: Progress, batches: Sequence[tuple[Table, Rows]]) -> list[Images]:
        """Start a transaction that changes records where they are, until `commit` or `undo`.

        Args:
            progress: What the state will stand at.
            batches: The rows of each table that will change; the memory for their images is returned for
                each. Nothing may change before its image is whole and noted.

        Raises:
            DiskSpaceError: the rows' place on disk can't be had, or the journal has to grow and the disk is
                full. Nothing has changed.
        """
        self.settle()
        batches = [(table, rows.copy()) for table, rows in batches]
        for table, rows in batches:
            table.backend.reserve(rows)
        self._tell_observers(batches)
        sizes = [(_mapped(table).image_words, len(rows)) for table, rows in batches]
        images = self._spare_images(sizes) if self.journal is None else None
        if images is None:
            note = progress.to_bytes()
            parts = [
                (self.tables.index(table), rows, words)
                for (table, _), (words, rows) in zip(batches, sizes, strict=True)
            ]
            entry = self._with_room(lambda journal: journal.begin_in_place(note, parts))
            images = [Images(part.rows, part.records) for part in entry]
        self._draft = _Transaction(
            progress, [_Part(*batch, each) for batch, each in zip(batches, images, strict=True)]
        )
        return images

    def undo(self) -> None:
        """Put back what a transaction that was not committed has changed in place, and forget it."""
        if self._pending is not None:
            return
        if self._draft is not None:
            for table, _, memory in self._draft.parts:
                if isinstance(memory, Images):
                    noted = np.flatnonzero(memory.noted >= 0)
                    _mapped(table).restore(memory.noted[noted], memory.words[noted])
            if self.journal is not None:
                self.journal.undone()
        self._draft = None

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
        if not self._is_begun_in_place():
            for table, rows, _ in draft.parts:
                table.backend.reserve(rows)
        # From here on it is completed, whatever interrupts it.
        self._pending = draft._replace(effects=effects)
        self.settle()

    def settle(self) -> None:
        """Complete a transaction whose commit was interrupted by an error or a signal, if there is one.

        One that was begun in place and not committed is undone.
        """
        if self._pending is not None:
            self.seal()
            self.apply()
            self.release()
        elif self._is_begun_in_place():
            self.undo()

    def seal(self) -> None:
        """Complete the journal's entry: from here on the transaction has happened, whatever dies."""
        if self.journal is not None:
            with self.refusals():
                self.journal.commit()

    def apply(self) -> None:
        """Write the sealed transaction to the tables, and adopt its counts."""
        pending = self._pending
        if pending is None:
            return
        for table, rows, memory in pending.parts:
            if not isinstance(memory, Images):
                self._tell_observers([(table, rows)])
                table.backend.write(rows, memory)
        for index, change in pending.progress.keys.items():
            if (keys := self.tables[index].keys) is not None:
                keys.apply(change)
        for effect in pending.effects:
            effect()
        for table, rows, _ in pending.parts:
            table.rows_written += len(rows)
        self.steps_taken += pending.progress.global_step - self.global_step
        self.global_step = pending.progress.global_step
        progress = pending.progress
        for table, steps, decay in zip(self.tables, progress.steps, progress.decays, strict=True):
            table.steps, table.decay = steps, decay
        self._draft = None
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
        with self.refusals():
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
        """Undo a transaction that was begun, and drop one that waits to be completed."""
        self.undo()
        self._draft = self._pending = None

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Tell whoever is to be told when the device refuses to sync in a block."""
        try:
            yield
        except OSError as error:
            tell = self._refused()
            if tell is not None:
                tell(error)
            raise

    def _prepare_entry(self, progress: Progress, batches: Sequence[tuple[Table, Rows]]) -> list[Records]:
        note = progress.to_bytes()
        parts = [(self.tables.index(table), rows, table.backend.schema.dtype) for table, rows in batches]
        return self._with_room(lambda journal: journal.begin(note, parts))

    def _with_room(self, begin: Callable[[Journal], list[T] | None]) -> list[T]:
        journal = self.journal
        assert journal is not None, "without a journal nothing is begun there"
        begun = begin(journal)
        if begun is None:
            # The older entries may go once the tables hold what they say, as durably as the policy has it.
            self.drain()
            with self.refusals():
                if journal.durable:
                    self._flush()
                journal.release()
            begun = begin(journal)
        assert begun is not None, "a journal that keeps one entry grows instead of refusing"
        return begun

    def _spare_images(self, sizes: Sequence[tuple[int, int]]) -> list[Images]:
        """Return memory for the images of so many rows of so many words, which is used again and again."""
        total = sum(words * rows for words, rows in sizes)
        if total > len(self._spare):
            self._spare = np.empty(total + total // 2, np.int32)
        images, end = [], 0
        for words, rows in sizes:
            start, end = end, end + words * rows
            images.append(Images(np.full(rows, -1, np.int64), self._spare[start:end].reshape(rows, words)))
        return images

    def _tell_observers(self, batches: Sequence[tuple[Table, Rows]]) -> None:
        for table, rows in batches:
            for observer in tuple(self.observers):
                observer.before_write(table, rows)

    def _is_begun_in_place(self) -> bool:
        return self._draft is not None and any(isinstance(part.memory, Images) for part in self._draft.parts)

    def _queued(self) -> bool:
        return any(table.writer is not None and table.writer.queued for table in self.tables)

    def _flush(self) -> None:
        for table in self.tables:
            table.backend.flush()


def _mapped(table: Table) -> InPlace:
    assert table.mapped is not None, "see `Transactions.can_be_in_place`"
    return table.mapped
