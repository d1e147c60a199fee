"""Taking over the state of torch's optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from dsa.rules.init import FromArray
from dsa.rules.updates import label_of
from dsa.schema import Records, store_numbers
from dsa.state.content import TableContent
from dsa.state.replacement import replace_tables, transformed
from dsa.state.state_directory import StateDirectory
from dsa.state.table import Table, fill_untouched, stamp_of

__all__ = ["TORCH_ADAGRAD", "TORCH_SPARSE_ADAM", "TorchOptimizer", "import_state"]

_BLOCK_BYTES: Final = 4 << 20


class TorchOptimizer(NamedTuple):
    """What an optimizer of torch keeps beside the count of steps.

    Args:
        name: Its class.
        fields: The field that stands for each of its tensors.
        needs: What a table has to keep, in words.
        option: How an optimizer of ours is built whose tables do.
    """

    name: str
    fields: Mapping[str, str]
    needs: str
    option: str


TORCH_SPARSE_ADAM: Final = TorchOptimizer(
    "SparseAdam",
    {"exp_avg": "m", "exp_avg_sq": "v"},
    "both moments per element",
    "second_moment='coordinate'",
)
TORCH_ADAGRAD: Final = TorchOptimizer("Adagrad", {"sum": "h"}, "a sum per element", "row_wise=False")


class _Entry(NamedTuple):
    """The state of one parameter: its steps, the numbers of each field, and what is taken from those >= 0."""

    step: int
    numbers: dict[str, FromArray]
    least: float


def import_state(
    state: StateDirectory,
    tables: Sequence[Table],
    foreign: Any,  # noqa: ANN401 - unchecked input
    optimizer: TorchOptimizer,
    least: Sequence[float] | None = None,
) -> None:
    """Write the state of an optimizer of torch into tables, and its step into every row's counter.

    All of it or nothing, whatever dies.

    Args:
        state: The state of the tables.
        tables: One per parameter, in the optimizer's order.
        foreign: The ``"state"`` of its state dict.
        optimizer: What it is of.
        least: Per table, what numbers that are never negative start with there, and don't here; None for 0.

    Raises:
        ValueError: entries are missing, unknown, or of another shape; nothing has changed.
    """
    if isinstance(foreign, Mapping) and not set(foreign) <= set(range(len(tables))):
        raise ValueError(
            f"the state dict holds the parameters {sorted(foreign, key=str)} but the optimizer has "
            f"{len(tables)}: pass the state of the same model"
        )
    starts = least or [0.0] * len(tables)
    entries = [
        _checked(foreign, index, table, optimizer, start)
        for index, (table, start) in enumerate(zip(tables, starts, strict=True))
    ]
    replace_tables(state, [_with_numbers(*each) for each in zip(tables, entries, strict=True)])


def _with_numbers(table: Table, entry: _Entry) -> TableContent:
    def changed(start: int, records: Records) -> Records:
        stop = start + len(records)
        # What was never written has its first weight, which no rule draws any more once moments are there.
        fill_untouched(table, np.arange(start, stop), records)
        for name, numbers in entry.numbers.items():
            block = numbers.rows_of(start, stop)
            if name in table.rule.non_negative:
                block = np.maximum(block - np.float32(entry.least), np.float32(0.0))
            store_numbers(records, name, block)
        if "t" in (records.dtype.names or ()):
            records["t"] = entry.step
        records["s"] = stamp_of(0)
        return records

    return replace(transformed(table, changed), facts=replace(table.facts, steps=entry.step))


def _checked(foreign: Any, index: int, table: Table, optimizer: TorchOptimizer, least: float) -> _Entry:  # noqa: ANN401
    entry = foreign.get(index) if isinstance(foreign, Mapping) else None
    name, keys = optimizer.name, {"step", *optimizer.fields}
    if not isinstance(entry, Mapping) or set(entry) != keys:
        found = sorted(entry) if isinstance(entry, Mapping) else "nothing"
        raise ValueError(
            f"the state dict holds {found} for parameter {index} ({table.name!r}) but torch.optim.{name} "
            f"stores {sorted(keys)}: pass one of {name}, or one of DiskSparse{name.removeprefix('Sparse')}"
        )
    shape = (len(table), table.dim)
    for key in optimizer.fields:
        given = tuple(getattr(entry[key], "shape", ()))
        if given != shape:
            raise ValueError(
                f"{key!r} of parameter {index} is {given} but table {table.name!r} is {shape}: pass the "
                "state of the same model"
            )
    kept = {field.name for field in table.facts.schema.fields if field.per == "element"}
    if not set(optimizer.fields.values()) <= kept:
        raise ValueError(
            f"table {table.name!r} has the update rule {label_of(table.rule)}, which does not keep "
            f"{optimizer.needs} as {name} does: build the optimizer with {optimizer.option}"
        )
    step = int(entry["step"])
    if not 0 <= step < 2**31 - 1:
        raise ValueError(
            f"'step' of parameter {index} is {step}, no int32 >= 0: pass the state dict of a {name}"
        )
    numbers = {field: FromArray(entry[key]) for key, field in optimizer.fields.items()}
    rows_per_block = max(1, _BLOCK_BYTES // (4 * table.dim))
    for key, field in optimizer.fields.items():
        for start, block in numbers[field].blocks(rows_per_block):
            if field in table.rule.non_negative and (block < 0.0).any():
                raise ValueError(
                    f"{key!r} of parameter {index} holds a negative number in rows from {start} on: pass "
                    f"the state dict of a {name}"
                )
    return _Entry(step, numbers, least)
