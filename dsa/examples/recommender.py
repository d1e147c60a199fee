"""A recommender: users and items on disk, dense layers in memory, one optimizer, one schedule.

The loop is the usual one of torch with mixed precision: scale, unscale, clip, step, update. Run it again on
the same directory to go on from where it stopped.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from dsa import CombinedOptimizer, DiskEmbedding, DiskSparseAdam, init
from dsa.examples import directory_given

__all__ = ["Recommender", "main"]


class Recommender(torch.nn.Module):
    """How much a user likes an item, from a row of each.

    Args:
        directory: The state directory of both tables.
        users: Number of users.
        items: Number of items.
        dim: Elements of a row.
        resume: Whether the directory already holds the tables.
    """

    def __init__(
        self, directory: str | os.PathLike[str], users: int, items: int, dim: int, resume: bool
    ) -> None:
        super().__init__()

        def table(name: str, rows: int, seed: int) -> DiskEmbedding:
            start = init.Normal(rows, dim, 0.1, seed=seed)
            return DiskEmbedding(rows, dim, init=start, state_dir=directory, name=name, resume=resume or None)

        self.users, self.items = table("users", users, 1), table("items", items, 2)
        self.top = torch.nn.Sequential(torch.nn.Linear(2 * dim, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return a score for each pair ``(B,)``."""
        rows = torch.cat([self.users(users), self.items(items)], dim=1)
        scores: torch.Tensor = self.top(rows)
        return scores.squeeze(1)


def main(
    directory: str | os.PathLike[str],
    steps: int = 500,
    users: int = 2_000,
    items: int = 1_000,
    dim: int = 32,
    batch: int = 512,
) -> list[float]:
    """Train up to a step, save, and return the losses of the steps taken now."""
    checkpoint = Path(directory) / "checkpoint.pt"
    resume = checkpoint.exists()
    torch.manual_seed(0)
    model = Recommender(directory, users, items, dim, resume)

    optimizer = CombinedOptimizer(
        model,
        dense=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        sparse=lambda parameters: DiskSparseAdam(parameters, lr=1e-2),
    )
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    parts: dict[str, Any] = {
        "model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler
    }  # fmt: skip
    if resume:
        for name, state in torch.load(checkpoint, weights_only=True).items():
            parts[name].load_state_dict(state)

    losses = []
    with optimizer:
        for step in range(optimizer.global_step, steps):
            user, item, liked = draw_batch(step, users, items, batch)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                scores = model(user, item)
            loss = functional.binary_cross_entropy_with_logits(scores.float(), liked)

            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            losses.append(loss.item())
        # The tables are not in it, only a reference to them at this step.
        torch.save({name: part.state_dict() for name, part in parts.items()}, checkpoint)
    return losses


def draw_batch(
    step: int, users: int, items: int, batch: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return users, items and whether they match; a user likes the items of equal parity."""
    draws = torch.Generator().manual_seed(step)
    user = torch.randint(0, users, (batch,), generator=draws)
    item = torch.randint(0, items, (batch,), generator=draws)
    return user, item, (user % 2 == item % 2).float()


if __name__ == "__main__":
    taken = main(directory_given())
    print(f"{len(taken)} steps, loss {taken[0]:.4f} -> {taken[-1]:.4f}" if taken else "nothing left to do")
