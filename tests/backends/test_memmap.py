"""The memmap backend: the suite for each kind of stride, its file format, damage, and what it refuses."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from dsa.backends import system
from dsa.backends.memmap import MemmapBackend
from dsa.errors import StateClosedError, StateCorruptError, StateError, StateMismatchError
from dsa.schema import Field, Schema, adam_schema
from dsa.testing import CASES, BackendConformance, assert_records_equal, random_records

PAGE = 4096
SCHEMA = adam_schema(3)
WEIGHTS = Schema(64, (Field("w", "float32", "element"),))


def decode(path, description):
    """Return the records of a file: a header page, then N records of `stride` bytes."""
    schema = Schema.from_json(description["schema"])
    content = np.fromfile(path, np.uint8)
    rows = content[PAGE:].reshape(description["rows"], description["stride"])
    return rows[:, : schema.dtype.itemsize].copy().view(schema.dtype).reshape(-1)


def flip(path, at, bit):
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


class TestMemmapBackend(BackendConformance):
    """With the stride that the stated rule chooses."""

    allocate = "reserve"

    def stride(self, schema):
        return None

    def create(self, path, rows, schema):
        return MemmapBackend.create(path, rows, schema, stride=self.stride(schema), allocate=self.allocate)

    def reopen(self, path, description):
        return MemmapBackend.open(path, description)

    def read_raw(self, path, description):
        return decode(path, description)

    def damage(self, path, description, row):
        flip(path, PAGE + row * description["stride"] + 5, bit=3)
        return True


class TestPacked(TestMemmapBackend):
    def stride(self, schema):
        return "packed"


class TestPageSparse(TestMemmapBackend):
    allocate = "sparse"

    def stride(self, schema):
        return "page"


class TestOddStride(TestMemmapBackend):
    """Records lie at every multiple of four, so that 8-byte numbers are not aligned in the file."""

    def stride(self, schema):
        return schema.dtype.itemsize + 12


class TestWideStride(TestMemmapBackend):
    """Every record crosses from one page to another, or soon will."""

    @pytest.fixture(params=["one-number", "mixed"])
    def case(self, request):
        return CASES[request.param]

    def stride(self, schema):
        return schema.dtype.itemsize + PAGE - 12


@pytest.fixture
def path(tmp_path):
    return tmp_path / "table"


def make(path, rows=100, schema=SCHEMA, seed=0, **options):
    """Create, fill and close a table; return its description and records."""
    backend = MemmapBackend.create(path, rows, schema, **options)
    records = random_records(schema, rows, seed)
    backend.write(np.arange(rows), records.copy())
    backend.close()
    return backend.describe(), records


def state_of(path):
    status = path.stat()
    return path.read_bytes(), status.st_mtime_ns


def refused(path, description, error=(StateCorruptError, StateMismatchError), match="table"):
    """Check that the file can't be opened and that trying changed nothing."""
    before = state_of(path)
    for writable in (True, False):
        with pytest.raises(error, match=match):
            MemmapBackend.open(path, description, writable=writable)
    assert state_of(path) == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("stride", [None, "packed", "page", SCHEMA.dtype.itemsize + 12])
def test_size_and_description(path, stride):
    description, _ = make(path, stride=stride)
    assert description["kind"] == "memmap"
    assert description["rows"] == 100
    assert Schema.from_json(description["schema"]) == SCHEMA
    assert path.stat().st_size == PAGE + 100 * description["stride"]
    if isinstance(stride, int):
        assert description["stride"] == stride


