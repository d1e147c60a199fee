"""The ids of a table whose rows belong to ids: which row is whose, and which are free.

The truth is in the records, each of which says whose it is (`dsa.schema.keyed`). What is kept here is an
index of it: a map from ids to rows, and a stack of the rows that were deleted and wait for another id, itself
a map from places to rows. It changes with the transaction that changes the records: its journal entry carries
a `KeyChange`, which may be applied again.

An index is as good as the records while the process lives, and after its death, when the last entries of the
journal were applied again. After everything else (a loss of power, no journal, a file that is not whole) it
is made anew of the records.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, final

import numpy as np
from numpy.typing import NDArray

from dsa.backends.base import Sparse, StateBackend
from dsa.backends.id_map import IdMap, Ids
from dsa.errors import CheckpointCorruptError, StateCorruptError
from dsa.schema import TORN, Records, Rows
from dsa.state.arrivals import ArrivalChange, Arrivals, arrivals_file
from dsa.state.numbers import decode_numbers, encode_numbers

__all__ = ["KeyChange", "Keys", "index_files", "index_token", "owned_rows", "remove_index", "require_owners"]


_SAMPLE: Final = 64
"""Ids, and freed rows, that are looked at when an index is opened."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class KeyChange:
    """What a transaction changes in the ids of a table.

    Args:
        kind: ``"insert"``: ids without a row get one; ``"delete"``: ids lose theirs.
        ids: ``(n,)`` distinct ids.
        rows: ``(n,)`` int64, the row of each; those taken from the freed ones first.
        freed: How many freed rows there were before.
    """

    kind: Literal["insert", "delete"]
    ids: Ids
    rows: Rows
    freed: int

    def to_json(self) -> dict[str, Any]:
        """Return the form that a journal entry carries."""
        return {
            "kind": self.kind,
            "ids": encode_numbers(self.ids),
            "rows": encode_numbers(self.rows),
            "freed": self.freed,
        }

    @classmethod
    def from_json(cls, data: Any) -> KeyChange:  # noqa: ANN401 - JSON is untyped until it has been checked here
        """Rebuild what `to_json` has made.

        Raises:
            ValueError: the data is not that.
        """
        kind, freed = data["kind"], int(data["freed"])
        ids, rows = decode_numbers(data["ids"]), decode_numbers(data["rows"])
        if kind not in ("insert", "delete") or freed < 0 or len(ids) != len(rows) or (rows < 0).any():
            raise ValueError(f"{data!r} is no change of keys: restore the directory from a copy")
        return cls(kind, ids, rows, freed)


def index_files(file: Path) -> tuple[Path, Path]:
    """Return where the index of a table's file is: the map of its ids, and that of its freed rows."""
    return file.with_name(f"{file.name}.ids"), file.with_name(f"{file.name}.freed")


def index_token(moment: str | None, path: Path) -> str | None:
    """Return what one map of an index is closed with: that of another table won't do.

    Args:
        moment: What tells the moment from others; None where there is nothing to tell.
        path: Where the map is.
    """
    return None if moment is None else f"{moment} {path.name}"


def remove_index(file: Path) -> None:
    """Remove the index of a table's file, and its sketch, if there is one."""
    # The ids first: without them the others say nothing.
    for path in (*index_files(file), arrivals_file(file)):
        path.unlink(missing_ok=True)


