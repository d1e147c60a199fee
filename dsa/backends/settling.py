"""Records that look torn: another thread or process may be in the middle of writing them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np

from dsa.schema import TORN, Records, Rows

__all__ = ["settle"]

_PAUSES: Final = (0.0, 0.001, 0.004)
"""Seconds: a record is written within a microsecond, unless its thread has lost the processor."""


def settle(gather: Callable[[Rows], Records], rows: Rows, records: Records) -> None:
    """Read the records that look torn again, in place; those that stay so are torn.

    Args:
        gather: Returns the records of rows, those that look torn with the stamp `TORN`.
        rows: ``(B,)``.
        records: ``(B,)``, as `gather` has returned them.
    """
    for pause in _PAUSES:
        torn = np.flatnonzero(records["s"] == TORN)
        if len(torn) == 0:
            return
        time.sleep(pause)
        records[torn] = gather(rows[torn])
