"""The mapped Zarr backend: the suite, what it keeps on disk, and what it refuses."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from zarr_tables import Mapped, damage, decode, files_of, make, occupied, open_files

import dsa.schema
from dsa.backends import Zarr, ZarrBackend, zarr_group
from dsa.backends.zarr_group import array_layouts, checksum_layouts, describe_group
from dsa.errors import DiskSpaceError, StateClosedError
from dsa.schema import Field, Schema, adam_schema
from dsa.testing import BackendConformance, assert_records_equal, random_records

SCHEMA = adam_schema(3)


class TestZarrBackend(BackendConformance):
    """With shards of the default size: one for each field."""

    shard_bytes = None
    allocate = "reserve"

    def create(self, path, rows, schema):
        return ZarrBackend.create(path, rows, schema, shard_bytes=self.shard_bytes, allocate=self.allocate)

    def reopen(self, path, description):
        return ZarrBackend.open(path, description)

    def read_raw(self, path, description):
        return decode(path, description)

    def damage(self, path, description, row):
        return damage(path, description, row)


class TestManyShards(TestZarrBackend):
    """Shards of a few chunks, so that batches and blocks cross their bounds."""

    shard_bytes = 1 << 13
    allocate = "sparse"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "table"


def test_description(path):
    description, _ = make(Mapped(), path, 100, SCHEMA)
    assert (description["kind"], description["rows"], description["compression"]) == ("zarr", 100, None)
    assert Schema.from_json(description["schema"]) == SCHEMA


def test_an_open_table_is_what_the_description_says_whatever_the_rules_are_now(path, monkeypatch):
    """The cuts are stored: another default does not make another table of it."""
    description, records = make(Mapped(), path, 100_000, SCHEMA)
    monkeypatch.setattr(zarr_group, "_LIVE_SHARD_BYTES", 1 << 14)
    assert describe_group(100_000, SCHEMA, None, None)["cuts"] != description["cuts"]
    backend = ZarrBackend.open(path, description)
    assert_records_equal(backend.read(np.arange(100_000)), records)
    backend.close()


@pytest.mark.parametrize("name", ["file", "directory", "table"])
def test_create_does_not_touch_what_exists(path, name):
    if name == "file":
        path.write_bytes(b"notes")
    elif name == "directory":
        path.mkdir()
    else:
        make(Mapped(), path, 10, SCHEMA)
    before = files_of(path.parent)
    with pytest.raises(FileExistsError, match="table"):
        ZarrBackend.create(path, 100, SCHEMA)
    assert files_of(path.parent) == before


@pytest.mark.parametrize(
    ("options", "match"),
    [({"allocate": "lazily"}, "allocate='lazily'"), ({"rows": 0}, "rows=0 is out of range")],
)
def test_create_refuses(path, options, match):
    with pytest.raises(ValueError, match=match):
        ZarrBackend.create(path, **{"rows": 3, "schema": SCHEMA, **options})
    assert not any(path.parent.iterdir())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"compression": "lz4"}, "compression='lz4' is not known: use None or 'zstd'"),
        ({"shard_bytes": 0}, "shard_bytes=0 is out of range"),
        ({"shard_bytes": True}, "shard_bytes=True is out of range"),
        ({"shard_bytes": 1e6}, "shard_bytes=1000000.0 is out of range"),
        ({"cache_bytes": 10}, "cache_bytes=10 is for compressed shards"),
        ({"overlay_bytes": 10}, "overlay_bytes=10 is for compressed shards"),
        ({"compression": "zstd", "cache_bytes": -1}, "cache_bytes=-1 is out of range"),
    ],
)
def test_options_refused(options, match):
    with pytest.raises(ValueError, match=match):
        Zarr(**options)


def test_read_only(path):
    description, records = make(Mapped(1 << 12), path, 1_000, SCHEMA)
    before = files_of(path)
    backend = ZarrBackend.open(path, description, writable=False)
    assert_records_equal(backend.read(np.arange(1_000)), records)
    assert_records_equal(next(backend.scan(0, 1))[1], records[:1])
    backend.hint(np.arange(1_000))
    with pytest.raises(OSError, match="opened for reading") as caught:
        backend.write(np.array([0]), random_records(SCHEMA, 1, seed=9))
    assert caught.value.errno == errno.EROFS
    backend.flush()
    backend.close()
    assert files_of(path) == before


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
    backend = ZarrBackend.create(path, 3, SCHEMA)
    backend.close()
    with pytest.raises(StateClosedError):
        use(backend)


def test_scan_under_way_at_close(path):
    """The next block is an error, not a look into memory that is gone."""
    backend = ZarrBackend.create(path, 200_000, adam_schema(16), allocate="sparse")
    scan = backend.scan(0, 200_000)
    first, records = next(scan)
    backend.close()
    assert first == 0
    assert not records.view(np.uint8).any()
    with pytest.raises(StateClosedError):
        next(scan)


def test_a_table_can_be_moved(path):
    description, records = make(Mapped(1 << 12), path, 1_000, SCHEMA)
    moved = path.rename(path.with_name("elsewhere"))
    backend = ZarrBackend.open(moved, description)
    assert_records_equal(backend.read(np.arange(1_000)), records)
    backend.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the system lists open files")
def test_nothing_stays_open(path):
    """Closed mappings: a shard can be renamed or removed where mapped files can't be."""
    description, _ = make(Mapped(1 << 12), path, 1_000, SCHEMA)
    ZarrBackend.open(path, description).close()
    with pytest.raises(TypeError) as failure:
        ZarrBackend.open(path, description, writable=False).read(None)
    assert failure.tb is not None
    del failure
    (path / "t" / "c" / "0").write_bytes(b"")
    with pytest.raises(ValueError, match="t"):
        ZarrBackend.open(path, description)
    assert not any(str(path) in name for name in open_files())
    assert str(path) not in Path("/proc/self/maps").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="limits are set by means of Linux")
