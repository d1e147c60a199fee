"""Which table belongs to which parameter of an optimizer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch

from dsa.optimizers.arguments import StateDtype, agree_on_dtypes, agree_on_rule
from dsa.optimizers.disk_parameter import DiskParameter
from dsa.optimizers.resident import ParameterWeights, require_writable, row_elements
from dsa.rules.adam import ALIKE, usual_rule
from dsa.rules.conventions import Convention
from dsa.rules.init import Zeros
from dsa.rules.updates import AnyRule
from dsa.state.sharing import check_choice, check_resume, join_tables
from dsa.state.state_directory import StateDirectory
from dsa.state.storage import StorageChoice, TableSpec, table_spec
from dsa.state.table import Table

__all__ = ["Registry", "require_ball", "require_countable", "settled_rule"]


@final
@dataclass(frozen=True, slots=True)
class Registry:
    """Finds or makes the tables of parameters, with the options of one optimizer.

    Args:
        directory: The state directory, or None for that of the tables on disk.
        resume: See `dsa.state.opening.open_directory`.
        choice: Storage options.
        rule: The update rule of the tables.
        state_dtype: How their fields are stored.
        rule_given: Whether the rule was chosen; otherwise tables of modules have theirs, see `settled_rule`.
        positional: Names of tables whose parameters came without one: their places stand for names.
    """

    directory: str | os.PathLike[str] | None
    resume: bool | None
    choice: StorageChoice
    rule: AnyRule
    state_dtype: StateDtype | None = None
    rule_given: bool = True
    positional: set[str] = field(default_factory=set)

    def tables(
        self, groups: Sequence[dict[str, Any]], known: Mapping[torch.Tensor, Table], user: object
    ) -> tuple[StateDirectory, dict[torch.Tensor, Table]]:
        """Return the state and the table of each parameter, in the order of the groups.

        Without names a parameter's place among all of them names its table.

        Args:
            groups: The parameter groups.
            known: Parameters that have a table already.
            user: Who uses the tables that are made.

        Raises:
            ValueError: tables lie in different directories, an option differs from what a directory was
                opened with, or an ordinary parameter has no place.
            StateError: as for `dsa.state.opening.open_directory`.
        """
        places = [
            (parameter, names[index] if (names := group.get("param_names")) is not None else None)
            for group in groups
            for index, parameter in enumerate(group["params"])
        ]
        state = self._shared_state([parameter for parameter, _ in places])
        specs = {
            parameter: self._spec(parameter, f"param_{place}" if name is None else name)
            for place, (parameter, name) in enumerate(places)
            if parameter not in known and not isinstance(parameter, DiskParameter)
        }
        self.positional.update(
            specs[parameter].name for parameter, name in places if name is None and parameter in specs
        )
        made: dict[torch.Tensor, Table] = {}
        for parameter, spec in specs.items():
            require_writable(parameter, spec.name)  # before a file is made
        if specs or state is None:
            where = self._place(state, specs)
            state, tables = join_tables(where, list(specs.values()), user, self.resume, self.choice)
            made = dict(zip(specs, tables, strict=True))
            for parameter, table in made.items():
                _hold(table, parameter)
        found = {**known, **made}
        return state, {
            each: each.table if isinstance(each, DiskParameter) else found[each] for each, _ in places
        }

    def _shared_state(self, parameters: Sequence[torch.Tensor]) -> StateDirectory | None:
        state: StateDirectory | None = None
        for parameter in parameters:
            if not isinstance(parameter, DiskParameter):
                continue
            own = parameter.state
            if state is not None and own is not state:
                raise ValueError(
                    f"{parameter!r} lies in another directory than {str(state.path)!r}: make all modules of "
                    "one optimizer with the same state_dir, so that a step is one transaction"
                )
            if state is None:
                self._require_same(own)
            agree_on_dtypes(parameter.table, self.state_dtype)
            rule = self.rule if self.rule_given else settled_rule(parameter.table, self.rule)
            agree_on_rule(own, parameter.table, rule)
            state = own
        return state

    def _require_same(self, state: StateDirectory) -> None:
        given = self.directory
        if given is not None and os.path.realpath(given) != os.path.realpath(state.path):
            raise ValueError(
                f"state_dir={str(given)!r} is not {str(state.path)!r}, where the disk embeddings are: pass "
                "the same directory"
            )
        check_choice(state, self.choice)
        if self.resume is not None:
            check_resume(state, self.resume)

    def _place(
        self, state: StateDirectory | None, specs: Mapping[torch.Tensor, TableSpec]
    ) -> str | os.PathLike[str]:
        directory = self.directory if state is None else state.path
        if directory is None:
            name = next(iter(specs.values())).name
            raise ValueError(
                f"the parameter {name!r} is an ordinary one, whose state needs a place: pass state_dir="
            )
        return directory

    def _spec(self, parameter: torch.Tensor, name: str) -> TableSpec:
        if parameter.dtype == torch.float64:
            raise ValueError(
                f"the parameter {name!r} is float64, but steps are computed in float32: convert it to float32"
            )
        rows, dim = len(parameter), row_elements(parameter.shape)
        spec = table_spec(name, Zeros(rows, dim), self.rule, weights=False, state_dtype=self.state_dtype)
        return replace(spec, alternatives=ALIKE) if self.rule in ALIKE else spec


def settled_rule(table: Table, rule: AnyRule) -> AnyRule:
    """Return the update rule that a table of a module has under an optimizer whose rule nobody has chosen.

    A table that was trained goes on as it was; the others get what is usual in their space.

    Args:
        table: The table.
        rule: The optimizer's, for tables whose records have other fields, and which it will refuse.
    """
    if table.rule not in ALIKE:
        return rule
    return table.rule if table.steps else usual_rule(table.k)


def _hold(table: Table, parameter: torch.Tensor) -> None:
    """Take a parameter for the weights of a table, which may have been another one's since it was opened."""
    before = table.held
    if isinstance(before, ParameterWeights) and not before.are_of(parameter) and table.awaited is None:
        table.awaited = ""
    table.held = ParameterWeights(parameter, table.name)


def require_ball(max_step: float | None, groups: Sequence[dict[str, Any]]) -> None:
    """Refuse a limit on the ball where there is none, instead of ignoring it.

    Raises:
        ValueError: no parameter of the groups is a table on a ball.
    """
    members = [each[1] if isinstance(each, tuple) else each for group in groups for each in group["params"]]
    if max_step is not None and not any(isinstance(each, DiskParameter) and each.table.k for each in members):
        raise ValueError(
            f"max_step={max_step!r} is a length on a ball, but no table is on one: leave it out, or make a "
            "DiskEmbedding with k > 0"
        )


def require_countable(convention: Convention, groups: Sequence[dict[str, Any]]) -> None:
    """Refuse a mean of duplicates where they can't be counted, instead of taking their sum for it.

    Raises:
        ValueError: a parameter is a table of a module, whose lookups sum the gradients of equal ids.
    """
    if convention.duplicates != "mean":
        return
    for parameter in (each for group in groups for each in group["params"]):
        if isinstance(parameter, DiskParameter):
            raise ValueError(
                f"duplicates='mean' can't be had for {parameter!r}, whose lookups sum the gradients of equal "
                "ids: pass a convention with duplicates='sum', or rows and gradients to "
                "DiskSparseRiemannianAdam"
            )
