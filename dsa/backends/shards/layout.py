"""How an array is cut: inner chunks, shards, and the blocks that checksums are over.

*Inner chunks* are what a reader decodes at a time: at most 512 KiB, or 64 rows where that is more. *Shards*
are files: near 16 MiB, because readers were measured to slow down above that and only the number of files
grows below it; larger once an array would have more than 1,024 of them. *Blocks* depend on shape and dtype
alone, never on chunks or codecs, so that the checksums of equal arrays are equal however they are stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import numpy as np

__all__ = ["SHARD_BYTES", "ArrayLayout", "ArraySpec", "block_rows", "plan_layout"]

SHARD_BYTES: Final = 16 << 20
_CHUNK_BYTES: Final = 512 << 10
_FEWEST_CHUNK_ROWS: Final = 64
_MOST_SHARDS: Final = 1024
_LARGEST_SHARD: Final = 1 << 30


@final
@dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array without its values.

    Args:
        name: The field's.
        dtype: numpy's name of it with its byte order, little endian: ``"<f4"``.
        rows: N.
        columns: D of an array ``(N, D)``; None for ``(N,)``.
    """

    name: str
    dtype: str
    rows: int
    columns: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """``(N, D)`` or ``(N,)``."""
        return (self.rows,) if self.columns is None else (self.rows, self.columns)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return np.dtype(self.dtype).itemsize * (self.columns or 1)


@final
@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """An array and how it is cut into files.

    Args:
        spec: The array.
        chunk_rows: Rows of an inner chunk.
        shard_rows: Rows of a shard, a multiple of `chunk_rows`; the last shard may reach beyond the array.
    """

    spec: ArraySpec
    chunk_rows: int
    shard_rows: int

    @property
    def shards(self) -> int:
        """The number of shards."""
        return -(-self.spec.rows // self.shard_rows)

    @property
    def chunks_per_shard(self) -> int:
        """Inner chunks of a shard."""
        return self.shard_rows // self.chunk_rows

    @property
    def chunk_bytes(self) -> int:
        """Bytes of an uncompressed inner chunk."""
        return self.chunk_rows * self.spec.row_bytes

    @property
    def shard_bytes(self) -> int:
        """Bytes of the data of an uncompressed shard; the index follows."""
        return self.shard_rows * self.spec.row_bytes

    def shard_key(self, shard: int) -> str:
        """Return the path of a shard below the array's directory."""
        return f"c/{shard}" if self.spec.columns is None else f"c/{shard}/0"


def plan_layout(
    spec: ArraySpec, *, shard_bytes: int | None = None, chunk_rows: int | None = None
) -> ArrayLayout:
    """Return the layout of an array, by the rules in the module's docstring.

    Args:
        spec: The array.
        shard_bytes: About how large a shard is to be; `SHARD_BYTES` when None.
        chunk_rows: Rows of an inner chunk, for those who know better.

    Example:
        >>> plan_layout(ArraySpec("w", "<f4", 50_000_000, 128)).shards
        763
        >>> tiny = plan_layout(ArraySpec("w", "<f4", 10, 4))
        >>> tiny.chunk_rows, tiny.shard_rows
        (10, 10)
    """
    fewest = max(1, min(_FEWEST_CHUNK_ROWS, _power_of_two(SHARD_BYTES // spec.row_bytes)))
    chunk = chunk_rows or max(fewest, _power_of_two(_CHUNK_BYTES // spec.row_bytes))
    chunk = max(1, min(chunk, spec.rows))
    largest = max(chunk, _LARGEST_SHARD // spec.row_bytes)
    wanted = SHARD_BYTES if shard_bytes is None else shard_bytes
    shard = chunk * max(1, _power_of_two(wanted // (chunk * spec.row_bytes)))
    while -(-spec.rows // shard) > _MOST_SHARDS and 2 * shard <= largest:
        shard *= 2
    return ArrayLayout(spec, chunk, min(shard, max(1, -(-spec.rows // chunk)) * chunk))


def block_rows(rows: int, row_bytes: int) -> int:
    """Return how many rows a checksum is over: 16 MiB's worth, doubled until there are at most 1,024 blocks.

    Example:
        >>> block_rows(1_000_000, 512), block_rows(100_000_000, 512)
        (32768, 131072)
    """
    block = max(1, _power_of_two(SHARD_BYTES // row_bytes))
    while -(-rows // block) > _MOST_SHARDS:
        block *= 2
    return block


def _power_of_two(value: int) -> int:
    """Return the largest power of two that is at most `value`, or 0 below 1."""
    return 1 << (value.bit_length() - 1) if value >= 1 else 0
