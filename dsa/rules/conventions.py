"""Adam's dialects: where epsilon sits, which counter corrects the bias, and the options of one update.

Adam's update of a weight is ``-lr * m_hat / (sqrt(v_hat) + eps)`` in the paper (Kingma & Ba 2015, algorithm
1), where ``m_hat = m / (1 - beta1^t)`` and ``v_hat = v / (1 - beta2^t)``. Implementations differ in two
points that only show for tiny gradients and rare rows: `torch.optim.SparseAdam` adds epsilon to the
*uncorrected* root ``sqrt(v)`` (the paper's "epsilon hat"), and it keeps one counter for the whole parameter,
so that a row first seen late takes a step of another length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

__all__ = [
    "DSA_ADAM",
    "TORCH_SPARSE_ADAM",
    "AdamOptions",
    "BiasCorrection",
    "Convention",
    "EpsPlacement",
    "SecondMoment",
    "VTransport",
    "WeightDecayMode",
]

BiasCorrection = Literal["row", "parameter"]
EpsPlacement = Literal["corrected", "uncorrected"]
SecondMoment = Literal["coordinate", "frame", "row"]
VTransport = Literal["tensor", "sqrt"]
WeightDecayMode = Literal["l2", "decoupled"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "bias_correction": ("row", "parameter"),
    "eps_placement": ("corrected", "uncorrected"),
    "second_moment": ("coordinate", "frame", "row"),
    "v_transport": ("tensor", "sqrt"),
    "weight_decay_mode": ("l2", "decoupled"),
}


def _check(good: bool, name: str, value: object, wanted: str) -> None:
    if not good:
        raise ValueError(f"{name}={value!r} is out of range: pass {wanted}")


def _check_choices(options: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(options, name)
        if value not in _CHOICES[name]:
            raise ValueError(f"{name}={value!r} is not known: use one of {_CHOICES[name]}")


@final
@dataclass(frozen=True, slots=True)
class Convention:
    """The points in which implementations of Adam differ.

    Args:
        eps_placement: ``"corrected"`` adds epsilon to ``sqrt(v_hat)`` (the paper, `torch.optim.Adam`);
            ``"uncorrected"`` adds it to ``sqrt(v)`` (`torch.optim.SparseAdam`).
        bias_correction: ``"row"`` counts the updates of each row; ``"parameter"`` counts the steps of the
            table.

    Example:
        >>> TORCH_SPARSE_ADAM
        Convention(eps_placement='uncorrected', bias_correction='parameter')
    """

    eps_placement: EpsPlacement
    bias_correction: BiasCorrection

    def __post_init__(self) -> None:
        _check_choices(self, ("eps_placement", "bias_correction"))


DSA_ADAM = Convention(eps_placement="corrected", bias_correction="row")
TORCH_SPARSE_ADAM = Convention(eps_placement="uncorrected", bias_correction="parameter")


@final
@dataclass(frozen=True, slots=True)
class AdamOptions:
    """Everything an update needs beside the records and the gradient.

    Args:
        lr: Learning rate, >= 0 (a scheduler may set 0).
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        eps: Floor of the denominator, > 0.
        weight_decay: Decay coefficient, >= 0; applied to the rows of the batch only.
        weight_decay_mode: ``"l2"`` adds ``weight_decay * w`` to the Euclidean gradient; ``"decoupled"`` adds
            it to the direction of descent (AdamW, Loshchilov & Hutter 2019, when the space is flat).
        eps_placement: See `Convention`.
        bias_correction: See `Convention`.
        second_moment: ``"coordinate"``: one number per element, of the Riemannian gradient. ``"frame"``: one
            per element, of the gradient in the orthonormal frame. ``"row"``: one per row; on the ball the
            squared Riemannian norm (a sum over elements), in flat space the mean square, so that the two
            differ by a factor D as k -> 0. In a step of a table its update rule decides.
        v_transport: How the second moment follows a step on the ball: ``"tensor"`` as the diagonal of a
            2-tensor, ``"sqrt"`` with its root treated as a vector (the original reading).
        max_step: Longest step on the ball in hyperbolic units, or None.
        maximize: Ascend instead of descend.

    Raises:
        ValueError: an option is out of range; the message names it.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    weight_decay_mode: WeightDecayMode = "l2"
    eps_placement: EpsPlacement = "corrected"
    bias_correction: BiasCorrection = "row"
    second_moment: SecondMoment = "coordinate"
    v_transport: VTransport = "tensor"
    max_step: float | None = None
    maximize: bool = False

    def __post_init__(self) -> None:
        _check_choices(self, tuple(_CHOICES))
        _check(self.lr >= 0.0 and math.isfinite(self.lr), "lr", self.lr, "a finite number >= 0")
        _check(0.0 <= self.beta1 < 1.0, "beta1", self.beta1, "a number in [0, 1)")
        _check(0.0 <= self.beta2 < 1.0, "beta2", self.beta2, "a number in [0, 1)")
        _check(self.eps > 0.0 and math.isfinite(self.eps), "eps", self.eps, "a finite number > 0")
        decay = self.weight_decay
        _check(decay >= 0.0 and math.isfinite(decay), "weight_decay", decay, "a finite number >= 0")
        limit = self.max_step
        _check(
            limit is None or (limit > 0.0 and math.isfinite(limit)),
            "max_step",
            limit,
            "a finite number > 0, or None",
        )