def test_one_descriptor_for_each_shard(path):
    backend = ZarrBackend.create(path, 3_000, SCHEMA, shard_bytes=1 << 12)
    description = backend.describe()
    shards = sum(layout.shards for layout in array_layouts(description) + checksum_layouts(description))
    assert sum(str(path) in name for name in open_files()) == shards > 20
    backend.hint(np.arange(3_000))
    backend.flush()
    assert sum(str(path) in name for name in open_files()) == shards
    backend.close()


@pytest.mark.disk
def test_sparse_stays_sparse(path):
    """What is occupied is what was written, after reads, hints, flushes and scans too."""
    backend = ZarrBackend.create(path, 500_000, adam_schema(16), allocate="sparse", shard_bytes=1 << 22)
    rows = np.array([0, 250_000, 499_999])
    backend.write(rows, random_records(backend.schema, 3, seed=1))
    backend.flush()
    backend.hint(np.arange(0, 500_000, 1_000))
    assert not backend.read(np.arange(1, 500_000, 5_000)).view(np.uint8).any()
    assert sum(len(records) for _, records in backend.scan(0, 500_000)) == 500_000
    backend.close()
    assert occupied(path) < 1 << 21
    assert sum(len(content) for content in files_of(path).values()) > 100_000_000


def test_reserve_occupies_everything(path):
    ZarrBackend.create(path, 20_000, adam_schema(16), allocate="reserve", shard_bytes=1 << 18).close()
    assert occupied(path) >= 20_000 * adam_schema(16).dtype.itemsize


def test_a_disk_without_room(path, monkeypatch):
    monkeypatch.setattr(dsa.backends.system, "available_bytes", lambda directory: 1_000)
    with pytest.raises(DiskSpaceError, match="bytes are needed"):
        ZarrBackend.create(path, 1_000, SCHEMA)
    assert not any(path.parent.iterdir())


def test_offsets_beyond_32_bits(path):
    """A wrapped offset would hit another row without an error."""
    schema, last = Schema(64, (Field("w", "float32", "element"),)), 39_999_999
    backend = ZarrBackend.create(path, last + 1, schema, allocate="sparse", shard_bytes=1 << 34)
    assert array_layouts(backend.describe())[0].shards == 1
    wrapped = (last * 256) % 2**32 // 256
    rows = np.array([wrapped, wrapped + 1, last - 1, last])
    records = random_records(schema, 4, seed=1)
    backend.hint(rows)
    backend.write(rows[:3], records[:3])
    backend.write(rows[3:], records[3:])
    assert_records_equal(backend.read(rows), records)
    (block,) = [block for _, block in backend.scan(last, last + 1)]
    assert_records_equal(block, records[3:])
    backend.close()
    assert occupied(path) < 1 << 20


def test_c42_files_and_chunks(tmp_path):
    """A table of the field's size has few files, chunks that readers take, and nothing beyond its rows."""
    for compression, most in ((None, 100), ("zstd", 10_000)):
        layouts = array_layouts(describe_group(50_000_000, adam_schema(128), compression, None))
        assert sum(layout.shards for layout in layouts) <= most
        for layout in layouts:
            assert 1 <= layout.chunk_rows <= 50_000_000
            assert layout.chunk_bytes < 2**31
        for layout in array_layouts(describe_group(10, adam_schema(4), compression, None)):
            assert (layout.shards, layout.chunks_per_shard, layout.chunk_rows) == (1, 1, 10)
    wide = array_layouts(describe_group(3, adam_schema(50_000_000), None, None))
    assert max(layout.chunk_bytes for layout in wide) < 2**31


def test_shards_are_balanced():
    """Every file has a shard's length: the last must not be mostly beyond the table's end."""
    for rows in (1_000_000, 1_100_000, 10_000_000):
        for layout in array_layouts(describe_group(rows, adam_schema(128), None, None)):
            beyond = layout.shards * layout.shard_rows - rows
            assert beyond <= layout.shards * layout.chunk_rows


CHILD = """
import resource, sys
from pathlib import Path
from dsa.backends.zarr import ZarrBackend
from dsa.schema import adam_schema
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
path = Path(sys.argv[1])
try:
    ZarrBackend.create(path, 100_000, adam_schema(8), shard_bytes=1 << 15, allocate="sparse")
except OSError as error:
    print(error.errno, path.exists(), error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits are set by means of Linux")
def test_too_many_shards_for_the_process(path):
    environment = os.environ | {"PYTHONPATH": str(Path(dsa.schema.__file__).parents[1])}
    command = [sys.executable, "-c", CHILD, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    number, left, message = done.stdout.split(" ", 2)
    assert (int(number), left) == (errno.EMFILE, "False")
    assert "raise the limit (ulimit -n), close states" in message
