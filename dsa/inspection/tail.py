"""The end of a journal that another process may be writing: entries read from the file, laid over rows.

Entries are read with ordinary reads, never through a mapping, since whoever opens the directory next may
truncate the journal, and they count only if their checksums say that they are whole.
"""

from __future__ import annotations

import os
from typing import Any, BinaryIO, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from dsa.errors import StateCorruptError
from dsa.schema import Records, Rows
from dsa.state.journal_format import (
    BODY,
    COMMIT_BYTES,
    Entry,
    Place,
    Slot,
    decode_entry,
    entry_length,
    is_closed,
    read_head,
)

__all__ = ["Kept", "Tail", "read_entries", "read_images", "still_counting"]

_HEAD_BYTES: Final = 4096
_LONG_HEAD_BYTES: Final = 1 << 16


class Kept(NamedTuple):
    """Entries of the journal, read from the file.

    Args:
        entries: In order.
        end: Where in the ring the next one may begin.
        spared: Whether the records of one are damaged, which the tables hold.
    """

    entries: list[Entry]
    end: int
    spared: bool


@final
class Tail:
    """What the journal says beyond the tables: the newest records of some rows, and the progress."""

    def __init__(self, entries: list[Entry]) -> None:
        self.note = entries[-1].note if entries else None
        self.entries = entries
        self._merged: dict[int, tuple[Rows, NDArray[Any]]] = {}

    def lay_over(self, index: int, rows: Rows, records: Records) -> None:
        """Replace those records that the journal knows better: torn ones, and none of a later step.

        Args:
            index: The table's position in the state.
            rows: ``(B,)`` int64, strictly increasing.
            records: ``(B,)``, what the table holds of them.

        Raises:
            StateCorruptError: an entry does not fit the table.
        """
        known, raw = self._of_table(index)
        if not len(known) or not len(rows):
            return
        if raw.shape[1] != records.dtype.itemsize:
            raise StateCorruptError(
                f"the journal holds records of {raw.shape[1]} bytes for a table of {records.dtype.itemsize}: "
                "restore the directory from a copy"
            )
        places = np.minimum(np.searchsorted(known, rows), len(known) - 1)
        hits = np.flatnonzero(known[places] == rows)
        newest = np.ascontiguousarray(raw[places[hits]]).view(records.dtype)[:, 0]
        known_better = records["s"][hits] <= newest["s"]
        records[hits[known_better]] = newest[known_better]

    def _of_table(self, index: int) -> tuple[Rows, NDArray[Any]]:
        if index not in self._merged:
            self._merged[index] = _newest(
                [part for entry in self.entries for part in entry.parts if part.table == index]
            )
        return self._merged[index]


def still_counting(kept: Kept, slot: Slot) -> Kept:
    """Return those of the entries read before that the journal still keeps: they don't change."""
    entries = [entry for entry in kept.entries if entry.sequence >= slot.head_sequence]
    if not entries or entries[0].sequence > slot.head_sequence:
        return Kept([], slot.head, spared=False)
    return Kept(entries, kept.end, kept.spared)


def read_entries(file: BinaryIO, slot: Slot, kept: Kept) -> Kept:
    """Return the committed entries in order, from the oldest kept, as far as they are whole."""
    size = os.fstat(file.fileno()).st_size
    entries, place, spared = list(kept.entries), kept.end, kept.spared
    while True:
        sequence = slot.head_sequence + len(entries)
        entry, start = _entry_at(file, place, sequence, size, applied=False)
        if entry is None and sequence <= slot.applied:
            entry, start = _entry_at(file, place, sequence, size, applied=True)
            spared |= entry is not None and not entry.in_place
        if entry is None:
            return Kept(entries, place, spared)
        entries.append(entry)
        place = start + entry.end


def _entry_at(
    file: BinaryIO, place: int, sequence: int, size: int, *, applied: bool
) -> tuple[Entry | None, int]:
    # An entry follows the one before it, or starts the ring again.
    for start in (place, 0):
        entry = _read_entry(file, BODY + start, sequence, size, applied)
        if entry is not None:
            return entry, start
    return None, 0


def _read_entry(file: BinaryIO, start: int, sequence: int, size: int, applied: bool) -> Entry | None:
    file.seek(start)
    head = file.read(_HEAD_BYTES)
    said = read_head(head, 0, sequence)
    if said is not None and said.in_place and said.length <= size - start:
        # The tables hold it; its images, which may be many, tell nothing any more.
        file.seek(start + said.length - COMMIT_BYTES)
        counts = applied or is_closed(file.read(COMMIT_BYTES), sequence)
        return Entry(sequence, said.note, [], said.length, in_place=True) if counts else None
    length = entry_length(head, sequence)
    if not 0 < length <= size - start:
        return None
    # A bytearray, since the checksum's kernel is compiled for memory that can be written.
    memory = bytearray(head[:length])
    memory += file.read(length - len(memory))
    return decode_entry(memory, 0, sequence, applied=applied) if len(memory) == length else None


def read_images(
    file: BinaryIO, place: int, sequence: int, index: int, rows: Rows, record_bytes: int
) -> tuple[Rows, NDArray[np.uint8]]:
    """Return which rows a step under way may have changed in place, and what they were before it.

    Args:
        file: The journal.
        place: Where in the ring the step's entry may begin, but for the start of the ring.
        sequence: Its number.
        index: The table's position in the state.
        rows: ``(B,)`` int64, strictly increasing: the rows asked about.
        record_bytes: Bytes of a record.

    Returns:
        Positions in `rows`, and ``(.., record_bytes)`` bytes.
    """
    for start in (BODY + place, BODY):
        file.seek(start)
        head = read_head(file.read(_LONG_HEAD_BYTES), 0, sequence)
        if head is None or not head.in_place:
            continue
        for part in head.places:
            if part.table == index and part.record_bytes >= record_bytes:
                return _images_of(file, start, part, rows, record_bytes)
    return np.empty(0, np.int64), np.empty((0, record_bytes), np.uint8)


def _images_of(
    file: BinaryIO, start: int, part: Place, rows: Rows, record_bytes: int
) -> tuple[Rows, NDArray[np.uint8]]:
    file.seek(start + part.rows_at)
    noted = np.frombuffer(file.read(8 * part.rows), np.int64)
    places = np.minimum(np.searchsorted(rows, noted), len(rows) - 1)
    hits = np.flatnonzero((noted >= 0) & (rows[places] == noted))
    images = np.empty((len(hits), record_bytes), np.uint8)
    for image, hit in zip(images, hits.tolist(), strict=True):
        file.seek(start + part.records_at + hit * part.record_bytes)
        image[:] = np.frombuffer(file.read(record_bytes), np.uint8)
    return places[hits], images


def _newest(parts: list[Any]) -> tuple[Rows, NDArray[Any]]:
    """Return the distinct rows of entries' parts in order, and what the last of them says of each."""
    parts = [part for part in parts if len(part.rows)]
    if not parts:
        return np.empty(0, np.int64), np.empty((0, 0), np.uint8)
    if len({part.records.shape[1] for part in parts}) > 1:
        raise StateCorruptError(
            "the entries of the journal hold records of several sizes for one table: restore the directory "
            "from a copy"
        )
    rows = np.concatenate([part.rows for part in reversed(parts)])
    records = np.concatenate([part.records for part in reversed(parts)])
    distinct, first = np.unique(rows, return_index=True)
    return distinct, records[first]
