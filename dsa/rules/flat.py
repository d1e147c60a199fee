"""Update rules for flat space as data: the fields that they keep, and the pass that changes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from dsa.kernels.visiting import Pass
from dsa.rules.manifolds import Manifold
from dsa.schema import Field, Records, Schema

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["FlatRule", "require_rates"]

Options = TypeVar("Options", bound="DataclassInstance")


@final
@dataclass(frozen=True, slots=True)
class FlatRule(Generic[Options]):
    """A rule without options of its own that works in flat space; see `dsa.rules.updates.UpdateRule`.

    Args:
        name: Its name.
        choice: The argument by which users choose it.
        kind: The options of a step: a dataclass of numbers and truth values.
        fields: What it keeps of a row beside weight and stamp, in the order that its pass demands.
        arithmetic: Gives the pass and its constants for the options of a step, the stamp of the new records
            and the table's count of steps.
        non_negative: See `dsa.rules.updates.UpdateRule`.
    """

    name: str
    choice: str
    kind: type[Options]
    fields: tuple[Field, ...]
    arithmetic: Callable[[Options, int, int], tuple[Pass, Any]]
    non_negative: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def options(self) -> dict[str, Any]:
        """None: the name says it all."""
        return {}

    @property
    def curved(self) -> bool:
        """False."""
        return False

    def with_options(self, options: Mapping[str, Any]) -> FlatRule[Options]:
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
        """Return the fields of a record: the weight, those of the rule, the stamp."""
        weight = (Field("w", "float32", "element"),) if weights else ()
        return Schema(dim, (*weight, *self.fields, Field("s", "int32", "row")))

    def decay_of(self, options: Options) -> float:
        """Return 0: rows decay in their own steps, if at all."""
        return 0.0

    def pass_for(
        self, options: Options, *, k: float, stamp: int, step: int, decay: float = 0.0
    ) -> tuple[Pass, Any]:
        """Return the pass of one step and its constants."""
        assert k == 0.0, "see `dsa.state.facts.TableFacts`"
        return self.arithmetic(options, stamp, step)

    def rescale(self, records: Records, ratio: NDArray[np.float64], old: Manifold, new: Manifold) -> None:
        """Leave everything as it is: both spaces are flat."""
        assert old.k == new.k == 0.0, "see `dsa.state.facts.TableFacts`"


def require_rates(options: object, *names: str, above_zero: tuple[str, ...] = ()) -> None:
    """Check the numbers among the options of a step.

    Args:
        options: With attributes of these names.
        names: Those that are finite and >= 0.
        above_zero: Those that are finite and > 0.

    Raises:
        ValueError: one is out of range; the message names it.
    """
    for name in (*names, *above_zero):
        value, least = getattr(options, name), "> 0" if name in above_zero else ">= 0"
        if not math.isfinite(value) or value < 0.0 or (name in above_zero and value == 0.0):
            raise ValueError(f"{name}={value!r} is out of range: pass a finite number {least}")
