"""One field of all rows as an array that is read when it is sliced."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final, final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dsa.schema import Records, Rows, Schema

__all__ = ["FieldRows"]

_BLOCK_BYTES: Final = 16 << 20


@final
class FieldRows:
    """A field of a table whose files are no array: has a shape and a dtype, and slices that are numpy arrays.

    Args:
        read: Returns the records of rows, as `StateBackend.read` does.
        rows: N.
        schema: Layout of a record.
        name: The field.

    Example:
        >>> from dsa.backends import MemoryBackend
        >>> from dsa.schema import adam_schema
        >>> backend = MemoryBackend(5, adam_schema(dim=2))
        >>> field = FieldRows(backend.read, 5, backend.schema, "w")
        >>> field.shape, field[1:4].shape, field[-1, 0], np.asarray(field).sum()
        ((5, 2), (3, 2), np.float32(0.0), np.float32(0.0))
    """

    def __init__(self, read: Callable[[Rows], Records], rows: int, schema: Schema, name: str) -> None:
        self._read = read
        self._name = name
        self._block_rows = max(1, _BLOCK_BYTES // schema.dtype.itemsize)
        field = np.empty(0, schema.dtype)[name]
        self.shape: tuple[int, ...] = (rows, *field.shape[1:])
        self.dtype = field.dtype

    @property
    def ndim(self) -> int:
        """2 for a field with an element for each of a row's, else 1."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401 - as numpy's arrays are indexed
        """Read a row, a slice of rows, or rows by an array of numbers; more indices select of these."""
        first, *rest = key if isinstance(key, tuple) else (key,)
        rows = self._rows(first)
        unique, places = np.unique(rows, return_inverse=True)
        values = self._values(unique)[places.reshape(rows.shape)]
        return values[(slice(None),) * rows.ndim + tuple(rest)]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Read the whole field, which is always a copy."""
        if copy is False:
            raise ValueError(f"the field {self._name!r} can't be had without a copy: leave copy=False out")
        return np.asarray(self[:], dtype)

    def _rows(self, key: Any) -> NDArray[np.int64]:  # noqa: ANN401 - as numpy's arrays are indexed
        if isinstance(key, slice):
            return np.arange(*key.indices(len(self)))
        wanted = np.asarray(key if isinstance(key, np.ndarray | list) else operator.index(key))
        if wanted.dtype == np.bool_:
            wanted = np.flatnonzero(wanted)
        outside = (wanted < -len(self)) | (wanted >= len(self))
        if outside.any():
            raise IndexError(
                f"row {wanted[outside].flat[0]} is outside a table of {len(self):,} rows: name others"
            )
        return np.where(wanted < 0, wanted + len(self), wanted).astype(np.int64)

    def _values(self, rows: Rows) -> NDArray[Any]:
        values = np.empty((len(rows), *self.shape[1:]), self.dtype)
        for start in range(0, len(rows), self._block_rows):
            some = slice(start, start + self._block_rows)
            values[some] = self._read(rows[some])[self._name]
        return values
