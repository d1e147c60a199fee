"""Taking over the state of other optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from dsa.rules.init import FromArray
from dsa.rules.updates import label_of
from dsa.schema import Records, store_numbers
from dsa.state.content import TableContent
from dsa.state.replacement import replace_tables, transformed
from dsa.state.state_directory import StateDirectory
from dsa.state.table import Table, fill_untouched, stamp_of

__all__ = ["import_sparse_adam"]

_KEYS: Final = {"step", "exp_avg", "exp_avg_sq"}
_BLOCK_BYTES: Final = 4 << 20


def import_sparse_adam(state: StateDirectory, tables: Sequence[Table], foreign: Any) -> None:  # noqa: ANN401 - unchecked input
    """Write the moments of a `torch.optim.SparseAdam` into tables, and its step into every row's counter.

    All of it or nothing, whatever dies.

    Args:
        state: The state of the tables.
        tables: One per parameter, in the optimizer's order.
        foreign: The ``"state"`` of its state dict.

    Raises:
        ValueError: entries are missing, unknown, or of another shape; nothing has changed.
    """
    if isinstance(foreign, Mapping) and not set(foreign) <= set(range(len(tables))):
        raise ValueError(
            f"the state dict holds the parameters {sorted(foreign, key=str)} but the optimizer has "
            f"{len(tables)}: pass the state of the same model"
        )
    entries = [_checked(foreign, index, table) for index, table in enumerate(tables)]
    replace_tables(
        state, [_with_moments(table, *entry) for table, entry in zip(tables, entries, strict=True)]
    )


def _with_moments(table: Table, step: int, first: FromArray, second: FromArray) -> TableContent:
    def changed(start: int, records: Records) -> Records:
        stop = start + len(records)
        # What was never written has its first weight, which no rule draws any more once moments are there.
        fill_untouched(table, np.arange(start, stop), records)
        store_numbers(records, "m", first.rows_of(start, stop))
        store_numbers(records, "v", second.rows_of(start, stop))
        records["t"], records["s"] = step, stamp_of(0)
        return records

    return replace(transformed(table, changed), facts=replace(table.facts, steps=step))


def _checked(foreign: Any, index: int, table: Table) -> tuple[int, FromArray, FromArray]:  # noqa: ANN401
    entry = foreign.get(index) if isinstance(foreign, Mapping) else None
    if not isinstance(entry, Mapping) or set(entry) != _KEYS:
        found = sorted(entry) if isinstance(entry, Mapping) else "nothing"
        raise ValueError(
            f"the state dict holds {found} for parameter {index} ({table.name!r}) but torch.optim.SparseAdam "
            f"stores {sorted(_KEYS)}: pass one of SparseAdam, or one of DiskSparseAdam"
        )
    shape = (len(table), table.dim)
    for key in ("exp_avg", "exp_avg_sq"):
        given = tuple(getattr(entry[key], "shape", ()))
        if given != shape:
            raise ValueError(
                f"{key!r} of parameter {index} is {given} but table {table.name!r} is {shape}: pass the "
                "state of the same model"
            )
    kept = {field.name for field in table.facts.schema.fields if field.per == "element"}
    if not {"m", "v"} <= kept:
        raise ValueError(
            f"table {table.name!r} has the update rule {label_of(table.rule)}, which does not keep both "
            "moments per element as SparseAdam does: build the optimizer with second_moment='coordinate'"
        )
    step, first, second = int(entry["step"]), FromArray(entry["exp_avg"]), FromArray(entry["exp_avg_sq"])
    if not 0 <= step < 2**31 - 1:
        raise ValueError(
            f"'step' of parameter {index} is {step}, no int32 >= 0: pass the state dict of a SparseAdam"
        )
    rows_per_block = max(1, _BLOCK_BYTES // (4 * table.dim))
    for (_, _), (start, block) in zip(
        first.blocks(rows_per_block), second.blocks(rows_per_block), strict=True
    ):
        if (block < 0.0).any():
            raise ValueError(
                f"'exp_avg_sq' of parameter {index} holds a negative number in rows from {start} on: pass "
                "the state dict of a SparseAdam"
            )
    return step, first, second
