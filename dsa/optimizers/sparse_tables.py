"""The tables behind an optimizer's parameters, and what is done with them whatever their update rule is."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, NoReturn, final

import torch

from dsa.errors import StateError, StateMismatchError, TrainingWarning, notify
from dsa.optimizers.arguments import ParamGroups, growth_of, named_groups, named_table
from dsa.optimizers.disk_parameter import DiskParameter
from dsa.optimizers.fingerprints import require_belonging, vouch
from dsa.optimizers.flattening import gradient_rows
from dsa.optimizers.holders import abandoned
from dsa.optimizers.id_rows import known_rows
from dsa.optimizers.options import as_number
from dsa.optimizers.reference import check_reference, follow_reference, reference_to
from dsa.optimizers.registration import Registry
from dsa.optimizers.resident import ParameterWeights, lengthened, put_rows, row_elements, take_data
from dsa.optimizers.stepping import Batch, Stepping
from dsa.optimizers.tensors import to_array
from dsa.rules.init import FromArray, Initializer, MatrixLike
from dsa.state.growth import grow_tables
from dsa.state.state_directory import StateDirectory
from dsa.state.table import Table

__all__ = ["SparseTables", "checked_groups", "refuse_foreign"]

Groups = Sequence[dict[str, Any]]
TakeOver = Callable[[StateDirectory, Mapping[torch.Tensor, Table], Mapping[str, Any]], None]

_DENSE_ADVICE: Final = (
    "build the layer with sparse=True, use dsa.DiskEmbedding, or hand dense parameters to another optimizer "
    "(dsa.split_parameters(model) gives both lists). A sparse table also gets a dense gradient when its "
    "weight is tied to another layer or penalised as a whole: penalise the rows looked up instead"
)


@final
class SparseTables:
    """The tables of the parameters of one optimizer, which get sparse gradients.

    Args:
        registry: Finds or makes them.
        options_of: Returns the options of a step, of the kind that the tables' rule takes, from a parameter
            group; raises `TypeError` or `ValueError` where one is out of range.
        take_over: Writes the state dict of another optimizer into the tables.
        as_taken: Returns the batches of a step as the optimizer takes them.
    """

    def __init__(
        self,
        registry: Registry,
        options_of: Callable[[dict[str, Any]], object],
        take_over: TakeOver,
        as_taken: Callable[[list[Batch]], list[Batch]] = list,
    ) -> None:
        self.options_of = options_of
        self._registry = registry
        self._take_over = take_over
        self._as_taken = as_taken
        self._stepping = Stepping()
        self._state: StateDirectory | None = None
        self._tables: dict[torch.Tensor, Table] = {}
        self._told: set[torch.Tensor] = set()

    @property
    def registered(self) -> bool:
        """Whether there are tables."""
        return self._state is not None

    @property
    def state(self) -> StateDirectory:
        """The state directory of the tables."""
        assert self._state is not None, "every parameter has a table"
        return self._state

    @property
    def names(self) -> list[str]:
        """The tables' names, in the order of the parameters."""
        return [table.name for table in self._tables.values()]

    def register(self, groups: Groups, user: object) -> None:
        """Find or make the tables of the parameters that have none yet.

        Args:
            groups: All parameter groups.
            user: Who uses them.

        Raises:
            ValueError, StateError: see `Registry.tables`.
        """
        self._state, self._tables = self._registry.tables(groups, self._tables, user)
        for table in self._tables.values():
            table.stepper = weakref.ref(self)

    def step(self, groups: Groups) -> None:
        """Take one step with the gradients that the parameters have.

        Raises:
            RuntimeError: a gradient is dense; nothing has changed.
            StateError: another optimizer was built over the tables after this one.
            GradientError, CorruptRowError, DiskSpaceError: see `Stepping.take`.
        """
        # Parameters and gradients of classes that answer torch's questions themselves are not asked again.
        with torch._C.DisableTorchFunctionSubclass():
            grads = self._gradients(groups)
            if not grads:
                self.state.require_open()
            else:
                self._require_latest()
                with self._ready() as state:
                    require_belonging(state, list(self._tables.values()), self._registry.positional)
                    self._stepping.take(state, self._as_taken([self._batch(*each) for each in grads]))
            self._warn_if_replaced()

    def announce(self, indices: object, name: str | None) -> None:
        """Announce rows that a coming batch will need; see `dsa.optimizers.prefetch`."""
        table = named_table({table.name: table for table in self._tables.values()}, name)
        self._stepping.prefetcher.announce(table, known_rows(table, to_array(indices).reshape(-1)))

    def grow(self, name: str, rows: object, init: Initializer | FromArray | MatrixLike | None) -> None:
        """Let a table have more rows, and its parameter too; see `dsa.optimizers.sparse_methods.grow`."""
        with self._ready() as state:
            table = named_table({table.name: table for table in self._tables.values()}, name)
            (parameter,) = (each for each, its in self._tables.items() if its is table)
            growth = growth_of(table, rows, init)
            if table.held is None:
                grow_tables(state, [growth])
            elif growth.rows != len(table):
                longer = lengthened(parameter, growth)
                grow_tables(state, [growth._replace(source=None)])
                vouch([table])
                take_data(parameter, longer)
            if isinstance(parameter, DiskParameter):
                parameter.follow()

    def statistics(self) -> dict[str, int | float | str]:
        """Return the counts, see `dsa.optimizers.statistics`."""
        return self._stepping.statistics(self.state)

    def reference(self) -> dict[str, Any]:
        """Return what a state dict says of the state on disk."""
        return reference_to(self.state, self.names)

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Check that a state dict belongs to the state on disk, or take another optimizer's state over.

        Raises:
            StateMismatchError: it belongs to another state, or to another step of this one.
            ValueError: it can't be taken over.
        """
        with self._ready() as state:
            if "dsa" in state_dict:
                if state.loaded_step == state.global_step:  # a module that was loaded has said which is meant
                    check_reference(state, self.names, state_dict["dsa"])
                follow_reference(state, self.names, state_dict["dsa"])
            else:
                self._take_over(state, self._tables, state_dict)
            vouch(list(self._tables.values()))

    def close(self) -> None:
        """Close the state directory; closing twice is silent."""
        self._stepping.prefetcher.close()
        if self._state is not None:
            with self._state.exclusive:
                self._state.close()

    def _require_latest(self) -> None:
        for table in self._tables.values():
            latest = None if table.stepper is None else table.stepper()
            if latest is None:
                table.stepper = weakref.ref(self)
            elif latest is not self:
                raise StateError(
                    f"table {table.name!r} was handed to another optimizer after this one, and the steps of "
                    "two would be of one state: step the later one, or build this one again"
                )

    def _ready(self) -> AbstractContextManager[StateDirectory]:
        return self._stepping.ready(self.state, torch.get_num_threads())

    def _gradients(self, groups: Groups) -> list[tuple[torch.Tensor, torch.Tensor, object]]:
        grads = []
        for group in groups:
            options = self.options_of(group)
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                if not grad.is_sparse:
                    table = self._tables[parameter]
                    raise RuntimeError(
                        f"the parameter {table.name!r} of shape {tuple(parameter.shape)} got a dense "
                        f"gradient, and this optimizer only takes sparse ones: {_DENSE_ADVICE}"
                    )
                grads.append((parameter, grad, options))
        return grads

    def _batch(self, parameter: torch.Tensor, grad: torch.Tensor, options: object) -> Batch:
        table = self._tables[parameter]
        if isinstance(parameter, DiskParameter):
            parameter.follow()
        rows_now = len(table) if table.keys is None else len(parameter)
        if (len(parameter), row_elements(parameter.shape)) != (rows_now, table.dim):
            raise StateMismatchError(
                f"the parameter {table.name!r} is {tuple(parameter.shape)} now but its table is {len(table)} "
                f"x {table.dim}: build a new optimizer after changing a parameter's shape"
            )
        rows, values = gradient_rows(grad, table)
        if not isinstance(table.held, ParameterWeights):
            return Batch(table, rows, values, options)
        weights = table.held.lend(rows)
        # With a copy of the rows, which may be the gradient's memory: the step may be completed later.
        return Batch(
            table, rows, values, options, weights, [partial(put_rows, parameter, rows.copy(), weights)]
        )

    def _warn_if_replaced(self) -> None:
        if all(parameter.grad is not None for parameter in self._tables):
            return
        for parameter in abandoned(self._tables):
            if parameter.grad is None and parameter.requires_grad and parameter not in self._told:
                self._told.add(parameter)
                notify(
                    f"the parameter {self._tables[parameter].name!r} gets no gradients and nobody but the "
                    "optimizer holds it: the module's weight was probably replaced or resized after the "
                    "optimizer was built; build a new optimizer",
                    TrainingWarning,
                )


def checked_groups(
    params: ParamGroups, defaults: Mapping[str, Any], tables: SparseTables
) -> list[dict[str, Any]]:
    """Return the parameter groups of a new optimizer, looked at before a file is made.

    Raises:
        TypeError, ValueError: a parameter can't be a table, or an option is out of range; ``lr`` has to be
            more than 0 in `defaults`, for a learning rate of 0 would only be a mistake.
    """
    lr = defaults["lr"]
    if not as_number("lr", lr) > 0.0:
        raise ValueError(f"lr={lr!r} is out of range: pass a number > 0 (a scheduler may set 0 later)")
    groups = named_groups(params)
    for group in groups:
        tables.options_of({**defaults, **group})
    return groups


def refuse_foreign(
    state: StateDirectory, tables: Mapping[torch.Tensor, Table], state_dict: Mapping[str, Any]
) -> NoReturn:
    """Refuse the state of another optimizer: the `take_over` of rules that can't be given any.

    Raises:
        ValueError: always.
    """
    foreign = state_dict.get("state")
    held = sorted(foreign, key=str) if isinstance(foreign, Mapping) else foreign
    raise ValueError(
        f"the state dict, whose 'state' is {held!r}, refers to no state on disk such as {str(state.path)!r} "
        f"with the tables {sorted(table.name for table in tables.values())}: pass what state_dict() returned"
    )
