"""The bytes of a shard: its inner chunks, then the index that says where each lies.

The index is an array of (offset, length) pairs of uint64, one per inner chunk, followed by its CRC-32C; a
chunk that is absent has both set to 2^64-1 (Zarr v3, sharding_indexed). Uncompressed chunks lie one after
the other in order, so that the data of a shard is a plain array and its index is known before any of it is.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import google_crc32c
import numpy as np
from numcodecs.zstd import Zstd
from numpy.typing import NDArray

from dsa.backends.shards.documents import ZSTD_LEVEL
from dsa.backends.shards.layout import ArrayLayout
from dsa.errors import StateCorruptError

__all__ = [
    "decode_chunk",
    "encode_chunk",
    "index_bytes",
    "place_index",
    "raw_index",
    "read_index",
]

_ABSENT: Final = 2**64 - 1
_CHECKSUM_BYTES: Final = 4
_ZSTD: Final = Zstd(level=ZSTD_LEVEL, checksum=True)


def index_bytes(chunks: int) -> int:
    """Return the size of the index of a shard of so many inner chunks."""
    return 16 * chunks + _CHECKSUM_BYTES


@lru_cache(maxsize=64)
def raw_index(chunks: int, chunk_bytes: int, used: int | None = None) -> bytes:
    """Return the index of an uncompressed shard, whose chunks lie one after the other.

    Args:
        chunks: Inner chunks of a shard.
        chunk_bytes: Bytes of one.
        used: How many are there, from the first on; None for all.
    """
    places = np.full((chunks, 2), _ABSENT, "<u8")
    there = chunks if used is None else used
    places[:there, 0] = np.arange(there, dtype=np.uint64) * np.uint64(chunk_bytes)
    places[:there, 1] = chunk_bytes
    return _sealed(places)


def place_index(lengths: Sequence[int]) -> bytes:
    """Return the index of chunks of these lengths, one after the other; those of length 0 are absent."""
    places = np.full((len(lengths), 2), _ABSENT, "<u8")
    end = 0
    for number, length in enumerate(lengths):
        if length:
            places[number] = end, length
            end += length
    return _sealed(places)


def encode_chunk(layout: ArrayLayout, rows: NDArray[Any]) -> bytes:
    """Return a compressed inner chunk: empty when every byte of it is zero.

    Args:
        layout: The array's.
        rows: Its rows in the array's dtype, C-contiguous; fewer than a chunk's at the array's end.
    """
    whole = rows
    if len(rows) < layout.chunk_rows:
        whole = np.zeros((layout.chunk_rows, *rows.shape[1:]), rows.dtype)
        whole[: len(rows)] = rows
    if not whole.reshape(-1).view(np.uint8).any():
        return b""
    return bytes(_ZSTD.encode(whole))


def decode_chunk(
    layout: ArrayLayout, encoded: bytes | memoryview, out: NDArray[Any] | None = None
) -> NDArray[Any]:
    """Return the rows of a compressed inner chunk, ``(chunk_rows, ...)``; one that is absent is zero.

    Args:
        layout: The array's.
        encoded: The chunk's bytes.
        out: An array of a chunk's bytes, C-contiguous, to be filled and returned; a new one when None.

    Raises:
        StateCorruptError: the bytes are damaged.
    """
    rows = np.zeros((layout.chunk_rows, *layout.spec.shape[1:]), layout.spec.dtype) if out is None else out
    if not len(encoded):
        rows[...] = 0
    else:
        try:
            _ZSTD.decode(encoded, out=rows)
        except (RuntimeError, ValueError) as error:
            raise StateCorruptError(
                f"a chunk of the array {layout.spec.name!r} can't be decompressed ({error}): restore it from "
                "a copy"
            ) from error
    return rows


def read_index(layout: ArrayLayout, stored: bytes, data_bytes: int) -> list[tuple[int, int]]:
    """Return ``(offset, length)`` of each inner chunk of a shard; length 0 for those that are absent.

    Args:
        layout: The array's.
        stored: The last `index_bytes` of the shard.
        data_bytes: The bytes before them.

    Raises:
        StateCorruptError: the index is damaged or points outside the shard.
    """
    expected = index_bytes(layout.chunks_per_shard)
    body, checksum = stored[:-_CHECKSUM_BYTES], stored[-_CHECKSUM_BYTES:]
    if len(stored) != expected or struct.pack("<I", google_crc32c.value(body)) != checksum:
        raise StateCorruptError(
            f"the index of a shard of the array {layout.spec.name!r} is damaged: restore it from a copy"
        )
    places = []
    for offset, length in np.frombuffer(body, "<u8").reshape(-1, 2).tolist():
        if offset == length == _ABSENT:
            places.append((0, 0))
        elif offset + length <= data_bytes:
            places.append((offset, length))
        else:
            raise StateCorruptError(
                f"the index of a shard of the array {layout.spec.name!r} points outside it: restore it from "
                "a copy"
            )
    return places


def _sealed(places: NDArray[np.uint64]) -> bytes:
    body = places.tobytes()
    return body + struct.pack("<I", google_crc32c.value(body))
