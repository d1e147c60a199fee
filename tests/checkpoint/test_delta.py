"""Differential checkpoints: base and delta together are the state, bit for bit, or a clear refusal."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from current_files import copy_as_killed

import dsa
from dsa import DiskEmbedding, DiskSparseAdam, DiskSparseRiemannianAdam, init
from dsa.checkpoint import open_content
from dsa.checkpoint.delta import _Changes
from dsa.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)

ROWS = {"entity": 5_000, "relation": 40}
DIM = 16


def make(path, **options):
    tables = {"entity": init.Normal(5_000, DIM, 0.1, seed=1), "relation": np.ones((40, DIM), np.float32)}
    chosen = {"k": {"entity": 1.0, "relation": 0.0}, "lr": 0.05, "allocate": "sparse", **options}
    return DiskSparseRiemannianAdam(tables, disk_dir=path, **chosen)


def train(optimizer, steps, seed):
    generator = np.random.default_rng(seed)
    for _ in range(steps):
        rows = generator.integers(0, 5_000, 20)
        optimizer.step({"entity": (rows, generator.standard_normal((20, DIM)).astype(np.float32))})


def records(optimizer):
    return {
        name: table.backend.read(np.arange(len(table))).tobytes()
        for name, table in optimizer._portable_state().tables.items()
    }


def weights(optimizer):
    return {name: optimizer.read_rows(np.arange(rows), name).numpy() for name, rows in ROWS.items()}


@pytest.fixture
def run(tmp_path):
    """A state at step 30, its checkpoint of step 20, and a delta."""
    with make(tmp_path / "s") as optimizer:
        train(optimizer, 20, seed=0)
        base = optimizer.export_checkpoint(tmp_path / "step-20")
        train(optimizer, 10, seed=1)
        delta = optimizer.export_checkpoint(tmp_path / "step-30", base=base)
        yield optimizer, Path(base), Path(delta)


def stored_bytes(path):
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_restored_from_both(run, tmp_path):
    optimizer, base, delta = run
    with make(tmp_path / "again") as again:
        again.import_checkpoint(delta)
        assert again.global_step == 30
        assert records(again) == records(optimizer)
        train(again, 5, seed=2)
        train(optimizer, 5, seed=2)
        assert records(again) == records(optimizer)
        # The lineage goes on: what was restored may be the base of further deltas.
        again.export_checkpoint(tmp_path / "step-35", base=base)
    with make(tmp_path / "third") as third:
        third.import_checkpoint(tmp_path / "step-35", base=base)
        assert records(third) == records(optimizer)


def test_it_is_small_and_an_ordinary_group(run):
    optimizer, base, delta = run
    group = zarr.open_group(delta, mode="r")
    rows = group["entity"]["rows"][:]
    assert 150 < len(rows) <= 220
    assert (np.diff(rows) > 0).all()
    np.testing.assert_array_equal(group["entity"]["w"][:], weights(optimizer)["entity"][rows])
    assert group.attrs["dsa"]["base"]["step"] == 20
    assert stored_bytes(delta) < 0.2 * stored_bytes(base)
    dsa.open_checkpoint(delta).verify()


def test_flattened_equals_a_full_export(run, tmp_path):
    optimizer, _, delta = run
    flat = dsa.flatten_checkpoint(delta, tmp_path / "flat")
    full = optimizer.export_checkpoint(tmp_path / "full")
    flat, full = dsa.open_checkpoint(flat), dsa.open_checkpoint(full)
    flat.verify()
    assert (flat.kind, flat.global_step, flat.content_root) == ("full", 30, full.content_root)


def test_a_second_delta_against_one_base(run, tmp_path):
    optimizer, base, delta = run
    train(optimizer, 3, seed=5)
    later = optimizer.export_checkpoint(tmp_path / "step-33", base=base, compression="zstd")
    with pytest.raises(CheckpointMismatchError, match="differential checkpoint itself"):
        optimizer.export_checkpoint(tmp_path / "chain", base=delta)
    dsa.import_checkpoint(later, tmp_path / "made")
    with make(tmp_path / "made", resume=True) as made:
        assert records(made) == records(optimizer)


def test_kept_over_a_restart(run, tmp_path):
    optimizer, base, _ = run
    optimizer.close()
    with make(tmp_path / "s", resume=True) as resumed:
        train(resumed, 4, seed=9)
        delta = resumed.export_checkpoint(tmp_path / "step-34", base=base)
        with make(tmp_path / "again") as again:
            again.import_checkpoint(delta)
            assert records(again) == records(resumed)


def test_nothing_changed(tmp_path):
    with make(tmp_path / "s") as optimizer:
        base = optimizer.export_checkpoint(tmp_path / "zero")
        delta = optimizer.export_checkpoint(tmp_path / "none", base=base)
        flat = dsa.open_checkpoint(dsa.flatten_checkpoint(delta, tmp_path / "flat"))
        assert flat.content_root == dsa.open_checkpoint(base).content_root


def test_rows_changed_outside_steps_are_in_it(tmp_path):
    disk = DiskEmbedding(100, 4, state_dir=tmp_path / "s", max_norm=0.5, init=init.Normal(100, 4, 1.0))
    with DiskSparseAdam(disk.parameters(), lr=0.1) as optimizer:
        disk(torch.arange(10)).sum().backward()
        optimizer.step()
        base = disk.export_checkpoint(tmp_path / "base")
        disk(torch.arange(40, 60))  # max_norm writes
        delta = disk.export_checkpoint(tmp_path / "delta", base=base)
        with torch.no_grad():
            expected = disk.eval()(torch.arange(100))
        flat = zarr.open_group(dsa.flatten_checkpoint(delta, tmp_path / "flat"), mode="r")
        stored = flat["embedding"]["w"][:]
    np.testing.assert_allclose(stored[40:60], expected.numpy()[40:60], rtol=1e-6)


def test_reset_rows_are_in_it(run, tmp_path):
    optimizer, base, _ = run
    table = optimizer._portable_state().tables["entity"]
    touched = np.flatnonzero(table.backend.read(np.arange(5_000))["s"])[:3]
    broken = table.backend.read(touched)
    broken["v"] = -1.0
    table.backend.write(touched, broken)
    with pytest.warns(dsa.errors.StateWarning, match="were reset"):
        optimizer.reproject_all()
    delta = optimizer.export_checkpoint(tmp_path / "after", base=base)
    full = dsa.open_checkpoint(optimizer.export_checkpoint(tmp_path / "full"))
    flat = dsa.open_checkpoint(dsa.flatten_checkpoint(delta, tmp_path / "flat"))
    assert flat.content_root == full.content_root


def test_a_table_that_is_younger_than_the_base(tmp_path):
    users = DiskEmbedding(30, 4, state_dir=tmp_path / "s", name="users")
    base = users.export_checkpoint(tmp_path / "base")
    items = DiskEmbedding(50, 4, state_dir=tmp_path / "s", name="items")
    with DiskSparseAdam([*users.parameters(), *items.parameters()], lr=0.1) as optimizer:
        items(torch.arange(5)).sum().backward()
        optimizer.step()
        delta = users.export_checkpoint(tmp_path / "delta", base=base)
        full = users.export_checkpoint(tmp_path / "full")
        flat = dsa.flatten_checkpoint(delta, tmp_path / "flat")
    assert dsa.open_checkpoint(flat).content_root == dsa.open_checkpoint(full).content_root


def test_another_history_is_refused(run, tmp_path):
    optimizer, base, delta = run
    with make(tmp_path / "other") as other:
        train(other, 20, seed=7)
        with pytest.raises(CheckpointMismatchError, match="nobody knows which rows"):
            other.export_checkpoint(tmp_path / "wrong", base=base)
        elsewhere = other.export_checkpoint(tmp_path / "elsewhere")
        optimizer.import_checkpoint(elsewhere)
        with pytest.raises(CheckpointMismatchError, match="nobody knows which rows"):
            optimizer.export_checkpoint(tmp_path / "wrong", base=base)
        with pytest.raises(CheckpointMismatchError, match="not the base"):
            other.import_checkpoint(delta, base=elsewhere)
        with pytest.raises(ValueError, match="no differential checkpoint"):
            other.import_checkpoint(elsewhere, base=base)


def test_steps_lost_by_a_kill_end_the_lineage(tmp_path):
    with make(tmp_path / "s", durability="none") as optimizer:
        train(optimizer, 5, seed=0)
        base = optimizer.export_checkpoint(tmp_path / "base")
        optimizer.flush()
        copy_as_killed(tmp_path / "s", tmp_path / "killed")
    with pytest.warns(dsa.errors.StateWarning, match="not closed and has no journal"):
        resumed = make(tmp_path / "killed", resume=True, durability="none")
    with resumed, pytest.raises(CheckpointMismatchError, match="nobody knows"):
        resumed.export_checkpoint(tmp_path / "delta", base=base)


def test_another_curvature_is_refused(run, tmp_path):
    optimizer, base, _ = run
    optimizer.set_curvature(0.5, name="entity")
    with pytest.raises(CheckpointMismatchError, match="export a full checkpoint"):
        optimizer.export_checkpoint(tmp_path / "delta", base=base)


def test_weights_of_a_module_are_refused(tmp_path):
    embedding = torch.nn.Embedding(20, 2, sparse=True)
    with DiskSparseAdam(embedding.parameters(), lr=0.1, state_dir=tmp_path / "s") as optimizer:
        base = optimizer.export_checkpoint(tmp_path / "base")
        with pytest.raises(CheckpointMismatchError, match="DiskEmbedding"):
            optimizer.export_checkpoint(tmp_path / "delta", base=base)


def test_a_base_that_is_not_beside_it(run, tmp_path):
    optimizer, base, delta = run
    base.rename(tmp_path / "moved")
    with make(tmp_path / "again") as again:
        with pytest.raises(CheckpointNotFoundError, match="pass base="):
            again.import_checkpoint(delta)
        again.import_checkpoint(delta, base=tmp_path / "moved")
        assert records(again) == records(optimizer)


def test_alone_it_is_no_state(run):
    _, _, delta = run
    with pytest.raises(CheckpointMismatchError, match="only holds the rows that changed"):
        dsa.open_checkpoint(delta).content()


@pytest.mark.parametrize("field", ["rows", "w", "m", "v", "t", "s"])
def test_damage_is_noticed(run, tmp_path, field):
    _, _, delta = run
    (shard,) = (file for file in (delta / "entity" / field / "c").rglob("*") if file.is_file())
    raw = bytearray(shard.read_bytes())
    raw[9] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(CheckpointCorruptError, match=f"field '{field}'"):
        dsa.import_checkpoint(delta, tmp_path / "made")


def test_a_damaged_base_is_noticed(run, tmp_path):
    _, base, delta = run
    shard = base / "entity" / "w" / "c" / "0" / "0"
    raw = bytearray(shard.read_bytes())
    raw[-100_000] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(CheckpointCorruptError, match="field 'w'"):
        dsa.import_checkpoint(delta, tmp_path / "made")


def test_through_memory(run, tmp_path):
    optimizer, _, _ = run
    base = optimizer.export_checkpoint("memory://deltas/base")
    train(optimizer, 2, seed=3)
    optimizer.export_checkpoint("memory://deltas/delta", base=base)
    dsa.import_checkpoint("memory://deltas/delta", tmp_path / "made")
    with make(tmp_path / "made", resume=True) as made:
        assert records(made) == records(optimizer)


@pytest.mark.parametrize("place", ["{tmp}", "memory://self"])
def test_nothing_is_written_over_what_it_is_made_of(run, tmp_path, place):
    optimizer, _, _ = run
    where = place.format(tmp=tmp_path)
    base = optimizer.export_checkpoint(f"{where}/base")
    train(optimizer, 1, seed=4)
    delta = optimizer.export_checkpoint(f"{where}/delta", base=base)
    for target in (base, delta):
        with pytest.raises(CheckpointExistsError, match="is the source itself"):
            dsa.flatten_checkpoint(delta, target, overwrite=True)
    with pytest.raises(CheckpointExistsError, match="is the source itself"):
        optimizer.export_checkpoint(base, base=base, overwrite=True)
    dsa.open_checkpoint(base).verify()
    dsa.open_checkpoint(delta).verify()


def test_row_numbers_whose_differences_overflow(run, tmp_path):
    _, _, delta = run
    opened = open_content(delta)
    table = opened.checkpoint.stored_content().tables[0]
    (block,) = (records for _, records in table.blocks())
    hostile = block[:5].copy()
    hostile["rows"] = [5, 2**63 - 1, -(2**63), -1, 7]
    changes = _Changes(
        opened.checkpoint, replace(table, blocks=lambda: iter([(0, hostile)])), table.schema, 5_000
    )
    with pytest.raises(CheckpointCorruptError, match="not increasing"):
        list(changes.until(5_000))
