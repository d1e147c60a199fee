"""Sparse tables on a full disk: an error before anything is stored, never a signal."""

import errno
import fcntl
import os
import shutil
import struct
import subprocess
import sys

import numpy as np
import nursery
import pytest
from zarr_tables import Mapped, occupied

from dsa.backends import system
from dsa.backends.memmap import MemmapBackend
from dsa.backends.writer import WriteBehind
from dsa.errors import DiskSpaceError
from dsa.schema import Field, Schema, adam_schema
from dsa.testing import BackendHooks, assert_records_equal, random_records

pytestmark = [
    pytest.mark.disk,
    pytest.mark.skipif(sys.platform != "linux", reason="disks are filled by means of Linux"),
]

DISKS = {
    "ext4": 'truncate -s 24M "{0}.img" && mkfs.ext4 -q -F -b 4096 "{0}.img" && mount -o loop "{0}.img" "{0}"',
    "small blocks": 'truncate -s 24M "{0}.img" && mkfs.ext4 -q -F -b 1024 "{0}.img" && '
    'mount -o loop "{0}.img" "{0}"',
}

CHILD = """
import os, sys
from pathlib import Path
import numpy as np
from dsa.backends import MemmapBackend, ZarrBackend
from dsa.errors import DiskSpaceError
from dsa.schema import Field, Schema, adam_schema
from dsa.testing import assert_records_equal, random_records

kind = {"memmap": MemmapBackend, "zarr": ZarrBackend}[sys.argv[1]]
directory, stamped = sys.argv[2:]
schema = adam_schema(64) if stamped == "adam" else Schema(190, (Field("w", "float32", "element"),))
ballast = Path(directory, "ballast")
ballast.write_bytes(bytes(1 << 20))
os.sync()
backend = kind.create(Path(directory, "table"), 60_000, schema, allocate="sparse")
model = np.zeros(60_000, schema.dtype)

def step(rows, seed):
    backend.reserve(rows)
    records = random_records(schema, len(rows), seed)
    if stamped == "adam":
        records["s"] = 1
    model[rows] = records
    backend.write(rows, records)

def same():
    for first, records in backend.scan(0, len(model)):
        assert_records_equal(records, model[first : first + len(records)])

order = np.random.default_rng(0).permutation(60_000).reshape(-1, 200)
written = []
for number, some in enumerate(order):
    rows = np.sort(some)
    try:
        step(rows, number)
    except DiskSpaceError as error:
        assert directory in str(error), error
        break
    written.append(rows)
assert 5 < len(written) < 200, len(written)
same()
for attempt in range(3):
    try:
        step(rows, 7)
        raise SystemExit("the disk was full and is not")
    except DiskSpaceError:
        same()
for rows_of in written:  # what has its blocks can be written however full the disk is
    step(rows_of, 1)
same()
backend.flush()
description = backend.describe()
backend.close()
backend = kind.open(Path(directory, "table"), description)
same()
for rows_of in written[::3]:
    step(rows_of, 2)
try:
    step(rows, 8)
    raise SystemExit("the disk was full and is not, after it was opened again")
except DiskSpaceError:
    same()
ballast.unlink()
os.sync()
step(rows, 9)
same()
backend.close()
print("done", len(written))
"""


MOUNTED = """
import ctypes, subprocess, sys
CLONE_NEWNS = 0x20000
assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["sh", "-c", sys.argv.pop(1)], check=True)
"""


def mounting(disk, directory):
    """Return the command that makes `directory` a small file system of its own, or skip."""
    mount = DISKS[disk].format(directory)
    command = ["unshare", "--mount", "sh", "-c", mount]
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare")
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip(f"no {disk} may be mounted here")
    return mount


@pytest.mark.parametrize("disk", DISKS)
@pytest.mark.parametrize("kind", ["memmap", "zarr"])
@pytest.mark.parametrize("schema", ["adam", "weights"])
def test_a_disk_that_fills_up(tmp_path, disk, kind, schema):
    directory = tmp_path / "disk"
    directory.mkdir()
    done = nursery.run(MOUNTED + CHILD, mounting(disk, directory), kind, directory, schema)
    assert (done.returncode, done.stdout[:4]) == (0, "done"), done.stderr[-2000:]


class Memmap(BackendHooks):
    def create(self, path, rows, schema, allocate="sparse"):
        return MemmapBackend.create(path, rows, schema, allocate=allocate)

    def reopen(self, path, description):
        return MemmapBackend.open(path, description)


HOOKS = {"memmap": Memmap(), "zarr": Mapped(shard_bytes=1 << 18)}
SCHEMAS = {
    "adam": adam_schema(32),
    "wide": adam_schema(800),
    "weights": Schema(90, (Field("w", "float32", "element"),)),
}
WAYS = {
    "populate": {},
    "fallocate": {"populate": lambda *ignored: False},
    "byte by byte": {"populate": lambda *ignored: False, "allocate_range": lambda *ignored: False},
}
by_kind = pytest.mark.parametrize("kind", HOOKS)


def size_on_disk(path):
    return occupied(path) if path.is_dir() else path.stat().st_blocks * 512


def synced_size(path):
    """Return what is occupied once it is on the disk: before, not all of it is counted."""
    return sum(map(_synced_blocks, [path, *path.rglob("*")] if path.is_dir() else [path]))


