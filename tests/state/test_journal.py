"""The journal's ring: what was committed is read back, whatever was begun, released, grown or torn."""

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import dsa.state.journal
from dsa.backends import system
from dsa.errors import DiskSpaceError, StateCorruptError
from dsa.schema import adam_schema
from dsa.state.journal import Journal
from dsa.state.journal_format import Slot, layout_of, read_slot, write_slot

IDENTITY = "0123456789abcdef"
DTYPES = [adam_schema(dim).dtype for dim in (1, 3, 16)]
BODY = system.PAGE
SLOTS = (512, 1024)
HOT = 0


class Kept(NamedTuple):
    """An entry as the model remembers it."""

    sequence: int
    note: bytes
    parts: list[tuple[int, list[int], bytes]]


def create(path, capacity=4096, durable=False, limit=1):
    """Make a journal that keeps its entries, and at first has no room beyond its capacity."""
    return Journal.create(path, IDENTITY, capacity, durable, limit)


def begin(journal, parts, note=b"", seed=0):
    """Begin an entry of ``(table, dtype, rows)`` and fill it; return what should be read back, or None."""
    rng = np.random.default_rng(seed)
    wanted = [(table, np.sort(rng.choice(1_000, rows, replace=False)), dtype) for table, dtype, rows in parts]
    memory = journal.begin(note, wanted)
    if memory is None:
        return None
    kept = []
    for (table, rows, dtype), records in zip(wanted, memory, strict=True):
        assert records.dtype == dtype
        assert records.ctypes.data % 64 == 0
        raw = rng.bytes(dtype.itemsize * len(rows))
        records.view(np.uint8).reshape(-1)[:] = np.frombuffer(raw, np.uint8)
        kept.append((table, rows.tolist(), raw))
    return Kept(0, note, kept)


def put(journal, kept, parts, note=b"", seed=0):
    """Begin and commit an entry and append it to those kept."""
    entry = begin(journal, parts, note, seed)
    assert entry is not None
    journal.commit()
    kept.append(entry._replace(sequence=kept[-1].sequence + 1 if kept else 1))


def read(path):
    """Open a journal as recovery does and return its entries."""
    journal = Journal.open(path, IDENTITY, durable=False)
    try:
        return [
            Kept(sequence, note, list(map(plain, parts))) for sequence, note, parts, *_ in journal.entries()
        ]
    finally:
        journal.close(remove=False)


def plain(part):
    return part.table, part.rows.tolist(), part.records.tobytes()


def slots_of(data):
    return [slot for slot in (read_slot(bytearray(data), at) for at in SLOTS) if slot is not None]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "dsa.journal"


# ---------------------------------------------------------------- the ring against a list of entries

PARTS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(DTYPES), st.integers(0, 25)), max_size=3)
NOTES = st.binary(max_size=200)
SEEDS = st.integers(0, 2**32)


class Ring(RuleBasedStateMachine):
    """Any order of operations; after each, a copy of the file is opened and compared."""

    def __init__(self):
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        self.path = self.directory / "dsa.journal"
        self.journal = None
        self.kept = []

    @initialize(
        capacity=st.integers(1, 6_000), limit=st.sampled_from([HOT, 1, 9_000, 60_000]), durable=st.booleans()
    )
    def make(self, capacity, limit, durable):
        self.durable = durable
        self.limit = limit
        self.journal = create(self.path, capacity, durable, limit)

    @rule(parts=PARTS, note=NOTES, seed=SEEDS)
    def put(self, parts, note, seed):
        entry = begin(self.journal, parts, note, seed)
        if entry is None:
            assert len(self.kept) > 1, "there is no room although nothing can be released"
            return
        self.journal.commit()
        self.kept.append(entry._replace(sequence=self.kept[-1].sequence + 1 if self.kept else 1))

    @rule(parts=PARTS, note=NOTES, seed=SEEDS)
    def begin_in_vain(self, parts, note, seed):
        begin(self.journal, parts, note, seed)

    @rule(parts=PARTS, note=NOTES, seed=SEEDS, times=st.integers(2, 40))
    def step_as_the_state_does(self, parts, note, seed, times):
        for number in range(times):
            self.put(parts, note, seed + number)
            self.release()

    @rule()
    def release(self):
        self.journal.release()
        self.kept = self.kept[-1:]

    @rule()
    def commit_again(self):
        """Without an entry begun it does nothing."""
        self.journal._draft = None
        self.journal.commit()

    @precondition(lambda self: self.kept)
    @rule()
    def open_and_go_on(self):
        self.journal.close(remove=False)
        self.journal = Journal.open(self.path, IDENTITY, self.durable)
        assert len(list(self.journal.entries())) == len(self.kept)

    @invariant()
    def reads_as_the_model(self):
        if self.journal is not None:
            copy = self.directory / "copy"
            shutil.copy(self.path, copy)
            assert read(copy) == self.kept
            assert self.journal.capacity == os.path.getsize(self.path) - BODY

    def teardown(self):
        if self.journal is not None:
            self.journal.close(remove=True)
        shutil.rmtree(self.directory)


