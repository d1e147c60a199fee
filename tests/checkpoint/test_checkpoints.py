"""Export and import through the optimizers and modules: what a user relies on."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import zarr
from deaths import deaths

import dsa
from dsa import DiskEmbedding, DiskSparseAdam, DiskSparseRiemannianAdam, init
from dsa.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    DiskSpaceError,
    StateExistsError,
    StateIncompleteError,
    StateMismatchError,
    StateNotFoundError,
    StateWarning,
)

ROWS = {"entity": 3_000, "relation": 50}
DIM = 8


def make(path, *, second_moment="coordinate", rows=None, **options):
    rows = rows or ROWS
    weights = np.random.default_rng(7).standard_normal((rows["relation"], DIM)).astype(np.float32)
    tables = {"entity": init.Normal(rows["entity"], DIM, 0.1, seed=1), "relation": weights}
    chosen = {"k": {"entity": 1.0, "relation": 0.0}, "lr": 0.05, "allocate": "sparse", **options}
    return DiskSparseRiemannianAdam(tables, disk_dir=path, second_moment=second_moment, **chosen)


def batches(count, seed=0):
    generator = np.random.default_rng(seed)
    return [
        {
            name: (generator.integers(0, rows, 30), generator.standard_normal((30, DIM)).astype(np.float32))
            for name, rows in ROWS.items()
        }
        for _ in range(count)
    ]


def records(optimizer):
    return {
        name: table.backend.read(np.arange(len(table))).tobytes()
        for name, table in optimizer._portable_state().tables.items()
    }


def listing(path):
    return {
        str(file.relative_to(path)): (file.stat().st_mtime_ns, file.stat().st_size)
        for file in sorted(Path(path).rglob("*"))
    }


@pytest.mark.parametrize("second_moment", ["coordinate", "frame", "row"])
@pytest.mark.parametrize("queued", [False, True])
def test_c49_going_on_from_a_checkpoint_is_bit_identical(tmp_path, second_moment, queued):
    steps = batches(40)
    options = {"second_moment": second_moment, "async_writes": queued}
    with make(tmp_path / "a", **options) as optimizer:
        for updates in steps[:20]:
            optimizer.step(updates)
        path = optimizer.export_checkpoint(tmp_path / "ckpt", compression="zstd" if queued else None)
        assert path == str(tmp_path / "ckpt")
        for updates in steps[20:]:
            optimizer.step(updates)
        expected = records(optimizer)
    with make(tmp_path / "b", **options) as other:
        other.import_checkpoint(path)
        assert other.global_step == 20
        for updates in steps[20:]:
            other.step(updates)
        assert records(other) == expected
    with make(tmp_path / "b", resume=True, **options) as resumed:
        assert resumed.global_step == 40
        assert records(resumed) == expected


def test_c49_through_memory_and_a_changed_curvature(tmp_path):
    steps = batches(30)
    with make(tmp_path / "a") as optimizer:
        for updates in steps[:10]:
            optimizer.step(updates)
        optimizer.set_curvature(0.25, name="entity")
        optimizer.export_checkpoint("memory://checkpoints/ten")
        for updates in steps[10:]:
            optimizer.step(updates)
        expected = records(optimizer)
    with make(tmp_path / "b") as other:
        other.import_checkpoint("memory://checkpoints/ten")
        assert other._state.tables["entity"].k == 0.25
        for updates in steps[10:]:
            other.step(updates)
        assert records(other) == expected


def test_aliases_and_old_names(tmp_path):
    with make(tmp_path / "s") as optimizer:
        optimizer.step(batches(1)[0])
        optimizer.save_checkpoint(tmp_path / "ckpt")
        optimizer.load_checkpoint(tmp_path / "ckpt")
        for old in ("run.json", "checkpoint.json"):
            with pytest.raises(CheckpointMismatchError, match=r"dsa\.migrate"):
                optimizer.import_checkpoint(tmp_path / old)
        with pytest.raises(CheckpointNotFoundError):
            optimizer.import_checkpoint(tmp_path / "nowhere")


def test_training_goes_on_while_a_thread_exports(tmp_path):
    steps = batches(120)
    with make(tmp_path / "s") as optimizer:
        for updates in steps[:20]:
            optimizer.step(updates)
        taken = threading.Event()
        done = []

        def progress(at, total):
            taken.set()

        thread = threading.Thread(
            target=lambda: done.append(optimizer.export_checkpoint(tmp_path / "ckpt", progress=progress))
        )
        thread.start()
        assert taken.wait(60)
        for updates in steps[20:]:
            optimizer.step(updates)
        thread.join()
        assert done == [str(tmp_path / "ckpt")]
        assert optimizer.global_step == 120
    at = dsa.open_checkpoint(tmp_path / "ckpt").global_step
    with make(tmp_path / "again") as again:
        for updates in steps[:at]:
            again.step(updates)
        expected = records(again)
        again.import_checkpoint(tmp_path / "ckpt")
        assert records(again) == expected


def test_plain_zarr_sees_what_training_reads(tmp_path):
    with make(tmp_path / "s") as optimizer:
        for updates in batches(5):
            optimizer.step(updates)
        group = zarr.open_group(optimizer.export_checkpoint(tmp_path / "ckpt"), mode="r")
        for name, rows in ROWS.items():
            read = optimizer.read_rows(np.arange(rows), name).numpy()
            np.testing.assert_array_equal(group[name]["w"][:], read)
        assert int((group["entity"]["t"][:] > 0).sum()) == group["entity"].attrs["touched_rows"]


def test_c39_a_read_only_checkpoint_is_enough(tmp_path):
    steps = batches(15)
    with make(tmp_path / "a") as optimizer:
        for updates in steps[:10]:
            optimizer.step(updates)
        optimizer.export_checkpoint(tmp_path / "ckpt")
        for updates in steps[10:]:
            optimizer.step(updates)
        expected = records(optimizer)
    for file in (tmp_path / "ckpt").rglob("*"):
        file.chmod(0o555 if file.is_dir() else 0o444)
    (tmp_path / "ckpt").chmod(0o555)
    before = listing(tmp_path / "ckpt")
    with make(tmp_path / "b") as other:
        other.import_checkpoint(tmp_path / "ckpt")
        for updates in steps[10:]:
            other.step(updates)
        assert records(other) == expected
    for resume in (None, True):
        with pytest.raises(StateExistsError, match="call import_checkpoint"):
            make(tmp_path / "ckpt", resume=resume)
    assert listing(tmp_path / "ckpt") == before


def test_c51_a_target_that_exists(tmp_path):
    with make(tmp_path / "s") as optimizer:
        optimizer.step(batches(1)[0])
        optimizer.export_checkpoint(tmp_path / "ckpt")
        with pytest.raises(CheckpointExistsError, match="overwrite"):
            optimizer.export_checkpoint(tmp_path / "ckpt")
        for inside in (tmp_path / "s", tmp_path / "s" / "ckpt"):
            with pytest.raises(CheckpointExistsError):
                optimizer.export_checkpoint(inside, overwrite=True)
    with make(tmp_path / "two") as smaller:
        smaller.export_checkpoint(tmp_path / "ckpt", overwrite=True)
    assert dsa.open_checkpoint(tmp_path / "ckpt").global_step == 0


def test_imports_that_do_not_fit(tmp_path):
    with make(tmp_path / "s") as optimizer:
        optimizer.step(batches(1)[0])
        optimizer.export_checkpoint(tmp_path / "ckpt")
    cases = [
        ({"rows": {"entity": 3_001, "relation": 50}}, "has 3000 rows in the checkpoint but 3001 here"),
        ({"second_moment": "row"}, "fields would be misread"),
    ]
    for number, (options, message) in enumerate(cases):
        with make(tmp_path / f"other{number}", **options) as other:
            before = records(other)
            with pytest.raises(StateMismatchError, match=message):
                other.import_checkpoint(tmp_path / "ckpt")
            assert records(other) == before
    other = DiskSparseRiemannianAdam({"entity": init.Zeros(5, 2)}, disk_dir=tmp_path / "names")
    with other, pytest.raises(StateMismatchError, match="holds the tables"):
        other.import_checkpoint(tmp_path / "ckpt")


def test_a_damaged_checkpoint_leaves_the_state_alone(tmp_path):
    with make(tmp_path / "s") as optimizer:
        optimizer.step(batches(1)[0])
        optimizer.export_checkpoint(tmp_path / "ckpt")
        shard = tmp_path / "ckpt" / "relation" / "w" / "c" / "0" / "0"
        raw = bytearray(shard.read_bytes())
        raw[17] ^= 4
        shard.write_bytes(raw)
        optimizer.step(batches(1)[0])
        before, files = records(optimizer), sorted(os.listdir(tmp_path / "s"))
        with pytest.raises(CheckpointCorruptError, match="relation"):
            optimizer.import_checkpoint(tmp_path / "ckpt")
        assert records(optimizer) == before
        assert sorted(os.listdir(tmp_path / "s")) == files
        optimizer.step(batches(1)[0])
        assert optimizer.global_step == 3


def test_no_room_for_the_old_and_the_new(tmp_path, monkeypatch):
    with make(tmp_path / "s", allocate="reserve") as optimizer:
        optimizer.step(batches(1)[0])
        optimizer.export_checkpoint(tmp_path / "ckpt")
        before = records(optimizer)
        monkeypatch.setattr("dsa.backends.system.available_bytes", lambda directory: 100_000)
        with pytest.raises(DiskSpaceError):
            optimizer.import_checkpoint(tmp_path / "ckpt")
        monkeypatch.undo()
        assert records(optimizer) == before
        optimizer.step(batches(1)[0])


def test_weights_of_a_module_are_exported_and_put_back(tmp_path):
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(200, 4, sparse=True, dtype=torch.bfloat16)

    def step(optimizer):
        optimizer.zero_grad()
        embedding(torch.arange(60)).float().square().sum().backward()
        optimizer.step()

    with DiskSparseAdam(embedding.parameters(), lr=0.1, state_dir=tmp_path / "s") as optimizer:
        step(optimizer)
        saved = optimizer.state_dict()
        weights = embedding.weight.detach().clone()
        optimizer.export_checkpoint(tmp_path / "ckpt")
        step(optimizer)
        later = embedding.weight.detach().clone()
        optimizer.import_checkpoint(tmp_path / "ckpt")
        assert torch.equal(embedding.weight, weights)
        optimizer.load_state_dict(saved)
        step(optimizer)
        assert torch.equal(embedding.weight, later)
    stored = zarr.open_group(tmp_path / "ckpt", mode="r")["param_0"]["w"][:]
    np.testing.assert_array_equal(stored, weights.float().numpy())
    fresh = torch.nn.Embedding(200, 4, sparse=True, dtype=torch.bfloat16)
    with DiskSparseAdam(fresh.parameters(), lr=0.1, state_dir=tmp_path / "fresh") as other:
        other.import_checkpoint(tmp_path / "ckpt")
        other.load_state_dict(saved)  # a restored state answers to the name of the one it came from
        assert torch.equal(fresh.weight, weights)


def test_a_module_exports_every_table_of_its_directory(tmp_path):
    users = DiskEmbedding(40, 4, state_dir=tmp_path / "s", name="users")
    items = DiskEmbedding(60, 4, state_dir=tmp_path / "s", name="items")
    with DiskSparseAdam([*users.parameters(), *items.parameters()], lr=0.1) as optimizer:
        (users(torch.arange(5)).sum() + items(torch.arange(7)).square().sum()).backward()
        optimizer.step()
        path = users.export_checkpoint(tmp_path / "ckpt", attributes={"epoch": 3})
        rows = users(torch.arange(40)).detach().clone()
        optimizer.step()
        users.import_checkpoint(path)
        assert torch.equal(users(torch.arange(40)), rows)
        assert optimizer.global_step == 1
    checkpoint = dsa.open_checkpoint(path)
    assert [table.name for table in checkpoint.tables] == ["users", "items"]
    assert checkpoint.attributes == {"epoch": 3}


def test_from_a_disk_table_to_weights_in_memory_and_back(tmp_path):
    disk = DiskEmbedding(50, 4, state_dir=tmp_path / "disk", name="embedding")
    with DiskSparseAdam(disk.parameters(), lr=0.1) as optimizer:
        disk(torch.arange(20)).square().sum().backward()
        optimizer.step()
        expected = disk(torch.arange(50)).detach().clone()
        optimizer.export_checkpoint(tmp_path / "ckpt")
    held = torch.nn.Embedding(50, 4, sparse=True)
    named = [("embedding", held.weight)]
    with DiskSparseAdam(named, lr=0.1, state_dir=tmp_path / "held") as optimizer:
        optimizer.import_checkpoint(tmp_path / "ckpt")
        assert torch.equal(held.weight, expected)
        optimizer.export_checkpoint(tmp_path / "back")
    again = DiskEmbedding(50, 4, state_dir=tmp_path / "again", name="embedding")
    again.import_checkpoint(tmp_path / "back")
    assert torch.equal(again(torch.arange(50)), expected)
    again.close()


def test_directories_without_an_optimizer(tmp_path):
    with make(tmp_path / "s") as optimizer:
        for updates in batches(3):
            optimizer.step(updates)
        expected = records(optimizer)
    dsa.export_checkpoint(tmp_path / "s", tmp_path / "ckpt")
    dsa.import_checkpoint(tmp_path / "ckpt", tmp_path / "made")
    with make(tmp_path / "made", resume=True) as again:
        assert again.global_step == 3
        assert records(again) == expected
    with pytest.raises(StateExistsError, match="choose another directory"):
        dsa.import_checkpoint(tmp_path / "ckpt", tmp_path / "made")


def test_weights_that_are_not_in_a_checkpoint_stay(tmp_path):
    embedding = torch.nn.Embedding(20, 2, sparse=True)
    with DiskSparseAdam(embedding.parameters(), lr=0.1, state_dir=tmp_path / "s") as optimizer:
        embedding(torch.arange(4)).sum().backward()
        optimizer.step()
    dsa.export_checkpoint(tmp_path / "s", tmp_path / "ckpt")
    with DiskSparseAdam(embedding.parameters(), lr=0.1, state_dir=tmp_path / "s2") as optimizer:
        before = embedding.weight.detach().clone()
        with pytest.warns(StateWarning, match="holds no weights of table 'param_0'"):
            optimizer.import_checkpoint(tmp_path / "ckpt")
        assert torch.equal(embedding.weight, before)
        assert optimizer.global_step == 1


@pytest.mark.disk
def test_untouched_rows_stay_holes(tmp_path):
    with make(tmp_path / "s", rows={"entity": 300_000, "relation": 50}) as optimizer:
        optimizer.step({"entity": ([5, 200_000], np.ones((2, DIM), np.float32))})
        optimizer.export_checkpoint(tmp_path / "ckpt")
        optimizer.import_checkpoint(tmp_path / "ckpt")
        (file,) = (tmp_path / "s").glob("entity-*.dsa")
        assert file.stat().st_blocks * 512 < 1 << 20
    moments = tmp_path / "ckpt" / "entity" / "m"
    assert sum(file.stat().st_size for file in moments.rglob("0")) <= 300_000 * DIM * 4 * 1.1


@pytest.mark.parametrize("touched", [10, 290_000])
def test_compression_by_how_much_was_touched(tmp_path, touched):
    with make(tmp_path / "s", rows={"entity": 300_000, "relation": 50}) as optimizer:
        rows = np.arange(touched)
        optimizer.step({"entity": (rows, np.ones((touched, DIM), np.float32))})
        path = optimizer.export_checkpoint(tmp_path / "ckpt", compression="auto")
        group = zarr.open_group(path, mode="r")["entity"]
        np.testing.assert_array_equal(group["w"][:], optimizer.read_rows(np.arange(300_000), "entity"))
    codecs = {name: str(group[name].metadata.codecs) for name in "wmv"}
    compressed = {name for name, text in codecs.items() if "Zstd" in text}
    assert compressed == (set("mv") if touched == 10 else set())


class Striker:
    """Interrupts at the n-th call of the interpreter that opens, renames or removes a file in a directory.

    An audit hook can't be removed, so that one for all tests asks whether there is a striker.
    """

    current = None

    def __init__(self, directory, place):
        self.directory, self.left = str(directory), place

    def __enter__(self):
        type(self).current = self
        return self

    def __exit__(self, *error):
        type(self).current = None

    @classmethod
    def audit(cls, event, arguments):
        striker = cls.current
        if striker is None or event not in ("open", "os.rename", "os.remove"):
            return
        if any(str(each).startswith(striker.directory) for each in arguments):
            striker.left -= 1
            if striker.left < 0:
                raise KeyboardInterrupt


sys.addaudithook(Striker.audit)


def test_every_instant_of_an_import(tmp_path):
    """Interrupted at each call that touches the directory, what is on disk is the old state or the new."""
    with make(tmp_path / "new") as optimizer:
        for updates in batches(6, seed=5):
            optimizer.step(updates)
        optimizer.export_checkpoint(tmp_path / "ckpt")
        new = (6, records(optimizer))
    with make(tmp_path / "old") as optimizer:
        optimizer.step(batches(1)[0])
        old = (1, records(optimizer))
    seen = set()
    for place in range(200):
        state = tmp_path / "trial"
        shutil.copytree(tmp_path / "old", state)
        optimizer = make(state, resume=True)
        finished = False
        with contextlib.suppress(KeyboardInterrupt), Striker(state, place):
            optimizer.import_checkpoint(tmp_path / "ckpt")
            finished = True
        optimizer.close()
        with make(state, resume=True) as resumed:
            found = (resumed.global_step, records(resumed))
        assert found in (old, new), f"place {place}"
        seen.add(found[0])
        shutil.rmtree(state)
        if finished:
            break
    assert finished
    assert seen == {1, 6}


def test_root_attributes_are_json_that_people_can_read(tmp_path):
    with make(tmp_path / "s") as optimizer:
        optimizer.step(batches(1)[0])
        optimizer.export_checkpoint(tmp_path / "ckpt")
    root = json.loads((tmp_path / "ckpt" / "zarr.json").read_text())["attributes"]["dsa"]
    assert root["complete"] is True
    assert root["global_step"] == 1


def test_files_hold_little_more_than_the_content(tmp_path):
    """Of several shards the last one ends with the last chunk."""
    weights = np.ones((200_000, 32), np.float32)
    with DiskSparseRiemannianAdam({"e": weights}, k=0.0, disk_dir=tmp_path / "s") as optimizer:
        optimizer.step({"e": (np.arange(200_000), weights)})
        path = Path(optimizer.export_checkpoint(tmp_path / "ckpt"))
    checkpoint = dsa.open_checkpoint(path)
    checkpoint.verify()
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    assert size < 1.05 * checkpoint.nbytes
    np.testing.assert_array_equal(zarr.open_group(path, mode="r")["e"]["t"][:], np.ones(200_000))


_MEMORY = """
import gc, sys, threading, time
import numpy as np
import dsa
from dsa import DiskSparseRiemannianAdam, init