def _synced_blocks(file):
    """Return the bytes of the blocks that a file's content has, without those that say where they are.

    Of the latter a file system may let one go when stretches are joined. See struct fiemap, linux/fiemap.h.
    """
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if file.is_dir():
            return 0
        most = 4_000
        asked = bytearray(struct.pack("=QQIIII", 0, 2**64 - 1, 1, 0, most, 0) + bytes(56 * most))
        try:
            fcntl.ioctl(descriptor, 0xC020660B, asked)
        except OSError:  # a file system that does not tell
            return os.fstat(descriptor).st_blocks * 512
    finally:
        os.close(descriptor)
    found = struct.unpack_from("=I", asked, 20)[0]
    assert found < most
    return sum(struct.unpack_from("=Q", asked, 32 + 56 * each + 16)[0] for each in range(found))


@by_kind
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_blocks_are_taken_and_nothing_changes(tmp_path, monkeypatch, kind, schema, way):
    for name, stand_in in way.items():
        monkeypatch.setattr(system, name, stand_in)
    path = tmp_path / "table"
    backend = HOOKS[kind].create(path, 3_000, schema)
    rng = np.random.default_rng(1)
    model = np.zeros(3_000, schema.dtype)
    for seed in range(3):
        rows = np.flatnonzero(rng.random(3_000) < 0.05)
        backend.reserve(rows)
        before = synced_size(path)
        assert before >= len(rows) * schema.dtype.itemsize
        assert_records_equal(backend.read(np.arange(3_000)), model)
        model[rows] = random_records(schema, len(rows), seed)
        backend.write(rows, model[rows])
        assert synced_size(path) == before  # every block was there
    backend.close()


@by_kind
def test_torn_records_are_reserved_again(tmp_path, kind):
    """A stamp may be on the disk where the rest of its record is a hole."""
    path = tmp_path / "table"
    backend = HOOKS[kind].create(path, 300, adam_schema(2_000))
    records = np.zeros(1, backend.schema.dtype)
    records["s"] = 5
    rows = np.array([100])
    if kind == "memmap":
        backend.records[100] = records[0]
    else:
        backend._arrays[-1].scatter(rows, records)
    assert backend.read(rows)["s"] < 0
    backend.reserve(rows)
    backend.flush()
    assert size_on_disk(path) >= 24_000
    backend.close()


@by_kind
def test_tables_with_all_their_blocks_are_left_alone(tmp_path, monkeypatch, kind):
    path = tmp_path / "table"
    hooks = HOOKS[kind] if kind == "memmap" else Mapped(shard_bytes=1 << 18, allocate="reserve")
    options = {"allocate": "reserve"} if kind == "memmap" else {}
    backend = hooks.create(path, 3_000, adam_schema(32), **options)
    for name in ("populate", "allocate_range", "write_at"):
        monkeypatch.setattr(system, name, lambda *ignored: pytest.fail("there is nothing to do"))
    for _ in range(2):
        backend.reserve(np.arange(3_000))
        backend.close()
        backend = hooks.reopen(path, backend.describe())
    backend.close()


def test_a_copy_of_a_reserved_table_may_have_holes(tmp_path):
    path = tmp_path / "table"
    backend = MemmapBackend.create(path, 3_000, adam_schema(32))
    backend.close()
    with path.open("r+b") as file:
        size = path.stat().st_size
        file.truncate(4096)
        file.truncate(size)
    backend = MemmapBackend.open(path, backend.describe())
    backend.reserve(np.array([7, 2_000]))
    backend.flush()
    assert 8192 <= size_on_disk(path) < size // 4
    backend.close()


def refuse(*ignored):
    raise OSError(errno.ENOSPC, "injected")


def fault(*ignored):
    raise OSError(errno.EFAULT, "injected")


@by_kind
@pytest.mark.parametrize(
    "way",
    [
        {"populate": fault, "allocate_range": refuse},
        {"populate": lambda *ignored: False, "allocate_range": refuse},
        {
            "populate": lambda *ignored: False,
            "allocate_range": lambda *ignored: False,
            "write_at": refuse,
        },
    ],
    ids=["populate", "fallocate", "byte by byte"],
)
def test_a_refusal_is_an_error_each_time(tmp_path, monkeypatch, kind, way):
    backend = HOOKS[kind].create(tmp_path / "table", 3_000, adam_schema(32))
    rows = np.array([5, 900])
    with monkeypatch.context() as patch:
        for name, stand_in in way.items():
            patch.setattr(system, name, stand_in)
        for _ in range(2):
            with pytest.raises(DiskSpaceError, match="allocate='reserve'"):
                backend.reserve(rows)
    assert not backend.read(np.arange(3_000)).view(np.uint8).any()
    backend.reserve(rows)
    backend.close()


def test_a_file_that_was_cut_does_not_grow(tmp_path, monkeypatch):
    path = tmp_path / "table"
    backend = MemmapBackend.create(path, 3_000, adam_schema(32), allocate="sparse")
    backend.reserve(np.array([0]))
    os.truncate(path, 8192)
    backend._stamp = -1  # nothing of a page beyond the end is read
    with pytest.raises(OSError, match="was truncated while it was open"):
        backend.reserve(np.array([2_000]))
    assert path.stat().st_size == 8192


def test_waiting_rows_are_not_reserved_again():
    """The thread may be storing them."""

    backend = Noting()
    writer = WriteBehind(backend, collect_bytes=1 << 30)
    writer.write(np.array([1, 5]), np.zeros(2, backend.schema.dtype))
    writer.reserve(np.array([0, 1, 4, 5]))
    writer.drain()
    writer.reserve(np.array([1, 5]))
    assert backend.reserved == [[0, 4], [1, 5]]
    writer.close()


class Noting:
    """A backend that keeps nothing but what it was asked to reserve."""

    schema = adam_schema(2)

    def __init__(self):
        self.reserved = []

    def __len__(self):
        return 10

    def reserve(self, rows):
        self.reserved.append(rows.tolist())

    def write(self, rows, records):
        """Forget."""

    def flush(self):
        """Do nothing."""

    def close(self):
        """Do nothing."""
