"""Tables that grow: as if the rows had been there from the start, whole at every instant, or not at all."""

import errno
import json
import os
import shutil
import threading

import numpy as np
import pytest
from deaths import deaths, die, in_child

import dsa
from dsa import DiskSparseRiemannianAdam, init
from dsa.backends import MemmapBackend, Zarr, system
from dsa.errors import DiskSpaceError, StateMismatchError
from dsa.state.growth import Growth, grow_tables

DIM = 5
BEFORE = {"left": 40, "right": 9}
AFTER = {"left": 130, "right": 30}
KINDS = {
    "memmap": {},
    "sparse": {"allocate": "sparse"},
    "power": {"durability": "power"},
    "no journal": {"durability": "none"},
    "queued": {"async_writes": True},
    "zarr": {"backend": Zarr(shard_bytes=1000)},
    "zarr, power": {"backend": "zarr", "durability": "power"},
    "compressed": {"backend": Zarr(compression="zstd", shard_bytes=4000, overlay_bytes=1 << 16)},
    "compressed, power": {"backend": Zarr(compression="zstd"), "durability": "power"},
}
by_kind = pytest.mark.parametrize("kind", KINDS)
on_posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")


def build(path, rows, resume=None, **options):
    tables = {name: init.Normal(count, DIM, 0.05, seed=7) for name, count in rows.items()}
    return DiskSparseRiemannianAdam(tables, lr=0.1, k=1.0, disk_dir=path, resume=resume, **options)


def train(optimizer, rows, steps):
    for step in steps:
        rng = np.random.default_rng(step)
        updates = {}
        for name, count in rows.items():
            ids = rng.integers(0, count, 20)
            updates[name] = ids, rng.standard_normal((20, DIM)).astype(np.float32)
        optimizer.step(updates)


def grow(optimizer, rows=AFTER, names=("left", "right")):
    state = optimizer._state
    with state.use():
        grow_tables(state, [Growth(state.tables[name], rows[name]) for name in names])


def stored_rows(path):
    content = json.loads((path / "dsa.json").read_text())["content"]
    return {table["name"]: table["backend"]["rows"] for table in content["tables"]}


def content(optimizer):
    state = optimizer._state
    return state.global_step, {
        name: (table.steps, table.backend.read(np.arange(len(table))).tobytes())
        for name, table in state.tables.items()
    }


@by_kind
def test_grown_tables_are_as_if_they_had_had_the_rows_from_the_start(tmp_path, kind):
    """Grown, trained, closed, opened, grown by one row at a time, killed, opened and trained on."""
    options = KINDS[kind]
    middle, last = {"left": 41, "right": 10}, {"left": 132, "right": 31}
    with build(tmp_path / "whole", last, **options) as whole:
        train(whole, BEFORE, range(3))
        train(whole, middle, range(3, 5))
        train(whole, last, range(5, 12))
    with build(tmp_path / "grown", BEFORE, **options) as optimizer:
        train(optimizer, BEFORE, range(3))
        grow(optimizer, middle)
        train(optimizer, middle, range(3, 5))
        assert optimizer.read_rows([40], "left").shape == (1, DIM)

    def life():
        optimizer = build(tmp_path / "grown", middle, True, **options)
        for rows in ({"left": 42, "right": 11}, {"left": 131, "right": 30}, last):
            grow(optimizer, rows)
        train(optimizer, last, range(5, 8))
        if options.get("durability") == "none":
            optimizer.close()
        die()

    if hasattr(os, "fork"):
        assert in_child(life) < 0
        assert dsa.open_state(tmp_path / "grown")["left"].shape == (132, DIM)
        with build(tmp_path / "grown", last, True, **options) as optimizer:
            assert optimizer.global_step == 8
            train(optimizer, last, range(8, 12))
        assert dsa.diff(tmp_path / "whole", tmp_path / "grown").same
        assert dsa.verify(tmp_path / "grown").ok


@on_posix
@pytest.mark.filterwarnings("ignore::dsa.errors.StateWarning")
@pytest.mark.parametrize("kind", ["memmap", "sparse", "power", "no journal", "queued", "zarr", "compressed"])
def test_killed_anywhere_in_a_growth(tmp_path, kind):
    """Both tables have the rows of before or both those of after, and every step that was taken is there."""
    options, start, path = KINDS[kind], tmp_path / "start", tmp_path / "state"
    with build(start, BEFORE, **options) as optimizer:
        train(optimizer, BEFORE, range(2))

    def begun():
        optimizer = build(path, BEFORE, True, **options)
        train(optimizer, BEFORE, range(2, 4))
        if options.get("durability") == "none":
            optimizer.flush()
        return optimizer

    def restore():
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(start, path)

    ends = {}
    for rows, grown in ((BEFORE, False), (AFTER, True)):
        restore()
        with begun() as optimizer:
            if grown:
                grow(optimizer)
            train(optimizer, BEFORE, range(4, 6))
            ends[rows["left"]] = content(optimizer)
    seen = []
    for number in deaths(begun, grow, restore, 0 if kind in ("memmap", "power") else 9):
        rows = stored_rows(path)
        assert rows in (BEFORE, AFTER), f"killed before call {number}"
        assert dsa.open_state(path)["left"].shape[0] == rows["left"]
        with build(path, rows, True, **options) as optimizer:
            assert optimizer.global_step == 4, f"killed before call {number}"
            train(optimizer, BEFORE, range(4, 6))
            assert content(optimizer) == ends[rows["left"]], f"killed before call {number}"
            if rows == BEFORE:  # what has been left is nobody's
                grow(optimizer)
                fresh = optimizer._state.tables["left"].backend.read(np.arange(40, 130))
                assert not fresh.view(np.uint8).any()
        assert dsa.verify(path).ok
        seen.append(rows == AFTER)
    assert seen == sorted(seen), "a growth that has happened stays"
    assert set(seen) == {False, True}


