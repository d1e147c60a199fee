"""The write queue when the disk is slow, fails, or is interrupted: gates, and a deadline for every wait.

The backend inside is a memory backend behind a `Gate`, which holds each write until the test lets it through,
and `Faults`, which make chosen writes fail. What every test comes down to: no record is lost, none is older
than it should be, and no error is kept from the caller.
"""

import contextlib
import dis
import errno
import gc
import itertools
import math
import os
import subprocess
import sys
import threading
import warnings
import weakref
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import dsa
import dsa.backends.writer
import dsa.kernels.row_index
from dsa.backends.memory import MemoryBackend
from dsa.backends.writer import WriteBehind
from dsa.errors import StateClosedError, StateError, TrainingWarning
from dsa.schema import adam_schema
from dsa.testing import assert_records_equal, random_records

DEADLINE = 20
ROWS = 10_000  # three blocks of a memory backend's scan
SCHEMA = adam_schema(2)
ALL = np.arange(ROWS)
STAYED_FULL = "the write queue stayed full"


class Around:
    """A backend around another that changes nothing."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Gate(Around):
    """Holds each write until `let` has allowed so many, or `open` all."""

    def __init__(self, inner):
        super().__init__(inner)
        self.arrivals, self.permits, self.is_open = threading.Semaphore(0), threading.Semaphore(0), False
        self.writes = []

    def write(self, rows, records):
        self.writes.append((rows, records))
        self.arrivals.release()
        if not self.is_open:
            assert self.permits.acquire(timeout=DEADLINE), "nobody let the write through"
        self.inner.write(rows, records)

    def let(self, count=1):
        self.permits.release(count)

    def open(self):
        self.is_open = True
        self.permits.release(1_000)

    def await_arrival(self):
        """Return once one more write stands before the gate, or has passed it."""
        assert self.arrivals.acquire(timeout=DEADLINE), "no write came"


class Faults(Around):
    """Makes chosen writes fail, halfway through their rows; a write may be given None, for success."""

    def __init__(self, inner):
        super().__init__(inner)
        self.plan = iter(())

    def write(self, rows, records):
        error = next(self.plan, None)
        if error is not None:
            self.inner.write(rows[: len(rows) // 2], records[: len(rows) // 2])
            raise error
        self.inner.write(rows, records)


class Memory(Around):
    """Notes what is asked of a memory backend, in order."""

    def __init__(self, inner):
        super().__init__(inner)
        self.calls = []

    def write(self, rows, records):
        self.inner.write(rows, records)
        self.calls.append("write")

    def flush(self):
        self.calls.append("flush")

    def close(self):
        self.calls.append("close")


class Setting:
    """A queue, what stands behind it, and the model that it must agree with."""

    def __init__(self, **options):
        self.memory = Memory(MemoryBackend(ROWS, SCHEMA))
        self.faults = Faults(self.memory)
        self.gate = Gate(self.faults)
        self.model = MemoryBackend(ROWS, SCHEMA)
        self.seeds = itertools.count()
        self.queue = WriteBehind(self.gate, **options)

    def write(self, *rows):
        """Write random records, to the model only when the queue has taken them."""
        rows = np.array(rows, np.int64) if len(rows) != 1 or np.isscalar(rows[0]) else np.asarray(rows[0])
        records = random_records(SCHEMA, len(rows), next(self.seeds))
        self.queue.write(rows, records.copy())
        self.model.write(rows, records)

    def fail(self, *errors):
        """The next writes fail with these errors, or succeed for None; later ones succeed."""
        self.faults.plan = iter(errors)

    def await_failure(self):
        condition = condition_of(self.queue)
        with condition:
            assert condition.wait_for(lambda: self.queue.status == "failed", DEADLINE)

    def await_empty(self):
        condition = condition_of(self.queue)
        with condition:
            assert condition.wait_for(lambda: self.queue.queued == 0, DEADLINE)

    def failed(self, error, *rows):
        """Let the thread fail once, with batches that wait behind the failing one."""
        self.fail(error)
        self.write(0, 1, 2, 3)
        self.gate.await_arrival()
        for more in rows:
            self.write(*more)
        self.gate.let()
        self.await_failure()

    def check(self):
        """What is read is what was written."""
        assert_records_equal(self.queue.read(ALL), self.model.read(ALL))

    def check_written(self):
        """What the backend holds is what was written."""
        assert self.queue.queued == 0
        assert_records_equal(self.memory.read(ALL), self.model.read(ALL))


def condition_of(queue):
    """Return the condition that the threads of a queue wait on."""
    return next(value for value in vars(queue).values() if isinstance(value, threading.Condition))


def disk_error(code=errno.EIO):
    return OSError(code, os.strerror(code))


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


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """No writer thread outlives a test, nor its collection as garbage."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in set(threading.enumerate()) - before if thread.name == "dsa-writer"]
    if left:
        gc.collect()
    for thread in left:
        thread.join(5)
        assert not thread.is_alive(), "a writer thread outlives the test"


