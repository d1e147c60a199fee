"""How a state is to be stored, and the tables it is to hold: what callers ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Final, Literal, final

from dsa.backends.base import Layout
from dsa.backends.layouts import BUILT_IN, Memmap
from dsa.backends.mapping import Allocate
from dsa.rules.init import FromArray, Initializer
from dsa.rules.updates import AnyRule
from dsa.schema import Schema, keyed, with_dtypes
from dsa.state.facts import TableFacts
from dsa.state.metadata import DURABILITIES, require_kind

__all__ = [
    "FEW_ROWS",
    "Durability",
    "Queue",
    "Storage",
    "StorageChoice",
    "TableSpec",
    "as_layout",
    "is_part_of",
    "narrowed",
    "table_spec",
]

FEW_ROWS: Final = 1024
"""Rows that a table has at first when they belong to ids, and by which it grows at least."""

Durability = Literal["process", "power", "none"]


@final
@dataclass(frozen=True, slots=True)
class TableSpec:
    """A table as the caller asks for it.

    Args:
        facts: What it is to be.
        source: The rule or the array that gives the first weights.
        keeps_inside: Whether an array whose rows are all inside the ball is taken as it is, however near to
            the boundary they are.
        alternatives: Further update rules of the same fields that a stored table may have.
    """

    facts: TableFacts
    source: Initializer | FromArray
    keeps_inside: bool = False
    alternatives: tuple[AnyRule, ...] = ()

    @property
    def name(self) -> str:
        """The user's name for it."""
        return self.facts.name

    @property
    def schema(self) -> Schema:
        """The layout of a record."""
        return self.facts.schema


def narrowed(schema: Schema, state_dtype: object) -> Schema:
    """Return what a ``state_dtype`` argument makes of an update rule's record.

    Args:
        schema: The record in float32.
        state_dtype: ``"bfloat16"`` or ``"float32"``, or torch's dtype, for everything that the rule keeps for
            each element beside the weight; or a dict with such a dtype for some fields, ``"w"`` among them.
            None leaves it as it is.

    Raises:
        ValueError: a field can't have its dtype, or there is no field that could. A record is a sequence of
            words, so that a single number or an odd one of them would leave a gap, which numpy does not copy.

    Example:
        >>> from dsa.schema import adam_schema
        >>> narrowed(adam_schema(128), "bfloat16").dtype.itemsize
        1032
    """
    if state_dtype is None:
        return schema
    floating = [field.name for field in schema.fields if field.dtype == "float32" and field.per == "element"]
    if isinstance(state_dtype, Mapping):
        chosen = {name: _dtype_name(dtype) for name, dtype in state_dtype.items()}
    else:
        chosen = dict.fromkeys((name for name in floating if name != "w"), _dtype_name(state_dtype))
        if not chosen:
            raise ValueError(
                f"state_dtype={state_dtype!r} means nothing where no number is kept for each element beside "
                "the weight: leave it out, or pass {'w': 'bfloat16'} for the weight"
            )
    for name in chosen:
        if name not in floating:
            where = "; the weights are a parameter's, in its own dtype" if name == "w" else ""
            raise ValueError(
                f"state_dtype names {name!r}, which is no field with a number for each element here{where}: "
                f"use some of {floating} (a single number of a row would take no less)"
            )
    if schema.dim % 2 and "bfloat16" in chosen.values():
        raise ValueError(
            f"dim={schema.dim} is odd, and bfloat16 is stored two in a word: pass an even dim, or leave "
            "state_dtype out"
        )
    return with_dtypes(schema, chosen)


def _dtype_name(dtype: object) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"state_dtype={dtype!r} is not known: use 'float32' or 'bfloat16'")
    return name


