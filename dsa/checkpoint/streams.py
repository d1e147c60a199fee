"""The content of arrays as a stream of records, and a pass over them that only compares.

Threads read, decode and hash the next blocks while the caller has the current ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from dsa.checkpoint.blocks import BlockReader
from dsa.checkpoint.meter import Advance
from dsa.checkpoint.workers import Task, Workers, worker_count
from dsa.schema import Records, Schema

__all__ = ["record_blocks", "verify_arrays"]

_RECORD_BYTES: Final = 4 << 20


@final
class _Column:
    """One field: what is left of its current block, and the next one that is being loaded."""

    def __init__(self, reader: BlockReader, verify: bool, step: int, workers: Workers) -> None:
        self._reader = reader
        self._verify = verify
        self._piece_rows = step * max(1, reader.piece_rows // step)  # a step is never in two pieces
        self._workers = workers
        self._pieces: deque[NDArray[Any]] = deque()
        self._row = 0  # the first of the first piece
        self._ahead: Task[list[NDArray[Any]]] | None = None
        self._block = 0  # that would be loaded next
        self.held = 0  # bytes, in memory or on their way there

    @property
    def next_row(self) -> int:
        """The first row that isn't held."""
        return self._block * self._reader.block_rows

    @property
    def next_bytes(self) -> int:
        """Bytes of the block that would be loaded next; 0 when it has to wait for the one before."""
        if self._ahead is not None or self._block == self._reader.blocks:
            return 0
        start, stop = self._reader.rows_of(self._block)
        return (stop - start) * self._reader.array.spec.row_bytes

    def load_next(self) -> None:
        """Begin to load the next block."""
        self.held += self.next_bytes
        self._ahead = self._workers.submit(self._reader.load, self._block, self._verify, self._piece_rows)
        self._block += 1

    def forget(self, row: int) -> bool:
        """Drop the pieces before a row; tell whether a block must be loaded to have that row."""
        while self._pieces and self._row + len(self._pieces[0]) <= row:
            piece = self._pieces.popleft()
            self._row += len(piece)
            self.held -= piece.nbytes
        return not self._pieces and self._ahead is None

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows of the first piece that wasn't forgotten; waits for it if it is on its way."""
        if not self._pieces and self._ahead is not None:
            task, self._ahead = self._ahead, None
            self._pieces.extend(task.result())
        return self._pieces[0][start - self._row : stop - self._row]


def record_blocks(
    schema: Schema, rows: int, readers: Sequence[BlockReader], verify: bool
) -> Iterator[tuple[int, Records]]:
    """Yield the records of a table in blocks of a few megabytes.

    What is held is a block of each field and one more: the next ones are loaded as the current ones are used
    up.

    Args:
        schema: The fields, one per reader.
        rows: N.
        readers: One per field.
        verify: See `BlockReader.load`.

    Raises:
        CheckpointCorruptError: a block can't be read or isn't what was written; none of its rows was yielded.
    """
    step = min(reader.block_rows for reader in readers)  # powers of two all, so that it divides the others
    while step > 1 and step * schema.dtype.itemsize > _RECORD_BYTES:
        step //= 2
    with Workers("dsa-import") as workers:
        columns = [_Column(reader, verify, step, workers) for reader in readers]
        sizes = [column.next_bytes for column in columns]
        limit = sum(sizes) + max(sizes)
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            for column in [column for column in columns if column.forget(start)]:
                column.load_next()
            for column in sorted(columns, key=lambda column: column.next_row):
                if 0 < column.next_bytes <= limit - sum(each.held for each in columns):
                    column.load_next()
            records = np.zeros(stop - start, schema.dtype)
            for name, column in zip(schema.names, columns, strict=True):
                records[name] = column.rows(start, stop)
            yield start, records


def verify_arrays(readers: Sequence[BlockReader], advance: Advance) -> None:
    """Read every block of some arrays and compare it with its checksum.

    Args:
        readers: The arrays.
        advance: Is told of the bytes that were compared.

    Raises:
        CheckpointCorruptError: a block can't be read or isn't what was written: the first one.
    """
    waiting: deque[Task[int]] = deque()
    with Workers("dsa-verify") as workers:
        for reader in readers:
            for block in range(reader.blocks):
                if len(waiting) >= 2 * worker_count():
                    advance(waiting.popleft().result())
                waiting.append(workers.submit(reader.check, block))
        while waiting:
            advance(waiting.popleft().result())
