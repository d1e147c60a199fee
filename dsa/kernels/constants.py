"""The numbers of one step in the form that kernels take, and Adam's bias corrections.

``1 - beta^t`` is looked up for small counters and computed for large ones. A table avoids integer powers,
which numba's fast arithmetic compiles to a null function pointer, and two transcendental functions per row.

What dialects of Adam differ in is settled here, before the rows: the passes know no dialect.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsa.kernels.compiled import inlined

if TYPE_CHECKING:
    from dsa.rules.conventions import AdamOptions, BetaPowers

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
        decay: What of the weight is subtracted beside the step.
        stamp: The stamp of the new records.
        shared: The counter of all rows, or 0 to use each row's own.
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
        stamp: The stamp of the new records: one more than the number of the optimizer's step, which is used
            when the options ask for a global bias correction.
        step: The table's step count, used when the options ask for bias correction per parameter.
    """
    l2 = options.weight_decay if options.weight_decay_mode == "l2" else 0.0
    decay_rate = 1.0 if options.weight_decay_mode == "unscaled" else options.lr
    shared = {"row": 0, "parameter": step or 0, "global": stamp - 1}
    powers = options.beta_powers
    return StepConstants(
        lr=float(options.lr),
        beta1=float(options.beta1),
        beta2=float(options.beta2),
        eps=float(options.eps),
        corrected=options.eps_placement == "corrected",
        sign=-1.0 if options.maximize else 1.0,
        l2=float(l2),
        decay=float(decay_rate * (options.weight_decay - l2)),
        stamp=stamp,
        shared=shared[options.bias_correction],
        first=_complements(options.beta1, powers),
        second=_roots(options.beta2, powers),
        log_beta1=_log(options.beta1),
        log_beta2=_log(options.beta2),
    )


@inlined
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


@inlined
def epsilon(constants: StepConstants, second: float) -> float:
    """Return what is added to ``sqrt(v)``: see `dsa.kernels.adam` on the two placements."""
    return constants.eps * second if constants.corrected else constants.eps


@lru_cache(maxsize=16)
def _complements(beta: float, powers: BetaPowers) -> NDArray[np.float64]:
    """Return ``1 - beta^t`` by t, up to where it is exactly 1 or the closed form takes over."""
    # Past this counter the power is below half an ulp of 1 and the complement is exactly 1.
    saturated = 2 if beta == 0.0 else math.ceil(-38.0 / _log(beta)) + 1
    longest = min(saturated, _LONGEST)
    table = _exact(beta, longest) if powers == "float64" else _from_products(beta, longest)
    table.flags.writeable = False
    return table


def _exact(beta: float, longest: int) -> NDArray[np.float64]:
    counters = np.arange(longest + 1, dtype=np.float64)
    counters[0] = 1.0
    return np.asarray(-np.expm1(counters * _log(beta)))


def _from_products(beta: float, longest: int) -> NDArray[np.float64]:
    """Return what a float32 number that is multiplied by beta in each step leaves of 1."""
    products = np.multiply.accumulate(np.full(longest, beta, np.float32))
    return np.asarray(1.0 - np.concatenate([products[:1], products]).astype(np.float64))


@lru_cache(maxsize=16)
def _roots(beta: float, powers: BetaPowers) -> NDArray[np.float64]:
    table = np.sqrt(_complements(beta, powers))
    table.flags.writeable = False
    return table


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0.0 else -math.inf
