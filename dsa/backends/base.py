"""The contracts between a table and the place where its records live.

`StateBackend` is the open table, `Layout` how such tables are made, found again and described.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, Self, TypeVar, final, runtime_checkable

from numpy.typing import NDArray

from dsa.backends.field_rows import FieldRows
from dsa.backends.mapping import Allocate
from dsa.kernels.layout import Words
from dsa.schema import Records, Rows, Schema

__all__ = [
    "GROWING",
    "Growing",
    "InPlace",
    "Layout",
    "Sizes",
    "Source",
    "Sparse",
    "StateBackend",
    "Visitor",
]

T = TypeVar("T")

GROWING: Final = "growing"
"""Key of the description of a table whose growth may have been interrupted: it may hold more than it says."""


class StateBackend(Protocol):
    """Stores the records of one table: `rows` records of one `schema`.

    What every implementation promises and what callers may rely on; `dsa.testing.BackendConformance` checks
    it.

    *Rows.* `rows` arguments are 1-D int64, strictly increasing and inside ``[0, len)``. Whoever holds a
    backend has checked that (see `dsa.state.coalesce`); a backend does not check again.

    *Memory.* `read` returns an array that the caller owns and may change: a new one, or the `out` it was
    given. `write` copies what it needs before it returns unless the implementation says that it takes
    ownership (a write-behind queue does); a caller must not change the array after handing it over, whichever
    it is.

    *Fresh records.* A record that was never written reads as zero bytes in every field.

    *Damage.* A backend that can tell that a record is not as it was written (torn by a loss of power, changed
    on the disk) hands it out with a negative stamp, ``s`` = `dsa.schema.TORN`, and whatever the other fields
    hold; it does not raise, so that the rows beside it stay usable. Writing the record again heals it. Where
    records have no int32 ``s`` per row there is nothing to mark, and a backend may raise instead. What can't
    be opened as a whole (a file that is missing, or of another size) is refused when it is opened.

    *Threads.* One `write` at a time. `read` may run beside other `read`s, and beside a `write` of other rows;
    a `read` of rows that are being written at the same time may return any mixture of old and new fields,
    marked or not. `reserve` may run beside a `write` of other rows.

    *Failure.* After an exception from `read` nothing has changed. After an exception from `write` any subset
    of the rows named may be new, in whole or in part; no other row has changed. After an exception from
    `reserve` nothing that is stored has changed. Exceptions of the operating system propagate unchanged; an
    error of a sync is raised by the `flush` that met it, which does not try again.

    *Not promised.* Durability before `flush` returns, order between writes on disk, atomicity of a `write`:
    those are the journal's work. What the journal relies on is told in `Layout`.
    """

    @property
    def schema(self) -> Schema:
        """The layout of one record."""
        ...

    def __len__(self) -> int:
        """Return the number of rows N."""
        ...

    def read(self, rows: Rows, out: Records | None = None) -> Records:
        """Return the records of `rows`, in their order, in memory that the caller owns.

        Args:
            rows: ``(B,)`` int64, strictly increasing.
            out: ``(B,)`` of `schema.dtype`, C-contiguous, to be filled and returned; a new array when None.
        """
        ...

    def write(self, rows: Rows, records: Records) -> None:
        """Replace the records of `rows`.

        Args:
            rows: ``(B,)`` int64, strictly increasing.
            records: ``(B,)`` of `schema.dtype`, C-contiguous.
        """
        ...

    def reserve(self, rows: Rows) -> None:
        """Return once `rows` can be written without running out of disk; nothing that is stored changes.

        Nothing is to be done where running out of disk is an ordinary error of `write`.

        Args:
            rows: ``(B,)`` int64, strictly increasing.

        Raises:
            DiskSpaceError: there is not enough room.
        """
        ...

    def scan(self, start: int, stop: int) -> Iterator[tuple[int, Records]]:
        """Yield the records of the half-open range ``[start, stop)`` as consecutive blocks.

        Yields ``(first row, records)``; the blocks are in order, cover each row of the range exactly once,
        and the caller owns them. Rows may be written between two blocks; a block not yet yielded then shows
        the new values.
        """
        ...

    def hint(self, rows: Rows) -> None:
        """Announce that `rows` will be read soon. Never waits for the disk and never changes a result."""
        ...

    def flush(self) -> None:
        """Return once everything written is durable: it survives a power loss from here on."""
        ...

    def close(self) -> None:
        """Flush and release every resource; closing twice is silent.

        The resources are released even when flushing fails; the error is raised after that.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Return, as plain JSON, what is needed to open these records again; reopening does not change it."""
        ...


@runtime_checkable
class Sparse(Protocol):
    """A backend that knows where rows were never written; it is one beside being a `StateBackend`."""

    def written(self) -> Iterator[tuple[int, int]]:
        """Yield half-open ranges of rows, increasing, outside of which every row is fresh."""
        ...


Visitor = Callable[[Words, Words, Rows, int, int], T]
"""Works on records where they are: `(records, factors, places, start, stop)`.

