"""Checksums of what an array holds, however it is stored.

An array is hashed by blocks of rows, in C order and little endian: the digest of block *k* is that of rows
``[k * block_rows, (k + 1) * block_rows)``. The root is the digest of a header line and all raw block
digests, so that blocks can't be swapped and arrays of another shape or type can't pass for this one. Shape
and type alone decide the blocks: any chunks, shards and codecs give the same digests. The content root names
all arrays of a checkpoint at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final, final

from dsa.backends.shards.layout import ArraySpec, block_rows

__all__ = [
    "ALGORITHMS",
    "DEFAULT_ALGORITHM",
    "ArrayDigest",
    "RowHasher",
    "content_root",
    "new_hash",
    "root_digest",
    "zeros_digest",
]

DEFAULT_ALGORITHM: Final = "sha256-rows-v1"

ALGORITHMS: Final[dict[str, Any]] = {
    DEFAULT_ALGORITHM: hashlib.sha256,
    "blake2b-rows-v1": partial(hashlib.blake2b, digest_size=32),
}
"""The hash of each algorithm; both give 32 bytes."""

_ZEROS: Final = bytes(1 << 20)


@final
@dataclass(frozen=True, slots=True)
class ArrayDigest:
    """The checksum of an array.

    Args:
        algorithm: A key of `ALGORITHMS`.
        spec: Shape and type.
        blocks: Digest of each block, in hexadecimal.
        root: Digest of the header and the blocks, in hexadecimal.
    """

    algorithm: str
    spec: ArraySpec
    blocks: tuple[str, ...]
    root: str

    @property
    def block_rows(self) -> int:
        """Rows of a block; the last may have fewer."""
        return block_rows(self.spec.rows, self.spec.row_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return the array attribute ``dsa_checksum``."""
        return {
            "algorithm": self.algorithm,
            "dtype": self.spec.dtype,
            "shape": list(self.spec.shape),
            "block_rows": self.block_rows,
            "blocks": list(self.blocks),
            "root": self.root,
        }


def new_hash(algorithm: str) -> Any:  # noqa: ANN401 - hashlib's objects share no public type
    """Return an empty hash.

    Raises:
        ValueError: the algorithm is unknown.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"the checksum algorithm {algorithm!r} is unknown: use one of {sorted(ALGORITHMS)}")
    return ALGORITHMS[algorithm]()


def root_digest(algorithm: str, spec: ArraySpec, blocks: Iterable[str]) -> str:
    """Return the digest of a whole array from those of its blocks.

    Example:
        >>> root_digest("sha256-rows-v1", ArraySpec("t", "<i4", 0, None), [])[:16]
        '9e96cb3a5b04c825'
    """
    shape = "x".join(map(str, spec.shape))
    header = f"{algorithm} {spec.dtype} {shape} {block_rows(spec.rows, spec.row_bytes)}\n"
    total = new_hash(algorithm)
    total.update(header.encode())
    for block in blocks:
        total.update(bytes.fromhex(block))
    return str(total.hexdigest())


@lru_cache(maxsize=64)
def zeros_digest(algorithm: str, size: int) -> str:
    """Return the digest of so many zero bytes."""
    total = new_hash(algorithm)
    for start in range(0, size, len(_ZEROS)):
        total.update(_ZEROS[: min(len(_ZEROS), size - start)])
    return str(total.hexdigest())


def content_root(roots: Mapping[str, str]) -> str:
    """Return the one name of a checkpoint's content, from the roots of its arrays by path.

    Example:
        >>> content_root({})[:16]
        'e3b0c44298fc1c14'
    """
    lines = sorted(f"{path} {root}\n" for path, root in roots.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@final
class RowHasher:
    """Hashes an array whose rows arrive in order, in pieces of any size.

    Args:
        spec: The array.
        algorithm: A key of `ALGORITHMS`.

    Example:
        >>> hasher = RowHasher(ArraySpec("t", "<i4", 3, None))
        >>> hasher.update(bytes(8), 2), hasher.update(bytes(4), 1)
        (None, None)
        >>> hasher.finish().blocks == (zeros_digest("sha256-rows-v1", 12),)
        True
    """

    def __init__(self, spec: ArraySpec, algorithm: str = DEFAULT_ALGORITHM) -> None:
        self._spec = spec
        self._algorithm = algorithm
        self._block_rows = block_rows(spec.rows, spec.row_bytes)
        self._blocks: list[str] = []
        self._current = new_hash(algorithm)
        self._row = 0

    @property
    def rows_to_boundary(self) -> int:
        """Rows until the current block ends."""
        return self._block_rows - self._row % self._block_rows

    def update(self, data: Any, rows: int) -> None:  # noqa: ANN401 - any buffer
        """Take the next rows, which must not reach beyond the current block.

        Args:
            data: Their bytes: anything contiguous that has a buffer.
            rows: How many, at most `rows_to_boundary`.
        """
        self._current.update(data)
        self._row += rows
        if rows and self._row % self._block_rows == 0:
            self._end_block()

    def _end_block(self) -> None:
        self._blocks.append(self._current.hexdigest())
        self._current = new_hash(self._algorithm)

    def finish(self) -> ArrayDigest:
        """Return the checksum once every row has come.

        Raises:
            ValueError: rows are missing or too many.
        """
        if self._row != self._spec.rows:
            raise ValueError(
                f"{self._row} rows of the array {self._spec.name!r} were given where it has "
                f"{self._spec.rows}: yield each row once"
            )
        if self._row % self._block_rows:
            self._end_block()
        blocks = tuple(self._blocks)
        return ArrayDigest(
            self._algorithm, self._spec, blocks, root_digest(self._algorithm, self._spec, blocks)
        )
