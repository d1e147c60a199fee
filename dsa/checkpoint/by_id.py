"""The records of a table by id, in whatever order they come: copied aside, with an index."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Self, final

import numpy as np

from dsa.backends import system
from dsa.backends.id_map import IdMap, Ids
from dsa.errors import CheckpointCorruptError
from dsa.schema import Records, Rows
from dsa.state.content import TableContent
from dsa.state.keys import owned_rows

__all__ = ["RecordsById"]


@final
class RecordsById:
    """A copy of the rows that belong to ids, in a temporary directory; memory does not grow with it.

    Args:
        table: A table whose rows belong to ids; it is read once.
        scratch: Where the temporary directory is made; the system's place when None.
    """

    def __init__(self, table: TableContent, scratch: Path | None = None) -> None:
        self._table, self._scratch, self._stack = table, scratch, ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            path = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="dsa-ids-", dir=self._scratch))
            )
            self._index = IdMap.create(path / "ids")
            stack.callback(self._index.close)
            self._file = stack.enter_context(open(path / "records", "w+b", buffering=0))
            self._copy()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __len__(self) -> int:
        """Return how many ids have a row."""
        return len(self._index)

    def find(self, ids: Ids) -> Rows:
        """Return where the records of ids are, -1 for an id that has none: ``(B,)`` int64."""
        return self._index.find(ids)

    def read(self, places: Rows) -> Records:
        """Return the records at places that `find` has told, in any order: ``(B,)``."""
        dtype = self._table.schema.dtype
        if not len(places):
            return np.empty(0, dtype)
        size, order = dtype.itemsize, np.argsort(places, kind="stable")
        records, memory = np.empty(len(places), dtype), self._file.fileno()
        ordered = places[order]
        starts = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 2) != 1)  # of runs in the file
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(places)], strict=True):
            raw = system.read_at(memory, (stop - start) * size, int(ordered[start]) * size)
            records[order[start:stop]] = np.frombuffer(raw, dtype)
        return records

    def _copy(self) -> None:
        count = 0
        for _, records in self._table.blocks():
            owned = records[owned_rows(records)]
            before = self._index.put(np.ascontiguousarray(owned["id"]), np.arange(count, count + len(owned)))
            if (before >= 0).any():
                twice = int(owned["id"][np.argmax(before >= 0)])
                raise CheckpointCorruptError(
                    f"two rows of table {self._table.name!r} belong to the id {twice}: restore it from a copy"
                )
            self._file.write(owned.data)
            count += len(owned)
