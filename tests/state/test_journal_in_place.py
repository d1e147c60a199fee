"""Both kinds of entries, mixed: whoever opens a journal at any moment gets the tables of a whole step."""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dsa.state.journal import Journal
from dsa.state.journal_format import SLOTS_AT

IDENTITY = "0123456789abcdef"
ROWS, WIDTHS = 40, (1, 3, 16)
"""Rows of each of three tables, and the words of a record."""
RECORDS = [np.dtype([("x", "<i4", (width,))]) for width in WIDTHS]


def recovered(path, tables):
    """Return what recovery makes of tables and a journal, and the note that it finds last."""
    journal = Journal.open(path, IDENTITY, durable=False)
    tables, note = [table.copy() for table in tables], None
    for entry in journal.entries():
        note = entry.note
        put_back(tables, entry)
    unfinished = journal.open_entry()
    if unfinished is not None:
        put_back(tables, unfinished)
    del unfinished
    journal.close(remove=False)
    return tables, note


def put_back(tables, entry):
    for index, rows, raw in entry.parts:
        tables[index][rows] = np.ascontiguousarray(raw).view("<i4")


def changes(tables, chosen, seed):
    """Return ``(table, rows, new records)`` for numbers of rows, each table once."""
    rng = np.random.default_rng(seed)
    found = []
    for index, count in enumerate(chosen):
        rows = np.sort(rng.choice(ROWS, count, replace=False))
        found.append((index, rows, rng.integers(-(2**31), 2**31, (count, WIDTHS[index]), dtype=np.int32)))
    return found


CHOSEN = st.lists(st.integers(0, 20), max_size=3)
SEEDS, NOTES = st.integers(0, 2**32), st.binary(max_size=100)


class Mixed(RuleBasedStateMachine):
    """Steps that change tables where they are, and steps whose records go through the journal.

    `tables` are what a dying process would leave, `whole` what the steps that count have made.
    """

    def __init__(self):
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        self.tables = [np.zeros((ROWS, width), np.int32) for width in WIDTHS]
        self.whole = [table.copy() for table in self.tables]
        self.note = None
        self.waiting = []
        self.journal = None
        self.lives = 0

    @initialize(capacity=st.integers(1, 6_000), limit=st.sampled_from([0, 1, 9_000]))
    def start(self, capacity, limit):
        self.size = capacity, limit
        self.begin_life()

    def begin_life(self):
        self.lives += 1
        self.path = self.directory / f"journal-{self.lives}"
        self.journal = Journal.create(self.path, IDENTITY, self.size[0], False, self.size[1])
        self.note, self.waiting = None, []

    def settled(self, begin):
        """Begin an entry, having let go of the others where there is no room."""
        begun = begin()
        if begun is None:
            self.write_all()
            self.journal.release()
            begun = begin()
        assert begun is not None
        return begun

    def write_all(self):
        for parts in self.waiting:
            for index, rows, new in parts:
                self.tables[index][rows] = new
        self.waiting.clear()

    def count(self, parts, note):
        self.note = note
        for index, rows, new in parts:
            self.whole[index][rows] = new

    def begin_in_place(self, parts, note):
        self.write_all()
        wanted = [(index, len(rows), WIDTHS[index]) for index, rows, _ in parts]
        memory = self.settled(lambda: self.journal.begin_in_place(note, wanted))
        assert [(part.table, *part.records.shape) for part in memory] == wanted
        assert all((part.rows == -1).all() for part in memory)
        return memory

    @rule(
        chosen=CHOSEN, seed=SEEDS, note=NOTES, far=st.floats(0, 1), end=st.sampled_from(["", "undo", "die"])
    )
    def change_in_place(self, chosen, seed, note, far, end):
        parts = changes(self.tables, chosen, seed)
        memory = self.begin_in_place(parts, note)
        total = sum(len(rows) for _, rows, _ in parts)
        left = round(far * total) if end else total
        for part, (index, rows, new) in zip(memory, parts, strict=True):
            for position, row in list(enumerate(rows))[:left]:
                part.records[position] = self.tables[index][row]
                part.rows[position] = row
                self.tables[index][row] = new[position]
            left -= min(left, len(rows))
        self.reads_as_the_model()
        if end == "":
            self.journal.commit()
            self.count(parts, note)
        elif end == "undo":
            for part in memory:
                noted = np.flatnonzero(part.rows >= 0)
                self.tables[part.table][part.rows[noted]] = part.records[noted]
            self.journal.undone()
        else:
            self.die()

    @rule(chosen=CHOSEN, seed=SEEDS, note=NOTES)
    def begin_in_place_in_vain(self, chosen, seed, note):
        """As when an interrupt comes before anything is noted, and nobody learns of the entry."""
        self.begin_in_place(changes(self.tables, chosen, seed), note)

    @rule(chosen=CHOSEN, seed=SEEDS, note=NOTES, written=st.booleans(), released=st.booleans())
    def change_through_the_journal(self, chosen, seed, note, written, released):
        parts = changes(self.tables, chosen, seed)
        self.fill(parts, note)
        self.journal.commit()
        self.count(parts, note)
        self.waiting.append(parts)
        if written:
            self.write_all()
            if released:
                self.journal.release()

    @rule(chosen=CHOSEN, seed=SEEDS, note=NOTES)
    def begin_in_vain(self, chosen, seed, note):
        self.fill(changes(self.tables, chosen, seed), note)

    def fill(self, parts, note):
        wanted = [(index, rows, RECORDS[index]) for index, rows, _ in parts]
        for records, (_, _, new) in zip(
            self.settled(lambda: self.journal.begin(note, wanted)), parts, strict=True
        ):
            records["x"] = new

    @rule()
    def end_what_was_begun(self):
        """After something was begun in vain: as a state does that finds out."""
        self.journal.undone()
        self.journal.commit()

    @rule(some=st.booleans())
    def die(self, some=False):
        assume(self.journal is not None)
        if some and self.waiting:
            for index, rows, new in self.waiting[0]:  # half of a step's records have reached the tables
                self.tables[index][rows[::2]] = new[::2]
        self.journal.close(remove=False)
        self.tables, note = recovered(self.path, self.tables)
        assert note == self.note
        self.path.unlink()
        self.begin_life()

    @invariant()
    def reads_as_the_model(self):
        if self.journal is None:
            return
        copy = self.directory / "copy"
        shutil.copy(self.path, copy)
        tables, note = recovered(copy, self.tables)
        assert note == self.note
        for found, wanted in zip(tables, self.whole, strict=True):
            np.testing.assert_array_equal(found, wanted)

    def teardown(self):
        if self.journal is not None:
            self.journal.close(remove=True)
        shutil.rmtree(self.directory)


