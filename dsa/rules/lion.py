"""Lion as an update rule with one number per element; the arithmetic is in `dsa.kernels.lion`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from dsa.kernels.lion import LionConstants, lion_pass
from dsa.kernels.visiting import Pass
from dsa.rules.flat import FlatRule, require_rates
from dsa.schema import Field

__all__ = ["LION", "LionOptions"]


@final
@dataclass(frozen=True, slots=True)
class LionOptions:
    """Everything an update needs beside the records and the gradient.

    Args:
        lr: Learning rate, >= 0: the length of every step of every element.
        beta1: The momentum's share of the direction, in [0, 1).
        beta2: Decay of the momentum, in [0, 1).
        weight_decay: Decay coefficient, >= 0: a row of the batch is scaled by ``1 - lr * weight_decay``.
        maximize: Ascend instead of descend.

    Raises:
        ValueError: an option is out of range; the message names it.
    """

    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    maximize: bool = False

    def __post_init__(self) -> None:
        require_rates(self, "lr", "weight_decay")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name}={value!r} is out of range: pass a number in [0, 1)")


def _pass(options: LionOptions, stamp: int, step: int) -> tuple[Pass, LionConstants]:
    return lion_pass, LionConstants(
        lr=float(options.lr),
        beta1=float(options.beta1),
        beta2=float(options.beta2),
        sign=-1.0 if options.maximize else 1.0,
        decay=float(options.lr * options.weight_decay),
        stamp=stamp,
    )


LION: Final = FlatRule("lion", "rule='lion'", LionOptions, (Field("m", "float32", "element"),), _pass)
