"""Does every row say clearly whose it is, has every id one row, and does the index say the same?"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self, final

import numpy as np

from dsa.backends.id_map import IdMap
from dsa.errors import StateCorruptError
from dsa.schema import Records, is_keyed
from dsa.state.content import TableContent
from dsa.state.keys import index_files, index_token, owned_rows

__all__ = ["OwnersCheck", "bad_owners"]

_MOST: Final = 5


@final
class OwnersCheck:
    """Takes in the blocks of a table whose rows belong to ids; its index of them is in a temporary directory.

    Args:
        table: The table's name.
    """

    def __init__(self, table: str) -> None:
        self._table, self._stack = table, ExitStack()
        self._count = self._end = 0

    def __enter__(self) -> Self:
        scratch = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="dsa-ids-"))
        self._map = IdMap.create(Path(scratch) / "ids")
        self._stack.callback(self._map.close)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def take(self, first: int, records: Records) -> list[str]:
        """Take in a block, and return what is wrong with its first rows."""
        live, stamps = records["live"], records["s"]
        unclear = np.flatnonzero((live < 0) | (live > 1) | ((live == 1) & (stamps == 0)))
        problems = [
            f"row {first + at} of table {self._table!r} can't be used: it has live={live[at]} and the stamp "
            f"{stamps[at]}, so that nobody can tell whether it belongs to an id"
            for at in unclear[:_MOST].tolist()
        ]
        owned = np.flatnonzero(owned_rows(records))
        ids = np.ascontiguousarray(records["id"][owned])
        before = self._map.put(ids, first + owned)
        problems += [
            f"rows {before[at]} and {first + owned[at]} of table {self._table!r} both belong to the id "
            f"{ids[at]}"
            for at in np.flatnonzero(before >= 0)[:_MOST].tolist()
        ]
        self._count += len(owned)
        if len(written := np.flatnonzero(stamps)):
            self._end = first + int(written[-1]) + 1
        return problems

    def compare(self, file: Path, moment: str) -> tuple[list[str], list[str]]:
        """Compare the index of a state that was closed with what was taken in.

        Args:
            file: The table's file.
            moment: At which the index was closed, see `dsa.state.keys.index_token`.

        Returns:
            What is wrong, and what is good to know.
        """
        with ExitStack() as opened:
            try:
                ids, freed = (
                    IdMap.open(path, index_token(moment, path), writable=False) for path in index_files(file)
                )
            except StateCorruptError:
                return [], [
                    f"the index of the ids of table {self._table!r} is made anew with the next opening"
                ]
            opened.callback(ids.close)
            opened.callback(freed.close)
            same = all(np.array_equal(self._map.find(some), rows) for some, rows in ids.items())
            if same and (len(ids), len(freed)) == (self._count, self._end - self._count):
                return [], []
            counts = f"{self._count:,} and {self._end - self._count:,}"
            return [
                f"the index of the ids of table {self._table!r} is of {len(ids):,} ids and {len(freed):,} "
                f"free rows, and its records are of {counts}, or of others: remove {file.name}.ids, and it "
                "is made anew"
            ], []


def bad_owners(table: TableContent) -> list[str]:
    """Return what is wrong with the first rows of a table whose rows belong to ids, if they do."""
    if not is_keyed(table.schema):
        return []
    with OwnersCheck(table.name) as owners:
        for first, records in table.blocks():
            if problems := owners.take(first, records):
                return problems
    return []
