"""Adagrad over a batch of records, in one fused pass.

Duchi, Hazan and Singer (2011): the squares of an element's gradients are summed for good, and its steps are
divided by the root of the sum. Row-wise, one sum serves the elements of a row: that of the mean squares of
its gradients, as PyTorch-BigGraph, DGL-KE and FBGEMM keep it. Epsilon is outside the root.

A record holds the squares of the gradients alone. What the sums begin with is added where they are used, so
that a row that was never written needs no attention.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dsa.kernels.compiled import inlined
from dsa.kernels.layout import Floats
from dsa.kernels.visiting import Scratch, Visit, pass_of, weights_of

__all__ = ["AdagradConstants", "adagrad_pass", "row_wise_adagrad_pass"]


class AdagradConstants(NamedTuple):
    """What does not depend on the row.

    Args:
        lr: Learning rate of this step, its decay included.
        eps: What is added to the root.
        initial: What the sums begin with.
        sign: 1, or -1 to maximize.
        l2: What of the weight is added to the gradient.
        stamp: The stamp of the new records.
    """

    lr: float
    eps: float
    initial: float
    sign: float
    l2: float
    stamp: int


@inlined
def _update(visit: Visit, constants: AdagradConstants, scratch: Scratch, p: int, slot: int) -> None:
    layout, g = visit.layout, scratch.gradient
    dim = g.shape[0]
    old, new = visit.images[slot].view(np.float32), visit.table[visit.places[p]].view(np.float32)
    old_h, h = old[layout.v : layout.v + dim], new[layout.v : layout.v + dim]
    old_w, w = weights_of(visit, scratch, p, slot)
    _descend(g, old_w, old_h, w, h, constants)


@inlined
def _descend(
    g: Floats, old_w: Floats, old_h: Floats, w: Floats, h: Floats, constants: AdagradConstants
) -> None:
    sign, l2 = np.float32(constants.sign), np.float32(constants.l2)
    lr, eps = np.float32(constants.lr), np.float32(constants.eps)
    initial = np.float32(constants.initial)
    for j in range(g.shape[0]):
        gradient = sign * g[j] + l2 * old_w[j]
        total = old_h[j] + gradient * gradient
        h[j] = total
        w[j] = old_w[j] - lr * (gradient / (np.sqrt(initial + total) + eps))


@inlined
def _update_row_wise(visit: Visit, constants: AdagradConstants, scratch: Scratch, p: int, slot: int) -> None:
    h = visit.layout.v
    old, new = visit.images[slot].view(np.float32), visit.table[visit.places[p]].view(np.float32)
    old_w, w = weights_of(visit, scratch, p, slot)
    new[h] = _descend_row_wise(scratch.gradient, old_w, old[h], w, constants)


@inlined
def _descend_row_wise(
    g: Floats, old_w: Floats, old_h: float, w: Floats, constants: AdagradConstants
) -> float:
    """Update the weights of a row; return its sum."""
    sign, l2 = np.float32(constants.sign), np.float32(constants.l2)
    squares = 0.0
    for j in range(g.shape[0]):
        gradient = sign * g[j] + l2 * old_w[j]
        squares += np.float64(gradient) * np.float64(gradient)
    total: float = np.float64(old_h) + squares / g.shape[0]
    size = np.float32(constants.lr / (np.sqrt(constants.initial + total) + constants.eps))
    for j in range(g.shape[0]):
        w[j] = old_w[j] - size * (sign * g[j] + l2 * old_w[j])
    return total


adagrad_pass = pass_of(_update)
row_wise_adagrad_pass = pass_of(_update_row_wise)
