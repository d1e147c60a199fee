"""Adam's dialects: where epsilon sits, which counter corrects the bias, and the options of one update.

Adam's update of a weight is ``-lr * m_hat / (sqrt(v_hat) + eps)`` in the paper (Kingma & Ba 2015, algorithm
1), where ``m_hat = m / (1 - beta1^t)`` and ``v_hat = v / (1 - beta2^t)``. Implementations differ in points
that only show for tiny gradients and rare rows: `torch.optim.SparseAdam`, for one, adds epsilon to the
*uncorrected* root ``sqrt(v)`` (the paper's "epsilon hat"), and it keeps one counter for the whole parameter,
so that a row first seen late takes a step of another length. A `Convention` names these points, and there is
a constant for each system whose numbers can be had; the values of ``lr``, ``betas``, ``eps`` and
``weight_decay`` are no part of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, final

__all__ = [
    "DGL_SPARSE_ADAM",
    "DSA_ADAM",
    "FBGEMM_ADAM",
    "FBGEMM_PARTIAL_ROWWISE_ADAM",
    "MONOLITH_ADAM",
    "RECIS_SPARSE_ADAM",
    "RECIS_SPARSE_ADAMW",
    "RECIS_SPARSE_ADAMW_TF",
    "TFA_ADAMW",
    "TFA_LAZY_ADAM",
    "TORCH_ADAM",
    "TORCH_ADAMW",
    "TORCH_SPARSE_ADAM",
    "AdamOptions",
    "BetaPowers",
    "BiasCorrection",
    "Convention",
    "Duplicates",
    "EmptyBatch",
    "EpsPlacement",
    "SecondMoment",
    "VTransport",
    "WeightDecayMode",
]

BetaPowers = Literal["float64", "float32"]
BiasCorrection = Literal["row", "parameter", "global"]
Duplicates = Literal["sum", "mean"]
EmptyBatch = Literal["counts", "skipped"]
EpsPlacement = Literal["corrected", "uncorrected"]
SecondMoment = Literal["coordinate", "frame", "row"]
VTransport = Literal["tensor", "sqrt"]
WeightDecayMode = Literal["l2", "decoupled", "unscaled", "none"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "beta_powers": ("float64", "float32"),
    "bias_correction": ("row", "parameter", "global"),
    "duplicates": ("sum", "mean"),
    "empty_batch": ("counts", "skipped"),
    "eps_placement": ("corrected", "uncorrected"),
    "second_moment": ("coordinate", "frame", "row"),
    "v_transport": ("tensor", "sqrt"),
    "weight_decay_mode": ("l2", "decoupled", "unscaled", "none"),
}

_ONE_IN_FLOAT32 = 1.0 - 2.0**-25


def _check(good: bool, name: str, value: object, wanted: str) -> None:
    if not good:
        raise ValueError(f"{name}={value!r} is out of range: pass {wanted}")


def _check_choices(options: Convention | AdamOptions) -> None:
    for field in fields(options):
        known, value = _CHOICES.get(field.name), getattr(options, field.name)
        if known is not None and value not in known:
            raise ValueError(f"{field.name}={value!r} is not known: use one of {known}")


@final
@dataclass(frozen=True, slots=True)
class Convention:
    """The points in which implementations of Adam differ.

    Another dialect is `dataclasses.replace` of one, or a new one; optimizers show theirs in their ``repr``.

    Args:
        eps_placement: ``"corrected"`` adds epsilon to ``sqrt(v_hat)`` (the paper, `torch.optim.Adam`);
            ``"uncorrected"`` adds it to ``sqrt(v)`` (`torch.optim.SparseAdam`).
        bias_correction: What t is: ``"row"`` counts the updates of each row, ``"parameter"`` the steps of the
            table, ``"global"`` those of the optimizer, whichever tables took part.
        weight_decay_mode: ``"l2"`` adds ``weight_decay * w`` to the gradient; ``"decoupled"`` subtracts ``lr
            * weight_decay * w`` from the weight (AdamW; FBGEMM's decay inside the bracket is the same
            number); ``"unscaled"`` subtracts ``weight_decay * w``, whatever the learning rate (AdamW of
            TensorFlow Addons); ``"none"`` knows no decay, and any but 0 is refused. Whichever it is, only
            rows of the batch decay, unless an optimizer's ``weight_decay_catch_up`` says otherwise.
        second_moment: ``"coordinate"``, ``"frame"`` or ``"row"``, see `AdamOptions`.
        duplicates: What becomes of gradients of one row in a batch: their ``"sum"``, or their ``"mean"`` over
            as many as the optimizer is handed.
        empty_batch: Whether a batch without rows ``"counts"`` as a step of the table or is ``"skipped"``. The
            optimizer's own count goes on either way.
        beta_powers: ``"float64"``: ``beta^t`` is as exact as can be. ``"float32"``: it is the product that a
            float32 number becomes when it is multiplied t times, as systems that store it have it. ``1 -
            0.999^t`` is off by 1.3e-5 of itself at t = 1, a step by 6e-6.

    Raises:
        ValueError: a value is not known; the message names it.

    Example:
        >>> TORCH_SPARSE_ADAM.eps_placement, TORCH_SPARSE_ADAM.bias_correction
        ('uncorrected', 'parameter')
        >>> Convention("corrected", "row") == DSA_ADAM
        True
    """

    eps_placement: EpsPlacement
    bias_correction: BiasCorrection
    weight_decay_mode: WeightDecayMode = "l2"
    second_moment: SecondMoment = "coordinate"
    duplicates: Duplicates = "sum"
    empty_batch: EmptyBatch = "counts"
    beta_powers: BetaPowers = "float64"

    def __post_init__(self) -> None:
        _check_choices(self)


DSA_ADAM = Convention("corrected", "row")
"""That of `DiskSparseRiemannianAdam`, since release 0.3.0 and before."""

TORCH_SPARSE_ADAM = Convention("uncorrected", "parameter", "none")
"""`torch.optim.SparseAdam`."""

TORCH_ADAM = Convention("corrected", "parameter")
"""`torch.optim.Adam`, of the rows of a batch only: others keep their moments and don't move."""

