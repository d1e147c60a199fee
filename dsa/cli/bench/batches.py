"""Batches that every contender gets alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, final

import numpy as np
import torch

from dsa.backends.system import PAGE
from dsa.schema import Rows

__all__ = ["Batch", "UniformBatches", "apart_rows", "batch_of", "whole_table"]


class Batch(NamedTuple):
    """Rows and their gradients.

    Args:
        indices: ``(B,)`` int64, in any order, duplicates allowed.
        grad: ``(B, D)`` float32.
    """

    indices: torch.Tensor
    grad: torch.Tensor


@final
class UniformBatches:
    """Batches of rows drawn uniformly; the number of a batch determines it, whoever asks.

    They are made anew instead of kept, so that a step finds its gradient in the processor's caches, as a
    backward pass would have left it.

    Args:
        rows: N.
        dim: D.
        size: B.
        seed: Of the first batch.
        device: Where the gradients are.

    Example:
        >>> batches = UniformBatches(100, 2, 3, seed=0)
        >>> batches.make(7).indices.tolist() == batches.make(7).indices.tolist()
        True
    """

    def __init__(self, rows: int, dim: int, size: int, seed: int, device: str = "cpu") -> None:
        self.rows, self.dim, self.size = rows, dim, size
        self._seed = seed
        self._device = device
        self._generator = torch.Generator()

    def make(self, number: int) -> Batch:
        """Return a batch; gradients are normal with a standard deviation of 0.01."""
        self._generator.manual_seed(self._seed * 1_000_003 + number)
        indices = torch.randint(self.rows, (self.size,), generator=self._generator)
        return _on(self._device, indices, _gradient(self.size, self.dim, self._generator))


def batch_of(rows: Rows, dim: int, seed: int) -> Batch:
    """Return a batch of given rows.

    Args:
        rows: ``(B,)`` int64.
        dim: D.
        seed: Of the gradient.
    """
    return Batch(torch.from_numpy(rows), _gradient(len(rows), dim, torch.Generator().manual_seed(seed)))


def whole_table(rows: int, dim: int, size: int = 16384, device: str = "cpu") -> Iterator[Batch]:
    """Yield batches with zero gradients that name every row once, in order."""
    for start in range(0, rows, size):
        indices = torch.arange(start, min(rows, start + size))
        yield _on(device, indices, torch.zeros(len(indices), dim))


def apart_rows(rows: int, record_bytes: int, stride: int, size: int, count: int, seed: int) -> list[Rows]:
    """Return batches of distinct rows in random order, no two of which share a page of the file.

    Args:
        rows: N.
        record_bytes: Bytes of a record.
        stride: Distance between records.
        size: B.
        count: How many batches are wanted; fewer come back when the table is too small. The first one may
            share pages, if not even that one fits otherwise.
        seed: Of the order.

    Example:
        >>> [len(batch) for batch in apart_rows(100, 1544, 1544, size=10, count=5, seed=0)]
        [10, 10]
    """
    spacing = -(-(PAGE + record_bytes) // stride)
    generator = np.random.default_rng(seed)
    chosen = generator.permutation(np.arange(0, rows, spacing))
    if len(chosen) < size:
        return [generator.permutation(rows)[:size]]
    return [chosen[i * size : (i + 1) * size] for i in range(min(count, len(chosen) // size))]


def _gradient(size: int, dim: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(size, dim, generator=generator).mul_(0.01)


def _on(device: str, indices: torch.Tensor, grad: torch.Tensor) -> Batch:
    return Batch(indices.to(device), grad.to(device))