@by_kind
@pytest.mark.parametrize("durability", ["process", "power"])
def test_a_table_of_an_array_grows_by_weights_that_are_given(tmp_path, kind, durability):
    options = {**KINDS[kind], "durability": durability}
    rng = np.random.default_rng(1)
    weights = rng.uniform(-0.01, 0.01, (50, DIM)).astype(np.float32)
    with DiskSparseRiemannianAdam({"a": weights[:20]}, lr=0.1, disk_dir=tmp_path, **options) as optimizer:
        optimizer.step({"a": ([3], np.ones((1, DIM), np.float32))})
        before = optimizer.read_rows(np.arange(20))
        with pytest.raises(ValueError, match=r"made of an array.*30 new rows: pass init="):
            optimizer.grow("a", 50)
        with pytest.raises(ValueError, match="finite"):
            optimizer.grow("a", 50, np.full((30, DIM), np.nan, np.float32))
        with pytest.raises(ValueError, match=r"init gives 29 x 5 where table 'a' grows from 20 to 50"):
            optimizer.grow("a", 50, weights[21:])
        assert len(optimizer._state.tables["a"]) == stored_rows(tmp_path)["a"] == 20
        optimizer.grow("a", 50, weights[20:])
        assert np.array_equal(optimizer.read_rows(np.arange(20)), before)
        assert np.array_equal(optimizer.read_rows(np.arange(20, 50)), weights[20:])
        optimizer.grow("a", 60, init.Uniform(60, DIM, -0.01, 0.01, seed=3))
        expected = np.empty((10, DIM), np.float32)
        init.Uniform(60, DIM, -0.01, 0.01, seed=3).fill(np.arange(50, 60), expected)
        assert np.array_equal(optimizer.read_rows(np.arange(50, 60)), expected)
    assert dsa.verify(tmp_path).ok


def test_tables_never_shrink_and_growing_again_changes_nothing(tmp_path):
    with build(tmp_path, BEFORE) as optimizer:
        train(optimizer, BEFORE, range(2))
        optimizer.grow("left", 130)
        description = (tmp_path / "dsa.json").read_bytes()
        optimizer.grow("left", 130)
        assert (tmp_path / "dsa.json").read_bytes() == description
        with pytest.raises(ValueError, match=r"rows=129 is less than the 130 rows of table 'left'"):
            optimizer.grow("left", 129)
        for wrong in (130.5, "many", True):
            with pytest.raises((TypeError, ValueError)):
                optimizer.grow("left", wrong)
    with pytest.raises(StateMismatchError, match=r"stored as 130 x 5 but 40 x 5 is asked for"):
        build(tmp_path, BEFORE, True)


def test_a_backend_that_can_not_grow_is_made_anew(tmp_path, monkeypatch):
    """So is a Zarr table that was made with so few rows that it would come to have far too many files."""
    few, many = {"left": 2, "right": 2}, {"left": 3000, "right": 2}
    with build(tmp_path / "zarr", few, backend="zarr") as optimizer:
        train(optimizer, few, range(2))
        optimizer.grow("left", 3000)
        train(optimizer, many, range(2, 4))
        files = [file for file in tmp_path.rglob("*") if file.is_file()]
        assert len(files) < 50
    with monkeypatch.context() as patched:
        patched.setattr(MemmapBackend, "make_room", lambda self, rows: rows == len(self))
        with build(tmp_path / "memmap", few) as optimizer:
            train(optimizer, few, range(2))
            optimizer.grow("left", 3000)
            train(optimizer, many, range(2, 4))
    with build(tmp_path / "whole", many) as optimizer:
        train(optimizer, few, range(2))
        train(optimizer, many, range(2, 4))
    for other in ("zarr", "memmap"):
        weights = [
            dsa.open_state(tmp_path / name)["left"].weights(np.arange(3000)) for name in ("whole", other)
        ]
        assert np.array_equal(*weights)


