"""Indexes of ids that belong to another table or another moment, or were tampered with."""

import itertools
import shutil
from dataclasses import replace

import numpy as np
import pytest
from keyed_tables import DIM, content, opened, train

import dsa
from dsa import init
from dsa.errors import StateCorruptError
from dsa.state.id_policy import IdPolicy, make_room
from dsa.state.keyed_rows import delete_ids, find_rows, insert_ids
from dsa.state.keys import KeyChange

IDS = np.arange(100, 400)


def trained(path, ids=IDS):
    state = opened(path)
    insert(state, ids)
    return state


def insert(state, ids):
    with state.use():
        state.settle()
        insert_ids(state, state.tables["entity"], ids)
    train(state, find_rows(state.tables["entity"], ids), np.ones((len(ids), DIM), np.float32))


def delete(state, ids):
    with state.use():
        state.settle()
        delete_ids(state, state.tables["entity"], ids)


def index_in(path):
    return sorted([*path.glob("*.ids"), *path.glob("*.freed")])


def tables_of(path, resume=None):
    sources = {name: init.Normal(None, DIM, seed=1) for name in ("one", "other")}
    return dsa.DiskSparseRiemannianAdam(sources, k=0.0, lr=0.1, disk_dir=path, resume=resume)


def test_an_index_of_another_table_of_the_state_is_made_anew(tmp_path):
    with tables_of(tmp_path) as optimizer:
        optimizer.step({"one": (IDS, np.ones((300, DIM), np.float32))})
        optimizer.step({"other": (IDS[::-1].copy(), np.ones((300, DIM), np.float32))})
        before = [optimizer.read_rows(IDS, name) for name in ("one", "other")]
    (first, second) = sorted(tmp_path.glob("*.ids"))
    shutil.move(first, tmp_path / "kept")
    shutil.move(second, first)
    shutil.move(tmp_path / "kept", second)
    with tables_of(tmp_path, resume=True) as optimizer:
        for name, weights in zip(("one", "other"), before, strict=True):
            assert (optimizer.read_rows(IDS, name) == weights).all()
            optimizer.step({name: ([77], np.ones((1, DIM), np.float32))})
            assert (optimizer.read_rows(IDS, name) == weights).all()


@pytest.mark.parametrize("closed", [True, False])
def test_an_index_of_an_older_backup_is_made_anew(tmp_path, closed):
    path, backup = tmp_path / "state", tmp_path / "backup"
    trained(path).close()
    shutil.copytree(path, backup)
    state = opened(path, resume=True)
    delete(state, IDS[:200])
    insert(state, np.arange(-200, 0))
    found = content(state)
    state.close() if closed else state.abandon()
    for each in index_in(backup):
        shutil.copy(each, path)
    state = opened(path, resume=True)
    assert content(state) == found
    insert(state, np.arange(-300, -200))
    assert content(state).items() > {key: found[key] for key in found}.items()
    state.close()


def test_records_of_an_older_backup_beside_a_newer_index(tmp_path):
    path, backup = tmp_path / "state", tmp_path / "backup"
    state = trained(path)
    found = content(state)
    state.close()
    shutil.copytree(path, backup)
    state = opened(path, resume=True)
    delete(state, IDS[:250])
    insert(state, np.arange(-400, 0))
    state.close()
    for each in index_in(path):
        shutil.copy(each, backup)
    state = opened(backup, resume=True)
    assert content(state) == found
    state.close()


def tampered(path, change):
    """Return a state whose index was changed beneath its records, and what the records say."""
    state = trained(path)
    delete(state, IDS[:50])
    table = state.tables["entity"]
    records = table.backend.read(np.arange(len(table))).tobytes()
    change(table.keys)
    return state, table, records


def test_a_row_that_is_not_free_is_not_given_out(tmp_path):
    freed = np.arange(50)
    for number, rows in enumerate([freed + 60, freed + 10**12, freed * 0 + 3]):
        state, table, records = tampered(
            tmp_path / str(number), lambda keys, rows=rows: keys._freed.put(freed, rows)
        )
        if number == 1:
            table.keys._freed.remove(freed)  # rows that nobody knows
        with pytest.raises(StateCorruptError, match=r"index of the ids .* does not fit its records"):
            insert(state, np.arange(-20, 0))
        assert table.backend.read(np.arange(len(table))).tobytes() == records
        state.abandon()


def test_a_row_of_another_id_is_not_taken_away(tmp_path):
    state, table, records = tampered(
        tmp_path, lambda keys: keys._ids.put(np.array([300]), keys.find(np.array([301])))
    )
    with pytest.raises(StateCorruptError, match="does not fit its records"):
        delete(state, np.array([300]))
    assert table.backend.read(np.arange(len(table))).tobytes() == records
    state.abandon()


def test_a_row_that_the_table_does_not_have_is_not_handed_out(tmp_path):
    state, table, _ = tampered(tmp_path, lambda keys: keys._ids.put(np.array([300]), np.array([10**9])))
    with pytest.raises(StateCorruptError, match="does not fit its records"):
        find_rows(table, np.array([301, 300]))
    state.abandon()


def test_looking_for_ids_that_can_go_ends(tmp_path):
    ghosts = np.arange(10_000, 10_400)
    state, table, _ = tampered(tmp_path, lambda keys: keys._ids.put(ghosts, ghosts * 0 + 60))
    with state.use():
        state.settle()
        with pytest.raises(StateCorruptError, match="does not fit its records"):
            make_room(state, table, IdPolicy(max_rows=10), 5, np.array([1]))
    state.abandon()


@pytest.mark.parametrize("kind", ["insert", "delete"])
def test_a_journal_whose_note_names_rows_outside_of_the_table(tmp_path, kind):
    state = trained(tmp_path)
    table = state.tables["entity"]
    change = KeyChange(kind, np.array([7]), np.array([10**9]), 0)
    (records,) = state._transactions.prepare(
        replace(state.progress(), keys={0: change}), [(table, np.array([2]))]
    )
    records[:] = table.backend.read(np.array([2]))
    state._transactions.seal()
    state.abandon()
    with pytest.raises(StateCorruptError, match=r"gives ids rows outside table 0: restore"):
        opened(tmp_path, resume=True)


def test_damage_of_any_part_of_an_index_changes_no_content(tmp_path):
    state = trained(tmp_path / "whole")
    delete(state, IDS[:50])
    found = content(state)
    state.close()
    rng = np.random.default_rng(2)
    names = [each.name for each in index_in(tmp_path / "whole")]
    damages = [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: data + bytes(4096)]
    damages += [lambda data: bytes(len(data)), lambda data: rng.bytes(len(data)), None]
    for number, (name, damage) in enumerate(itertools.product(names, damages)):
        path = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", path)
        file = path / name
        data = file.read_bytes()
        file.unlink()
        if damage is not None:
            file.write_bytes(damage(data))
        state = opened(path, resume=True)
        assert content(state) == found
        state.close()