@pytest.mark.parametrize("dim", [1, 2, 13, 64, 85, 86, 128, 170, 171, 300, 341, 342, 500, 1024])
def test_strides_by_name(path, dim):
    schema = adam_schema(dim)
    size = schema.dtype.itemsize + 4
    assert make(path, 3, schema, stride="packed")[0]["stride"] == size
    path.unlink()
    stride = make(path, 3, schema, stride="page")[0]["stride"]
    starts = np.arange(10_000) * stride
    pages = (starts + size - 1) // PAGE - starts // PAGE + 1
    assert pages.max() == -(-size // PAGE)


@pytest.mark.parametrize("stride", [0, -48, 40, 44, 46, 47, 49, "pages", ""])
def test_strides_refused(path, stride):
    with pytest.raises(ValueError, match="stride"):
        MemmapBackend.create(path, 3, SCHEMA, stride=stride)
    assert not any(path.parent.iterdir())


def test_unknown_allocation_is_refused(path):
    with pytest.raises(ValueError, match="allocate"):
        MemmapBackend.create(path, 3, SCHEMA, allocate="lazily")
    assert not any(path.parent.iterdir())


@pytest.mark.parametrize("content", [b"", b"notes", bytes(PAGE + 4400)])
def test_create_does_not_touch_an_existing_file(path, content):
    path.write_bytes(content)
    before = state_of(path)
    with pytest.raises(FileExistsError, match="table"):
        MemmapBackend.create(path, 100, SCHEMA)
    assert state_of(path) == before


DAMAGE = {
    "empty": lambda content: b"",
    "one byte": lambda content: content[:1],
    "half a header": lambda content: content[: PAGE // 2],
    "header only": lambda content: content[:PAGE],
    "a byte short": lambda content: content[:-1],
    "a record short": lambda content: content[:-48],
    "a byte long": lambda content: content + b"\0",
    "a record long": lambda content: content + bytes(48),
    "a page long": lambda content: content + bytes(PAGE),
    "header missing": lambda content: content[PAGE:],
    "zeros": lambda content: bytes(len(content)),
    "header zeroed": lambda content: bytes(PAGE) + content[PAGE:],
    "garbage": lambda content: np.random.default_rng(1).bytes(len(content)),
    "text": lambda content: (b"not a table at all\n" * len(content))[: len(content)],
    "header garbage": lambda content: np.random.default_rng(2).bytes(PAGE) + content[PAGE:],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_file_is_refused(path, damage):
    description, _ = make(path, stride="packed")
    path.write_bytes(damage(path.read_bytes()))
    refused(path, description, StateCorruptError)


@pytest.mark.parametrize("pattern", [0xFF, 0x01, 0x80])
def test_every_byte_of_the_header_counts(path, pattern):
    description, records = make(path, 2)
    accepted = []
    with path.open("r+b", buffering=0) as file:
        header = file.read(PAGE)
        for offset, byte in enumerate(header):
            os.pwrite(file.fileno(), bytes([byte ^ pattern]), offset)
            try:
                MemmapBackend.open(path, description).close()
                accepted.append(offset)
            except (StateCorruptError, StateMismatchError):
                os.pwrite(file.fileno(), bytes([byte]), offset)
    assert accepted == []
    assert_records_equal(decode(path, description), records)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 99},
        {"rows": 101},
        {"stride": 52},
        {"schema": adam_schema(4).to_json()},
        {"schema": adam_schema(9, second_moment_per="row").to_json()},
        {"kind": "zarr"},
    ],
    ids=lambda change: "-".join(f"{key}={str(value)[:12]}" for key, value in change.items()),
)
def test_another_table_is_refused(path, change):
    description, _ = make(path, stride="packed")
    refused(path, description | change)


@pytest.mark.parametrize(
    "change",
    [
        *({"rows": value} for value in (None, "100", "many", 0, -1, 2.5, 10**30, [100])),
        *({"stride": value} for value in (None, "44", "packed", 0, -44, 43, 10**30, {})),
        *({"schema": value} for value in (None, {}, "adam", [], {"dim": 3, "fields": []})),
        *({"kind": value} for value in (None, 3)),
    ],
    ids=lambda change: "-".join(f"{key}={str(value)[:12]}" for key, value in change.items()),
)
def test_nonsense_instead_of_a_description_is_refused(path, change):
    description, _ = make(path, stride="packed")
    refused(path, description | change, match=None)


@pytest.mark.parametrize("missing", ["kind", "rows", "schema", "stride"])
def test_incomplete_description_is_refused(path, missing):
    description, _ = make(path)
    del description[missing]
    refused(path, description, match=None)


def test_equal_byte_counts_do_not_make_equal_tables(path):
    """100 x 8 float32 is as large as 50 x 16, and as 100 x 4 float64."""
    single = Field("w", "float32", "element")
    description, _ = make(path, 100, Schema(8, (single,)), stride="packed")
    wide = description | {"rows": 50, "stride": 64, "schema": Schema(16, (single,)).to_json()}
    double = description | {"schema": Schema(4, (Field("w", "float64", "element"),)).to_json()}
    refused(path, wide)
    refused(path, double)


@pytest.mark.parametrize(("rows", "dim"), [(8, 3), (16, 1)], ids=["same shape", "same size"])
def test_swapped_files_are_refused(tmp_path, rows, dim):
    """8 records of 48 bytes are as long as 16 of 24; tables of one shape differ in their id alone."""
    one, other = tmp_path / "a" / "table", tmp_path / "b" / "table"
    one.parent.mkdir()
    other.parent.mkdir()
    first, _ = make(one, 8, adam_schema(3), stride="packed")
    second, _ = make(other, rows, adam_schema(dim), stride="packed")
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    refused(one, first)
    refused(other, second)


