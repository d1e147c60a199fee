"""Weights that stay in memory while their state is on disk: taking rows out and putting them back."""

from __future__ import annotations

import math
import weakref
from typing import Final, final

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dsa.errors import StateError
from dsa.kernels.hashing import hash_words
from dsa.kernels.layout import Floats, Words
from dsa.kernels.rows import gather_words, scatter_words
from dsa.kernels.threads import run_slices
from dsa.optimizers.memory import is_writable
from dsa.rules.init import Initializer
from dsa.schema import Rows
from dsa.state.growth import Growth

__all__ = [
    "ParameterWeights",
    "lengthened",
    "put_rows",
    "require_writable",
    "row_elements",
    "take_data",
    "take_rows",
]

_BLOCK_BYTES: Final = 4 << 20


@final
class ParameterWeights:
    """The weights of a table as `dsa.state.table.HeldWeights`; they live as long as their parameter does.

    Args:
        parameter: ``(N, ...)``, of any device and floating dtype.
        name: The table's.
    """

    def __init__(self, parameter: torch.Tensor, name: str) -> None:
        # Weak: an optimizer notices when nobody else holds a parameter any more.
        self._parameter = weakref.ref(parameter)
        self._name = name
        # What was found writable. The weak reference keeps another storage from taking this one's place.
        self._writable: tuple[int, StorageWeakRef] | None = None

    def are_of(self, parameter: torch.Tensor) -> bool:
        """Tell whether they are a parameter's."""
        return self._parameter() is parameter

    def require_writable(self) -> None:
        """Make sure that writing to the parameter does not end the process; nearly free when repeated.

        Raises:
            ValueError: its memory is for reading only, or is gone.
        """
        parameter = self._alive()
        if parameter.device.type != "cpu" or parameter.numel() == 0:
            return
        storage, address = parameter.untyped_storage(), parameter.data_ptr()
        known = self._writable
        if known is None or known[0] != address or known[1].cdata != storage._cdata:
            require_writable(parameter, self._name)
            self._writable = address, StorageWeakRef(storage)

    def take(self, rows: Rows) -> Floats:
        """Return copies of some rows, ``(B, D)`` float32."""
        return take_rows(self._alive(), rows)

    def lend(self, rows: Rows) -> Floats:
        """Return copies of some rows that are to be put back changed.

        Raises:
            ValueError: the parameter's memory can't be written to.
        """
        self.require_writable()
        return self.take(rows)

    def put(self, rows: Rows, weights: Floats) -> None:
        """Replace some rows.

        Raises:
            ValueError: the parameter's memory can't be written to.
        """
        self.require_writable()
        put_rows(self._alive(), rows, weights)

    def fingerprint(self) -> str:
        """Return a hash of all the weights as float32; an empty string when they are gone."""
        parameter = self._parameter()
        if parameter is None or parameter.untyped_storage().nbytes() == 0:
            return ""
        rows, state = len(parameter), 0
        block = max(1, _BLOCK_BYTES // (4 * row_elements(parameter.shape)))
        for start in range(0, rows, block):
            taken = take_rows(parameter, np.arange(start, min(rows, start + block)))
            state = hash_words(taken.view(np.int32), state)
        return f"{state:016x}"

    def _alive(self) -> torch.Tensor:
        parameter = self._parameter()
        if parameter is None:
            raise StateError(
                f"the parameter that holds the weights of table {self._name!r} is gone: export or import "
                "through the optimizer while its module lives"
            )
        return parameter


def row_elements(shape: tuple[int, ...]) -> int:
    """Return the elements of a row of a parameter ``(N, ...)``; a 1-D one has rows of one element.

    Example:
        >>> row_elements((100, 3, 4)), row_elements((100,))
        (12, 1)
    """
    return math.prod(shape[1:])


def take_rows(parameter: torch.Tensor, rows: Rows) -> Floats:
    """Return the rows of a parameter of any device and floating dtype as float32 ``(B, D)``."""
    dim = row_elements(parameter.shape)
    words = _words(parameter)
    if words is None:
        chosen = parameter.detach()[torch.from_numpy(rows).to(parameter.device)]
        return np.ascontiguousarray(chosen.float().cpu().numpy()).reshape(len(rows), dim)
    taken = np.empty((len(rows), dim), np.float32)
    out = taken.view(np.int32)
    run_slices(lambda start, stop: gather_words(words, rows[start:stop], out[start:stop]), len(rows))
    return taken


def put_rows(parameter: torch.Tensor, rows: Rows, weights: Floats) -> None:
    """Replace rows of a parameter, rounded to its dtype, as an in-place operation that autograd notices."""
    words = _words(parameter)
    if words is None:
        values = torch.from_numpy(weights).to(parameter.device, parameter.dtype)
        values = values.reshape(len(rows), *parameter.shape[1:])
        parameter.detach().index_copy_(0, torch.from_numpy(rows).to(parameter.device), values)
        return
    source = weights.view(np.int32)
    run_slices(lambda start, stop: scatter_words(words, rows[start:stop], source[start:stop]), len(rows))
    torch.autograd.graph.increment_version(parameter)


def _words(parameter: torch.Tensor) -> Words | None:
    """Return the memory of a parameter that the kernels can work on, or None."""
    plain = parameter.device.type == "cpu" and parameter.dtype == torch.float32 and parameter.is_contiguous()
    if not plain:
        return None
    return parameter.detach().numpy().reshape(len(parameter), row_elements(parameter.shape)).view(np.int32)


def require_writable(parameter: torch.Tensor, name: str) -> None:
    """Make sure that writing to a parameter does not end the process.

    Raises:
        ValueError: its memory is for reading only, or is gone.
    """
    if parameter.device.type != "cpu" or parameter.numel() == 0:
        return
    storage = parameter.untyped_storage()
    reach = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    end = (parameter.storage_offset() + reach + 1) * parameter.element_size()
    if storage.nbytes() < end:
        raise ValueError(
            f"the memory of the parameter {name!r} is gone: its storage has {storage.nbytes()} bytes of the "
            f"{end} that it needs: pass a parameter whose weights are in memory, and step while they are"
        )
    if not is_writable(parameter.data_ptr(), (reach + 1) * parameter.element_size()):
        raise ValueError(
            f"the memory of the parameter {name!r} is read-only, such as a file that was mapped for reading: "
            "pass a copy of the weights (tensor.clone()), or map the file copy-on-write (mmap_mode='c')"
        )


def lengthened(parameter: torch.Tensor, growth: Growth) -> torch.Tensor:
    """Return the weights of a parameter in memory with those of new rows behind them.

    Args:
        parameter: ``(N, ...)``.
        growth: How its table is to grow.

    Raises:
        ValueError: there are no weights for the new rows, or they don't fit or are not finite.
    """
    rows, more = growth.rows, growth.rows - len(parameter)
    dim, source = row_elements(parameter.shape), growth.source
    wanted = rows if isinstance(source, Initializer) else more
    if source is None or (source.rows, source.dim) != (wanted, dim):
        given = "nothing" if source is None else f"{source.rows} x {source.dim}"
        raise ValueError(
            f"init gives {given} where the parameter {growth.table.name!r} of shape "
            f"{tuple(parameter.shape)} grows to {rows} rows: pass an array of {more} x {dim}, or a rule of "
            f"dsa.init for {rows} x {dim}"
        )
    if isinstance(source, Initializer):
        weights = np.empty((more, dim), np.float32)
        source.fill(np.arange(len(parameter), rows), weights)
    else:
        weights = np.concatenate([block for _, block in source.blocks(max(1, _BLOCK_BYTES // (4 * dim)))])
    new = torch.from_numpy(weights).to(parameter.device, parameter.dtype)
    return torch.cat([parameter.detach(), new.reshape(more, *parameter.shape[1:])])


def take_data(parameter: torch.Tensor, data: torch.Tensor) -> None:
    """Give a parameter other data of its dtype and device, of another shape; its sparse gradient goes on."""
    # Another dtype in between makes autograd forget the shape that it knows.
    other = torch.float32 if data.dtype == torch.float64 else torch.float64
    grad, parameter.grad = parameter.grad, None
    parameter.data = torch.empty(0, dtype=other, device=data.device)
    parameter.data = data
    if grad is not None and grad.is_sparse:
        parameter.grad = torch.sparse_coo_tensor(
            grad._indices(),
            grad._values(),
            data.shape,
            check_invariants=False,
            is_coalesced=grad.is_coalesced(),
        )
