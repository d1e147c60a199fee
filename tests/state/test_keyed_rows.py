"""Rows that belong to ids: given out, trained, taken back, found again after whatever ended the process."""

import os
import signal
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keyed_tables import DIM, content, opened, train, untrained

from dsa.backends import Zarr
from dsa.errors import StateWarning
from dsa.rules.init import FromArray, Uniform
from dsa.state.keyed_rows import delete_ids, find_rows, first_weights, insert_ids
from dsa.state.keys import index_files
from dsa.state.table_files import file_of

EXTREME = np.array([-(2**63), -1, 0, 1, 2**63 - 1])


def test_every_64_bit_integer_is_an_id(tmp_path):
    with closing(opened(tmp_path)) as state:
        table = state.tables["entity"]
        assert find_rows(table, EXTREME).tolist() == [-1] * 5
        rows = insert_ids(state, table, EXTREME[::-1])
        assert rows.tolist() == [0, 1, 2, 3, 4]
        assert insert_ids(state, table, EXTREME).tolist() == [4, 3, 2, 1, 0]
        assert content(state) == untrained(state, EXTREME.tolist())
    with closing(opened(tmp_path, resume=True)) as state:
        assert find_rows(state.tables["entity"], EXTREME).tolist() == [4, 3, 2, 1, 0]


def test_first_weights_depend_on_the_id_alone(tmp_path):
    ids = np.array([7, 3, 9, 3, 12])
    with closing(opened(tmp_path / "a")) as one, closing(opened(tmp_path / "b")) as other:
        insert_ids(one, one.tables["entity"], ids)
        for each in ids[::-1]:
            insert_ids(other, other.tables["entity"], np.array([each]))
        assert content(one) == content(other) == untrained(one, [3, 7, 9, 12])


def test_training_is_that_of_a_table_that_knew_the_ids(tmp_path):
    rng = np.random.default_rng(3)
    ids = rng.integers(-(2**62), 2**62, 50)
    with closing(opened(tmp_path / "keyed")) as state:
        weights = first_weights(state.tables["entity"], ids)
        with closing(opened(tmp_path / "dense", source=FromArray(weights))) as dense:
            for _ in range(12):
                chosen = rng.integers(0, 50, 20)
                grads = rng.normal(size=(20, DIM)).astype(np.float32)
                rows = insert_ids(state, state.tables["entity"], ids[chosen])
                train(state, rows, grads)
                train(dense, chosen, grads)
            known = find_rows(state.tables["entity"], ids)
            mine = state.tables["entity"].backend.read(np.sort(known[known >= 0]))
            order = np.argsort(known[known >= 0])
            theirs = dense.tables["entity"].backend.read(np.flatnonzero(known >= 0))[order]
            assert len(mine) > 40
            for name in ("w", "m", "v", "t"):
                assert mine[name].tobytes() == theirs[name].tobytes()


def test_a_freed_row_starts_anew(tmp_path):
    with closing(opened(tmp_path)) as state:
        table = state.tables["entity"]
        rows = insert_ids(state, table, np.arange(10))
        train(state, rows, np.ones((10, DIM), np.float32))
        assert delete_ids(state, table, np.array([3, 99, 5, 3])) == 2
        assert find_rows(table, np.array([2, 3, 5])).tolist() == [2, -1, -1]
        assert (len(table.keys), table.keys.freed, table.keys.used) == (8, 2, 10)
        assert not any(table.backend.read(np.array([3, 5]))[name].any() for name in ("live", "w", "m", "t"))
        again = insert_ids(state, table, np.array([77, 78, 79]))
        assert again.tolist() == [5, 3, 10]
        found = content(state)
        assert {id: found[id] for id in (77, 78, 79)} == untrained(state, [77, 78, 79])


