"""Changes of whole tables, block by block."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dsa.curvature import CurvatureMap, recurve
from dsa.errors import StateWarning
from dsa.kernels.checks import first_implausible
from dsa.manifolds import manifold_of
from dsa.schema import Records, Rows
from dsa.state import StateDirectory
from dsa.table import Table, blank_records

__all__ = ["change_curvature", "implausible_rows", "reproject"]


def change_curvature(
    state: StateDirectory, table: Table, k: float, mapping: CurvatureMap, reset_moments: bool
) -> None:
    """Carry every row of a table over to another curvature.

    Rows that were never written stay so: their first weights are drawn for the new space.

    Raises:
        CorruptRowError: a row holds implausible values; nothing has changed.
    """
    if k == table.k and not reset_moments:
        return
    old, new = table.space, manifold_of(k)
    with state.whole_table_change(f"set_curvature of table {table.name!r} from k={table.k:g} to k={k:g}"):
        for rows, records in _written(table):
            changed = recurve(records, old, new, table.second_moment, mapping, reset_moments)
            changed["s"] = state.global_step + 1
            table.backend.write(rows, changed)
        table.k = k


def reproject(state: StateDirectory, table: Table) -> int:
    """Bring the rows of a table into its space and reset those that hold implausible values.

    Returns:
        The number of rows projected.
    """
    projected = reset = 0
    for rows, records in _written(table):
        stamp = state.global_step + 1
        broken = implausible_rows(records)
        records[broken] = blank_records(table, int(broken.sum()), stamp if table.initializer is None else 0)
        weights, outside = table.space.project(records["w"].astype(np.float64))
        records["w"][outside] = weights[outside]
        records["s"][outside] = stamp
        moved = broken | outside
        if moved.any():
            table.backend.write(rows[moved], records[moved])
        projected += int(outside.sum())
        reset += int(broken.sum())
    if reset:
        warnings.warn(
            f"{reset} rows of table {table.name!r} held implausible values and were reset: if that is "
            "unexpected, check the disk",
            StateWarning,
            stacklevel=4,
        )
    return projected


def implausible_rows(records: Records) -> NDArray[np.bool_]:
    """Tell which records hold implausible values, ``(B,)`` bool."""
    broken = np.zeros(len(records), dtype=np.bool_)
    start = 0
    while (position := first_implausible(records[start:])) >= 0:
        start += position + 1
        broken[start - 1] = True
    return broken


def _written(table: Table) -> Iterator[tuple[Rows, Records]]:
    """Yield the rows of a table that were ever written, and their records, in blocks."""
    for first, records in table.backend.scan(0, len(table)):
        written = np.flatnonzero(records["s"] != 0)
        if len(written) == len(records):
            yield np.arange(first, first + len(records)), records
        elif len(written):
            yield first + written, records[written]
