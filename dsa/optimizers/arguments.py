"""Reading the arguments of an optimizer: defaults, contradictions, and what each table asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch

from dsa.backends.base import Layout
from dsa.backends.mapping import Allocate
from dsa.errors import StateMismatchError, StateWarning, notify
from dsa.optimizers.options import as_index, as_number
from dsa.rules.adam import ALIKE, AdamRule
from dsa.rules.conventions import (
    DSA_ADAM,
    AdamOptions,
    BiasCorrection,
    Convention,
    SecondMoment,
    WeightDecayMode,
)
from dsa.rules.init import FromArray, Initializer, MatrixLike, as_initializer
from dsa.rules.manifolds import manifold_of
from dsa.rules.updates import AnyRule, label_of
from dsa.schema import widened
from dsa.state.growth import Growth
from dsa.state.id_policy import IdPolicy
from dsa.state.state_directory import StateDirectory
from dsa.state.storage import Durability, Queue, StorageChoice, as_layout, narrowed
from dsa.state.table import Table

__all__ = [
    "DEFAULT_BACKEND",
    "DEFAULT_DECAY",
    "DEFAULT_FRACTION",
    "DEFAULT_MOMENT",
    "ParamGroups",
    "Params",
    "StateDtype",
    "agree_on_dtypes",
    "agree_on_rule",
    "as_fraction",
    "checked_updates",
    "curvatures_of",
    "dialect_of",
    "growth_of",
    "held_tensor",
    "layout_of_backend",
    "named_groups",
    "named_sources",
    "named_table",
    "options_in",
    "policies_of",
    "storage_choice",
    "wanted_curvatures",
    "with_moment_of",
]

Source = Initializer | FromArray | MatrixLike
StateDtype = str | torch.dtype | Mapping[str, str | torch.dtype]
"""How fields are stored, see `dsa.state.storage.narrowed`."""

Params = Mapping[str, Source] | Sequence[Source]
ParamGroups = (
    Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]] | Iterable[Any]
)


def named_sources(params: Params) -> dict[str, Initializer | FromArray]:
    """Return the tables by name.

    Raises:
        TypeError: `params` is neither a dict nor a list, or a value is no table.
        ValueError: it is empty, or a name is not a string.
    """
    if isinstance(params, Mapping):
        items: dict[str, Source] = dict(params)
    elif isinstance(params, list | tuple):
        items = {f"param_{i}": source for i, source in enumerate(params)}
    else:
        raise TypeError(
            f"params is a {type(params).__name__}: pass a dict of names and tables, or a list of tables"
        )
    if not items:
        raise ValueError("params holds no table: pass at least one")
    for name in items:
        if not isinstance(name, str) or not name:
            raise ValueError(f"{name!r} is not a table's name: pass a string that is not empty")
    return {name: as_initializer(source) for name, source in items.items()}


def checked_updates(updates: object) -> list[tuple[str, Any]]:
    """Return the pairs of a step by table name.

    Raises:
        TypeError: it is not ``{name: (indices, gradients)}``.
    """
    if not isinstance(updates, Mapping):
        raise TypeError(f"updates is a {type(updates).__name__}: pass {{name: (indices, gradients)}}")
    for name, pair in updates.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(
                f"the update of table {name!r} is {type(pair).__name__}: pass a pair (indices, gradients)"
            )
    return list(updates.items())


def dialect_of(
    convention: Convention | None,
    default: Convention = DSA_ADAM,
    **given: BiasCorrection | SecondMoment | WeightDecayMode | None,
) -> Convention:
    """Return the convention in force.

    Args:
        convention: The one that was passed, if any.
        default: What holds otherwise.
        **given: What was passed beside it, by its names; what is neither None nor a default takes the place
            of the convention's.

    Raises:
        TypeError: it is no convention.
        ValueError: a value is not known.
    """
    base = default if convention is None else convention
    if not isinstance(base, Convention):
        raise TypeError(
            f"convention={convention!r} is not one: pass one of dsa.conventions, or Convention(...)"
        )
    changes: dict[str, Any] = {
        name: value for name, value in given.items() if value is not None and not isinstance(value, _Default)
    }
    return replace(base, **changes)


def with_moment_of(convention: Convention, tables: Iterable[Table]) -> Convention:
    """Return a convention with the second moment of the first table on a ball, if there is one."""
    for table in tables:
        if table.k > 0.0 and isinstance(table.rule, AdamRule):
            return replace(convention, second_moment=table.rule.second_moment)
    return convention


def options_in(convention: Convention, **numbers: Any) -> AdamOptions:  # noqa: ANN401 - the options'
    """Return the options of a step in a dialect.

    Args:
        convention: The dialect.
        **numbers: Further fields of `AdamOptions`.

    Raises:
        ValueError: an option is out of range.
    """
    return AdamOptions(
        eps_placement=convention.eps_placement,
        bias_correction=convention.bias_correction,
        weight_decay_mode=convention.weight_decay_mode,
        second_moment=convention.second_moment,
        beta_powers=convention.beta_powers,
        **numbers,
    )


def curvatures_of(k: float | Mapping[str, float], names: Mapping[str, object]) -> dict[str, float]:
    """Return each table's curvature magnitude.

    Raises:
        ValueError: a curvature is out of range, or a dict does not name exactly the tables.
    """
    if isinstance(k, Mapping):
        if set(k) != set(names):
            raise ValueError(
                f"k names the tables {sorted(k)} but the tables are {sorted(names)}: give a curvature for "
                "each"
            )
        curvatures = {name: as_number(f"k[{name!r}]", k[name]) for name in names}
    else:
        curvatures = dict.fromkeys(names, as_number("k", k))
    for value in curvatures.values():
        manifold_of(value)
    return curvatures


def as_fraction(fraction: object) -> float:
    """Return the largest norm of fresh rows as a fraction of the ball's radius.

    Raises:
        ValueError: it is not in (0, 1].
    """
    checked = as_number("init_max_norm_fraction", fraction)
    if not 0.0 < checked <= 1.0:
        raise ValueError(f"init_max_norm_fraction={fraction!r} is out of range: pass a number in (0, 1]")
    return checked


class _Default(str):
    __slots__ = ()


DEFAULT_DECAY: Final = cast("WeightDecayMode", _Default("l2"))
"""The default of ``weight_decay_mode``: unlike the same name given, it gives way to a convention's."""

