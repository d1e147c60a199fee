"""Passes over a map from ids to rows, whose memory is a mapped file: extendible hashing.

A directory of 2^depth numbers, picked by the top bits of an id's hash, names *segments* of equal size
(Fagin, Nievergelt, Pippenger & Strong 1979, Extendible hashing). In a segment of `width` slots ids are found
by linear probing from a home that the low 32 bits of the hash give (Knuth, The Art of Computer Programming
3, 6.4), and are removed by moving back those behind them (ibid., algorithm R), so that nothing is left
behind. The last slot of a segment holds the number of its ids. A segment that is full is replaced by two: the
pause is that of one segment, however large the map is.

A slot is ``(id, row + 1)``, and 0 in the second place an empty one: any int64 is an id. The hash is that of
SplitMix64 (Steele, Lea & Flood 2014) of the id and a seed of the map, which whoever chooses ids doesn't know.

*Order of stores.* What a killed process leaves behind is a map whose every id is found or was being changed,
but for the segment `NOTED`, whose ids are all there, perhaps twice or out of order: `renew_segment` puts
it right. Whoever reads beside a writer believes what he found if `SEQUENCE` was even and the same before
and after (a sequence lock; Boehm 2012, Can seqlocks get along with programming language memory models?).

Every loop is bounded by the size of a segment, and every segment's number is compared with the memory there
is, whatever the file holds.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsa.kernels.compiled import compiled, inlined
from dsa.kernels.fence import thread_fence
from dsa.kernels.prefetching import AHEAD, prefetch_word

__all__ = [
    "COUNT",
    "DIRECTORY",
    "NOTED",
    "SEQUENCE",
    "SPARE",
    "USED",
    "IdTable",
    "check_directory",
    "find_rows",
    "most_ids",
    "put_rows",
    "remove_ids",
    "renew_segment",
    "restore_rows",
    "split_segment",
]

Words64 = NDArray[np.int64]

# Words of the header that the kernels keep.
SEQUENCE: Final = 8
"""Odd while ids are where a reader might miss them."""
DIRECTORY: Final = 9
"""Which directory is valid: one word, so that it changes at once."""
COUNT: Final = 10
"""Ids in the map, as of the last whole pass."""
USED: Final = 11
"""Segments that have been handed out."""
SPARE: Final = 12
"""A segment that is free again, plus one; 0 where there is none."""
NOTED: Final = 13
"""The segment that was changed last, plus one."""

_UNKNOWN: Final = -1
_UNSETTLED: Final = -2
_TRIES: Final = 64
"""Looks at an id that is being moved, some microseconds together, before the caller waits."""

_ONE: Final = np.uint64(1)
_LOW: Final = np.uint64(0xFFFFFFFF)


class IdTable(NamedTuple):
    """The memory of a map.

    Args:
        header: ``(512,)`` int64.
        directory: ``(2^depth,)`` uint32, segments.
        slots: ``(segments * width, 2)`` int64.
        width: Slots of a segment.
        seed: Of the hash.
        placed: ``header[DIRECTORY]`` of this directory.
    """

    header: Words64
    directory: NDArray[np.uint32]
    slots: Words64
    width: int
    seed: np.uint64
    placed: int


@inlined
def _hash(key: int, seed: np.uint64) -> np.uint64:
    z = np.uint64(key) ^ seed
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@inlined
def most_ids(width: int) -> int:
    """Return how many ids a segment holds at most: four fifths of its slots, so that probes stay short."""
    return (width * 4) // 5


@inlined
def _depth(table: IdTable) -> int:
    depth = 0
    while (1 << depth) < table.directory.shape[0]:
        depth += 1
    return depth


@inlined
def _index(hashed: np.uint64, depth: int) -> int:
    return int(np.int64((hashed >> _ONE) >> np.uint64(63 - depth)))


@inlined
def _base(table: IdTable, hashed: np.uint64, depth: int) -> int:
    """Return the first slot of the segment of a hash, or -1 where the memory does not reach it."""
    base = np.int64(table.directory[_index(hashed, depth)]) * table.width
    return int(base) if base + table.width <= table.slots.shape[0] else _UNKNOWN


@inlined
def _home(hashed: np.uint64, width: int) -> int:
    # A product instead of a remainder: Lemire 2019, Fast random integer generation in an interval.
    return int(np.int64(((hashed & _LOW) * np.uint64(width - 1)) >> np.uint64(32)))


@inlined
def _next(place: int, width: int) -> int:
    return place + 1 if place + 2 < width else 0


@inlined
def _find_slot(table: IdTable, base: int, key: int, hashed: np.uint64) -> tuple[int, bool]:
    """Return the slot of an id, or the one where it would be put, or -1; and whether the id is there."""
    slots, width = table.slots, table.width
    place = _home(hashed, width)
    for _ in range(width - 1):
        value = slots[base + place, 1]
        thread_fence()
        if value <= 0:
            return base + place, False
        if slots[base + place, 0] == key:
            return base + place, True
        place = _next(place, width)
    return -1, False


@inlined
def _ask_ahead(table: IdTable, key: int, depth: int) -> None:
    hashed = _hash(key, table.seed)
    slot = np.int64(table.directory[_index(hashed, depth)]) * table.width + _home(hashed, table.width)
    prefetch_word(table.slots, slot, 0)  # type: ignore[call-arg]  # numba passes the first one


@compiled(_nrt=False)
def find_rows(table: IdTable, ids: Words64, rows: Words64, start: int) -> int:
    """Look ids up, from the position `start` on.

    Args:
        table: The map, which others may be changing.
        ids: ``(B,)`` int64.
        rows: ``(B,)`` int64, output: the row of each id, -1 for one that is not in the map.
        start: The first position.

    Returns:
        The position of an id that is being moved, or is where this memory does not reach; B if there is none.
    """
    depth = _depth(table)
    for i in range(start, ids.shape[0]):
        if i + AHEAD < ids.shape[0]:
            _ask_ahead(table, ids[i + AHEAD], depth)
        row = _settled(table, ids[i], depth)
        if row == _UNSETTLED:
            return i
        rows[i] = row
    return len(ids)


@inlined
def _settled(table: IdTable, key: int, depth: int) -> int:
    header, hashed = table.header, _hash(key, table.seed)
    for _ in range(_TRIES):
        sequence = header[SEQUENCE]
        thread_fence()
        base = _base(table, hashed, depth)
        row = _UNSETTLED
        if base >= 0:
            slot, known = _find_slot(table, base, key, hashed)
            row = table.slots[slot, 1] - 1 if known else _UNKNOWN
        thread_fence()
        if header[DIRECTORY] != table.placed:
            return _UNSETTLED
        if sequence & 1 == 0 and header[SEQUENCE] == sequence:
            return int(row) if row >= _UNKNOWN else _UNSETTLED
    return _UNSETTLED


@compiled(_nrt=False)
def put_rows(table: IdTable, ids: Words64, rows: Words64, before: Words64, done: Words64) -> None:
    """Set the rows of ids, one after the other, until a segment is full.

    Args:
        table: The map. Written.
        ids: ``(B,)`` int64; of one that occurs twice the last row counts.
        rows: ``(B,)`` int64, >= 0.
        before: ``(B,)`` int64, output: the row that each id had, -1 for a new one.
        done: ``(1,)`` int64, the first position to put; becomes that of the id for which there was no room,
            or B.
    """
    header, slots, width, depth = table.header, table.slots, table.width, _depth(table)
    full, added, i = most_ids(width), 0, done[0]
    while i < ids.shape[0]:
        if i + AHEAD < ids.shape[0]:
            _ask_ahead(table, ids[i + AHEAD], depth)
        hashed = _hash(ids[i], table.seed)
        base = _base(table, hashed, depth)
        if base < 0:
            break
        slot, known = _find_slot(table, base, ids[i], hashed)
        if known:
            before[i] = slots[slot, 1] - 1
        else:
            count = slots[base + width - 1, 0]
            if slot < 0 or count >= full:
                break
            before[i] = _UNKNOWN
            header[NOTED] = base // width + 1
            thread_fence()
            slots[slot, 0] = ids[i]
            slots[base + width - 1, 0] = count + 1
            added += 1
            thread_fence()
        slots[slot, 1] = rows[i] + 1
        i += 1
    header[COUNT] += added
    done[0] = i


@compiled(_nrt=False)
def remove_ids(table: IdTable, ids: Words64, before: Words64) -> None:
    """Remove ids.

    Args:
        table: The map. Written.
        ids: ``(B,)`` int64.
        before: ``(B,)`` int64, output: the row that each id had, -1 for one that was not in the map.
    """
    depth = _depth(table)
    for i in range(ids.shape[0]):
        if i + AHEAD < ids.shape[0]:
            _ask_ahead(table, ids[i + AHEAD], depth)
        hashed = _hash(ids[i], table.seed)
        base = _base(table, hashed, depth)
        before[i] = _UNKNOWN
        if base >= 0:
            slot, known = _find_slot(table, base, ids[i], hashed)
            if known:
                before[i] = table.slots[slot, 1] - 1
                _take_out(table, base, slot - base)


@compiled(_nrt=False)
def restore_rows(table: IdTable, ids: Words64, before: Words64, done: Words64) -> None:
    """Undo what `put_rows` did for the positions before ``done[0]``, the last one first."""
    depth = _depth(table)
    for i in range(done[0] - 1, -1, -1):
        hashed = _hash(ids[i], table.seed)
        base = _base(table, hashed, depth)
        if base < 0:
            continue
        slot, known = _find_slot(table, base, ids[i], hashed)
        if known and before[i] >= 0:
            table.slots[slot, 1] = before[i] + 1
        elif known:
            _take_out(table, base, slot - base)


@inlined
def _take_out(table: IdTable, base: int, hole: int) -> None:
    """Empty a slot, and move those behind it back that would not be found otherwise."""
    header, slots, width = table.header, table.slots, table.width
    header[NOTED] = base // width + 1
    header[SEQUENCE] += 1
    thread_fence()
    slots[base + hole, 1] = 0
    place = hole
    for _ in range(width - 2):
        place = _next(place, width)
        if slots[base + place, 1] <= 0:
            break
        home = _home(_hash(slots[base + place, 0], table.seed), width)
        if (place - home) % (width - 1) >= (place - hole) % (width - 1):
            # There is a copy at any time: a kill loses none.
            slots[base + hole, 0] = slots[base + place, 0]
            thread_fence()
            slots[base + hole, 1] = slots[base + place, 1]
            thread_fence()
            slots[base + place, 1] = 0
            hole = place
    slots[base + width - 1, 0] -= 1
    header[COUNT] -= 1
    thread_fence()
    header[SEQUENCE] += 1


@compiled(_nrt=False)
def split_segment(table: IdTable, key: int) -> bool:
    """Replace the segment of an id by two, by the next bit of the hash; the map holds what it held.

    Args:
        table: The map. Written. Its memory has room for two segments more.
        key: The id.

    Returns:
        Whether that could be done: the directory has to be doubled otherwise.
    """
    header, directory, width, depth = table.header, table.directory, table.width, _depth(table)
    index = _index(_hash(key, table.seed), depth)
    segment, run = directory[index], 1
    while 2 * run <= directory.shape[0]:
        first = index - index % (2 * run)
        if directory[first] != segment or directory[first + 2 * run - 1] != segment:
            break
        run *= 2
    if run == 1:
        return False
    half = run // 2
    shift = np.uint64(64 - depth)
    while half > 1:
        shift += _ONE
        half //= 2
    low, high = _take_segment(header), _take_segment(header)
    _clear(table, low)
    _clear(table, high)
    for place in range(width - 1):
        slot = int(np.int64(segment)) * width + place
        if table.slots[slot, 1] > 0:
            hashed = _hash(table.slots[slot, 0], table.seed)
            _append(table, high if (hashed >> shift) & _ONE else low, slot, hashed)
    header[SEQUENCE] += 1
    thread_fence()
    first = index - index % run
    for i in range(run):
        directory[first + i] = low if 2 * i < run else high
    thread_fence()
    header[SEQUENCE] += 1
    header[SPARE] = np.int64(segment) + 1
    return True


@compiled(_nrt=False)
def renew_segment(table: IdTable, segment: int) -> None:
    """Put a segment right whose change was interrupted: a copy takes its place, each id once and in order.

    Args:
        table: The map. Written. Its memory has room for a segment more.
        segment: Its number.
    """
    header, directory, width = table.header, table.directory, table.width
    target = _take_segment(header)
    _clear(table, target)
    for place in range(width - 1):
        slot = segment * width + place
        if table.slots[slot, 1] > 0:
            _append(table, target, slot, _hash(table.slots[slot, 0], table.seed))
    thread_fence()
    for i in range(directory.shape[0]):
        if directory[i] == segment:
            directory[i] = target
    thread_fence()
    header[NOTED] = 0
    header[SPARE] = segment + 1


@inlined
def _take_segment(header: Words64) -> int:
    # A kill loses a segment at most: none is handed out twice.
    taken = header[SPARE] - 1
    if taken >= 0:
        header[SPARE] = 0
    else:
        taken = header[USED]
        header[USED] = taken + 1
    thread_fence()
    return int(taken)


@inlined
def _clear(table: IdTable, segment: int) -> None:
    for slot in range(segment * table.width, (segment + 1) * table.width):
        table.slots[slot, 0] = 0
        table.slots[slot, 1] = 0


@inlined
def _append(table: IdTable, segment: int, source: int, hashed: np.uint64) -> None:
    """Copy a slot into another segment, which has room, unless its id is there."""
    slots, base = table.slots, segment * table.width
    slot, known = _find_slot(table, base, slots[source, 0], hashed)
    if not known and slot >= 0:
        slots[slot, 0] = slots[source, 0]
        slots[slot, 1] = slots[source, 1]
        slots[base + table.width - 1, 0] += 1


@compiled(_nrt=False)
def check_directory(directory: NDArray[np.uint32], used: int) -> bool:
    """Tell whether a directory is one: numbers below `used`, each in one run that a split can have left."""
    start, size = 0, directory.shape[0]
    while start < size:
        segment, run = directory[start], 1
        if segment >= used:
            return False
        while start + run < size and directory[start + run] == segment:
            run += 1
        if run & (run - 1) or start % run:
            return False
        start += run
    return True