TestMixed = Mixed.TestCase
TestMixed.settings = settings(settings(), stateful_step_count=30)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "dsa.journal"


def step(journal, table, rows, note=b""):
    """Change rows in place, each to its number plus one; the step is not ended."""
    (part,) = journal.begin_in_place(note, [(1, len(rows), WIDTHS[1])])
    part.records[:] = table[rows]
    part.rows[:] = rows
    table[rows] += rows[:, None] + 1


def test_an_entry_that_nobody_has_learned_of_hides_no_later_one(path):
    """A large entry behind the last one, begun and forgotten; then a small one at the start of the ring."""
    journal = Journal.create(path, IDENTITY, 1 << 14, False)
    tables = [np.zeros((ROWS, width), np.int32) for width in WIDTHS]
    for _ in range(2):
        step(journal, tables[1], np.arange(10))
        journal.commit()
    before = tables[1].copy()
    assert journal.begin_in_place(b"", [(1, 39, WIDTHS[1])]) is not None
    assert journal._draft.start > 0
    step(journal, tables[1], np.arange(3, 8))
    assert journal._draft.start == 0
    assert (tables[1] != before).any()
    np.testing.assert_array_equal(recovered(path, tables)[0][1], before)
    journal.close(remove=True)


@pytest.mark.parametrize("undone", [0, 1, 3])
def test_undone_entries_leave_nothing(path, undone):
    """The header counts them, so that whoever has read of one in the meantime can tell."""
    journal = Journal.create(path, IDENTITY, 1 << 12, False)
    tables = [np.zeros((ROWS, width), np.int32) for width in WIDTHS]
    step(journal, tables[1], np.arange(4), b"the note")
    journal.commit()
    for _ in range(undone):
        journal.begin_in_place(b"another", [(1, 30, WIDTHS[1])])
        journal.undone()
        journal.undone()  # nothing is begun any more
    assert journal._slot.undone == undone
    journal.close(remove=False)
    again = Journal.open(path, IDENTITY, durable=False)
    assert [entry.note for entry in again.entries()] == [b"the note"]
    assert again.open_entry() is None
    assert again._slot.undone == undone
    again.close(remove=True)


def test_the_order_in_which_an_undone_entry_goes(path, monkeypatch):
    """Until the header tells of it, its images are there: a reader looks at the header last."""
    journal = Journal.create(path, IDENTITY, 1 << 12, False)
    tables = [np.zeros((ROWS, width), np.int32) for width in WIDTHS]
    step(journal, tables[1], np.arange(4))
    put_slot, seen = Journal._put_slot, []

    def watched(self, slot, sync=False):
        copy = shutil.copy(path, path.with_name("copy"))
        seen.append(recovered(copy, tables)[0][1].any())
        put_slot(self, slot, sync)

    monkeypatch.setattr(Journal, "_put_slot", watched)
    journal.undone()
    assert seen == [False], "what was changed could not be told from what was not"
    journal.close(remove=True)


def test_either_slot_alone_knows_of_a_committed_entry(path):
    """Damage to the newer one undoes nothing; a death before the header is written undoes everything."""
    journal = Journal.create(path, IDENTITY, 1 << 12, False)
    tables = [np.zeros((ROWS, width), np.int32) for width in WIDTHS]
    for number in range(4):
        before = tables[1].copy()
        step(journal, tables[1], np.arange(number, number + 5), b"%d" % number)
        np.testing.assert_array_equal(recovered(path, tables)[0][1], before)
        journal.commit()
        for at in SLOTS_AT:
            data = bytearray(path.read_bytes())
            data[at + 8] ^= 0x10
            path.with_name("copy").write_bytes(data)
            found, note = recovered(path.with_name("copy"), tables)
            np.testing.assert_array_equal(found[1], tables[1])
            assert note == b"%d" % number
    journal.close(remove=True)