@pytest.fixture
def make():
    """Makes settings; afterwards their gates open, the faults end and the queues close."""
    made = []

    def make(**options):
        made.append(Setting(**options))
        return made[-1]

    yield make
    for setting in made:
        setting.fail()
        setting.gate.open()
        with contextlib.suppress(Exception):
            setting.queue.close()


# ---------------------------------------------------------------- queueing, merging, overlay


def test_a_write_waits_for_nobody_and_is_read_from_the_queue(make):
    setting = make()
    setting.write(3, 8)
    setting.gate.await_arrival()
    setting.write(8, 9_999)
    assert setting.queue.queued == 2
    setting.check()
    assert setting.queue.overlay_rows == 3
    assert not setting.memory.read(ALL).view(np.uint8).any()
    setting.gate.open()
    setting.queue.flush()
    setting.check_written()


def test_an_array_handed_over_is_not_copied(make):
    setting = make()
    rows, records = np.array([1, 5]), random_records(SCHEMA, 2, 0)
    setting.queue.write(rows, records)
    setting.gate.await_arrival()
    assert np.shares_memory(setting.gate.writes[0][1], records)


def test_a_read_owns_its_memory(make):
    setting = make()
    setting.write(4)
    setting.queue.read(np.array([4])).view(np.uint8)[...] ^= 0xFF
    given = np.empty(2, SCHEMA.dtype)
    assert setting.queue.read(np.array([3, 4]), given) is given
    assert_records_equal(given, setting.model.read(np.array([3, 4])))
    setting.check()


def test_batches_that_wait_are_merged_and_sorted(make):
    """One write for all that waited behind the first: rows once each, in order, the last record of each."""
    setting = make()
    setting.write(5_000)
    setting.gate.await_arrival()
    for rows in ((7, 9_000), (3, 9_000), (), (0, 3, 7), (9_999,)):
        setting.write(*rows)
    setting.gate.open()
    setting.queue.flush()
    assert [rows.tolist() for rows, _ in setting.gate.writes] == [[5_000], [0, 3, 7, 9_000, 9_999]]
    assert all(records.flags.c_contiguous for _, records in setting.gate.writes)
    setting.check_written()


def test_hundreds_of_batches_that_overlap(make):
    setting = make(max_queue_size=1_000)
    generator = np.random.default_rng(0)
    for _ in range(400):
        setting.write(np.unique(generator.zipf(1.3, 20) % ROWS))
    setting.check()
    setting.gate.open()
    setting.queue.flush()
    assert all((np.diff(rows) > 0).all() for rows, _ in setting.gate.writes)
    assert len(setting.gate.writes) < 20
    setting.check_written()


def test_no_read_or_write_waits_for_a_slow_disk(make):
    """What draining on conflict can't do: with popular ids every batch meets the last, and no write ends."""
    setting = make(max_queue_size=60)
    generator = np.random.default_rng(1)
    for _ in range(60):
        rows = np.unique(np.minimum(generator.zipf(1.05, 300), ROWS) - 1)
        assert_records_equal(setting.queue.read(rows), setting.model.read(rows))
        setting.write(rows)
    assert len(setting.memory.calls) == 0
    assert setting.queue.stalls == 0
    assert setting.queue.overlay_rows > 0
    setting.check()


def test_empty_batches_are_not_queued(make):
    setting = make()
    setting.write()
    assert setting.queue.queued == 0
    assert len(setting.queue.read(np.empty(0, np.int64))) == 0


def test_a_flush_comes_after_every_write(make):
    setting = make()
    for row in range(5):
        setting.write(row)
    job = Job(setting.queue.flush)
    setting.gate.open()
    job.result()
    assert setting.memory.calls[-1] == "flush"
    assert "flush" not in setting.memory.calls[:-1]
    setting.check_written()


# ---------------------------------------------------------------- reads and scans while the queue moves