def test_on_the_ball_first_weights_are_inside(tmp_path):
    rule = Uniform(None, DIM, -5.0, 5.0, seed=1)
    with closing(opened(tmp_path, source=rule, k=1.0)) as state:
        table = state.tables["entity"]
        insert_ids(state, table, np.arange(100))
        weights = table.backend.read(np.arange(100))["w"]
        assert np.linalg.norm(weights, axis=1).max() <= 0.5 + 1e-6
        assert weights.tobytes() == first_weights(table, np.arange(100)).tobytes()


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["insert", "train", "delete"]), st.lists(st.integers(-9, 9), max_size=12)),
        st.tuples(st.sampled_from(["close", "die", "lose"]), st.just([])),
    ),
    max_size=25,
)


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("backend", [None, Zarr()])
@settings(deadline=None, max_examples=25)
@given(operations=OPERATIONS)
def test_against_a_dictionary(tmp_path_factory, operations, durability, backend):
    path = tmp_path_factory.mktemp("keyed")
    state = opened(path, durability=durability, backend=backend)
    model = {}
    for kind, given_ids in operations:
        ids = np.array(given_ids, np.int64)
        table = state.tables["entity"]
        if kind == "insert":
            insert_ids(state, table, ids)
            model = {**untrained(state, list(dict.fromkeys(given_ids))), **model}
        elif kind == "delete":
            assert delete_ids(state, table, ids) == len(set(given_ids) & set(model))
            model = {id: value for id, value in model.items() if id not in given_ids}
        elif kind == "train":
            before = content(state)
            train(state, insert_ids(state, table, ids), np.ones((len(ids), DIM), np.float32))
            after = content(state)
            assert {id: before.get(id) for id in after if id not in given_ids} == {
                id: value for id, value in after.items() if id not in given_ids
            }
            model |= {id: after[id] for id in given_ids}
        else:
            files = index_files(file_of(path, table))
            state.close() if kind == "close" else state.abandon()
            if kind == "lose":
                for file in files:
                    file.unlink()
            state = opened(path, resume=True, durability=durability, backend=backend)
        assert content(state) == model
    state.close()


@pytest.mark.parametrize("durability", ["process", "power", "none"])
@pytest.mark.parametrize("seed", range(4))
def test_killed_anywhere_map_and_rows_agree(tmp_path, durability, seed):
    """A child inserts, trains and deletes until it is killed; what it has told is there, and whole."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            rng = np.random.default_rng(seed)
            state = opened(tmp_path, durability=durability)
            for step in range(10_000):
                ids = rng.integers(0, 400, 40)
                rows = insert_ids(state, state.tables["entity"], ids)
                train(state, rows, np.ones((40, DIM), np.float32))
                delete_ids(state, state.tables["entity"], rng.integers(0, 400, 30))
                os.write(writing, b"%d\n" % step)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as told:
        for line in told:
            if int(line) == 5 + 7 * seed:
                break
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if durability == "none":
        with pytest.warns(StateWarning, match="was not closed"):
            state = opened(tmp_path, resume=True)
    else:
        state = opened(tmp_path, resume=True)
    with closing(state):
        table = state.tables["entity"]
        content(state)
        assert table.keys.used == table.keys.freed + len(table.keys) <= 400
        free = table.keys.choose(table.keys.freed)
        assert len(np.unique(free)) == len(free)
        assert not (table.backend.read(np.sort(free))["live"] == 1).any()


def test_an_id_that_two_rows_claim_stays_with_the_later_one(tmp_path):
    state = opened(tmp_path)
    table = state.tables["entity"]
    insert_ids(state, table, np.arange(6))
    for row, stamp in ((1, 9), (4, 3), (5, 9)):
        record = table.backend.read(np.array([row]))
        record["id"], record["s"] = 2, stamp
        table.backend.write(np.array([row]), record)
    files = index_files(file_of(tmp_path, table))
    state.close()
    files[0].unlink()
    with closing(opened(tmp_path, resume=True)) as state:
        table = state.tables["entity"]
        assert sorted(content(state)) == [0, 2, 3]
        assert find_rows(table, np.array([2])).tolist() == [5]
        assert sorted(table.keys.choose(3).tolist()) == [1, 2, 4]


@pytest.mark.parametrize("backend", [None, Zarr()])
def test_the_table_grows_as_ids_come(tmp_path, backend):
    rng = np.random.default_rng(1)
    with closing(opened(tmp_path, backend=backend)) as state:
        table, known = state.tables["entity"], []
        for _ in range(6):
            ids = rng.integers(-(2**63), 2**63, 700, endpoint=False)
            rows = insert_ids(state, table, ids)
            assert rows.tolist() == list(range(len(known), len(known) + 700))
            known += ids.tolist()
        assert len(table) >= 4200
        train(state, find_rows(table, np.array(known[3000:3050])), np.ones((50, DIM), np.float32))
        found = content(state)
        state.abandon()
    with closing(opened(tmp_path, resume=True)) as state:
        assert content(state) == found
        assert sorted(found) == sorted(known)
