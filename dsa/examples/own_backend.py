"""A storage of one's own: tables in SQLite files, as compressed blocks of rows.

Two classes make a storage that everything in the package takes: a backend, which is an open table
(`SqliteBackend`), and a layout, which makes and opens such tables (`SqliteLayout`). It needs neither memory
mappings nor reserved files: rows that were never written take no room, and what was written is compressed. A
write costs more than with the built-in backends, since each block that it touches is read, changed and
compressed anew; the layout asks the state to collect what is written.

`main` trains an embedding on it twice, once in a process that is killed and goes on, and compares.

`dsa.testing.BackendConformance` and `LayoutConformance` pass, see ``tests/examples/test_own_backend.py``.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import sqlite3
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, final

import numpy as np
import torch

from dsa import DiskEmbedding, DiskSparseAdam, diff, init
from dsa.backends import GROWING, Sizes, Source
from dsa.errors import StateClosedError, StateCorruptError, StateNotFoundError
from dsa.examples import directory_given
from dsa.schema import TORN, Records, Rows, Schema, has_stamp

__all__ = ["SqliteBackend", "SqliteLayout", "main", "train"]

_BLOCK_ROWS: Final = 256
_LEVEL: Final = 1
_FILE: Final = "table.sqlite"
_TABLES: Final = """
    CREATE TABLE about (description TEXT NOT NULL);
    CREATE TABLE blocks (number INTEGER PRIMARY KEY, records BLOB NOT NULL);
