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

from typing import TYPE_CHECKING

import numpy as np

from dsa.kernels.checks import all_finite, count_update, is_finite, is_updatable
from dsa.kernels.compiled import compiled
from dsa.kernels.constants import StepConstants, corrections, epsilon, step_constants
from dsa.kernels.layout import Floats, WordLayout, Words, as_words, word_layout
from dsa.kernels.report import StepReport
from dsa.schema import Records, Rows

if TYPE_CHECKING:
    from dsa.rules.conventions import AdamOptions

__all__ = ["adam_step"]


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
    words, floats = as_words(records)
    layout = word_layout(records.dtype)
    constants = step_constants(options, stamp, step)
    kernel = _row_wise_rows if options.second_moment == "row" else _element_wise_rows
    w, w_start = (floats, layout.w) if weights is None else (weights, 0)
    return StepReport(
        int(kernel(words, floats, w, w_start, grad, np.arange(len(records)), layout, constants))
    )


# The rows to update come as positions although they are consecutive: with an affine row index LLVM hoists its
# aliasing checks out of the loop over rows, where the fields' address ranges interleave; the checks then fail
# and the scalar code runs, nine times slower.


@compiled
def _element_wise_rows(
    words: Words,
    floats: Floats,
    weights: Floats,
    w_start: int,
    grad: Floats,
    positions: Rows,
    layout: WordLayout,
    constants: StepConstants,
) -> int:
    beta1, rate1 = np.float32(constants.beta1), np.float32(1.0 - constants.beta1)
    beta2, rate2 = np.float32(constants.beta2), np.float32(1.0 - constants.beta2)
    sign, l2 = np.float32(constants.sign), np.float32(constants.l2)
    keep = np.float32(1.0 - constants.decay)
    for i in positions:
        if not is_updatable(words, i, layout):
            return int(i)
        first, second = corrections(constants, words[i, layout.t])
        size = np.float32(constants.lr * second / first)
        floor = np.float32(epsilon(constants, second))
        w = weights[i, w_start : w_start + layout.dim]
        m = floats[i, layout.m : layout.m + layout.dim]
        v = floats[i, layout.v : layout.v + layout.dim]
        g = grad[i]
        for j in range(layout.dim):
            gradient = sign * g[j] + l2 * w[j]
            m[j] = beta1 * m[j] + rate1 * gradient
            v[j] = beta2 * v[j] + rate2 * (gradient * gradient)
            w[j] = keep * w[j] - size * (m[j] / (np.sqrt(v[j]) + floor))
        count_update(words, i, layout, constants.stamp)
        if not is_finite(words, i, layout) or (layout.w < 0 and not all_finite(w.view(np.int32))):
            return int(i)
    return -1


@compiled
def _row_wise_rows(
    words: Words,
    floats: Floats,
    weights: Floats,
    w_start: int,
    grad: Floats,
    positions: Rows,
    layout: WordLayout,
    constants: StepConstants,
) -> int:
    beta1, rate1 = np.float32(constants.beta1), np.float32(1.0 - constants.beta1)
    sign, l2 = np.float32(constants.sign), np.float32(constants.l2)
    keep = np.float32(1.0 - constants.decay)
    for i in positions:
        if not is_updatable(words, i, layout):
            return int(i)
        w = weights[i, w_start : w_start + layout.dim]
        m = floats[i, layout.m : layout.m + layout.dim]
        g = grad[i]
        squares = 0.0
        for j in range(layout.dim):
            gradient = sign * g[j] + l2 * w[j]
            m[j] = beta1 * m[j] + rate1 * gradient
            squares += np.float64(gradient) * np.float64(gradient)
        v = constants.beta2 * np.float64(floats[i, layout.v])
        v += (1.0 - constants.beta2) * (squares / layout.dim)
        floats[i, layout.v] = v
        first, second = corrections(constants, words[i, layout.t])
        size = np.float32(constants.lr * second / first / (np.sqrt(v) + epsilon(constants, second)))
        for j in range(layout.dim):
            w[j] = keep * w[j] - size * m[j]
        count_update(words, i, layout, constants.stamp)
        if not is_finite(words, i, layout) or (layout.w < 0 and not all_finite(w.view(np.int32))):
            return int(i)
    return -1
