"""Weights read from an array of any kind, block by block, so that the whole is never in memory as float32."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

__all__ = ["FromArray", "MatrixLike"]

Weights = NDArray[np.float32]


class MatrixLike(Protocol):
    """A 2-D array that is sliced by rows: an ndarray, a memmap, a torch tensor, a zarr or h5py array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """``(rows, dim)``."""
        ...

    def __getitem__(self, rows: slice, /) -> object:
        """Return the rows of a slice."""
        ...


@final
@dataclass(frozen=True, slots=True, eq=False)
class FromArray:
    """Weights that an array holds, read block by block.

    Args:
        array: ``(N, D)`` of real floating-point numbers, at least 1 x 1. A torch tensor may require a
            gradient and live on any device. Not copied here: leave it unchanged until the table is created.

    Raises:
        TypeError: the argument isn't an array, or holds other numbers.
        ValueError: the array isn't 2-D, is empty, or is on the meta device.

    Example:
        >>> source = FromArray(np.eye(3))
        >>> source.rows, source.dim
        (3, 3)
        >>> [(start, block.tolist()) for start, block in source.blocks(2)]
        [(0, [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), (2, [[0.0, 0.0, 1.0]])]
    """

    array: MatrixLike

    def __post_init__(self) -> None:
        shape = getattr(self.array, "shape", None)
        if not isinstance(shape, tuple) or not hasattr(self.array, "__getitem__"):
            raise TypeError(
                f"{type(self.array).__name__!r} is not an array: pass an initialiser of dsa.init, or a "
                "tensor or array of shape (rows, dim), such as numpy.asarray(list)"
            )
        if len(shape) != 2 or 0 in shape:
            raise ValueError(
                f"the array has shape {tuple(shape)!r} and is no table: reshape it to (rows, dim), with at "
                "least one row and one element"
            )
        if _is_tensor(self.array):
            _check_tensor(self.array)
        elif isinstance(dtype := getattr(self.array, "dtype", None), np.dtype):
            _check_dtype(dtype)

    @property
    def rows(self) -> int:
        """Number of rows N."""
        return int(self.array.shape[0])

    @property
    def dim(self) -> int:
        """Elements of a row D."""
        return int(self.array.shape[1])

    def blocks(self, block_rows: int) -> Iterator[tuple[int, Weights]]:
        """Yield consecutive blocks ``(first row, weights)``, reading one at a time.

        The weights are ``(at most block_rows, D)`` float32, C-contiguous, in memory that the caller owns.

        Args:
            block_rows: Rows of a block, at least 1; a multiple of a chunked array's chunks is fastest.

        Raises:
            TypeError: a block holds other than real floating-point numbers.
            ValueError: `block_rows` is below 1, a number isn't finite in float32, a slice has another shape.
        """
        if block_rows < 1:
            raise ValueError(f"block_rows={block_rows!r} is out of range: pass at least 1")
        return (
            self._block(start, min(self.rows, start + block_rows))
            for start in range(0, self.rows, block_rows)
        )

    def rows_of(self, start: int, stop: int) -> Weights:
        """Return the rows ``[start, stop)``, as a block of `blocks`."""
        return self._block(start, stop)[1]

    def _block(self, start: int, stop: int) -> tuple[int, Weights]:
        block = _read(self.array, start, stop)
        if block.shape != (stop - start, self.dim):
            raise ValueError(
                f"the slice [{start}:{stop}] of the array has shape {block.shape!r}: pass an array whose "
                f"slices are rows of {self.dim} numbers"
            )
        finite = np.isfinite(block)
        if not finite.all():
            row, element = (int(i) for i in np.argwhere(~finite)[0])
            raise ValueError(
                f"row {start + row} of the array holds {float(block[row, element])!r} at element {element}, "
                "as float32: replace what is not finite and clip what is above 3.4e38"
            )
        return start, block


def _is_tensor(array: object) -> bool:
    # Without an import of torch there are no tensors, and importing it would cost other callers a second.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _check_tensor(tensor: Any) -> None:  # noqa: ANN401 - torch is not imported on this floor
    if not tensor.is_floating_point():
        raise TypeError(
            f"the tensor holds {tensor.dtype}: weights are floating-point, convert it with .float()"
        )
    if tensor.is_meta:
        raise ValueError(
            "the tensor is on the meta device and holds no numbers: pass dsa.init.Normal or the like"
        )
    if str(tensor.layout) != "torch.strided":
        raise TypeError(f"the tensor has layout {tensor.layout}: convert it with .to_dense()")


def _check_dtype(dtype: np.dtype[Any]) -> None:
    # numpy has no bfloat16; the extension types that bring it use this name.
    if dtype.kind != "f" and dtype.name != "bfloat16":
        raise TypeError(
            f"the array holds {dtype}: weights are floating-point, convert it with .astype('float32')"
        )


def _read(array: Any, start: int, stop: int) -> Weights:  # noqa: ANN401 - a tensor or a MatrixLike
    if _is_tensor(array):
        torch: Any = sys.modules["torch"]
        rows = array.detach()[start:stop]
        copy = rows.to("cpu", torch.float32, copy=True, memory_format=torch.contiguous_format)
        weights: Weights = copy.numpy()
        return weights
    values = np.asarray(array[start:stop])
    _check_dtype(values.dtype)
    with np.errstate(all="ignore"):  # what overflows is reported with its row
        return np.array(values, dtype=np.float32, order="C")
