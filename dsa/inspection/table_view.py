"""One table of a state, as arrays that are only read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, final

import numpy as np
from numpy.typing import NDArray

from dsa.backends.base import Source
from dsa.errors import RowIndexError
from dsa.inspection import arrays, text
from dsa.inspection.directory import file_sizes
from dsa.inspection.found_ids import IdReader
from dsa.inspection.overlaid import OverlaidBackend
from dsa.inspection.sources import files_at
from dsa.kernels.decay import caught_up
from dsa.kernels.plausible import first_implausible
from dsa.rules.init import Initializer
from dsa.rules.updates import AnyRule
from dsa.schema import Records, Schema, catches_up, read_numbers
from dsa.state.coalesce import as_ids, as_rows
from dsa.state.content import TableContent
from dsa.state.keyed_rows import first_weights
from dsa.state.keys import owned_rows
from dsa.state.progress import Progress
from dsa.state.table import Table, corrupt_row, fill_untouched, read_records, read_weights

if TYPE_CHECKING:
    from xarray import Dataset
else:
    Dataset = Any  # so that annotations can be looked up where xarray is not installed

__all__ = ["Owner", "TableView"]

_TRIES: Final = 20


class Owner(Protocol):
    """The state that a table belongs to, which outlives it."""

    def require_open(self) -> None:
        """Raise `StateClosedError` when the state is no longer looked at."""
        ...

    def standing(self) -> Progress:
        """Return where the state stands."""
        ...


@final
class TableView:
    """One table, to be looked at. Made by `open_state`.

    ``table["w"]`` is a field of all rows as the table's file holds it at this moment: a numpy array over
    mapped memory, ``(N, D)`` or for one number per row ``(N,)``, which can't be written. Nothing is read
    until elements are used, whatever the table's size. In it

    - rows that were never written (those whose stamp ``s`` is 0) are zero, whatever the initial weights,
    - rows that training is writing at the moment may be half new, and the last step of a killed process may
      not have arrived: the journal has it.

    `read` and `weights` copy rows and have neither gap. Where rows make up for decay, ``w`` is the weight as
    it was written, and `weights` alone what it has become.

    Of a table that is stored as Zarr, ``table["w"]`` is a `zarr.Array`: its slices are numpy arrays. Of one
    in a storage of your own it may be an array that reads rows when it is sliced. A field that is stored as
    bfloat16 is one of uint16, its bit patterns: ``(patterns.astype("uint32") << 16).view("float32")`` are the
    numbers. `dsa.schema.read_numbers` reads them from records.

    Args:
        source: Its records, opened for reading.
        overlaid: The same with what the journal says of them.
        table: What the description says of it.
        state: The state that it belongs to.
        index: Its position in the state.
        path: Where its file is, or its directory.
        ids: Finds its rows by their ids, where they belong to some.
    """

    def __init__(
        self,
        source: Source,
        overlaid: OverlaidBackend,
        table: Table,
        state: Owner,
        index: int,
        path: Path,
        ids: IdReader | None = None,
    ) -> None:
        """Keep what it is handed; `dsa.inspection.state_view` is the way to call this."""
        self._source = source
        self._overlaid = overlaid
        self._table = table
        self._state = state
        self._index = index
        self._path = path
        self._ids = ids

    @property
    def name(self) -> str:
        """The user's name for it."""
        return self._table.name

    @property
    def rows(self) -> int:
        """N."""
        return len(self._overlaid)

    @property
    def dim(self) -> int:
        """Elements of a row, D."""
        return self.schema.dim

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, D)``."""
        return self.rows, self.dim

    @property
    def schema(self) -> Schema:
        """The layout of a record."""
        return self._overlaid.schema

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields of a row, in storage order: of w, m, v, t and s, those that there are."""
        return self.schema.names

    @property
    def rule(self) -> AnyRule:
        """The update rule whose fields the records hold, such as `dsa.rules.adam.ADAM`."""
        return self._table.rule

    @property
    def initializer(self) -> Initializer | None:
        """The rule that gives rows their first weights; None when all were written at creation."""
        return self._table.initializer

    @property
    def k(self) -> float:
        """Curvature magnitude; 0 is flat space. A table that gets another one is another file, and view."""
        return self._table.k

    @property
    def steps(self) -> int:
        """Optimizer steps in which the table took part."""
        return self._state.standing().steps[self._index]

    @property
    def file_bytes(self) -> int:
        """The length of the table's files."""
        return sum(file_sizes(file)[0] for file in files_at(self._path))

    @property
    def disk_bytes(self) -> int:
        """The bytes that they occupy on disk, which a sparse file's length exceeds."""
        return sum(file_sizes(file)[1] for file in files_at(self._path))

    @property
    def logical_bytes(self) -> int:
        """The bytes of weights, moments and counters, without stamps and padding."""
        fields = self.schema.fields
        return self.rows * sum(self.schema.field_bytes(field) for field in fields if field.name != "s")

    def __getitem__(self, field: str) -> NDArray[Any]:
        """Return a field of all rows as the file holds it, without reading it; see the class.

        Raises:
            KeyError: there is no such field.
            StateClosedError: the view was closed.
        """
        self._state.require_open()
        if field not in self.fields:
            raise KeyError(f"table {self.name!r} has no field {field!r}: use one of {', '.join(self.fields)}")
        try:
            return self._source.field(field)
        except (OSError, ValueError):
            self._state.standing()  # which says so when the state was replaced
            raise

    def read(self, rows: NDArray[Any] | Sequence[int], *, initial: bool = True) -> Records:
        """Return the records of some rows as training would read them. The values are not judged.

        Args:
            rows: ``(B,)`` of an integer dtype, in any order, duplicates allowed.
            initial: Whether rows that were never written get their initial weights; otherwise they are zero,
                as they are stored. Their stamp is 0 either way.

        Returns:
            ``(B,)`` records, which the caller owns.

        Raises:
            RowIndexError, RowTypeError: the rows can't be used.
            StateClosedError: the view was closed, or the state replaced.
        """
        unique, inverse = self._unique(rows)
        table = self._current()
        records = read_records(table, unique) if initial else self._overlaid.read(unique)
        return np.asarray(records[inverse])

    def weights(self, rows: NDArray[Any] | Sequence[int]) -> NDArray[np.float32]:
        """Return the weights of some rows as training would read them.

        Rows that were never written have their initial weights, and on a ball all are inside it. Beside a
        process without a journal the decay that rows have missed is that up to the last flush.

        Args:
            rows: ``(B,)`` of an integer dtype, in any order, duplicates allowed.

        Returns:
            ``(B, D)`` float32.

        Raises:
            RowIndexError, RowTypeError: the rows can't be used.
            CorruptRowError: a stored row is implausible.
            KeyError: the weights are not in the table but a parameter in memory.
            StateClosedError: the view was closed, or the state replaced.
        """
        if "w" not in self.fields:
            raise KeyError(
                f"table {self.name!r} holds no weights, they are a parameter in memory: look at the module"
            )
        unique, inverse = self._unique(rows)
        table = self._current()
        found = read_weights(table, unique)
        for _ in range(_TRIES if catches_up(self.schema.dtype) else 0):
            # Rows that no step touches decay with each: they are of that step whose count is theirs.
            decay = table.decay
            if self._current().decay == decay:
                break
            found = read_weights(table, unique)
        return np.asarray(found[inverse])

    def rows_of(self, ids: NDArray[Any] | Sequence[int]) -> NDArray[np.int64]:
        """Return the rows that belong to ids, -1 for an id that has none.

        They are found by the index beside the table, or where that can't be trusted by reading all rows once.
        Beside a process that trains, rows that the table got after this view was made are not known.

        Args:
            ids: ``(B,)`` of an integer dtype, in any order, duplicates allowed.

        Returns:
            ``(B,)`` int64.

        Raises:
            RowTypeError: they can't be ids.
            TypeError: the table's rows belong to no ids.
            StateClosedError: the view was closed, or the state replaced.
        """
        self._current()
        return self._reader().find(as_ids(self._as_array(ids), self.name))[0]

    def weights_of(
        self, ids: NDArray[Any] | Sequence[int], unknown: Literal["zeros", "first", "error"] = "zeros"
    ) -> NDArray[np.float32]:
        """Return the weights of the rows that belong to ids, as training would read them.

        Args:
            ids: ``(B,)`` of an integer dtype, in any order, duplicates allowed.
            unknown: What an id without a row has: zeros, its first weights, or it is an error.

        Returns:
            ``(B, D)`` float32.

        Raises:
            RowIndexError: an id has no row, and that is an error.
            CorruptRowError: a stored row is implausible.
            RowTypeError, TypeError, StateClosedError: see `rows_of`.
        """
        wanted = as_ids(self._as_array(ids), self.name)
        for _ in range(_TRIES):
            table = self._current()
            decay = table.decay
            rows, records = self._reader().find(wanted)
            if self._current().decay == decay or not catches_up(self.schema.dtype):
                break
        lacking, known = np.flatnonzero(rows < 0), np.flatnonzero(rows >= 0)
        if len(lacking) and unknown == "error":
            raise RowIndexError(
                f"id {wanted[lacking[0]]} has no row in table {self.name!r}: pass ids that were trained, or "
                "unknown='zeros' or 'first'"
            )
        weights = np.zeros((len(wanted), self.dim), np.float32)
        if (position := first_implausible(records, self.rule.non_negative)) >= 0:
            raise corrupt_row(table, rows[known], records, position)
        found = read_numbers(caught_up(records, decay), "w")
        weights[known] = table.space.project(found.astype(np.float64))[0] if table.k else found
        if unknown == "first":
            weights[lacking] = first_weights(table, wanted[lacking])
        return weights

    def ids(self) -> NDArray[np.int64]:
        """Return the ids that have a row, in the order of the rows: ``(n,)`` int64.

        Raises:
            TypeError: the table's rows belong to no ids.
        """
        self._reader()
        found = [records["id"][owned_rows(records)] for _, records in self.scan()]
        return np.concatenate([np.empty(0, np.int64), *found])

    @property
    def num_ids(self) -> int | None:
        """How many ids have a row; None where rows belong to none."""
        return None if self._ids is None else len(self._ids)

    def announce(self, rows: NDArray[np.int64]) -> None:
        """Tell the system which rows will be read soon: ``(B,)`` int64, strictly increasing."""
        self._state.require_open()
        self._overlaid.hint(rows)

    def scan(self) -> Iterator[tuple[int, Records]]:
        """Yield all records in blocks ``(first row, records)`` as they are stored.

        Rows that were never written are zero. Beside a process that trains, the blocks are of different
        steps.
        """
        self._state.require_open()
        yield from self._overlaid.scan(0, self.rows)

    def content(self) -> TableContent:
        """Return the table as `dsa.state.content` describes what is copied from one place to another."""
        return TableContent(self._current().facts, self._blocks)

    def to_xarray(self) -> Dataset:
        """Return the fields as a Dataset with the dimensions ``row`` and ``dim``, without reading them.

        The arrays are those of ``table[field]``. Slicing reads what it selects; ``ds.w.where(ds.s > 0)``
        leaves out rows that were never written. What is stored as bfloat16 is uint16, see the class, and has
        an attribute ``dsa_dtype``.

        Raises:
            ImportError: xarray is not installed.
        """
        self._state.require_open()
        return arrays.dataset({name: self._source.field(name) for name in self.fields}, self._attributes())

    def __repr__(self) -> str:
        return text.safely(f"dsa table {self.name!r}", lambda: text.table_text(self))

    def _repr_html_(self) -> str:
        return text.safely(f"dsa table {self.name!r}", lambda: text.table_html(self), html=True)

    def _attributes(self) -> dict[str, Any]:
        rule = self.initializer
        return {
            "table": self.name,
            "k": self.k,
            "steps": self.steps,
            "rule": self.rule.name,
            **({"decay": self._current().decay} if catches_up(self.schema.dtype) else {}),
            "initializer": "none" if rule is None else repr(rule),
        }

    def _reader(self) -> IdReader:
        self._state.require_open()
        if self._ids is None:
            raise TypeError(f"the rows of table {self.name!r} belong to no ids: use their numbers")
        return self._ids

    def _current(self) -> Table:
        self._state.require_open()
        standing = self._state.standing()
        self._table.steps, self._table.decay = standing.steps[self._index], standing.decays[self._index]
        return self._table

    def _blocks(self) -> Iterator[tuple[int, Records]]:
        table = self._current()
        for first, records in self._overlaid.scan(0, self.rows):
            yield first, fill_untouched(table, np.arange(first, first + len(records)), records)

    def _unique(self, rows: NDArray[Any] | Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
        given = self._as_array(rows)
        unique, inverse = np.unique(as_rows(given, self.rows, self.name), return_inverse=True)
        return unique, inverse

    @staticmethod
    def _as_array(given: NDArray[Any] | Sequence[int]) -> NDArray[Any]:
        array = np.asarray(given)
        if array.size == 0 and not isinstance(given, np.ndarray):
            return array.astype(np.int64)  # numpy takes an empty list for floating-point numbers
        return array