TestRing = Ring.TestCase
TestRing.settings = settings(settings(), stateful_step_count=30)


@pytest.mark.parametrize("limit", [1, HOT])
@pytest.mark.parametrize("capacity", range(64, 2_500, 192))
def test_every_way_of_meeting_the_ends(path, capacity, limit):
    """Entries of three sizes in turn: the ring fills to the last byte, wraps, and is full."""
    journal = create(path, capacity, limit=limit)
    kept, sizes = [], [0, 3, 9]
    refused = 0
    for number in range(60):
        parts = [(0, DTYPES[0], sizes[number % 3])]
        if begin(journal, parts, seed=number) is None:
            refused += 1
            journal.release()
            kept = kept[-1:]
        put(journal, kept, parts, seed=number)
        assert read(path) == kept
    assert refused
    journal.close(remove=True)


def test_a_journal_that_is_released_after_each_step_does_not_grow(path):
    """The bound that is promised: room for what is kept, not for all that went through."""
    parts = [(0, DTYPES[2], 20), (1, DTYPES[1], 20)]
    length = layout_of(0, [(rows, dtype.itemsize) for _, dtype, rows in parts]).length
    for limit in (1, HOT):
        journal = create(path, 64, limit=limit)
        kept = []
        for number in range(500):
            rows = 1 + number * 7 % 20
            put(journal, kept, [(table, dtype, rows) for table, dtype, _ in parts], seed=number)
            journal.release()
            kept = kept[-1:]
        assert journal.capacity <= 6 * length
        assert read(path) == kept
        journal.close(remove=True)


def test_a_hot_journal_uses_the_same_memory_again(path):
    journal = create(path, 1 << 20, limit=HOT)
    kept, touched = [], 0
    for number in range(50):
        put(journal, kept, [(0, DTYPES[1], 20)], seed=number)
        journal.release()
        touched = max(touched, journal._tail)
    assert touched <= 4 * layout_of(0, [(20, DTYPES[1].itemsize)]).length
    journal.close(remove=True)


@pytest.mark.parametrize("kept_before", [1, 2, 5])
def test_growth_keeps_what_is_there(path, kept_before):
    """Beyond its limit only a ring that holds nothing but its last entry grows."""
    journal = create(path, 4_096)
    kept = []
    for number in range(kept_before):
        put(journal, kept, [(0, DTYPES[0], 5)], b"note", seed=number)
    before = journal.capacity
    huge = [(1, DTYPES[2], 200)]
    if kept_before > 1:
        assert begin(journal, huge) is None
        assert journal.capacity == before
        journal.release()
        kept = kept[-1:]
    put(journal, kept, huge, seed=9)
    assert journal.capacity > before
    assert read(path) == kept
    put(journal, kept, [(0, DTYPES[0], 5)], seed=10)
    assert read(path) == kept
    journal.close(remove=True)


def without_reservation(monkeypatch):
    """As on macOS, Windows and musl: what reserves there writes zeros."""
    monkeypatch.delattr(os, "posix_fallocate", raising=False)


