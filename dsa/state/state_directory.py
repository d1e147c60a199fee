"""An open state directory: its tables, its description, and how it is closed.

Rows change by transactions only, see `dsa.state.transactions`. What changes whole tables makes them anew and
switches, see `dsa.state.replacement`. `dsa.state.opening` opens directories.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Final, final

from dsa.backends import system
from dsa.errors import StateClosedError, StateFailedError, StateMovedError
from dsa.schema import Records, Rows
from dsa.state.holding import HeldDirectory, file_numbers
from dsa.state.journal import Journal
from dsa.state.metadata import Metadata, mark_failed, read_metadata, write_metadata
from dsa.state.progress import Progress
from dsa.state.storage import Storage
from dsa.state.table import Table, describe_table
from dsa.state.table_files import file_of, remove_table_file
from dsa.state.transactions import Effect, Images, Observer, Transactions
from dsa.state.write_back import WriteBack, look_at

__all__ = ["StateDirectory", "describe_files"]


@final
class StateDirectory:
    """The tables of one directory, open. Made by `dsa.state.opening.open_directory`; closed by `close`.

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
        self.exclusive = threading.RLock()
        # By whom each table is used; a table is free again when its user is gone.
        self.users: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()
        # What whoever opened it asked for, and all who share it have to.
        self.resume: bool | None = None
        # Makes a checkpoint of the present step for whoever refers to it, and says where it is.
        self.keeper: Callable[[StateDirectory], dict[str, str] | None] | None = None
        # The step that a module was brought to by its state dict.
        self.loaded_step: int | None = None
        # A dense parameter that was trained beside it, or loaded with it, in this process.
        self.companion: weakref.ref[object] | None = None
        self.replacements = 0
        self._metadata = metadata
        self._write_back = WriteBack(held.path)
        # Weakly: a state that is dropped without close has to go at once, with a warning.
        refuse = weakref.WeakMethod(self._refuse)
        self._transactions = Transactions(tables, journal, metadata.global_step, refuse)
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
        return self._transactions.is_settled

    @property
    def global_step(self) -> int:
        """Steps that the state has taken."""
        return self._transactions.global_step

    @property
    def steps_taken(self) -> int:
        """Steps that were taken since the state was opened."""
        return self._transactions.steps_taken

    @property
    def observers(self) -> list[Observer]:
        """Who is told of changes."""
        return self._transactions.observers

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
        journal = self._transactions.journal
        return 0 if journal is None else journal.bytes_written

    def progress(self) -> Progress:
        """Return the counts that the state stands at."""
        return self._transactions.progress()

    def index(self, table: Table) -> int:
        """Return a table's position in the state."""
        return self._transactions.tables.index(table)

    def add(self, table: Table) -> None:
        """Take in one more table, whose file is complete and on the device."""
        self.settle()
        system.sync_directory(self.path)
        self.tables[table.name] = table
        self._transactions.tables.append(table)
        try:
            self.save()
        except BaseException:
            if not self._is_described(table):
                del self.tables[table.name]
                self._transactions.tables.remove(table)
            raise

    def _is_described(self, table: Table) -> bool:
        stored = read_metadata(self.path)
        return stored is not None and any(each["name"] == table.name for each in stored.tables)

    def prepare(self, progress: Progress, batches: Sequence[tuple[Table, Rows]]) -> list[Records]:
        """Start a transaction and return the memory of its records, see `Transactions.prepare`."""
        return self._transactions.prepare(progress, batches)

    def can_be_in_place(self, tables: Sequence[Table]) -> bool:
        """Tell whether tables may be changed in place, see `Transactions.can_be_in_place`."""
        return self._transactions.can_be_in_place(tables)

    def prepare_in_place(self, progress: Progress, batches: Sequence[tuple[Table, Rows]]) -> list[Images]:
        """Start a transaction that changes records where they are, see `Transactions.prepare_in_place`."""
        return self._transactions.prepare_in_place(progress, batches)

    def undo(self) -> None:
        """Put back what a transaction that was not committed has changed, see `Transactions.undo`."""
        self._transactions.undo()

    def commit(self, effects: Sequence[Effect] = ()) -> None:
        """Make the transaction prepared last happen, see `Transactions.commit`."""
        self._transactions.commit(effects)

    def refusals(self) -> AbstractContextManager[None]:
        """Take in that the device has refused to sync, if it does so in a block."""
        return self._transactions.refusals()

    def settle(self) -> None:
        """Complete a transaction whose commit was interrupted by an error or a signal, if there is one."""
        self._transactions.settle()

    def flush(self) -> None:
        """Return once the state is durable, whatever the durability.

        Raises:
            OSError: the device refused, or a queued write did. When it refused to sync, the state can't be
                used any more, see `require_open`.
        """
        self.require_open()
        self._make_durable()
        self.save()

    def _make_durable(self) -> None:
        self._transactions.drain()
        self._transactions.sync()
        self._metadata.durable_step = self.global_step

    def save(self, status: str = "open") -> None:
        """Bring the description up to date."""
        self.held.check()
        metadata = self._metadata
        metadata.status, metadata.global_step = status, self.global_step
        tables = self._transactions.tables
        metadata.tables = [describe_table(table, closing=status == "closed") for table in tables]
        metadata.files = describe_files(self.path, metadata, tables) if status == "open" else {}
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
        if self._metadata.status == "closed":  # an interrupt has kept the directory from being let go
            self.held.release()
            return
        try:
            self.held.check()
            self._require_sound()
            self._make_durable()
        except BaseException:
            if self._metadata.failed or self._is_elsewhere():
                self.abandon()
            raise
        self._transactions.forget()
        with contextlib.ExitStack() as stack:
            # Every file is let go, whichever fails; then the state is as after a kill, and the journal stays.
            # The directory goes last: whoever opens it next makes a journal of its own.
            stack.callback(self.held.release)
            for observer in tuple(self.observers):
                observer.before_close()
            saved = False
            if (journal := self._transactions.journal) is not None:
                stack.callback(lambda: journal.close(remove=saved))
            with contextlib.ExitStack() as tables:
                for table in self._transactions.tables:
                    tables.callback(table.close, self._metadata.journal_identity)
            self.save("closed")
            saved = True

    def require_open(self) -> None:
        """Say why the state can't be used, if it can't.

        Raises:
            StateClosedError: it was closed, or belongs to another process.
            StateFailedError: the device has refused to sync, or what the system wrote back on its own.
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
        self._take_in(self._write_back.glance(self._metadata.files))

    def require_kept(self) -> None:
        """Raise `StateFailedError` if the device has refused something, in the background too.

        Otherwise, what was read before this was called is what was written, and nothing older.
        """
        self._require_sound()
        self._take_in(look_at(self.path, self._metadata.files))

    def _take_in(self, error: OSError | None) -> None:
        if error is not None:
            self._refuse(error)
            self._require_sound()

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Hold the open state, while other threads wait.

        Raises:
            StateError: it can't be used, perhaps since this thread waited for it; see `require_open`.
        """
        with self.exclusive:
            self.require_open()
            yield

    def make_ready(self) -> None:
        """Have an open state with nothing pending, for a thread that holds it: `use` and `settle` in one.

        Raises:
            StateError: it can't be used, see `require_open`.
        """
        self.require_open()
        self._transactions.settle()

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
        old_journal = self._transactions.journal
        self._metadata = metadata
        replaced = []
        for table in tables:
            known = self.tables.setdefault(table.name, table)
            if known is not table:
                replaced.append(replace(known))
                known.take_over(table)
        ordered = [self.tables[table.name] for table in tables]
        self._transactions.go_on_with(ordered, journal, metadata.global_step, effects)
        # Files go last, each of them whatever befalls the others: an interrupt then finds one state or the
        # other in memory, too.
        with contextlib.ExitStack() as stack:
            if old_journal is not None:
                stack.callback(_remove_journal, old_journal)
            for table in replaced:
                stack.callback(self._let_table_go, table)

    def abandon(self) -> None:
        """Let everything go as a kill would: what is in memory may differ from what is on disk."""
        self._transactions.forget()
        if not self.is_open:
            return
        for observer in tuple(self.observers):
            observer.before_close()
        with contextlib.ExitStack() as stack:
            stack.callback(self.held.release)
            if (journal := self._transactions.journal) is not None:
                stack.callback(journal.close, remove=False)
            for table in self._transactions.tables:
                with contextlib.suppress(OSError):
                    table.abandon()

    def renew_lock_in_child(self) -> None:
        """Replace the lock in a forked child: a thread that does not exist there may have held it."""
        self.exclusive = threading.RLock()

    def __del__(self) -> None:
        held = getattr(self, "held", None)
        if held is not None and held.is_held:
            # A thread that is writing keeps its queue, and with it the directory, until the write has ended.
            for table in self._transactions.tables:
                if table.writer is not None:
                    table.writer.held = held
            warnings.warn(
                f"the state directory {str(self.path)!r} was never closed: call close(), or use the "
                "optimizer in a with statement",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def _refuse(self, error: OSError) -> None:
        """Note for good that the device has refused to sync, or to keep what was written back.

        Once it has, the system may have dropped what it could not write and call the pages clean; on ext4 the
        extent may never become readable, however often it is written again. No later success means anything.
        """
        self._metadata.failed = f"{error}"
        # The journal knows the counts, unless it goes back as well.
        self._metadata.global_step = self.global_step
        self._metadata.tables = [describe_table(table) for table in self._transactions.tables]
        with contextlib.suppress(OSError, StateMovedError):
            self.held.check()
            mark_failed(self.path, self.held.directory)
            write_metadata(self.path, self._metadata, self.held.directory)

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
        file = file_of(self.path, table)

        def let_go() -> None:
            # Nothing of it is needed any more, least of all what is still queued for it.
            with contextlib.suppress(OSError):
                table.abandon()
                remove_table_file(file)

        if not any(each.takes_over(table, let_go) for each in tuple(self.observers)):
            let_go()


def _remove_journal(journal: Journal) -> None:
    # Nothing names it any more: what can't be removed now goes with the next opening.
    with contextlib.suppress(OSError):
        journal.close(remove=True)


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