def resident():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024

peak = 0.0
def watch():
    global peak
    while True:
        peak = max(peak, resident())
        time.sleep(0.002)

def step(optimizer, start, count):
    rows = np.arange(start, start + count)
    optimizer.step({"entity": (rows, np.ones((count, 64), np.float32))})

rows, place = 1_000_000, sys.argv[1]
optimizer = DiskSparseRiemannianAdam({"entity": init.Zeros(rows, 64)}, k=0.0, disk_dir=place + "/s")
small = DiskSparseRiemannianAdam({"entity": init.Zeros(5000, 64)}, k=0.0, disk_dir=place + "/small")
small.import_checkpoint(small.export_checkpoint(place + "/small-ckpt"))
for start in range(0, rows, 20_000):
    step(optimizer, start, 20_000)
before = resident()
threading.Thread(target=watch, daemon=True).start()
optimizer.export_checkpoint(place + "/ckpt", durable=False)
print("export", peak - before)
gc.collect()
peak = 0.0
optimizer.import_checkpoint(place + "/ckpt")
print("import", peak - before)
gc.collect()
peak = 0.0
for start in range(0, rows, 100_000):
    optimizer.read_rows(np.arange(start, start + 10_000))
print("iterate", peak - before)
optimizer.close()
"""


@pytest.mark.disk
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is not told there")
def test_c28_memory_stays_small_whatever_the_table(tmp_path):
    """776 MB of state: export, import and iteration each add about 100 MB at most."""
    command = [sys.executable, "-c", _MEMORY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    used = {line.split()[0]: float(line.split()[1]) for line in done.stdout.splitlines()}
    assert used.keys() == {"export", "import", "iterate"}, done.stderr
    assert max(used.values()) < 120, used


class Gate:
    """A progress function that holds an export up until it is opened."""

    def __init__(self):
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, done, total):
        self.reached.set()
        assert self.open.wait(60)


def export_in_a_thread(optimizer, path, gate):
    """Start an export and return, once it is under way, its thread and where its error will be."""
    errors = []

    def run():
        try:
            optimizer.export_checkpoint(path, progress=gate)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert gate.reached.wait(60)
    return thread, errors


def test_an_import_during_an_export_ends_it_and_not_the_steps(tmp_path):
    steps = batches(10)
    with make(tmp_path / "s") as optimizer:
        for updates in steps[:5]:
            optimizer.step(updates)
        early = optimizer.export_checkpoint(tmp_path / "early")
        gate = Gate()
        thread, errors = export_in_a_thread(optimizer, tmp_path / "late", gate)
        optimizer.import_checkpoint(early)
        optimizer.step(steps[5])
        assert optimizer.global_step == 6
        gate.open.set()
        thread.join()
        assert not errors or "an import has replaced the state" in str(errors[0])


def test_an_export_that_ends_after_an_import_is_no_base(tmp_path):
    """It was of the history that the import has ended, though the state has kept its name."""
    steps = batches(20)
    with make(tmp_path / "s") as optimizer:
        for updates in steps[:5]:
            optimizer.step(updates)
        early = optimizer.export_checkpoint(tmp_path / "early")
        for updates in steps[5:10]:
            optimizer.step(updates)
        gate = threading.Event()
        state, opened = optimizer._state, dsa.checkpoint.transfer.open_checkpoint

        def late(url, **options):
            assert gate.wait(60)
            return opened(url, **options)

        with mock.patch.object(dsa.checkpoint.transfer, "open_checkpoint", late):
            thread = threading.Thread(target=optimizer.export_checkpoint, args=(tmp_path / "late",))
            thread.start()
            while state.observers or not (tmp_path / "late").exists():
                time.sleep(0.001)
            optimizer.import_checkpoint(early)
            gate.set()
            thread.join()
        for updates in steps[10:12]:
            optimizer.step(updates)
        with pytest.raises(CheckpointMismatchError, match="nobody knows which rows"):
            optimizer.export_checkpoint(tmp_path / "delta", base=tmp_path / "late")


def test_rows_that_were_never_stepped_are_rows_where_there_is_no_rule(tmp_path):
    held = torch.nn.Embedding(30, 4, sparse=True)
    with DiskSparseAdam([("table", held.weight)], lr=0.1, state_dir=tmp_path / "held") as optimizer:
        held(torch.arange(10)).sum().backward()
        optimizer.step()
        optimizer.export_checkpoint(tmp_path / "ckpt")
    tables = {"table": np.zeros((30, 4), np.float32)}
    with DiskSparseRiemannianAdam(tables, k=0.0, disk_dir=tmp_path / "disk") as optimizer:
        optimizer.import_checkpoint(tmp_path / "ckpt")
        before = optimizer.read_rows(np.arange(30)).numpy()
        np.testing.assert_array_equal(before, held.weight.detach().numpy())
        optimizer.set_curvature(1.0, map="log0")
        after = optimizer.read_rows(np.arange(30)).numpy().astype(float)
        distance = 2.0 * np.arctanh(np.linalg.norm(after, axis=1))
        np.testing.assert_allclose(distance, np.linalg.norm(before, axis=1), rtol=1e-4)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_half_made_restore_is_no_state(tmp_path):
    """Killed anywhere while a directory is made of a checkpoint: it is whole, or it is made again."""
    with make(tmp_path / "s") as optimizer:
        optimizer.step(batches(1)[0])
        optimizer.export_checkpoint(tmp_path / "ckpt")
        whole = records(optimizer)
    made, outcomes = tmp_path / "made", []

    def restore():
        shutil.rmtree(made, ignore_errors=True)

    for _ in deaths(lambda: None, lambda _: dsa.import_checkpoint(tmp_path / "ckpt", made), restore):
        try:
            make(made, resume=True).close()
            outcomes.append("whole")
        except (StateIncompleteError, StateNotFoundError) as error:
            outcomes.append("incomplete" if isinstance(error, StateIncompleteError) else "nothing")
            dsa.import_checkpoint(tmp_path / "ckpt", made)
        with make(made, resume=True) as optimizer:
            assert optimizer.global_step == 1
            assert records(optimizer) == whole
        assert len(list(made.glob("*.dsa"))) == 2
    assert set(outcomes) == {"nothing", "incomplete", "whole"}


def test_an_interrupt_while_weights_are_put_back(tmp_path, monkeypatch):
    embedding = torch.nn.Embedding(60, 4, sparse=True)
    with DiskSparseAdam(embedding.parameters(), lr=0.1, state_dir=tmp_path / "s") as optimizer:
        optimizer.export_checkpoint(tmp_path / "ckpt")
        wanted = embedding.weight.detach().clone()
        embedding(torch.arange(60)).sum().backward()
        optimizer.step()
        held = optimizer._portable_state().tables["param_0"].held
        put, calls = type(held).put, []

        def interrupted(self, rows, weights):
            calls.append(1)
            if len(calls) == 1:
                raise KeyboardInterrupt
            put(self, rows, weights)

        monkeypatch.setattr(type(held), "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.import_checkpoint(tmp_path / "ckpt")
        assert optimizer.global_step == 0
        assert torch.equal(embedding.weight, wanted)


def test_a_directory_of_an_older_release_is_not_migrated_by_an_export(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a_w.dat").write_bytes(b"old")
    with pytest.raises(StateNotFoundError, match=r"dsa\.migrate"):
        dsa.export_checkpoint(tmp_path / "old", tmp_path / "ckpt")
