"""What an update rule is, Adam or another: a name, the fields of a record, the arithmetic of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from dsa.kernels.visiting import Pass
from dsa.rules.manifolds import Manifold
from dsa.schema import Records, Schema

__all__ = ["AnyRule", "UpdateRule", "label_of", "rule_to_json"]

Options = TypeVar("Options", contravariant=True)


class UpdateRule(Protocol[Options]):
    """How a step changes the records of a batch, and what the fields of its records mean.

    A rule is a value: immutable, hashable, equal to another one that gives stored fields the same meaning. It
    is one of a table for good. What may differ from step to step, such as the learning rate, is in the
    options of a step.

    The first field of a record is the weight ``w``, float32 per element, unless the weights are elsewhere;
    the last is the stamp ``s``, int32 per row, see `dsa.schema.adam_schema`. Between them are the fields of
    the rule, if it has any, in the order of `dsa.kernels.layout.WordLayout`: those of type int32 are counts,
    hence never negative; the others are float32. A table may store some of these, and the weight, as
    bfloat16: a pass hands them to the rule as float32, see `dsa.kernels.packing`. All are 0 in a row that was
    never written, and in one whose weight alone was set, so that 0 has to be where a rule begins.
    """

    @property
    def name(self) -> str:
        """What descriptions of states and checkpoints call it; a released name keeps its meaning for good."""
        ...

    @property
    def choice(self) -> str:
        """The argument by which users choose it, for messages."""
        ...

    @property
    def options(self) -> dict[str, Any]:
        """The options that fix the meaning of stored fields, as JSON; most rules have none."""
        ...

    @property
    def curved(self) -> bool:
        """Whether it works on a ball, and not in flat space only."""
        ...

    @property
    def non_negative(self) -> Mapping[str, str]:
        """The floating-point fields that are never negative, each with what it is in words."""
        ...

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """Return the rule of this name whose `options` are these.

        Raises:
            ValueError: there is none.
        """
        ...

    def schema(self, dim: int, *, weights: bool = True) -> Schema:
        """Return the fields of a record.

        Args:
            dim: Elements of a row.
            weights: Whether the weights are part of the record, or stay with a parameter in memory.
        """
        ...

    def decay_of(self, options: Options) -> float:
        """Return by how much the decay of a table grows in a step, see `dsa.kernels.decay`.

        Args:
            options: Those of the step.

        Returns:
            ``-log(1 - d)``; 0 unless rows make up for the decay of steps that did not touch them.

        Raises:
            ValueError: there is nothing that could be made up for with these options.
        """
        ...

    def pass_for(
        self, options: Options, *, k: float, stamp: int, step: int, decay: float = 0.0
    ) -> tuple[Pass, Any]:
        """Return the arithmetic of a step: a compiled pass over records, and the constants that it needs.

        Args:
            options: Those of this step.
            k: Curvature magnitude of the space; 0 unless the rule is `curved`.
            stamp: What ``s`` becomes; the constants have it by this name.
            step: The table's count of steps, 1 at the first.
            decay: The table's decay before the step, the sum of `decay_of`.

        Returns:
            The pass, see `dsa.kernels.visiting.pass_of`, and its constants.
        """
        ...

    def rescale(self, records: Records, ratio: NDArray[np.float64], old: Manifold, new: Manifold) -> None:
        """Change the fields beside weight, counts and stamp, in place, to go with another curvature.

        Args:
            records: ``(B,)`` of `schema`. Never called for a rule that is not `curved`.
            ratio: ``(B, 1)`` float64: what a tangent vector at the row's weight is multiplied by, see
                `dsa.rules.curvature`.
            old: The space that the fields are of.
            new: The space they are to be of.
        """
        ...


AnyRule = UpdateRule[Any]
"""A rule whose options are not known here: they go from an optimizer through to `UpdateRule.pass_for`."""


def rule_to_json(rule: AnyRule) -> dict[str, Any]:
    """Return what descriptions say of a rule; `dsa.rules.known.rule_from_json` is the inverse."""
    return {"name": rule.name, **rule.options}


def label_of(rule: AnyRule) -> str:
    """Return a rule's name for a message, with the argument that chooses it."""
    return f"{rule.name!r} ({rule.choice})"
