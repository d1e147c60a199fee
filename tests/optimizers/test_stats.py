"""What the optimizer counts: exactly, in a plain dictionary, and only what has happened."""

import errno
import json
import os
import sys
import threading
import warnings

import numpy as np
import pytest
import torch

import dsa.backends.writer
from dsa import DiskSparseRiemannianAdam, init
from dsa.backends.memmap import MemmapBackend
from dsa.errors import GradientError, StateWarning
from dsa.kernels.poincare import BALL_EPS
from dsa.optimizers.update import update_in_place
from dsa.state.transactions import Transactions

DEADLINE = 20
WRITE = MemmapBackend.write
APPLY = Transactions.apply
COUNTS = {
    *("steps", "rows_read", "rows_written", "logical_bytes_read", "logical_bytes_written"),
    *("record_bytes_written", "journal_bytes_written"),
    *("overlay_rows", "queue_depth", "queue_stalls", "sync_fallbacks", "writer_status"),
    *("prefetch_rows", "prefetch_dropped_rows", "prefetch_hits"),
    *("rows_clamped", "rows_clamped_far", "longest_step"),
}


def build(path, rows=4_000, dim=64, **options):
    options = {"lr": 0.05, "k": 0.0, "allocate": "sparse"} | options
    return DiskSparseRiemannianAdam({"entity": init.Normal(rows, dim, 0.1)}, disk_dir=path, **options)


def batch(rows, dim=64, value=1.0):
    return {"entity": (rows, np.full((len(rows), dim), value, np.float32))}


class Passed:
    """Counts what really reaches the files."""

    def __init__(self, monkeypatch):
        self.rows = self.bytes = 0
        monkeypatch.setattr(
            MemmapBackend, "write", lambda backend, rows, records: self.write(backend, rows, records)
        )
        monkeypatch.setattr("dsa.optimizers.stepping.update_in_place", self.update)

    def update(self, table, rows, *rest):
        report = update_in_place(table, rows, *rest)
        if report.bad < 0:
            self.rows += len(rows)
            self.bytes += len(rows) * table.backend.schema.dtype.itemsize
        return report

    def write(self, backend, rows, records):
        self.rows += len(rows)
        self.bytes += records.nbytes
        WRITE(backend, rows, records)


@pytest.fixture
def passed(monkeypatch):
    return Passed(monkeypatch)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """No writer or prefetch thread outlives a test."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name in ("dsa-writer", "dsa-prefetch"):
            thread.join(5)
            assert not thread.is_alive(), f"{thread.name} outlives the test"


def test_a_plain_dictionary_of_the_documented_counts(tmp_path):
    with build(tmp_path) as optimizer:
        counts = optimizer.stats()
        assert type(counts) is dict
        assert set(counts) == COUNTS
        assert json.loads(json.dumps(counts)) == counts
        assert all(type(count) in (int, float, str) for count in counts.values())
        assert all(count in (0, "none") for count in counts.values())
        counts["steps"] = 99
        assert optimizer.stats()["steps"] == 0


@pytest.mark.parametrize("async_writes", [False, True])
def test_c35_logical_bytes(tmp_path, passed, async_writes):
    """100 steps of 1000 distinct rows of 64 elements: moments and counter 51.6 MB, with weights 77.2 MB."""
    generator = np.random.default_rng(0)
    with build(tmp_path, async_writes=async_writes, max_queue_size=10_000) as optimizer:
        for _ in range(100):
            optimizer.step(batch(np.sort(generator.permutation(4_000)[:1_000])))
        optimizer.flush()
        counts = optimizer.stats()
        assert counts["steps"] == 100
        assert counts["rows_read"] == counts["rows_written"] == 100_000
        weights = 100_000 * 64 * 4
        assert counts["logical_bytes_written"] - weights == 51_600_000
        assert counts["logical_bytes_read"] == counts["logical_bytes_written"] == 77_200_000
        record = optimizer._state.tables["entity"].backend.schema.dtype.itemsize
        assert counts["record_bytes_written"] == 100_000 * record
        if async_writes:
            # Batches that waited together were merged: rows of several of them reach the file once.
            assert passed.rows <= 100_000
            assert passed.bytes == passed.rows * record
        else:
            assert (passed.rows, passed.bytes) == (100_000, counts["record_bytes_written"])


@pytest.mark.parametrize("second_moment", ["coordinate", "row"])
@pytest.mark.parametrize("dim", [1, 7, 128])
def test_bytes_of_other_records(tmp_path, passed, dim, second_moment):
    with build(tmp_path, dim=dim, second_moment=second_moment) as optimizer:
        optimizer.step(batch(np.arange(100), dim))
        counts = optimizer.stats()
        row = 4 * (2 * dim + (1 if second_moment == "row" else dim) + 1)
        assert counts["logical_bytes_written"] == counts["logical_bytes_read"] == 100 * row
        assert counts["record_bytes_written"] == passed.bytes


@pytest.mark.parametrize("threads", [1, 4])
def test_counts_are_exact_whatever_the_threads(tmp_path, threads):
    """A batch is read in slices by several threads, and its queued rows too."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with build(tmp_path, rows=20_000, dim=2, async_writes=True, max_queue_size=1_000) as optimizer:
            for _ in range(30):
                optimizer.step(batch(np.arange(20_000), 2))
            counts = optimizer.stats()
            assert counts["rows_read"] == counts["rows_written"] == 600_000
            assert counts["overlay_rows"] <= 600_000
    finally:
        torch.set_num_threads(before)


