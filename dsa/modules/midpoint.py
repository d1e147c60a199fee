"""The mean of points of a ball."""

from __future__ import annotations

import torch

from dsa.optimizers.weight_access import bag_rows

__all__ = ["gyromidpoints"]


def gyromidpoints(
    values: torch.Tensor,
    k: float,
    inverse: torch.Tensor,
    offsets: torch.Tensor | None,
    include_last_offset: bool,
    padding: int | None,
) -> torch.Tensor:
    """Return the Möbius gyromidpoint of each bag of points, which is what a mean is in a flat space.

    With ``s = sum(lambda_i x_i) / sum(lambda_i - 1)`` it is half of s in the sense of the ball,
    ``s / (1 + sqrt(1 - k |s|^2))`` (Ungar 2008, Definition 6.83; Shimizu et al. 2021, equation 10). An empty
    bag gives the origin, as torch's mean gives zero.

    Args:
        values: ``(U, D)``, points inside the ball.
        k: Curvature magnitude > 0.
        inverse: Positions in `values`: 1-D with `offsets`, or 2-D with one bag per row.
        offsets: Where each bag starts.
        include_last_offset: Whether the last offset is the number of positions.
        padding: The position of the row that is left out, or None.

    Returns:
        ``(bags, D)``.
    """
    scale = 2.0 / (1.0 - k * values.square().sum(1, keepdim=True))
    sums = bag_rows(
        torch.cat([scale * values, scale - 1.0], 1),
        inverse,
        offsets,
        "sum",
        None,
        include_last_offset,
        padding,
    )
    points, weight = sums[:, :-1], sums[:, -1:]
    ratio = points / torch.where(weight > 0.0, weight, torch.ones_like(weight))
    return ratio / (1.0 + (1.0 - k * ratio.square().sum(1, keepdim=True)).clamp_min(0.0).sqrt())
