"""The contract between a table and the place where its records live."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from dsa.schema import Records, Rows, Schema

__all__ = ["StateBackend"]


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
    those are the journal's work.
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
