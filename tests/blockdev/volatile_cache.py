"""What a disk with a volatile cache holds, and what it may hold after a loss of power.

A write goes to the cache; a flush makes durable all that was written before. When power is lost, what was
flushed is there, and of what was written since any part: each piece of each write has arrived or not. Pieces
are sectors, pages or whole writes. Later pieces of the same place win over earlier ones.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["GRAINS", "SHARES", "Outcome", "VolatileCache", "outcome"]

BLOCK = 1 << 16
GRAINS = (512, 4096, 0)
"""Sizes of the pieces that arrive or not; 0 for whole writes."""
SHARES = (0.0, 0.1, 0.5, 0.9, 1.0)
"""How many of them arrive."""

Write = tuple[int, bytes]
Range = tuple[int, int]


class Outcome(NamedTuple):
    """How a loss of power comes out: the size of the pieces, the share of them that arrive, and a seed."""

    grain: int
    share: float
    seed: int


def outcome(rng: random.Random) -> Outcome:
    """Draw one."""
    return Outcome(rng.choice(GRAINS), rng.choice(SHARES), rng.getrandbits(32))


@dataclass
class Held:
    """The disk at one instant: the blocks that were flushed, and the writes since.

    Args:
        size: Bytes of the disk.
        durable: The blocks that were ever written, by number.
        pending: In order.
    """

    size: int
    durable: dict[int, bytes]
    pending: list[Write]

    def draw(self, chosen: Outcome, path: str) -> None:
        """Write one of the images that power may leave into a sparse file."""
        rng = random.Random(chosen.seed)
        with open(path, "wb") as file:
            file.truncate(self.size)
            for number, block in self.durable.items():
                if block.count(0) != len(block):
                    os.pwrite(file.fileno(), block, number * BLOCK)
            for start, data in self.pending:
                grain = chosen.grain or len(data)
                for at in range(0, len(data), grain):
                    if rng.random() < chosen.share:
                        os.pwrite(file.fileno(), data[at : at + grain], start + at)


class VolatileCache:
    """A disk. Every call may come from any thread.

    Args:
        size: Bytes, all zero at first; memory is taken for blocks that are written.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.writes = self.flushes = 0
        self.failed_writes = self.failed_flushes = 0
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._now, self._durable = mmap.mmap(-1, self.size), mmap.mmap(-1, self.size)
        self._touched: set[int] = set()
        self._pending: list[Write] = []
        self._bad: list[Range] = []
        self._bad_writes = self._bad_flushes = 0

    def clear(self) -> None:
        """Become a new disk."""
        with self._lock:
            self._clear()

    def load(self, path: str) -> None:
        """Become a new disk with the content of a sparse file, all of it durable."""
        with self._lock, open(path, "rb") as file:
            self._clear()
            start = 0
            while (start := _next_data(file.fileno(), start)) < self.size:
                start -= start % BLOCK
                block = os.pread(file.fileno(), BLOCK, start)
                self._now[start : start + len(block)] = self._durable[start : start + len(block)] = block
                self._touched.add(start // BLOCK)
                start += BLOCK

    def read(self, start: int, size: int) -> bytes:
        """Return bytes as they were last written."""
        with self._lock:
            return self._now[start : start + size]

    def write(self, start: int, data: bytes) -> None:
        """Take bytes into the cache.

        Raises:
            OSError: they fall into a range that fails; none of them is taken.
        """
        with self._lock:
            stop = start + len(data)
            if self._bad_writes and any(start < end and stop > begin for begin, end in self._bad):
                self._bad_writes -= 1
                self.failed_writes += 1
                raise OSError(errno.EIO, "injected: the disk refused a write")
            self._now[start:stop] = data
            self._pending.append((start, data))
            self._touched.update(range(start // BLOCK, -(-stop // BLOCK)))
            self.writes += 1

    def flush(self) -> None:
        """Make durable all that was written.

        Raises:
            OSError: it fails, as was asked; nothing is durable that was not before.
        """
        with self._lock:
            if self._bad_flushes:
                self._bad_flushes -= 1
                self.failed_flushes += 1
                raise OSError(errno.EIO, "injected: the disk refused a flush")
            for start, data in self._pending:
                self._durable[start : start + len(data)] = data
            self._pending.clear()
            self.flushes += 1

    def fail(self, ranges: Sequence[Range], times: int = 1 << 60) -> None:
        """Let so many of the next writes into ranges of bytes fail; none for no ranges."""
        with self._lock:
            self._bad, self._bad_writes = list(ranges), times if ranges else 0

    def fail_flushes(self, times: int) -> None:
        """Let so many of the next flushes fail."""
        with self._lock:
            self._bad_flushes = times

    def figures(self) -> dict[str, int]:
        """Return what was counted: writes and flushes, those that failed, and writes that are not flushed."""
        with self._lock:
            return {
                "writes": self.writes,
                "flushes": self.flushes,
                "failed_writes": self.failed_writes,
                "failed_flushes": self.failed_flushes,
                "pending": len(self._pending),
            }

    def hold(self) -> Held:
        """Return the disk as it is at this instant."""
        with self._lock:
            durable = {
                number: self._durable[number * BLOCK : (number + 1) * BLOCK] for number in self._touched
            }
            return Held(self.size, durable, list(self._pending))


def _next_data(descriptor: int, start: int) -> int:
    try:
        return os.lseek(descriptor, start, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return 1 << 62
        raise