def test_a_count_is_not_lost_between_two_threads(tmp_path):
    """Two readers meet while counting: the second counts while the first asks for the length of its rows."""
    with build(tmp_path) as optimizer:
        table = optimizer._state.tables["entity"]

        class Rows(np.ndarray):
            def __len__(self):
                if sys._getframe(1).f_code is dsa.state.table.read_records.__code__ and table.rows_read == 0:
                    other = threading.Thread(target=dsa.state.table.read_records, args=(table, np.arange(3)))
                    other.start()
                    other.join(DEADLINE)
                return super().__len__()

        dsa.state.table.read_records(table, np.arange(5).view(Rows))
        assert optimizer.stats()["rows_read"] == 8


def test_reads_count_distinct_rows(tmp_path):
    with build(tmp_path) as optimizer:
        optimizer.read_rows([5, 5, 7])
        counts = optimizer.stats()
        assert (counts["steps"], counts["rows_read"], counts["rows_written"]) == (0, 2, 0)
        assert counts["logical_bytes_read"] == 2 * (3 * 64 * 4 + 4)


def test_duplicates_are_one_row(tmp_path):
    with build(tmp_path) as optimizer:
        optimizer.step(batch(np.array([3, 1, 3, 3])))
        assert optimizer.stats()["rows_written"] == 2


def test_empty_batches_and_several_tables(tmp_path):
    tables = {"left": init.Zeros(10, 2), "right": init.Zeros(10, 3)}
    with DiskSparseRiemannianAdam(tables, lr=0.1, k=0.0, disk_dir=tmp_path, allocate="sparse") as optimizer:
        optimizer.step(
            {"left": ([1, 2], np.ones((2, 2), np.float32)), "right": ([], np.ones((0, 3), np.float32))}
        )
        optimizer.step({"right": ([4], np.ones((1, 3), np.float32))})
        counts = optimizer.stats()
        assert (counts["steps"], counts["rows_written"]) == (2, 3)
        assert counts["logical_bytes_written"] == 2 * (3 * 2 * 4 + 4) + (3 * 3 * 4 + 4)


def test_a_refused_step_writes_nothing(tmp_path, passed):
    with build(tmp_path) as optimizer:
        optimizer.step(batch(np.arange(10)))
        before = optimizer.stats()
        with pytest.raises(GradientError):
            optimizer.step(batch(np.arange(10), value=np.inf))
        with pytest.raises(IndexError):
            optimizer.step(batch(np.array([4_000])))
        after = optimizer.stats()
        assert {**after, "rows_read": 0, "logical_bytes_read": 0} == {
            **before,
            "rows_read": 0,
            "logical_bytes_read": 0,
        }
        assert passed.rows == 10


