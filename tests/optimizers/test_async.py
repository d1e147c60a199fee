"""The optimizer with a write queue: the bytes of a run without one, whatever the disk does, whenever it ends.

A `Disk` stands in for `MemmapBackend.write`: it holds writes until the test lets them through, makes some
fail, or delays each. The reference is a run without a queue on a healthy disk; files are compared by byte.
"""

import contextlib
import errno
import gc
import itertools
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from current_files import copy_as_killed, table_file

import dsa
import dsa.backends.writer
import dsa.state.creation
import dsa.state.state_directory
from dsa import DiskSparseRiemannianAdam, init
from dsa.backends.memmap import MemmapBackend
from dsa.errors import (
    StateClosedError,
    StateError,
    StateFailedError,
    StateLockedError,
    StateWarning,
    TrainingWarning,
)

DEADLINE = 20
ROWS = {"left": 400, "right": 90}
DIMS = {"left": 5, "right": 3}
TABLES = {"left": init.Normal(400, 5, 0.1, seed=1), "right": init.Uniform(90, 3, -0.1, 0.1, seed=2)}
DURABILITIES = ("process", "power", "none")
SMALL_RING = 8 << 10  # a few steps: the ring goes round many times, while batches wait
HEALTHY_WRITE = MemmapBackend.write

pytestmark = pytest.mark.filterwarnings("ignore:the write queue stayed full")


def zipf_batches(count, seed=0):
    """Steps over both tables, sometimes over one, with popular rows in almost every batch."""
    generator = np.random.default_rng(seed)
    batches = []
    for step in range(count):
        batch = {}
        for name in ROWS:
            if step % 5 != 3 or name == "left":
                rows = np.minimum(generator.zipf(1.2, int(generator.integers(1, 40))), ROWS[name]) - 1
                batch[name] = (rows, generator.standard_normal((len(rows), DIMS[name])).astype(np.float32))
        batches.append(batch)
    return batches


def build(path, **options):
    options = {
        "lr": 0.05,
        "k": {"left": 1.0, "right": 0.0},
        "async_writes": True,
        "allocate": "sparse",
    } | options
    return DiskSparseRiemannianAdam(TABLES, disk_dir=path, **options)


def raw(path):
    """The bytes of every table as they lie in the files."""
    return {name: table_file(path, name).read_bytes()[4096:] for name in ROWS}


def weights(optimizer):
    return {name: optimizer.read_rows(range(rows), name).numpy().tobytes() for name, rows in ROWS.items()}


class Reference:
    """The bytes that a run without a queue leaves after each of its steps."""

    def __init__(self, path, batches):
        self.path = path
        self.after = []
        with build(path, async_writes=False, durability="none") as optimizer:
            self.after.append((raw(path), weights(optimizer)))
            for batch in batches:
                optimizer.step(batch)
                self.after.append((raw(path), weights(optimizer)))

    def tables(self, steps):
        return self.after[steps][0]

    def weights(self, steps):
        return self.after[steps][1]


BATCHES = zipf_batches(40)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return Reference(tmp_path_factory.mktemp("reference"), BATCHES)


