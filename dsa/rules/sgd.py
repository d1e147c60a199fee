"""Gradient descent as an update rule without state; the arithmetic is in `dsa.kernels.sgd`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from dsa.kernels.sgd import SGDConstants, sgd_pass
from dsa.kernels.visiting import Pass
from dsa.rules.flat import FlatRule, require_rates

__all__ = ["SGD", "SGDOptions"]


@final
@dataclass(frozen=True, slots=True)
class SGDOptions:
    """Everything an update needs beside the records and the gradient, as `torch.optim.SGD` names it.

    Args:
        lr: Learning rate, >= 0 (a scheduler may set 0).
        weight_decay: ``weight_decay * w`` is added to the gradient of the rows of a batch, >= 0.
        maximize: Ascend instead of descend.

    Raises:
        ValueError: an option is out of range; the message names it.
    """

    lr: float
    weight_decay: float = 0.0
    maximize: bool = False

    def __post_init__(self) -> None:
        require_rates(self, "lr", "weight_decay")


def _pass(options: SGDOptions, stamp: int, step: int) -> tuple[Pass, SGDConstants]:
    sign = -1.0 if options.maximize else 1.0
    return sgd_pass, SGDConstants(float(options.lr), sign, float(options.weight_decay), stamp)


SGD: Final = FlatRule("sgd", "rule='sgd'", SGDOptions, (), _pass)
