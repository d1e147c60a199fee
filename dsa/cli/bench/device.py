"""How many random pages the disk reads and writes in a second."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import numpy as np

from dsa.backends import system

__all__ = ["DeviceSpeed", "measure_device"]

_CHUNK: Final = 1 << 20


@final
@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """Random input and output of 4 KiB pages.

    Args:
        reads_per_second: The best over the queue depths.
        writes_per_second: The best over the queue depths.
        read_depth: The queue depth, in threads, at which that was.
        write_depth: The same for writes.
        direct: Whether the page cache was passed by (O_DIRECT).
    """

    reads_per_second: float
    writes_per_second: float
    read_depth: int
    write_depth: int
    direct: bool

    def limit(self, pages: float) -> float:
        """Return the rows per second at which reading and writing `pages` pages for each saturates the disk.

        Example:
            >>> DeviceSpeed(90_000.0, 45_000.0, 32, 32, True).limit(1.5)
            20000.0
        """
        return 1.0 / (pages / self.reads_per_second + pages / self.writes_per_second)


def measure_device(
    directory: Path, *, size: int, seconds: float, depths: Sequence[int] = (32, 64)
) -> DeviceSpeed | None:
    """Measure on a scratch file, which is removed again.

    Args:
        directory: Where the scratch file is made.
        size: Its bytes, a multiple of a MiB.
        seconds: In all, not counting the making of the file.
        depths: Numbers of threads that each have one request under way.

    Returns:
        None where the system has no `os.preadv`.
    """
    if not hasattr(os, "preadv"):
        return None
    path = directory / "scratch.dat"
    try:
        _fill(path, size)
        descriptor, direct = _open(path)
        try:
            share = seconds / (2 * len(depths))
            reads = [(_rate(_reader(descriptor), size, depth, share), depth) for depth in depths]
            writes = [(_rate(_writer(descriptor), size, depth, share), depth) for depth in depths]
        finally:
            os.close(descriptor)
    finally:
        path.unlink(missing_ok=True)
    (read_rate, read_depth), (write_rate, write_depth) = max(reads), max(writes)
    return DeviceSpeed(read_rate, write_rate, read_depth, write_depth, direct)


def _fill(path: Path, size: int) -> None:
    # Random content: a disk may keep zeros, or equal blocks, without storing them.
    with open(path, "wb") as file:
        for _ in range(0, size, _CHUNK):
            file.write(os.urandom(_CHUNK))
        file.flush()
        os.fsync(file.fileno())
        system.drop_cache(file.fileno())


def _open(path: Path) -> tuple[int, bool]:
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT), True
    except (AttributeError, OSError):
        descriptor = os.open(path, os.O_RDWR | getattr(os, "O_SYNC", 0))
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor, False


def _reader(descriptor: int) -> Callable[[mmap.mmap, int], object]:
    return lambda page, offset: os.preadv(descriptor, [page], offset)


def _writer(descriptor: int) -> Callable[[mmap.mmap, int], object]:
    return lambda page, offset: os.pwritev(descriptor, [page], offset)


def _rate(transfer: Callable[[mmap.mmap, int], object], size: int, depth: int, seconds: float) -> float:
    """Return the transfers per second of `depth` threads."""
    together = threading.Barrier(depth + 1)
    counts = [0] * depth
    failures: list[OSError] = []

    def work(number: int) -> None:
        page = mmap.mmap(-1, system.PAGE)
        page[:] = os.urandom(system.PAGE)
        offsets = np.random.default_rng(number).permutation(size // system.PAGE) * system.PAGE
        try:
            together.wait()
        except threading.BrokenBarrierError:
            return
        deadline = time.perf_counter() + seconds
        try:
            for offset in offsets.tolist():
                transfer(page, offset)
                counts[number] += 1
                if time.perf_counter() > deadline:
                    break
        except OSError as error:
            failures.append(error)
        page.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(depth)]
    try:
        for thread in threads:
            thread.start()
        together.wait()
        start = time.perf_counter()
        for thread in threads:
            thread.join()
    except BaseException:
        together.abort()  # Ctrl-C: threads that are not there yet don't wait for this one for ever
        raise
    if failures:
        raise failures[0]
    return sum(counts) / (time.perf_counter() - start)