DEFAULT_MOMENT: Final = cast("SecondMoment", _Default("coordinate"))
"""The default of ``second_moment``, likewise."""


class _DefaultNumber(float):
    __slots__ = ()


DEFAULT_FRACTION: Final[float] = _DefaultNumber(0.5)
"""The default of ``init_max_norm_fraction``: unlike the same number given, it keeps arrays in the ball."""

DEFAULT_BACKEND: Final[str] = _Default("memmap")
"""The default of ``backend`` arguments: unlike the same name given, it lets a state keep its backend."""


def layout_of_backend(backend: str | Layout) -> Layout | None:
    """Return the layout that a ``backend`` argument asks for; None where it was left out.

    Raises:
        ValueError: the backend is not known, or can't be one.
    """
    return None if backend is DEFAULT_BACKEND else as_layout(backend)


def storage_choice(
    backend: str | Layout, allocate: Allocate | None, durability: Durability | None, async_writes: bool
) -> StorageChoice:
    """Return what the storage arguments of a module or an optimizer ask for.

    Raises:
        ValueError: the backend is not known, or can't be one.
    """
    queue = Queue() if async_writes else None
    return StorageChoice(allocate, layout_of_backend(backend), durability, queue)


def held_tensor(source: Initializer | FromArray, retain: bool) -> torch.Tensor:
    """Return what stands for a table in ``param_groups``: its tensor, or an empty placeholder."""
    if not retain:
        return torch.empty(0)
    if isinstance(source, FromArray) and isinstance(source.array, torch.Tensor):
        return source.array.detach()
    notify(
        "retain_params=True keeps nothing here: the table does not come from a tensor",
        StateWarning,
    )
    return torch.empty(0)


