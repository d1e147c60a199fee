"""The bytes of a journal, encoded into and decoded from memory; see `dsa.state.journal`."""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsa.backends import system
from dsa.kernels.hashing import hash_words
from dsa.schema import Records, Rows

__all__ = [
    "BODY",
    "COMMIT_BYTES",
    "IDENTITY_AT",
    "MAGIC",
    "SLOTS_AT",
    "Entry",
    "Head",
    "Layout",
    "Part",
    "Place",
    "Slot",
    "close_entry",
    "decode_entry",
    "decode_open_entry",
    "encode_entry",
    "encode_open_entry",
    "entry_length",
    "find_entries",
    "find_open_entry",
    "is_closed",
    "is_of_life",
    "layout_of",
    "read_head",
    "read_header",
    "read_slot",
    "round_up",
    "view",
    "write_slot",
]

MAGIC: Final = b"dsa-journal-3\n"
IDENTITY_AT: Final = 64
SLOTS_AT: Final = (512, 1024)
BODY: Final = system.PAGE
"""Bytes of the header page, behind which the ring begins."""

_BEGIN: Final = struct.Struct("<8sQQIIII")
_PART: Final = struct.Struct("<IIQ")
_COMMIT: Final = struct.Struct("<8sQQI")
_SLOT: Final = struct.Struct("<QQQQQQI")
_AFTER_IMAGES: Final = 0  # what the rows are after the step
_BEFORE_IMAGES: Final = 1  # what they were before it
_BEGIN_MAGIC: Final = b"dsabegin"
_COMMIT_MAGIC: Final = b"dsacommt"
_ALIGN: Final = 64
COMMIT_BYTES: Final = _ALIGN
"""Bytes at the end of an entry in which its commit record is."""

_NO_CHECKSUM: Final = bytes(4)

_Memory = mmap.mmap | bytes | bytearray


class Part(NamedTuple):
    """Rows of one table in an entry.

    Args:
        table: The table's position in the state.
        rows: ``(B,)`` int64, strictly increasing; of before-images, -1 where there is none yet.
        records: ``(B,)`` records, or on reading ``(B, size)`` bytes: the schema is the table's to know. Of
            before-images, ``(B, W)`` words.
    """

    table: int
    rows: Rows
    records: NDArray[Any]


class Entry(NamedTuple):
    """One entry as recovery reads it.

    Args:
        sequence: Its number.
        note: The caller's bytes.
        parts: Its rows and records.
        end: The bytes of memory that it ends before.
        in_place: Whether its records are before-images.
    """

    sequence: int
    note: bytes
    parts: list[Part]
    end: int
    in_place: bool = False


class Place(NamedTuple):
    """Where a part of an entry lies, relative to the entry's start.

    Args:
        table: The table's position in the state.
        rows: How many rows there are.
        record_bytes: Bytes of a record, or of an image.
        rows_at: Where the rows begin.
        records_at: Where the records begin.
    """

    table: int
    rows: int
    record_bytes: int
    rows_at: int
    records_at: int


class Head(NamedTuple):
    """What an entry says of itself before its rows.

    Args:
        note: The caller's bytes.
        places: Where its parts lie.
        length: Its bytes.
        in_place: Whether its records are before-images.
    """

    note: bytes
    places: list[Place]
    length: int
    in_place: bool


class Layout(NamedTuple):
    """Where the pieces of an entry lie, relative to its start."""

    note: int
    parts: list[tuple[int, int]]
    length: int


class Slot(NamedTuple):
    """What the header page knows.

    Args:
        number: Counts the writes; the larger of two valid slots holds.
        head_sequence: The oldest entry kept.
        head: Where it starts in the ring.
        last: The last entry known to be committed.
        applied: The last entry that the tables are known to hold; its records are not needed any more.
        undone: Counts the entries of before-images that were undone: what was read of one means nothing.
    """

    number: int
    head_sequence: int
    head: int
    last: int
    applied: int
    undone: int = 0


