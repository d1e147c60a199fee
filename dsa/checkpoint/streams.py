"""The content of arrays as a stream of records, and a pass over them that only compares.

Threads read, decode and hash the next blocks while the caller has the current ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from dsa.checkpoint.blocks import BlockReader
from dsa.checkpoint.meter import Advance
from dsa.checkpoint.pipeline import worker_count
from dsa.schema import Records, Schema

__all__ = ["record_blocks", "verify_arrays"]

_RECORD_BYTES: Final = 4 << 20


@final
class _Column:
    """One field's blocks, the current one and the next one that is being loaded."""

    def __init__(self, reader: BlockReader, verify: bool, pool: ThreadPoolExecutor) -> None:
        self._reader = reader
        self._verify = verify
        self._pool = pool
        self._block = -1
        self._current: NDArray[Any] | None = None
        self._next: Future[NDArray[Any]] | None = None
        self._load_next()

    def _load_next(self) -> None:
        block = self._block + 1
        if block < self._reader.blocks:
            self._next = self._pool.submit(self._reader.load, block, self._verify)

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
    pool = ThreadPoolExecutor(worker_count(), thread_name_prefix="dsa-import")
    try:
        columns = [_Column(reader, verify, pool) for reader in readers]
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            records = np.zeros(stop - start, schema.dtype)
            for name, column in zip(schema.names, columns, strict=True):
                records[name] = column.rows(start, stop)
            yield start, records
    finally:
        pool.shutdown(cancel_futures=True)


def verify_arrays(readers: Sequence[BlockReader], advance: Advance) -> None:
    """Read every block of some arrays and compare it with its checksum.

    Args:
        readers: The arrays.
        advance: Is told of the bytes that were compared.

    Raises:
        CheckpointCorruptError: a block can't be read or isn't what was written: the first one.
    """
    workers = worker_count()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="dsa-verify")
    waiting: list[Future[int]] = []
    try:
        for reader in readers:
            for block in range(reader.blocks):
                if len(waiting) >= 2 * workers:
                    advance(waiting.pop(0).result())
                waiting.append(pool.submit(_compare, reader, block))
        for future in waiting:
            advance(future.result())
    finally:
        pool.shutdown(cancel_futures=True)


def _compare(reader: BlockReader, block: int) -> int:
    return reader.load(block, verify=True).nbytes
