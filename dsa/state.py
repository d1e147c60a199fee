"""An open state directory: its tables, and the transactions that change them.

Nothing is stored but through a transaction, which has four moments, each of which may be repeated:

    prepare   hand out the memory of the new records, in the journal where there is one
    seal      make sure of the room and complete the journal's entry: from here on the step has happened
    apply     write the records to the tables, and whatever else the step changes
    release   let the journal's entry go, once the tables hold it

With a journal, a sealed transaction survives the death of the process at any instant, and another leaves no
trace; see `dsa.journal`. What changes whole tables makes them anew and switches, see `dsa.replacement`.
`dsa.opening` opens directories.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple, Protocol, final

import numpy as np

from dsa import system
from dsa.errors import DiskSpaceError, StateClosedError, StateFailedError, StateMovedError
from dsa.holding import HeldDirectory, file_numbers
from dsa.journal import Journal
from dsa.metadata import Metadata, write_metadata
from dsa.progress import Progress, progress_of
from dsa.schema import Records, Rows
from dsa.storage import Storage
from dsa.table import Table, describe_table
from dsa.table_files import file_of, remove_table_file

__all__ = ["Effect", "Observer", "StateDirectory", "describe_files"]

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
class StateDirectory:
    """The tables of one directory, open. Made by `dsa.opening.open_state`; closed by `close`.

    Args:
        held: The directory, which is let go by `close`.
        metadata: The content of the description file; kept up to date here.
        tables: The open tables, in the description's order.
        journal: The journal, or None for the durability ``"none"``.
        storage: How it is stored.
    """

    def __init__(
        self,
        held: HeldDirectory,
        metadata: Metadata,
        tables: Sequence[Table],
        journal: Journal | None,
        storage: Storage,
    ) -> None:
        self.held = held
        self.storage = storage
        self.tables = {table.name: table for table in tables}
        self.global_step = metadata.global_step
        self.exclusive = threading.RLock()
        # By whom each table is used; a table is free again when its user is gone.
        self.users: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()
        self.steps_taken = 0
        self.observers: list[Observer] = []
        self.replacements = 0
        self._metadata = metadata
        self._order = list(tables)
        self._journal = journal
        self._draft: _Transaction | None = None
        self._pending: _Transaction | None = None
        _OPEN.add(self)

    @property
    def path(self) -> Path:
        """The directory."""
        return self.held.path

    @property
    def is_open(self) -> bool:
        """Whether the state can be used by this process."""
        return self.held.is_held

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
    def metadata(self) -> Metadata:
        """The description as it was written last; not to be changed."""
        return self._metadata

    @property
    def journal_bytes(self) -> int:
        """Bytes written to the journal since the state was opened."""
        return 0 if self._journal is None else self._journal.bytes_written

    def progress(self) -> Progress:
        """Return the counts that the state stands at."""
        return progress_of(self._order, self.global_step)

    def index(self, table: Table) -> int:
        """Return a table's position in the state."""
        return self._order.index(table)

    def add(self, table: Table) -> None:
        """Take in one more table, whose file is complete and on the device."""
        self.settle()
        system.sync_directory(self.path)
        self.tables[table.name] = table
        self._order.append(table)
        self.save()

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
        if self._journal is None:
            buffers = [np.empty(len(rows), table.backend.schema.dtype) for table, rows in batches]
        else:
            buffers = self._prepare_entry(self._journal, progress, batches)
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
                method, or `flush`, has completed it; `global_step` tells afterwards.
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
        if self._journal is not None:
            with self._failing_for_good():
                self._journal.commit()

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
        for table, steps in zip(self._order, pending.progress.steps, strict=True):
            table.steps = steps
        self._pending = None

    def release(self) -> None:
        """Let the journal's entries go, if the tables hold them as surely as the policy has it."""
        if self._journal is not None and not self._journal.durable and not self._queued():
            self._journal.release()

    def flush(self) -> None:
        """Return once the state is durable, whatever the durability.

        Raises:
            OSError: the device refused, or a queued write did. When it refused to sync, the state can't be
                used any more, see `require_open`.
        """
        self.require_open()
        self._drain_tables()
        self.settle()
        self._sync()
        self.save()

    def save(self, status: str = "open") -> None:
        """Bring the description up to date."""
        self.held.check()
        metadata = self._metadata
        metadata.status, metadata.global_step = status, self.global_step
        metadata.tables = [describe_table(table, closing=status == "closed") for table in self._order]
        metadata.files = describe_files(self.path, metadata, self._order) if status == "open" else {}
        metadata.journal = metadata.journal and status == "open"
        write_metadata(self.path, metadata, self.held.directory)

    def close(self) -> None:
        """Flush, mark the directory as closed and release it; silent when repeated, and in a forked child.

        Raises:
            OSError: a queued write failed: nothing is closed, and closing can be tried again. Or the device
                refused to sync: then everything is let go as a kill would, and the next opening says so.
            StateMovedError: the directory is not at its path any more; everything is let go likewise.
        """
        if not self.is_open:
            return
        try:
            self.held.check()
            self._require_sound()
            self._drain_tables()
            self.settle()
            self._sync()
        except BaseException:
            if self._metadata.failed or self._is_elsewhere():
                self.abandon()
            raise
        self._draft = None
        with contextlib.ExitStack() as stack:
            # Every file is let go, whichever fails; then the state is as after a kill, and the journal stays.
            # The directory goes last: whoever opens it next makes a journal of its own.
            stack.callback(self.held.release)
            for observer in tuple(self.observers):
                observer.before_close()
            saved = False
            if (journal := self._journal) is not None:
                stack.callback(lambda: journal.close(remove=saved))
            with contextlib.ExitStack() as tables:
                for table in self._order:
                    tables.callback(table.backend.close)
            self.save("closed")
            saved = True

    def require_open(self) -> None:
        """Say why the state can't be used, if it can't.

        Raises:
            StateClosedError: it was closed, or belongs to another process.
            StateFailedError: the device has refused to sync.
            StateMovedError: the directory is not at its path any more.
        """
        if os.getpid() != self.held.process:
            raise StateClosedError(
                f"the state directory {str(self.path)!r} belongs to process {self.held.process} and this "
                "is a fork of it: use the optimizer or module in the process that made it"
            )
        if not self.held.is_held:
            raise StateClosedError(
                f"the state directory {str(self.path)!r} was closed: build the module or optimizer again "
                "with resume=True to go on"
            )
        self._require_sound()
        self.held.check()

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Hold the open state, while other threads wait.

        Raises:
            StateError: it can't be used, perhaps since this thread waited for it; see `require_open`.
        """
        self.require_open()
        with self.exclusive:
            self.require_open()
            yield

    def note_export(self, root: str, step: int) -> None:
        """Remember a checkpoint, so that later ones may hold only what has changed since."""
        self._metadata.exports = {**self._metadata.exports, root: step}
        self.save()

    def adopt(
        self,
        metadata: Metadata,
        tables: Sequence[Table],
        journal: Journal | None,
        effects: Sequence[Effect] = (),
    ) -> None:
        """Go on with other content, which the description on disk names already.

        Tables that have the name of an open one take its place in it, so that whoever holds it sees the new
        content. The files of those that are replaced go, unless somebody is still reading them.

        Args:
            metadata: The new description.
            tables: The tables, in the state's order: open ones that stay, and new ones.
            journal: Their journal, which is empty.
            effects: What changes with it beside the tables; `settle` sees to it.
        """
        self.replacements += 1
        old_journal, self._journal = self._journal, journal
        self._metadata, self.global_step = metadata, metadata.global_step
        replaced = []
        for table in tables:
            known = self.tables.setdefault(table.name, table)
            if known is not table:
                replaced.append(replace(known))
                known.take_over(table)
        self._order = [self.tables[table.name] for table in tables]
        self._pending = _Transaction(self.progress(), [], effects)
        # Files go last, each of them whatever befalls the others: an interrupt then finds one state or the
        # other in memory, too.
        with contextlib.ExitStack() as stack:
            if old_journal is not None:
                stack.callback(old_journal.close, remove=True)
            for table in replaced:
                stack.callback(self._let_table_go, table)

    def abandon(self) -> None:
        """Let everything go as a kill would: what is in memory may differ from what is on disk."""
        self._draft = self._pending = None
        if not self.is_open:
            return
        for observer in tuple(self.observers):
            observer.before_close()
        with contextlib.ExitStack() as stack:
            stack.callback(self.held.release)
            if self._journal is not None:
                stack.callback(self._journal.close, remove=False)
            for table in self._order:
                if table.writer is not None:
                    table.writer.abandon()
                else:
                    with contextlib.suppress(OSError):
                        table.backend.close()

    def renew_lock_in_child(self) -> None:
        """Replace the lock in a forked child: a thread that does not exist there may have held it."""
        self.exclusive = threading.RLock()

    def __del__(self) -> None:
        held = getattr(self, "held", None)
        if held is not None and held.is_held:
            # A thread that is writing keeps its queue, and with it the directory, until the write has ended.
            for table in self._order:
                if table.writer is not None:
                    table.writer.held = held
            warnings.warn(
                f"the state directory {str(self.path)!r} was never closed: call close(), or use the "
                "optimizer in a with statement",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def _prepare_entry(
        self, journal: Journal, progress: Progress, batches: Sequence[tuple[Table, Rows]]
    ) -> list[Records]:
        note = progress.to_bytes()
        parts = [(self._order.index(table), rows, table.backend.schema.dtype) for table, rows in batches]
        buffers = journal.begin(note, parts)
        if buffers is None:
            # The older entries may go once the tables hold what they say, as durably as the policy has it.
            self._drain_tables()
            with self._failing_for_good():
                if journal.durable:
                    self._flush_tables()
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

    def _sync(self) -> None:
        with self._failing_for_good():
            self._flush_tables()
            if self._journal is not None:
                self._journal.release()
                self._journal.sync()
        self._metadata.durable_step = self.global_step

    def _flush_tables(self) -> None:
        for table in self._order:
            table.backend.flush()

    @contextlib.contextmanager
    def _failing_for_good(self) -> Iterator[None]:
        """Refuse to go on after an error of the device inside the block.

        Once a sync has failed, the system may have dropped what it could not write and call the pages clean;
        on ext4 the extent may never become readable, however often it is written again. No later success
        means anything.
        """
        try:
            yield
        except DiskSpaceError:
            raise
        except OSError as error:
            self._metadata.failed = f"{error}"
            if self._journal is None:  # which would know the counts
                self._metadata.global_step = self.global_step
                self._metadata.tables = [describe_table(table) for table in self._order]
            with contextlib.suppress(OSError, StateMovedError):
                self.held.check()
                write_metadata(self.path, self._metadata, self.held.directory)
            raise

    def _require_sound(self) -> None:
        if self._metadata.failed:
            raise StateFailedError(
                errno.EIO,
                f"the device has refused to keep the state in {str(self.path)!r} "
                f"({self._metadata.failed}), so that what was written since the last flush may be gone: "
                "close it and open it again with resume=True, which makes its files anew and says what is "
                "lost",
            )

    def _is_elsewhere(self) -> bool:
        try:
            self.held.check()
        except StateMovedError:
            return True
        return False

    def _let_table_go(self, table: Table) -> None:
        backend, writer, file = table.backend, table.writer, file_of(self.path, table)

        def let_go() -> None:
            # Nothing of it is needed any more, least of all what is still queued for it.
            with contextlib.suppress(OSError):
                backend.close() if writer is None else writer.abandon()
                remove_table_file(file)

        if not any(each.takes_over(table, let_go) for each in tuple(self.observers)):
            let_go()


def describe_files(path: Path, metadata: Metadata, tables: Sequence[Table]) -> dict[str, int]:
    """Return the numbers of the files that make up an open state, see `Metadata.files`."""
    names = [file_of(path, table).name for table in tables]
    return file_numbers(path, [*names, metadata.journal_name] if metadata.journal else names)


_OPEN: Final[weakref.WeakSet[StateDirectory]] = weakref.WeakSet()


def _renew_locks() -> None:
    for state in list(_OPEN):
        state.renew_lock_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)