"""


@final
@dataclass(frozen=True, slots=True)
class SqliteLayout:
    """Makes and opens tables in SQLite files; what a ``backend`` argument takes, see `dsa.backends.Layout`.

    Args:
        block_rows: Rows that are compressed together, and read and written together; 256 when None.
        collect_bytes: New records to collect before blocks are written.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp()
        >>> embedding = DiskEmbedding(1_000_000, 2, state_dir=path, backend=SqliteLayout())
        >>> embedding(torch.tensor([3])).shape
        torch.Size([1, 2])
        >>> embedding.close()
    """

    kind: ClassVar[str] = "sqlite"
    block_rows: int | None = None
    collect_bytes: int = 4 << 20

    def sizes(self, rows: int, schema: Schema) -> Sizes:
        """Return what the records take before compression: nothing is taken before they are written."""
        record = schema.dtype.itemsize
        return Sizes(0, rows * record, rows * record, ((record, record),))

    def create(self, path: Path, rows: int, schema: Schema, allocate: str) -> SqliteBackend:
        """Make a table; it takes room as rows are written, whatever `allocate` says."""
        return SqliteBackend.create(path, rows, schema, self.block_rows or _BLOCK_ROWS)

    def open(self, path: Path, description: dict[str, Any]) -> SqliteBackend:
        """Open a table to go on with it."""
        return SqliteBackend.open(path, description)

    def look(self, path: Path, description: dict[str, Any]) -> Source:
        """Open a table to read it, while another process may be writing to it."""
        return Source.over(SqliteBackend.open(path, description, writable=False))

    def like(self, description: dict[str, Any]) -> SqliteLayout:
        """Return the layout with the blocks of a stored table."""
        return SqliteLayout(description["block_rows"], self.collect_bytes)

    def refusal(self, description: dict[str, Any]) -> str:
        """Return in what the blocks differ."""
        stored = description["block_rows"]
        if self.block_rows in (None, stored):
            return ""
        return (
            f"is stored in blocks of {stored} rows, which block_rows={self.block_rows} is not: leave it out"
        )


@final
class SqliteBackend:
    """A `StateBackend` in a directory with one SQLite file, and SQLite's log beside that.

    Make one with `create` or `open`.

    Args:
        path: The directory.
        connection: The file, open.
        description: What `describe` returns.
        writable: Whether anything is to be written.

    Example:
        >>> import tempfile
        >>> from dsa.schema import adam_schema
        >>> path = Path(tempfile.mkdtemp()) / "table"
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

    def __init__(
        self, path: Path, connection: sqlite3.Connection, description: dict[str, Any], writable: bool
    ) -> None:
        self._path = path
        self._connection = connection
        self._description = description
        self._writable = writable
        self._schema = Schema.from_json(description["schema"])
        self._rows: int = description["rows"]
        self._block_rows: int = description["block_rows"]
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def create(cls, path: Path, rows: int, schema: Schema, block_rows: int = _BLOCK_ROWS) -> SqliteBackend:
        """Make a table of `rows` fresh records; nothing is left behind when that fails.

        Args:
            path: The directory, which must not exist.
            rows: Number of rows, N >= 1.
            schema: Layout of a record.
            block_rows: Rows that are compressed together, and read and written together.

        Raises:
            FileExistsError: there is something at `path`.
        """
        description = {
            "kind": SqliteLayout.kind,
            "id": secrets.token_hex(8),
            "rows": rows,
            "block_rows": block_rows,
            "schema": schema.to_json(),
        }
        path.mkdir()
        try:
            connection = _connect(path, writable=True)
            connection.executescript(_TABLES)
            connection.execute("INSERT INTO about VALUES (?)", (_text(description),))
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        return cls(path, connection, description, writable=True)

    @classmethod
    def open(cls, path: Path, description: dict[str, Any], *, writable: bool = True) -> SqliteBackend:
        """Open a table that `create` made.

        Args:
            path: The directory.
            description: What `describe` returned.
            writable: False to read alone; then another process may be writing.

        Raises:
            StateCorruptError: the file is missing, or not that of the table described.
        """
        if not (path / _FILE).is_file():  # SQLite would make a new one
            raise StateCorruptError(f"the table {str(path)!r} is missing: restore it from a copy")
        connection = None
        try:
            connection = _connect(path, writable)
            found = connection.execute("SELECT description FROM about").fetchall()
            connection.execute("SELECT number FROM blocks LIMIT 1").fetchall()
        except sqlite3.DatabaseError as error:
            if connection is not None:
                connection.close()
            raise StateCorruptError(
                f"the table {str(path)!r} can't be read ({error}): restore it from a copy"
            ) from error
        description = {key: value for key, value in description.items() if key != GROWING}
        # The file says what the table was made with: it may have grown.
        if [_without_rows(each) for (each,) in found] != [_without_rows(_text(description))]:
            connection.close()
            raise StateCorruptError(f"the table {str(path)!r} is another one's: restore it from a copy")
        return cls(path, connection, description, writable)

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
        """Replace the records of `rows` in one transaction: all of them, or after an error none.

        When it returns, the system has them: SQLite's log is written, though not yet on the device.
        """
        with self._lock, self._transaction():
            for number, part in self._blocks_of(rows):
                block = self._load(number)
                block[rows[part] - number * self._block_rows] = records[part]
                self._store(number, block)

    def make_room(self, rows: int) -> bool:
        """Forget what an interrupted growth has left behind the last row: room is taken by writing alone."""
        with self._lock, self._transaction():
            number, kept = divmod(self._rows, self._block_rows)
            block = self._load(number)
            block[kept:] = 0
            self._store(number, block)
            self._connection.execute("DELETE FROM blocks WHERE number > ?", (number,))
        return True

    def adopt_rows(self, rows: int) -> None:
        """Have so many rows."""
        self._rows = self._description["rows"] = rows

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
        """Move what was written from SQLite's log into the file, and both to the device.

        Raises:
            OSError: the device has refused.
        """
        with self._lock:
            if not self._writable:
                return
            try:
                # Beside a reader some of it stays in the log, which SQLite has synced before.
                self._open_connection().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            except sqlite3.OperationalError as error:
                raise OSError(
                    errno.EIO, f"the table {str(self._path)!r} can't be synced ({error}): look at its disk"
                ) from error
            _sync_names(self._path)

    def close(self) -> None:
        """Flush and let the file go; closing twice is silent."""
        if self._closed:
            return
        try:
            self.flush()
            if self._writable:
                with contextlib.suppress(sqlite3.OperationalError):  # somebody is reading
                    self._connection.execute("PRAGMA journal_mode = DELETE").fetchall()
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

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        connection = self._open_connection()
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # SQLite has done so itself, if the disk is full
                connection.execute("ROLLBACK")
            raise

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
            return self._damaged(number, str(error))
        if len(content) != self._block_rows * self._schema.dtype.itemsize:
            return self._damaged(number, f"{len(content)} bytes")
        return np.frombuffer(content, self._schema.dtype)

    def _store(self, number: int, block: Records) -> None:
        content = zlib.compress(block.tobytes(), _LEVEL)
        self._connection.execute("INSERT OR REPLACE INTO blocks VALUES (?, ?)", (number, content))

    def _damaged(self, number: int, reason: str) -> Records:
        """Return what stands for a block that can't be read: records that say so, if they can."""
        if not has_stamp(self._schema):
            raise StateCorruptError(
                f"block {number} of the table {str(self._path)!r} is damaged ({reason}): restore it from a "
                "copy"
            )
        block = np.zeros(self._block_rows, self._schema.dtype)
        block["s"] = TORN
        return block


