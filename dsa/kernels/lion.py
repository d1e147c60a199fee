"""Lion over a batch of records, in one fused pass.

Chen et al. (2023), algorithm 2: a weight moves by the learning rate against the sign of ``beta1 m + (1 -
beta1) g``; then the momentum becomes ``beta2 m + (1 - beta2) g``. Decay is decoupled. Only the rows of a
batch move: the momentum of the others waits, and is not worn away, until they have a gradient again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dsa.kernels.compiled import inlined
from dsa.kernels.layout import Floats
from dsa.kernels.visiting import Scratch, Visit, pass_of, weights_of

__all__ = ["LionConstants", "lion_pass"]


class LionConstants(NamedTuple):
    """What does not depend on the row.

    Args:
        lr: Learning rate.
        beta1: The momentum's share of the direction.
        beta2: Decay of the momentum.
        sign: 1, or -1 to maximize.
        decay: What of the weight is taken away, the learning rate included.
        stamp: The stamp of the new records.
    """

    lr: float
    beta1: float
    beta2: float
    sign: float
    decay: float
    stamp: int


@inlined
def _update(visit: Visit, constants: LionConstants, scratch: Scratch, p: int, slot: int) -> None:
    layout, g = visit.layout, scratch.gradient
    dim = g.shape[0]
    old, new = visit.images[slot].view(np.float32), visit.table[visit.places[p]].view(np.float32)
    old_m, m = old[layout.m : layout.m + dim], new[layout.m : layout.m + dim]
    old_w, w = weights_of(visit, scratch, p, slot)
    _descend(g, old_w, old_m, w, m, constants)


@inlined
def _descend(g: Floats, old_w: Floats, old_m: Floats, w: Floats, m: Floats, constants: LionConstants) -> None:
    beta1, rate1 = np.float32(constants.beta1), np.float32(1.0 - constants.beta1)
    beta2, rate2 = np.float32(constants.beta2), np.float32(1.0 - constants.beta2)
    sign, lr, keep = np.float32(constants.sign), np.float32(constants.lr), np.float32(1.0 - constants.decay)
    for j in range(g.shape[0]):
        gradient = sign * g[j]
        blend = beta1 * old_m[j] + rate1 * gradient
        m[j] = beta2 * old_m[j] + rate2 * gradient
        w[j] = keep * old_w[j] - lr * np.sign(blend)


lion_pass = pass_of(_update)
