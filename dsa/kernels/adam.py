"""Euclidean Adam over a batch of records, in one fused pass.

The formulas are those of Kingma & Ba (2015, algorithm 1) with the two divisions by the bias corrections
folded into the step size: ``m_hat / (sqrt(v_hat) + eps) = (r / c) m / (sqrt(v) + r eps)`` where ``c = 1 -
beta1^t`` and ``r = sqrt(1 - beta2^t)``. Moving epsilon outside the bracket, ``(r / c) m / (sqrt(v) + eps)``,
is torch SparseAdam's form, so one pass serves both placements.

Arithmetic is float32, as torch's is: the pass is then bound by memory, and a batch of 2,048 x 128 takes about
0.1 ms. The moments move by ``beta x + (1 - beta) new``; the form ``x + (1 - beta) (new - x)`` of torch's
SparseAdam would lose a small square beside a large v when beta2 is 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dsa.kernels.compiled import inlined
from dsa.kernels.constants import StepConstants, corrections, epsilon, step_constants
from dsa.kernels.decay import remaining
from dsa.kernels.layout import Floats
from dsa.kernels.report import StepReport
from dsa.kernels.visiting import Scratch, Visit, pass_of, visit_records, weights_of
from dsa.schema import Records

if TYPE_CHECKING:
    from dsa.rules.conventions import AdamOptions

__all__ = ["CatchUpConstants", "adam_pass", "adam_step", "catch_up_adam_pass", "row_wise_adam_pass"]


class CatchUpConstants(NamedTuple):
    """What does not depend on the row, where rows make up for decay that they have missed.

    Args:
        adam: That of Adam; what is subtracted beside the step is the decay of this step.
        before: The table's decay before this step, as a row stores it.
        after: The table's decay after it.
        stamp: The stamp of the new records.
    """

    adam: StepConstants
    before: float
    after: float
    stamp: int


def adam_step(
    records: Records,
    grad: Floats,
    options: AdamOptions,
    *,
    stamp: int,
    step: int | None = None,
    weights: Floats | None = None,
) -> StepReport:
    """Update `records` in place by one step of Adam in flat space.

    Args:
        records: ``(B,)`` of `dsa.schema.adam_schema`, C-contiguous, written in place. Each
            record's counter grows by one.
        grad: ``(B, D)`` float32, C-contiguous, finite.
        options: `second_moment` ``"row"`` needs a schema with one ``v`` per row; ``"frame"`` equals
            ``"coordinate"`` here.
        stamp: What the records' ``s`` becomes.
        step: The table's step count, 1 at the first step; used when the options ask for bias correction per
            parameter.
        weights: ``(B, D)`` float32, C-contiguous, written in place: the weights of records that have none.

    Returns:
        The report; when ``report.bad >= 0`` the contents of `records` must be thrown away.
    """
    update = row_wise_adam_pass if options.second_moment == "row" else adam_pass
    return visit_records(update, records, grad, step_constants(options, stamp, step), weights)


@inlined
def _update(visit: Visit, constants: StepConstants, scratch: Scratch, p: int, slot: int) -> None:
    layout = visit.layout
    dim = layout.dim
    old, new = visit.images[slot].view(np.float32), visit.table[visit.places[p]].view(np.float32)
    old_m, old_v = old[layout.m : layout.m + dim], old[layout.v : layout.v + dim]
    m, v = new[layout.m : layout.m + dim], new[layout.v : layout.v + dim]
    count = visit.images[slot, layout.t]
    # Two calls, each of which knows its arrays: a batch of short rows takes two thirds of the time.
    if layout.w >= 0:
        old_w, w = old[layout.w : layout.w + dim], new[layout.w : layout.w + dim]
        _descend(scratch.gradient, old_w, old_m, old_v, w, m, v, count, constants)
    else:
        kept, w = weights_of(visit, scratch, p, slot)
        _descend(scratch.gradient, kept, old_m, old_v, w, m, v, count, constants)


@inlined
def _update_caught_up(visit: Visit, constants: CatchUpConstants, scratch: Scratch, p: int, slot: int) -> None:
    """Update a row from the weight that a reader has seen before the step."""
    layout = visit.layout
    dim, owed = layout.dim, layout.t - 1
    old, new = visit.images[slot].view(np.float32), visit.table[visit.places[p]].view(np.float32)
    old_w, w = old[layout.w : layout.w + dim], new[layout.w : layout.w + dim]
    old_m, old_v = old[layout.m : layout.m + dim], old[layout.v : layout.v + dim]
    m, v = new[layout.m : layout.m + dim], new[layout.v : layout.v + dim]
    left, kept = np.float32(remaining(old[owed], constants.before)), scratch.weights
    for j in range(kept.shape[0]):
        kept[j] = left * old_w[j]
    _descend(scratch.gradient, kept, old_m, old_v, w, m, v, visit.images[slot, layout.t], constants.adam)
    new[owed] = np.float32(constants.after)


@inlined
def _descend(
    g: Floats,
    old_w: Floats,
    old_m: Floats,
    old_v: Floats,
    w: Floats,
    m: Floats,
    v: Floats,
    count: int,
    constants: StepConstants,
) -> None:
    beta1, rate1 = np.float32(constants.beta1), np.float32(1.0 - constants.beta1)
    beta2, rate2 = np.float32(constants.beta2), np.float32(1.0 - constants.beta2)
    sign, l2 = np.float32(constants.sign), np.float32(constants.l2)
    keep = np.float32(1.0 - constants.decay)
    first, second = corrections(constants, count)
    size = np.float32(constants.lr * second / first)
    floor = np.float32(epsilon(constants, second))
    for j in range(g.shape[0]):
        gradient = sign * g[j] + l2 * old_w[j]
        moment = beta1 * old_m[j] + rate1 * gradient
        square = beta2 * old_v[j] + rate2 * (gradient * gradient)
        m[j] = moment
        v[j] = square
        w[j] = keep * old_w[j] - size * (moment / (np.sqrt(square) + floor))


@inlined
def _update_row_wise(visit: Visit, constants: StepConstants, scratch: Scratch, p: int, slot: int) -> None:
    layout = visit.layout
    dim = layout.dim
    old, new = visit.images[slot].view(np.float32), visit.table[visit.places[p]].view(np.float32)
    old_m, m = old[layout.m : layout.m + dim], new[layout.m : layout.m + dim]
    old_w, w = weights_of(visit, scratch, p, slot)
    count = visit.images[slot, layout.t]
    new[layout.v] = _descend_row_wise(scratch.gradient, old_w, old_m, old[layout.v], w, m, count, constants)


@inlined
def _descend_row_wise(
    g: Floats,
    old_w: Floats,
    old_m: Floats,
    old_v: float,
    w: Floats,
    m: Floats,
    count: int,
    constants: StepConstants,
) -> float:
    """Update weights and first moments of a row; return its second moment."""
    beta1, rate1 = np.float32(constants.beta1), np.float32(1.0 - constants.beta1)
    sign, l2 = np.float32(constants.sign), np.float32(constants.l2)
    keep = np.float32(1.0 - constants.decay)
    squares = 0.0
    for j in range(g.shape[0]):
        gradient = sign * g[j] + l2 * old_w[j]
        m[j] = beta1 * old_m[j] + rate1 * gradient
        squares += np.float64(gradient) * np.float64(gradient)
    v: float = constants.beta2 * np.float64(old_v)
    v += (1.0 - constants.beta2) * (squares / g.shape[0])
    first, second = corrections(constants, count)
    size = np.float32(constants.lr * second / first / (np.sqrt(v) + epsilon(constants, second)))
    for j in range(g.shape[0]):
        w[j] = keep * old_w[j] - size * m[j]
    return v


adam_pass = pass_of(_update)
catch_up_adam_pass = pass_of(_update_caught_up)
row_wise_adam_pass = pass_of(_update_row_wise)
