"""Adam as update rules, one for each meaning of the second moment; the arithmetic is in `dsa.kernels`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal, final

import numpy as np
from numpy.typing import NDArray

from dsa.kernels.adam import CatchUpConstants, adam_pass, catch_up_adam_pass, row_wise_adam_pass
from dsa.kernels.constants import step_constants
from dsa.kernels.decay import rounded
from dsa.kernels.poincare import ball_constants, ball_pass, row_wise_ball_pass
from dsa.kernels.visiting import Pass
from dsa.rules.conventions import AdamOptions, SecondMoment
from dsa.rules.manifolds import Manifold
from dsa.schema import DECAY, Records, Schema, adam_schema, read_numbers, store_numbers

__all__ = [
    "ADAM",
    "ALIKE",
    "CATCH_UP_ADAM",
    "FRAME_ADAM",
    "ROW_WISE_ADAM",
    "AdamRule",
    "adam_rule",
    "usual_rule",
]

Doubles = NDArray[np.float64]
_NON_NEGATIVE: Final[Mapping[str, str]] = MappingProxyType({"v": "second moment"})
_NON_NEGATIVE_CATCH_UP: Final[Mapping[str, str]] = MappingProxyType({"v": "second moment", DECAY: "decay"})


@final
@dataclass(frozen=True, slots=True)
class AdamRule:
    """Adam, in flat space and on a ball; see `dsa.rules.updates.UpdateRule`.

    With `catches_up`, in flat space alone: a row that is touched or read has decayed by all that it has
    missed since it was written last, see `dsa.kernels.decay`.

    Args:
        name: Its name.
        second_moment: The meaning of ``v``, see `AdamOptions`.
        catches_up: Whether rows make up for decay that they have missed.

    Example:
        >>> ADAM.schema(dim=2).names, ROW_WISE_ADAM.choice
        (('w', 'm', 'v', 't', 's'), "second_moment='row'")
    """

    name: str
    second_moment: SecondMoment
    catches_up: bool = False

    @property
    def choice(self) -> str:
        """The argument that chooses it."""
        if self.catches_up:
            return "weight_decay_catch_up=True"
        return f"second_moment={self.second_moment!r}"

    @property
    def options(self) -> dict[str, Any]:
        """None: the name says it all."""
        return {}

    @property
    def curved(self) -> bool:
        """Whether it does not catch up: on a ball decay is not a factor of the weight."""
        return not self.catches_up

    @property
    def non_negative(self) -> Mapping[str, str]:
        """``v``, the second moment, and the decay of rows that make up for it."""
        return _NON_NEGATIVE_CATCH_UP if self.catches_up else _NON_NEGATIVE

    def with_options(self, options: Mapping[str, Any]) -> AdamRule:
        """Return the rule itself.

        Raises:
            ValueError: there are options.
        """
        if options:
            raise ValueError(
                f"the update rule {self.name!r} has no options {sorted(options)}: restore the description "
                "from a copy"
            )
        return self

    def schema(self, dim: int, *, weights: bool = True) -> Schema:
        """Return the fields of a record, ``w m v t s``; see `dsa.schema.adam_schema`."""
        per: Literal["row", "element"] = "row" if self.second_moment == "row" else "element"
        return adam_schema(dim, second_moment_per=per, weights=weights, decay=self.catches_up)

    def decay_of(self, options: AdamOptions) -> float:
        """Return the logarithm of what a step takes of a weight, where that is made up for.

        Raises:
            ValueError: decay goes through the moments, or takes a weight as a whole.
        """
        if not self.catches_up:
            return 0.0
        mode, rate = options.weight_decay_mode, options.weight_decay
        if mode not in ("decoupled", "unscaled"):
            raise ValueError(
                f"weight_decay_mode={mode!r} is no decay that a row could make up for, which has to be a "
                "factor of its weight beside the gradient: pass weight_decay_mode='decoupled', or leave "
                "weight_decay_catch_up out"
            )
        share = rate if mode == "unscaled" else options.lr * rate
        if share >= 1.0:
            raise ValueError(
                f"weight_decay={rate!r} with lr={options.lr!r} takes {share!r} of a weight in a step, "
                "so that nothing is left of it: lower weight_decay or lr"
            )
        return -math.log1p(-share)

    def pass_for(
        self, options: AdamOptions, *, k: float, stamp: int, step: int, decay: float = 0.0
    ) -> tuple[Pass, Any]:
        """Return the pass of one step; whatever second moment the options name, it is the rule's."""
        if options.second_moment != self.second_moment:
            options = replace(options, second_moment=self.second_moment)
        if self.catches_up:
            before, after = rounded(decay), rounded(decay + self.decay_of(options))
            constants = step_constants(options, stamp, step)._replace(decay=-math.expm1(before - after))
            return catch_up_adam_pass, CatchUpConstants(constants, before, after, stamp)
        row_wise = self.second_moment == "row"
        if k == 0.0:
            return row_wise_adam_pass if row_wise else adam_pass, step_constants(options, stamp, step)
        return row_wise_ball_pass if row_wise else ball_pass, ball_constants(options, k, stamp, step)

    def rescale(self, records: Records, ratio: Doubles, old: Manifold, new: Manifold) -> None:
        """Multiply the moments: the first by the ratio, the second by the power of it that its mode holds."""
        m, v = read_numbers(records, "m"), read_numbers(records, "v").astype(np.float64)
        dim = m.shape[1]
        store_numbers(records, "m", m * ratio)
        store_numbers(records, "v", _rescaled(v, ratio, old, new, self.second_moment, dim))


