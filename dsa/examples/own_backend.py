"""A storage backend of one's own: compressed blocks of rows in a single SQLite file.

It needs neither memory mappings nor a reserved file: rows that were never written take no room, and what was
written is compressed. A write costs more than with the built-in backends, since each block that it touches
is read, changed and compressed anew. That suits a table that is kept, moved or served rather than trained:
`main` packs a trained table into such a file and looks rows up in it.

`dsa.testing.BackendConformance` passes it, see ``tests/examples/test_own_backend.py``.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch

from dsa import DiskEmbedding, DiskSparseAdam, init, open_checkpoint
from dsa.errors import StateClosedError, StateCorruptError, StateLockedError
from dsa.schema import Field, Records, Rows, Schema

__all__ = ["SqliteBackend", "main", "pack"]

_LEVEL: Final = 1


@final
class SqliteBackend:
    """A `StateBackend` in one SQLite file, which a second process can't open at the same time.

    Make one with `create` or `open`.

    Args:
        connection: The file, open.
        description: What `describe` returns.

    Example:
        >>> import tempfile
        >>> from dsa.schema import adam_schema
        >>> path = Path(tempfile.mkdtemp()) / "table.sqlite"
        >>> backend = SqliteBackend.create(path, 1_000_000, adam_schema(dim=2))
        >>> rows = np.array([7, 999_999])
        >>> records = backend.read(rows)
        >>> records["w"] = 1.5
        >>> backend.write(rows, records)
        >>> backend.close()
        >>> again = SqliteBackend.open(path, backend.describe())
        >>> again.read(np.array([6, 7]))["w"].tolist()
        [[0.0, 0.0], [1.5, 1.5]]
        >>> again.close()
    """

    def __init__(self, connection: sqlite3.Connection, description: dict[str, Any]) -> None:
        self._connection = connection
        self._description = description
        self._schema = Schema.from_json(description["schema"])
        self._rows: int = description["rows"]
        self._block_rows: int = description["block_rows"]
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def create(cls, path: Path, rows: int, schema: Schema, block_rows: int = 256) -> SqliteBackend:
        """Make a file of `rows` fresh records.

        Args:
            path: The file, which must not exist.
            rows: Number of rows, N >= 1.
            schema: Layout of a record.
            block_rows: Rows that are compressed together, and read and written together.

        Raises:
            FileExistsError: there is something at `path`.
        """
        path.touch(exist_ok=False)
        connection = _connect(path, "CREATE TABLE blocks (number INTEGER PRIMARY KEY, records BLOB NOT NULL)")
        description = {"kind": "sqlite", "rows": rows, "block_rows": block_rows, "schema": schema.to_json()}
        return cls(connection, description)

    @classmethod
    def open(cls, path: Path, description: dict[str, Any]) -> SqliteBackend:
        """Open a file that `create` made.

        Args:
            path: The file.
            description: What `describe` returned.

        Raises:
            StateCorruptError: the file is missing, or no such file.
            StateLockedError: another process has it open.
        """
        if not path.is_file():  # SQLite would make a new one
            raise StateCorruptError(f"the table file {str(path)!r} is missing: restore it from a copy")
        try:
            connection = _connect(path, "SELECT number FROM blocks LIMIT 1")
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorname == "SQLITE_BUSY":
                raise StateLockedError(
                    f"the table file {str(path)!r} is in use by another process: end that process"
                ) from error
            raise StateCorruptError(
                f"the table file {str(path)!r} can't be read ({error}): restore it from a copy"
            ) from error
        return cls(connection, description)

    @property
    def schema(self) -> Schema:
        """The layout of one record."""
        return self._schema

    def __len__(self) -> int:
        return self._rows

    def read(self, rows: Rows, out: Records | None = None) -> Records:
        """Return the records of `rows`, block by block."""
        records = np.empty(len(rows), self._schema.dtype) if out is None else out
        with self._lock:
            for number, part in self._blocks_of(rows):
                records[part] = self._load(number)[rows[part] - number * self._block_rows]
        return records

    def write(self, rows: Rows, records: Records) -> None:
        """Replace the records of `rows` in one transaction: all of them, or after an error none."""
        with self._lock, self._open_connection():
            for number, part in self._blocks_of(rows):
                block = self._load(number)
                block[rows[part] - number * self._block_rows] = records[part]
                self._store(number, block)

    def reserve(self, rows: Rows) -> None:
        """Do nothing: on a full disk `write` fails, and has changed nothing."""

    def scan(self, start: int, stop: int) -> Iterator[tuple[int, Records]]:
        """Yield the blocks of ``[start, stop)``, each read when it is asked for."""
        while start < stop:
            end = min(stop, (start // self._block_rows + 1) * self._block_rows)
            yield start, self.read(np.arange(start, end))
            start = end

    def hint(self, rows: Rows) -> None:
        """Do nothing: SQLite has no such call."""

    def flush(self) -> None:
        """Move what was written from SQLite's log into the file, and both to the device."""
        with self._lock:
            self._open_connection().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Flush and let the file go; closing twice is silent."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._closed = True
            self._connection.close()

    def describe(self) -> dict[str, Any]:
        """Return what `open` needs, as plain JSON."""
        return dict(self._description)

    def _open_connection(self) -> sqlite3.Connection:
        if self._closed:
            raise StateClosedError("the backend was closed: open the file again")
        return self._connection

    def _blocks_of(self, rows: Rows) -> Iterator[tuple[int, slice]]:
        """Yield the number of each block that holds some of `rows`, and which of them: rows are sorted."""
        numbers, starts = np.unique(rows // self._block_rows, return_index=True)
        for number, start, end in zip(numbers, starts, np.append(starts, len(rows))[1:], strict=True):
            yield int(number), slice(int(start), int(end))

    def _load(self, number: int) -> Records:
        """Return the records of a block; one that was never written is zero bytes and not in the file."""
        query = "SELECT records FROM blocks WHERE number = ?"
        found = self._open_connection().execute(query, (number,)).fetchall()
        if not found:
            return np.zeros(self._block_rows, self._schema.dtype)
        try:
            content = bytearray(zlib.decompress(found[0][0]))
        except zlib.error as error:
            raise self._damaged(number, str(error)) from error
        if len(content) != self._block_rows * self._schema.dtype.itemsize:
            raise self._damaged(number, f"{len(content)} bytes")
        return np.frombuffer(content, self._schema.dtype)

    def _store(self, number: int, block: Records) -> None:
        content = zlib.compress(block.tobytes(), _LEVEL)
        self._connection.execute("INSERT OR REPLACE INTO blocks VALUES (?, ?)", (number, content))

    def _damaged(self, number: int, reason: str) -> StateCorruptError:
        return StateCorruptError(
            f"block {number} of the table file is damaged ({reason}): restore the file from a copy"
        )


def _connect(path: Path, statement: str) -> sqlite3.Connection:
    """Open a file for this process alone and run a first statement on it.

    With a log written ahead (WAL) a commit survives the process and is never torn; it does not wait for the
    device, which is what `flush` does.
    """
    connection = sqlite3.connect(path, timeout=0.0, check_same_thread=False)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(statement).fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def pack(checkpoint: str, path: Path) -> SqliteBackend:
    """Return a new file of the weights of a checkpoint's first table; blocks of zeros take no room."""
    table = open_checkpoint(checkpoint).content().tables[0]
    weights = Schema(table.schema.dim, (Field("w", "float32", "element"),))
    backend = SqliteBackend.create(path, table.rows, weights)
    for first, records in table.blocks():
        rows = first + np.flatnonzero(records["w"].any(axis=1))
        packed = np.zeros(len(rows), weights.dtype)
        packed["w"] = records["w"][rows - first]
        backend.write(rows, packed)
    backend.flush()
    return backend


def main(
    directory: str | os.PathLike[str], rows: int = 100_000, dim: int = 16, steps: int = 100
) -> torch.Tensor:
    """Train a table, pack its weights into one file, and return the vectors of some rows from there."""
    path = Path(directory)
    embedding = DiskEmbedding(rows, dim, init=init.Zeros(rows, dim), state_dir=path / "state")
    with DiskSparseAdam(embedding.parameters(), lr=0.1) as optimizer:
        for step in range(steps):
            draws = torch.Generator().manual_seed(step)
            ids = torch.randint(0, rows, (64,), generator=draws)
            optimizer.zero_grad()
            (embedding(ids) - ids[:, None] % 7).square().sum().backward()
            optimizer.step()
        checkpoint = optimizer.export_checkpoint(path / "checkpoint")
    packed = pack(checkpoint, path / "weights.sqlite")
    description = packed.describe()
    packed.close()
    with closing(SqliteBackend.open(path / "weights.sqlite", description)) as table:
        return torch.from_numpy(table.read(np.unique(ids))["w"].copy())


if __name__ == "__main__":
    print(main(sys.argv[1]))
