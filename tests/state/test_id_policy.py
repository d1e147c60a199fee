"""Ids that lose their rows: by age, under a cap, above a floor; the same ones after a kill."""

from contextlib import closing

import numpy as np
import pytest
from keyed_tables import DIM, content, opened, train, untrained

from dsa.state.id_policy import IdPolicy, admit, evict_aged, make_room
from dsa.state.keyed_rows import insert_ids


def take_step(state, policy, ids):
    """What a layer and its optimizer do with a batch of ids."""
    rows = admit(state, state.tables["entity"], policy, ids)
    train(state, rows, np.ones((len(ids), DIM), np.float32))


def stream(steps):
    """Ids of which new ones come all the time and old ones cease to."""
    rng = np.random.default_rng(11)
    for step in range(steps):
        yield rng.integers(3 * step, 3 * step + 150, 40)


@pytest.mark.parametrize(
    "policy",
    [
        IdPolicy(evict_after=15),
        IdPolicy(max_rows=220),
        IdPolicy(evict_after=15, max_rows=220, min_rows=180),
        IdPolicy(evict_after=4, min_rows=90),
    ],
)
def test_a_stream_of_ids_against_a_dictionary(tmp_path, policy):
    last, model = {}, {}
    with closing(opened(tmp_path)) as state:
        for step, ids in enumerate(stream(120)):
            take_step(state, policy, ids)
            found = content(state)
            gone = set(model) - set(found)
            assert not gone & set(ids.tolist())
            for id in gone:
                aged = policy.evict_after is not None and step - last[id] >= policy.evict_after
                assert aged or (policy.max_rows is not None and len(found) + len(gone) > policy.max_rows)
            assert {id: model[id] for id in model if id not in gone and id not in ids} == {
                id: found[id] for id in found if id not in ids
            }
            fresh = [id for id in dict.fromkeys(ids.tolist()) if id not in model or id in gone]
            assert all(found[id][3] == b"\1\0\0\0" for id in fresh), "a row that is given out starts anew"
            model, last = found, {**last, **dict.fromkeys(ids.tolist(), step)}
            assert policy.max_rows is None or len(found) <= policy.max_rows
            assert len(found) >= min(policy.min_rows, len(last))
            if policy.evict_after is not None and not policy.min_rows:
                assert all(step - last[id] <= 2 * policy.evict_after for id in found)
        keys = state.tables["entity"].keys
        assert keys.used <= (policy.max_rows or 600)


@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_dies_forgets_the_same_ids(tmp_path, seed):
    policy, rng = IdPolicy(evict_after=6, max_rows=200, min_rows=20), np.random.default_rng(seed)
    with closing(opened(tmp_path / "whole")) as state:
        for ids in stream(60):
            take_step(state, policy, ids)
        whole = content(state)
    state = opened(tmp_path / "killed")
    for ids in stream(60):
        if rng.random() < 0.3:
            evict_aged(state, state.tables["entity"], policy)  # and dies before the batch
        if rng.random() < 0.3:
            state.abandon()
            state = opened(tmp_path / "killed", resume=True)
        take_step(state, policy, ids)
    assert content(state) == whole
    state.close()


def test_a_batch_larger_than_the_cap_is_refused_before_anything_changes(tmp_path):
    with closing(opened(tmp_path)) as state:
        table = state.tables["entity"]
        insert_ids(state, table, np.arange(10))
        before = content(state)
        with pytest.raises(ValueError, match=r"a batch of 13 distinct ids has no room .* cap is 12"):
            make_room(state, table, IdPolicy(max_rows=12), 9, np.arange(6, 19))
        assert content(state) == before == untrained(state, list(range(10)))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"evict_after": 0}, "evict_after=0 is out of range"),
        ({"max_rows": -1}, "max_rows=-1 is out of range"),
        ({"min_rows": -1}, "min_rows=-1 is out of range"),
        ({"max_rows": 4, "min_rows": 5}, "min_rows=5 is above max_rows=4"),
    ],
)
def test_numbers_out_of_range(options, match):
    with pytest.raises(ValueError, match=match):
        IdPolicy(**options)