@pytest.mark.parametrize("reserving", [True, False])
@pytest.mark.parametrize("capacity", [64, 1_000, 4_096])
def test_growth_below_the_limit_drops_nothing(path, monkeypatch, capacity, reserving):
    """Entries of all sizes, none released: none is refused below the limit, and all are there."""
    if not reserving:
        without_reservation(monkeypatch)
    limit = 40_000
    journal = create(path, capacity, limit=limit)
    kept, length, grown = [], 0, 0
    for number in range(400):
        parts = [(0, DTYPES[number % 3], 1 + number * 7 % 20)]
        size = layout_of(4, [(rows, dtype.itemsize) for _, dtype, rows in parts]).length
        before = journal.capacity
        if begin(journal, parts, b"note", seed=number) is None:
            assert length + size > limit
            break
        put(journal, kept, parts, b"note", seed=number)
        length += size
        grown += journal.capacity > before
        assert read(path) == kept
    assert grown > 1
    assert journal.capacity == limit
    journal.close(remove=True)


@pytest.mark.parametrize("reserving", [True, False])
@pytest.mark.parametrize("moment", ["before the draft is committed", "after it"])
def test_growth_overwrites_nothing_at_any_moment(path, monkeypatch, moment, reserving):
    """What lies in the file when the growth has returned is what lay there, and zeros."""
    if not reserving:
        without_reservation(monkeypatch)
    for limit in (1, HOT, 1 << 20):
        journal = create(path, 2_048, limit=limit)
        kept = []
        put(journal, kept, [(0, DTYPES[0], 5)], b"note")
        before = path.read_bytes()
        entry = begin(journal, [(1, DTYPES[2], 200)], seed=9)
        after = path.read_bytes()
        assert len(after) > len(before)
        if moment == "after it":
            journal.commit()
            kept.append(entry._replace(sequence=2))
        else:
            unused = journal._draft.start + BODY
            assert after[: min(unused, len(before))] == before[: min(unused, len(before))]
        assert read(path) == kept
        journal.close(remove=True)


@pytest.mark.parametrize("stage", ["writing", "mapping"])
def test_growth_that_fails_half_way(path, monkeypatch, stage):
    """What was there stays readable, and later entries go on in the room there is."""
    journal = create(path, 2_048, limit=1 << 20)
    kept = []
    put(journal, kept, [(0, DTYPES[0], 5)])
    with monkeypatch.context() as patch:
        if stage == "writing":
            patch.setattr(system, "_write_zeros", lambda *ignored: refuse())
        else:
            patch.setattr(dsa.state.journal.mmap, "mmap", lambda *ignored: refuse())
        with pytest.raises(OSError, match="refused"):
            begin(journal, [(0, DTYPES[2], 100)])
        assert path.stat().st_size >= BODY + journal.capacity
    put(journal, kept, [(0, DTYPES[0], 4)], seed=2)
    put(journal, kept, [(0, DTYPES[2], 100)], seed=3)
    assert read(path) == kept
    journal.close(remove=True)


def test_a_disk_without_room_to_grow(path, monkeypatch):
    """Nothing has changed, and smaller entries go on."""
    journal = create(path, 2_048)
    kept = []
    put(journal, kept, [(0, DTYPES[0], 5)])

    def no_room(descriptor, size, directory):
        raise DiskSpaceError(size, 0, directory)

    with monkeypatch.context() as patch:
        patch.setattr(system, "extend", no_room)
        with pytest.raises(DiskSpaceError):
            begin(journal, [(0, DTYPES[2], 100)])
        assert read(path) == kept
        put(journal, kept, [(0, DTYPES[0], 4)], seed=2)
    assert read(path) == kept
    put(journal, kept, [(0, DTYPES[0], 4)], seed=3)
    assert read(path) == kept
    journal.close(remove=True)


def test_an_entry_without_parts_or_rows(path):
    journal = create(path)
    kept = []
    put(journal, kept, [], b"a step in which no table took part")
    put(journal, kept, [(2, DTYPES[1], 0)])
    put(journal, kept, [(2, DTYPES[1], 0), (0, DTYPES[0], 1), (1, DTYPES[2], 0)], b"\0")
    assert read(path) == kept
    journal.close(remove=True)