The p-th of the rows that are visited, for p from `start` to `stop`, is ``records[places[p]]``, words and
behind them its checksum; the factors of that are ``(0,)`` where there is none.
"""


@runtime_checkable
class InPlace(Protocol):
    """A backend whose records are mapped words, which a step may change where they are.

    It is one beside being a `StateBackend`. What a step changes in the mapping survives the death of the
    process at once, and the *image* of a record, its words and its checksum, put back by `restore`, is what
    was there. A record changes while a visitor works on it or after that, and not before: its image, kept by
    the visitor, is older than any change.
    """

    @property
    def image_words(self) -> int:
        """Words of an image: those of a record, and of the checksum behind it where there is one.

        None, 0, where records of this schema can't be changed in place: nothing else here is then called.
        """
        ...

    def look(self, rows: Rows, visitor: Visitor[T]) -> list[T]:
        """Let a visitor read the records of `rows`, having announced their pages.

        Args:
            rows: ``(B,)`` int64, strictly increasing.
            visitor: Is called for consecutive stretches of `rows`, several at once, on as many threads as
                `dsa.kernels.threads.thread_limit` allows. It must not write.

        Returns:
            What it returned for each stretch, in their order.
        """
        ...

    def visit(self, rows: Rows, visitor: Visitor[T]) -> list[T]:
        """Let a visitor read and change the records of `rows`; otherwise as `look`.

        What it has changed is in the mapping once this returns. If the visitor raises, any of the records
        that it was called with may have changed in whole or in part.

        Raises:
            OSError: the table was opened for reading only (EROFS).
        """
        ...

    def restore(self, rows: Rows, images: Words) -> None:
        """Put images back.

        Args:
            rows: ``(B,)`` int64.
            images: ``(B, image_words)``.

        Raises:
            OSError: the table was opened for reading only (EROFS).
        """
        ...


@runtime_checkable
class Growing(Protocol):
    """A backend that can have more rows without being made anew; it is one beside being a `StateBackend`.

    Rows that are there stay where they are, and arrays that were handed out stay usable. Whoever holds the
    backend makes room, says durably how many rows there are from now on, and only then uses them: *rows* in a
    description is how many there were when it was written.

    An interrupted growth leaves more than the description names. `open` and `look` take it, whatever it
    holds, where the description has `GROWING`; nobody ever reads it. `close` lets it go.
    """

    def make_room(self, rows: int) -> bool:
        """Take what more rows need; how many there are doesn't change.

        For as many as there are it makes later growth cheaper, where that can be.

        Args:
            rows: How many there is to be room for, fresh ones at the end.

        Returns:
            Whether the table can be so large as it is made; else nothing has changed, and it has to be made
            anew.

        Raises:
            DiskSpaceError: there is not enough room; the rows are as they were.
            OSError: the file system can't hold such a table; likewise.
        """
        ...

    def adopt_rows(self, rows: int) -> None:
        """Have so many rows, as `len` and `describe` tell, once the device holds them.

        Nobody else may be calling. The same call with the number before takes it back, whatever was written
        to the new rows: the room for them is to be made again.

        Args:
            rows: How many, for which there is room.

        Raises:
            OSError: the device has refused, as in `StateBackend.flush`; there are as many as before.
        """
        ...


class Sizes(NamedTuple):
    """What a table takes on disk.

    Args:
        made: Bytes that have to be free when it is made with ``allocate="reserve"``.
        filled: Bytes once every row was written, before compression.
        largest: Bytes of the largest file that it comes to have.
        pieces: For each place in which a part of a row lies: the bytes of the part, and the distance in bytes
            from there to the next row's.
    """

    made: int
    filled: int
    largest: int
    pieces: tuple[tuple[int, int], ...]

    @property
    def record(self) -> int:
        """Bytes of a row, with its padding."""
        return sum(distance for _, distance in self.pieces)


@final
@dataclass(frozen=True, slots=True)
class Source:
    """Records that are only read.

    Args:
        backend: Reads and scans them; nothing of it that writes is called.
        field: Returns one field of all rows, ``(N, D)`` or ``(N,)``, as the files hold it and without reading
            it: a numpy array over mapped memory, or where that can't be had an object with `shape`, `dtype`
            and slices that are numpy arrays, such as a Zarr array.
        renew: Opens the records again, where whoever trains replaces files as wholes, so that what `backend`
            remembers of them grows stale; None where it doesn't.
    """

    backend: StateBackend
    field: Callable[[str], NDArray[Any]]
    renew: Callable[[], StateBackend] | None = None

    @classmethod
    def over(cls, backend: StateBackend) -> Source:
        """Return a source whose fields are read through the backend, row by row, when they are sliced."""
        return cls(backend, partial(_field_of, backend))


def _field_of(backend: StateBackend, name: str) -> Any:  # noqa: ANN401 - what passes for an array
    return FieldRows(backend.read, len(backend), backend.schema, name)


@runtime_checkable
class Layout(Protocol):
    """A kind of storage with its options: makes the tables of a state, opens them and knows what is stored.

    What the ``backend`` argument of modules and optimizers takes. `dsa.backends.Memmap` and
    `dsa.backends.Zarr` are the ones in the package; one class with these members, and a backend that it
    opens, is another. `dsa.testing.LayoutConformance` checks it. A state keeps the `kind` in its description
    and never imports code by it: whoever opens, inspects, verifies, repairs or exports a state whose kind is
    not one of the package's passes the layout again.

    *Value.* A layout holds options and nothing that is open. Two that do the same are equal, as those of a
    frozen dataclass are. An option that is None asks for nothing, where a table is stored already.

    *Files.* A table is one path in the state directory, a file or a directory, and everything of it is at or
    below that path. The state chooses the path, and moves, replaces and removes what is there, as a whole;
    it may be copied while nobody has it open. What needs a second file beside the first makes a directory.

    *Locks.* The state is locked by its process: nobody else writes to a table. Readers come without a lock.

    *What `write` must promise.* With the durability ``"process"`` the journal lets a step go as soon as the
    `write` of its rows has returned. From there on they have to survive the death of the process at any
    instant: handed over to the operating system, not waiting in memory. A `write` that is killed may leave
    any of its rows old, new or torn, since the journal writes them again; the other rows stay as they were,
    and the table can be opened. Where small writes are dear, `collect_bytes` makes the state collect them
    while the journal holds them.

    *What `flush` must promise.* When it returns, the device holds everything that was written, names of files
    included. The durability ``"power"``, the closing of a state and every change of a whole table rely on
    it. An `OSError` from `flush` says that the device has refused, and ends the state for good: others, such
    as an interrupted call, are to be tried again inside. What a library raises in its place is turned into
    one.
    """

    @property
    def kind(self) -> str:
        """The name of the storage: lower-case letters, digits and underscores, at most 32, a letter first.

        The same for all options. It is the ``"kind"`` of every description, and the end of the table's name.
        """
        ...

    @property
    def collect_bytes(self) -> int:
        """Bytes of new records to collect before they are written; 0 writes those of each step at once.

        The journal takes that much disk, for all tables of a directory together. Without a journal
        (``durability="none"``) memory does, for each table, and a killed process loses them.
        """
        ...

    def sizes(self, rows: int, schema: Schema) -> Sizes:
        """Return what a table will take on disk; nothing is made."""
        ...

    def create(self, path: Path, rows: int, schema: Schema, allocate: Allocate) -> StateBackend:
        """Make a table of fresh records; nothing is left behind when that fails.

        Args:
            path: Where; nothing is there, and its parent is a directory.
            rows: Number of rows N, >= 1.
            schema: Layout of a record.
            allocate: ``"reserve"``: take all disk now, where that can be done. ``"sparse"``: as rows are
                written.

        Returns:
            The table. Its description is plain JSON with at least ``"kind"``, ``"rows"``, ``"schema"`` (as
            `Schema.to_json` gives it) and what no other table's has, such as a random ``"id"``.

        Raises:
            DiskSpaceError: there is not enough room.
            OSError: the file system can't hold such a table.
        """
        ...

    def open(self, path: Path, description: dict[str, Any]) -> StateBackend:
        """Open a table to go on with it, as the last process has left it, however that has ended.

        Args:
            path: Where it is.
            description: What `describe` of it has returned.

        Raises:
            StateCorruptError: it is missing, damaged as a whole, or another one than that described.
        """
        ...

    def look(self, path: Path, description: dict[str, Any]) -> Source:
        """Open a table for reading alone, while another process may be writing to it.

        Nothing that is stored changes, and neither waits for the other. Rows that are read while they are
        written are old, new, or a mixture that is marked or not. What a `write` has written before it
        returned is there: for an open source, or where it has a `renew`, for what that opens.

        Raises:
            StateCorruptError: as for `open`.
        """
        ...

    def like(self, description: dict[str, Any]) -> Self:
        """Return this layout with the options of a stored table, for those that are made beside it or anew.

        What no description tells, such as the size of a cache, stays as it is here.
        """
        ...

    def refusal(self, description: dict[str, Any]) -> str:
        """Return in what a stored table of this kind is not as these options ask, or an empty string.

        The words go on after "table 'x'" and end with the remedy after a colon: "is stored in blocks of 256
        rows, which block_rows=64 is not: leave it out".
        """
        ...