class Moving(Around):
    """Calls a function of the test's before and after each read and each block of a scan."""

    def __init__(self, inner):
        super().__init__(inner)
        self.before = self.after = lambda: None

    def read(self, rows, out=None):
        self.before()
        records = self.inner.read(rows, out)
        self.after()
        return records

    def scan(self, start, stop):
        blocks = self.inner.scan(start, stop)
        while True:
            self.before()
            block = next(blocks, None)
            self.after()
            if block is None:
                return
            yield block


@pytest.fixture
def moving(make):
    setting = make()
    setting.moving = Moving(setting.gate)
    setting.queue._backend = setting.moving
    return setting


def drained(setting):
    """Return a function that lets everything queued be written, once, and returns when it is."""
    todo = iter([None])

    def drain():
        for _ in todo:
            setting.gate.open()
            setting.await_empty()

    return drain


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_batch_ends_during_a_read(moving, moment):
    """Between looking into the queue and reading the backend, or between that and the overlay."""
    moving.write(1, 2, 3)
    moving.gate.await_arrival()
    moving.write(2, 7)
    setattr(moving.moving, moment, drained(moving))
    moving.check()
    moving.check_written()
    moving.check()


def test_a_read_never_shows_rows_that_are_being_written(moving):
    """The backend may return any mixture for them: here it returns other bytes altogether."""
    moving.write(1, 2, 3)
    moving.gate.await_arrival()
    honest = moving.moving.read

    def torn(rows, out=None):
        records = honest(rows, out)
        records[np.isin(rows, [1, 2, 3])] = np.frombuffer(bytes([0xA5]) * SCHEMA.dtype.itemsize, SCHEMA.dtype)
        return records

    moving.moving.read = torn
    moving.check()
    found = moving.queue.read(np.array([2, 5]))
    assert_records_equal(found, moving.model.read(np.array([2, 5])))


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("block", range(4))
def test_a_drain_during_a_scan(moving, moment, block):
    moving.write(*range(0, ROWS, 3))
    moving.gate.await_arrival()
    moving.write(*range(0, ROWS, 5))
    drain, number = drained(moving), itertools.count()
    setattr(moving.moving, moment, lambda: drain() if next(number) == block else None)
    done = 0
    for first, records in moving.queue.scan(0, ROWS):
        assert first == done
        assert_records_equal(records, moving.model.read(np.arange(first, first + len(records))))
        done += len(records)
    assert done == ROWS
    moving.check_written()


def test_writes_between_the_blocks_of_a_scan(make):
    """With nothing written meanwhile, and with everything written meanwhile."""
    for let in (False, True):
        setting = make()
        setting.write(ALL[::2])
        setting.gate.await_arrival()
        if let:
            setting.gate.open()
        for number, (first, records) in enumerate(setting.queue.scan(0, ROWS)):
            assert_records_equal(records, setting.model.read(np.arange(first, first + len(records))))
            setting.write(ALL[number::3])
        setting.check()


def test_readers_beside_the_writer_thread(make):
    """Rows that change are read by their owner, the others by three more threads, while the thread drains."""
    setting = make(max_queue_size=3, put_timeout=DEADLINE)
    setting.gate.open()
    moved, still = ALL[::2], ALL[1::2]
    setting.write(still)
    expected, barrier = setting.model.read(still), threading.Barrier(4, timeout=DEADLINE)

    def read():
        barrier.wait()
        for _ in range(50):
            assert_records_equal(setting.queue.read(still), expected)

    readers = [Job(read) for _ in range(3)]
    barrier.wait()
    generator = np.random.default_rng(2)
    for _ in range(100):
        rows = np.unique(generator.choice(moved, 200))
        setting.write(rows)
        assert_records_equal(setting.queue.read(moved), setting.model.read(moved))
    for reader in readers:
        reader.result()
    setting.queue.drain()
    setting.check_written()


# ---------------------------------------------------------------- a full queue


def full(make, put_timeout):
    """A queue of one whose thread stands before the gate, with one more batch waiting."""
    setting = make(max_queue_size=1, put_timeout=put_timeout)
    setting.write(1, 2)
    setting.gate.await_arrival()
    setting.write(2, 3)
    return setting


def stalled(setting):
    """Write in a thread, and return its job when it waits for room."""
    condition, arrived = condition_of(setting.queue), threading.Event()
    wait_for = condition.wait_for
    condition.wait_for = lambda *arguments: (arrived.set(), wait_for(*arguments))[1]
    job = Job(setting.write, 3, 4)
    assert arrived.wait(DEADLINE)
    del condition.wait_for
    return job


