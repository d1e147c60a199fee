"""Some rows of a table that may be too large to draw."""

from __future__ import annotations

from typing import Final

import numpy as np

from dsa.inspection import TableView
from dsa.schema import Rows, is_keyed

__all__ = ["touched_rows"]

_CANDIDATES: Final = 100_000


def touched_rows(table: TableView, most: int, field: str = "s") -> Rows:
    """Return rows that were ever written, at most so many, in order.

    Of a table of more than 100,000 rows, as many are looked at, evenly spread.

    Args:
        table: The table.
        most: How many to return.
        field: Whose number is not 0: ``"s"`` for rows that were ever written, ``"t"`` for those ever updated.
    """
    random = np.random.default_rng(table.rows)
    candidates = np.arange(table.rows)
    if table.rows > _CANDIDATES:
        # One of each stretch, so that they cover the table.
        starts = np.arange(_CANDIDATES) * table.rows // _CANDIDATES
        widths = np.diff(np.append(starts, table.rows))
        candidates = starts + (random.random(_CANDIDATES) * widths).astype(np.int64)
        table.announce(candidates)
    if is_keyed(table.schema) and field == "s":
        field = "live"  # a row that was deleted has a stamp, and belongs to nobody
    touched: Rows = candidates[table[field][candidates] != 0]
    if len(touched) > most:
        touched = np.sort(random.choice(touched, most, replace=False))
    return touched
