"""The index of queued rows against a dict: growth, removed slots, rows that collide, rows of any size."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dsa.kernels.row_index import RowIndex

LARGEST = 2**63 - 1
_INVERSE = pow(0x9E3779B97F4A7C15, -1, 2**64)


def colliding(count, first=0):
    """Return rows that share a home slot in a table of any size: their products differ in 20 low bits."""
    rows = (product * _INVERSE % 2**64 for product in range(first, 1 << 20))
    return np.array(
        [row for row, _ in zip((row for row in rows if row <= LARGEST), range(count), strict=False)]
    )


COLLIDING = colliding(400)
POOLS = {
    "neighbours": np.arange(300),
    "one home": COLLIDING,
    "large": np.concatenate([2**62 + np.arange(-150, 150), LARGEST - np.arange(50)]),
    "powers of two": np.array(sorted({0, *(2**i for i in range(63)), *(2**i - 1 for i in range(63))})),
    "multiples of a table size": np.arange(300) << 24,
}


def test_the_colliding_rows_do_collide():
    """So that the tests below test what they say: all home slots are equal, up to tables of 2**24 slots."""
    products = COLLIDING.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert len(np.unique(COLLIDING)) == 400
    assert len(np.unique((products >> np.uint64(20)) & np.uint64(2**24 - 1))) == 1


class IndexMachine(RuleBasedStateMachine):
    """Puts, looks up and removes batches as the write queue does, and in orders that it does not."""

    def __init__(self):
        super().__init__()
        self.index = RowIndex()
        self.model = {}
        self.batches = []
        self.next_value = 0

    def batch(self, data):
        pool = POOLS[data.draw(st.sampled_from(list(POOLS)))]
        chosen = data.draw(st.sets(st.integers(0, len(pool) - 1), max_size=200))
        return np.sort(pool[sorted(chosen)])

    @rule(data=st.data(), gap=st.sampled_from([0, 1, 2**40]))
    def put(self, data, gap):
        rows = self.batch(data)
        first = self.next_value + gap
        self.next_value = first + len(rows)
        self.index.put(rows, first)
        self.model.update(zip(rows.tolist(), range(first, first + len(rows)), strict=True))
        self.batches.append((rows, first))

    @rule(data=st.data())
    def remove(self, data):
        if self.batches:
            rows, first = self.batches.pop(data.draw(st.integers(0, len(self.batches) - 1)))
            self.index.remove(rows, first)
            for value, row in enumerate(rows.tolist(), first):
                if self.model.get(row) == value:
                    del self.model[row]

    @rule()
    def remove_everything(self):
        while self.batches:
            self.index.remove(*self.batches.pop())
        self.model.clear()

    @rule(data=st.data())
    def remove_what_was_never_put(self, data):
        self.index.remove(self.batch(data), self.next_value + 1_000)

    @rule(data=st.data())
    def get(self, data):
        rows = np.random.default_rng(len(self.model)).permutation(self.batch(data))
        assert self.index.get(rows).tolist() == [self.model.get(row, -1) for row in rows.tolist()]

    @invariant()
    def same_as_model(self):
        assert len(self.index) == len(self.model)
        rows = np.concatenate(list(POOLS.values()))
        assert self.index.get(rows).tolist() == [self.model.get(row, -1) for row in rows.tolist()]


TestIndexMachine = IndexMachine.TestCase


@given(st.lists(st.sets(st.integers(0, LARGEST), max_size=60), max_size=12))
def test_any_rows(batches):
    index, model, first = RowIndex(), {}, 0
    for batch in batches:
        rows = np.array(sorted(batch), np.int64)
        index.put(rows, first)
        model.update(zip(rows.tolist(), range(first, first + len(rows)), strict=True))
        first += len(rows)
    asked = np.array([*model, *(row ^ 1 for row in model)], np.int64)
    assert len(index) == len(model)
    assert index.get(asked).tolist() == [model.get(row, -1) for row in asked.tolist()]


def test_an_empty_index():
    index = RowIndex()
    assert len(index) == 0
    assert index.get(np.array([0, 1, 2**62, LARGEST])).tolist() == [-1] * 4
    index.remove(np.array([0, 5]), 0)
    assert len(index) == 0


def test_empty_batches():
    index, nothing = RowIndex(), np.empty(0, np.int64)
    index.put(nothing, 7)
    index.remove(nothing, 7)
    assert index.get(nothing).shape == (0,)
    assert len(index) == 0


@pytest.mark.parametrize("count", [1, 511, 512, 513, 1_023, 1_024, 1_025, 200_000])
def test_one_batch_of_any_size(count):
    """Around the sizes where the table grows, and far beyond its first size at once."""
    index, rows = RowIndex(), np.arange(count) * 3
    index.put(rows, 10)
    assert len(index) == count
    assert np.array_equal(index.get(rows), np.arange(10, 10 + count))
    assert (index.get(rows + 1) == -1).all()
    index.remove(rows, 10)
    assert len(index) == 0
    assert (index.get(rows) == -1).all()


def test_growth_keeps_everything():
    index = RowIndex()
    rows = np.random.default_rng(0).permutation(60_000) * 1_000_003
    for start in range(0, len(rows), 700):
        index.put(rows[start : start + 700], start)
        assert np.array_equal(index.get(rows[: start + 700]), np.arange(min(start + 700, len(rows))))


def test_an_overwritten_row_stays_until_its_last_batch_goes():
    index = RowIndex()
    index.put(np.arange(0, 10), 0)
    index.put(np.arange(5, 15), 10)
    index.remove(np.arange(0, 10), 0)
    assert index.get(np.arange(0, 15)).tolist() == [-1] * 5 + list(range(10, 20))
    index.put(np.array([5]), 20)
    index.remove(np.arange(5, 15), 10)
    assert len(index) == 1
    assert index.get(np.array([5, 6])).tolist() == [20, -1]


def test_a_later_batch_may_go_first():
    index = RowIndex()
    index.put(np.array([1, 2]), 0)
    index.put(np.array([2, 3]), 2)
    index.remove(np.array([2, 3]), 2)
    assert index.get(np.array([1, 2, 3])).tolist() == [0, -1, -1]
    index.remove(np.array([1, 2]), 0)
    assert len(index) == 0


@pytest.mark.parametrize("stride", [1, 1 << 30])
def test_removed_slots_never_fill_the_table(stride):
    """Without a free slot an absent row is looked for for ever; one row stays, so that nothing is reset."""
    index, resident = RowIndex(), np.array([2**62])
    index.put(resident, 0)
    finished = threading.Event()

    def churn():
        for step in range(2_000):
            rows = (np.arange(400) + 400 * step) * stride
            index.put(rows, 1 + 400 * step)
            assert (index.get(rows) == np.arange(1 + 400 * step, 401 + 400 * step)).all()
            index.remove(rows, 1 + 400 * step)
            assert index.get(np.array([rows[0], 2**62, 2**62 + 1])).tolist() == [-1, 0, -1]
        finished.set()

    threading.Thread(target=churn, daemon=True).start()
    assert finished.wait(60)
    assert len(index) == 1


def test_colliding_rows_reuse_removed_slots():
    """Every probe passes the removed slots of the others: a row must not be put twice."""
    index, rows = RowIndex(), np.sort(COLLIDING)
    for step in range(50):
        first = step * len(rows)
        index.put(rows, first)
        assert len(index) == len(rows)
        index.remove(rows[::2], first)  # only the first of these still has the value that goes with it
        assert len(index) == len(rows) - 1
        index.put(rows[::2].copy(), 10**9)
        assert index.get(rows[::2]).tolist() == list(range(10**9, 10**9 + len(rows[::2])))
        index.remove(rows[::2], 10**9)
        assert index.get(rows[1::2]).tolist() == list(range(first + 1, first + len(rows), 2))
        assert (index.get(rows[::2]) == -1).all()
        index.remove(rows, first)
        assert len(index) == 0


@settings(max_examples=20)
@given(st.integers(0, 2**62))
def test_values_of_any_size(first):
    index, rows = RowIndex(), np.array([0, 2**62, LARGEST])
    index.put(rows, first)
    assert index.get(rows).tolist() == [first, first + 1, first + 2]


def test_views_and_read_only_rows():
    """Rows as callers have them: every second of an array, or not to be written to."""
    index, rows = RowIndex(), np.arange(100)
    index.put(rows[::2], 0)
    fixed = rows[50:].copy()
    fixed.flags.writeable = False
    index.put(fixed, 1_000)
    assert index.get(fixed).tolist() == list(range(1_000, 1_050))
    assert index.get(rows[48::-2]).tolist() == list(range(24, -1, -1))
    index.remove(fixed, 1_000)
    assert len(index) == 25
