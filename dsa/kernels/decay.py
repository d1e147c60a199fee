"""Decay that rows have missed while they were in no batch, made up for in one factor.

Where each step multiplies every weight by ``1 - d_i``, as AdamW does in dense tables (Loshchilov & Hutter
2019, "Decoupled weight decay regularization", algorithm 2: ``d_i = lr_i * weight_decay``), a weight that no
gradient reached from step a to step b is ``prod (1 - d_i)`` of what it was. The product needs no history of
the steps::

    L_n = -sum_{i <= n} log(1 - d_i)        prod_{a < i <= b} (1 - d_i) = exp(-(L_b - L_a))

A table keeps L, in float64; a row what L was when its weight was written, rounded to float32. Factors are
made of rounded numbers alone, so that they telescope whenever a row is touched: whatever the steps, a row is
off by half a unit in the last place of float32(L), 5e-7 of itself below L = 16, where a millionth is left.
"""

from __future__ import annotations

import math

import numpy as np

from dsa.kernels.compiled import compiled, inlined
from dsa.kernels.layout import Floats
from dsa.schema import DECAY, Records, catches_up, read_numbers, store_numbers

__all__ = ["catch_up", "caught_up", "remaining", "rounded"]


def rounded(decay: float) -> float:
    """Return the decay of a table as a row stores it, a number of float32."""
    return float(np.float32(decay))


@inlined
def remaining(since: float, until: float) -> float:
    """Return what is left of a weight.

    Args:
        since: What its row stores.
        until: What a row that is written now would store. Less than `since` only for who looks at a table
            without knowing its last steps; then nothing is missed.
    """
    ahead = np.float64(since) - np.float64(until)
    if 0.0 <= ahead < np.inf:
        return 1.0
    return math.exp(ahead)  # not finite where `since` is not, so that the weight tells


@compiled(_nrt=False)
def _catch_up(weights: Floats, since: Floats, until: float) -> None:
    for i in range(weights.shape[0]):
        left = np.float32(remaining(since[i], until))
        for j in range(weights.shape[1]):
            weights[i, j] = left * weights[i, j]


def catch_up(weights: Floats, since: Floats, decay: float) -> None:
    """Let weights decay by what they have missed, in place.

    Args:
        weights: ``(B, D)`` float32.
        since: ``(B,)`` float32, what their rows store.
        decay: The table's.
    """
    _catch_up(weights, since, rounded(decay))


def caught_up(records: Records, decay: float) -> Records:
    """Return records whose weights have decayed by what they have missed: copies, where there is any.

    Args:
        records: ``(B,)`` of any schema.
        decay: The table's.
    """
    if not catches_up(records.dtype):
        return records
    made = records.copy()
    weights = np.array(read_numbers(made, "w"), np.float32)
    catch_up(weights, np.ascontiguousarray(made[DECAY]), decay)
    store_numbers(made, "w", weights)
    made[DECAY] = rounded(decay)
    return made
