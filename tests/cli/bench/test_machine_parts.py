"""Counters, the disk's speed, pages, and the memory limit, each by itself."""

import json
import os
import sys
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsa.backends.system import PAGE
from dsa.cli.bench import device, limited, machine
from dsa.cli.bench.baselines import Naive
from dsa.cli.bench.batches import UniformBatches, apart_rows, whole_table
from dsa.cli.bench.cold import cold_group
from dsa.cli.bench.device import DeviceSpeed, measure_device
from dsa.cli.bench.ours import Ours
from dsa.cli.bench.settings import QUICK
from dsa.rules.init import Zeros

pytestmark = pytest.mark.disk

MIB = 1 << 20


def test_the_machine_is_described_in_json(tmp_path):
    found = machine.describe_machine(tmp_path)
    assert json.loads(json.dumps(found)) == found
    assert found["usable_cores"] >= 1


def test_what_a_system_does_not_tell_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_PROC", tmp_path)
    monkeypatch.setattr(machine, "_SYS", tmp_path)
    monkeypatch.setattr(machine.system, "blocks_read", lambda: -1)
    assert machine.anonymous_bytes() is None
    assert machine.available_memory() is None
    assert machine.file_system(tmp_path) is None
    assert machine.read_ahead_kib(tmp_path) is None
    assert machine.bytes_read() == -1
    monkeypatch.setattr(machine.system, "blocks_read", lambda: 3)
    assert machine.bytes_read() == 1536


def test_the_innermost_mount_counts(tmp_path, monkeypatch):
    inner = tmp_path / "in ner"
    (inner / "deep").mkdir(parents=True)
    escaped = str(inner).replace(" ", "\\040")
    (tmp_path / "mounts").write_text(f"a / ext4 rw 0 0\nb {escaped} xfs rw 0 0\nc {escaped}x tmpfs rw 0 0\n")
    (tmp_path / "self").symlink_to(tmp_path)
    monkeypatch.setattr(machine, "_PROC", tmp_path)
    assert machine.file_system(inner / "deep") == "xfs"
    assert machine.file_system(inner) == "xfs"
    assert machine.file_system(tmp_path) == "ext4"


def test_counters_are_read(tmp_path, monkeypatch):
    (tmp_path / "status").write_text("Name:\tx\nRssAnon:\t   12 kB\nRssFile:\t 1 kB\n")
    (tmp_path / "io").write_text("rchar: 1\nread_bytes: 8192\n")
    (tmp_path / "meminfo").write_text("MemTotal: 4 kB\nMemAvailable: 2 kB\n")
    (tmp_path / "self").symlink_to(tmp_path)
    monkeypatch.setattr(machine, "_PROC", tmp_path)
    assert (machine.anonymous_bytes(), machine.bytes_read(), machine.available_memory()) == (
        12288,
        8192,
        2048,
    )


def test_the_disk_is_measured_and_the_file_removed(tmp_path):
    speed = measure_device(tmp_path, size=MIB, seconds=0.2, depths=(2, 3))
    assert speed.reads_per_second > 0
    assert speed.writes_per_second > 0
    assert {speed.read_depth, speed.write_depth} <= {2, 3}
    assert list(tmp_path.iterdir()) == []


