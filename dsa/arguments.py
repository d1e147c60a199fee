"""Reading the arguments of an optimizer: defaults, contradictions, and what each table asks for."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch

from dsa.backends.memmap import Memmap
from dsa.conventions import DSA_ADAM, BiasCorrection, Convention, SecondMoment
from dsa.errors import StateWarning
from dsa.init import FromArray, Initializer, MatrixLike, as_initializer
from dsa.manifolds import manifold_of
from dsa.opening import TableSpec
from dsa.schema import adam_schema
from dsa.table import Table

__all__ = [
    "Params",
    "curvatures_of",
    "dialect_of",
    "held_tensor",
    "layout_of_backend",
    "named_sources",
    "named_table",
    "table_spec",
    "wanted_curvatures",
]

Source = Initializer | FromArray | MatrixLike
Params = Mapping[str, Source] | Sequence[Source]


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


def dialect_of(convention: Convention | None, bias_correction: BiasCorrection | None) -> Convention:
    """Return the convention in force.

    Raises:
        ValueError: the two arguments contradict each other.
    """
    base = DSA_ADAM if convention is None else convention
    if bias_correction is None or bias_correction == base.bias_correction:
        return base
    if convention is not None:
        raise ValueError(f"bias_correction={bias_correction!r} contradicts {convention}: pass one of them")
    return Convention(base.eps_placement, bias_correction)


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
        curvatures = {name: float(k[name]) for name in names}
    else:
        curvatures = dict.fromkeys(names, float(k))
    for value in curvatures.values():
        manifold_of(value)
    return curvatures


def table_spec(
    name: str, source: Initializer | FromArray, k: float, second_moment: SecondMoment, fraction: float
) -> TableSpec:
    """Return what a table asks of the state directory."""
    schema = adam_schema(source.dim, second_moment_per="row" if second_moment == "row" else "element")
    return TableSpec(name, schema, source, k, second_moment, fraction)


def layout_of_backend(backend: str | Memmap) -> Memmap:
    """Return the layout of new table files.

    Raises:
        ValueError: the backend is not known.
    """
    if isinstance(backend, Memmap):
        return backend
    if backend != "memmap":
        raise ValueError(f"backend={backend!r} is not known: pass 'memmap' or dsa.backends.Memmap(...)")
    return Memmap()


def held_tensor(source: Initializer | FromArray, retain: bool) -> torch.Tensor:
    """Return what stands for a table in ``param_groups``: its tensor, or an empty placeholder."""
    if not retain:
        return torch.empty(0)
    if isinstance(source, FromArray) and isinstance(source.array, torch.Tensor):
        return source.array.detach()
    warnings.warn(
        "retain_params=True keeps nothing here: the table does not come from a tensor",
        StateWarning,
        stacklevel=4,
    )
    return torch.empty(0)


def named_table(tables: Mapping[str, Table], name: str | None) -> Table:
    """Return the table of a name, or the only one.

    Raises:
        KeyError: there is none of that name, or there are several and no name is given.
    """
    if name is None and len(tables) == 1:
        return next(iter(tables.values()))
    if name is None or name not in tables:
        what = "a table has to be named" if name is None else f"there is no table {name!r}"
        raise KeyError(f"{what}: the tables are {sorted(tables)}")
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
        wanted = [(named_table(tables, key), float(value)) for key, value in k.items()]
    elif name is not None or len(tables) == 1:
        wanted = [(named_table(tables, name), float(k))]
    else:
        wanted = [(table, float(k)) for table in tables.values() if table.k > 0.0]
        if not wanted:
            raise ValueError("every table is flat, so that none is meant: pass name=, or a dict")
    for _, value in wanted:
        manifold_of(value)
    return wanted
