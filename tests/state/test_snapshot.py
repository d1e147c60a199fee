"""A snapshot is the state after one whole step, whatever is trained while it is read."""

import threading
from unittest import mock

import numpy as np
import pytest
import torch

import dsa
from dsa import DiskSparseAdam, DiskSparseRiemannianAdam, init
from dsa.backends import memmap
from dsa.errors import StateClosedError
from dsa.state.snapshot import Snapshot

ROWS = {"entity": 2_000, "relation": 300}
DIM = 6


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a few rows, so that training gets between them."""
    monkeypatch.setattr(memmap, "_BLOCK_BYTES", 4_096)


def make(path, **options):
    tables = {
        "entity": init.Normal(ROWS["entity"], DIM, 0.1, seed=3),
        "relation": np.random.default_rng(0).standard_normal((ROWS["relation"], DIM)).astype(np.float32),
    }
    chosen = {"k": {"entity": 1.0, "relation": 0.0}, "lr": 0.05, "allocate": "sparse", **options}
    return DiskSparseRiemannianAdam(tables, disk_dir=path, **chosen)


def batch(generator):
    updates = {}
    for name, rows in ROWS.items():
        chosen = generator.integers(0, rows, 40)
        updates[name] = (chosen, generator.standard_normal((40, DIM)).astype(np.float32))
    return updates


def whole(snapshot):
    """Read a snapshot to its end."""
    return {
        table.name: np.concatenate([records for _, records in table.blocks()])
        for table in snapshot.content.tables
    }


def same(one, other):
    return all(one[name].tobytes() == other[name].tobytes() for name in ROWS)


@pytest.mark.parametrize("queued", [False, True])
def test_steps_between_blocks_do_not_show(tmp_path, small_blocks, queued):
    generator = np.random.default_rng(1)
    with make(tmp_path / "s", async_writes=queued) as optimizer:
        for _ in range(20):
            optimizer.step(batch(generator))
        with Snapshot(optimizer._state) as still:
            expected = whole(still)
        with Snapshot(optimizer._state) as snapshot:
            found = {}
            for table in snapshot.content.tables:
                parts = []
                for _, records in table.blocks():
                    parts.append(records.copy())
                    optimizer.step(batch(generator))
                found[table.name] = np.concatenate(parts)
        assert same(found, expected)
        assert snapshot.content.global_step == 20
        with Snapshot(optimizer._state) as after:
            assert not same(whole(after), expected)


def test_whole_table_changes_do_not_show(tmp_path, small_blocks):
    generator = np.random.default_rng(2)
    with make(tmp_path / "s") as optimizer:
        for _ in range(10):
            optimizer.step(batch(generator))
        with Snapshot(optimizer._state) as still:
            expected = whole(still)
        with Snapshot(optimizer._state) as snapshot:
            optimizer.set_curvature(0.5, name="entity")
            optimizer.reproject_all()
            assert same(whole(snapshot), expected)
            assert [table.k for table in snapshot.content.tables] == [1.0, 0.0]


def test_untouched_rows_have_their_first_weights_and_stamp_zero(tmp_path):
    with make(tmp_path / "s") as optimizer:
        optimizer.step({"entity": ([5], np.ones((1, DIM), np.float32))})
        with Snapshot(optimizer._state) as snapshot:
            records = whole(snapshot)["entity"]
        assert np.flatnonzero(records["s"]).tolist() == [5]
        read = optimizer.read_rows(np.arange(ROWS["entity"]), "entity").numpy()
        np.testing.assert_array_equal(records["w"], read)


def test_training_threads_and_a_reader_at_full_speed(tmp_path, small_blocks):
    generator = np.random.default_rng(3)
    batches = [batch(generator) for _ in range(150)]
    with make(tmp_path / "s") as optimizer:
        for updates in batches[:10]:
            optimizer.step(updates)
        with Snapshot(optimizer._state) as still:
            expected = whole(still)
        snapshot = Snapshot(optimizer._state, held_bytes=20_000).__enter__()  # training has to wait

        def train():
            for updates in batches[10:]:
                optimizer.step(updates)

        thread = threading.Thread(target=train)
        thread.start()
        found = whole(snapshot)
        snapshot.close()
        thread.join()
        assert same(found, expected)
        assert optimizer.global_step == 150
    with make(tmp_path / "alone") as alone:
        for updates in batches:
            alone.step(updates)
        resumed = make(tmp_path / "s", resume=True)
        with resumed, Snapshot(alone._state) as one, Snapshot(resumed._state) as other:
            assert same(whole(one), whole(other))


def test_closing_frees_a_waiting_step(tmp_path):
    with make(tmp_path / "s") as optimizer:
        generator = np.random.default_rng(4)
        waits = threading.Event()
        snapshot = Snapshot(optimizer._state, held_bytes=1).__enter__()
        optimizer.step({"entity": batch(generator)["entity"]})
        wait_for = snapshot._changed.wait_for

        def announced(ready):
            waits.set()
            return wait_for(ready)

        with mock.patch.object(snapshot._changed, "wait_for", announced):
            thread = threading.Thread(target=lambda: optimizer.step({"entity": batch(generator)["entity"]}))
            thread.start()
            assert waits.wait(30)
            snapshot.close()
            thread.join(30)
        assert optimizer.global_step == 2
        assert snapshot.waits == 1
        assert optimizer._state.observers == []


def test_a_snapshot_is_read_once(tmp_path):
    with make(tmp_path / "s") as optimizer, Snapshot(optimizer._state) as snapshot:
        whole(snapshot)
        with pytest.raises(RuntimeError, match="was read already: take another"):
            whole(snapshot)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_memory_are_part_of_it(tmp_path, small_blocks, dtype):
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(500, DIM, sparse=True, dtype=dtype)

    def step(optimizer):
        optimizer.zero_grad()
        embedding(torch.randint(0, 500, (30,))).float().square().sum().backward()
        optimizer.step()

    with DiskSparseAdam(embedding.parameters(), lr=0.1, state_dir=tmp_path / "s") as optimizer:
        for _ in range(5):
            step(optimizer)
        weights = embedding.weight.detach().float().numpy().copy()
        with Snapshot(optimizer._portable_state()) as still:
            (expected,) = (np.concatenate([r for _, r in t.blocks()]) for t in still.content.tables)
        np.testing.assert_array_equal(expected["w"], weights)
        with Snapshot(optimizer._portable_state()) as snapshot:
            (table,) = snapshot.content.tables
            parts = []
            for _, records in table.blocks():
                parts.append(records.copy())
                step(optimizer)
        assert table.schema.names == ("w", "m", "v", "t", "s")
        assert table.stored.names == ("m", "v", "t", "s")
        assert np.concatenate(parts).tobytes() == expected.tobytes()


def test_a_table_made_later_is_not_part_of_it(tmp_path):
    first = dsa.DiskEmbedding(50, 2, state_dir=tmp_path / "s", name="first")
    with Snapshot(first.weight.state) as snapshot:
        second = dsa.DiskEmbedding(50, 2, state_dir=tmp_path / "s", name="second")
        with dsa.DiskSparseAdam([*first.parameters(), *second.parameters()], lr=0.1) as optimizer:
            (first(torch.tensor([1])) + second(torch.tensor([2]))).sum().backward()
            optimizer.step()
            assert [table.name for table in snapshot.content.tables] == ["first"]


@pytest.mark.parametrize("rows", [64, 65, 97])
def test_what_was_set_aside_of_a_table_is_released_once_it_is_read(tmp_path, rows):
    optimizer = DiskSparseRiemannianAdam({"a": init.Zeros(rows, 2)}, k=0.0, disk_dir=tmp_path / "s")
    with optimizer, Snapshot(optimizer._portable_state(), held_bytes=1) as snapshot:
        optimizer.step({"a": ([0, rows - 1], np.ones((2, 2), np.float32))})
        (table,) = snapshot.content.tables
        list(table.blocks())
        assert snapshot._held == 0
        optimizer.step({"a": ([rows - 1], np.ones((1, 2), np.float32))})  # does not wait
        assert snapshot.waits == 0


def test_a_snapshot_that_nobody_entered_gives_up_instead_of_holding_training_up(tmp_path):
    with make(tmp_path / "s") as optimizer:
        snapshot = Snapshot(optimizer._portable_state(), held_bytes=1)
        generator = np.random.default_rng(0)
        for _ in range(3):
            optimizer.step(batch(generator))
        assert optimizer._portable_state().observers == []
        with pytest.raises(StateClosedError, match="export again"):
            whole(snapshot)