@final
class Keys:
    """The ids of an open table. One thread changes them at a time; any number may look.

    Rows below `used` belong to an id or are freed; those from there on were never given out. Of which step
    the slice was last looked at for what is old, `swept_step` tells.

    Args:
        file: The table's file.
        ids: From ids to rows.
        freed: From places in the stack, 0 at its bottom, to rows.
    """

    def __init__(self, file: Path, ids: IdMap, freed: IdMap) -> None:
        self._file, self._ids, self._freed = file, ids, freed
        self._arrivals = Arrivals(file) if arrivals_file(file).exists() else None
        self.swept_step = -1
        self._count: int | None = None

    @classmethod
    def open(cls, file: Path, moment: str | None) -> Keys | None:
        """Open the index of a table, if it can be trusted.

        Args:
            file: The table's file.
            moment: At which it was closed; None where it may be that of a process that has died: what the
                journal says has then to be applied again.
        """
        with contextlib.ExitStack() as opened:
            maps = []
            for path in index_files(file):
                try:
                    maps.append(IdMap.open(path, index_token(moment, path)))
                except (StateCorruptError, FileNotFoundError):
                    return None
                opened.callback(maps[-1].close)
                if maps[-1].interrupted and moment is not None:
                    return None
            opened.pop_all()
        return cls(file, *maps)

    @classmethod
    def make(cls, file: Path, backend: StateBackend, *, mend: bool = True) -> Keys:
        """Make the index of a table anew; one that is not complete is none.

        Every row below the last that was ever written, and that no id has, is freed. Of an id that two rows
        claim, as damage may leave it, the row that was written last keeps it.

        Args:
            file: The table's file.
            backend: Its records.
            mend: Whether two rows may claim an id; else that is an error.

        Raises:
            CheckpointCorruptError: two rows claim an id, which they may not.
            DiskSpaceError: there is not enough room.
        """
        at_ids, at_freed = index_files(file)
        for path in (at_ids, at_freed):  # without the ids the other says nothing, and they come last
            path.unlink(missing_ok=True)
        with contextlib.ExitStack() as made:
            freed = IdMap.create(at_freed)
            made.callback(freed.close)
            claims = 0

            def claimed() -> Iterator[tuple[Ids, Rows]]:
                nonlocal claims
                for ids, rows in _sort_out(backend, freed):
                    claims += len(ids)
                    yield ids, rows

            ids = IdMap.rebuild(at_ids, claimed())
            made.callback(ids.close)
            if claims == len(ids):
                made.pop_all()
                return cls(file, ids, freed)
            if not mend:
                raise CheckpointCorruptError(
                    f"{claims:,} rows of the table in {file.name!r} belong to {len(ids):,} ids, so that some "
                    "id has two: restore what it is made of from a copy"
                )
            _release_doubles(backend, ids)
        return cls.make(file, backend)

    def __len__(self) -> int:
        """Return how many ids have a row, or had when it was closed."""
        return len(self._ids) if self._count is None else self._count

    @property
    def freed(self) -> int:
        """How many rows wait for another id."""
        return len(self._freed)

    @property
    def used(self) -> int:
        """How many rows were ever given out."""
        return len(self) + self.freed

    @property
    def nbytes(self) -> int:
        """Bytes of the index."""
        return self._ids.nbytes + self._freed.nbytes

    def find(self, ids: Ids) -> Rows:
        """Return the row of each id, -1 where it has none."""
        return self._ids.find(ids)

    def items(self) -> Iterator[tuple[Ids, Rows]]:
        """Yield the ids and their rows, in blocks and in no order that means anything."""
        return self._ids.items()

    def choose(self, count: int) -> Rows:
        """Return the rows that so many new ids are to get: freed ones first, those freed last before all."""
        places = np.arange(self.freed - 1, max(-1, self.freed - 1 - count), -1)
        rows = self._freed.find(places)
        return np.concatenate([rows, np.arange(self.used, self.used + count - len(rows))])

    def fits(self, backend: StateBackend) -> bool:
        """Tell whether some records say the same: an index of another moment is not to pass for this one's.

        Args:
            backend: The table's records, whose journal has been applied.
        """
        if self.used > len(backend):
            return False
        try:
            ids, owned = next(self.items(), (np.empty(0, np.int64),) * 2)
        except StateCorruptError:
            return False
        some = slice(None, None, max(1, len(ids) // _SAMPLE))
        freed = self._freed.find(np.arange(min(self.freed, _SAMPLE)))
        return _say(backend, owned[some], ids[some]) and _say(backend, freed, None)

    @property
    def arrivals(self) -> Arrivals:
        """The counts of ids without a row, made when they are first asked for."""
        if self._arrivals is None:
            self._arrivals = Arrivals(self._file)
        return self._arrivals

    def apply(self, change: KeyChange | ArrivalChange) -> None:
        """Adopt what a transaction has changed; doing so again changes nothing.

        Raises:
            DiskSpaceError: there is no room for it.
        """
        if isinstance(change, ArrivalChange):
            self.arrivals.apply(change)
        elif change.kind == "insert":
            self._ids.put(change.ids, change.rows)
            self._freed.remove(np.arange(max(0, change.freed - len(change.rows)), change.freed))
        else:
            self._freed.put(np.arange(change.freed, change.freed + len(change.rows)), change.rows)
            self._ids.remove(change.ids)

    def close(self, moment: str | None) -> None:
        """Close the index.

        Args:
            moment: As one that can be trusted at it; None as a kill would.
        """
        self._count = len(self)
        with contextlib.ExitStack() as stack:
            if self._arrivals is not None:
                stack.callback(self._arrivals.close)
            for each, path in zip((self._ids, self._freed), index_files(self._file), strict=True):
                stack.callback(each.close, index_token(moment, path))


def _sort_out(backend: StateBackend, freed: IdMap) -> Iterator[tuple[Ids, Rows]]:
    """Yield ids with their rows, and push the rows that are free."""
    end = 0
    for first, records in _written(backend):
        stamps, rows = records["s"], np.arange(first, first + len(records))
        touched = np.flatnonzero(stamps != 0)
        if len(touched) == 0:
            continue
        owned = owned_rows(records)
        last = int(rows[touched[-1]]) + 1
        unowned = np.concatenate([np.arange(end, first), rows[(~owned) & (rows < last)]])
        freed.put(np.arange(len(freed), len(freed) + len(unowned)), unowned)
        end = last
        yield records["id"][owned], rows[owned]


def _release_doubles(backend: StateBackend, ids: IdMap) -> None:
    """Delete rows whose id another row has that was written later, or that comes later."""
    for first, records in _written(backend):
        rows = first + np.flatnonzero(owned_rows(records))
        claimed = np.ascontiguousarray(records["id"][rows - first])
        for at in np.flatnonzero(ids.find(claimed) != rows):
            row, (other,) = int(rows[at]), ids.find(claimed[at : at + 1])
            pair = backend.read(np.unique([row, other]))
            # Sorted by row: of two of the same step the later row keeps it.
            keeper = max(row, int(other)) if pair["s"][1] >= pair["s"][0] else min(row, int(other))
            ids.put(claimed[at : at + 1], np.array([keeper]))
            tombstone = np.zeros(1, backend.schema.dtype)
            tombstone["s"] = pair["s"].min()
            backend.write(np.array([row + int(other) - keeper]), tombstone)


def _written(backend: StateBackend) -> Iterator[tuple[int, Records]]:
    """Yield the records of a table, where they are known never to have been written left out."""
    if not isinstance(backend, Sparse):
        yield from backend.scan(0, len(backend))
        return
    for start, stop in backend.written():
        yield from backend.scan(start, stop)


def _say(backend: StateBackend, rows: Rows, ids: Ids | None) -> bool:
    """Tell whether rows have these ids, or none; what a torn one had is not known."""
    if ((rows < 0) | (rows >= len(backend))).any():
        return False
    distinct, inverse = np.unique(rows, return_inverse=True)
    records = backend.read(distinct)[inverse.reshape(-1)]
    right = ~owned_rows(records) if ids is None else owned_rows(records) & (records["id"] == ids)
    return len(distinct) == len(rows) and bool((right | (records["s"] == TORN)).all())


def owned_rows(records: Records) -> NDArray[np.bool_]:
    """Tell which rows belong to an id, ``(B,)`` bool; one whose record is torn does not."""
    return np.asarray((records["live"] == 1) & (records["s"] > 0))


def require_owners(table: str, first: int, records: Records) -> None:
    """Check that rows that come from elsewhere say clearly whether they belong to an id.

    Args:
        table: The table's name.
        first: The first row.
        records: ``(B,)`` records with `live` and `s`.

    Raises:
        CheckpointCorruptError: one does not.
    """
    live = records["live"]
    unclear = np.flatnonzero((live < 0) | (live > 1) | ((live == 1) & (records["s"] <= 0)))
    if len(unclear):
        at = int(unclear[0])
        raise CheckpointCorruptError(
            f"row {first + at} of table {table!r} has live={int(live[at])} and the stamp "
            f"{int(records['s'][at])}, so that nobody can tell whether it belongs to an id: restore what it "
            "is made of from a copy"
        )
