"""The passes over a map of ids, in plain memory, against a dict and against hostile bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from id_hashes import hash_of, id_of

from dsa.kernels.id_map import (
    COUNT,
    DIRECTORY,
    NOTED,
    SEQUENCE,
    SPARE,
    USED,
    IdTable,
    check_directory,
    find_rows,
    most_ids,
    put_rows,
    remove_ids,
    renew_segment,
    restore_rows,
    split_segment,
)

WIDTH, SEED = 16, 0x1234_5678_9ABC_DEF0
EXTREMES = [-(2**63), -1, 0, 1, 2**63 - 1]


def make(depth=0, segments=64, width=WIDTH):
    """A map of 2**depth empty segments, and memory for more."""
    header = np.zeros(512, np.int64)
    header[[USED, DIRECTORY]] = 1 << depth, depth
    directory = np.arange(1 << depth, dtype=np.uint32)
    slots = np.zeros((segments * width, 2), np.int64)
    return IdTable(header, directory, slots, width, np.uint64(SEED), depth)


def put(table, ids, rows):
    before, done = np.full(len(ids), -7), np.zeros(1, np.int64)
    put_rows(table, np.array(ids, np.int64), np.array(rows, np.int64), before, done)
    return before[: done[0]].tolist()


def find(table, ids):
    rows = np.full(len(ids), -7)
    assert find_rows(table, np.array(ids, np.int64), rows, 0) == len(ids)
    return rows.tolist()


def remove(table, ids):
    before = np.full(len(ids), -7)
    remove_ids(table, np.array(ids, np.int64), before)
    return before.tolist()


def at_home(count, home, width=WIDTH, top=0):
    """Ids with the same top bits whose home in a segment is the same."""
    low = -(-(home << 32) // (width - 1))
    assert low * (width - 1) >> 32 == home
    return [id_of((top + each) << 32 | low, SEED) for each in range(count)]


def test_the_hash_is_splitmix64():
    """Published numbers of the generator: the n-th is the hash of n times its increment."""
    increment = 0x9E3779B97F4A7C15
    assert [hash_of(n * increment, 0) for n in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    for key in EXTREMES:
        assert id_of(hash_of(key, SEED), SEED) == key


@pytest.mark.parametrize("key", EXTREMES)
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_an_id_lies_where_the_format_says(key, depth):
    table = make(depth)
    put(table, [key], [5])
    hashed = hash_of(key, SEED)
    slot = (hashed >> 64 - depth) * WIDTH + ((hashed & 0xFFFFFFFF) * (WIDTH - 1) >> 32)
    assert table.slots[slot].tolist() == [key, 6]
    assert np.count_nonzero(table.slots[:, 1]) == 1
    assert table.slots[(hashed >> 64 - depth) * WIDTH + WIDTH - 1].tolist() == [1, 0]


@settings(max_examples=100)
@given(st.data())
def test_probing_and_removing_in_one_segment(data):
    """Chains that wrap round, removed from everywhere."""
    table, model = make(), {}
    pool = sorted({key for home in (0, 1, 7, WIDTH - 3, WIDTH - 2) for key in at_home(6, home)})
    for row in range(data.draw(st.integers(1, 30))):
        some = data.draw(st.lists(st.sampled_from(pool), max_size=5))
        if data.draw(st.booleans()):
            expected = [model.pop(key, -1) for key in some]
            assert remove(table, some) == expected
        else:
            done = put(table, some, [row] * len(some))
            model.update(dict.fromkeys(some[: len(done)], row))
            if len(done) < len(some):
                assert len(model) == most_ids(WIDTH)
                assert some[len(done)] not in model
        assert find(table, pool) == [model.get(key, -1) for key in pool]
        assert table.header[COUNT] == table.slots[WIDTH - 1, 0] == len(model)
        assert table.header[SEQUENCE] % 2 == 0


def test_a_batch_is_undone_in_reverse():
    table = make()
    put(table, [1, 2], [10, 20])
    before = table.slots.copy()
    ids, rows = np.array([3, 1, 3, 1, 4]), np.array([30, 11, 31, 12, 40])
    previous, done = np.empty(5, np.int64), np.zeros(1, np.int64)
    put_rows(table, ids, rows, previous, done)
    assert previous.tolist() == [-1, 10, 30, 11, -1]
    restore_rows(table, ids, previous, done)
    assert find(table, [1, 2, 3, 4]) == [10, 20, -1, -1]
    assert table.header[COUNT] == 2
    assert np.array_equal(table.slots[:, 1], before[:, 1])


def test_a_split_keeps_everything_and_gives_the_old_segment_back():
    table = make(depth=1)
    table = table._replace(directory=np.array([0, 0, 1, 1], np.uint32))
    ids = [id_of(each << 60 | each * 0x11111111, SEED) for each in range(8)]  # all in segment 0
    put(table, ids, range(8))
    assert split_segment(table, ids[0])
    assert table.directory.tolist() == [2, 3, 1, 1]
    assert find(table, ids) == list(range(8))
    assert table.slots[[3 * WIDTH - 1, 4 * WIDTH - 1], 0].tolist() == [4, 4]
    assert (table.header[USED], table.header[SPARE]) == (4, 1)
    assert not split_segment(table, ids[0])  # one entry is left to it
    assert split_segment(table, id_of(2**63, SEED))
    assert table.directory.tolist() == [2, 3, 0, 4]
    assert (table.header[USED], table.header[SPARE]) == (5, 2)
    assert find(table, ids) == list(range(8))


def test_a_segment_with_copies_and_broken_chains_is_renewed():
    """What a removal leaves that was killed: an empty slot in a chain, an id twice, a wrong count."""
    table = make()
    ids = at_home(5, 3)
    put(table, ids, range(5))
    table.slots[4] = 0, 0
    table.slots[9] = ids[4], 5
    table.slots[WIDTH - 1, 0] = 11
    table.header[NOTED] = 1
    renew_segment(table, 0)
    assert find(table, ids) == [0, -1, 2, 3, 4]
    assert table.directory.tolist() == [1]
    assert table.slots[2 * WIDTH - 1, 0] == 4
    assert (table.header[NOTED], table.header[SPARE]) == (0, 1)


def test_an_id_that_is_being_moved_is_not_answered():
    table = make()
    put(table, [7], [1])
    table.header[SEQUENCE] += 1
    rows = np.full(1, -7)
    assert find_rows(table, np.array([7]), rows, 0) == 0
    assert rows.tolist() == [-7]
    table.header[SEQUENCE] += 1
    assert find(table, [7]) == [1]
    assert find_rows(table._replace(placed=1), np.array([7]), rows, 0) == 0  # another directory is valid
    assert find_rows(table._replace(slots=table.slots[: WIDTH - 1]), np.array([7]), rows, 0) == 0


@given(
    arrays(np.int64, (4 * WIDTH, 2), elements=st.sampled_from([-(2**63), -1, 0, 1, 5, 2**63 - 1])),
    arrays(np.uint32, 4, elements=st.sampled_from([0, 1, 2, 3, 4, 2**32 - 1])),
    st.lists(st.sampled_from([*EXTREMES, 5]), max_size=20),
)
def test_no_bytes_make_a_pass_crash_or_loop(slots, directory, ids):
    full = np.vstack([slots, np.zeros((4 * WIDTH, 2), np.int64)])
    header = np.zeros(512, np.int64)
    header[[USED, DIRECTORY]] = 4, 2
    table = IdTable(header, directory, full, WIDTH, np.uint64(SEED), 2)
    keys, rows = np.array(ids, np.int64), np.full(len(ids), -7)
    assert 0 <= find_rows(table, keys, rows, 0) <= len(ids)
    assert (rows >= -7).all()
    put(table, ids, range(len(ids)))
    remove(table, ids)
    if check_directory(directory, 4):
        split_segment(table, 5)
        renew_segment(table, int(directory[0]))


def split_runs(data, low, high, numbers):
    """A directory that splits can have made."""
    if high - low == 1 or data.draw(st.booleans()):
        return [next(numbers)] * (high - low)
    middle = (low + high) // 2
    return split_runs(data, low, middle, numbers) + split_runs(data, middle, high, numbers)


@given(st.data(), st.integers(0, 6))
def test_directories_are_told_from_other_numbers(data, depth):
    numbers = iter(data.draw(st.permutations(range(64))))
    directory = np.array(split_runs(data, 0, 1 << depth, numbers), np.uint32)
    assert check_directory(directory, 64)
    assert not check_directory(directory, int(directory.max()))


@pytest.mark.parametrize("wrong", [[0, 1, 1, 2], [0, 0, 0, 1], [5], [0, 0, 0, 0, 1, 2, 2, 2]])
def test_what_no_split_can_have_made(wrong):
    assert not check_directory(np.array(wrong, np.uint32), 5)