def _rescaled(v: Doubles, ratio: Doubles, old: Manifold, new: Manifold, mode: str, dim: int) -> Doubles:
    if mode == "frame":
        return v * ratio
    if mode == "coordinate":
        return v * ratio * ratio
    # One number per row: a sum over the elements on the ball, their mean in flat space.
    mean_to_sum = (dim if old.k == 0.0 else 1.0) / (dim if new.k == 0.0 else 1.0)
    return v * ratio[:, 0] * mean_to_sum


ADAM: Final = AdamRule("adam", "coordinate")
FRAME_ADAM: Final = AdamRule("frame_adam", "frame")
ROW_WISE_ADAM: Final = AdamRule("row_wise_adam", "row")
CATCH_UP_ADAM: Final = AdamRule("catch_up_adam", "coordinate", catches_up=True)
_BY_SECOND_MOMENT: Final = (ADAM, FRAME_ADAM, ROW_WISE_ADAM)

ALIKE: Final = (ADAM, FRAME_ADAM)
"""Rules of the same fields, and in flat space of the same arithmetic."""


def usual_rule(k: float) -> AdamRule:
    """Return the rule of a table whose second moment nobody has chosen.

    On a ball its steps have the same hyperbolic length wherever a row is.

    Example:
        >>> usual_rule(0.0).name, usual_rule(1.0).name
        ('adam', 'frame_adam')
    """
    return FRAME_ADAM if k > 0.0 else ADAM


def adam_rule(second_moment: str, catch_up: bool = False) -> AdamRule:
    """Return the rule that the arguments ``second_moment`` and ``weight_decay_catch_up`` choose.

    Raises:
        ValueError: there is none.

    Example:
        >>> adam_rule("row").name
        'row_wise_adam'
    """
    if catch_up and second_moment != "coordinate":
        raise ValueError(
            f"weight_decay_catch_up=True does not go with second_moment={second_moment!r}: leave one of them "
            "out"
        )
    if catch_up:
        return CATCH_UP_ADAM
    for rule in _BY_SECOND_MOMENT:
        if rule.second_moment == second_moment:
            return rule
    known = tuple(rule.second_moment for rule in _BY_SECOND_MOMENT)
    raise ValueError(f"second_moment={second_moment!r} is not known: use one of {known}")