def at_the_disk(setting, function, *arguments):
    """Call a function in a thread, and return its job when it waits for the thread that is writing."""
    lock, arrived = setting.queue._writing, threading.Event()

    class Announced:
        def __enter__(self):
            arrived.set()
            lock.acquire()

        def __exit__(self, *error):
            lock.release()

    setting.queue._writing = Announced()
    job = Job(function, *arguments)
    assert arrived.wait(DEADLINE)
    setting.queue._writing = lock
    return job


def test_room_in_time_is_a_stall_and_no_fallback(make):
    setting = full(make, DEADLINE)
    job = stalled(setting)
    setting.gate.open()
    job.result()
    setting.queue.flush()
    setting.check_written()
    assert (setting.queue.stalls, setting.queue.sync_fallbacks) == (1, 0)


def test_no_timeout_means_no_wait_but_for_the_disk(make):
    """The caller writes what is older than its batch, in order; the warning comes once."""
    setting = full(make, 0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job = at_the_disk(setting, setting.write, 3, 4)
        setting.gate.let(2)
        job.result()
    (warning,) = caught
    assert warning.category is TrainingWarning
    assert STAYED_FULL in str(warning.message)
    assert (setting.queue.stalls, setting.queue.sync_fallbacks) == (1, 1)
    setting.check()
    with warnings.catch_warnings(record=True) as more:
        setting.gate.open()
        for row in range(50):
            setting.write(row, row + 1)
    setting.queue.flush()
    setting.check_written()
    assert not more
    firsts = [rows[0] for rows, _ in setting.gate.writes]
    assert firsts[:3] == [1, 2, 3]


def test_a_fallback_writes_in_order(make):
    """Every batch names row 0: whoever writes it, the last one wins and no older one comes after it."""
    setting = make(max_queue_size=2, put_timeout=0.0)
    setting.gate.open()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainingWarning)
        for row in range(1, 500):
            setting.write(0, row)
            assert setting.queue.queued <= 2 + dsa.backends.writer._MERGED_BATCHES
    setting.queue.drain()
    setting.check_written()


def test_a_warning_that_is_an_error_loses_nothing(make):
    """The write is then refused before anything is queued, and works when there is room."""
    setting = full(make, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrainingWarning)
        with pytest.raises(TrainingWarning, match=STAYED_FULL):
            setting.write(3, 4)
    setting.check()
    setting.gate.open()
    setting.await_empty()
    setting.write(3, 4)
    setting.queue.flush()
    setting.check_written()


def test_a_failure_ends_the_wait_for_room(make):
    setting = full(make, DEADLINE)
    setting.fail(disk_error())
    job = stalled(setting)
    setting.gate.let()
    with pytest.raises(OSError, match="a queued write has failed"):
        job.result()
    assert setting.queue.queued == 2
    setting.gate.open()
    setting.queue.flush()
    setting.check_written()


def test_a_fallback_that_fails_raises_and_queues_nothing(make):
    setting = full(make, 0.0)
    setting.fail(disk_error(), disk_error())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainingWarning)
        job = at_the_disk(setting, setting.write, 5)
        setting.gate.let(2)
        with pytest.raises(OSError, match="Input/output"):
            job.result()
    assert setting.queue.status == "failed"
    assert setting.queue.queued == 2
    setting.gate.open()
    setting.queue.flush()
    setting.check_written()


@pytest.mark.parametrize("put_timeout", [1e30, math.inf])
def test_waiting_for_ever_is_allowed(make, put_timeout):
    setting = full(make, put_timeout)
    job = stalled(setting)
    setting.gate.open()
    job.result()
    setting.queue.flush()
    setting.check_written()
    assert setting.queue.sync_fallbacks == 0


