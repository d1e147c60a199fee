"""What Hugging Face Accelerate does with an optimizer, written out.

`Prepared` makes the calls of ``accelerator.prepare(optimizer)``: on construction it takes the state dict,
moves it to the device and loads it again; under mixed precision it replaces ``optimizer.step`` for a moment,
to learn whether the scaler skipped it. With Accelerate itself the loop below is the same. With dense layers
beside the tables the optimizer is a `dsa.CombinedOptimizer`.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from dsa import DiskEmbeddingBag, DiskSparseAdam, init
from dsa.examples import directory_given

__all__ = ["Prepared", "main"]


class Prepared:
    """An optimizer as ``accelerator.prepare`` returns it.

    Args:
        optimizer: The optimizer.
        scaler: Scales losses; with None the gradients are what they are.
        device: Where state is moved to.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None, device: str = "cpu"
    ) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self.step_was_skipped = False
        optimizer.load_state_dict(moved(optimizer.state_dict(), device))

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Step, unless the scaler finds gradients that are not finite."""
        if self.scaler is None:
            self.optimizer.step()
            return
        called, original = [], self.optimizer.step

        def noted(*given: Any, **named: Any) -> Any:  # noqa: ANN401 - whatever the scaler passes
            called.append(True)
            return original(*given, **named)

        self.optimizer.step = noted  # type: ignore[method-assign]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.step = original  # type: ignore[method-assign]
        self.step_was_skipped = not called


def moved(value: Any, device: str) -> Any:  # noqa: ANN401 - a nest of containers and tensors
    """Return a state dict with its tensors on a device."""
    if isinstance(value, dict):
        return type(value)({key: moved(each, device) for key, each in value.items()})
    if isinstance(value, list | tuple):
        return type(value)(moved(each, device) for each in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


def main(
    directory: str | os.PathLike[str], steps: int = 300, words: int = 1_000, dim: int = 16, mixed: bool = True
) -> list[float]:
    """Train a classifier of bags of words and return the losses."""
    bag = DiskEmbeddingBag(words, dim, mode="sum", init=init.Normal(words, dim, 0.1), state_dir=directory)
    bag.to("cpu")
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if mixed else None
    optimizer = Prepared(DiskSparseAdam(bag.parameters(), lr=0.02), scaler)
    draws = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, words, (64, 8), generator=draws)
        label = (ids < words // 2).sum(1).sub(4).sign().float()
        loss = torch.nn.functional.mse_loss(bag(ids)[:, 0], label)
        optimizer.zero_grad()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer.optimizer)
        torch.nn.utils.clip_grad_norm_(bag.parameters(), max_norm=1.0)
        optimizer.step()
        losses.append(loss.item())
    bag.close()
    return losses


if __name__ == "__main__":
    taken = main(directory_given())
    print(f"{len(taken)} steps, loss {taken[0]:.4f} -> {taken[-1]:.4f}")