def test_a_step_that_is_completed_later_counts_once(tmp_path, monkeypatch):
    failures = iter([OSError(errno.EIO, "the disk is gone")])

    def apply(transactions):
        error = next(failures, None)
        if error is not None:
            raise error
        APPLY(transactions)

    with build(tmp_path) as optimizer:
        monkeypatch.setattr(Transactions, "apply", apply)
        with pytest.raises(OSError, match="gone"):
            optimizer.step(batch(np.arange(10)))
        assert optimizer.stats()["steps"] == 0
        optimizer.flush()
        optimizer.step(batch(np.arange(10)))
        counts = optimizer.stats()
        assert (counts["steps"], counts["rows_written"]) == (2, 20)


def test_whole_table_changes_count_their_rows(tmp_path, passed):
    with build(tmp_path, rows=500, dim=2, k=1.0) as optimizer:
        optimizer.step(batch(np.arange(300), 2, 0.01))
        assert optimizer.reproject_all() == 0
        assert optimizer.stats()["rows_written"] == 300
        optimizer.set_curvature(2.0)
        assert optimizer.stats()["rows_written"] == passed.rows == 600
        assert optimizer.stats()["steps"] == 1


@pytest.mark.parametrize("durability", ["process", "power", "none"])
def test_journal_bytes(tmp_path, durability):
    """The rows and records of every step, with less than 512 bytes around them; nothing without a journal."""
    with build(tmp_path, durability=durability) as optimizer:
        record = optimizer._state.tables["entity"].backend.schema.dtype.itemsize
        start = optimizer.stats()["journal_bytes_written"]
        for _ in range(10):
            optimizer.step(batch(np.arange(100)))
        written = optimizer.stats()["journal_bytes_written"] - start
        if durability == "none":
            assert written == 0
        else:
            checksum = 4 if durability == "process" else 0  # of what each record was
            payload = 10 * 100 * (8 + record + checksum)
            assert payload < written < payload + 10 * 512


def test_counts_start_again_with_the_optimizer(tmp_path):
    with build(tmp_path) as optimizer:
        optimizer.step(batch(np.arange(100)))
    with build(tmp_path, resume=True) as optimizer:
        assert optimizer.global_step == 1
        assert all(count in (0, "none") for count in optimizer.stats().values())
        optimizer.step(batch(np.arange(10)))
        assert optimizer.stats()["steps"] == 1


def test_counts_can_be_read_after_close(tmp_path):
    with build(tmp_path, async_writes=True) as optimizer:
        optimizer.step(batch(np.arange(100)))
    counts = optimizer.stats()
    assert (counts["steps"], counts["rows_written"], counts["queue_depth"]) == (1, 100, 0)
    assert counts["writer_status"] == "stopped"


# ---------------------------------------------------------------- the queue


class Gate:
    """Holds the writes to the files until it is opened."""

    def __init__(self, monkeypatch):
        self.arrived, self.event, self.error = threading.Semaphore(0), threading.Event(), None
        monkeypatch.setattr(MemmapBackend, "write", lambda *batch: self.write(*batch))

    def write(self, backend, rows, records):
        self.arrived.release()
        assert self.event.wait(DEADLINE)
        error, self.error = self.error, None
        if error is not None:
            raise error
        WRITE(backend, rows, records)


