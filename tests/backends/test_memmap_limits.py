"""The memmap backend where something runs out: blocks, disk, address space, 32-bit offsets."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import nursery
import pytest

import dsa.schema
from dsa.backends.memmap import MemmapBackend
from dsa.schema import Field, Schema, adam_schema
from dsa.testing import assert_records_equal, random_records

PAGE = 4096
LAST = 39_999_999
WEIGHTS = Schema(64, (Field("w", "float32", "element"),))

pytestmark = [
    pytest.mark.disk,
    pytest.mark.skipif(sys.platform != "linux", reason="limits are set by means of Linux"),
]


@pytest.fixture
def path(tmp_path):
    """Where a table may be made, on a file system that knows holes."""
    hole = tmp_path / "hole"
    hole.touch()
    os.truncate(hole, 2**30)
    if occupied(hole) > 2**20:
        pytest.skip("the file system has no sparse files")
    hole.unlink()
    return tmp_path / "table"


def occupied(path):
    return path.stat().st_blocks * 512


def test_sparse_occupies_what_was_written(path):
    backend = MemmapBackend.create(path, 500_000, adam_schema(16), allocate="sparse")
    rows = np.array([0, 250_000, 499_999])
    records = random_records(backend.schema, 3, seed=1)
    backend.write(rows, records)
    backend.flush()
    assert occupied(path) < 2**20
    backend.hint(np.arange(0, 500_000, 1_000))
    assert not backend.read(np.arange(1, 500_000, 5_000)).view(np.uint8).any()
    backend.close()
    assert occupied(path) < 2**20
    assert path.stat().st_size > 100_000_000


def test_reserve_occupies_everything(path):
    MemmapBackend.create(path, 20_000, adam_schema(16), allocate="reserve").close()
    assert occupied(path) >= path.stat().st_size > 4_000_000


@pytest.mark.parametrize("schema", [WEIGHTS, adam_schema(64)], ids=["weights", "adam"])
def test_offsets_beyond_32_bits(path, schema):
    """A wrapped offset would hit another row without an error: 1,650,065,152 for 64 numbers of float32."""
    backend = MemmapBackend.create(path, LAST + 1, schema, stride="packed", allocate="sparse")
    stride = backend.describe()["stride"]
    wrapped = (LAST * stride) % 2**32 // stride
    neighbours = np.array([wrapped, wrapped + 1, LAST - 1])
    records = random_records(schema, 4, seed=1)
    backend.write(neighbours, records[:3])
    assert raw(path, schema, stride, LAST) == bytes(schema.dtype.itemsize)

    backend.hint(np.array([LAST]))
    backend.write(np.array([LAST]), records[3:])
    backend.flush()

    assert raw(path, schema, stride, LAST) == records[3:].tobytes()
    assert [raw(path, schema, stride, row) for row in neighbours] == [
        record.tobytes() for record in records[:3]
    ]
    assert_records_equal(backend.read(np.append(neighbours, LAST)), records)
    (block,) = [block for _, block in backend.scan(LAST, LAST + 1)]
    assert_records_equal(block, records[3:])
    backend.close()
    assert occupied(path) < 2**20


def test_offset_of_the_case_in_the_field():
    """The numbers that a report of this kind of fault gave."""
    assert LAST * WEIGHTS.dtype.itemsize == 10_239_999_744
    assert LAST * WEIGHTS.dtype.itemsize % 2**32 == 1_650_065_152 == 6_445_567 * WEIGHTS.dtype.itemsize


def raw(path, schema, stride, row):
    with path.open("rb") as file:
        return os.pread(file.fileno(), schema.dtype.itemsize, PAGE + int(row) * stride)


PRELUDE = """
import os, resource, sys
from pathlib import Path
import numpy as np
from dsa.backends.memmap import MemmapBackend
from dsa.schema import adam_schema

def attempt(directory, rows, dim, allocate):
    try:
        path = Path(directory, "table")
        MemmapBackend.create(path, rows, adam_schema(dim), stride="packed", allocate=allocate)
    except (OSError, MemoryError) as error:
        print(getattr(error, "errno", None), os.listdir(directory), error, sep="|")
    else:
        print("created")
"""

ADDRESS_SPACE = """
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
used = int(status["VmSize"].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, resource.RLIM_INFINITY))
attempt(sys.argv[1], 13_000_000, 64, "sparse")
"""

FILE_SIZE = """
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
attempt(sys.argv[1], 20_000, 16, sys.argv[2])
"""

SMALL_DISK = """
attempt(sys.argv[1], 20_000, 16, "reserve")
"""


def child(code, *arguments, prefix=()):
    """Run code after the prelude; check that it ended by itself, and return the parts of its line."""
    if prefix:
        environment = os.environ | {"PYTHONPATH": str(Path(dsa.schema.__file__).parents[1])}
        command = [*prefix, sys.executable, "-c", PRELUDE + code, *map(str, arguments)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    else:
        done = nursery.run(PRELUDE + code, *arguments)
    assert done.returncode == 0, done.stderr
    number, left, message = done.stdout.strip().split("|", 2)
    return number, left, message


def test_too_little_address_space(tmp_path):
    number, left, message = child(ADDRESS_SPACE, tmp_path)
    assert left == "[]"
    assert number in (str(errno.ENOMEM), "None")
    mapped = 13_000_000 * (adam_schema(64).dtype.itemsize + 4)
    assert any(str(size) in message.replace(",", "") for size in (mapped, mapped + PAGE)), message
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("allocate", ["reserve", "sparse"])
def test_file_size_limit(tmp_path, allocate):
    number, left, _ = child(FILE_SIZE, tmp_path, allocate)
    assert number in (str(errno.EFBIG), str(errno.ENOSPC))
    assert left == "[]"


def small_disk(directory):
    """Return the command that runs another where `directory` is a file system of one mebibyte, or skip."""
    mount = f'mount -t tmpfs -o size=1m tmpfs "{directory}" && exec "$@"'
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    prefix = [*unshare, "sh", "-c", mount, "sh"]
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare")
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no tmpfs may be mounted here")
    return prefix


def test_full_disk(tmp_path):
    """A reserved table fails when it is made, by an exception; it does not die by a signal later."""
    number, left, message = child(SMALL_DISK, tmp_path, prefix=small_disk(tmp_path))
    assert number == str(errno.ENOSPC)
    assert left == "[]"
    assert str(tmp_path) in message


FEW_FILES = """
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
made = []
try:
    for number in range(100):
        path = Path(sys.argv[1], f"table-{number}")
        made.append(MemmapBackend.create(path, 500, adam_schema(2), allocate=sys.argv[2]))
except OSError as error:
    left = sorted(os.listdir(sys.argv[1])) == sorted(f"table-{number}" for number in range(len(made)))
    rows = np.arange(500)
    for backend in made:  # advice, reserving and syncing need no descriptor of their own
        backend.hint(rows)
        backend.reserve(rows)
        backend.write(rows, backend.read(rows))
        backend.flush()
    description = made[0].describe()
    try:
        MemmapBackend.open(path.with_name("table-0"), description)
    except OSError as again:
        whole = len(made) > 50 and left
        print(error.errno == again.errno == 24, whole, "ulimit -n" in str(again), error, sep="|")
"""


@pytest.mark.parametrize("allocate", ["reserve", "sparse"])
def test_few_descriptors(tmp_path, allocate):
    """One for each table; with none left, a new table is an error that says so and leaves nothing."""
    number, left, message = child(FEW_FILES, tmp_path, allocate)
    assert (number, left) == ("True", "True")
    assert message.startswith("True|")
    assert "raise the limit (ulimit -n)" in message