@pytest.mark.parametrize(
    "options",
    [{"max_queue_size": 0}, {"max_queue_size": -1}, {"put_timeout": -0.1}, {"put_timeout": math.nan}],
)
def test_sizes_and_times_are_checked(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        WriteBehind(MemoryBackend(3, SCHEMA), **options)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_an_error_of_the_thread_is_raised_by_the_next_call(make, code):
    setting, error = make(), disk_error(code)
    setting.failed(error, (2, 7))
    held = setting.model.read(ALL)
    for use in (
        lambda: setting.queue.read(ALL),
        lambda: setting.write(1),
        lambda: next(setting.queue.scan(0, ROWS)),
    ):
        for _ in range(2):
            with pytest.raises(OSError, match=r"a queued write has failed.*kept.*flush") as caught:
                use()
            assert caught.value.errno == code
            assert caught.value.__cause__ is error
    assert setting.queue.status == "failed"
    assert setting.queue.queued == 2
    assert len(setting.gate.writes) == 1, "a failed queue must not write behind the caller's back"
    assert_records_equal(setting.model.read(ALL), held)


def test_an_error_that_is_not_the_system_s(make):
    setting = make()
    setting.failed(RuntimeError("broken"))
    with pytest.raises(StateError, match=r"broken.*flush") as caught:
        setting.write(1)
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("method", ["drain", "flush", "close"])
def test_a_retry_that_fails_raises_again_and_one_that_works_clears_the_error(make, method):
    setting = make()
    setting.failed(disk_error(), (2, 7), (3, 9_999))
    setting.gate.open()
    for attempt in (disk_error(errno.ENOSPC), disk_error(errno.EDQUOT)):
        setting.fail(attempt)
        with pytest.raises(OSError, match=os.strerror(attempt.errno)):
            getattr(setting.queue, method)()
        assert setting.queue.status == "failed"
        assert setting.queue.queued == 3
        assert "close" not in setting.memory.calls
        with pytest.raises(OSError, match="a queued write has failed"):
            setting.queue.read(ALL)
    getattr(setting.queue, method)()
    setting.check_written()
    assert setting.queue.status == ("stopped" if method == "close" else "running")
    if method != "close":
        setting.check()
        setting.write(5)
        setting.queue.flush()
        setting.check_written()


def test_a_newer_batch_of_the_same_rows_wins_over_the_failed_one(make):
    """Also over the half of it that was written before the failure."""
    setting = make()
    setting.failed(disk_error(), (0, 1), (1, 2, 8))
    setting.gate.open()
    setting.queue.flush()
    setting.check_written()
    setting.check()


def test_a_failure_while_someone_drains_is_not_remembered_after_the_drain(make):
    """The thread's attempt fails while the drain waits for it; the drain's own succeeds: all is well."""
    setting = make()
    setting.fail(disk_error())
    setting.write(1, 2)
    setting.gate.await_arrival()
    job = at_the_disk(setting, setting.queue.drain)
    setting.gate.open()
    job.result()
    assert setting.queue.status == "running"
    setting.check_written()
    setting.check()
    setting.write(2, 3)
    setting.queue.flush()
    setting.check_written()


def test_an_error_before_the_disk_is_reached_is_raised_too(make, monkeypatch):
    """Merging needs memory: without it the thread must fail as with a bad disk, and not try for ever."""
    setting = make()
    merged = dsa.backends.writer._merged

    def refuse(batches):
        raise MemoryError("no room to merge")

    monkeypatch.setattr(dsa.backends.writer, "_merged", refuse)
    setting.gate.open()
    setting.write(1, 2)
    setting.await_failure()
    with pytest.raises(StateError, match="no room to merge"):
        setting.check()
    monkeypatch.setattr(dsa.backends.writer, "_merged", merged)
    setting.queue.flush()
    setting.check_written()


def test_a_thread_that_can_not_start_leaves_a_queue_that_can_be_closed(make, monkeypatch):
    setting = make()

    def refuse(self):
        raise RuntimeError("can't start new thread")

    setting.gate.open()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="start"):
            setting.write(1, 2)
    setting.write(2, 3)
    setting.queue.flush()
    assert_records_equal(setting.memory.read(np.array([2, 3])), setting.model.read(np.array([2, 3])))
    setting.queue.close()
    assert setting.memory.calls[-1] == "close"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nothing_is_lost_when_the_thread_is_told_to_exit(make):
    """A backend that raises `SystemExit` ends the thread; what it had taken is written by the next flush."""
    setting = make()
    setting.fail(SystemExit(3))
    setting.write(1, 2)
    setting.gate.await_arrival()
    setting.write(2, 3)
    thread = setting.queue._thread
    setting.gate.open()
    thread.join(DEADLINE)
    assert not thread.is_alive()
    setting.queue.flush()
    setting.check_written()


# ---------------------------------------------------------------- status, what is queued


