"""Adagrad as update rules, per element and per row; the arithmetic is in `dsa.kernels.adagrad`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from dsa.kernels.adagrad import AdagradConstants, adagrad_pass, row_wise_adagrad_pass
from dsa.kernels.visiting import Pass
from dsa.rules.flat import FlatRule, require_rates
from dsa.schema import Field

__all__ = ["ADAGRAD", "ROW_WISE_ADAGRAD", "AdagradOptions"]


@final
@dataclass(frozen=True, slots=True)
class AdagradOptions:
    """Everything an update needs beside the records and the gradient, as `torch.optim.Adagrad` names it.

    Args:
        lr: Learning rate, >= 0 (a scheduler may set 0).
        lr_decay: Step n of the table is taken with ``lr / (1 + (n - 1) * lr_decay)``, >= 0.
        weight_decay: ``weight_decay * w`` is added to the gradient of the rows of a batch, >= 0.
        initial_accumulator_value: What is added to the sum of squares that a record holds, >= 0.
        eps: What is added to the root of the sum, > 0.
        maximize: Ascend instead of descend.

    Raises:
        ValueError: an option is out of range; the message names it.
    """

    lr: float
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    maximize: bool = False

    def __post_init__(self) -> None:
        rates = "lr", "lr_decay", "weight_decay", "initial_accumulator_value"
        require_rates(self, *rates, above_zero=("eps",))


def _constants(options: AdagradOptions, stamp: int, step: int) -> AdagradConstants:
    return AdagradConstants(
        lr=options.lr / (1.0 + (step - 1) * options.lr_decay),
        eps=float(options.eps),
        initial=float(options.initial_accumulator_value),
        sign=-1.0 if options.maximize else 1.0,
        l2=float(options.weight_decay),
        stamp=stamp,
    )


def _per_element(options: AdagradOptions, stamp: int, step: int) -> tuple[Pass, AdagradConstants]:
    return adagrad_pass, _constants(options, stamp, step)


def _per_row(options: AdagradOptions, stamp: int, step: int) -> tuple[Pass, AdagradConstants]:
    return row_wise_adagrad_pass, _constants(options, stamp, step)


ADAGRAD: Final = FlatRule(
    "adagrad",
    "DiskSparseAdagrad, row_wise=False",
    AdagradOptions,
    (Field("h", "float32", "element"),),
    _per_element,
    {"h": "sum of squares"},
)
ROW_WISE_ADAGRAD: Final = FlatRule(
    "row_wise_adagrad",
    "DiskSparseAdagrad, row_wise=True",
    AdagradOptions,
    (Field("h", "float32", "row"),),
    _per_row,
    {"h": "sum of squares"},
)