def named_groups(params: ParamGroups) -> list[dict[str, Any]]:
    """Return parameter groups as torch's optimizers take them.

    Beside what torch accepts, a list of iterables of parameters is one group of all of them.

    Raises:
        TypeError: a parameter is not a tensor.
        ValueError: there is none, or one can't be a table of sparse gradients.
    """
    if isinstance(params, torch.Tensor):
        raise TypeError("params is a tensor: pass an iterable of parameters, or of groups")
    items = list(params)
    if not items:
        raise ValueError("params holds no parameter: pass at least one")
    given = [dict(item) for item in items if isinstance(item, dict)]
    if given and len(given) != len(items):
        raise TypeError("params mixes groups and parameters: pass either")
    groups = given or [{"params": items}]
    for group in groups:
        if "params" not in group:
            raise ValueError(f"the group {group!r} holds no 'params': pass at least one parameter in it")
        group["params"] = list(_flat(group["params"]))
    members = [member for group in groups for member in group["params"]]
    if not members:
        raise ValueError("params holds no parameter: pass at least one")
    for member in members:
        _require_table_shape(*member if isinstance(member, tuple) else (None, member))
    _require_names([member[0] for member in members if isinstance(member, tuple)])
    return groups


def _require_names(names: Sequence[str]) -> None:
    if "" in names:
        raise ValueError("a parameter's name can't be empty: pass another")
    for name in set(names):
        if names.count(name) > 1:
            raise ValueError(f"the name {name!r} is given to two parameters: pass different ones")


def _flat(members: object) -> Iterator[Any]:
    if isinstance(members, torch.Tensor) or _is_named(members):
        yield members
    elif isinstance(members, Iterable) and not isinstance(members, str):
        for member in members:
            yield from _flat(member)
    else:
        raise TypeError(
            f"{members!r} is not a parameter: pass tensors, (name, tensor) pairs, or iterables of them"
        )


def _is_named(member: object) -> bool:
    return isinstance(member, tuple) and len(member) == 2 and isinstance(member[0], str)


def _require_table_shape(name: str | None, parameter: torch.Tensor) -> None:
    if not isinstance(parameter, torch.Tensor):
        raise TypeError(f"{parameter!r} is not a parameter: pass tensors")
    what = "a parameter" if name is None else f"the parameter {name!r}"
    if parameter.is_meta:
        raise ValueError(f"{what} is on the meta device and holds no numbers: move it to another one")
    if parameter.layout != torch.strided or parameter.dim() == 0 or not parameter.is_floating_point():
        raise ValueError(
            f"{what} of shape {tuple(parameter.shape)} and dtype {parameter.dtype} can't be a table: sparse "
            "gradients come from dense floating tensors with a row for each index; hand other parameters to "
            "another optimizer (dsa.split_parameters(model) gives both lists)"
        )


def agree_on_rule(state: StateDirectory, table: Table, rule: AnyRule) -> None:
    """See to it that a table has the update rule of an optimizer: one without steps takes it, if it can.

    Raises:
        StateMismatchError: its records have other fields, or it has been trained by another rule.
    """
    if table.rule == rule or (table.steps and table.k == 0.0 and {table.rule, rule} <= {*ALIKE}):
        return
    own = table.facts.schema
    if table.steps or rule.schema(own.dim, weights="w" in own.names) != widened(own):
        raise StateMismatchError(
            f"table {table.name!r} holds the state of the update rule {label_of(table.rule)} but the "
            f"optimizer computes {label_of(rule)}: use {table.rule.choice}, or make the table with "
            f"state={rule.name!r}"
        )
    table.facts = replace(table.facts, rule=rule)
    state.save()


