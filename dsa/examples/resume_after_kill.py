"""A run that may be killed at any instant, for want of memory say, and ends as if it had not been.

Three things make that so. What is learned is all on disk, and a step that has returned survives the process.
`global_step` tells on start which step comes next. And the batch of a step depends on its number alone.

A model that has dense layers too needs its checkpoint from the same step as its tables: see
`dsa.examples.recommender`.
"""

from __future__ import annotations

import os

import torch

from dsa import DiskEmbedding, DiskSparseAdam, init
from dsa.errors import StateNotFoundError
from dsa.examples import directory_given

__all__ = ["main"]


def main(
    directory: str | os.PathLike[str], steps: int = 2_000, words: int = 10_000, dim: int = 16
) -> list[float]:
    """Train from wherever the directory stands up to a step, and return the losses of the steps taken now."""
    embedding = open_or_start(directory, words, dim)
    losses = []
    with DiskSparseAdam(embedding.parameters(), lr=0.05) as optimizer:
        for step in range(optimizer.global_step, steps):
            first, second, alike = draw_batch(step, words)
            optimizer.zero_grad()
            product = (embedding(first) * embedding(second)).sum(1)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(product, alike)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step % 10 == 9:
                print(f"step {step + 1} loss {losses[-1]:.6f}", flush=True)
    return losses


def open_or_start(directory: str | os.PathLike[str], words: int, dim: int) -> DiskEmbedding:
    """Return the table that is in the directory, or a new one."""
    start = init.Normal(words, dim, 0.3, seed=1)
    try:
        return DiskEmbedding(words, dim, init=start, state_dir=directory, resume=True)
    except StateNotFoundError:
        return DiskEmbedding(words, dim, init=start, state_dir=directory)


def draw_batch(step: int, words: int, batch: int = 128) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return pairs of words and whether they are alike, which here means of equal parity."""
    draws = torch.Generator().manual_seed(step)
    first, second = torch.randint(0, words, (2, batch), generator=draws)
    return first, second, (first % 2 == second % 2).float()


if __name__ == "__main__":
    main(directory_given())
