"""Records that are newer than those of a table, laid over what was read from it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsa.schema import Records

__all__ = ["lay_over"]


def lay_over(
    records: Records, found: NDArray[np.int64], firsts: Sequence[int], batches: Sequence[Records]
) -> int:
    """Replace records by those that some batches hold of the same rows; return how many that were.

    Args:
        records: ``(B,)``, changed in place.
        found: ``(B,)`` int64, the number of the record among those of all batches, or -1.
        firsts: The number of the first record of each batch, increasing.
        batches: The batches.

    Example:
        >>> records, batch = np.zeros(3, [("t", "i4")]), np.ones(2, [("t", "i4")])
        >>> lay_over(records, np.array([-1, 7, -1]), [6], [batch]), records["t"].tolist()
        (1, [0, 1, 0])
    """
    hits = np.flatnonzero(found >= 0)
    owners = np.searchsorted(firsts, found[hits], side="right") - 1
    for owner in np.unique(owners):
        mine = hits[owners == owner]
        records[mine] = batches[owner][found[mine] - firsts[owner]]
    return len(hits)