def round_up(size: int) -> int:
    """Return the multiple of the alignment that holds `size` bytes."""
    return -(-size // _ALIGN) * _ALIGN


def view(memory: _Memory, at: int, dtype: Any, count: int) -> NDArray[Any]:  # noqa: ANN401 - numpy's dtype-like
    """Return an array over mapped memory."""
    return np.frombuffer(memory, dtype, count, at)


def layout_of(note_bytes: int, parts: Sequence[tuple[int, int]]) -> Layout:
    """Return where an entry's pieces lie.

    Args:
        note_bytes: Size of the note.
        parts: Per part the number of rows and the size of a record.
    """
    note = _BEGIN.size + _PART.size * len(parts)
    at = round_up(note + note_bytes)
    places = []
    for rows, record_bytes in parts:
        records_at = at + round_up(8 * rows)
        places.append((at, records_at))
        at = records_at + round_up(rows * record_bytes)
    return Layout(note, places, at + _ALIGN)


def encode_entry(memory: mmap.mmap, base: int, sequence: int, note: bytes, parts: Sequence[Part]) -> None:
    """Complete an entry whose rows and records are in place; its commit record is written last."""
    sizes = [(part.table, len(part.rows), part.records.dtype.itemsize) for part in parts]
    layout = layout_of(len(note), [(rows, size) for _, rows, size in sizes])
    _write_head(memory, base, sequence, note, sizes, layout, _AFTER_IMAGES)
    end = base + layout.length - _ALIGN
    memory[end : end + _COMMIT.size] = _commit_record(sequence, parts)


def encode_open_entry(
    memory: mmap.mmap,
    base: int,
    sequence: int,
    note: bytes,
    sizes: Sequence[tuple[int, int, int]],
    layout: Layout,
) -> None:
    """Begin an entry of before-images, none of which is noted; see `decode_open_entry`.

    Args:
        memory: The journal.
        base: Where the entry begins.
        sequence: Its number.
        note: Its note.
        sizes: Per part the table's position, the rows, and the bytes of an image.
        layout: Where its pieces lie.
    """
    _write_head(memory, base, sequence, note, sizes, layout, _BEFORE_IMAGES)


def _write_head(
    memory: mmap.mmap,
    base: int,
    sequence: int,
    note: bytes,
    sizes: Sequence[tuple[int, int, int]],
    layout: Layout,
    kind: int,
) -> None:
    head = b"".join(_PART.pack(table, size, rows) for table, rows, size in sizes)
    begin = (_BEGIN_MAGIC, sequence, layout.length, len(note), len(sizes), kind)
    checksum = zlib.crc32(_BEGIN.pack(*begin, 0) + head + note)
    memory[base : base + layout.note + len(note)] = _BEGIN.pack(*begin, checksum) + head + note


def entry_length(head: bytes, sequence: int) -> int:
    """Return the bytes of the entry of a number by its first bytes, 0 where none begins.

    They are the length only if `decode_entry` finds the entry whole.
    """
    if len(head) < _BEGIN.size:
        return 0
    magic, number, length, *_ = _BEGIN.unpack_from(head)
    return int(length) if magic == _BEGIN_MAGIC and number == sequence else 0


def decode_entry(memory: _Memory, base: int, sequence: int, *, applied: bool = False) -> Entry | None:
    """Return the entry of a number at a place, or None when no committed one is there.

    Any bytes are safe to read.

    Args:
        memory: The journal, or a part of it.
        base: Where the entry would begin.
        sequence: Its number.
        applied: The tables hold its records: should these be damaged, the entry is returned without them, as
            one of before-images is anyway.
    """
    entry = _read_head(memory, base, sequence)
    if entry is None:
        return None
    if _is_committed(memory, entry):
        return entry._replace(parts=[]) if entry.in_place else entry
    return entry._replace(parts=[]) if applied else None


def decode_open_entry(memory: _Memory, base: int, sequence: int) -> Entry | None:
    """Return the before-images that are noted of an entry that was not committed, or None when there is none.

    Any bytes are safe to read. What it says may be relied on while the system runs that wrote it; of a row
    that is noted, the image is whole.

    Args:
        memory: The journal, or a part of it.
        base: Where the entry would begin.
        sequence: Its number.
    """
    entry = _read_head(memory, base, sequence)
    if entry is None or not entry.in_place or _is_committed(memory, entry):
        return None
    noted = [np.flatnonzero(part.rows >= 0) for part in entry.parts]
    return entry._replace(
        parts=[
            Part(part.table, part.rows[which], part.records[which])
            for part, which in zip(entry.parts, noted, strict=True)
        ]
    )


def close_entry(memory: mmap.mmap, base: int, sequence: int, length: int) -> None:
    """Commit an entry of before-images: the tables hold what the step has made of them."""
    end = base + length - _ALIGN
    memory[end : end + _COMMIT.size] = _commit_record(sequence, [])


def is_closed(end: bytes, sequence: int) -> bool:
    """Tell whether the last `COMMIT_BYTES` of an entry of before-images say that it is committed."""
    return end[: _COMMIT.size] == _commit_record(sequence, [])


def _is_committed(memory: _Memory, entry: Entry) -> bool:
    end = entry.end - _ALIGN
    expected = _commit_record(entry.sequence, [] if entry.in_place else entry.parts)
    return bool(memory[end : end + _COMMIT.size] == expected)


def _read_head(memory: _Memory, base: int, sequence: int) -> Entry | None:
    """Return an entry by its head, with whatever its parts hold."""
    head = read_head(memory, base, sequence)
    if head is None or head.length > len(memory) - base:
        return None
    parts = [
        Part(
            place.table,
            view(memory, base + place.rows_at, np.int64, place.rows),
            _raw(memory, base + place.records_at, place.rows, place.record_bytes),
        )
        for place in head.places
    ]
    return Entry(sequence, head.note, parts, base + head.length, head.in_place)


def read_head(memory: _Memory, base: int, sequence: int) -> Head | None:
    """Return what the head of the entry of a number says, or None when none begins at a place.

    Any bytes are safe to read.

    Args:
        memory: The journal, or a part of it that holds the head.
        base: Where the entry would begin.
        sequence: Its number.
    """
    if base + _BEGIN.size > len(memory):
        return None
    magic, number, length, note_bytes, count, kind, checksum = _BEGIN.unpack_from(memory, base)
    head_bytes = _BEGIN.size + _PART.size * count + note_bytes
    if magic != _BEGIN_MAGIC or number != sequence or not head_bytes <= len(memory) - base:
        return None
    begin = memory[base : base + head_bytes]
    if zlib.crc32(begin[: _BEGIN.size - 4] + _NO_CHECKSUM + begin[_BEGIN.size :]) != checksum:
        return None
    described = list(_PART.iter_unpack(begin[_BEGIN.size : head_bytes - note_bytes]))
    layout = layout_of(note_bytes, [(rows, size) for _, size, rows in described])
    if layout.length != length or kind not in (_AFTER_IMAGES, _BEFORE_IMAGES):
        return None
    places = [
        Place(table, rows, size, *at) for (table, size, rows), at in zip(described, layout.parts, strict=True)
    ]
    return Head(bytes(begin[head_bytes - note_bytes :]), places, length, kind == _BEFORE_IMAGES)


def find_open_entry(memory: bytearray, sequence: int) -> Entry | None:
    """Return what was begun in place as the entry of a number and not committed, wherever it is."""
    entries = [decode_open_entry(memory, base, sequence) for base in _begins(memory)]
    return next((entry for entry in entries if entry is not None), None)


def _begins(memory: bytearray) -> list[int]:
    """Return the places where entries may begin."""
    words = view(memory, BODY, "S8", max(0, len(memory) - BODY) // 8)
    places: list[int] = (np.flatnonzero(words[:: _ALIGN // 8] == _BEGIN_MAGIC) * _ALIGN + BODY).tolist()
    return places


def find_entries(memory: bytearray, slot: Slot | None) -> dict[int, Entry]:
    """Return the entries that are whole, by their numbers, wherever they are in a damaged journal.

    Args:
        memory: The whole journal.
        slot: What its header says, or None when that is damaged; entries that it has let go of are left out.
    """
    found: dict[int, Entry] = {}
    for base in _begins(memory):
        sequence = _BEGIN.unpack_from(memory, base)[1] if base + _BEGIN.size <= len(memory) else 0
        if slot is not None and sequence < slot.head_sequence:
            continue
        applied = slot is not None and sequence <= slot.applied
        entry = decode_entry(memory, base, sequence, applied=applied)
        if entry is not None:
            found[sequence] = entry
    return found


def is_of_life(memory: _Memory, identity: str) -> bool:
    """Tell whether a header page names a life of a state, but for a single byte that may be damaged."""
    name = f"{identity}\n".encode()
    expected = MAGIC + name
    found = bytes(memory[: len(MAGIC)]) + bytes(memory[IDENTITY_AT : IDENTITY_AT + len(name)])
    differing = sum(a != b for a, b in zip(found, expected, strict=False))
    return len(found) == len(expected) and differing <= 1


def write_slot(memory: mmap.mmap, at: int, slot: Slot) -> None:
    """Write a header slot with its checksum."""
    data = _SLOT.pack(*slot, 0)
    memory[at : at + _SLOT.size] = data[:-4] + struct.pack("<I", zlib.crc32(data))


def read_header(memory: _Memory, identity: str) -> Slot:
    """Return the slot of a header page that holds.

    Args:
        memory: The journal, or its first `BODY` bytes.
        identity: The life of the state that it has to belong to.

    Raises:
        ValueError: it is not a header of that state; the message goes on after "the journal".
    """
    if memory[: len(MAGIC)] != MAGIC:
        raise ValueError("was not written by dsa")
    name = f"{identity}\n".encode()
    if memory[IDENTITY_AT : IDENTITY_AT + len(name)] != name:
        raise ValueError("belongs to another state, or to another life of this one")
    slots = [slot for slot in (read_slot(memory, at) for at in SLOTS_AT) if slot is not None]
    if not slots:
        raise ValueError("has a damaged header")
    return max(slots)


def read_slot(memory: _Memory, at: int) -> Slot | None:
    """Return a header slot, or None when it is not whole."""
    data = memory[at : at + _SLOT.size]
    *fields, checksum = _SLOT.unpack(data)
    slot = Slot(*fields)
    return slot if slot.number > 0 and zlib.crc32(data[:-4] + _NO_CHECKSUM) == checksum else None


def _commit_record(sequence: int, parts: Sequence[Part]) -> bytes:
    state = 0
    for part in parts:
        state = hash_words(_words(part.rows), state)
        state = hash_words(_words(part.records), state)
    data = _COMMIT.pack(_COMMIT_MAGIC, sequence, state, 0)
    return data[:-4] + struct.pack("<I", zlib.crc32(data))


def _raw(memory: _Memory, at: int, rows: int, size: int) -> NDArray[np.uint8]:
    return view(memory, at, np.uint8, rows * size).reshape(rows, size)


def _words(array: Rows | Records | NDArray[Any]) -> NDArray[np.int32]:
    rows = len(array)
    width = array.nbytes // rows if rows else 4
    return array.view(np.uint8).reshape(rows, width).view(np.int32)
