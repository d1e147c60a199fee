"""A state without a journal whose process was killed: its rows tell how many steps there were."""

import re

import numpy as np
import pytest
from current_files import table_file

import dsa
from dsa import DiskSparseRiemannianAdam, init
from dsa.backends import Zarr
from dsa.backends.memmap import MemmapBackend
from dsa.errors import StateWarning

GRAD = np.ones((4, 3), np.float32)
BACKENDS = {"memmap": "memmap", "zarr": Zarr(), "compressed": Zarr(compression="zstd")}
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def build(path, backend="memmap", rows=400, **options):
    tables = {"left": init.Normal(rows, 3, 0.1, seed=1), "right": init.Normal(30, 3, 0.1, seed=2)}
    options = {"durability": "none", "allocate": "sparse"} | options
    return DiskSparseRiemannianAdam(
        tables, lr=0.1, k=0.0, disk_dir=path, backend=BACKENDS[backend], **options
    )


def step(optimizer, *names):
    optimizer.step({name: (np.arange(4), GRAD) for name in names or ("left", "right")})


def killed(path, steps, *names, **options):
    """Leave what a process leaves that flushed after two steps, and died after so many more."""
    optimizer = build(path, **options)
    for _ in range(2):
        step(optimizer)
    optimizer.flush()
    for _ in range(steps):
        step(optimizer, *names)
    for table in optimizer._state.tables.values():
        if table.writer is not None:
            table.writer.drain()
    optimizer._state.abandon()


def reopened(path, **options):
    with pytest.warns(StateWarning, match="has no journal") as caught:
        optimizer = build(path, resume=True, **options)
    (text,) = [str(each.message) for each in caught]
    found = re.search(
        r"whole up to step (\d+); its rows, which took \d+\.\d s to read, tell of steps up to (\d+), "
        r"and those may be there in part; (\d+) rows are torn",
        text,
    )
    assert "import a checkpoint if that will not do, and see durability='process'" in text
    return optimizer, [int(each) for each in found.groups()], text


@every_backend
def test_the_count_is_that_of_the_newest_row(tmp_path, backend):
    killed(tmp_path, 5, backend=backend)
    optimizer, numbers, _ = reopened(tmp_path, backend=backend)
    with optimizer:
        assert numbers == [2, 7, 0]
        assert optimizer.global_step == 7
        assert [table.steps for table in optimizer._state.tables.values()] == [7, 7]
        step(optimizer)
        assert optimizer.global_step == 8
    assert dsa.verify(tmp_path).ok
    with build(tmp_path, backend=backend, resume=True) as optimizer:
        assert optimizer.global_step == 8


def test_it_goes_on_as_a_run_that_was_not_killed(tmp_path):
    """The correction of the bias, too, is that of a later step: it counts the steps of the table."""
    options = {"bias_correction": "parameter"}
    killed(tmp_path / "killed", 30, **options)
    optimizer, _, _ = reopened(tmp_path / "killed", **options)
    with optimizer, build(tmp_path / "plain", **options) as plain:
        for _ in range(32):
            step(plain)
        for _ in range(3):
            step(optimizer)
            step(plain)
        for name in ("left", "right"):
            rows = np.arange(30)
            assert (optimizer.read_rows(rows, name).numpy() == plain.read_rows(rows, name).numpy()).all()


def test_a_table_that_took_no_part_keeps_its_steps(tmp_path):
    killed(tmp_path, 5, "left")
    optimizer, numbers, _ = reopened(tmp_path)
    with optimizer:
        assert numbers[1] == 7
        assert [table.steps for table in optimizer._state.tables.values()] == [7, 2]


def test_a_step_that_left_no_row_is_not_counted(tmp_path):
    killed(tmp_path, 0)
    optimizer, numbers, _ = reopened(tmp_path)
    with optimizer:
        assert numbers == [2, 2, 0]
        assert optimizer.global_step == 2


def test_rows_that_are_torn_are_told_and_don_t_count(tmp_path):
    killed(tmp_path, 3, "left")
    file = table_file(tmp_path, "left")
    raw = bytearray(file.read_bytes())
    raw[4096 + 8] ^= 1
    file.write_bytes(raw)
    optimizer, numbers, text = reopened(tmp_path)
    with optimizer:
        assert numbers == [2, 5, 1]
        assert f"1 rows are torn and can't be used: `dsa repair {tmp_path}` lists and resets them" in text


def test_a_closed_state_is_not_read(tmp_path, monkeypatch):
    build(tmp_path).close()

    def scan(*given):
        raise AssertionError("a whole table is read")

    monkeypatch.setattr(MemmapBackend, "scan", scan)
    build(tmp_path, resume=True).close()


def test_rows_that_were_never_written_are_not_read(tmp_path, monkeypatch):
    killed(tmp_path, 1, rows=1_000_000)
    scan, read = MemmapBackend.scan, []

    def noting(backend, start, stop):
        read.append(stop - start)
        return scan(backend, start, stop)

    monkeypatch.setattr(MemmapBackend, "scan", noting)
    optimizer, numbers, _ = reopened(tmp_path, rows=1_000_000)
    optimizer.close()
    assert numbers == [2, 3, 0]
    assert sum(read) < 30_000


def test_verify_says_what_is_known_before_the_opening(tmp_path):
    killed(tmp_path, 5)
    found = dsa.verify(tmp_path)
    assert found.ok
    (remark,) = found.remarks
    assert "of those after step 2 only its rows tell; the next opening counts them" in remark
    repaired = dsa.repair(tmp_path)
    assert repaired.global_step == 7
    with build(tmp_path, resume=True) as optimizer:
        assert [table.steps for table in optimizer._state.tables.values()] == [7, 7]
