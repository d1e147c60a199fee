"""Passes between records and arrays that hold one field of every row."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dsa.kernels.checksums import add_word
from dsa.kernels.compiled import compiled
from dsa.kernels.layout import Words
from dsa.kernels.prefetching import AHEAD, LINE_WORDS, prefetch_word
from dsa.schema import Rows

__all__ = [
    "Units",
    "gather_column",
    "gather_summed",
    "scatter_column",
    "scatter_summed",
    "sum_column",
    "unit_of",
    "units_of",
]

Units = NDArray[np.signedinteger[Any]]
"""A matrix of 32-bit words, or of 16-bit ones for fields whose rows are no whole number of words."""

_WORD: Final = np.dtype(np.int32)
_HALF: Final = np.dtype(np.int16)
_NARROW_AHEAD: Final = 64


def unit_of(row_bytes: int) -> np.dtype[np.signedinteger[Any]]:
    """Return the integer that a row of a field is a whole number of.

    Example:
        >>> unit_of(512), unit_of(6)
        (dtype('int32'), dtype('int16'))
    """
    return _HALF if row_bytes % _WORD.itemsize else _WORD


def units_of(records: NDArray[Any], unit: np.dtype[np.signedinteger[Any]]) -> Units:
    """View C-contiguous records as a matrix of integers, without a copy."""
    return records.view(np.uint8).reshape(len(records), records.dtype.itemsize).view(unit)


@compiled
def _ask_ahead(table: Units, rows: Rows, p: int, first: int) -> None:
    # A row of one number takes no time: to hide the latency of its line it must be asked for much earlier.
    width = table.shape[1]
    ahead = max(AHEAD, _NARROW_AHEAD // width)
    if p + ahead < rows.shape[0]:
        for column in range(0, width, LINE_WORDS):
            prefetch_word(table, rows[p + ahead] - first, column)  # type: ignore[call-arg]  # numba passes it


@compiled
def gather_column(table: Units, rows: Rows, first: int, records: Units, column: int) -> None:
    """Copy ``records[p, column:] = table[rows[p] - first]``, as many units as the table has columns."""
    width = table.shape[1]
    for p in range(rows.shape[0]):
        _ask_ahead(table, rows, p, first)
        source = table[rows[p] - first]
        target = records[p, column : column + width]  # indexed from 0, or the loop is not vectorised
        for j in range(width):
            target[j] = source[j]


@compiled
def scatter_column(table: Units, rows: Rows, first: int, records: Units, column: int) -> None:
    """Copy ``table[rows[p] - first] = records[p, column:]``, as many units as the table has columns."""
    width = table.shape[1]
    for p in range(rows.shape[0]):
        _ask_ahead(table, rows, p, first)
        target = table[rows[p] - first]
        source = records[p, column : column + width]
        for j in range(width):
            target[j] = source[j]


@compiled
def _summed(units: Units, factors: Words, total: np.int32) -> np.int32:
    # A loop of its own: with the copying it needs checks for overlaps, and was measured to be slower.
    for j in range(units.shape[0]):
        total = add_word(total, np.int32(units[j]), factors[j])
    return total


@compiled
def gather_summed(
    table: Units, rows: Rows, first: int, records: Units, column: int, factors: Words, sums: Words
) -> None:
    """Copy as `gather_column` does, and add what was copied to the records' checksums.

    Args:
        table: See `gather_column`; likewise the others.
        rows: See there.
        first: See there.
        records: See there.
        column: See there.
        factors: One for each unit of a row, see `dsa.kernels.checksums`.
        sums: ``(B,)``, added to.
    """
    width = table.shape[1]
    for p in range(rows.shape[0]):
        _ask_ahead(table, rows, p, first)
        source = table[rows[p] - first]
        target = records[p, column : column + width]
        for j in range(width):
            target[j] = source[j]
        sums[p] = _summed(source, factors, sums[p])


@compiled
def scatter_summed(
    table: Units, rows: Rows, first: int, records: Units, column: int, factors: Words, sums: Words
) -> None:
    """Copy as `scatter_column` does, and add what was copied to the checksums; see `gather_summed`."""
    width = table.shape[1]
    for p in range(rows.shape[0]):
        _ask_ahead(table, rows, p, first)
        target = table[rows[p] - first]
        source = records[p, column : column + width]
        for j in range(width):
            target[j] = source[j]
        sums[p] = _summed(source, factors, sums[p])


@compiled
def sum_column(records: Units, column: int, factors: Words, sums: Words) -> None:
    """Add a field of records to their checksums, as many units from `column` on as there are factors."""
    width = factors.shape[0]
    for p in range(records.shape[0]):
        sums[p] = _summed(records[p, column : column + width], factors, sums[p])