def test_bytes_written_and_the_file_that_goes(path):
    journal = create(path)
    assert journal.bytes_written == 0
    put(journal, [], [(0, DTYPES[0], 5)], b"note")
    assert journal.bytes_written == layout_of(4, [(5, DTYPES[0].itemsize)]).length
    journal.close(remove=False)
    assert path.exists()
    Journal.open(path, IDENTITY, durable=False).close(remove=True)
    assert not path.exists()


# ---------------------------------------------------------------- torn writes


def stages(path, operation):
    """Return the file's bytes before and after something."""
    before = path.read_bytes()
    operation()
    return before, path.read_bytes()


def mixed(before, after, take):
    """Return the old bytes with those changes that `take` picks, by their number and place."""
    changed = np.flatnonzero(np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8))
    data = bytearray(before)
    for number, at in enumerate(changed.tolist()):
        if take(number, at, len(changed)):
            data[at] = after[at]
    return bytes(data)


@pytest.mark.parametrize("notes", [0, 30])
def test_a_commit_torn_at_any_byte_is_none(path, notes):
    """A process that dies leaves a prefix of what it wrote; only the whole is an entry."""
    journal = create(path)
    kept = []
    put(journal, kept, [(0, DTYPES[1], 4)])
    entry = begin(journal, [(0, DTYPES[1], 3), (1, DTYPES[0], 2)], b"n" * notes, seed=1)
    before, after = stages(path, journal.commit)
    journal.close(remove=True)
    slots = [slot for slot in slots_of(before) if slot.last == 1]
    assert slots
    count = sum(a != b for a, b in zip(before, after, strict=True))
    # In the order of the bytes the slots come before the entry; in time they come after it.
    entries_only = before[:BODY] + after[BODY:]
    for length in range(count + 1):
        torn = mixed(before, entries_only, lambda number, at, total, length=length: number < length)
        path.write_bytes(torn)
        assert read(path) in (kept, [*kept, entry._replace(sequence=2)])
        if torn == before:
            assert read(path) == kept
    path.write_bytes(entries_only)
    assert read(path) == [*kept, entry._replace(sequence=2)]
    for length in range(64):
        path.write_bytes(mixed(entries_only, after, lambda number, at, total, length=length: number < length))
        assert read(path) == [*kept, entry._replace(sequence=2)]


@pytest.mark.parametrize("limit", [1, HOT])
def test_a_release_torn_at_any_byte_is_harmless(path, limit):
    journal = create(path, limit=limit)
    kept = []
    for number in range(3):
        put(journal, kept, [(0, DTYPES[1], 4)], seed=number)
    before, after = stages(path, journal.release)
    journal.close(remove=True)
    for length in range(64):
        path.write_bytes(mixed(before, after, lambda number, at, total, length=length: number < length))
        assert read(path) in (kept, kept[-1:])