def test_the_four_states(make):
    setting, seen = make(), []
    assert setting.queue.status == "running"
    setting.failed(disk_error())
    assert setting.queue.status == "failed"
    write = setting.memory.write
    setting.memory.write = lambda rows, records: (seen.append(setting.queue.status), write(rows, records))
    setting.gate.open()
    setting.queue.flush()
    assert seen == ["draining"]
    assert setting.queue.status == "running"
    setting.queue.close()
    assert setting.queue.status == "stopped"


def test_a_batch_counts_as_queued_until_it_is_written(make):
    """At every instruction of the thread before it: `drain` and the journal's release ask for the count."""
    setting, counts = make(), []

    def trace(frame, event, argument):
        threading.settrace(None)
        if not _in_writer(frame):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not setting.gate.writes:
            counting = Job(lambda: counts.append(setting.queue.queued))
            counting.thread.join(0.01)  # whoever counts may have to wait for the thread
        return trace

    threading.settrace(trace)
    try:
        setting.write(1, 2)
        setting.gate.await_arrival()
    finally:
        threading.settrace(None)
    setting.gate.open()
    setting.queue.drain()
    assert len(counts) > 20
    assert set(counts[:-1]) == {1}
    setting.check_written()


# ---------------------------------------------------------------- closing


def test_close_writes_everything_and_closes_once(make):
    setting = make()
    setting.gate.open()
    for row in range(100):
        setting.write(row, row + 1)
    thread = setting.queue._thread
    setting.queue.close()
    setting.queue.close()
    setting.check_written()
    assert setting.memory.calls.count("close") == 1
    assert not thread.is_alive()


def test_a_closed_queue_refuses(make):
    setting = make()
    setting.gate.open()
    setting.write(1)
    setting.queue.close()
    empty = np.empty(0, np.int64)
    for use in (
        lambda: setting.write(1),
        lambda: setting.write(),
        lambda: setting.queue.read(ALL),
        lambda: setting.queue.read(empty),
        lambda: next(setting.queue.scan(0, ROWS)),
        setting.queue.flush,
        setting.queue.drain,
    ):
        with pytest.raises(StateClosedError, match="closed"):
            use()
    assert setting.memory.calls.count("write") == 1


def test_a_close_that_fails_closes_nothing_and_can_be_repeated(make):
    setting = make()
    setting.failed(disk_error(), (3, 4))
    setting.gate.open()
    setting.fail(disk_error())
    with pytest.raises(OSError, match="Input/output"):
        setting.queue.close()
    assert "close" not in setting.memory.calls
    assert setting.queue._thread.is_alive()
    setting.queue.close()
    setting.check_written()
    assert setting.memory.calls[-1] == "close"


def test_an_error_of_the_backend_s_close_is_raised_once(make):
    setting = make()

    def close():
        setting.memory.calls.append("close")
        raise disk_error()

    setting.memory.close = close
    setting.gate.open()
    setting.write(1)
    with pytest.raises(OSError, match="Input/output"):
        setting.queue.close()
    setting.queue.close()
    assert setting.memory.calls.count("close") == 1


def test_close_waits_for_the_write_that_is_under_way(make):
    setting = make()
    setting.write(1, 2)
    setting.gate.await_arrival()
    job = Job(setting.queue.close)
    setting.gate.open()
    job.result()
    assert setting.memory.calls[0] == "write"
    assert setting.memory.calls[-1] == "close"
    setting.check_written()


def test_the_thread_ends_with_a_queue_that_nobody_closed():
    queue = WriteBehind(MemoryBackend(ROWS, SCHEMA))
    queue.write(np.array([1]), random_records(SCHEMA, 1, 0))
    queue.drain()
    thread, gone = queue._thread, weakref.ref(queue)
    del queue
    gc.collect()
    assert gone() is None
    thread.join(DEADLINE)
    assert not thread.is_alive()


def test_the_thread_ends_with_a_queue_that_is_dropped_during_a_write():
    """The thread then holds the last reference, and the queue dies in its hands."""
    gate = Gate(MemoryBackend(ROWS, SCHEMA))
    queue = WriteBehind(gate)
    queue.write(np.array([1]), random_records(SCHEMA, 1, 0))
    gate.await_arrival()
    thread = queue._thread
    del queue
    gc.collect()
    gate.open()
    thread.join(DEADLINE)
    assert not thread.is_alive()


def test_no_thread_before_the_first_write():
    queue = WriteBehind(MemoryBackend(ROWS, SCHEMA))
    queue.read(ALL)
    queue.flush()
    assert queue._thread is None
    queue.close()


