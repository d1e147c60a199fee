"""Rows found by the ids that they belong to, beside a process that trains or when there is none."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Final, final

import numpy as np

from dsa.backends.id_map import IdMap, Ids
from dsa.errors import StateCorruptError, StateLockedError
from dsa.inspection.directory import ObservedDirectory
from dsa.inspection.overlaid import OverlaidBackend
from dsa.schema import Records, Rows
from dsa.state.keys import KeyChange, index_files, index_token, owned_rows

__all__ = ["IdReader"]

_TRIES: Final = 20


@final
class IdReader:
    """Finds rows by ids: by the index beside the table where it can be trusted, else by one of its own.

    Its own is made by reading all rows once, in a temporary directory; that of a state that is closed stays
    right. Whatever an index says is compared with the records.

    Args:
        path: Where the table's file is.
        records: The table's records, with what the journal says of them.
        directory: The state directory.
        index: The table's position in the state.
    """

    def __init__(
        self, path: Path, records: OverlaidBackend, directory: ObservedDirectory, index: int
    ) -> None:
        self._path, self._records, self._directory, self._index = path, records, directory, index
        self._kept = contextlib.ExitStack()
        self._map: IdMap | None = None
        self._stamp: object = None

    def __len__(self) -> int:
        """Return how many ids have a row; beside a process that trains, about how many."""
        return len(self._opened())

    def find(self, ids: Ids) -> tuple[Rows, Records]:
        """Return the row of each id, -1 where it has none, and the records of those that have one.

        Args:
            ids: ``(B,)`` int64, in any order.

        Returns:
            ``(B,)`` int64, and as many records as there are rows >= 0, in that order.
        """
        for _ in range(_TRIES):
            rows = self._looked_up(ids)
            rows[rows >= len(self._records)] = -1  # younger than this view
            known = np.flatnonzero(rows >= 0)
            distinct, inverse = np.unique(rows[known], return_inverse=True)
            records = self._records.read(distinct)[inverse.reshape(-1)]
            right = owned_rows(records) & (records["id"] == ids[known])
            if right.all():
                break
        rows[known[~right]] = -1
        return rows, records[right]

    def close(self) -> None:
        """Let the index go; closing twice is silent."""
        self._map, self._stamp = None, None
        self._kept.close()

    def _looked_up(self, ids: Ids) -> Rows:
        try:
            rows = self._opened().find(ids)
        except StateLockedError:  # its writer was killed while it was moving this id
            rows = self._scanned().find(ids)
        change = self._directory.progress().keys.get(self._index)
        if isinstance(change, KeyChange) and change.kind == "insert":
            # The last transaction of a process that was killed may be in the journal only.
            order = np.argsort(change.ids)
            places = np.minimum(np.searchsorted(change.ids, ids, sorter=order), len(order) - 1)
            same = change.ids[order[places]] == ids
            rows[same] = change.rows[order[places[same]]]
        return rows

    def _opened(self) -> IdMap:
        """Return the index, another one when the description says that something has changed."""
        stored, stamp = self._directory.metadata(), self._directory.stamp
        if self._map is not None and self._stamp == stamp:
            return self._map
        self.close()
        moment = stored.journal_identity if stored.status == "closed" else None
        path = index_files(self._path)[0]
        try:
            found = IdMap.open(path, index_token(moment, path), writable=False)
        except StateCorruptError:
            return self._scanned()
        self._kept.callback(found.close)
        self._map, self._stamp = found, stamp
        return found

    def _scanned(self) -> IdMap:
        """Make an index of what the records say now."""
        self.close()
        stamp = self._directory.stamp
        with contextlib.ExitStack() as made:
            scratch = made.enter_context(tempfile.TemporaryDirectory(prefix="dsa-ids-"))
            found = IdMap.create(Path(scratch) / "ids")
            made.callback(found.close)
            for first, records in self._records.scan(0, len(self._records)):
                owned = np.flatnonzero(owned_rows(records))
                found.put(np.ascontiguousarray(records["id"][owned]), first + owned)
            self._kept = made.pop_all()
        self._map, self._stamp = found, stamp
        return found
