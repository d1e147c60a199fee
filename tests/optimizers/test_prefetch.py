"""Announcing rows: it never waits, never changes a result, never fails a step, and is counted truthfully."""

import errno
import gc
import operator
import os
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from current_files import table_file

import dsa
import dsa.backends.system
from dsa import DiskSparseRiemannianAdam, init
from dsa.backends.memmap import MemmapBackend
from dsa.errors import RowIndexError, RowTypeError, StateClosedError

DEADLINE = 20
TABLES = {"left": init.Normal(5_000, 4, 0.1, seed=1), "right": init.Zeros(60, 2)}
HINT = MemmapBackend.hint


def build(path, tables=TABLES, **options):
    return DiskSparseRiemannianAdam(
        tables, disk_dir=path, **({"lr": 0.05, "k": 0.0, "allocate": "sparse"} | options)
    )


class Hints:
    """Stands in for `MemmapBackend.hint`: notes what arrives, and holds or fails it when told to."""

    def __init__(self):
        self.rows, self.threads, self.error = [], set(), None
        self.arrivals, self.gate = threading.Semaphore(0), threading.Event()
        self.gate.set()

    def hint(self, backend, rows):
        self.threads.add(threading.current_thread().name)
        self.arrivals.release()
        assert self.gate.wait(DEADLINE), "nobody let the hint through"
        self.rows.append(rows.copy())
        if self.error is not None:
            raise self.error
        HINT(backend, rows)

    def await_arrival(self):
        assert self.arrivals.acquire(timeout=DEADLINE), "no hint came"


@pytest.fixture
def hints(monkeypatch):
    hints = Hints()
    monkeypatch.setattr(MemmapBackend, "hint", lambda backend, rows: hints.hint(backend, rows))
    yield hints
    hints.gate.set()


@pytest.fixture
def optimizer(hints, tmp_path):
    optimizer = build(tmp_path / "state")
    yield optimizer
    hints.gate.set()
    optimizer.close()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """No prefetch or writer thread outlives a test, nor its collection as garbage."""
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


def settled(optimizer, hints, count):
    """Close, so that every hint taken has been handed on; return what arrived."""
    for _ in range(count):
        hints.await_arrival()
    optimizer.close()
    return [rows.tolist() for rows in hints.rows]


# ---------------------------------------------------------------- what arrives


@pytest.mark.parametrize(
    "indices", [[7, 3, 7], np.array([7, 3, 7], np.int32), torch.tensor([3, 7, 7]), np.array([7, 7, 3])]
)
def test_rows_reach_the_backend_sorted_and_once_in_another_thread(optimizer, hints, indices):
    optimizer.prefetch(indices, "left")
    assert settled(optimizer, hints, 1) == [[3, 7]]
    assert hints.threads == {"dsa-prefetch"}


def test_no_thread_before_the_first_hint(tmp_path):
    before = set(threading.enumerate())
    with build(tmp_path) as optimizer:
        optimizer.step({"left": ([1], np.ones((1, 4), np.float32))})
        assert set(threading.enumerate()) == before


def test_an_empty_hint(optimizer, hints):
    optimizer.prefetch([], "left")
    optimizer.prefetch(torch.empty(0, dtype=torch.int64), "left")
    optimizer.step({"left": ([1], np.ones((1, 4), np.float32))})
    assert optimizer.stats()["prefetch_rows"] == 0


def test_a_table_s_name_may_be_left_out_when_there_is_one(hints, tmp_path):
    with build(tmp_path, {"only": init.Zeros(10, 2)}) as optimizer:
        optimizer.prefetch([3])
        hints.await_arrival()