# ---------------------------------------------------------------- interrupts


def test_a_keyboard_interrupt_in_a_drain_loses_nothing(make):
    """In the middle of the backend's write, half of whose rows are new."""
    setting = make()
    setting.failed(disk_error(), (2, 7), (3, 7))
    setting.gate.open()
    setting.fail(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        setting.queue.drain()
    setting.check()
    setting.write(7, 8)
    setting.queue.drain()
    setting.check_written()
    setting.check()


@cache
def handlers(code):
    """Return where an exception at each instruction of a function is handled."""
    entries = dis.Bytecode(code).exception_entries
    return {
        offset: next((entry.target for entry in entries if entry.start <= offset < entry.end), None)
        for offset in range(0, len(code.co_code), 2)
    }


def _in_writer(frame):
    return frame.f_code.co_filename in (dsa.backends.writer.__file__, dsa.kernels.row_index.__file__)


class Interrupt:
    """Raises `KeyboardInterrupt` at the n-th place of the queue's code where Python handles a signal.

    Those are the starts of functions, the ends of calls and the ends of a loop's passes; in the lock's own
    code, where the queue enters and leaves it, too.
    """

    def __init__(self, number):
        self.number, self.seen, self.where, self.last = number, 0, None, {}

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, kind, error, trace):
        sys.settrace(self.before)
        return kind is KeyboardInterrupt and self.where is not None

    def _trace(self, frame, event, argument):
        of_the_lock = frame.f_code in LOCKING and _in_writer(frame.f_back)
        if not (_in_writer(frame) or of_the_lock):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if name in ("RESUME", "JUMP_BACKWARD") or self._call_has_ended(frame):
                self._pass(frame)
            self.last[id(frame)] = name, frame.f_lasti
        return self._trace

    def _call_has_ended(self, frame):
        # The signal's exception belongs to the call; here it can only be raised by the next instruction.
        name, offset = self.last.get(id(frame), ("", 0))
        handled = handlers(frame.f_code)
        return name.startswith("CALL") and handled[offset] == handled[frame.f_lasti]

    def _pass(self, frame):
        self.seen += 1
        if self.seen == self.number:
            self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
            sys.settrace(None)
            raise KeyboardInterrupt


LOCKING = (threading.Condition.__enter__.__code__, threading.Condition.__exit__.__code__)


def waiting(setting):
    """Bring a setting to where batches wait in the queue, the thread at rest."""
    setting.failed(disk_error(), (2, 7), (7, 8), (2, 9_000))
    setting.gate.open()


def writing(setting):
    """Bring a setting to where the thread stands before the gate and batches wait."""
    setting.write(0, 1)
    setting.gate.await_arrival()
    setting.write(1, 2)


def crowded(setting):
    """As `waiting`, with no room for another batch and no error."""
    waiting(setting)
    setting.queue._error = None


WRITTEN = np.array([1, 7, 5_000])


def write_more(setting):
    rows, records = WRITTEN.copy(), random_records(SCHEMA, 3, 1_234)
    setting.queue.write(rows, records.copy())
    setting.model.write(rows, records)


OPERATIONS = {
    "write": (writing, write_more),
    "write, full": (crowded, write_more),
    "read": (writing, Setting.check),
    "scan": (writing, lambda setting: list(setting.queue.scan(0, ROWS))),
    "drain": (waiting, lambda setting: setting.queue.drain()),
    "flush": (waiting, lambda setting: setting.queue.flush()),
    "close": (waiting, lambda setting: setting.queue.close()),
}


def is_free(lock):
    if lock.acquire(True, 1):
        lock.release()
        return True
    return False


def go_on(setting, call):
    """Read, do again what was interrupted, close, and check that everything is there."""
    assert is_free(condition_of(setting.queue)), "the lock is held for ever"
    if call is not None:
        if setting.queue.status != "failed":
            read = setting.queue.read(ALL)
            untouched = ~np.isin(ALL, WRITTEN)
            assert_records_equal(
                read[untouched], setting.model.read(ALL)[untouched], "rows of finished writes"
            )
        call(setting)
        setting.check()
    setting.queue.close()
    setting.check_written()
    assert setting.memory.calls[-1] == "close", "the backend was not closed"