def agree_on_dtypes(table: Table, state_dtype: StateDtype | None) -> None:
    """See to it that a table of a module stores its fields as an optimizer is told.

    Raises:
        StateMismatchError: it does not.
        ValueError: it has no such field.
    """
    own = table.facts.schema
    asked = {field.name: field.dtype for field in narrowed(widened(own), state_dtype).fields}
    named = state_dtype if isinstance(state_dtype, Mapping) else set(asked) - {"w"}
    for field in own.fields:
        if state_dtype is not None and field.name in named and asked[field.name] != field.dtype:
            raise StateMismatchError(
                f"table {table.name!r} stores {field.name!r} as {field.dtype}, but the optimizer is told "
                f"state_dtype={state_dtype!r}: leave it out, or make the module with it"
            )


def named_table(tables: Mapping[str, Table], name: str | None) -> Table:
    """Return the table of a name, or the only one.

    Raises:
        KeyError: there is none of that name, or there are several and no name is given.
    """
    if name is None and len(tables) == 1:
        return next(iter(tables.values()))
    if name is None or name not in tables:
        what = "a table has to be named" if name is None else f"there is no table {name!r}"
        raise KeyError(f"{what}: name one of {sorted(tables)}")
    return tables[name]


def wanted_curvatures(
    tables: Mapping[str, Table], k: float | torch.Tensor | Mapping[str, float], name: str | None
) -> list[tuple[Table, float]]:
    """Return which tables are to get which curvature.

    A number without a name is meant for the only table, or for every table that is on a ball: a flat table
    among others is never curved by accident.

    Raises:
        KeyError: a name is not a table's.
        ValueError: a curvature is out of range, or no table is meant.
    """
    if isinstance(k, Mapping):
        if name is not None:
            raise ValueError(f"both name={name!r} and a dict of curvatures are given: pass one of them")
        wanted = [(named_table(tables, key), as_number(f"k[{key!r}]", value)) for key, value in k.items()]
    elif name is not None or len(tables) == 1:
        wanted = [(named_table(tables, name), as_number("k", k))]
    else:
        wanted = [(table, as_number("k", k)) for table in tables.values() if table.k > 0.0]
        if not wanted:
            raise ValueError("every table is flat, so that none is meant: pass name=, or a dict")
    for _, value in wanted:
        manifold_of(value)
    return wanted


def growth_of(table: Table, rows: object, source: Initializer | FromArray | MatrixLike | None) -> Growth:
    """Return how a table is to grow.

    Args:
        table: The table.
        rows: How many it is to have.
        source: The first weights of the new rows, see `dsa.state.growth.Growth`.

    Raises:
        TypeError, ValueError: an argument is of another kind.
    """
    first = None if source is None else as_initializer(source)
    return Growth(table, as_index("rows", rows), first)


def policies_of(
    ids: IdPolicy | Mapping[str, IdPolicy] | None, sources: Mapping[str, Initializer | FromArray]
) -> dict[str, IdPolicy]:
    """Return how ids are treated in each table whose rows belong to ids, checked against the tables.

    Raises:
        KeyError: a name is not a table's.
        ValueError: a table's rows belong to no ids.
    """
    keyed = {name for name, source in sources.items() if source.rows is None}
    given = dict.fromkeys(keyed, ids) if isinstance(ids, IdPolicy) else dict(ids or {})
    if unknown := sorted(set(given) - set(sources)):
        raise KeyError(
            f"ids names {unknown[0]!r}, which is not one of the tables {sorted(sources)}: correct it"
        )
    if set(given) - keyed or (ids is not None and not keyed):
        raise ValueError(
            f"ids={ids!r} says how ids are treated, but the rows of {sorted(set(given) - keyed or sources)} "
            "belong to none: leave it out, or make the table of a rule without a number of rows"
        )
    return {name: given.get(name, IdPolicy()) for name in keyed}
