"""What is whole of a journal, whatever has happened to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dsa.state.journal_format import (
    BODY,
    SLOTS_AT,
    Entry,
    find_entries,
    find_open_entry,
    is_of_life,
    read_header,
    read_slot,
)

__all__ = ["Salvaged", "salvage_journal"]


class Salvaged(NamedTuple):
    """What is whole of a journal, whatever has happened to it.

    Args:
        entries: In order, each with whether all that follow it are there too.
        fault: What is wrong with it, in words that go on after "the journal"; empty when nothing is.
        unfinished: What a step was changing in place when its process died. It can be relied on only while
            the system runs on which that was.
    """

    entries: list[tuple[Entry, bool]]
    fault: str
    unfinished: Entry | None = None


def salvage_journal(path: Path, identity: str) -> Salvaged:
    """Read what is whole of a journal, entry by entry; the file is not changed.

    Args:
        path: The file.
        identity: The life of the state that it should belong to. Another one's entries are not taken.
    """
    try:
        memory = bytearray(path.read_bytes())
    except FileNotFoundError:
        return Salvaged([], "is missing")
    if len(memory) <= BODY:
        return Salvaged([], f"has {len(memory):,} bytes, which no journal has")
    if not is_of_life(memory, identity):
        return Salvaged([], "belongs to another state, or to another life of this one")
    slots = [slot for slot in (read_slot(memory, at) for at in SLOTS_AT) if slot is not None]
    slot = max(slots, default=None)
    found = find_entries(memory, slot)
    last = max(found, default=0) if slot is None else max(slot.last, *found, 0)
    first = slot.head_sequence if slot is not None else last
    while slot is None and first - 1 in found:
        first -= 1  # those before a gap may be of long ago
    lost = [number for number in range(first, last + 1) if number not in found]
    entries = [
        (found[number], number > max(lost, default=0)) for number in range(first, last + 1) if number in found
    ]
    return Salvaged(entries, _fault_of(memory, identity, lost, last), find_open_entry(memory, last + 1))


def _fault_of(memory: bytearray, identity: str, lost: Sequence[int], last: int) -> str:
    try:
        read_header(memory, identity)
    except ValueError as error:
        return str(error)
    return f"is damaged in entry {lost[0]} of {last}" if lost else ""
