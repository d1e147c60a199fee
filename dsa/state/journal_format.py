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
    "IDENTITY_AT",
    "MAGIC",
    "SLOTS_AT",
    "Entry",
    "Layout",
    "Part",
    "Slot",
    "decode_entry",
    "encode_entry",
    "entry_length",
    "find_entries",
    "is_of_life",
    "layout_of",
    "read_header",
    "read_slot",
    "round_up",
    "view",
    "write_slot",
]

MAGIC: Final = b"dsa-journal-2\n"
IDENTITY_AT: Final = 64
SLOTS_AT: Final = (512, 1024)
BODY: Final = system.PAGE
"""Bytes of the header page, behind which the ring begins."""

_BEGIN: Final = struct.Struct("<8sQQIIII")
_PART: Final = struct.Struct("<IIQ")
_COMMIT: Final = struct.Struct("<8sQQI")
_SLOT: Final = struct.Struct("<QQQQQI")
_AFTER_IMAGES: Final = 0  # the only kind of records so far: what the rows are after the step
_BEGIN_MAGIC: Final = b"dsabegin"
_COMMIT_MAGIC: Final = b"dsacommt"
_ALIGN: Final = 64
_NO_CHECKSUM: Final = bytes(4)

_Memory = mmap.mmap | bytes | bytearray


class Part(NamedTuple):
    """Rows of one table in an entry.

    Args:
        table: The table's position in the state.
        rows: ``(B,)`` int64, strictly increasing.
        records: ``(B,)`` records, or on reading ``(B, size)`` bytes: the schema is the table's to know.
    """

    table: int
    rows: Rows
    records: NDArray[Any]


class Entry(NamedTuple):
    """One committed entry as recovery reads it, and the bytes of memory it ends before."""

    sequence: int
    note: bytes
    parts: list[Part]
    end: int


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
    """

    number: int
    head_sequence: int
    head: int
    last: int
    applied: int


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
    layout = layout_of(len(note), [(len(part.rows), part.records.dtype.itemsize) for part in parts])
    head = b"".join(_PART.pack(part.table, part.records.dtype.itemsize, len(part.rows)) for part in parts)
    begin = (_BEGIN_MAGIC, sequence, layout.length, len(note), len(parts), _AFTER_IMAGES)
    checksum = zlib.crc32(_BEGIN.pack(*begin, 0) + head + note)
    memory[base : base + layout.note + len(note)] = _BEGIN.pack(*begin, checksum) + head + note
    end = base + layout.length - _ALIGN
    memory[end : end + _COMMIT.size] = _commit_record(sequence, parts)


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
        applied: The tables hold its records: should these be damaged, the entry is returned without them.
    """
    if base + _BEGIN.size > len(memory):
        return None
    magic, number, length, note_bytes, count, kind, checksum = _BEGIN.unpack_from(memory, base)
    head_bytes = _BEGIN.size + _PART.size * count + note_bytes
    if magic != _BEGIN_MAGIC or number != sequence or not head_bytes <= length <= len(memory) - base:
        return None
    begin = memory[base : base + head_bytes]
    if zlib.crc32(begin[: _BEGIN.size - 4] + _NO_CHECKSUM + begin[_BEGIN.size :]) != checksum:
        return None
    described = list(_PART.iter_unpack(begin[_BEGIN.size : head_bytes - note_bytes]))
    layout = layout_of(note_bytes, [(rows, size) for _, size, rows in described])
    if layout.length != length or kind != _AFTER_IMAGES:
        return None
    parts = [
        Part(table, view(memory, base + at, np.int64, rows), _raw(memory, base + records_at, rows, size))
        for (table, size, rows), (at, records_at) in zip(described, layout.parts, strict=True)
    ]
    note = bytes(begin[head_bytes - note_bytes :])
    end = base + length - _ALIGN
    whole = memory[end : end + _COMMIT.size] == _commit_record(sequence, parts)
    if not whole and not applied:
        return None
    return Entry(sequence, note, parts if whole else [], base + length)


def find_entries(memory: bytearray, slot: Slot | None) -> dict[int, Entry]:
    """Return the entries that are whole, by their numbers, wherever they are in a damaged journal.

    Args:
        memory: The whole journal.
        slot: What its header says, or None when that is damaged; entries that it has let go of are left out.
    """
    words = view(memory, BODY, "S8", max(0, len(memory) - BODY) // 8)
    places = np.flatnonzero(words[:: _ALIGN // 8] == _BEGIN_MAGIC) * _ALIGN + BODY
    found: dict[int, Entry] = {}
    for base in places.tolist():
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
