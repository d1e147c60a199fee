"""Whole models: their large embeddings go to disk, and come back."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from dsa.backends.base import Layout
from dsa.backends.mapping import Allocate
from dsa.modules.candidates import Candidate, find_candidates
from dsa.modules.disk_module import DiskModule, Source, table_spec_of
from dsa.modules.embedding import DiskEmbedding, DiskEmbeddingBag
from dsa.modules.exchanging import carry_over, exchange
from dsa.modules.pretrained import pretrained_options
from dsa.modules.setting import zero_padding
from dsa.optimizers.arguments import DEFAULT_BACKEND, DEFAULT_FRACTION, StateDtype, storage_choice
from dsa.optimizers.disk_parameter import DiskParameter, usable_seed
from dsa.state.sharing import join_tables
from dsa.state.state_directory import StateDirectory
from dsa.state.storage import Durability, TableSpec
from dsa.state.table_files import table_bytes

__all__ = ["Conversion", "ConvertedTable", "convert_"]

Draw = Callable[[str, int, int], Source]


@final
@dataclass(frozen=True, slots=True)
class ConvertedTable:
    """A table that has taken the place of a weight in memory.

    Args:
        name: Its name in the state directory: the module's in the model.
        modules: The names of all modules that look rows up in it.
        rows: Rows N.
        dim: Elements of a row D.
        memory_bytes: What its weights would take in memory, in the dtype that the module has.
        disk_bytes: The length of its files with the optimizer's state, once every row is written.
    """

    name: str
    modules: tuple[str, ...]
    rows: int
    dim: int
    memory_bytes: int
    disk_bytes: int


@final
@dataclass(frozen=True, slots=True)
class Conversion:
    """What `convert_` has replaced; ``print`` shows it as a table.

    Args:
        state_dir: The state directory.
        tables: Its tables of this model.
    """

    state_dir: str
    tables: tuple[ConvertedTable, ...]

    def __str__(self) -> str:
        head = ("table", "rows", "dim", "in memory", "on disk")
        lines = [
            (each.name, f"{each.rows:,}", str(each.dim), _size(each.memory_bytes), _size(each.disk_bytes))
            for each in self.tables
        ]
        lines.append(
            (
                "all",
                f"{sum(each.rows for each in self.tables):,}",
                "",
                _size(sum(each.memory_bytes for each in self.tables)),
                _size(sum(each.disk_bytes for each in self.tables)),
            )
        )
        shared = [
            f"{each.name} is also the weight of {', '.join(each.modules[1:])}"
            for each in self.tables
            if len(each.modules) > 1
        ]
        return "\n".join([*_aligned([head, *lines]), *shared])


def convert_(
    model: torch.nn.Module,
    state_dir: str | os.PathLike[str],
    min_rows: int = 100_000,
    *,
    skip: Collection[str] = (),
    init: Draw | None = None,
    state: str = "adam",
    state_dtype: StateDtype | None = None,
    device: torch.device | str | None = None,
    backend: str | Layout = DEFAULT_BACKEND,
    allocate: Allocate | None = None,
    durability: Durability | None = None,
    async_writes: bool = False,
    resume: bool | None = None,
) -> Conversion:
    """Replace the large embeddings of a model by modules on disk, in place: all of them, or none.

    Every `torch.nn.Embedding` and `torch.nn.EmbeddingBag` becomes a `DiskEmbedding` or `DiskEmbeddingBag` of
    the same place, options, dtype, device, mode and hooks; its table has the module's name. Weights are taken
    over block by block. Modules on the meta device have none: their rows are drawn when they are touched, by
    the module's own rule, N(0, 1). Two embeddings with one weight look rows up in one table. Build optimizers
    afterwards.

    Args:
        model: The model; nothing else in it changes.
        state_dir: The state directory.
        min_rows: Rows of the smallest embedding that is replaced.
        skip: Names of modules that stay as they are.
        init: ``init(name, rows, dim)`` returns a table's first weights, a rule of `dsa.init` or an array,
            instead of those that the module has.
        state: See `DiskEmbedding`; for every table.
        state_dtype: See `DiskEmbedding`; likewise.
        device: Where rows of modules on the meta device are handed out; the CPU when None.
        backend: See `DiskEmbedding`; likewise the further arguments.
        allocate: See `DiskEmbedding`.
        durability: See `DiskEmbedding`.
        async_writes: See `DiskEmbedding`.
        resume: See `DiskEmbedding`. True opens the tables that a model of this kind was converted to before;
            the weights that the model has are left alone.

    Returns:
        What was replaced.

    Raises:
        ValueError: there is nothing to replace, an embedding can't be replaced as it is, or its weight is
            tied to another kind of module; nothing has changed.
        StateError: the directory can't be used; see `dsa.errors`. Nothing has changed.
        DiskSpaceError: there is not enough room; nothing has changed.

    Example:
        >>> import tempfile
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Embedding(10**8, 64), torch.nn.Linear(64, 1))
        >>> converted = convert_(model, tempfile.mkdtemp(), allocate="sparse")
        >>> [(table.name, table.rows) for table in converted.tables]
        [('0', 100000000)]
        >>> model[0](torch.tensor([7, 99_999_999])).shape
        torch.Size([2, 64])
        >>> model[0].close()
    """
    candidates = find_candidates(model, min_rows, skip)
    specs = [_spec(each, init, state, state_dtype) for each in candidates]
    for each in candidates:
        usable_seed(_device(each, device), each.weight.dtype)
    choice = storage_choice(backend, allocate, durability, async_writes)
    holder = _Holder()
    directory, tables = join_tables(state_dir, specs, holder, resume, choice)
    try:
        replacements: dict[torch.nn.Module, torch.nn.Module] = {}
        for each, table in zip(candidates, tables, strict=True):
            weight = DiskParameter(
                directory, table, _device(each, device), each.weight.dtype, each.weight.requires_grad
            )
            _keep_hooks(each.weight, weight)
            replacements.update(_layers(each, weight))
            directory.users[table.name] = weight
        exchange(model, replacements)
    except BaseException:
        _let_go(directory, specs)
        raise
    converted = [_described(each, spec, directory) for each, spec in zip(candidates, specs, strict=True)]
    return Conversion(str(directory.path), tuple(converted))


class _Holder:
    """Holds the tables until the modules do."""


def _spec(candidate: Candidate, init: Draw | None, state: str, state_dtype: StateDtype | None) -> TableSpec:
    weight, name = candidate.weight, candidate.name
    rows, dim = weight.shape
    source: Source | None = None if weight.is_meta else weight.detach()
    if init is not None:
        source = init(name, rows, dim)
    spec = table_spec_of(name, rows, dim, source, 0.0, state, DEFAULT_FRACTION, state_dtype)
    if (spec.source.rows, spec.source.dim) != (rows, dim):
        raise ValueError(
            f"init gives {spec.source.rows} x {spec.source.dim} for {name!r}, which is {rows} x {dim}: make "
            "them equal"
        )
    return spec


def _device(candidate: Candidate, device: torch.device | str | None) -> torch.device | str:
    if candidate.weight.is_meta:
        return "cpu" if device is None else device
    return candidate.weight.device


def _layers(candidate: Candidate, weight: DiskParameter) -> dict[torch.nn.Module, torch.nn.Module]:
    """Return the modules on disk that take the places of those of a weight."""
    made: dict[torch.nn.Module, torch.nn.Module] = {}
    for old in candidate.modules:
        options = pretrained_options(old)
        del options["scale_grad_by_freq"]
        kind: type[DiskModule] = DiskEmbeddingBag if isinstance(old, torch.nn.EmbeddingBag) else DiskEmbedding
        layer = kind._over(weight, **options)
        zero_padding(weight, layer.padding_idx)
        carry_over(old, layer)
        made[old] = layer
    return made


def _keep_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    hooks: dict[int, Callable[..., Any]] = getattr(old, "_backward_hooks", None) or {}
    for hook in hooks.values():
        new.register_hook(hook)
    later: dict[int, Callable[..., Any]] = getattr(old, "_post_accumulate_grad_hooks", None) or {}
    for hook in later.values():
        new.register_post_accumulate_grad_hook(hook)


def _let_go(directory: StateDirectory, specs: Sequence[TableSpec]) -> None:
    """Close a directory that nobody else uses."""
    if set(directory.users) <= {spec.name for spec in specs}:
        directory.close()


def _described(candidate: Candidate, spec: TableSpec, directory: StateDirectory) -> ConvertedTable:
    rows, dim = candidate.weight.shape
    return ConvertedTable(
        candidate.name,
        candidate.places,
        rows,
        dim,
        rows * dim * candidate.weight.element_size(),
        table_bytes(rows, spec.schema, directory.storage.layout),
    )


def _size(count: int) -> str:
    power = min(max(len(str(count)) - 1, 0) // 3, 4)
    return f"{count / 1000**power:.1f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if number == 0 else text.rjust(width)
            for number, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
