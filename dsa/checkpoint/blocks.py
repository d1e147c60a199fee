"""Reading arrays by the blocks that their checksums are over."""

from __future__ import annotations

import warnings
from typing import Any, final

import numpy as np
import zarr
from numpy.typing import NDArray

from dsa.checkpoint.digests import new_hash, zeros_digest
from dsa.checkpoint.plain import read_plain
from dsa.checkpoint.sources import Source
from dsa.checkpoint.stored import StoredArray
from dsa.errors import CheckpointCorruptError

__all__ = ["BlockReader", "corrupt_block"]


@final
class BlockReader:
    """Reads one array.

    Several threads may use it.

    Args:
        source: The checkpoint.
        array: The array.
        table: The user's name of its table, for messages.

    Raises:
        CheckpointCorruptError: Zarr can't open it.
    """

    def __init__(self, source: Source, array: StoredArray, table: str) -> None:
        self.source = source
        self.array = array
        self.table = table
        digest = array.entry.digest
        self.block_rows = digest.block_rows
        self.blocks = len(digest.blocks)
        self._array = _open(source, array, table)

    def rows_of(self, block: int) -> tuple[int, int]:
        """Return the half-open range of a block's rows."""
        start = block * self.block_rows
        return start, min(self.array.spec.rows, start + self.block_rows)

    def load(self, block: int, verify: bool) -> NDArray[Any]:
        """Return the rows of a block, which the caller must not change.

        Args:
            block: Its number.
            verify: Compare with the checksum; a block of which a file is missing is compared in any case.

        Raises:
            CheckpointCorruptError: it can't be read, or isn't what was written.
        """
        start, stop = self.rows_of(block)
        if any(low <= start and stop <= high for low, high in self.array.absent):
            return self._zeros(block, stop - start, verify)
        rows = np.ascontiguousarray(self._read(block, start, stop))
        if verify or any(low < stop and high > start for low, high in self.array.missing):
            self._compare(block, rows)
        return rows

    def _zeros(self, block: int, rows: int, verify: bool) -> NDArray[Any]:
        """Return rows of zeros that occupy no memory."""
        spec, digest = self.array.spec, self.array.entry.digest
        if verify and digest.blocks[block] != zeros_digest(digest.algorithm, rows * spec.row_bytes):
            raise corrupt_block(self.table, spec.name, block, "doesn't match its checksum")
        return np.broadcast_to(np.zeros((), spec.dtype), (rows, *spec.shape[1:]))

    def _read(self, block: int, start: int, stop: int) -> NDArray[Any]:
        spec, plain = self.array.spec, self.array.plain
        try:
            rows = None if plain is None else read_plain(self.source, self.array.path, plain, start, stop)
            rows = self._array[start:stop] if rows is None else rows
        except (OSError, MemoryError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise corrupt_block(self.table, spec.name, block, f"can't be read ({error})") from error
        except Exception as error:
            reason = f"can't be read ({type(error).__name__}: {error})"
            raise corrupt_block(self.table, spec.name, block, reason) from error
        if not isinstance(rows, np.ndarray) or rows.shape != (stop - start, *spec.shape[1:]):
            raise corrupt_block(self.table, spec.name, block, "has another shape")
        return rows.astype(spec.dtype, copy=False)

    def _compare(self, block: int, rows: NDArray[Any]) -> None:
        digest = self.array.entry.digest
        total = new_hash(digest.algorithm)
        total.update(rows.data.cast("B"))
        if total.hexdigest() != digest.blocks[block]:
            raise corrupt_block(self.table, self.array.spec.name, block, "doesn't match its checksum")


def corrupt_block(table: str, field: str, block: int, what: str) -> CheckpointCorruptError:
    """Return the error about a block."""
    return CheckpointCorruptError(
        f"block {block} of field {field!r} of the table {table!r} {what}: restore the checkpoint from a copy"
    )


def _open(source: Source, array: StoredArray, table: str) -> Any:  # noqa: ANN401 - zarr's arrays
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return zarr.open_array(source.store(), path=array.path, mode="r", zarr_format=3)
        except Exception as error:
            raise CheckpointCorruptError(
                f"field {array.spec.name!r} of the table {table!r} can't be opened ({error}): restore the "
                "checkpoint from a copy"
            ) from error