@given(chosen=st.lists(st.booleans(), min_size=64, max_size=64), seed=SEEDS)
@settings(max_examples=60)
def test_sectors_of_a_commit_in_any_order(chosen, seed):
    """A device writes sectors in any order: an entry of which one is missing is none (durable policy)."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "dsa.journal"
        journal = create(path, 1 << 14)
        kept = []
        put(journal, kept, [(0, DTYPES[1], 4)])
        start = path.read_bytes()
        entry = begin(journal, [(0, DTYPES[2], 12), (1, DTYPES[0], 30)], b"note", seed)
        journal.commit()
        after = start[:BODY] + path.read_bytes()[BODY:]
        journal.close(remove=True)
        path.write_bytes(mixed(start, after, lambda number, at, total: chosen[at // 512 % 64]))
        assert read(path) in (kept, [*kept, entry._replace(sequence=2)])


# ---------------------------------------------------------------- order of syncs


def test_an_entry_is_synced_before_the_header_calls_it_committed(path, monkeypatch):
    journal = create(path, durable=True)
    seen = []

    def sync(mapping, descriptor):
        seen.append(bytes(mapping[:]))

    monkeypatch.setattr(system, "sync_mapping", sync)
    kept = []
    put(journal, kept, [(0, DTYPES[1], 4)])
    assert len(seen) == 1
    assert max(slots_of(seen[0])).last == 0
    path.with_name("copy").write_bytes(seen[0])
    assert read(path.with_name("copy")) == kept
    assert max(slots_of(path.read_bytes())).last == 1
    journal.close(remove=True)


def test_a_journal_that_is_not_durable_never_waits(path, monkeypatch):
    journal = create(path)
    monkeypatch.setattr(system, "sync_mapping", lambda *ignored: pytest.fail("it waits for the device"))
    put(journal, [], [(0, DTYPES[1], 4)])
    journal.release()
    journal.close(remove=True)


def test_a_sync_that_fails_is_raised_and_not_tried_again(path, monkeypatch):
    """The system may have dropped what it could not write: no later success means anything."""
    journal = create(path, durable=True)
    kept = []
    put(journal, kept, [(0, DTYPES[1], 4)])
    calls = []
    monkeypatch.setattr(system, "sync_mapping", lambda *ignored: calls.append(1) or refuse())
    for operation in (journal.commit, journal.release, journal.sync):
        entry = begin(journal, [(0, DTYPES[1], 4)], seed=1)
        calls.clear()
        with pytest.raises(OSError, match="refused"):
            operation()
        assert len(calls) == 1
        assert read_copy(path)[-1] in (kept[-1], entry._replace(sequence=2))
    assert journal._slot.last == 1, "what the device refused is not called committed"
    journal.close(remove=True)


def refuse():
    raise OSError(5, "refused")


def test_a_release_whose_sync_fails_releases_nothing(path, monkeypatch):
    """The room of the older entries may not be used: a loss of power can bring the old header back."""
    journal = create(path, 1_024, durable=True)
    kept = []
    while begin(journal, [(0, DTYPES[1], 4)], seed=len(kept)) is not None:
        put(journal, kept, [(0, DTYPES[1], 4)], seed=len(kept))
    with monkeypatch.context() as patch:
        patch.setattr(system, "sync_mapping", lambda *ignored: refuse())
        for _ in range(2):
            with pytest.raises(OSError, match="refused"):
                journal.release()
            assert begin(journal, [(0, DTYPES[1], 4)]) is None
    assert read(path) in (kept, kept[-1:])
    journal.release()
    put(journal, kept, [(0, DTYPES[1], 4)], seed=99)
    assert read(path) == kept[-2:]
    journal.close(remove=True)


def test_interrupted_before_any_line(path):
    """Ctrl-C anywhere in a call: made again it completes, and what follows is in its place."""
    reading = {"open", "entries", "_entry_at", "_read_header", "__init__", "close"}
    methods = {name: method for name, method in vars(Journal).items() if hasattr(method, "__code__")}
    code = {method.__code__ for name, method in methods.items() if name not in reading}
    number = 0
    while True:
        number += 1
        journal = create(path, 512)
        kept = []
        with interrupting(code, number) as interrupts:
            for seed in range(4):
                entry = insist(lambda j=journal, s=seed: begin(j, [(0, DTYPES[1], 3)], seed=s))
                insist(journal.commit)
                kept.append(entry._replace(sequence=len(kept) + 1))
                assert read_copy(path)[-2:] == kept[-2:], f"interrupt {number}"
                insist(journal.release)
                assert read_copy(path)[-1:] == kept[-1:], f"interrupt {number}"
        journal.close(remove=True)
        if not interrupts:
            break
    assert number > 50


def read_copy(path):
    return read(shutil.copy(path, path.with_name("copy")))


def insist(call):
    """Call until no interrupt comes between."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return call()


@contextlib.contextmanager
def interrupting(code, number):
    """Raise KeyboardInterrupt before the n-th line of some functions; yield the list of those raised."""
    count, raised = 0, []

    def enter(frame, event, argument):
        return inside if frame.f_code in code else None

    def inside(frame, event, argument):
        nonlocal count
        if event == "line":
            count += 1
            if count == number:
                raised.append(frame.f_lineno)
                raise KeyboardInterrupt
        return inside

    old = sys.gettrace()
    sys.settrace(enter)
    try:
        yield raised
    finally:
        sys.settrace(old)


