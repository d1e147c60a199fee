"""Reading arrays by the blocks that their checksums are over."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Final, final

import numpy as np
import zarr
from numpy.typing import NDArray

from dsa.checkpoint.digests import new_hash, zeros_digest
from dsa.checkpoint.plain import are_plain, plain_size, read_plain
from dsa.checkpoint.sources import Source
from dsa.checkpoint.stored import StoredArray
from dsa.errors import CheckpointCorruptError, CheckpointError

__all__ = ["BlockReader", "corrupt_block"]


_PIECE_BYTES: Final = 1 << 20
_NAMED: Final = 3


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
        self.piece_rows = max(1, min(self.block_rows, _PIECE_BYTES // array.spec.row_bytes))
        self._array = _open(source, array, table)

    def rows_of(self, block: int) -> tuple[int, int]:
        """Return the half-open range of a block's rows."""
        start = block * self.block_rows
        return start, min(self.array.spec.rows, start + self.block_rows)

    def load(self, block: int, verify: bool, piece_rows: int) -> list[NDArray[Any]]:
        """Return the rows of a block, cut so that each piece can be forgotten once it was used.

        Args:
            block: Its number.
            verify: Compare with the checksum; a block of which a file is missing is compared in any case.
            piece_rows: Rows of a piece; the last may have fewer. None of them may be changed.

        Raises:
            CheckpointCorruptError: it can't be read, or isn't what was written.
        """
        start, stop = self.rows_of(block)
        if self._is_absent(start, stop):
            if verify:
                self._compare_zeros(block, stop - start)
            zero = np.zeros((), self.array.spec.dtype)
            sizes = (min(piece_rows, stop - low) for low in range(start, stop, piece_rows))
            return [np.broadcast_to(zero, (size, *self.array.spec.shape[1:])) for size in sizes]
        pieces = []
        total = new_hash(self.array.entry.digest.algorithm)
        compared = verify or any(low < stop and high > start for low, high in self.array.missing)
        for piece in self._pieces(block, start, stop, piece_rows):
            if compared:
                total.update(piece.data.cast("B"))
            pieces.append(piece)
        if compared:
            self._compare(block, total.hexdigest())
        return pieces

    def check(self, block: int) -> int:
        """Compare a block with its checksum and return its size in bytes.

        Raises:
            CheckpointCorruptError: as `load` does.
        """
        start, stop = self.rows_of(block)
        if self._is_absent(start, stop):
            self._compare_zeros(block, stop - start)
        else:
            total = new_hash(self.array.entry.digest.algorithm)
            for piece in self._pieces(block, start, stop, self.piece_rows):
                total.update(piece.data.cast("B"))
            self._compare(block, total.hexdigest())
        return (stop - start) * self.array.spec.row_bytes

    def _is_absent(self, start: int, stop: int) -> bool:
        return any(low <= start and stop <= high for low, high in self.array.absent)

    def _compare_zeros(self, block: int, rows: int) -> None:
        algorithm = self.array.entry.digest.algorithm
        self._compare(block, zeros_digest(algorithm, rows * self.array.spec.row_bytes))

    def _compare(self, block: int, found: str) -> None:
        if found != self.array.entry.digest.blocks[block]:
            raise self._corrupt(block, "doesn't match its checksum")

    def _corrupt(self, block: int, what: str) -> CheckpointCorruptError:
        return corrupt_block(self.source, self.array, self.table, block, what)

    def _pieces(self, block: int, start: int, stop: int, piece_rows: int) -> Iterator[NDArray[Any]]:
        """Yield a block's rows, C-contiguous."""
        spec, plain, local = self.array.spec, self.array.plain, self.source.place.directory is not None
        try:
            if plain is not None and are_plain(self.source, self.array.path, plain, start, stop):
                # One request for a whole block, where each has to travel.
                step = piece_rows if local else stop - start
                for low in range(start, stop, step):
                    high = min(stop, low + step)
                    rows = read_plain(self.source, self.array.path, plain, low, high)
                    yield from _cut(rows, piece_rows)
                return
            rows = self._array[start:stop]
        except CheckpointError:
            raise
        except OSError as error:
            if error.errno is not None:
                raise
            raise self._corrupt(block, f"can't be read ({error})") from error
        except Exception as error:
            raise self._corrupt(block, f"can't be read ({type(error).__name__}: {error})") from error
        if not isinstance(rows, np.ndarray) or rows.shape != (stop - start, *spec.shape[1:]):
            raise self._corrupt(block, "has another shape")
        yield from _cut(np.ascontiguousarray(rows.astype(spec.dtype, copy=False)), piece_rows)


def _cut(rows: NDArray[Any], piece_rows: int) -> Iterator[NDArray[Any]]:
    """Yield rows in pieces that don't keep each other in memory."""
    if len(rows) <= piece_rows:
        yield rows
    else:
        for start in range(0, len(rows), piece_rows):
            yield rows[start : start + piece_rows].copy()


def corrupt_block(
    source: Source, array: StoredArray, table: str, block: int, what: str
) -> CheckpointCorruptError:
    """Return the error about a block: its rows, and the files that hold them.

    Args:
        source: The checkpoint.
        array: The array.
        table: The user's name of its table.
        block: Its number.
        what: What is wrong with it.
    """
    size, spec = array.entry.digest.block_rows, array.spec
    start, stop = block * size, min(spec.rows, (block + 1) * size)
    return CheckpointCorruptError(
        f"block {block} of field {spec.name!r} of the table {table!r} {what}, rows {start:,} to {stop - 1:,} "
        f"in {_files(source, array, start, stop)}: restore the checkpoint from a copy"
    )


def _files(source: Source, array: StoredArray, start: int, stop: int) -> str:
    """Return the files that hold some rows, with their sizes and what they should be, in words."""
    keys = array.files_of(start, stop)
    named = [f"{source.place.below(key)!r} ({_size(source, array, key)})" for key in keys[:_NAMED]]
    more = f" and {len(keys) - _NAMED} more files" if len(keys) > _NAMED else ""
    return ", ".join(named) + more


def _size(source: Source, array: StoredArray, key: str) -> str:
    size = source.sizes.get(key)
    found = "missing" if size is None else f"{size:,} bytes"
    usual = None if array.plain is None else plain_size(array.path, array.plain, key)
    return found if usual in (None, size) else f"{found}, {usual:,} when it was exported"


def _open(source: Source, array: StoredArray, table: str) -> Any:  # noqa: ANN401 - zarr's arrays
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return zarr.open_array(source.store(), path=array.path, mode="r", zarr_format=3)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointCorruptError(
                f"field {array.spec.name!r} of the table {table!r} in {source.place.below(array.path)!r} "
                f"can't be opened ({error}): restore the checkpoint from a copy"
            ) from error