class Disk:
    """What stands between the queue and the files. Open and healthy until told otherwise."""

    def __init__(self):
        self.arrivals, self.permits, self.is_open = threading.Semaphore(0), threading.Semaphore(0), True
        self.plan = iter(())
        self.delay = self.victim = None
        self.writes = 0

    def write(self, backend, rows, records):
        self.writes += 1
        self.arrivals.release()
        if not self.is_open:
            assert self.permits.acquire(timeout=DEADLINE), "nobody let the write through"
        if self.delay is not None:
            time.sleep(self.delay)  # the disk's slowness; no test waits by it
        error = next(self.plan, None)
        if error is None and self.victim is not None and self.victim[0] is backend:
            error, self.victim = self.victim[1], None
        if error is not None:
            HEALTHY_WRITE(backend, rows[: len(rows) // 2], records[: len(rows) // 2])
            raise error
        HEALTHY_WRITE(backend, rows, records)

    def hold(self):
        self.is_open = False

    def let(self, count=1):
        self.permits.release(count)

    def open(self):
        self.is_open = True
        self.permits.release(1_000)

    def fail(self, *errors):
        """The next writes, of any table, fail with these errors; later ones succeed."""
        self.plan = iter(errors)

    def fail_for(self, optimizer, name, error):
        """The next write of one table fails."""
        self.victim = optimizer._state.tables[name].writer._backend, error

    def fail_always(self, code=errno.EIO):
        self.plan = (disk_error(code) for _ in itertools.count())

    def await_arrival(self):
        assert self.arrivals.acquire(timeout=DEADLINE), "no write came"


def disk_error(code=errno.EIO):
    return OSError(code, os.strerror(code))


@pytest.fixture
def disk(monkeypatch):
    disk = Disk()
    monkeypatch.setattr(MemmapBackend, "write", lambda backend, *batch: disk.write(backend, *batch))
    yield disk
    disk.fail()
    disk.open()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """No writer or prefetch thread outlives a test, nor its collection as garbage."""
    before = set(threading.enumerate())
    yield
    left = [
        thread
        for thread in set(threading.enumerate()) - before
        if thread.name in ("dsa-writer", "dsa-prefetch")
    ]
    if left:
        gc.collect()
    for thread in left:
        thread.join(5)
        assert not thread.is_alive(), f"{thread.name} outlives the test"


@pytest.fixture
def opened(disk, tmp_path):
    """Makes optimizers; afterwards the disk is healthy and they are closed."""
    made = []

    def make(name="state", **options):
        made.append(build(tmp_path / name, **options))
        return made[-1]

    yield make
    disk.fail()
    disk.open()
    for optimizer in made:
        with contextlib.suppress(Exception):
            optimizer.close()


class Job:
    """Runs a call in a thread; `result` returns or raises what it did, within the deadline."""

    def __init__(self, function, *arguments):
        self.outcome = None
        self.thread = threading.Thread(target=self._run, args=(function, arguments), daemon=True)
        self.thread.start()

    def _run(self, function, arguments):
        try:
            self.outcome = (function(*arguments), None)
        except BaseException as error:
            self.outcome = (None, error)

    def result(self):
        self.thread.join(DEADLINE)
        assert self.outcome is not None, "the call does not return"
        value, error = self.outcome
        if error is not None:
            raise error
        return value


def await_failure(optimizer, name="left"):
    """Wait until the queue of a table has failed; its thread tells of every change."""
    writer = optimizer._state.tables[name].writer
    condition = next(value for value in vars(writer).values() if isinstance(value, threading.Condition))
    with condition:
        assert condition.wait_for(lambda: writer.status == "failed", DEADLINE), "the queue has not failed"


def killed(path, **options):
    """Open what a process that died now would leave behind: a copy of the directory as it is."""
    copy = path.with_name(f"{path.name}-copy")
    shutil.rmtree(copy, ignore_errors=True)
    copy_as_killed(path, copy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StateWarning)
        return build(copy, resume=True, async_writes=False, **options)


# ---------------------------------------------------------------- the same bytes


@pytest.mark.parametrize(
    ("durability", "ring", "queue_size"),
    [
        *itertools.product(DURABILITIES, [SMALL_RING], [1, 150]),
        ("process", 1 << 20, 3),
        ("power", 1 << 20, 3),
    ],
)
def test_the_bytes_of_a_run_without_a_queue(
    tmp_path, disk, reference, monkeypatch, durability, ring, queue_size
):
    """The records wait in the journal's ring, which must not be used again before they are written."""
    monkeypatch.setattr(dsa.state.creation, "_RETAINING_BYTES", ring)
    disk.delay = 0.001
    options = {"durability": durability, "max_queue_size": queue_size, "put_timeout": 0.002}
    with build(tmp_path / "state", **options) as optimizer:
        for step, batch in enumerate(BATCHES, 1):
            optimizer.step(batch)
            if step % 8 == 0:
                assert weights(optimizer) == reference.weights(step)
        assert optimizer.global_step == len(BATCHES)
    assert raw(tmp_path / "state") == reference.tables(len(BATCHES))


@pytest.mark.parametrize("durability", DURABILITIES)
def test_everything_is_read_from_the_queue(tmp_path, disk, reference, durability):
    """Not one write ends before the last step: reads, scans and steps see the queue, and none waits."""
    disk.hold()
    with build(tmp_path / "state", durability=durability) as optimizer:
        for step, batch in enumerate(BATCHES, 1):
            optimizer.step(batch)
            if step % 10 == 0:
                assert weights(optimizer) == reference.weights(step)
        assert optimizer.stats()["queue_stalls"] == 0
        assert not any(raw(tmp_path / "state")["left"])
        disk.open()
    assert raw(tmp_path / "state") == reference.tables(len(BATCHES))


def program(path, **options):
    """A run that uses everything there is; return what it has read, and the bytes of its tables."""
    seen = []
    optimizer = build(path, **options)
    for step, batch in enumerate(BATCHES, 1):
        optimizer.step(batch)
        if step % 7 == 0:
            optimizer.set_curvature(1.0 + step / 10, name="left", map="log0" if step % 2 else "clip")
        if step % 9 == 0:
            seen.append(optimizer.reproject_all())
        if step % 11 == 0:
            optimizer.flush()
        if step == 20:
            optimizer.close()
            with pytest.warns(StateWarning, match="k="):
                optimizer = build(path, resume=True, **options)
        seen.append(optimizer.read_rows([3, 0, 3], "left").numpy().tobytes())
    optimizer.close()
    return seen, raw(path)


@pytest.mark.parametrize("durability", DURABILITIES)
def test_whole_table_changes_with_a_queue(tmp_path, disk, monkeypatch, durability):
    expected = program(tmp_path / "plain", async_writes=False)
    monkeypatch.setattr(dsa.state.creation, "_RETAINING_BYTES", SMALL_RING)
    disk.delay = 0.0005
    options = {"durability": durability, "max_queue_size": 4, "put_timeout": 0.001}
    assert program(tmp_path / "queued", **options) == expected


@pytest.mark.parametrize("durability", DURABILITIES)
def test_what_is_queued_is_in_the_tables_before_they_are_replaced(opened, disk, monkeypatch, durability):
    """The new tables are made of the old ones: whatever waits for these has to be there first."""
    optimizer = opened(durability=durability)
    steps(optimizer, 0, 5)
    expected = weights(optimizer)
    disk.delay = 0.01
    noted = []
    write_metadata = dsa.state.creation.write_metadata

    def note(path, metadata, held):
        noted.append((metadata.global_step, optimizer.stats()["queue_depth"]))
        write_metadata(path, metadata, held)

    monkeypatch.setattr(dsa.state.creation, "write_metadata", note)
    optimizer.set_curvature(1.0, name="left", reset_moments=True)
    assert noted == [(5, 0)], "one switch"
    assert weights(optimizer) == expected


# ---------------------------------------------------------------- what the caller does with its arrays (C44)


def spoil(indices, grads):
    indices[...] = indices.flip(0) // 2 if torch.is_tensor(indices) else indices[::-1].copy() // 2
    grads[...] = 1e6


@pytest.mark.parametrize(
    ("kind", "order", "durability"),
    [
        *itertools.product(["numpy"], ["sorted"], DURABILITIES),
        ("torch", "sorted", "process"),
        ("torch", "shuffled", "none"),
        ("int32", "sorted", "none"),
        ("numpy", "repeated", "process"),
    ],
)
def test_c44_buffers_may_be_used_again_at_once(tmp_path, disk, kind, order, durability):
    """The same id and gradient buffers for every step, and overwritten before anything is written."""
    expected = []
    for name, options in (("plain", {"async_writes": False}), ("queued", {"durability": durability})):
        ids, grads = np.arange(10, 40, 3), np.full((10, 5), 0.5, np.float32)
        if kind == "torch":
            ids, grads = torch.from_numpy(ids), torch.from_numpy(grads)
        elif kind == "int32":
            ids = ids.astype(np.int32)
        if name == "queued":
            disk.hold()
        with build(tmp_path / name, **options) as optimizer:
            for step in range(4):
                start = np.arange(10, 40, 3) + 30 * step
                if order == "shuffled":
                    start = start[::-1]
                elif order == "repeated":
                    start = start // 6 * 6
                ids[...] = torch.from_numpy(start.copy()) if kind == "torch" else start
                grads[...] = 0.5 + step
                optimizer.step({"left": (ids, grads)})
                spoil(ids, grads)
            expected.append(weights(optimizer))
            disk.open()
        expected.append(raw(tmp_path / name))
    assert expected[2] == expected[0], "what is read"
    assert expected[3] == expected[1], "what is written"


def test_buffers_may_be_used_again_after_a_step_that_failed(tmp_path, opened, disk):
    """Without a queue: a step that a full disk interrupted is completed later, with the rows it was given."""
    ids, grads = np.arange(10, 40, 3), np.full((10, 5), 0.5, np.float32)
    with build(tmp_path / "plain", async_writes=False) as plain:
        plain.step({"left": (ids, grads)})
    optimizer = opened(async_writes=False, durability="power")
    disk.fail(disk_error(errno.ENOSPC))
    with pytest.raises(OSError, match="space"):
        optimizer.step({"left": (ids, grads)})
    spoil(ids, grads)
    optimizer.flush()
    assert optimizer.global_step == 1
    optimizer.close()
    assert raw(tmp_path / "state") == raw(tmp_path / "plain")


# ---------------------------------------------------------------- a disk that fails (C37, C43)


def steps(optimizer, start, stop):
    for batch in BATCHES[start:stop]:
        optimizer.step(batch)


def fail_in_background(optimizer, disk, error):
    """Take three steps; then the write of what the left table has queued fails."""
    optimizer.step(BATCHES[0])
    optimizer.flush()
    disk.hold()
    optimizer.step(BATCHES[1])
    optimizer.step(BATCHES[2])
    disk.fail_for(optimizer, "left", error)
    disk.open()
    await_failure(optimizer)


@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_c43_c37_training_does_not_go_on_when_the_writer_has_failed(
    tmp_path, opened, disk, reference, durability, code
):
    """The error surfaces, chained, from whatever comes next and from close, again and again."""
    optimizer = opened(durability=durability)
    error = disk_error(code)
    steps(optimizer, 0, 2)
    optimizer.flush()
    disk.fail(error)
    optimizer.step({"left": BATCHES[2]["left"]})
    await_failure(optimizer)
    disk.fail_always(code)
    for _ in range(2):
        for use in (
            lambda: optimizer.step({"left": BATCHES[3]["left"]}),
            lambda: optimizer.read_rows([0], "left"),
            lambda: optimizer.reproject_all("left"),
        ):
            with pytest.raises(OSError, match="a queued write has failed") as caught:
                use()
            assert caught.value.errno == code
            assert isinstance(caught.value.__cause__, OSError)
        for use in (
            lambda: optimizer.set_curvature(2.0, name="left"),
            lambda: optimizer.flush(),
            lambda: optimizer.close(),
        ):
            with pytest.raises(OSError, match=os.strerror(code)) as caught:
                use()
            assert caught.value.errno == code
        assert optimizer.global_step == 3
        assert optimizer.stats()["writer_status"] == "failed"
    disk.fail()
    optimizer.flush()
    assert optimizer.global_step == 3
    assert optimizer.stats()["writer_status"] == "running"
    with build(tmp_path / "plain", async_writes=False) as plain:
        steps(plain, 0, 2)
        plain.step({"left": BATCHES[2]["left"]})
        for batch in BATCHES[3:]:
            plain.step(batch)
            optimizer.step(batch)
    optimizer.close()
    assert raw(tmp_path / "state") == raw(tmp_path / "plain")


def test_c37_without_a_queue_the_step_itself_fails(tmp_path, opened, disk, reference):
    """And the next; no step counts that did not happen; a mended disk takes up the one that was under way."""
    optimizer = opened(async_writes=False, durability="power")  # others change rows without a write
    steps(optimizer, 0, 2)
    disk.fail_always()
    for use in (
        lambda: steps(optimizer, 2, 3),
        lambda: steps(optimizer, 3, 4),
        lambda: optimizer.read_rows([0], "left"),
        optimizer.flush,
        optimizer.close,
    ):
        with pytest.raises(OSError, match="Input/output"):
            use()
        assert optimizer.global_step == 2
    disk.fail()
    optimizer.flush()
    assert optimizer.global_step == 3
    steps(optimizer, 3, 40)
    optimizer.close()
    assert raw(tmp_path / "state") == reference.tables(40)


@pytest.mark.parametrize("durability", DURABILITIES)
def test_nothing_goes_past_the_queue(tmp_path, opened, disk, durability):
    """Neither steps nor reads: a table behind one is not changed, or read, where its records are."""
    optimizer = opened(durability=durability)
    with build(tmp_path / "plain", async_writes=False) as plain:
        before = raw(tmp_path / "state")
        disk.hold()
        for batch in BATCHES[:2]:
            optimizer.step(batch)
            plain.step(batch)
            assert weights(optimizer) == weights(plain)
        assert raw(tmp_path / "state") == before != raw(tmp_path / "plain")
        disk.open()
        optimizer.flush()
        assert raw(tmp_path / "state") == raw(tmp_path / "plain")


@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("method", ["flush", "close"])
def test_flush_and_close_can_be_tried_until_the_disk_is_mended(
    tmp_path, opened, disk, reference, durability, method
):
    """However often it has failed. Meanwhile the directory stays ours: nobody else may open it."""
    optimizer = opened(durability=durability)
    fail_in_background(optimizer, disk, disk_error())
    disk.fail_always()
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            getattr(optimizer, method)()
        with pytest.raises(StateLockedError):
            build(tmp_path / "state", resume=True)
    disk.fail()
    getattr(optimizer, method)()
    assert raw(tmp_path / "state") == reference.tables(3)
    if method == "flush":
        assert weights(optimizer) == reference.weights(3)
        steps(optimizer, 3, 40)
        optimizer.close()
        assert raw(tmp_path / "state") == reference.tables(40)
    optimizer.close()
    with build(tmp_path / "state", resume=True) as again:
        assert again.global_step == (40 if method == "flush" else 3)


@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("method", ["flush", "close", "step"])
def test_a_failure_in_the_middle_of_a_commit_can_be_mended(
    tmp_path, opened, disk, reference, durability, method
):
    """The step itself writes, since the queue is full, and fails: journaled, but not handed to any table."""
    optimizer = opened(durability=durability, max_queue_size=1, put_timeout=0.0)
    left = [{"left": batch["left"]} for batch in BATCHES]
    disk.hold()
    optimizer.step(left[0])
    disk.await_arrival()
    optimizer.step(left[1])
    writer = optimizer._state.tables["left"].writer
    lock, arrived = writer._writing, threading.Event()

    class Announced:
        def __enter__(self):
            arrived.set()
            lock.acquire()

        def __exit__(self, *error):
            lock.release()

    writer._writing = Announced()
    job = Job(optimizer.step, left[2])
    assert arrived.wait(DEADLINE)
    disk.fail_always()
    disk.open()
    with pytest.raises(OSError, match="Input/output"):
        job.result()
    with pytest.raises(OSError, match="failed"):
        optimizer.step(left[3])
    disk.fail()
    if method == "step":
        optimizer.flush()
    else:
        getattr(optimizer, method)()
    optimizer.close()
    with build(tmp_path / "plain", async_writes=False) as plain:
        for batch in left[:3]:
            plain.step(batch)
    assert raw(tmp_path / "state") == raw(tmp_path / "plain")


def test_a_close_that_failed_gives_up_nothing(tmp_path, opened, disk, reference):
    """Not the lock, not the queues, not the mark of a directory that is in use; closing again does it all."""
    optimizer = opened()
    fail_in_background(optimizer, disk, disk_error())
    disk.fail_always()
    with pytest.raises(OSError, match="Input/output"):
        optimizer.close()
    with pytest.raises(StateLockedError):
        build(tmp_path / "state", resume=True)
    disk.fail()
    with killed(tmp_path / "state") as other:
        assert other.global_step == 3
        assert weights(other) == reference.weights(3)
    optimizer.close()
    optimizer.close()
    assert raw(tmp_path / "state") == reference.tables(3)
    with pytest.raises(StateClosedError):
        optimizer.step(BATCHES[3])
    assert dsa.state.metadata.read_metadata(tmp_path / "state").status == "closed"


def test_one_failed_table_does_not_keep_the_other_from_closing_later(tmp_path, opened, disk, reference):
    """The first table closes, the second fails: closing again must do the rest and pass over the first."""
    optimizer = opened()
    steps(optimizer, 0, 2)
    optimizer._state.tables["left"].writer.drain()
    disk.hold()
    optimizer.step({"right": BATCHES[2]["right"]})
    disk.fail(disk_error())
    disk.open()
    await_failure(optimizer, "right")
    disk.fail_always()
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            optimizer.close()
    disk.fail()
    optimizer.close()
    with build(tmp_path / "plain", async_writes=False) as plain:
        steps(plain, 0, 2)
        plain.step({"right": BATCHES[2]["right"]})
    assert raw(tmp_path / "state") == raw(tmp_path / "plain")
    with build(tmp_path / "state", resume=True) as again:
        assert again.global_step == 3


@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_sync_that_fails_ends_the_use_of_a_state_with_a_queue(
    tmp_path, opened, disk, reference, monkeypatch, durability
):
    """It is never tried again; `test_failed_syncs` has what holds with and without a queue."""
    optimizer = opened(durability=durability)
    steps(optimizer, 0, 5)
    flush, calls = MemmapBackend.flush, []

    def fail(backend):
        calls.append(1)
        if len(calls) == 1:
            raise disk_error()
        flush(backend)

    monkeypatch.setattr(MemmapBackend, "flush", fail)
    with pytest.raises(OSError, match="Input/output") as caught:
        optimizer.flush()
    assert not isinstance(caught.value, StateFailedError)
    for use in (lambda: steps(optimizer, 5, 6), optimizer.flush, lambda: weights(optimizer)):
        with pytest.raises(StateFailedError, match="close it and open it again with resume=True"):
            use()
    assert len(calls) == 1
    with pytest.raises(StateFailedError):
        optimizer.close()
    optimizer.close()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        again = build(tmp_path / "state", resume=True, durability=durability)
    assert bool([each for each in told if each.category is StateWarning]) == (durability != "power")
    done = again.global_step
    assert done == 5
    assert weights(again) == reference.weights(5)
    if durability != "none":
        steps(again, 5, 40)
    again.close()
    assert raw(tmp_path / "state") == reference.tables(40 if durability != "none" else 5)


# ---------------------------------------------------------------- a queue that is full


def test_the_warning_of_a_full_queue_points_at_the_step(opened, disk):
    optimizer = opened(max_queue_size=1, put_timeout=0.0)
    disk.delay = 0.05
    with pytest.warns(TrainingWarning, match="the write queue stayed full") as caught:
        steps(optimizer, 0, 12)
    assert [warning.filename for warning in caught] == [__file__] * len(caught)
    assert len(caught) <= 2, "once a table"
    assert optimizer.stats()["sync_fallbacks"] >= len(caught)


@pytest.mark.parametrize(
    ("options", "async_writes", "resume"),
    [
        ({"max_queue_size": 0}, True, None),
        ({"put_timeout": float("nan")}, True, None),
        ({"put_timeout": -1.0}, True, True),
        ({"max_queue_size": -1}, False, None),
    ],
)
def test_impossible_queues_are_refused_before_anything_is_made(tmp_path, options, async_writes, resume):
    path = tmp_path / "state"
    if resume:
        with build(path) as optimizer:
            steps(optimizer, 0, 1)
    before = {file.name: file.read_bytes() for file in path.iterdir()} if resume else None
    gc.collect()
    held = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    with pytest.raises(ValueError, match=next(iter(options))):
        build(path, async_writes=async_writes, resume=resume, **options)
    gc.collect()
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == held
    if resume:
        assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    with build(path, resume=resume) as optimizer:
        assert optimizer.global_step == (1 if resume else 0)


# ---------------------------------------------------------------- interrupts


class Interrupt:
    """Raises `KeyboardInterrupt` at the n-th line that the state, the queue or the journal runs."""

    FILES = frozenset(
        module.__file__ for module in (dsa.state.state_directory, dsa.backends.writer, dsa.state.journal)
    )

    def __init__(self, number):
        self.number, self.seen, self.where, self.lines = number, 0, None, {}

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, kind, error, trace):
        sys.settrace(self.before)
        return kind is KeyboardInterrupt and self.where is not None

    def _trace(self, frame, event, argument):
        if frame.f_code.co_filename not in self.FILES:
            return None
        if event == "line" and self._is_forward(frame):
            self.seen += 1
            if self.seen == self.number:
                self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace

    def _is_forward(self, frame):
        # A with block ends on its first line once more; no signal is handled there before the lock is free.
        last, self.lines[id(frame)] = self.lines.get(id(frame), 0), frame.f_lineno
        return frame.f_lineno > last


@pytest.mark.parametrize("durability", DURABILITIES)
def test_an_interrupt_at_any_line_of_a_step_leaves_whole_steps(
    tmp_path, opened, disk, reference, durability, monkeypatch
):
    """The step counts or it does not; repeated if not, the run ends with the bytes of one without interrupts.

    And if the process dies right after the next step, that step and no half of another is what is found.
    """
    monkeypatch.setattr(dsa.state.creation, "_RETAINING_BYTES", SMALL_RING)
    faults, number = [], 0
    for life in itertools.count():
        optimizer = opened(f"state-{life}", durability=durability)
        step = 0
        while step < 30:
            number += 1
            before, interrupt = optimizer.global_step, Interrupt(number)
            with interrupt:
                optimizer.step(BATCHES[step])
            if interrupt.where is None:
                break
            try:
                read = Job(weights, optimizer).result()  # settles the interrupted step, or not
                step += optimizer.global_step - before
                assert read == reference.weights(step), "what is read"
                Job(optimizer.step, BATCHES[step]).result()
                step += 1
                if durability != "none":
                    with killed(tmp_path / f"state-{life}") as other:
                        assert other.global_step == step
                        assert weights(other) == reference.weights(step), "what is recovered"
            except Exception as error:
                faults.append(f"{interrupt.where}: {error!r:.200}")
                break
        with contextlib.suppress(Exception):
            Job(optimizer.close).result()
            if not faults or interrupt.where not in faults[-1]:
                assert raw(tmp_path / f"state-{life}") == reference.tables(step)
        if interrupt.where is None:
            break
    assert number > 40
    assert not faults, "\n".join(faults)


# ---------------------------------------------------------------- ends: C45, kill -9, fork, garbage

# The disk takes nothing before the interpreter ends: what runs last of all is registered first, by dsa.
END = """
import atexit, sys, threading
import numpy as np
from dsa import DiskSparseRiemannianAdam, init
from dsa.backends.memmap import MemmapBackend

write, gate = MemmapBackend.write, threading.Event()
def held(backend, rows, records):
    assert gate.wait(120)
    write(backend, rows, records)
MemmapBackend.write = held
atexit.register(gate.set)

tables = {"left": init.Normal(400, 5, 0.1, seed=1), "right": init.Uniform(90, 3, -0.1, 0.1, seed=2)}
optimizer = DiskSparseRiemannianAdam(tables, lr=0.05, k={"left": 1.0, "right": 0.0}, disk_dir=sys.argv[1],
    async_writes=True, allocate="sparse", durability=sys.argv[2])
archive = np.load(sys.argv[3])
for step in range(20):
    batch = {name: [archive.get(f"{step} {name} {kind}") for kind in ("rows", "grads")] for name in tables}
    optimizer.step({name: pair for name, pair in batch.items() if pair[0] is not None})
optimizer.prefetch([1, 2, 3], "left")
assert optimizer.stats()["queue_depth"] > 0
print("stepped", flush=True)
"""
ENDINGS = {
    "the end of the script": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "an exception": ("raise RuntimeError('as planned')", 1),
    "an interrupt": ("raise KeyboardInterrupt", -signal.SIGINT),
}


@pytest.fixture(scope="module")
def endings(tmp_path_factory):
    """Start all scripts at once: importing torch is what takes the time."""
    path = tmp_path_factory.mktemp("endings")
    arrays = {
        f"{step} {name} {kind}": array
        for step, batch in enumerate(BATCHES[:20])
        for name in batch
        for kind, array in zip(("rows", "grads"), batch[name], strict=True)
    }
    np.savez(path / "batches.npz", **arrays)
    running = {}
    for number, (name, (last, _)) in enumerate(ENDINGS.items()):
        durability = ("process", "none")[number % 2]
        running[name] = (
            path / name,
            subprocess.Popen(
                [sys.executable, "-c", END + last, path / name, durability, path / "batches.npz"],
                env=os.environ | {"PYTHONPATH": str(Path(dsa.__file__).parents[1])},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            ),
        )
    yield running
    for _, process in running.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("ending", ENDINGS)
def test_c45_a_script_that_ends_without_close_writes_everything(endings, reference, ending):
    """No hang, its own exit code, all steps on disk without any recovery; and a recovery changes nothing."""
    path, process = endings[ending]
    printed, errors = process.communicate(timeout=120)
    assert "stepped" in printed, errors
    assert process.returncode == ENDINGS[ending][1], errors
    assert "Exception ignored" not in errors
    assert raw(path) == reference.tables(20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StateWarning)
        optimizer = build(path, resume=True)
    with optimizer:
        assert weights(optimizer) == reference.weights(20)
        assert optimizer.global_step in (20, 0)
    assert raw(path) == reference.tables(20)


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
forks = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


def child_of(function):
    """Fork a child that calls a function and ends; return its process id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException as error:
            os.write(2, f"in the child: {error!r}\n".encode())
        finally:
            os._exit(code)
    return child


def reap(child, expected):
    job = Job(os.waitpid, child, 0)
    try:
        status = job.result()[1]
    except AssertionError:
        os.kill(child, signal.SIGKILL)
        raise
    assert os.waitstatus_to_exitcode(status) == expected


@needs_fork
@forks
@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("seed", range(6))
def test_a_kill_at_a_random_step_leaves_the_last_step_or_the_next(
    tmp_path, reference, monkeypatch, durability, seed
):
    """The disk stops for ever at a random write, halfway; steps go on in the queue until the kill."""
    monkeypatch.setattr(dsa.state.creation, "_RETAINING_BYTES", (SMALL_RING, 1 << 20)[seed % 2])
    generator = np.random.default_rng(seed)
    stop_at, kill_at = int(generator.integers(0, 12)), int(generator.integers(1, 38))
    options = {"durability": durability, "max_queue_size": (2, 150)[seed % 3 == 0], "put_timeout": 0.0}
    receive, send = os.pipe()
    child = child_of(lambda: train_on_a_disk_that_stops(tmp_path / "state", options, stop_at, send))
    os.close(send)
    returned = 0
    while returned < kill_at:
        assert select.select([receive], [], [], DEADLINE)[0], "no step comes"
        told = os.read(receive, 1)[0]
        if told == STUCK:
            break
        returned = told
    os.kill(child, signal.SIGKILL)
    reap(child, -signal.SIGKILL)
    while told := os.read(receive, 1):
        returned = told[0] if told[0] != STUCK else returned
    os.close(receive)
    assert returned > 0
    with build(tmp_path / "state", resume=True, durability=durability) as optimizer:
        reached = optimizer.global_step
        assert reached in (returned, returned + 1)
        assert weights(optimizer) == reference.weights(reached)
        for batch in BATCHES[reached:]:
            optimizer.step(batch)
    assert raw(tmp_path / "state") == reference.tables(len(BATCHES))


STUCK = 255


def train_on_a_disk_that_stops(path, options, stop_at, send):
    """In a child: take steps and tell of each; tell too when one waits for the disk that has stopped."""
    number, forever = itertools.count(), threading.Event()
    stopped, waiting = threading.Event(), threading.Event()

    def write(backend, rows, records):
        if next(number) == stop_at:
            HEALTHY_WRITE(backend, rows[: len(rows) // 2], records[: len(rows) // 2])
            stopped.set()
            if waiting.is_set():
                os.write(send, bytes([STUCK]))
            forever.wait()
        HEALTHY_WRITE(backend, rows, records)

    def telling(method):
        def call(writer):
            waiting.set()
            if stopped.is_set():
                os.write(send, bytes([STUCK]))
            method(writer)
            waiting.clear()

        return call

    MemmapBackend.write = write
    for name in ("drain", "_fall_back"):
        setattr(
            dsa.backends.writer.WriteBehind, name, telling(getattr(dsa.backends.writer.WriteBehind, name))
        )
    warnings.simplefilter("ignore", TrainingWarning)
    optimizer = build(path, **options)
    for batch in BATCHES:
        optimizer.step(batch)
        os.write(send, bytes([optimizer.global_step]))
    forever.wait()


@needs_fork
@forks
def test_a_forked_child_leaves_the_queue_to_its_parent(tmp_path, opened, disk, reference):
    """While the parent's thread is in the middle of a write, and batches wait."""
    optimizer = opened()
    disk.hold()
    steps(optimizer, 0, 3)
    disk.await_arrival()

    def check():
        for use in (
            lambda: optimizer.step(BATCHES[3]),
            lambda: optimizer.read_rows([0], "left"),
            lambda: optimizer.prefetch([0], "left"),
            optimizer.flush,
        ):
            with pytest.raises(StateClosedError, match="fork"):
                use()
        optimizer.stats()
        optimizer.close()
        dsa.backends.writer._drain_at_exit()

    reap(child_of(check), 0)
    with pytest.raises(StateLockedError):
        build(tmp_path / "state", resume=True)
    disk.open()
    steps(optimizer, 3, 40)
    optimizer.close()
    assert raw(tmp_path / "state") == reference.tables(40)


@needs_fork
@forks
@pytest.mark.parametrize("async_writes", [True, False])
def test_a_child_forked_during_another_thread_s_step_can_close(opened, disk, async_writes):
    """The thread that steps holds the optimizer, and does not exist in the child."""
    durability = "process" if async_writes else "power"  # or nothing would wait for the disk
    optimizer = opened(
        async_writes=async_writes, durability=durability, max_queue_size=1, put_timeout=DEADLINE
    )
    left = [{"left": batch["left"]} for batch in BATCHES]
    disk.hold()
    job = Job(lambda: [optimizer.step(batch) for batch in left[:3]])
    disk.await_arrival()
    holding = optimizer._state.exclusive
    while holding.acquire(blocking=False):  # until the thread stands in a step that waits for the disk
        holding.release()

    def check():
        with pytest.raises(StateClosedError):
            optimizer.flush()
        optimizer.close()

    try:
        reap(child_of(check), 0)
    finally:
        disk.open()
        job.result()


def test_an_optimizer_dropped_during_a_write_never_writes_over_its_successor(tmp_path, disk, reference):
    """Whoever opens the directory next owns it: a write that is under way ends before, or not at all."""
    others = set(threading.enumerate())
    box = [build(tmp_path / "state")]
    disk.hold()
    steps(box[0], 0, 3)
    disk.await_arrival()
    threads = set(threading.enumerate()) - others
    dropping = Job(drop, box)
    dropping.thread.join(1)  # it may wait for the write
    successor = None
    with contextlib.suppress(StateLockedError):
        successor = build(tmp_path / "state", resume=True)
        disk.is_open = True
        steps(successor, 3, 40)
        successor.flush()
    disk.open()
    dropping.result()
    for thread in threads:
        thread.join(DEADLINE)
    if successor is None:
        successor = build(tmp_path / "state", resume=True)
        steps(successor, 3, 40)
    with successor:
        assert weights(successor) == reference.weights(40)
    assert raw(tmp_path / "state") == reference.tables(40)


def drop(box):
    """Collect an optimizer that nobody closed, and keep quiet about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        box.clear()
        gc.collect()


def test_threads_end_with_an_optimizer_that_nobody_closed(tmp_path, disk):
    before = set(threading.enumerate())
    box = [build(tmp_path / "state")]
    steps(box[0], 0, 3)
    box[0].prefetch([1], "left")
    threads = set(threading.enumerate()) - before
    assert sorted(thread.name for thread in threads) == ["dsa-prefetch", "dsa-writer", "dsa-writer"]
    drop(box)
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive(), thread.name


def test_closing_ends_the_threads(opened, disk):
    before = set(threading.enumerate())
    optimizer = opened()
    steps(optimizer, 0, 3)
    optimizer.prefetch([1], "left")
    threads = set(threading.enumerate()) - before
    optimizer.shutdown()
    optimizer.shutdown()
    assert sorted(thread.name for thread in threads) == ["dsa-prefetch", "dsa-writer", "dsa-writer"]
    assert not any(thread.is_alive() for thread in threads)
    assert optimizer.stats()["writer_status"] == "stopped"


def test_four_threads_on_one_optimizer(opened, disk):
    """C48 with a queue: their steps follow one another, and every row counts its own."""
    optimizer = opened(max_queue_size=2, put_timeout=0.0, lr=1e-3)
    disk.delay = 0.0005

    def train(number):
        for _ in range(25):
            optimizer.step({"left": (np.arange(number, 400, 4), np.full((100, 5), 0.1, np.float32))})

    jobs = [Job(train, number) for number in range(4)]
    for job in jobs:
        job.result()
    assert optimizer.global_step == 100
    optimizer.flush()
    table = optimizer._state.tables["left"]
    assert set(table.backend.read(np.arange(400))["t"].tolist()) == {25}


def test_an_error_that_is_not_the_system_s_surfaces_too(opened, disk):
    optimizer = opened()
    fail_in_background(optimizer, disk, RuntimeError("broken"))
    for use in (
        lambda: optimizer.step({"left": BATCHES[3]["left"], "right": BATCHES[2]["right"]}),
        lambda: weights(optimizer),
    ):
        with pytest.raises(StateError, match="broken") as caught:
            use()
        assert isinstance(caught.value.__cause__, RuntimeError)
    assert optimizer.global_step == 3
