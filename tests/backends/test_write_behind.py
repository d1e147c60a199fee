"""The write queue is a backend like the one inside it: the suite and the machine over memory and memmap.

Four ways of being behind: *free*, as the threads happen to run; *held*, where nothing is written until a
flush, so that the queue serves every read; *narrow*, a queue of one that never waits, so that the caller
writes too; and *collecting*, where so many bytes are written at once, without a thread or with one.
"""

import threading
import time
from contextlib import closing

import numpy as np
import pytest
from hypothesis import settings
from zarr_tables import Compressed, Mapped

from dsa.backends.memmap import MemmapBackend
from dsa.backends.memory import MemoryBackend
from dsa.backends.writer import WriteBehind
from dsa.schema import Schema, adam_schema
from dsa.testing import CASES, BackendConformance, BackendHooks, BackendMachine

DEADLINE = 60
MAPPED = Mapped(shard_bytes=1 << 14)
COMPRESSED = Compressed(shard_bytes=1 << 15)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """No writer thread outlives a test."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name == "dsa-writer":
            thread.join(DEADLINE)
            assert not thread.is_alive()


class Memory(BackendHooks):
    def create(self, path, rows, schema):
        return MemoryBackend(rows, schema)


class Memmap(BackendHooks):
    def create(self, path, rows, schema):
        return MemmapBackend.create(path, rows, schema, allocate="sparse")

    def reopen(self, path, description):
        return MemmapBackend.open(path, description)

    def read_raw(self, path, description):
        schema = Schema.from_json(description["schema"])
        content = np.fromfile(path, np.uint8)[4096:].reshape(description["rows"], description["stride"])
        return content[:, : schema.dtype.itemsize].copy().view(schema.dtype).reshape(-1)


class Waiting:
    """A backend whose writes wait for an event."""

    def __init__(self, inner, event):
        self.inner, self.event = inner, event

    def write(self, rows, records):
        assert self.event.wait(DEADLINE)
        self.inner.write(rows, records)

    def __len__(self):
        return len(self.inner)

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Held:
    """A queue from which nothing is written until someone flushes, lets it grow or closes."""

    def __init__(self, inner):
        self.asked = threading.Event()
        self.queue = WriteBehind(Waiting(inner, self.asked), max_queue_size=10_000)

    def flush(self):
        self.asked.set()
        self.queue.flush()
        self.asked.clear()

    def close(self):
        self.asked.set()
        self.queue.close()

    def make_room(self, rows):
        self.flush()
        return self.queue.make_room(rows)

    def adopt_rows(self, rows):
        self.flush()
        self.queue.adopt_rows(rows)

    def __len__(self):
        return len(self.queue)

    def __getattr__(self, name):
        return getattr(self.queue, name)


QUEUES = {
    "free": WriteBehind,
    "held": Held,
    "narrow": lambda inner: WriteBehind(inner, max_queue_size=1, put_timeout=0.0),
    "collecting": lambda inner: WriteBehind(inner, collect_bytes=100_000, threaded=False),
    "collecting in a thread": lambda inner: WriteBehind(inner, collect_bytes=100_000, put_timeout=0.0),
}


class Behind(BackendHooks):
    """Puts a queue around what other hooks make."""

    def __init__(self, hooks, kind):
        self.hooks, self.queue = hooks, QUEUES[kind]

    def create(self, path, rows, schema):
        return self.queue(self.hooks.create(path, rows, schema))

    def reopen(self, path, description):
        again = self.hooks.reopen(path, description)
        return None if again is None else self.queue(again)

    def read_raw(self, path, description):
        return self.hooks.read_raw(path, description)


class _Suite(BackendConformance):
    hooks: BackendHooks

    def create(self, path, rows, schema):
        return self.hooks.create(path, rows, schema)

    def reopen(self, path, description):
        return self.hooks.reopen(path, description)

    def read_raw(self, path, description):
        return self.hooks.read_raw(path, description)


class _SmallSuite(_Suite):
    """Fewer sizes, where the backend inside adds nothing to what is tested."""

    @pytest.fixture(params=["one-number", "dim-1", "mixed"])
    def case(self, request):
        return CASES[request.param]


class TestFreeOverMemory(_SmallSuite):
    hooks = Behind(Memory(), "free")


class TestHeldOverMemory(_SmallSuite):
    hooks = Behind(Memory(), "held")


@pytest.mark.filterwarnings("ignore:the write queue stayed full")
class TestNarrowOverMemory(_SmallSuite):
    hooks = Behind(Memory(), "narrow")


class TestCollectingOverMemory(_SmallSuite):
    hooks = Behind(Memory(), "collecting")


class TestCollectingInAThreadOverMemory(_SmallSuite):
    hooks = Behind(Memory(), "collecting in a thread")


class TestCollectingOverCompressed(_SmallSuite):
    hooks = Behind(COMPRESSED, "collecting")


class TestCollectingInAThreadOverCompressed(_SmallSuite):
    hooks = Behind(COMPRESSED, "collecting in a thread")


class TestFreeOverZarr(_SmallSuite):
    hooks = Behind(MAPPED, "free")


class TestFreeOverMemmap(_Suite):
    hooks = Behind(Memmap(), "free")


class TestHeldOverMemmap(_SmallSuite):
    hooks = Behind(Memmap(), "held")


@pytest.mark.filterwarnings("ignore:the write queue stayed full")
class TestNarrowOverMemmap(_SmallSuite):
    hooks = Behind(Memmap(), "narrow")


def machine(hooks, kind, fewer):
    """Return the machine's test with a part of the profile's examples."""
    case = BackendMachine.over(Behind(hooks, kind)).TestCase
    case.settings = settings(case.settings, max_examples=max(1, case.settings.max_examples // fewer))
    return pytest.mark.filterwarnings("ignore:the write queue stayed full")(case)


TestFreeMemoryMachine = machine(Memory(), "free", 2)
TestHeldMemoryMachine = machine(Memory(), "held", 2)
TestNarrowMemoryMachine = machine(Memory(), "narrow", 2)
TestFreeMemmapMachine = machine(Memmap(), "free", 5)
TestHeldMemmapMachine = machine(Memmap(), "held", 5)
TestNarrowMemmapMachine = machine(Memmap(), "narrow", 5)
TestCollectingMemoryMachine = machine(Memory(), "collecting", 2)
TestCollectingCompressedMachine = machine(COMPRESSED, "collecting", 5)
TestCollectingInAThreadCompressedMachine = machine(COMPRESSED, "collecting in a thread", 5)
TestFreeZarrMachine = machine(MAPPED, "free", 5)


class Counting:
    """Remembers what is written, and refuses while told to."""

    def __init__(self, inner):
        self.inner, self.written, self.refusing = inner, [], False

    def write(self, rows, records):
        if self.refusing:
            raise OSError(28, "no room")
        self.written.append(rows.tolist())
        self.inner.write(rows, records)

    def __len__(self):
        return len(self.inner)

    def __getattr__(self, name):
        return getattr(self.inner, name)


def one(schema, value):
    records = np.zeros(1, schema.dtype)
    records["t"] = value
    return records


@pytest.mark.parametrize("threaded", [False, True])
def test_nothing_is_written_until_enough_is_collected(threaded):
    """Then everything is, at once, each row with its last record."""
    schema = adam_schema(1)
    inner = Counting(MemoryBackend(100, schema))
    measure = 90 * schema.dtype.itemsize
    with closing(WriteBehind(inner, collect_bytes=measure, threaded=threaded, max_queue_size=1)) as queue:
        for number in range(89):
            queue.write(np.array([number % 7]), one(schema, number))
        assert inner.written == []
        assert queue.read(np.arange(7))["t"].tolist() == [84, 85, 86, 87, 88, 82, 83]
        queue.write(np.array([50]), one(schema, 89))
        for _ in range(DEADLINE * 100):
            if not queue.queued:
                break
            time.sleep(0.01)
        assert inner.written == [[0, 1, 2, 3, 4, 5, 6, 50]]
        queue.write(np.array([51]), one(schema, 1))
        assert queue.queued == 1
    assert inner.written[1:] == [[51]]


def test_what_could_not_be_written_is_kept_with_the_batch_that_asked_for_it():
    schema = adam_schema(1)
    inner = Counting(MemoryBackend(100, schema))
    queue = WriteBehind(inner, collect_bytes=3 * schema.dtype.itemsize, threaded=False)
    inner.refusing = True
    for row in (1, 2):
        queue.write(np.array([row]), one(schema, row))
    with pytest.raises(OSError, match="no room"):
        queue.write(np.array([3]), one(schema, 3))
    assert queue.status == "failed"
    with pytest.raises(OSError, match="its records are kept: remove the cause and call flush"):
        queue.write(np.array([4]), one(schema, 4))
    inner.refusing = False
    queue.flush()
    assert inner.written == [[1, 2, 3]]
    queue.close()
    assert inner.inner.read(np.arange(5))["t"].tolist() == [0, 1, 2, 3, 0]


@pytest.mark.parametrize("options", [{"collect_bytes": -1}, {"threaded": False}])
def test_measures_refused(options):
    with pytest.raises(ValueError, match=r"collect_bytes=.* is out of range"):
        WriteBehind(MemoryBackend(3, adam_schema(1)), **options)