def _connect(path: Path, writable: bool) -> sqlite3.Connection:
    """Open the file in a table's directory.

    With a log written ahead (WAL) a commit survives the process, is never torn, and is seen by readers; it
    does not wait for the device, which is what `flush` does.
    """
    mode = "rwc" if writable else "ro"
    where = f"{(path / _FILE).absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(where, uri=True, check_same_thread=False, isolation_level=None)
    try:
        if writable:
            connection.execute("PRAGMA journal_mode = WAL").fetchall()
            connection.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        connection.close()
        raise
    return connection


def _without_rows(text: str) -> object:
    return {**json.loads(text), "rows": None}


def _text(description: dict[str, Any]) -> str:
    return json.dumps(description, sort_keys=True)


def _sync_names(path: Path) -> None:
    """Bring the names of the files in a directory onto the device, where a directory can be synced."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def train(directory: str | os.PathLike[str], steps: int, rows: int = 20_000, dim: int = 16) -> None:
    """Train a table from wherever the directory stands up to a step.

    The batch of a step depends on its number alone, so that it doesn't matter how often that is called.
    """
    start = init.Normal(rows, dim, 0.3, seed=1)
    try:
        embedding = DiskEmbedding(
            rows, dim, init=start, state_dir=directory, resume=True, backend=SqliteLayout()
        )
    except StateNotFoundError:
        embedding = DiskEmbedding(rows, dim, init=start, state_dir=directory, backend=SqliteLayout())
    with DiskSparseAdam(embedding.parameters(), lr=0.1) as optimizer:
        for step in range(optimizer.global_step, steps):
            ids = torch.randint(0, rows, (256,), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            (embedding(ids) - ids[:, None] % 7).square().sum().backward()
            optimizer.step()
            print(f"step {step + 1}", flush=True)


def main(directory: str | os.PathLike[str], steps: int = 200, kill_at: int = 50) -> bool:
    """Train in one go, and in a process that is killed at a step and goes on; tell whether both are the same.

    Args:
        directory: Where to; the states are in ``whole`` and ``killed``.
        steps: How long.
        kill_at: The step after which the process is killed, as by ``kill -9``, wherever it is by then.
    """
    whole, killed = Path(directory) / "whole", Path(directory) / "killed"
    train(whole, steps)
    command = [sys.executable, "-m", "dsa.examples.own_backend", str(killed), str(steps)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if line.strip() == f"step {kill_at}":
                process.kill()
                break
    print(f"the process ended with {process.returncode}")
    train(killed, steps)
    return diff(whole, killed, backend=SqliteLayout()).same


if __name__ == "__main__":
    if len(sys.argv) > 2:
        train(sys.argv[1], int(sys.argv[2]))
    else:
        print("the same" if main(directory_given()) else "different")
