"""Records of which every field is mapped apart, brought together in blocks that stay in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar, final

import numpy as np

from dsa.backends.mapped_array import MappedArray
from dsa.kernels.layout import Words
from dsa.kernels.pieces import Pieces, gather_pieces, scatter_pieces
from dsa.schema import Rows

__all__ = ["MappedPieces"]

T = TypeVar("T")

_BLOCK_BYTES: Final = 512 << 10
"""What is brought together at a time, and lies in as many bytes at its places: both in a cache of 1 MiB."""


@final
class MappedPieces:
    """The words of records, and of the checksums behind them, that lie in several mapped arrays.

    What is made of the arrays keeps their shards mapped.

    Args:
        arrays: Those of the fields in their order, and that of the checksums behind them if there is one; the
            rows of each are whole words.
    """

    def __init__(self, arrays: Sequence[MappedArray]) -> None:
        self._arrays = tuple(arrays)
        shards = [array.shards for array in arrays]
        self._kept = shards
        counts = [len(each) for each in shards]
        self._pieces = Pieces(
            addresses=np.array([shard.ctypes.data for each in shards for shard in each], np.int64),
            shard_rows=np.array([array.shard_rows for array in arrays], np.int64),
            first=np.cumsum([0, *counts[:-1]]),
            columns=np.cumsum([0, *(array.width for array in arrays)]),
            changed=np.zeros(sum(counts), np.bool_),
        )
        self.words = int(self._pieces.columns[-1])
        self.block = 1 << max(0, (_BLOCK_BYTES // (4 * self.words)).bit_length() - 1)
        """Rows of a block, a power of two; a block begins at a multiple of it."""
        self._spare: list[Words] = []

    def visit(
        self, rows: Rows, start: int, stop: int, function: Callable[[Words, int, int], T], *, changing: bool
    ) -> list[T]:
        """Let a function work on rows of a slice, block by block, and put back what it has changed.

        Args:
            rows: ``(B,)`` int64, strictly increasing.
            start: Where the slice begins.
            stop: Where it ends.
            function: Is called with the records of a block, that of the p-th row at ``p % block``, and with
                the first p and the one behind the last.
            changing: Whether records are put back, once the function has returned; not if it raises.

        Returns:
            What the function has returned for each block.
        """
        records, results = self._take_block(), []
        for first in range(start - start % self.block, stop, self.block):
            begin, end = max(start, first), min(stop, first + self.block)
            part, some = rows[begin:end], records[begin - first : end - first]
            gather_pieces(self._pieces, part, some)
            results.append(function(records, begin, end))
            if changing:
                scatter_pieces(self._pieces, part, some)
        self._spare.append(records)
        return results

    def restore(self, rows: Rows, images: Words) -> None:
        """Put words back, ``(B, words)``."""
        scatter_pieces(self._pieces, rows, np.ascontiguousarray(images))

    def note_changes(self) -> None:
        """Tell the arrays which of their shards have changed."""
        changed = self._pieces.changed
        firsts = self._pieces.first.tolist()
        # An array may have more shards by now than when this was made.
        for array, kept, first in zip(self._arrays, self._kept, firsts, strict=True):
            shards = np.flatnonzero(changed[first : first + len(kept)])
            array.note_changed(shards.tolist())  # first, or an interrupt would lose it
            changed[first + shards] = False

    def _take_block(self) -> Words:
        try:
            return self._spare.pop()
        except IndexError:
            return np.empty((self.block, self.words), np.int32)
