"""How often ids without a row have come, estimated in a memory that does not grow.

A count-min sketch (Cormode & Muthukrishnan 2005, An improved data stream summary) with conservative update
(Estan & Varghese 2002, New directions in traffic measurement and accounting): each id has one cell in each of
four lines, the smallest of which is at least the number of its arrivals, and only cells that are too small
are raised. So that a long stream does not fill it up, there are two planes of cells: arrivals are counted in
one, and every `_SPAN` of them the older plane is emptied and takes over. An id's estimate is the sum of both:
arrivals longer ago than that are forgotten.

It is a file beside the table's. A transaction that counts carries an `ArrivalChange` in its journal entry,
which may be applied again. After a loss of power the file is what the device holds: an estimate still, of
fewer arrivals.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from dsa.backends import system
from dsa.backends.id_map import Ids
from dsa.state.numbers import decode_numbers, encode_numbers

__all__ = ["SKETCH_BYTES", "ArrivalChange", "Arrivals", "arrivals_file"]

_LINES: Final = 4
_WIDTH: Final = 1 << 16
_SPAN: Final = 8 * _WIDTH
_MAGIC: Final = int.from_bytes(b"dsaseen1", "little")
SKETCH_BYTES: Final = system.PAGE + 2 * _LINES * _WIDTH * 4
"""What the sketch of a table takes on disk."""

# The increments of SplitMix64's streams (Steele, Lea & Flood 2014), one for each line.
_SEEDS: Final = np.arange(1, _LINES + 1, dtype=np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15)


@final
@dataclass(frozen=True, slots=True, eq=False)
class ArrivalChange:
    """What a transaction counts.

    Args:
        cells: ``(n,)`` int64, distinct cells of a plane.
        counts: ``(n,)`` int64, what they are at least from here on.
        total: Arrivals that were ever counted, these among them; it tells the plane, too.
    """

    cells: NDArray[np.int64]
    counts: NDArray[np.int64]
    total: int

    def to_json(self) -> dict[str, Any]:
        """Return the form that a journal entry carries."""
        return {
            "kind": "count",
            "cells": encode_numbers(self.cells),
            "counts": encode_numbers(self.counts),
            "total": self.total,
        }

    @classmethod
    def from_json(cls, data: Any) -> ArrivalChange:  # noqa: ANN401 - JSON is untyped until it has been checked here
        """Rebuild what `to_json` has made.

        Raises:
            ValueError: the data is not that.
        """
        cells, counts = decode_numbers(data["cells"]), decode_numbers(data["counts"])
        inside = ((cells >= 0) & (cells < _LINES * _WIDTH)).all() and ((counts >= 0) & (counts < 2**32)).all()
        if len(cells) != len(counts) or not inside or int(data["total"]) < 0:
            raise ValueError(f"{data!r} is no count of arrivals: restore the directory from a copy")
        return cls(cells, counts, int(data["total"]))


def arrivals_file(file: Path) -> Path:
    """Return where the sketch of a table's file is."""
    return file.with_name(f"{file.name}.seen")


@final
class Arrivals:
    """The sketch of an open table. One thread at a time.

    Args:
        file: The table's file.

    Raises:
        DiskSpaceError: there is no room to make it.
    """

    def __init__(self, file: Path) -> None:
        path = arrivals_file(file)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        try:
            if os.fstat(handle).st_size != SKETCH_BYTES:
                os.ftruncate(handle, 0)
            system.reserve(handle, SKETCH_BYTES, str(path.parent))
            self._mapping = mmap.mmap(handle, SKETCH_BYTES)
        finally:
            os.close(handle)
        self._header = np.frombuffer(self._mapping, np.int64, 2)
        planes = np.frombuffer(self._mapping, np.uint32, offset=system.PAGE)
        self._planes = planes.reshape(2, _LINES * _WIDTH)
        if self._header[0] != _MAGIC or self._header[1] < 0:
            self._planes[:] = 0
            self._header[:] = _MAGIC, 0

    def count(self, ids: Ids, times: NDArray[np.int64]) -> tuple[NDArray[np.int64], ArrivalChange]:
        """Return how often ids have come, these arrivals among them, and what that changes; nothing changes.

        Args:
            ids: ``(n,)`` distinct ids.
            times: ``(n,)`` int64, how often each comes now.
        """
        total = int(self._header[1]) + int(times.sum())
        now, before = self._plane(total), self._planes[(total // _SPAN + 1) % 2]
        cells = _cells(ids)
        mine = now[cells].min(axis=0).astype(np.int64) + times
        lasting = before[cells].min(axis=0).astype(np.int64)
        wanted = np.minimum(np.broadcast_to(mine, cells.shape), 2**32 - 1)
        distinct, first = np.unique(cells.reshape(-1), return_inverse=True)
        counts = now[distinct].astype(np.int64)
        np.maximum.at(counts, first.reshape(-1), wanted.reshape(-1))
        return mine + lasting, ArrivalChange(distinct, counts, total)

    def apply(self, change: ArrivalChange) -> None:
        """Adopt what a transaction has counted; doing so again changes nothing."""
        known, epoch = int(self._header[1]), change.total // _SPAN
        if epoch < known // _SPAN:
            return
        if epoch > known // _SPAN:
            self._planes[epoch % 2] = 0
            if epoch > known // _SPAN + 1:
                self._planes[(epoch + 1) % 2] = 0
        plane = self._planes[epoch % 2]
        plane[change.cells] = np.maximum(plane[change.cells], change.counts.astype(np.uint32))
        self._header[1] = max(known, change.total)

    def close(self) -> None:
        """Let the file go; closing twice is silent."""
        self._header, self._planes = np.zeros(2, np.int64), np.zeros((2, 0), np.uint32)
        with contextlib.suppress(BufferError):  # an error that somebody keeps may hold a view
            self._mapping.close()

    def _plane(self, total: int) -> NDArray[np.uint32]:
        """Return the plane in which arrivals are counted, empty where it is the next one."""
        if total // _SPAN > int(self._header[1]) // _SPAN:
            return np.zeros(_LINES * _WIDTH, np.uint32)
        plane: NDArray[np.uint32] = self._planes[total // _SPAN % 2]
        return plane


def _cells(ids: Ids) -> NDArray[np.int64]:
    """Return the cells of ids, ``(4, n)``: SplitMix64 of the id, in a stream for each line."""
    with np.errstate(over="ignore"):
        mixed = ids.view(np.uint64)[None] + _SEEDS
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    lines = np.arange(_LINES, dtype=np.uint64)[:, None] * np.uint64(_WIDTH)
    return np.asarray(mixed % np.uint64(_WIDTH) + lines, np.int64)
