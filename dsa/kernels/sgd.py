"""Gradient descent over a batch of records, in one fused pass. A record holds nothing but the weight."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dsa.kernels.compiled import inlined
from dsa.kernels.layout import Floats
from dsa.kernels.visiting import Scratch, Visit, pass_of

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
    layout, g = visit.layout, scratch.gradient
    dim = g.shape[0]
    # Two calls, see `dsa.kernels.adam`.
    if layout.w >= 0:
        old, new = visit.images[slot].view(np.float32), visit.table[visit.places[p]].view(np.float32)
        _descend(g, old[layout.w : layout.w + dim], new[layout.w : layout.w + dim], constants)
    else:
        w = visit.weights[p]
        _descend(g, w, w, constants)


@inlined
def _descend(g: Floats, old_w: Floats, w: Floats, constants: SGDConstants) -> None:
    sign, l2, lr = np.float32(constants.sign), np.float32(constants.l2), np.float32(constants.lr)
    for j in range(g.shape[0]):
        w[j] = old_w[j] - lr * (sign * g[j] + l2 * old_w[j])


sgd_pass = pass_of(_update)
