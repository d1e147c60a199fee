"""The compressed Zarr backend: the suite, failing disks, and what is left after a kill."""

import errno
import os
import shutil
import threading

import numpy as np
import pytest
import zarr
from test_golden import make_tables
from zarr_tables import Compressed, damage, decode, files_of, make, occupied

from dsa.backends import compressed_array, settling, zarr_compressed
from dsa.backends.chunk_cache import ChunkCache
from dsa.backends.shards.layout import ArrayLayout, ArraySpec
from dsa.backends.zarr_compressed import CompressedZarrBackend
from dsa.backends.zarr_group import array_layouts
from dsa.errors import StateClosedError
from dsa.kernels.threads import thread_limit
from dsa.schema import TORN, adam_schema
from dsa.testing import BackendConformance, assert_records_equal, random_records

SCHEMA = adam_schema(3)
ROWS = 2_000


class TestCompressedZarrBackend(BackendConformance):
    """With one shard for each field."""

    shard_bytes = None
    cache_bytes = 1 << 22

    def create(self, path, rows, schema):
        return CompressedZarrBackend.create(
            path, rows, schema, shard_bytes=self.shard_bytes, cache_bytes=self.cache_bytes
        )

    def reopen(self, path, description):
        return CompressedZarrBackend.open(path, description, cache_bytes=self.cache_bytes)

    def read_raw(self, path, description):
        return decode(path, description)

    def damage(self, path, description, row):
        return damage(path, description, row)


class TestSmallShardsAndCache(TestCompressedZarrBackend):
    """Shards of a few chunks and a cache of a few slots, so that batches go in pieces."""

    shard_bytes = 1 << 14
    cache_bytes = 40_000


HOOKS = Compressed(shard_bytes=1 << 12)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "table"


def names_of(path):
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("existing", ["file", "directory"])
def test_create_does_not_touch_what_exists(path, existing):
    path.write_bytes(b"notes") if existing == "file" else path.mkdir()
    with pytest.raises(FileExistsError, match="table"):
        CompressedZarrBackend.create(path, 100, SCHEMA)
    assert path.is_file() == (existing == "file")


def test_a_creation_that_fails_leaves_nothing(path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(compressed_array, "shard_label", refuse)
    with pytest.raises(OSError, match="no room"):
        CompressedZarrBackend.create(path, 100, SCHEMA)
    assert not any(path.parent.iterdir())


def test_read_only(path):
    description, records = make(HOOKS, path, ROWS, SCHEMA)
    leftover = path / "w" / "c" / "1" / "0.tmp"
    leftover.write_bytes(b"half a shard")
    before = files_of(path)
    backend = HOOKS.reopen(path, description, writable=False)
    assert_records_equal(backend.read(np.arange(ROWS)), records)
    backend.hint(np.arange(ROWS))
    with pytest.raises(OSError, match="opened for reading") as caught:
        backend.write(np.array([0]), records[:1])
    assert caught.value.errno == errno.EROFS
    backend.flush()
    backend.close()
    assert files_of(path) == before
    HOOKS.reopen(path, description).close()
    assert not leftover.exists()


@pytest.mark.parametrize(
    "use",
    [
        lambda backend: backend.read(np.array([0])),
        lambda backend: backend.write(np.array([0]), np.zeros(1, SCHEMA.dtype)),
        lambda backend: list(backend.scan(0, 3)),
        lambda backend: backend.hint(np.array([0])),
        lambda backend: backend.flush(),
    ],
    ids=["read", "write", "scan", "hint", "flush"],
)
def test_use_after_close(path, use):
    backend = CompressedZarrBackend.create(path, 3, SCHEMA)
    backend.close()
    with pytest.raises(StateClosedError):
        use(backend)


def test_a_fresh_table_takes_little_and_zeros_take_nothing(path):
    schema = adam_schema(64)
    backend = CompressedZarrBackend.create(path, 100_000, schema)
    assert occupied(path) < 1 << 20
    backend.write(np.arange(100_000), np.zeros(100_000, schema.dtype))
    assert occupied(path) < 1 << 20
    records = np.zeros(100_000, schema.dtype)
    records["w"] = np.random.default_rng(1).standard_normal((100_000, 64))
    records["s"] = 1
    backend.write(np.arange(100_000), records)
    backend.close()
    assert occupied(path) < 0.4 * records.nbytes


def test_a_write_rewrites_each_shard_once(path, monkeypatch):
    """Every field of every shard that holds a row, and no other."""
    description, _ = make(HOOKS, path, ROWS, SCHEMA)
    backend = HOOKS.reopen(path, description)
    shard_rows = array_layouts(description)[0].shard_rows
    replaced = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (replaced.append(new), replace(old, new)))
    rows = np.sort(np.concatenate([np.arange(0, 50, 3), shard_rows * 2 + np.arange(0, shard_rows, 7)]))
    backend.write(rows, random_records(SCHEMA, len(rows), 1))
    wanted = {path / field / "c" / shard / "0" for field in "wmv" for shard in "02"}
    wanted |= {path / field / "c" / shard for field in "tsc" for shard in "02"}
    assert sorted(replaced) == sorted(wanted)
    backend.close()


