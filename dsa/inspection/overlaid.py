"""Records as training would read them, while a training process may be writing them."""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Iterator
from typing import Any, Final, final

import numpy as np

from dsa.backends.base import Source, StateBackend
from dsa.errors import StateCorruptError
from dsa.inspection.directory import Mark, ObservedDirectory
from dsa.schema import Records, Rows, Schema

__all__ = ["OverlaidBackend"]

_TRIES: Final = 20
_SECONDS: Final = 0.5
_BLOCK_BYTES: Final = 16 << 20


@final
class OverlaidBackend:
    """A `StateBackend` that reads a table together with what the journal says of it.

    A row of a step that counts is there, whether or not it has reached the table, so that the state that a
    killed process left behind reads as it will after recovery. Beside a process that is training, the rows of
    one call belong to one step: the directory is asked where it stands before and after, and if it has gone
    on too far they are read again. After half a second and twenty attempts in vain, or where the state has no
    journal, the rows are taken as they come, of neighbouring steps.

    Args:
        source: The table's records, opened for reading.
        directory: Where they are.
        index: The table's position in the state.
    """

    def __init__(self, source: Source, directory: ObservedDirectory, index: int) -> None:
        self._backend = source.backend
        self._renew = source.renew
        self._era: object = None
        self._directory = directory
        self._index = index
        self._closed = False

    @property
    def schema(self) -> Schema:
        """The layout of one record."""
        return self._backend.schema

    def __len__(self) -> int:
        return len(self._backend)

    def read(self, rows: Rows, out: Records | None = None) -> Records:
        """Return copies of the records of `rows`, in `out` if that is given.

        Raises:
            StateClosedError: the view was closed, or the state removed or replaced.
            StateCorruptError: the journal is damaged.
        """
        records, whole = self._read(rows, out)
        for _ in range(_TRIES):
            torn = np.flatnonzero(records["s"] < 0)
            if not len(torn):
                break
            # Whoever trains may have been writing these at the moment. Those that stay as they are, are torn.
            again, whole_again = self._read(rows[torn], None)
            stays = (whole or whole_again) and again.tobytes() == records[torn].tobytes()
            records[torn], whole = again, whole_again
            if stays:
                break
        return records

    def scan(self, start: int, stop: int) -> Iterator[tuple[int, Records]]:
        """Yield consecutive blocks of ``[start, stop)``, some megabytes each, each as `read` reads it."""
        if self._renew is not None:
            block = max(1, _BLOCK_BYTES // self.schema.dtype.itemsize)
            for first in range(start, stop, block):
                yield first, self.read(np.arange(first, min(stop, first + block)))
            return
        before = self._directory.mark()
        for first, records in self._backend.scan(start, stop):
            rows = np.arange(first, first + len(records))
            good = self._complete(before, rows, records) and not (records["s"] < 0).any()
            yield first, records if good else self.read(rows)
            before = self._directory.mark()

    def hint(self, rows: Rows) -> None:
        """Announce that `rows` will be read soon."""
        self._backend.hint(rows)

    def write(self, rows: Rows, records: Records) -> None:
        """Refuse.

        Raises:
            OSError: always (EROFS).
        """
        raise OSError(
            errno.EROFS,
            "this view of a state is for reading: open the directory with an optimizer to change it",
        )

    def reserve(self, rows: Rows) -> None:
        """Do nothing: nothing is written."""

    def flush(self) -> None:
        """Do nothing: nothing was written."""

    def close(self) -> None:
        """Release the table; closing twice is silent."""
        self._closed = True
        self._backend.close()

    def describe(self) -> dict[str, Any]:
        """Return the table's own description."""
        return self._backend.describe()

    def _read(self, rows: Rows, out: Records | None) -> tuple[Records, bool]:
        """Return records with what the journal says of them, and whether they are of one step."""
        fault = None
        records = None
        began = time.monotonic()
        for attempt in itertools.count(1):
            last = attempt >= _TRIES and time.monotonic() - began > _SECONDS
            before = self._directory.mark()
            try:
                records = self._current(before).read(rows, out)
            except StateCorruptError as error:
                # Of a directory that moves on, files are replaced and removed while they are read. What is
                # damaged stays so while the description stays, which names them.
                if fault == (before.stamp, str(error)) or last:
                    raise
                fault, self._era = (before.stamp, str(error)), None
                continue
            if self._complete(before, rows, records):
                return records, True
            if last:
                break
        assert records is not None, "the last attempt has read or raised"
        return records, False

    def _current(self, mark: Mark) -> StateBackend:
        """Return the table as its files are, opened again when some may have been replaced."""
        if self._renew is not None and not self._closed and (mark.era is None or mark.era != self._era):
            fresh = self._renew()
            self._backend.close()
            self._backend, self._era = fresh, mark.era
        return self._backend

    def _complete(self, before: Mark, rows: Rows, records: Records) -> bool:
        """Add to records just read what the journal says of them; tell whether they are of one step then.

        Args:
            before: Where the directory stood before they were read.
            rows: ``(B,)``.
            records: ``(B,)``, changed in place.
        """
        after = self._directory.mark()
        tail = self._directory.tail(after)
        if tail is None:
            return False
        tail.lay_over(self._index, rows, records)
        unfinished = self._directory.images(after, self._index, rows, records.dtype.itemsize)
        if unfinished is None:
            return False
        places, images = unfinished
        records[places] = images.view(records.dtype)[:, 0]
        return before.covers(after)
