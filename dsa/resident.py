"""Weights that stay in memory while their state is on disk: taking rows out and putting them back."""

from __future__ import annotations

import weakref
from typing import Final, final

import numpy as np
import torch

from dsa.errors import StateError
from dsa.kernels.hashing import hash_words
from dsa.kernels.layout import Floats, Words
from dsa.kernels.rows import gather_words, scatter_words
from dsa.kernels.threads import run_slices
from dsa.schema import Rows

__all__ = ["ParameterWeights", "put_rows", "take_rows"]

_BLOCK_BYTES: Final = 4 << 20


@final
class ParameterWeights:
    """The weights of a table as `dsa.table.HeldWeights`; they live as long as their parameter does.

    Args:
        parameter: ``(N, D)``, of any device and floating dtype.
        name: The table's.
    """

    def __init__(self, parameter: torch.Tensor, name: str) -> None:
        # Weak: an optimizer notices when nobody else holds a parameter any more.
        self._parameter = weakref.ref(parameter)
        self._name = name

    def take(self, rows: Rows) -> Floats:
        """Return copies of some rows, ``(B, D)`` float32."""
        return take_rows(self._alive(), rows)

    def put(self, rows: Rows, weights: Floats) -> None:
        """Replace some rows."""
        put_rows(self._alive(), rows, weights)

    def fingerprint(self) -> str:
        """Return a hash of all the weights as float32; an empty string when the parameter is gone."""
        parameter = self._parameter()
        if parameter is None:
            return ""
        rows, dim = parameter.shape
        state, block = 0, max(1, _BLOCK_BYTES // (4 * dim))
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


def take_rows(parameter: torch.Tensor, rows: Rows) -> Floats:
    """Return the rows of a parameter of any device and floating dtype as float32 ``(B, D)``."""
    words = _words(parameter)
    if words is None:
        chosen = parameter.detach()[torch.from_numpy(rows).to(parameter.device)]
        return np.ascontiguousarray(chosen.float().cpu().numpy())
    taken = np.empty((len(rows), parameter.shape[1]), np.float32)
    out = taken.view(np.int32)
    run_slices(lambda start, stop: gather_words(words, rows[start:stop], out[start:stop]), len(rows))
    return taken


def put_rows(parameter: torch.Tensor, rows: Rows, weights: Floats) -> None:
    """Replace rows of a parameter, rounded to its dtype, as an in-place operation that autograd notices."""
    words = _words(parameter)
    if words is None:
        values = torch.from_numpy(weights).to(parameter.device, parameter.dtype)
        parameter.detach().index_copy_(0, torch.from_numpy(rows).to(parameter.device), values)
        return
    source = weights.view(np.int32)
    run_slices(lambda start, stop: scatter_words(words, rows[start:stop], source[start:stop]), len(rows))
    torch.autograd.graph.increment_version(parameter)


def _words(parameter: torch.Tensor) -> Words | None:
    """Return the memory of a parameter that the kernels can work on, or None."""
    plain = parameter.device.type == "cpu" and parameter.dtype == torch.float32 and parameter.is_contiguous()
    return parameter.detach().numpy().view(np.int32) if plain else None