@pytest.mark.parametrize(
    ("indices", "name", "error", "match"),
    [
        ([1], "middle", KeyError, "middle"),
        ([1], None, KeyError, "left"),
        ([5_000], "left", RowIndexError, "5000"),
        ([-1], "left", RowIndexError, "-1"),
        ([0.5], "left", RowTypeError, "float"),
        ([[1]], "left", RowTypeError, "1-D"),
    ],
)
def test_hints_are_checked_as_steps_are(optimizer, hints, indices, name, error, match):
    with pytest.raises(error, match=match):
        optimizer.prefetch(indices, name)
    assert optimizer.stats()["prefetch_rows"] == 0
    assert not hints.rows


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_an_array_of_ids_may_be_used_again_at_once(optimizer, hints, kind):
    """The thread is late, and finds the rows that were announced, not those that the array holds by then."""
    ids = np.array([4, 9, 30]) if kind == "numpy" else torch.tensor([4, 9, 30])
    hints.gate.clear()
    optimizer.prefetch([0], "left")
    hints.await_arrival()
    optimizer.prefetch(ids, "left")
    ids[...] = -5
    hints.gate.set()
    assert settled(optimizer, hints, 1) == [[0], [4, 9, 30]]


# ---------------------------------------------------------------- never waiting, never failing


def test_a_hint_never_waits_for_the_disk(optimizer, hints):
    """A thousand hints and a step while the first one hangs: most are dropped, all are counted."""
    hints.gate.clear()
    for row in range(1_000):
        optimizer.prefetch([row, row + 1], "left")
    optimizer.step({"left": ([999, 1_000], np.ones((2, 4), np.float32))})
    counts = optimizer.stats()
    assert counts["prefetch_rows"] + counts["prefetch_dropped_rows"] == 2_000
    assert 2 <= counts["prefetch_rows"] <= 40
    hints.gate.set()
    optimizer.close()


