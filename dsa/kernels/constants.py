"""The numbers of one step in the form that kernels take, and Adam's bias corrections.

``1 - beta^t`` is looked up for small counters and computed for large ones. A table avoids integer powers,
which numba's fast arithmetic compiles to a null function pointer, and two transcendental functions per row.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsa.kernels.compiled import compiled

if TYPE_CHECKING:
    from dsa.rules.conventions import AdamOptions

__all__ = ["StepConstants", "corrections", "epsilon", "step_constants"]

_LONGEST: Final = 1 << 16


class StepConstants(NamedTuple):
    """What does not depend on the row.

    Args:
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Floor of the denominator.
        corrected: Whether eps is added to the corrected root.
        sign: 1, or -1 to maximize.
        l2: What of the weight is added to the gradient.
        decay: What of the weight is added to the descent, times the learning rate.
        stamp: The stamp of the new records.
        shared: The counter of the whole table, or 0 to use each row's own.
        first: ``first[t] = 1 - beta1^t``.
        second: ``second[t] = sqrt(1 - beta2^t)``.
        log_beta1: ``log(beta1)``.
        log_beta2: ``log(beta2)``.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    corrected: bool
    sign: float
    l2: float
    decay: float
    stamp: int
    shared: int
    first: NDArray[np.float64]
    second: NDArray[np.float64]
    log_beta1: float
    log_beta2: float


def step_constants(options: AdamOptions, stamp: int, step: int | None) -> StepConstants:
    """Return the constants of one step.

    Args:
        options: The options of the step.
        stamp: The stamp of the new records.
        step: The table's step count, used when the options ask for bias correction per parameter.
    """
    l2 = options.weight_decay if options.weight_decay_mode == "l2" else 0.0
    return StepConstants(
        lr=float(options.lr),
        beta1=float(options.beta1),
        beta2=float(options.beta2),
        eps=float(options.eps),
        corrected=options.eps_placement == "corrected",
        sign=-1.0 if options.maximize else 1.0,
        l2=float(l2),
        decay=float(options.lr * (options.weight_decay - l2)),
        stamp=stamp,
        shared=step if step is not None and options.bias_correction == "parameter" else 0,
        first=_complements(options.beta1),
        second=_roots(options.beta2),
        log_beta1=_log(options.beta1),
        log_beta2=_log(options.beta2),
    )


@compiled(_nrt=False)
def corrections(constants: StepConstants, t: int) -> tuple[float, float]:
    """Return ``1 - beta1^t`` and ``sqrt(1 - beta2^t)`` of a row that has been updated `t` times before."""
    count = constants.shared if constants.shared > 0 else t + 1
    first = second = 1.0
    if count < constants.first.shape[0]:
        first = constants.first[count]
    else:
        first = -math.expm1(count * constants.log_beta1)
    if count < constants.second.shape[0]:
        second = constants.second[count]
    else:
        second = math.sqrt(-math.expm1(count * constants.log_beta2))
    return first, second


@compiled(_nrt=False)
def epsilon(constants: StepConstants, second: float) -> float:
    """Return what is added to ``sqrt(v)``: see `dsa.kernels.adam` on the two placements."""
    return constants.eps * second if constants.corrected else constants.eps


@lru_cache(maxsize=16)
def _complements(beta: float) -> NDArray[np.float64]:
    # Past this counter the power is below half an ulp of 1 and the complement is exactly 1.
    saturated = 2 if beta == 0.0 else math.ceil(-38.0 / _log(beta)) + 1
    counters = np.arange(min(saturated, _LONGEST) + 1, dtype=np.float64)
    counters[0] = 1.0
    table = -np.expm1(counters * _log(beta))
    table.flags.writeable = False
    return table


@lru_cache(maxsize=16)
def _roots(beta: float) -> NDArray[np.float64]:
    table = np.sqrt(_complements(beta))
    table.flags.writeable = False
    return table


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0.0 else -math.inf
