"""The journal: what makes a step happen as a whole, whenever the process dies.

An entry holds one of two things, and says which.

*After-images*: before a step touches a table, the new records of all its rows are in the journal, followed by
a commit record. On the next open, committed entries are applied again (they hold values, not differences, so
applying one twice does no harm) and an uncommitted one is ignored. The records are computed where they lie:
`begin` hands out views of the journal's mapped memory, the kernel updates them there, and the tables are
written from there.

*Before-images*: the step changes the tables where they are, and has noted what each record was before. The
commit record says that all of them are as they are to be. On the next open, an entry that was begun and not
committed is undone, and of a committed one the note counts. An image is noted by its row: all rows are -1
when the entry begins, and become the row's number when its image is whole, before the record changes
(`dsa.kernels.visiting`). That order of stores is all that the death of a process leaves to rely on, and
enough. It says nothing after a loss of power, so that a durable journal has no such entries.

The file is a ring of entries behind a header page. An entry::

    begin     magic, sequence number, length, sizes of note and parts, kind of records, the note (bytes of
              the caller's), checksum of these
    parts     per part: table, record size, count; then its rows (int64) and its records
    commit    magic, sequence number, checksum of rows and records, of before-images of nothing

Entries stay until they are released, and the last one always stays, for its note. The header page holds two
slots, written in turn, that name the oldest entry kept, the last one known to be committed, and the last one
that the tables are known to hold. Damage to the records between these two is an error; an invalid entry after
them is one that was never committed; those before them are not needed.

A journal belongs to one life of one state, from an opening to the next, and is a file of its own. It is full
of zeros and synced before anybody relies on it: on some file systems (ext4) an extent that was reserved and
never written stays unreadable for ever when its first write fails, however often it is written again.

Two policies. Not durable: nothing is synced; what a killed process wrote is in the page cache, and that is
enough. Durable: an entry is synced before `commit` returns, and only then becomes "known to be committed", so
that a loss of power in the middle of the sync is no damage. A failed sync is raised and never tried again
here: the system may have dropped what it could not write (`dsa.state.state_directory` refuses to go on).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, final

import numpy as np

from dsa.backends import system
from dsa.errors import StateClosedError, StateCorruptError
from dsa.schema import Records, Rows
from dsa.state.journal_format import (
    BODY,
    IDENTITY_AT,
    MAGIC,
    SLOTS_AT,
    Entry,
    Part,
    Slot,
    close_entry,
    decode_entry,
    decode_open_entry,
    encode_entry,
    encode_open_entry,
    layout_of,
    read_header,
    round_up,
    view,
    write_slot,
)

__all__ = ["Journal"]


class _Draft(NamedTuple):
    start: int
    length: int
    sequence: int
    note: bytes
    parts: list[Part]
    in_place: bool


@final
class Journal:
    """A journal file, mapped. One thread at a time.

    Args:
        path: The file.
        durable: Whether `commit` waits for the device.

    Make one with `create` or `open`.
    """

    def __init__(self, path: Path, file: int, size: int, durable: bool, limit: int = 0) -> None:
        self._path = path
        self._file = file
        self._durable = durable
        self._limit = limit
        self._mapping = mmap.mmap(file, size)
        self._slot = Slot(0, 1, 0, 0, 0)
        self._last_start = self._tail = 0
        self._draft: _Draft | None = None
        self.bytes_written = 0

    @classmethod
    def create(cls, path: Path, identity: str, capacity: int, durable: bool, limit: int = 0) -> Journal:
        """Make an empty journal, durably but for its name.

        Args:
            path: The file, which must not exist.
            identity: The life of the state that it belongs to.
            capacity: Bytes of the ring at first; it grows when a step needs more.
            durable: Whether `commit` waits for the device.
            limit: Bytes that the ring may grow to before entries have to be released. At 0 it returns to its
                start as soon as that is free: when entries are released one by one, the same memory is then
                used again and again and stays in the cache.

        Raises:
            DiskSpaceError: there is not enough room; nothing is left behind.
            OSError: the device refused; likewise.
        """
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o644)
        try:
            size = BODY + round_up(capacity)
            system.extend(file, size, str(path.parent))
            journal = cls(path, file, size, durable, limit)
            name = f"{identity}\n".encode()
            journal._mapping[: len(MAGIC)] = MAGIC
            journal._mapping[IDENTITY_AT : IDENTITY_AT + len(name)] = name
            journal._put_slot(journal._slot, sync=True)
        except BaseException:
            os.close(file)
            system.retried(path.unlink, True)
            raise
        return journal

    @classmethod
    def open(cls, path: Path, identity: str, durable: bool) -> Journal:
        """Open a journal that a process has left behind.

        Raises:
            StateCorruptError: the file is missing, damaged, or another state's.
        """
        try:
            file = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
        except FileNotFoundError as error:
            raise _corrupt(path, "is missing") from error
        try:
            size = os.fstat(file).st_size
            if size <= BODY:
                raise _corrupt(path, f"has {size} bytes, which no journal has")
            journal = cls(path, file, size, durable)
            journal._read_header(identity)
        except BaseException:
            os.close(file)
            raise
        return journal

    @property
    def durable(self) -> bool:
        """Whether `commit` waits for the device."""
        return self._durable

    @property
    def capacity(self) -> int:
        """Bytes of the ring."""
        return len(self._mapping) - BODY

    def begin(
        self, note: bytes, parts: Sequence[tuple[int, Rows, np.dtype[np.void]]]
    ) -> list[Records] | None:
        """Start an entry and return the memory of its records, to be filled before `commit`.

        An entry begun and not committed is forgotten by the next `begin`.

        Args:
            note: Bytes stored with the entry.
            parts: Per part the table's position, the rows, and the dtype of a record.

        Returns:
            One array per part, or None when there is no room until older entries are released.

        Raises:
            DiskSpaceError: the journal has to grow and the disk is full.
        """
        layout = layout_of(len(note), [(len(rows), dtype.itemsize) for _, rows, dtype in parts])
        start = self._make_room(layout.length)
        if start is None:
            return None
        base = BODY + start
        placed: list[Part] = []
        for (index, rows, dtype), (rows_at, records_at) in zip(parts, layout.parts, strict=True):
            stored = view(self._mapping, base + rows_at, np.int64, len(rows))
            stored[:] = rows
            placed.append(Part(index, stored, view(self._mapping, base + records_at, dtype, len(rows))))
        self._draft = _Draft(start, layout.length, self._slot.last + 1, note, placed, in_place=False)
        return [part.records for part in placed]

    def begin_in_place(self, note: bytes, parts: Sequence[tuple[int, int, int]]) -> list[Part] | None:
        """Start an entry of before-images: from here on the death of the process undoes what is noted.

        It is closed by `commit`, or ended by `undone`. One that nothing was noted in is ended by the next
        `begin` or `begin_in_place`.

        Args:
            note: Bytes stored with the entry.
            parts: Per part the table's position, how many rows may change, and the words of an image.

        Returns:
            The memory of each part: rows, all -1, and ``(B, W)`` words. None when there is no room until
            older entries are released.

        Raises:
            DiskSpaceError: the journal has to grow and the disk is full.
        """
        sizes = [(table, rows, 4 * words) for table, rows, words in parts]
        layout = layout_of(len(note), [(rows, size) for _, rows, size in sizes])
        start = self._make_room(layout.length)
        if start is None:
            return None
        base, sequence = BODY + start, self._slot.last + 1
        self._forget_head(start)  # an entry of this number that was undone: its rows are of other images
        placed = []
        for (table, rows, words), (rows_at, images_at) in zip(parts, layout.parts, strict=True):
            noted = view(self._mapping, base + rows_at, np.int64, rows)
            noted[:] = -1
            images = view(self._mapping, base + images_at, np.int32, rows * words).reshape(rows, words)
            placed.append(Part(table, noted, images))
        self._draft = _Draft(start, layout.length, sequence, note, placed, in_place=True)
        encode_open_entry(self._mapping, base, sequence, note, sizes, layout)
        return placed

    def undone(self) -> None:
        """End an entry of before-images: the tables hold again what they held before."""
        if self._draft is not None and self._draft.in_place:
            # Whoever reads beside this looks at the header last: it has to change while the images are there.
            self._put_slot(self._slot._replace(undone=self._slot.undone + 1))
            self._forget_head(self._draft.start)
        self._draft = None

    def _forget_head(self, start: int) -> None:
        self._mapping[BODY + start : BODY + start + 8] = bytes(8)

    def _make_room(self, length: int) -> int | None:
        # Of an entry of before-images that an interrupt has left behind, the head would be found in the place
        # of the next one's.
        self.undone()
        start = self._find_room(length)
        if start is None:
            if self._slot.head_sequence < self._slot.last and not self._may_grow(length):
                return None
            start = self._tail
            self._grow(start + length)
        return start

    def commit(self) -> None:
        """Make the entry begun last count: from here on the death of the process can't undo it.

        Raises:
            OSError: the device refused to sync (durable policy). Whether the entry counts is not known.
        """
        draft = self._draft
        if draft is None:
            return
        if draft.in_place:
            number = draft.sequence
            if self._slot.last < number:
                # The tables hold it already, and with it whatever came before.
                self._put_slot(
                    self._slot._replace(head_sequence=number, head=draft.start, last=number, applied=number)
                )
            # After the header, in which alone a reader sees whether rows have changed under it. Should the
            # header be damaged, this tells that the entry is not to be undone.
            close_entry(self._mapping, BODY + draft.start, number, draft.length)
        elif self._slot.last < draft.sequence:
            self._write(draft)
            head = draft.start if self._slot.head_sequence == draft.sequence else self._slot.head
            self._put_slot(self._slot._replace(head=head, last=draft.sequence))
        # In this order, a commit that a signal interrupts anywhere can be called again.
        self._last_start, self._tail = draft.start, draft.start + draft.length
        self.bytes_written += draft.length
        self._draft = None

    def _write(self, draft: _Draft) -> None:
        encode_entry(self._mapping, BODY + draft.start, draft.sequence, draft.note, draft.parts)
        if self._durable:
            self.sync()

    def release(self) -> None:
        """Let go of every entry, of the last one but for its note.

        The tables must hold what those entries say, durably if that is the policy.

        Raises:
            OSError: the device refused to sync (durable policy); nothing is released.
        """
        before = self._slot
        if before.applied < before.last:
            last = before.last
            self._put_slot(
                before._replace(head_sequence=last, head=self._last_start, applied=last), self._durable
            )

    def sync(self) -> None:
        """Return once the device holds the journal, whatever the policy.

        Raises:
            OSError: the device refused.
        """
        system.sync_mapping(self._mapping, self._require_open())

    def entries(self) -> Iterator[Entry]:
        """Yield the committed entries in order, from the oldest kept.

        Raises:
            StateCorruptError: an entry known to be committed can't be read.
        """
        known, sequence, place = self._slot.last, self._slot.head_sequence, self._slot.head
        while True:
            entry, start = self._entry_at(place, sequence)
            if entry is None:
                if sequence <= known:
                    raise _corrupt(self._path, f"is damaged in entry {sequence} of {known}")
                break
            last_start, place = start, entry.end - BODY
            yield entry
            sequence += 1
        if sequence > self._slot.head_sequence:
            self._last_start, self._tail = last_start, place
            self._slot = self._slot._replace(last=sequence - 1)

    def open_entry(self) -> Entry | None:
        """Return the before-images of a step that was not completed, if there is one, after `entries`."""
        for start in (self._tail, 0):
            entry = decode_open_entry(self._mapping, BODY + start, self._slot.last + 1)
            if entry is not None:
                return entry
        return None

    def close(self, remove: bool) -> None:
        """Release the file, and delete it when it is no longer needed."""
        self._draft = None
        file, self._file = self._file, -1
        if file < 0:
            return
        # Some systems refuse to delete a mapped file; a view that someone still holds keeps the mapping, not
        # the name.
        with contextlib.suppress(BufferError):
            self._mapping.close()
        os.close(file)
        if remove:
            system.retried(self._path.unlink, True)

    def _entry_at(self, place: int, sequence: int) -> tuple[Entry | None, int]:
        # An entry follows the one before it, or starts the ring again.
        for start in (place, 0):
            entry = decode_entry(
                self._mapping, BODY + start, sequence, applied=sequence <= self._slot.applied
            )
            if entry is not None:
                return entry, start
        return None, 0

    def _find_room(self, length: int) -> int | None:
        if self._slot.last < self._slot.head_sequence:
            return 0 if length <= self.capacity else None
        if self._tail > self._slot.head:
            if not self._limit and length <= self._slot.head:
                return 0
            if length <= self.capacity - self._tail:
                return self._tail
            return 0 if length <= self._slot.head else None
        return self._tail if length <= self._slot.head - self._tail else None

    def _may_grow(self, length: int) -> bool:
        # Only behind the last entry, and where no entry has returned to the start of the ring.
        return self._tail > self._slot.head and self._tail + length <= self._limit

    def _grow(self, capacity: int) -> None:
        # Half as much again, so that batches of slightly different sizes don't each cost a reservation; twice
        # as much below the limit, so that it is reached in few steps.
        wanted = max(capacity + capacity // 2, min(2 * self.capacity, self._limit))
        if capacity <= self._limit:
            wanted = min(wanted, self._limit)
        size = BODY + round_up(wanted)
        system.extend(self._require_open(), size, str(self._path.parent))
        self._mapping = mmap.mmap(self._file, size)

    def _require_open(self) -> int:
        if self._file < 0:
            raise StateClosedError(
                f"the journal {str(self._path)!r} was closed: open the state directory again"
            )
        return self._file

    def _put_slot(self, slot: Slot, sync: bool = False) -> None:
        # Adopted when it is in place: room that only it frees is then never used before.
        slot = slot._replace(number=self._slot.number + 1)
        write_slot(self._mapping, SLOTS_AT[slot.number % 2], slot)
        if sync:
            self.sync()
        self._slot = slot

    def _read_header(self, identity: str) -> None:
        try:
            self._slot = read_header(self._mapping, identity)
        except ValueError as error:
            raise _corrupt(self._path, str(error)) from None


def _corrupt(path: Path, what: str) -> StateCorruptError:
    return StateCorruptError(
        f"the journal {str(path)!r} {what}, so that the last step can't be told whole: restore the directory "
        f"from a copy, or run `dsa repair {path.parent}`, which takes what is whole and says what is not"
    )