def test_hints_from_many_threads(optimizer, hints):
    barrier = threading.Barrier(4, timeout=DEADLINE)

    def announce(number):
        barrier.wait()
        for row in range(200):
            optimizer.prefetch([number, row], "left")

    threads = [threading.Thread(target=announce, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    counts = optimizer.stats()
    assert counts["prefetch_rows"] + counts["prefetch_dropped_rows"] == 1_600


def test_a_hint_that_fails_harms_nobody(optimizer, hints):
    """Reading ahead fails; the step reads for itself, and the next hint is given as ever."""
    hints.error = OSError(errno.EIO, "the disk refuses to read ahead")
    optimizer.prefetch([3], "left")
    hints.await_arrival()
    optimizer.step({"left": ([3], np.ones((1, 4), np.float32))})
    hints.error = None
    optimizer.prefetch([4], "left")
    assert settled(optimizer, hints, 1) == [[3], [4]]


def test_a_fault_in_a_hint_harms_nobody(optimizer, hints):
    """Whatever it is: a hint runs beside training and has nobody to tell."""
    hints.error = RuntimeError("a backend of someone else's")
    optimizer.prefetch([3], "left")
    hints.await_arrival()
    hints.error = None
    optimizer.prefetch([4], "left")
    assert settled(optimizer, hints, 1) == [[3], [4]]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="hints are not given here")
def test_useless_hints_are_hardly_ever_passed_on(tmp_path, monkeypatch):
    """When everything is in memory, of a thousand hints all but a few end before the first system call."""
    calls = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(dsa.backends.system, "blocks_read", lambda: 7)
    backend = MemmapBackend.create(tmp_path / "table", 5_000, dsa.schema.adam_schema(4), allocate="sparse")
    rows = np.arange(0, 5_000, 50)
    backend.read(rows)
    passed_on = 0
    for _ in range(1_000):
        calls.clear()
        backend.hint(rows)
        passed_on += bool(calls)
    assert 1 <= passed_on <= 100
    backend.close()


def test_hints_change_no_byte(tmp_path):
    """Right ones, wrong ones, of other tables, in between and too many, with a queue and without."""
    generator = np.random.default_rng(0)
    batches = [
        (np.unique(generator.integers(0, 5_000, 300)), generator.integers(0, 60, 20)) for _ in range(12)
    ]
    results = []
    for name, options, announced in (
        ("plain", {}, 0),
        ("hinted", {}, 3),
        ("queued", {"async_writes": True, "max_queue_size": 2}, 3),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dsa.errors.TrainingWarning)
            optimizer = build(tmp_path / name, **options)
            for step, (left, right) in enumerate(batches):
                for _ in range(announced):
                    optimizer.prefetch(batches[(step + 1) % 12][0], "left")
                    optimizer.prefetch(np.arange(60), "right")
                optimizer.step(
                    {
                        "left": (left, np.full((len(left), 4), 0.1, np.float32)),
                        "right": (right, np.ones((20, 2), np.float32)),
                    }
                )
            optimizer.close()
        results.append([table_file(tmp_path / name, table).read_bytes()[4096:] for table in TABLES])
    assert results[1] == results[0]
    assert results[2] == results[0]


# ---------------------------------------------------------------- the end


def test_close_ends_the_thread_and_drops_what_waits(optimizer, hints):
    hints.gate.clear()
    for row in range(10):
        optimizer.prefetch([row], "left")
    hints.await_arrival()
    closing = threading.Thread(target=optimizer.close)
    closing.start()
    hints.gate.set()
    closing.join(DEADLINE)
    assert not closing.is_alive()
    assert not any(thread.name == "dsa-prefetch" for thread in threading.enumerate())


def test_a_closed_optimizer_takes_no_hints(optimizer, hints):
    optimizer.close()
    with pytest.raises(StateClosedError):
        optimizer.prefetch([1], "left")


def test_the_thread_ends_with_an_optimizer_that_nobody_closed(hints, tmp_path):
    before = set(threading.enumerate())
    box = [build(tmp_path)]
    box[0].prefetch([1], "left")
    hints.await_arrival()
    (thread,) = set(threading.enumerate()) - before
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        box.clear()
        gc.collect()
    thread.join(DEADLINE)
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_announces_nothing(optimizer, hints):
    hints.gate.clear()
    optimizer.prefetch([1], "left")
    hints.await_arrival()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(StateClosedError):
                optimizer.prefetch([2], "left")
            optimizer.close()
            optimizer._stepping.prefetcher.close()
            code = 0
        finally:
            os._exit(code)
    hints.gate.set()
    waiting = threading.Thread(target=lambda: statuses.append(os.waitpid(child, 0)[1]))
    statuses = []
    waiting.start()
    waiting.join(DEADLINE)
    assert statuses == [0]
    assert settled(optimizer, hints, 0) == [[1]]


# ---------------------------------------------------------------- lookahead


class Recorder:
    """An optimizer as far as `lookahead` cares, in one list with what the loop does."""

    def __init__(self):
        self.events = []

    def prefetch(self, indices, name=None):
        self.events.append(("announced", name, list(indices)))


def run(loader, recorder, ids=lambda batch: batch):
    for batch in dsa.lookahead(loader, recorder, ids=ids):
        recorder.events.append(("working", batch))
    return recorder.events


def test_the_next_batch_is_announced_before_the_current_one_is_worked_on():
    assert run([[1], [2], [3]], Recorder()) == [
        ("announced", None, [2]),
        ("working", [1]),
        ("announced", None, [3]),
        ("working", [2]),
        ("working", [3]),
    ]


def test_several_tables():
    events = run([0, 5], Recorder(), ids=lambda batch: {"left": [batch], "right": [batch + 1]})
    assert events == [("announced", "left", [5]), ("announced", "right", [6]), ("working", 0), ("working", 5)]


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_every_batch_comes_once_and_in_order(count):
    worked = [
        event[1] for event in run(iter([[row] for row in range(count)]), Recorder()) if event[0] == "working"
    ]
    assert worked == [[row] for row in range(count)]


def test_the_loader_is_one_batch_ahead_and_no_more():
    loaded = []

    def loader():
        for row in range(5):
            loaded.append(row)
            yield [row]

    batches = dsa.lookahead(loader(), Recorder(), ids=lambda batch: batch)
    assert loaded == []
    assert next(batches) == [0]
    assert loaded == [0, 1]
    assert next(batches) == [1]
    assert loaded == [0, 1, 2]
    batches.close()


def test_d12_a_loader_that_is_wrapped_is_one(tmp_path):
    """Iterated in each epoch, with a length and the attributes that trainers ask for."""
    loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=2)
    recorder = Recorder()
    batches = dsa.lookahead(loader, recorder, ids=lambda batch: batch)
    assert [len(list(batches)) for _ in range(3)] == [4, 4, 4]
    assert len(recorder.events) == 9
    assert (len(batches), batches.batch_size, batches.dataset is loader.dataset) == (4, 2, True)
    first, second = iter(batches), iter(batches)
    assert next(first).tolist() == next(second).tolist() == [0, 1]
    with pytest.raises(AttributeError, match="no_such"):
        operator.attrgetter("no_such")(batches)
    with pytest.raises(TypeError, match="len"):
        len(dsa.lookahead((each for each in loader), recorder, ids=lambda batch: batch))