def test_without_o_direct_the_page_cache_is_used(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    speed = measure_device(tmp_path, size=MIB, seconds=0.2, depths=(2,))
    assert not speed.direct
    assert speed.reads_per_second > 0


def test_without_preadv_nothing_is_measured(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "preadv", raising=False)
    assert measure_device(tmp_path, size=MIB, seconds=0.2) is None


def test_a_failing_disk_is_an_error_and_the_file_is_removed(tmp_path, monkeypatch):
    def failing(descriptor):
        def transfer(page, offset):
            raise OSError(5, "input/output error")

        return transfer

    monkeypatch.setattr(device, "_reader", failing)
    with pytest.raises(OSError, match="input/output error"):
        measure_device(tmp_path, size=MIB, seconds=0.2, depths=(2,))
    assert list(tmp_path.iterdir()) == []


def test_the_limit_adds_reads_and_writes():
    assert DeviceSpeed(100.0, 50.0, 1, 1, True).limit(2.0) == pytest.approx(1 / (2 / 100 + 2 / 50))


@given(
    record=st.integers(1, 3000).map(lambda words: 4 * words),
    padding=st.integers(0, 300).map(lambda words: 4 * words),
    rows=st.integers(1, 5000),
    size=st.integers(1, 50),
    seed=st.integers(0, 3),
)
def test_rows_apart_share_no_page(record, padding, rows, size, seed):
    size = min(size, rows)
    stride = record + padding
    found = apart_rows(rows, record, stride, size, count=4, seed=seed)
    assert 1 <= len(found) <= 4
    chosen = np.concatenate(found)
    assert all(len(batch) == size for batch in found)
    assert len(np.unique(chosen)) == len(chosen)
    assert chosen.min() >= 0
    assert chosen.max() < rows
    if len(found) > 1 or size * (-(-(PAGE + record) // stride)) <= rows:
        pages = [set(range(row * stride // PAGE, (row * stride + record - 1) // PAGE + 1)) for row in chosen]
        assert sum(len(page) for page in pages) == len(set().union(*pages))


def test_batches_are_the_same_for_everyone():
    one, other = UniformBatches(1000, 3, 50, seed=4), UniformBatches(1000, 3, 50, seed=4)
    other.make(9)
    assert one.make(2).indices.tolist() == other.make(2).indices.tolist()
    assert one.make(2).grad.tolist() == other.make(2).grad.tolist()
    assert one.make(2).indices.tolist() != one.make(3).indices.tolist()


def test_the_whole_table_is_each_row_once():
    batches = list(whole_table(10, 2, size=4))
    assert [batch.indices.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert all(not batch.grad.any() for batch in batches)


def test_pages_that_stay_in_memory_are_reported(tmp_path, monkeypatch):
    # as on a file system in memory: dropping has no effect, and nothing is read
    monkeypatch.setattr("dsa.cli.bench.cold.bytes_read", lambda: 0)
    rows, dim = 2000, 4
    ours, naive = Ours(tmp_path / "ours", Zeros(rows, dim)), Naive(tmp_path, rows, dim)
    settings = QUICK.with_sizes(rows=rows, dim=dim, batches=(8,), directory=tmp_path)
    group = cold_group(settings, 8, ours, naive, DeviceSpeed(1e5, 1e5, 1, 1, True), [], 0.0)
    ours.close()
    naive.close()
    assert len(group.notes) == 3
    assert all("only 0.00 pages were read for a row, so this was not cold" in note for note in group.notes)
    assert "share_of_device_limit" not in group.find("dsa_sustained").details


@pytest.mark.parametrize(
    ("own", "parent", "knob"),
    [
        ("9:cpu:/x\n4:memory:/a/b\n0::/\n", "memory/a/b", "memory.limit_in_bytes"),
        ("0::/user/session\n", "user", "memory.max"),
        ("0::/\n", ".", "memory.max"),
    ],
)
def test_a_control_group_is_made_and_removed(tmp_path, own, parent, knob):
    (tmp_path / parent).mkdir(parents=True, exist_ok=True)
    with limited.control_group(12345, root=tmp_path, own=own) as group:
        assert group.parent.resolve() == (tmp_path / parent).resolve()
        assert (group / knob).read_text() == "12345"
        (group / knob).unlink()  # in a control group, these are no real files
    assert not group.exists()


def test_without_control_groups_the_reason_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(limited, "control_group", lambda limit: (_ for _ in ()).throw(PermissionError("no")))
    settings = QUICK.with_sizes(directory=tmp_path, memory_limit=MIB)
    group, reason = limited.limited_group(settings, 8, tmp_path, tmp_path, 0.0)
    assert group is None
    assert reason == "the memory limit could not be set (no): nothing was measured under it"


@pytest.fixture
def tables(tmp_path):
    """Closed tables of 500 x 4, and a directory that plays the control group."""
    Ours(tmp_path / "dsa", Zeros(500, 4)).close()
    (tmp_path / "naive").mkdir()
    Naive(tmp_path / "naive", 500, 4).close()
    (tmp_path / "group").mkdir()
    return tmp_path


@pytest.mark.parametrize("key", ["dsa", "naive"])
def test_the_child_joins_the_group_and_steps(tables, key):
    task = {"group": str(tables / "group"), "key": key, "directory": str(tables / key)}
    task |= {"rows": 500, "dim": 4, "batch": 8, "seconds": 0.0, "seed": 0}
    found = limited.run_child(task)
    assert (tables / "group" / "cgroup.procs").read_text() == str(os.getpid())
    assert len(found["times"]) == 1
    assert found["file"] == sum(path.stat().st_size for path in (tables / key).iterdir())


def test_both_are_run_in_processes_of_their_own(tables, monkeypatch):
    monkeypatch.setattr(limited, "control_group", lambda limit: nullcontext(tables / "group"))
    settings = QUICK.with_sizes(rows=500, dim=4, batches=(8,), directory=tables, memory_limit=MIB)
    group, reason = limited.limited_group(settings, 8, tables / "dsa", tables / "naive", 0.0)
    assert reason == ""
    assert [line.key for line in group.lines] == ["naive", "dsa"]
    assert group.lines[1].baseline == "naive"
    assert (tables / "group" / "cgroup.procs").read_text() != str(os.getpid())


def test_a_child_that_dies_is_told(tables, monkeypatch):
    monkeypatch.setattr(limited, "control_group", lambda limit: nullcontext(tables / "group"))
    monkeypatch.setattr(sys, "executable", "false")
    settings = QUICK.with_sizes(rows=500, dim=4, batches=(8,), directory=tables, memory_limit=MIB)
    group, reason = limited.limited_group(settings, 8, tables / "dsa", tables / "naive", 0.0)
    assert group is None
    assert reason == "the process under the memory limit ended with code 1: pass a higher one"
