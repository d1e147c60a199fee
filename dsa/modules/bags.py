"""Bags of rows, reduced to one row each: in flat space as torch does, on a ball to a point of it."""

from __future__ import annotations

from typing import Literal

import torch

from dsa.optimizers.lookup import Lookup
from dsa.optimizers.weight_access import bag_rows

__all__ = ["Mode", "gyromidpoints", "reduced", "require_mode"]

Mode = Literal["sum", "mean", "max"]


def require_mode(mode: object, k: float) -> None:
    """Refuse a reduction that there is not in a space.

    Raises:
        ValueError: always then.
    """
    if mode not in ("sum", "mean", "max"):
        raise ValueError(f"mode={mode!r} is not known: use 'sum', 'mean' or 'max'")
    if k != 0.0 and mode != "mean":
        raise ValueError(f"mode={mode!r} leaves the ball of k={k!r}: use 'mean', its gyromidpoint")


def reduced(
    found: Lookup,
    k: float,
    offsets: torch.Tensor | None,
    mode: Mode,
    per_sample_weights: torch.Tensor | None,
    include_last_offset: bool,
) -> torch.Tensor:
    """Return one row per bag, ``(bags, D)``.

    Args:
        found: The distinct rows, and the positions of all: 1-D with `offsets`, or 2-D with a bag per row.
        k: Curvature magnitude.
        offsets: Where each bag starts.
        mode: How a bag is reduced; on a ball ``"mean"``.
        per_sample_weights: A factor for each id, or None; in flat space.
        include_last_offset: Whether the last offset is the number of ids.

    Raises:
        ValueError: the offsets are no bags of the ids, or a ball lacks what is asked for.
    """
    values, inverse, padding = found
    if k == 0.0:
        return bag_rows(values, inverse, offsets, mode, per_sample_weights, include_last_offset, padding)
    require_mode(mode, k)
    if per_sample_weights is not None:
        raise ValueError("per_sample_weights are for mode='sum', which a ball lacks: leave them out")
    return gyromidpoints(values, k, inverse, offsets, include_last_offset, padding)


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
