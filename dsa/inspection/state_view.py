"""A state directory, looked at while training goes on or when it is over."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, final

from dsa.backends.base import Layout
from dsa.errors import StateClosedError, StateCorruptError, StateWarning, notify
from dsa.inspection import arrays, text
from dsa.inspection.directory import ObservedDirectory
from dsa.inspection.found_ids import IdReader
from dsa.inspection.overlaid import OverlaidBackend
from dsa.inspection.sources import open_source, table_path
from dsa.inspection.table_view import TableView
from dsa.schema import is_keyed
from dsa.state.content import StateContent
from dsa.state.directories import local_directory
from dsa.state.facts import stored_facts
from dsa.state.progress import Progress
from dsa.state.storage import as_layout
from dsa.state.table import Table

if TYPE_CHECKING:
    from xarray import DataTree
else:
    DataTree = Any  # so that annotations can be looked up where xarray is not installed

__all__ = ["StateView", "open_state"]

_TRIES: Final = 20


def open_state(path: str | os.PathLike[str], *, backend: Layout | None = None) -> StateView:
    """Look at a state directory without changing anything in it.

    No lock is taken and no file made or written, so that it works beside a process that trains there, which
    it doesn't slow down, and on read-only media. Where a killed process has left a journal, its last steps
    are read from there.

    Args:
        path: The directory that an optimizer was given as its `disk_dir` or `state_dir`.
        backend: The layout of tables whose kind is not one of the package's, see `dsa.backends.Layout`.

    Raises:
        StateNotFoundError: it holds no state.
        StateCorruptError: a file is damaged, truncated, extended, missing or foreign.
        StateMismatchError: it holds state of an older release, or tables of a kind that is not known.
        StateIncompleteError: its creation was interrupted, or is under way.

    Example:
        >>> import tempfile
        >>> from dsa import DiskSparseRiemannianAdam, init
        >>> path = tempfile.mkdtemp()
        >>> tables = {"entity": init.Zeros(1000, 2)}
        >>> optimizer = DiskSparseRiemannianAdam(tables, lr=0.1, k=0.0, disk_dir=path)
        >>> _ = optimizer.step({"entity": ([7], [[1.0, -1.0]])})
        >>> with open_state(path) as state:
        ...     entity = state["entity"]
        ...     entity.shape, state.global_step, int(entity["t"].sum())
        ((1000, 2), 1, 1)
        >>> optimizer.close()
    """
    view = StateView(Path(local_directory(path, "path")).absolute(), backend=backend)
    if view.copied:
        notify(
            f"{str(view.path)!r} is a copy that was made while a process had the state open, so that its "
            f"files are of different moments: run `dsa repair {view.path}` for a state of what is whole",
            StateWarning,
        )
    return view


@final
class StateView:
    """A state directory, to be looked at. Made by `open_state`; closed by `close` or at the end of a `with`.

    A mapping from names to `TableView`. Tables that are added to the state later are not in it.

    Args:
        path: The directory, absolute.
        tolerant: See `ObservedDirectory`.
        backend: See `open_state`.
    """

    def __init__(self, path: Path, *, tolerant: bool = False, backend: Layout | None = None) -> None:
        self._closed = False
        self._layout = None if backend is None else as_layout(backend)
        self._overlaid: list[OverlaidBackend | IdReader] = []
        fault = None
        for attempt in range(_TRIES):
            self._directory = ObservedDirectory(path, tolerant=tolerant)
            try:
                self._tables = MappingProxyType(self._open_tables(path))
                self.standing()
                break
            except (StateCorruptError, StateClosedError) as error:
                # A table that is replaced meanwhile looks like one that is missing: what is damaged stays so
                # while the description stays.
                _close_all(self._overlaid)
                if fault == (self._directory.stamp, str(error)) or attempt == _TRIES - 1:
                    raise
                fault = (self._directory.stamp, str(error))
            except BaseException:
                self.close()
                raise
        weakref.finalize(self, _close_all, self._overlaid).atexit = False

    def _open_tables(self, path: Path) -> dict[str, TableView]:
        tables = {}
        for index, stored in enumerate(self._directory.metadata().tables):
            source = open_source(path, stored, self._layout)
            overlaid = OverlaidBackend(source, self._directory, index)
            self._overlaid.append(overlaid)
            table = Table(stored_facts(path, stored), overlaid)
            file, ids = table_path(path, stored), None
            if is_keyed(overlaid.schema):
                ids = IdReader(file, overlaid, self._directory, index)
                self._overlaid.append(ids)
            tables[table.name] = TableView(source, overlaid, table, self, index, file, ids)
        return tables

    @property
    def path(self) -> Path:
        """The directory."""
        return self._directory.path

    @property
    def tables(self) -> Mapping[str, TableView]:
        """The tables by name, in the state's order."""
        return self._tables

    @property
    def status(self) -> str:
        """``"closed"``: it was closed properly. ``"open"``: a process is training, or was killed doing so."""
        return self._directory.metadata().status

    @property
    def global_step(self) -> int:
        """The last step that counts, which the journal knows while a process trains and after a kill.

        With ``durability="none"`` there is no journal and it is the step of the last flush; likewise, beside
        a process whose steps are too fast to be looked at between two of them.
        """
        return self.standing().global_step

    @property
    def copied(self) -> bool:
        """Whether it is a copy that was made while a process had the state open."""
        return self._directory.copied

    @property
    def observed(self) -> ObservedDirectory:
        """What the directory says of itself."""
        return self._directory

    @property
    def closed(self) -> bool:
        """Whether this view was closed."""
        return self._closed

    def standing(self) -> Progress:
        """Return the counts of steps as of the last step that counts."""
        self.require_open()
        return self._directory.progress()

    def journal_bytes(self) -> tuple[int, int]:
        """Return the length of the journal and the bytes that it occupies on disk; zero without one."""
        return self._directory.journal_bytes()

    def content(self) -> StateContent:
        """Return the state as what is copied from one place to another, read while it is copied.

        Beside a process that trains, its blocks are of different steps.
        """
        step = self.global_step
        tables = tuple(table.content() for table in self._tables.values())
        return StateContent(tables, step, self._directory.exports(step), self._directory.identity)

    def to_xarray(self) -> DataTree:
        """Return a DataTree with a Dataset for each table, without reading them; see `TableView.to_xarray`.

        Raises:
            ImportError: xarray is not installed.
        """
        attributes = {"directory": str(self.path), "status": self.status, "global_step": self.global_step}
        return arrays.tree({name: table.to_xarray() for name, table in self._tables.items()}, attributes)

    def require_open(self) -> None:
        """Raise `StateClosedError` when the view was closed."""
        if self._closed:
            raise StateClosedError(
                f"this view of {str(self.path)!r} was closed: call open_state({str(self.path)!r}) again"
            )

    def close(self) -> None:
        """Let the files go; closing twice is silent.

        They are unmapped once no array over them is left.
        """
        self._closed = True
        _close_all(self._overlaid)

    def __getitem__(self, name: str) -> TableView:
        if name not in self._tables:
            raise KeyError(f"there is no table {name!r}: name one of {sorted(self._tables)}")
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def __contains__(self, name: object) -> bool:
        return name in self._tables

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return text.safely(f"dsa state {str(self.path)!r}", lambda: text.state_text(self))

    def _repr_html_(self) -> str:
        return text.safely(f"dsa state {str(self.path)!r}", lambda: text.state_html(self), html=True)


def _close_all(opened: list[OverlaidBackend | IdReader]) -> None:
    while opened:
        opened.pop().close()