def test_missing_file(path):
    description, _ = make(path)
    path.unlink()
    with pytest.raises(StateError, match="table"):
        MemmapBackend.open(path, description)
    assert not path.exists()


def test_directory_instead_of_a_file(path):
    description, _ = make(path)
    path.unlink()
    path.mkdir()
    with pytest.raises((StateError, OSError)):
        MemmapBackend.open(path, description)
    with pytest.raises(FileExistsError, match="table"):
        MemmapBackend.create(path, 100, SCHEMA)


def test_a_file_can_be_moved(path):
    description, records = make(path)
    moved = path.rename(path.with_name("elsewhere"))
    backend = MemmapBackend.open(moved, description)
    assert_records_equal(backend.read(np.arange(100)), records)
    backend.close()


def test_read_only(path):
    description, records = make(path)
    before = state_of(path)
    backend = MemmapBackend.open(path, description, writable=False)
    assert_records_equal(backend.read(np.arange(100)), records)
    assert_records_equal(next(backend.scan(0, 1))[1], records[:1])
    backend.hint(np.arange(100))
    with pytest.raises((StateError, ValueError, OSError)):
        backend.write(np.array([0]), random_records(SCHEMA, 1, seed=9))
    backend.flush()
    backend.close()
    assert state_of(path) == before


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
    backend = MemmapBackend.create(path, 3, SCHEMA)
    backend.close()
    with pytest.raises(StateClosedError):
        use(backend)


def test_scan_under_way_at_close(path):
    """The next block is an error, not a look into memory that is gone."""
    backend = MemmapBackend.create(path, 200_000, adam_schema(16))
    scan = backend.scan(0, 200_000)
    first, records = next(scan)
    backend.close()
    assert first == 0
    assert not records.view(np.uint8).any()
    with pytest.raises(StateClosedError):
        next(scan)


def test_close_after_a_failed_call(path):
    """The traceback of an error keeps the call's view of the mapping alive: close is silent all the same."""
    backend = MemmapBackend.create(path, 3, SCHEMA)
    with pytest.raises(TypeError) as failure:
        backend.read(None)
    backend.close()
    assert failure.tb is not None
    del failure
    gc.collect()
    assert str(path) not in open_files()


def test_nothing_stays_open(path):
    description, _ = make(path)
    MemmapBackend.open(path, description).close()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StateCorruptError):
        MemmapBackend.open(path, description)
    assert str(path) not in open_files()


def open_files():
    """Return the paths behind this process's descriptors, where the system tells."""
    directory = Path("/proc/self/fd")
    if not directory.is_dir():
        pytest.skip("the system does not list open files")
    return [os.readlink(entry) for entry in directory.iterdir() if entry.is_symlink()]


def test_schema_that_the_header_page_can_not_hold(path):
    """Either the table works or it is refused; the header must not reach into the records."""
    schema = Schema(1, tuple(Field(f"field_number_{i}", "float32", "row") for i in range(200)))
    with pytest.raises(ValueError, match="header"):
        MemmapBackend.create(path, 3, schema)
    assert not any(path.parent.iterdir())


def test_one_descriptor_for_a_table(path):
    """The mapping's; advice and syncing open the file for a moment."""
    description, _ = make(path)
    backend = MemmapBackend.open(path, description)
    backend.hint(np.arange(100))
    backend.read(np.arange(100))
    backend.flush()
    assert open_files().count(str(path)) == 1
    backend.close()
    assert str(path) not in open_files()


@pytest.mark.parametrize("call", ["sync_file", "open"])
def test_a_sync_that_fails_is_an_error_each_time(path, monkeypatch, call):
    """Of the file, or, where it can't be opened once more, of the mapping; nothing is tried again."""

    def refuse(*ignored):
        raise OSError(5, "injected")

    backend = MemmapBackend.create(path, 3, SCHEMA)
    with monkeypatch.context() as patch:
        if call == "sync_file":
            patch.setattr(system, "sync_file", refuse)
        else:
            patch.setattr(system.os, "open", refuse)
            patch.setattr(backend, "_mapping", Refusing())
        for _ in range(3):
            with pytest.raises(OSError, match="injected"):
                backend.flush()
    backend.flush()
    backend.close()


class Refusing:
    """Stands for a mapping whose pages the device refuses."""

    def flush(self):
        raise OSError(5, "injected")