TORCH_ADAMW = Convention("corrected", "parameter", "decoupled")
"""`torch.optim.AdamW`, of the rows of a batch only: others keep their moments, don't move and don't decay."""

RECIS_SPARSE_ADAM = Convention("uncorrected", "parameter", "none")
"""RecIS's ``SparseAdam``, which ignores its ``weight_decay``; by its mathematics it is torch's."""

RECIS_SPARSE_ADAMW = Convention("uncorrected", "parameter", "decoupled", beta_powers="float32")
"""RecIS's ``SparseAdamW``."""

RECIS_SPARSE_ADAMW_TF = Convention("uncorrected", "parameter", "unscaled", beta_powers="float32")
"""RecIS's ``SparseAdamWTF``, whose decay is not scaled by the learning rate."""

TFA_LAZY_ADAM = Convention("uncorrected", "global", "none")
"""``LazyAdam`` of TensorFlow Addons, whose own default is ``eps=1e-7``."""

TFA_ADAMW = Convention("uncorrected", "global", "unscaled")
"""``AdamW`` of TensorFlow Addons with sparse gradients: its decay is not scaled by the learning rate."""

FBGEMM_ADAM = Convention("corrected", "global", "decoupled")
"""``ADAM`` of FBGEMM's table-batched embeddings; with ``bias_correction="row"`` beside it, that of its
``use_rowwise_bias_correction``."""

FBGEMM_PARTIAL_ROWWISE_ADAM = Convention("corrected", "global", "decoupled", second_moment="row")
"""``PARTIAL_ROWWISE_ADAM`` of FBGEMM: one second moment per row, the mean of squares."""

DGL_SPARSE_ADAM = Convention("corrected", "row", "none", duplicates="mean")
"""``dgl.optim.SparseAdam``."""

MONOLITH_ADAM = Convention("uncorrected", "row", "l2", beta_powers="float32")
"""Adam of Monolith, whose own defaults are ``eps=0.01`` and ``beta2=0.99``."""


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
            it to the direction of descent (AdamW, Loshchilov & Hutter 2019, when the space is flat);
            ``"unscaled"`` as well, not multiplied by the learning rate; ``"none"`` refuses any but 0.
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
        beta_powers: See `Convention`.

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
    beta_powers: BetaPowers = "float64"

    def __post_init__(self) -> None:
        _check_choices(self)
        _check(self.lr >= 0.0 and math.isfinite(self.lr), "lr", self.lr, "a finite number >= 0")
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            _check(0.0 <= beta < 1.0, name, beta, "a number in [0, 1)")
            if self.beta_powers == "float32" and beta >= _ONE_IN_FLOAT32:
                raise ValueError(
                    f"{name}={beta!r} is 1 in float32, whose powers beta_powers='float32' asks for: pass a "
                    "smaller one, or a convention with beta_powers='float64'"
                )
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
        if decay > 0.0 and self.weight_decay_mode == "none":
            raise ValueError(
                f"weight_decay={decay!r} would have no effect, as this dialect of Adam has no decay "
                "(weight_decay_mode='none'): leave it 0, or pass weight_decay_mode='l2' or 'decoupled'"
            )