@pytest.mark.parametrize("name", ["write", "fdatasync", "replace", "open"])
@pytest.mark.parametrize("nth", range(12))
def test_a_disk_that_refuses(path, monkeypatch, name, nth):
    """Rows are old or new, no other changes, readers see whole shards, and trying again works."""
    description, old = make(HOOKS, path, ROWS, SCHEMA)
    names = names_of(path)
    backend = HOOKS.reopen(path, description)
    backend.read(np.arange(0, ROWS, 5))
    rows = np.arange(100, 700, 2)
    new = random_records(SCHEMA, len(rows), 1)
    function, calls = getattr(os, name), 0

    def failing(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == nth + 1:
            raise OSError(errno.ENOSPC, "no room")
        return function(*arguments, **options)

    monkeypatch.setattr(os, name, failing)
    with pytest.raises(OSError, match="no room"):
        backend.write(rows, new.copy())
    monkeypatch.setattr(os, name, function)
    both = old.copy()
    both[rows] = new
    found = decode(path, description)
    assert_marked(backend.read(np.arange(ROWS)), found, rows)
    for field in SCHEMA.names:
        agree = (bits(found[field]) == bits(old[field])) | (bits(found[field]) == bits(both[field]))
        assert agree.all()
    assert names_of(path) == names
    backend.write(rows, new)
    assert_records_equal(backend.read(np.arange(ROWS)), both)
    backend.close()
    assert_records_equal(decode(path, description), both)


def assert_marked(found, stored, rows):
    """Check that what is read is what the files hold, but for rows that are marked as torn."""
    torn = np.flatnonzero(found["s"] == TORN)
    assert np.isin(torn, rows).all()
    found["s"][torn] = stored["s"][torn]
    assert_records_equal(found, stored)


def bits(field):
    """Return the bytes of each row as one row of a matrix."""
    return np.ascontiguousarray(field).view(np.uint8).reshape(len(field), -1)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("nth", range(12))
def test_an_interrupt_at_a_rename(path, monkeypatch, moment, nth):
    """Ctrl-C between a rename and what memory knows of it: the next read looks at the file again."""
    description, old = make(HOOKS, path, ROWS, SCHEMA)
    backend = HOOKS.reopen(path, description)
    backend.read(np.arange(ROWS))
    rows = np.arange(100, 700, 2)
    new = random_records(SCHEMA, len(rows), 1)
    replace, calls = os.replace, 0

    def interrupted(source, target):
        nonlocal calls
        calls += 1
        if calls == nth + 1 and moment == "before":
            raise KeyboardInterrupt
        replace(source, target)
        if calls == nth + 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backend.write(rows, new.copy())
    monkeypatch.undo()
    assert_marked(backend.read(np.arange(ROWS)), decode(path, description), rows)
    backend.write(rows, new)
    old[rows] = new
    assert_records_equal(backend.read(np.arange(ROWS)), old)
    backend.close()


@pytest.fixture
def two_versions(path):
    """A table and a copy of it before its rows 100, 102, ..., 698 were written again."""
    description, old = make(HOOKS, path, ROWS, SCHEMA, stamps=4)
    rows = np.arange(100, 700, 2)
    old[rows[-3:]] = np.zeros(1, SCHEMA.dtype)  # rows of zeros have the checksum 0
    backend = HOOKS.reopen(path, description)
    backend.write(rows[-3:], old[rows[-3:]])
    backend.close()
    shutil.copytree(path, path.with_name("before"))
    new = old.copy()
    new[rows] = random_records(SCHEMA, len(rows), 1)
    new["s"][rows] = 5
    backend = HOOKS.reopen(path, description)
    backend.write(rows, new[rows])
    backend.close()
    return description, old, new, rows


def put_back(path, fields):
    """Replace some fields' shards by those of the time before, and keep the later ones aside."""
    for field in fields:
        (path / field / "c").rename(path.with_name(f"later-{field}"))
        shutil.copytree(path.with_name("before") / field / "c", path / field / "c")


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("fields", ["w", "m", "v", "t", "s", "c", "wm", "wmvts", "vc"])
def test_fields_of_different_times_are_torn_rows(path, two_versions, fields, writable):
    """The rows that differ are marked, again and again; all others are as they were."""
    description, _, new, rows = two_versions
    put_back(path, fields)
    backend = HOOKS.reopen(path, description, writable=writable)
    torn = np.isin(np.arange(ROWS), rows)
    for _ in range(2):
        found = backend.read(np.arange(ROWS))
        assert (found["s"] == TORN).tolist() == torn.tolist()
        assert_records_equal(found[~torn], new[~torn])
    assert (backend.read(rows[:7])["s"] == TORN).all()
    for start, block in backend.scan(0, ROWS):
        assert ((block["s"] == TORN) == torn[start : start + len(block)]).all()
    backend.close()


@pytest.mark.parametrize("known", [False, True])
def test_torn_rows_keep_their_mark_until_they_are_written(path, two_versions, known):
    """Whether their chunks are in the cache or not, and in the files."""
    description, _, new, rows = two_versions
    put_back(path, "m")
    backend = HOOKS.reopen(path, description)
    if known:
        backend.read(np.arange(ROWS))
    beside = rows[10:20] + 1
    new[beside] = random_records(SCHEMA, len(beside), 2)
    backend.write(beside, new[beside])
    healed = rows[13:200]
    backend.write(healed, new[healed])
    torn = np.isin(np.arange(ROWS), np.setdiff1d(rows, healed))
    for _ in range(2):
        found = backend.read(np.arange(ROWS))
        assert (found["s"] == TORN).tolist() == torn.tolist()
        assert_records_equal(found[~torn], new[~torn])
        backend.close()
        backend = HOOKS.reopen(path, description)
    backend.write(rows, new[rows])
    assert_records_equal(backend.read(np.arange(ROWS)), new)
    backend.close()


def test_a_reader_looks_again_beside_a_writer(path, two_versions, monkeypatch):
    """A row that another process is replacing is no torn row: it is whole when all shards are in place."""
    description, _, new, rows = two_versions
    put_back(path, "vsc")
    reader = HOOKS.reopen(path, description, writable=False)
    assert (reader.read(rows)["s"] == TORN).all()

    def finish(seconds):
        for field in "vsc":
            for late in path.with_name(f"later-{field}").rglob("*"):
                if late.is_file():
                    target = path / field / "c" / late.relative_to(path.with_name(f"later-{field}"))
                    os.replace(late, target)

    monkeypatch.setattr(settling.time, "sleep", finish)
    assert_records_equal(reader.read(rows), new[rows])
    assert_records_equal(reader.read(np.arange(ROWS)), new)
    reader.close()


def test_a_forked_child_follows_what_its_parent_replaces(path, monkeypatch):
    """After its first read too, when it knows where the chunks were."""
    description, records = make(HOOKS, path, ROWS, SCHEMA)
    parent = HOOKS.reopen(path, description)
    child = Compressed(shard_bytes=1 << 12, cache_bytes=1).reopen(path, description)
    monkeypatch.setattr(zarr_compressed.os, "getpid", lambda: -1)
    for number in range(3):
        records[::2] = random_records(SCHEMA, ROWS // 2, number)
        parent_writes(parent, np.arange(0, ROWS, 2), records[::2].copy(), monkeypatch)
        assert_records_equal(child.read(np.arange(ROWS)), records)
    for backend in (parent, child):
        backend.close()


def parent_writes(parent, rows, records, monkeypatch):
    """Write as the process that has made the backend."""
    with monkeypatch.context() as patch:
        patch.setattr(zarr_compressed.os, "getpid", lambda: parent._shared.process)
        parent.write(rows, records)


def test_the_checksums_are_those_of_the_records(path):
    """An oracle with Python's integers; of rows that were never written, or are zero, they are 0."""
    backend = HOOKS.create(path, ROWS, SCHEMA)
    rows = np.arange(0, ROWS, 3)
    records = random_records(SCHEMA, len(rows), 1)
    records[5] = np.zeros(1, SCHEMA.dtype)
    backend.write(rows, records)
    expected = np.zeros(ROWS, np.uint32)
    expected[rows] = make_tables.checksums(records)
    stored = zarr.open_group(path, mode="r")["c"][:]
    assert stored.view(np.uint32).tolist() == expected.tolist()
    assert expected[rows[5]] == 0
    backend.close()


def test_the_cache_follows_writes(path):
    """Rows are read, written and read again, with a cache that holds all, some or hardly any of them."""
    for cache_bytes in (1, 5_000, 1 << 20):
        hooks = Compressed(shard_bytes=1 << 12, cache_bytes=cache_bytes)
        table = path.with_name(f"table-{cache_bytes}")
        backend = hooks.create(table, ROWS, SCHEMA)
        model = np.zeros(ROWS, SCHEMA.dtype)
        rng = np.random.default_rng(cache_bytes)
        for number in range(25):
            rows = np.flatnonzero(rng.random(ROWS) < rng.choice([0.003, 0.1, 0.9]))
            with thread_limit(1 + number % 2):
                assert_records_equal(backend.read(rows), model[rows])
                model[rows] = random_records(SCHEMA, len(rows), number)
                backend.write(rows, model[rows])
        assert_records_equal(backend.read(np.arange(ROWS)), model)
        backend.close()
        assert_records_equal(decode(table, backend.describe()), model)


def test_reads_beside_writes_through_a_small_cache(path):
    """Rows that no write names stay right while their chunks come and go."""
    backend = Compressed(shard_bytes=1 << 12, cache_bytes=20_000).create(path, ROWS, SCHEMA)
    records = random_records(SCHEMA, ROWS, 0)
    backend.write(np.arange(ROWS), records.copy())
    still = np.arange(1, ROWS, 2)
    stop, wrong = threading.Event(), []

    def read(seed):
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            rows = np.sort(rng.choice(still, 60, replace=False))
            if backend.read(rows).tobytes() != records[rows].tobytes():
                wrong.append(rows)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for number in range(14):
        rows = np.arange(2 * (number % 7), ROWS, 14)
        backend.write(rows, random_records(SCHEMA, len(rows), number))
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    backend.close()


def test_reads_go_on_beside_each_other(path):
    """Two threads that decompress do so at the same time: neither waits for the other's chunks."""
    backend = HOOKS.create(path, ROWS, SCHEMA)
    records = random_records(SCHEMA, ROWS, 0)
    backend.write(np.arange(ROWS), records.copy())
    both = threading.Barrier(2, timeout=60)
    decode_chunk = compressed_array.decode_chunk
    waited = threading.local()

    def meeting(layout, encoded, out=None):
        if not hasattr(waited, "done"):
            waited.done = True
            both.wait()
        return decode_chunk(layout, encoded, out)

    compressed_array.decode_chunk = meeting
    halves = [np.arange(0, ROWS // 2), np.arange(ROWS // 2, ROWS)]
    found = [None, None]
    try:
        threads = [
            threading.Thread(target=lambda i=i: found.__setitem__(i, backend.read(halves[i]))) for i in (0, 1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        compressed_array.decode_chunk = decode_chunk
    for half, part in zip(halves, found, strict=True):
        assert_records_equal(part, records[half])
    backend.close()


class TestChunkCache:
    """The slots by themselves."""

    def cache(self, slots, chunks=10):
        layout = ArrayLayout(ArraySpec("w", "<f4", chunks * 4, 2), 4, 8)
        return ChunkCache([layout], slots * layout.chunk_bytes)

    def fill(self, cache, chunks):
        hold = cache.hold(np.array(chunks))
        cache.release(hold, hold.missing)
        return hold

    def test_what_is_published_is_found(self):
        cache = self.cache(4)
        hold = cache.hold(np.array([2, 3, 7]))
        assert hold.missing.tolist() == [0, 1, 2]
        assert cache.find(np.array([2, 3, 7])).tolist() == [-1, -1, -1]
        cache.release(hold, np.array([0, 2]))
        assert (cache.find(np.array([2, 3, 7])) >= 0).tolist() == [True, False, True]
        assert len(set(hold.slots.tolist())) == 3

    def test_the_least_recently_used_makes_room(self):
        cache = self.cache(3)
        for chunk in (0, 1, 2, 0, 5):
            self.fill(cache, [chunk])
        assert (cache.find(np.arange(6)) >= 0).tolist() == [True, False, True, False, False, True]

    def test_what_is_held_is_not_taken_away(self):
        cache = self.cache(3)
        self.fill(cache, [0, 1])
        held = cache.hold(np.array([0, 4]))
        assert held.missing.tolist() == [1]
        other = self.fill(cache, [5, 6, 7])
        assert other.chunks.tolist() == [5]
        assert not set(other.slots.tolist()) & set(held.slots.tolist())
        cache.release(held, held.missing)
        assert (cache.find(np.array([0, 4])) >= 0).all()

    def test_a_full_cache_lends_memory_of_its_own(self):
        cache = self.cache(2)
        held = cache.hold(np.array([0, 1]))
        alone = cache.hold(np.array([3, 4]))
        assert (alone.chunks.tolist(), alone.in_cache) == ([3], False)
        assert not np.shares_memory(alone.fields[0], cache.fields[0])
        cache.release(alone, alone.missing)
        assert cache.find(np.array([3])) == -1
        cache.release(held, held.missing)

    def test_a_hold_that_is_dropped_holds_nothing(self):
        """As an interrupt does that falls between a call and the name for its result."""
        cache = self.cache(2)
        cache.hold(np.array([0, 1]))
        again = cache.hold(np.array([2, 3]))
        assert again.in_cache
        assert len(again.chunks) == 2

    def test_a_forgotten_chunk_may_come_back_elsewhere(self):
        cache = self.cache(3)
        first = self.fill(cache, [1])
        cache.forget(np.array([1]))
        second = self.fill(cache, [1])
        assert first.slots != second.slots
        self.fill(cache, [6, 7])
        assert (cache.find(np.array([1, 6, 7])) >= 0).all()