@pytest.mark.filterwarnings(f"ignore:{STAYED_FULL}")
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_at_any_instant_loses_nothing(make, name):
    """The call can be repeated, reads go on, closing closes, and the backend ends up with every record."""
    prepare, call = OPERATIONS[name]
    faults = {}
    for number in itertools.count(1):
        setting = make(max_queue_size=3, put_timeout=0.0)
        prepare(setting)
        interrupt = Interrupt(number)
        with interrupt:
            call(setting)
        if interrupt.where is None:
            break
        setting.gate.open()
        try:
            Job(go_on, setting, None if name == "close" else call).result()
        except Exception as error:
            faults[interrupt.where] = f"{interrupt.where}: {error!r:.150}"
            with contextlib.suppress(RuntimeError):  # so that the other threads, and the fixture, can go on
                while True:
                    condition_of(setting.queue).release()
    assert number > 5
    assert not faults, "\n".join(faults.values())


# ---------------------------------------------------------------- forks and the end of the process

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
forks = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


def in_child(check):
    """Run a check in a forked child, which must end well within the deadline."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            check()
            code = 0
        except BaseException as error:
            os.write(2, f"in the child: {error!r}\n".encode())
        finally:
            os._exit(code)
    job = Job(os.waitpid, child, 0)
    try:
        assert job.result()[1] == 0
    except AssertionError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, 9)
        raise


@needs_fork
@forks
def test_a_forked_child_holds_a_dead_copy(make):
    """Whatever the threads of the parent were doing: no call in the child waits for them."""
    setting = make()
    setting.write(1, 2)
    setting.gate.await_arrival()
    setting.write(2, 3)

    def check():
        for use in (
            lambda: setting.queue.read(ALL),
            lambda: setting.queue.write(np.array([1]), random_records(SCHEMA, 1, 0)),
            lambda: next(setting.queue.scan(0, ROWS)),
            setting.queue.flush,
            setting.queue.drain,
        ):
            with pytest.raises(StateClosedError, match="fork"):
                use()
        setting.queue.close()
        setting.queue.close()
        assert "close" not in setting.memory.calls
        dsa.backends.writer._drain_at_exit()

    in_child(check)
    setting.check()
    setting.gate.open()
    setting.queue.close()
    setting.check_written()


@needs_fork
@forks
def test_a_child_forked_while_the_queue_is_locked_can_drop_and_leave_it(make):
    """The lock that a thread of the parent held stays held in the child for ever."""
    queue = WriteBehind(MemoryBackend(ROWS, SCHEMA))
    queue.write(np.array([1]), random_records(SCHEMA, 1, 0))
    queue.close()  # so that no thread's frame holds the queue in the child
    gone = weakref.ref(queue)
    locked, release = threading.Event(), threading.Event()
    condition = condition_of(queue)

    def hold():
        with condition:
            locked.set()
            assert release.wait(DEADLINE)

    job = Job(hold)
    assert locked.wait(DEADLINE)
    box = [queue]
    del queue

    def check():
        box.clear()
        assert gone() is None

    try:
        in_child(check)
    finally:
        release.set()
        job.result()


END = """
import errno, threading
import numpy as np
from dsa.backends.memory import MemoryBackend
from dsa.schema import adam_schema
from dsa.backends.writer import WriteBehind

class Disk:
    def __init__(self, name):
        self.inner, self.name = MemoryBackend(100, adam_schema(2)), name
    def __len__(self):
        return len(self.inner)
    def __getattr__(self, attribute):
        return getattr(self.inner, attribute)
    def write(self, rows, records):
        if self.name == "bad" or threading.current_thread() is not threading.main_thread():
            raise OSError(errno.EIO, "the bad disk")
        print(self.name, rows.tolist(), flush=True)

queues = [WriteBehind(Disk(name)) for name in ("good", "bad", "good", "bad", "good")]
for row, queue in enumerate(queues):
    queue.write(np.array([row]), np.zeros(1, adam_schema(2).dtype))
for queue in queues:
    condition = next(value for value in vars(queue).values() if isinstance(value, threading.Condition))
    with condition:
        assert condition.wait_for(lambda: queue.status == "failed", 60)
"""


def test_one_bad_disk_does_not_keep_the_end_of_the_process_from_the_others():
    done = subprocess.run(
        [sys.executable, "-c", END],
        env=os.environ | {"PYTHONPATH": str(Path(dsa.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert sorted(done.stdout.splitlines()) == ["good [0]", "good [2]", "good [4]"]
    assert "the bad disk" in done.stderr
