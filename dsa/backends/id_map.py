"""A map on disk from any int64 ids to rows: the index of a table whose rows are told by id.

It is derived: the truth about ids is with the rows. It says itself whether it can be trusted
(`IdMap.open`), and is made anew where it can't (`IdMap.rebuild`). Ten million ids take some 300 MB of file,
which is mapped: nothing of it is in the process's own memory.

*After a kill* the map holds every change that was complete, and of a batch that was being put or removed some
ids; whoever repeats the batch has it whole. *After a loss of power*, and as a copy of a map that was in use,
it is not trusted. Its first change marks it as not whole, on the device, before anything else is written.

*Readers* in other processes, and in other threads, see of a batch some ids or all while it is put; an id that
is in the map before and after is found, with a row that it has had meanwhile.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from dsa.backends import system
from dsa.backends.id_map_file import REPLACED, IdMapFile, retire, segments_of
from dsa.errors import RowTypeError, StateClosedError, StateCorruptError, StateFailedError, StateLockedError
from dsa.kernels.id_map import (
    COUNT,
    find_rows,
    put_rows,
    remove_ids,
    restore_rows,
    split_segment,
)
from dsa.schema import Rows

__all__ = ["IdMap", "Ids"]

Ids = NDArray[np.int64]

_WIDTH: Final = 4096
_BUSIEST: Final = 128
"""Entries of the directory for as many ids as a segment has slots, at most: random hashes ask for some 4."""
_SEEDS: Final = 8
_PAUSES: Final = (0.0, 0.0, 0.001, 0.004, 0.016, 0.064, 0.256)
"""Seconds that a reader waits for an id that is being moved."""
_BLOCK_SLOTS: Final = 1 << 18
"""Slots that are read at once."""
_LAST_ROW: Final = 2**63 - 2


@final
class IdMap:
    """Maps ids to rows, in a file. One thread of one process changes it at a time; any number may read.

    Make one with `create`, `open` or `rebuild`.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "users.ids"
        >>> ids = IdMap.create(path)
        >>> ids.put(np.array([-5, 2**62]), np.array([0, 1])).tolist()
        [-1, -1]
        >>> ids.find(np.array([2**62, 7])).tolist()
        [1, -1]
        >>> ids.close("step 3")
        >>> ids = IdMap.open(path, "step 3")
        >>> len(ids), ids.remove(np.array([-5])).tolist()
        (2, [0])
        >>> ids.close("step 4")
    """

    def __init__(self, file: IdMapFile) -> None:
        self._file = file
        self._owner = os.getpid()
        self._closed = self._failed = self._begun = False
        self._token: str | None = None

    @classmethod
    def create(cls, path: Path, *, width: int = _WIDTH, seed: int | None = None) -> IdMap:
        """Make a map of no ids; nothing is left behind when that fails.

        Args:
            path: The file; it must not exist.
            width: Slots of 16 bytes in a segment: what is added to the file at a time, and what an insertion
                waits for at most, measured to be 0.1 ms at 4,096.
            seed: Of the hash; None for a random one, as whoever may choose ids must not know it.

        Raises:
            FileExistsError: the file exists.
            DiskSpaceError: there is not enough room.
        """
        made = cls(IdMapFile.create(path, width, secrets.randbits(64) if seed is None else seed))
        made._begun = True
        return made

    @classmethod
    def open(cls, path: Path, token: str | None = None, *, writable: bool = True) -> IdMap:
        """Open a map that can be trusted.

        That is one that was closed with this token; and one whose process died while the system went on
        (`interrupted`), whatever the token: the batches that were put or removed last then have to be
        repeated.

        Args:
            path: The file.
            token: What it was closed with, such as a count of changes of the ids; None for anything.
            writable: False to read, also beside a process that changes it.

        Raises:
            StateCorruptError: it can't be trusted: `rebuild` it.
        """
        made = cls(IdMapFile.open(path, token, writable=writable))
        made._token = token
        return made

    @classmethod
    def rebuild(
        cls,
        path: Path,
        blocks: Iterable[tuple[Ids, Rows]],
        *,
        width: int = _WIDTH,
        seed: int | None = None,
    ) -> IdMap:
        """Make a map anew, beside what is there, and put it in its place at one instant.

        Args:
            path: The file.
            blocks: ``(ids, rows)``, ``(B,)`` int64 each; of an id that occurs twice the last row counts.
            width: See `create`.
            seed: See `create`.

        Raises:
            DiskSpaceError: there is not enough room; what was there is there.
        """
        beside = path.with_name(f"{path.name}.tmp")
        beside.unlink(missing_ok=True)
        made = cls.create(beside, width=width, seed=seed)
        try:
            for ids, rows in blocks:
                made.put(ids, rows)
            made._take_place(path)
        except BaseException:
            made._file.release()
            beside.unlink(missing_ok=True)
            raise
        return made

    @property
    def interrupted(self) -> bool:
        """Whether whoever changed it last has died: see `open`."""
        return self._file.interrupted

    def __len__(self) -> int:
        """Return the number of ids; beside a writer, as of one of his last batches."""
        return max(0, int(self._open_file().table.header[COUNT]))

    @property
    def nbytes(self) -> int:
        """Bytes of the file that are in use."""
        file = self._open_file()
        return system.PAGE + file.segments * file.table.width * 16

    def find(self, ids: Ids) -> Rows:
        """Return the row of each id, -1 for one that is not in the map.

        Args:
            ids: ``(B,)`` int64, or uint64 by two's complement; they may repeat.

        Raises:
            StateLockedError: an id was being moved all the time.
        """
        ids, rows = _as_ids(ids), np.empty(len(ids), np.int64)
        file, position = self._current_file(), 0
        while True:
            for pause in _PAUSES:
                reached = find_rows(file.table, ids, rows, position)
                if reached == len(ids):
                    return rows
                if reached > position:
                    break
                time.sleep(pause)
                file = self._current_file()
                if not self.writable:
                    file.remap()
            else:
                raise StateLockedError(
                    f"the id {ids[position]} of the map {str(file.path)!r} is being moved and does not come "
                    "to rest: try again, or open the map for writing, which puts it right after a kill"
                )
            position = reached

    @property
    def writable(self) -> bool:
        """Whether it may be changed."""
        return self._file.writable

    def put(self, ids: Ids, rows: Rows) -> Rows:
        """Set the rows of ids; putting the same again changes nothing.

        Args:
            ids: ``(B,)`` int64, or uint64 by two's complement; of one that occurs twice the last row counts.
            rows: ``(B,)`` int64, >= 0.

        Returns:
            ``(B,)`` int64, the row that each id had before its turn, -1 for a new one.

        Raises:
            DiskSpaceError: the map has to grow and there is not enough room; it holds what it held.
            OSError: the device has refused; nothing was changed.
        """
        ids, rows = _as_ids(ids), _as_rows(rows)
        if ids.shape != rows.shape:
            raise RowTypeError(f"{len(ids)} ids can't have {len(rows)} rows: pass a row for each id")
        before, done = np.empty(len(ids), np.int64), np.zeros(1, np.int64)
        self._begin()
        try:
            seeds = _SEEDS
            put_rows(self._file.table, ids, rows, before, done)
            while done[0] < len(ids):
                seeds -= self._split(int(ids[done[0]]))
                if seeds < 0:
                    raise StateCorruptError(
                        f"the segments of the id map {str(self._file.path)!r} fill up whatever the seed of "
                        "the hash is: rebuild it from the ids that the table's rows have"
                    )
                put_rows(self._file.table, ids, rows, before, done)
        except BaseException:
            restore_rows(self._file.table, ids, before, done)
            raise
        return before

    def remove(self, ids: Ids) -> Rows:
        """Remove ids; those that are not in the map are none to remove.

        The file keeps its size: `rebuild` makes a smaller one.

        Args:
            ids: ``(B,)`` int64, or uint64 by two's complement.

        Returns:
            ``(B,)`` int64, the row that each id had before its turn, -1 for one that was not in the map.

        Raises:
            OSError: the device has refused; nothing was changed.
        """
        ids = _as_ids(ids)
        before = np.empty(len(ids), np.int64)
        self._begin()
        remove_ids(self._file.table, ids, before)
        return before

    def items(self) -> Iterator[tuple[Ids, Rows]]:
        """Yield all ids and their rows in blocks, in no order that means anything; not beside a writer."""
        table = self._open_file().table
        segments = segments_of(table.directory)
        slots = table.slots.reshape(-1, table.width, 2)
        size = max(1, _BLOCK_SLOTS // table.width)
        for start in range(0, len(segments), size):
            block = slots[segments[start : start + size], :-1].reshape(-1, 2)
            block = block[block[:, 1] > 0]
            yield block[:, 0].copy(), block[:, 1] - 1

    def verify(self) -> None:
        """Look at everything; not beside a writer.

        Raises:
            StateCorruptError: an id is not found where it is looked for, or the counts are wrong.
        """
        count = 0
        for ids, rows in self.items():
            count += len(ids)
            if not np.array_equal(self.find(ids), rows):
                count = -1
                break
        if count != len(self):
            raise StateCorruptError(
                f"the id map {str(self._file.path)!r} is damaged in its segments: rebuild it from the ids "
                "that the table's rows have"
            )

    def flush(self) -> None:
        """Write every changed page to the device and wait for it; that does not make the map whole.

        Raises:
            OSError: the device has refused.
        """
        file = self._open_file()
        if file.writable:
            self._synced(file.flush)

    def close(self, token: str | None = None) -> None:
        """Close the map, as whole where it is said of which moment it is; closing twice is silent.

        Args:
            token: With which `open` trusts it from now on; None to leave it as one whose process died.

        Raises:
            OSError: the device has refused; the map is closed, and not whole.
        """
        if self._closed:
            return
        self._closed, file = True, self._file
        try:
            sealed = file.whole and not self._begun and token in (None, self._token)
            mine = file.writable and os.getpid() == self._owner and not self._failed
            if mine and token is not None and not sealed:
                self._synced(file.flush)
                file.seal(token)
                self._synced(file.flush_header)
        finally:
            file.release()

    def _open_file(self) -> IdMapFile:
        if self._closed:
            raise StateClosedError(
                f"the id map {str(self._file.path)!r} was closed: open the state directory again"
            )
        return self._file

    def _current_file(self) -> IdMapFile:
        """Return the open file, a reader's opened again if another one has taken its place."""
        file = self._open_file()
        if not file.writable and file.state == REPLACED:
            self._file = IdMapFile.open(file.path, None, writable=False)
            file.release()
        return self._file

    def _begin(self) -> None:
        """Say, before the first change, that the map is not whole: what a loss of power leaves is not."""
        file = self._open_file()
        if os.getpid() != self._owner:
            raise StateClosedError(
                f"the id map {str(file.path)!r} belongs to process {self._owner}, which has forked this one: "
                "open the state directory in the process that changes it"
            )
        if not file.writable:
            raise StateClosedError(f"the id map {str(file.path)!r} was opened for reading: open it writable")
        if self._failed:
            raise StateFailedError(
                f"the device has refused to sync the id map {str(file.path)!r}: open the state again"
            )
        if not self._begun:
            file.mark_in_use()
            self._synced(file.flush_header)
            self._begun = True

    def _synced(self, sync: Callable[[], None]) -> None:
        try:
            sync()
        except OSError:
            self._failed = True  # what the system could not write may be gone: no later sync would tell
            raise

    def _split(self, key: int) -> int:
        """Make room for an id; return how often the seed was changed for it."""
        file = self._file
        file.make_room(2)
        while not split_segment(file.table, key):
            if 2 * len(file.table.directory) > _BUSIEST * (len(self) // file.table.width + 8):
                self._reseed()
                return 1
            file.double_directory()
            file.make_room(2)
        return 0

    def _reseed(self) -> None:
        """Put a map with another seed in the place of this one: its ids share too many bits of their hash."""
        path = self._file.path
        made = IdMap.rebuild(path, self.items(), width=self._file.table.width)
        former, self._file = self._file, made._file
        former.release()

    def _take_place(self, path: Path) -> None:
        """Give the file the name of the map, telling those who read what had it."""
        retire(path)
        system.retried(os.replace, self._file.path, path)
        system.sync_directory(path.parent)
        self._file.path = path


def _as_ids(ids: Ids) -> Ids:
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype not in (np.int64, np.uint64):
        raise RowTypeError(
            f"ids={ids!r} can't be looked up: pass a 1-D array of int64, or of uint64 by two's complement"
        )
    return np.ascontiguousarray(ids).view(np.int64)


def _as_rows(rows: Rows) -> Rows:
    if not isinstance(rows, np.ndarray) or rows.ndim != 1 or rows.dtype != np.int64:
        raise RowTypeError(f"rows={rows!r} can't be those of ids: pass a 1-D array of int64")
    if len(rows) and not 0 <= rows.min() <= rows.max() <= _LAST_ROW:
        raise RowTypeError(
            f"rows of {rows.min()} to {rows.max()} can't be those of ids: pass rows of 0 to {_LAST_ROW}"
        )
    return np.ascontiguousarray(rows)
