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
    """One field's blocks, the current one and the next one that is being loaded."""

    def __init__(self, reader: BlockReader, verify: bool, workers: Workers) -> None:
        self._reader = reader
        self._verify = verify
        self._workers = workers
        self._block = -1
        self._current: NDArray[Any] | None = None
        self._next: Task[NDArray[Any]] | None = None
        self._load_next()

    def _load_next(self) -> None:
        block = self._block + 1
        if block < self._reader.blocks:
            self._next = self._workers.submit(self._reader.load, block, self._verify)

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows of a block; `start` and `stop` are in one block, and never before an earlier one."""
        block = start // self._reader.block_rows
        if block != self._block or self._current is None:
            assert self._next is not None
            self._current = None
            self._block, self._current = block, self._next.result()
            self._load_next()
        first = block * self._reader.block_rows
        return self._current[start - first : stop - first]


def record_blocks(
    schema: Schema, rows: int, readers: Sequence[BlockReader], verify: bool
) -> Iterator[tuple[int, Records]]:
    """Yield the records of a table in blocks of a few megabytes.

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
        columns = [_Column(reader, verify, workers) for reader in readers]
        for start in range(0, rows, step):
            stop = min(rows, start + step)
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
                waiting.append(workers.submit(_compare, reader, block))
        while waiting:
            advance(waiting.popleft().result())


def _compare(reader: BlockReader, block: int) -> int:
    return reader.load(block, verify=True).nbytes