def table_spec(
    name: str,
    source: Initializer | FromArray,
    rule: AnyRule,
    *,
    k: float = 0.0,
    init_max_norm_fraction: float = 1.0,
    weights: bool = True,
    state_dtype: object = None,
    keeps_inside: bool = False,
) -> TableSpec:
    """Return what is asked for a table by its first weights and its update rule.

    Args:
        name: Any string that is not empty.
        source: The rule or the array that gives the first weights. Without a number of rows these belong to
            ids: the table is made with few of them, and grows.
        rule: The update rule.
        k: Curvature magnitude.
        init_max_norm_fraction: See `dsa.state.facts.TableFacts`.
        weights: Whether the weights are part of the records, or stay with a parameter in memory.
        state_dtype: See `narrowed`.
        keeps_inside: See `TableSpec`.

    Raises:
        ValueError: the update rule does not work in the space, a record would be too large, or a field can't
            have its dtype.
    """
    schema, rows = narrowed(rule.schema(source.dim, weights=weights), state_dtype), source.rows
    if rows is None:
        schema, rows = keyed(schema), FEW_ROWS
    lazy = source if weights and isinstance(source, Initializer) else None
    facts = TableFacts(name, rows, schema, rule, k, 0, lazy, init_max_norm_fraction)
    return TableSpec(facts, source, keeps_inside)


@final
@dataclass(frozen=True, slots=True)
class Queue:
    """Write-behind, see `dsa.backends.writer.WriteBehind`.

    Args:
        max_size: Batches that may wait.
        put_timeout: Seconds to wait for room.
    """

    max_size: int = 150
    put_timeout: float = 5.0

    def __post_init__(self) -> None:
        if self.max_size < 1:
            raise ValueError(f"max_queue_size={self.max_size!r} is out of range: pass at least 1")
        if not self.put_timeout >= 0.0:
            raise ValueError(
                f"put_timeout={self.put_timeout!r} is out of range: pass a number of seconds >= 0"
            )


@final
@dataclass(frozen=True, slots=True)
class Storage:
    """How a state is stored.

    Args:
        allocate: ``"reserve"`` or ``"sparse"``, see `dsa.backends.Layout.create`.
        backend: The backend of new tables; None is memmap, or what the state has already.
        queue: How writes are queued for a thread; None writes them in the step.
        durability: ``"process"``: a step that has returned survives the process. ``"power"``: it survives a
            loss of power. ``"none"``: no journal; a killed process may leave a torn step behind.
    """

    allocate: Allocate = "reserve"
    backend: Layout | None = None
    durability: Durability = "process"
    queue: Queue | None = None

    @property
    def layout(self) -> Layout:
        """The backend of new tables."""
        return Memmap() if self.backend is None else self.backend


def is_part_of(asked: Layout, opened: Layout | None) -> bool:
    """Tell whether a layout asks for nothing but what another one, memmap when None, is.

    An option that is None asks for nothing; what that means for stored tables their layout knows.
    """
    whole = Memmap() if opened is None else opened
    return asked == whole or (type(asked) is type(whole) and _given(asked).items() <= _given(whole).items())


def _given(layout: Layout) -> dict[str, object]:
    """Return the options of a layout that is a dataclass, but for those that are None."""
    options = asdict(layout) if is_dataclass(layout) else {"layout": layout}
    return {name: value for name, value in options.items() if value is not None}


def as_layout(backend: object) -> Layout:
    """Return the layout that a ``backend`` argument asks for: itself, or one of the package's by its kind.

    Raises:
        ValueError: it is none.
    """
    if isinstance(backend, Layout) and not isinstance(backend, type):
        require_kind(backend.kind)
        return backend
    for layout in BUILT_IN:
        if layout.kind == backend:
            return layout
    raise ValueError(
        f"backend={backend!r} is not known: pass 'memmap', 'zarr', dsa.backends.Memmap(...), "
        "dsa.backends.Zarr(...) or an object with the members of dsa.backends.Layout"
    )


@final
@dataclass(frozen=True, slots=True)
class StorageChoice:
    """Storage options of which some are left to the default, or to whoever opens the directory first.

    Args:
        allocate: See `Storage`; likewise the others.
        backend: See `Storage`.
        durability: See `Storage`.
        queue: See `Storage`.
    """

    allocate: Allocate | None = None
    backend: Layout | None = None
    durability: Durability | None = None
    queue: Queue | None = None

    def complete(self) -> Storage:
        """Return the options with the defaults filled in.

        Raises:
            ValueError: an option is not known.
        """
        if self.durability is not None and self.durability not in DURABILITIES:
            raise ValueError(f"durability={self.durability!r} is not known: use one of {DURABILITIES}")
        if self.allocate not in (None, "reserve", "sparse"):
            raise ValueError(f"allocate={self.allocate!r} is not known: use 'reserve' or 'sparse'")
        backend = None if self.backend is None else as_layout(self.backend)
        return Storage(self.allocate or "reserve", backend, self.durability or "process", self.queue)