@pytest.mark.parametrize("kind", ["memmap", "zarr", "compressed", "queued"])
@pytest.mark.parametrize("second", [False, True])
def test_a_full_disk_changes_nothing(tmp_path, monkeypatch, kind, second):
    """Whichever of the tables there is no room for."""
    with build(tmp_path, BEFORE, **KINDS[kind]) as optimizer:
        train(optimizer, BEFORE, range(2))
        optimizer.flush()
        before = content(optimizer)
        backend = optimizer._state.tables["right" if second else "left"].backend
        kind_of = type(getattr(backend, "_backend", backend))
        real, calls = kind_of.make_room, []

        def refusing(self, rows):
            calls.append(rows)
            if len(calls) == 1 + second:
                raise DiskSpaceError(10, 1, str(tmp_path))
            return real(self, rows)

        with monkeypatch.context() as patched:
            patched.setattr(kind_of, "make_room", refusing)
            with pytest.raises(DiskSpaceError):
                grow(optimizer)
        assert content(optimizer) == before
        assert stored_rows(tmp_path) == BEFORE
        grow(optimizer)
        train(optimizer, AFTER, range(2, 4))
    with build(tmp_path, AFTER, True, **KINDS[kind]) as optimizer:
        assert optimizer.global_step == 4


@pytest.mark.parametrize("kind", ["memmap", "zarr", "queued"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
@pytest.mark.parametrize("after", [False, True])
def test_a_description_that_can_not_be_written(tmp_path, monkeypatch, kind, error, after):
    """Before it is in its place nothing has changed; afterwards the tables have grown, in memory, too."""
    with build(tmp_path, BEFORE, **KINDS[kind]) as optimizer:
        train(optimizer, BEFORE, range(2))
        real = system.write_atomically

        def refusing(path, data, held=None):
            if path.name == "dsa.json":
                if after:
                    real(path, data, held)
                raise error
            real(path, data, held)

        with monkeypatch.context() as patched:
            patched.setattr("dsa.state.metadata.write_atomically", refusing)
            with pytest.raises(type(error)):
                grow(optimizer)
        rows = AFTER if after else BEFORE
        assert stored_rows(tmp_path) == rows
        assert {name: len(table) for name, table in optimizer._state.tables.items()} == rows
        assert {name: len(table.backend) for name, table in optimizer._state.tables.items()} == rows
        train(optimizer, rows, range(2, 3))
        grow(optimizer)
        train(optimizer, AFTER, range(3, 4))
    assert dsa.verify(tmp_path).ok


@by_kind
def test_an_export_that_began_before_shows_the_rows_of_then(tmp_path, kind):
    with build(tmp_path / "state", BEFORE, **KINDS[kind]) as optimizer:
        train(optimizer, BEFORE, range(2))
        optimizer.export_checkpoint(tmp_path / "expected")
        gate, done = threading.Event(), threading.Event()

        def progress(read, total):
            gate.set()
            assert done.wait(60)

        exporting = threading.Thread(
            target=optimizer.export_checkpoint, args=(tmp_path / "beside",), kwargs={"progress": progress}
        )
        exporting.start()
        assert gate.wait(60)
        grow(optimizer)
        train(optimizer, AFTER, range(2, 6))
        done.set()
        exporting.join()
    assert dsa.diff(tmp_path / "expected", tmp_path / "beside").same


@by_kind
def test_views_of_before_stay_and_new_ones_show_the_rows_of_now(tmp_path, kind):
    with build(tmp_path, BEFORE, **KINDS[kind]) as optimizer:
        train(optimizer, BEFORE, range(2))
        optimizer.flush()
        view, held = dsa.open_state(tmp_path), dsa.open_state(tmp_path)["left"]["w"]
        before = np.array(held[:])
        grow(optimizer)
        train(optimizer, AFTER, range(2, 5))
        assert view["left"].shape == (40, DIM)
        assert view["left"].weights(np.arange(40)).shape == (40, DIM)
        assert before.shape == (40, DIM)
        now = dsa.open_state(tmp_path)["left"]
        assert now.shape == (130, DIM)
        assert np.array_equal(now.weights(np.arange(130)), optimizer.read_rows(np.arange(130), "left"))
        view.close()


def test_growth_by_blocks_maps_nothing_anew(tmp_path):
    """Arrays over the mapping of before stay valid, and a mapping is made once in a life."""
    with build(tmp_path, BEFORE) as optimizer:
        backend = optimizer._state.tables["left"].backend
        mapping, records = backend._mapping, backend.records
        train(optimizer, BEFORE, range(2))
        for rows in range(1_000, 20_000, 1_000):
            optimizer.grow("left", rows)
        if os.uname().sysname == "Linux":
            assert backend._mapping is mapping
        train(optimizer, {"left": 19_000, "right": 9}, range(2, 4))
        assert np.array_equal(records["w"], backend.records["w"][:40])
    with pytest.raises(StateMismatchError):
        build(tmp_path, BEFORE, True)