def test_the_queue_s_counts(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    optimizer = build(tmp_path, dim=2, async_writes=True, max_queue_size=3, put_timeout=0.0)
    optimizer.step(batch(np.arange(0, 10), 2))
    assert gate.arrived.acquire(timeout=DEADLINE)
    for start in (5, 100, 200):
        optimizer.step(batch(np.arange(start, start + 10), 2))
    counts = optimizer.stats()
    assert counts["writer_status"] == "running"
    assert (counts["queue_depth"], counts["queue_stalls"], counts["sync_fallbacks"]) == (4, 0, 0)
    assert counts["overlay_rows"] == 5
    assert counts["rows_written"] == 40, "rows that a step has handed over count, wherever they are"
    opening = threading.Timer(0.0, gate.event.set)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dsa.errors.TrainingWarning)
        stepping = threading.Thread(target=optimizer.step, args=(batch(np.arange(300, 310), 2),))
        stepping.start()
        opening.start()
        stepping.join(DEADLINE)
    assert not stepping.is_alive()
    optimizer.flush()
    counts = optimizer.stats()
    assert (counts["queue_depth"], counts["steps"]) == (0, 5)
    assert counts["sync_fallbacks"] <= counts["queue_stalls"] <= 1
    optimizer.close()


def test_a_failed_queue_shows(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    gate.error = OSError(errno.EIO, os.strerror(errno.EIO))
    optimizer = build(tmp_path, dim=2, async_writes=True)
    writer = optimizer._state.tables["entity"].writer
    condition = next(value for value in vars(writer).values() if isinstance(value, threading.Condition))
    optimizer.step(batch(np.arange(10), 2))
    gate.event.set()
    with condition:
        assert condition.wait_for(lambda: writer.status == "failed", DEADLINE)
    counts = optimizer.stats()
    assert (counts["writer_status"], counts["queue_depth"]) == ("failed", 1)
    optimizer.flush()
    assert optimizer.stats()["writer_status"] == "running"
    optimizer.close()


# ---------------------------------------------------------------- the ball


def test_rows_on_the_clamp_and_the_longest_step(tmp_path):
    """Adam's first step moves every coordinate by the rate; its length at the origin is 2 * lr * sqrt(D)."""
    lr, dim = 0.01, 4
    tables = {"ball": init.Zeros(50, dim), "flat": init.Zeros(50, dim)}
    with DiskSparseRiemannianAdam(
        tables,
        lr=lr,
        k={"ball": 1.0, "flat": 0.0},
        disk_dir=tmp_path,
        allocate="sparse",
        second_moment="coordinate",
    ) as optimizer:
        grad = np.ones((20, dim), np.float32)
        optimizer.step({"flat": (np.arange(20), 1e6 * grad)})
        assert optimizer.stats()["longest_step"] == 0.0
        optimizer.step({"ball": (np.arange(20), grad), "flat": (np.arange(20), grad)})
        counts = optimizer.stats()
        assert counts["longest_step"] == pytest.approx(2 * lr * np.sqrt(dim), rel=1e-5)
        assert (counts["rows_clamped"], counts["rows_clamped_far"]) == (0, 0)
        optimizer.param_groups[0]["lr"] = 50.0
        optimizer.step({"ball": (np.arange(30, 37), grad[:7])})
        counts = optimizer.stats()
        assert counts["longest_step"] == pytest.approx(2 * 50.0 * np.sqrt(dim), rel=1e-5)
        assert (counts["rows_clamped"], counts["rows_clamped_far"]) == (7, 7)
        norms = np.linalg.norm(optimizer.read_rows(range(50), "ball").numpy(), axis=1)
        assert (norms > 1 - 2 * BALL_EPS).sum() == 7
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step({"ball": (np.arange(20), grad)})
        assert optimizer.stats()["longest_step"] == counts["longest_step"], (
            "the longest since the optimizer was built"
        )


def test_the_first_step_after_reopening_counts_alone(tmp_path):
    with build(tmp_path, rows=10, dim=2, k=1.0, lr=1.0) as optimizer:
        optimizer.step(batch(np.arange(10), 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StateWarning)
        optimizer = build(tmp_path, rows=10, dim=2, k=1.0, lr=1e-4, resume=True)
    with optimizer:
        optimizer.step(batch(np.arange(10), 2))
        assert 0.0 < optimizer.stats()["longest_step"] < 0.1