# ---------------------------------------------------------------- damage


@pytest.fixture
def written(path):
    """A journal that a dead process has left: entry 3, which is applied, and two that follow a wrap."""
    journal = create(path, 1_600)
    kept = []
    for number in range(3):
        put(journal, kept, [(0, DTYPES[1], 4)], b"note %d" % number, seed=number)
    journal.release()
    kept = kept[-1:]
    for number in range(3, 5):
        put(journal, kept, [(0, DTYPES[1], 4)], b"note %d" % number, seed=number)
    assert journal._slot.head >= journal._tail > 0
    journal.close(remove=False)
    return path, kept


def test_a_changed_bit_is_never_believed(written):
    """Entries that are needed: an error. Applied or unused: no harm, and records that are damaged go."""
    path, kept = written
    data = path.read_bytes()
    errors = forgotten = 0
    applied, *needed = kept
    used = [*range(128), *range(SLOTS[0], SLOTS[0] + 64), *range(SLOTS[1], SLOTS[1] + 64)]
    for at in [*used, *range(BODY - 8, len(data))]:
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        try:
            found = read(path)
        except StateCorruptError:
            errors += 1
            continue
        bare = found[0] == applied._replace(parts=[])
        forgotten += bare
        assert found == kept or found in (kept[-1:], kept[-2:]) or (bare and found[1:] == needed), (
            f"byte {at}"
        )
    assert errors > 2 * 4 * DTYPES[1].itemsize
    assert forgotten > 4 * DTYPES[1].itemsize


def test_damage_to_what_the_tables_hold_is_harmless(path):
    """After each step the last entry stays for its note: a bad sector in its records costs nothing."""
    journal = create(path, limit=HOT)
    put(journal, [], [(0, DTYPES[1], 4), (1, DTYPES[0], 2)], b"the counts")
    journal.release()
    head = layout_of(10, [(4, DTYPES[1].itemsize), (2, DTYPES[0].itemsize)])
    first, end = BODY + head.parts[0][0], BODY + head.length
    journal.close(remove=False)
    data = path.read_bytes()
    whole = read(path)
    for at in range(first, end):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        assert read(path) in (whole, [Kept(1, b"the counts", [])])
    path.write_bytes(data[:first] + bytes(end - first) + data[end:])
    assert read(path) == [Kept(1, b"the counts", [])]
    path.write_bytes(data[: BODY + 40] + b"\xff" + data[BODY + 41 :])
    with pytest.raises(StateCorruptError, match="is damaged in entry 1 of 1"):
        read(path)