def test_the_loader_s_error_comes_after_every_batch_before_it():
    """As in a loop without lookahead, which trains on all of them."""

    def loader():
        yield [1]
        yield [2]
        raise OSError("the file ends here")

    recorder = Recorder()
    with pytest.raises(OSError, match="ends here"):
        run(loader(), recorder)
    assert [event[1] for event in recorder.events if event[0] == "working"] == [[1], [2]]


def test_a_torch_loader(tmp_path):
    """The indices of a batch as tensors, as they come from a loader; the result is that of a plain loop."""
    data = torch.utils.data.TensorDataset(torch.arange(240) % 60)
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    results = []
    for name in ("plain", "ahead"):
        with build(tmp_path / name) as optimizer:
            batches = (
                loader
                if name == "plain"
                else dsa.lookahead(loader, optimizer, ids=lambda batch: {"right": batch[0]})
            )
            for (rows,) in batches:
                optimizer.step({"right": (rows, torch.ones(len(rows), 2))})
            results.append(optimizer.read_rows(range(60), "right"))
            announced = optimizer.stats()["prefetch_rows"] + optimizer.stats()["prefetch_dropped_rows"]
            assert announced == (0 if name == "plain" else 240 - 16)
    assert torch.equal(*results)


# ---------------------------------------------------------------- counts


def ones(rows):
    return {"left": (rows, np.ones((len(rows), 4), np.float32))}


def test_hits_are_the_rows_of_steps_that_a_hint_had_named(optimizer, hints):
    optimizer.prefetch(np.arange(0, 10), "left")
    optimizer.step(ones(np.arange(5, 25)))
    assert optimizer.stats()["prefetch_hits"] == 5
    optimizer.step(ones(np.arange(0, 10)))
    assert optimizer.stats()["prefetch_hits"] == 5, "a hint counts for the step that it was for"


def test_hits_under_lookahead(optimizer, hints):
    """Each batch but the first is announced one step ahead, and no two share a row: later rows are hits."""
    batches = [np.arange(10 * step, 10 * step + 10) for step in range(6)]
    for rows in dsa.lookahead(batches, optimizer, ids=lambda rows: {"left": rows}):
        optimizer.step(ones(rows))
        for _ in range(optimizer.stats()["prefetch_rows"] // 10 - len(hints.rows)):
            hints.await_arrival()  # the thread keeps up, so that none is dropped
    counts = optimizer.stats()
    assert (counts["prefetch_rows"], counts["prefetch_dropped_rows"]) == (50, 0)
    assert counts["prefetch_hits"] == 50


def test_two_hints_for_one_step_both_count(optimizer, hints):
    """Heads and tails, positives and negatives: callers announce a batch in parts."""
    optimizer.prefetch([1, 2], "left")
    hints.await_arrival()
    optimizer.prefetch([3, 4], "left")
    optimizer.step(ones(np.array([1, 2, 3, 4])))
    assert optimizer.stats()["prefetch_hits"] == 4


def test_a_step_that_failed_uses_up_no_hint(optimizer, hints):
    optimizer.prefetch([1, 2], "left")
    with pytest.raises(ValueError, match="gradient"):
        optimizer.step({"left": ([1, 2], np.full((2, 4), np.nan, np.float32))})
    optimizer.step(ones(np.array([1, 2])))
    assert optimizer.stats()["prefetch_hits"] == 2


def test_the_public_name():
    assert "lookahead" in dsa.__all__
    assert Path(dsa.optimizers.prefetch.__file__).name == "prefetch.py"
