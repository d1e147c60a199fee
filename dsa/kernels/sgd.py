"""Gradient descent over a batch of records, in one fused pass. A record holds nothing but the weight."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dsa.kernels.compiled import inlined
from dsa.kernels.visiting import Scratch, Visit, pass_of, weights_of

__all__ = ["SGDConstants", "sgd_pass"]


class SGDConstants(NamedTuple):
    """What does not depend on the row.

    Args:
        lr: Learning rate.
        sign: 1, or -1 to maximize.
        l2: What of the weight is added to the gradient.
        stamp: The stamp of the new records.
    """

    lr: float
    sign: float
    l2: float
    stamp: int


@inlined
def _update(visit: Visit, constants: SGDConstants, scratch: Scratch, p: int, slot: int) -> None:
    sign, l2, lr = np.float32(constants.sign), np.float32(constants.l2), np.float32(constants.lr)
    g = scratch.gradient
    old_w, w = weights_of(visit, scratch, p, slot)
    for j in range(g.shape[0]):
        w[j] = old_w[j] - lr * (sign * g[j] + l2 * old_w[j])


sgd_pass = pass_of(_update)