@given(data=st.data())
@settings(max_examples=150)
def test_any_bytes_are_safe_to_read(data):
    """Garbage, and garbage with right checksums: an error or entries, never a crash."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "dsa.journal"
        journal = create(path, 1_024)
        put(journal, [], [(0, DTYPES[0], 3)], b"note")
        journal.close(remove=False)
        raw = bytearray(path.read_bytes())
        numbers = st.integers(0, 2**64 - 1) | st.integers(0, 2_000)
        for at in data.draw(st.lists(st.sampled_from(SLOTS), unique=True)):
            write_slot(raw, at, Slot(*[data.draw(numbers) for _ in range(6)]))
        for _ in range(data.draw(st.integers(0, 4))):
            at = data.draw(st.integers(0, len(raw) - 9))
            raw[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
        path.write_bytes(raw)
        with contextlib.suppress(StateCorruptError):
            read(path)


def shorten(path, size):
    os.truncate(path, size)


DAMAGES = {
    "missing": (lambda path: path.unlink(), "is missing"),
    "empty": (lambda path: shorten(path, 0), "has 0 bytes, which no journal has"),
    "a header alone": (lambda path: shorten(path, BODY), "has 4096 bytes, which no journal has"),
    "truncated": (lambda path: shorten(path, BODY + 300), "is damaged in entry"),
    "zeroed": (lambda path: path.write_bytes(bytes(path.stat().st_size)), "was not written by dsa"),
    "foreign": (lambda path: path.write_bytes(b"x" * 9_000), "was not written by dsa"),
    "another state's": (
        lambda path: path.write_bytes(path.read_bytes().replace(IDENTITY.encode(), b"f" * 16)),
        "belongs to another state",
    ),
    "without slots": (
        lambda path: path.write_bytes(path.read_bytes()[:512] + bytes(BODY - 512) + path.read_bytes()[BODY:]),
        "has a damaged header",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_explained(written, damage):
    path, _ = written
    harm, match = DAMAGES[damage]
    harm(path)
    held = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    with pytest.raises(StateCorruptError, match=match) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert f"run `dsa repair {path.parent}`" in str(caught.value)
    del caught
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == held


def test_bytes_after_the_end_change_nothing(written):
    path, kept = written
    with path.open("ab") as file:
        file.write(b"\xff" * 10_000)
    assert read(path) == kept


def test_either_slot_alone_is_enough_while_the_other_is_written(path):
    """The slots are written in turn: whatever a death leaves of one, the other holds."""
    journal = create(path, 2_048)
    kept = []
    for number in range(6):
        put(journal, kept, [(0, DTYPES[1], 3)], seed=number)
        data = path.read_bytes()
        newest = max(SLOTS, key=lambda at: read_slot(bytearray(data), at) or Slot(0, 0, 0, 0, 0))
        path.with_name("copy").write_bytes(data[:newest] + b"\xaa" * 40 + data[newest + 40 :])
        if number:
            assert read(path.with_name("copy"))[-1] == kept[-1]
        journal.release()
        data = path.read_bytes()
        newest = max(SLOTS, key=lambda at: read_slot(bytearray(data), at) or Slot(0, 0, 0, 0, 0))
        path.with_name("copy").write_bytes(data[:newest] + b"\xaa" * 40 + data[newest + 40 :])
        assert read(path.with_name("copy"))[-1] == kept[-1]
    journal.close(remove=True)


@pytest.mark.parametrize("other", ["x 1", "abc", "abc 1", "abc 123", "abc 12\n", "", "bc 12"])
def test_a_journal_of_another_life_is_not_read(path, other):
    """Each life of a state has a journal of its own, which repeats the whole of its name."""
    journal = Journal.create(path, "abc 12", 4_096, durable=False)
    put(journal, [], [(0, DTYPES[1], 4)])
    journal.close(remove=False)
    with pytest.raises(StateCorruptError, match="belongs to another state, or to another life of this one"):
        Journal.open(path, other, durable=False)
    Journal.open(path, "abc 12", durable=False).close(remove=False)


def test_a_journal_that_is_there_is_not_made_again(path):
    """Whatever it holds may be needed still."""
    create(path).close(remove=False)
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        create(path)
    assert path.read_bytes() == before


@pytest.mark.disk
@pytest.mark.parametrize("durable", [False, True])
def test_a_journal_is_written_and_synced_before_anybody_relies_on_it(path, monkeypatch, durable):
    """An extent that was reserved only, and whose first write fails, would stay unreadable for ever."""
    synced = []
    real = system.sync_mapping
    monkeypatch.setattr(
        system, "sync_mapping", lambda mapping, file: synced.append(bytes(mapping[:])) or real(mapping, file)
    )
    monkeypatch.setattr(os, "posix_fallocate", lambda *ignored: pytest.fail("reserved"), raising=False)
    create(path, 100_000, durable).close(remove=False)
    assert synced == [path.read_bytes()]
    if hasattr(os.stat_result, "st_blocks"):
        assert path.stat().st_blocks * 512 >= path.stat().st_size


def test_a_journal_that_can_not_be_made_leaves_nothing(path, monkeypatch):
    held = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    for name in ("extend", "sync_mapping"):
        with monkeypatch.context() as patch:
            patch.setattr(system, name, lambda *ignored: refuse())
            with pytest.raises(OSError, match="refused"):
                create(path, durable=True)
        assert not path.exists()
    with monkeypatch.context() as patch:
        patch.setattr(dsa.state.journal.mmap, "mmap", lambda *ignored: refuse())
        with pytest.raises(OSError, match="refused"):
            create(path)
    assert not path.exists()
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == held
