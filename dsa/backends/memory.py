"""Records in an array in memory: the oracle that the other backends are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import numpy as np

from dsa.schema import Records, Rows, Schema

__all__ = ["MemoryBackend"]

_BLOCK_ROWS = 4096


@final
class MemoryBackend:
    """A `StateBackend` without files.

    Args:
        rows: Number of rows N.
        schema: Layout of a record.

    Example:
        >>> from dsa.schema import adam_schema
        >>> backend = MemoryBackend(4, adam_schema(dim=2))
        >>> records = backend.read(np.array([1, 3]))
        >>> records["w"] = [[1, 2], [3, 4]]
        >>> backend.write(np.array([1, 3]), records)
        >>> backend.read(np.array([0, 1]))["w"].tolist()
        [[0.0, 0.0], [1.0, 2.0]]
    """

    def __init__(self, rows: int, schema: Schema) -> None:
        self._schema = schema
        self._records: Records = np.zeros(rows, schema.dtype)

    @property
    def schema(self) -> Schema:
        """The layout of one record."""
        return self._schema

    def __len__(self) -> int:
        return len(self._records)

    def read(self, rows: Rows, out: Records | None = None) -> Records:
        """Return copies of the records of `rows`, in `out` if that is given."""
        if out is None:
            return self._records[rows]
        out[:] = self._records[rows]
        return out

    def write(self, rows: Rows, records: Records) -> None:
        """Replace the records of `rows`."""
        self._records[rows] = records

    def reserve(self, rows: Rows) -> None:
        """Do nothing: memory is not a disk."""

    def make_room(self, rows: int) -> bool:
        """Do nothing: `adopt_rows` takes the memory."""
        return True

    def adopt_rows(self, rows: int) -> None:
        """Have so many rows."""
        records: Records = np.zeros(rows, self._schema.dtype)
        count = min(rows, len(self))
        records[:count] = self._records[:count]
        self._records = records

    def scan(self, start: int, stop: int) -> Iterator[tuple[int, Records]]:
        """Yield consecutive blocks of ``[start, stop)``."""
        for first in range(start, stop, _BLOCK_ROWS):
            yield first, self._records[first : min(stop, first + _BLOCK_ROWS)].copy()

    def hint(self, rows: Rows) -> None:
        """Do nothing: the records are in memory already."""

    def flush(self) -> None:
        """Do nothing: memory has no durability to offer."""

    def close(self) -> None:
        """Do nothing: the records live as long as the object."""

    def describe(self) -> dict[str, Any]:
        """Return the kind, the rows and the schema."""
        return {"kind": "memory", "rows": len(self), "schema": self._schema.to_json()}
