"""What a Lightning trainer does with a module and its optimizer, written out.

`Matcher` has the methods of a ``LightningModule`` and would work as one with another base class; `fit` makes
the calls of ``Trainer.fit`` under automatic optimization: the step gets a closure, which computes the loss,
clears the gradients, runs backward and clips.

Automatic optimization takes one optimizer. With dense layers beside the tables that is a
`dsa.CombinedOptimizer`, as in `dsa.examples.recommender`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import StepLR

from dsa import DiskEmbedding, DiskSparseAdam, init
from dsa.examples import directory_given

__all__ = ["Matcher", "fit", "main"]

Pair = tuple[torch.Tensor, torch.Tensor]


class Matcher(torch.nn.Module):
    """Words that occur together get similar rows.

    Args:
        directory: The state directory.
        words: Number of words.
        dim: Elements of a row.
        resume: Whether the directory already holds the table.
    """

    def __init__(self, directory: str | os.PathLike[str], words: int, dim: int, resume: bool) -> None:
        super().__init__()
        self.word = DiskEmbedding(
            words,
            dim,
            init=init.Normal(words, dim, 0.3, seed=1),
            state_dir=directory,
            resume=True if resume else None,
        )

    def training_step(self, batch: Pair, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        pairs, alike = batch
        first, second = self.word(pairs).unbind(1)
        return torch.nn.functional.binary_cross_entropy_with_logits((first * second).sum(1), alike)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return the optimizer and its schedule."""
        optimizer = DiskSparseAdam(self.parameters(), lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1, 0.5)}


def fit(module: Matcher, loader: Iterable[Pair], epochs: int, checkpoint: Path) -> list[float]:
    """Make the calls of ``Trainer.fit``, from a checkpoint on if there is one, and return the losses."""
    module.to("cpu")
    configured = module.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        module.load_state_dict(saved["state_dict"])
        optimizer.load_state_dict(saved["optimizer_states"][0])
        schedule.load_state_dict(saved["lr_schedulers"][0])
        first = saved["epoch"]

    losses = []
    for epoch in range(first, epochs):
        module.train()
        for index, batch in enumerate(loader):
            losses.append(optimizer.step(closure=_closure(module, optimizer, batch, index)).item())
        schedule.step()
        torch.save(
            {
                "epoch": epoch + 1,
                "state_dict": module.state_dict(),
                "optimizer_states": [optimizer.state_dict()],
                "lr_schedulers": [schedule.state_dict()],
            },
            checkpoint,
        )
    optimizer.close()
    return losses


def _closure(module: Matcher, optimizer: torch.optim.Optimizer, batch: Pair, index: int) -> Any:  # noqa: ANN401
    def closure() -> torch.Tensor:
        loss = module.training_step(batch, index)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        return loss

    return closure


def draw_batches(words: int, batches: int, batch: int = 64) -> list[Pair]:
    """Return pairs of words and whether they are alike, which here means of equal parity."""
    draws = torch.Generator().manual_seed(0)
    pairs = [torch.randint(0, words, (batch, 2), generator=draws) for _ in range(batches)]
    return [(each, (each.sum(1) % 2 == 0).float()) for each in pairs]


def main(
    directory: str | os.PathLike[str], epochs: int = 5, words: int = 1_000, dim: int = 16, batches: int = 100
) -> list[float]:
    """Train up to an epoch and return the losses of the steps taken now."""
    checkpoint = Path(directory) / "last.ckpt"
    module = Matcher(directory, words, dim, resume=checkpoint.exists())
    return fit(module, draw_batches(words, batches), epochs, checkpoint)


if __name__ == "__main__":
    taken = main(directory_given())
    print(f"{len(taken)} steps, loss {taken[0]:.4f} -> {taken[-1]:.4f}" if taken else "nothing left to do")
