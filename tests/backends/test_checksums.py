"""Checksums of records: what they detect, how a record that doesn't match is handed out, who refuses it."""

import os

import numpy as np
import pytest
from test_golden import make_tables
from zarr_tables import Mapped, make

from dsa import DiskSparseRiemannianAdam, init, verify
from dsa.backends import settling
from dsa.backends.memmap import MemmapBackend, stored_bytes
from dsa.backends.zarr import ZarrBackend
from dsa.backends.zarr_group import array_layouts, checksum_layouts
from dsa.errors import CorruptRowError, StateWarning
from dsa.kernels.checksums import factors
from dsa.kernels.plausible import describe_fault, first_implausible
from dsa.schema import TORN, Field, Schema, adam_schema
from dsa.testing import BackendHooks, assert_records_equal, random_records

PAGE = 4096
NARROW = Schema(3, (Field("half", "float16", "element"), Field("s", "int32", "row")))


class Memmap(BackendHooks):
    def create(self, path, rows, schema):
        return MemmapBackend.create(path, rows, schema, stride="packed")

    def reopen(self, path, description):
        return MemmapBackend.open(path, description)


HOOKS = {"memmap": Memmap(), "zarr": Mapped()}
by_kind = pytest.mark.parametrize("kind", HOOKS)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "table"


def places(path, description, row):
    """Return files and offsets of the bytes of a row and of its checksum, in the record's order."""
    schema = Schema.from_json(description["schema"])
    if description["kind"] == "memmap":
        start = PAGE + row * description["stride"]
        return [(path, start + at) for at in range(stored_bytes(schema))]
    found = []
    for layout in array_layouts(description) + checksum_layouts(description):
        shard, place = divmod(row, layout.shard_rows)
        file, size = path / layout.spec.name / layout.shard_key(shard), layout.spec.row_bytes
        found += [(file, place * size + at) for at in range(size)]
    return found


def change(place, byte):
    file, at = place
    with file.open("r+b", buffering=0) as opened:
        os.pwrite(opened.fileno(), bytes([byte]), at)


def content(place):
    file, at = place
    with file.open("rb", buffering=0) as opened:
        return os.pread(opened.fileno(), 1, at)[0]


@by_kind
@pytest.mark.parametrize("schema", [adam_schema(2), adam_schema(1, weights=False), NARROW], ids=str)
def test_every_bit_counts(path, kind, schema):
    """Of the record and of its checksum; the neighbours are as they were."""
    description, records = make(HOOKS[kind], path, 7, schema, stamps=3)
    backend = HOOKS[kind].reopen(path, description)
    rows, others = np.arange(7), np.array([0, 1, 2, 4, 5, 6])
    padding = {6, 7} if kind == "memmap" and schema is NARROW else set()
    for number, place in enumerate(places(path, description, 3)):
        if number in padding:
            continue  # the padding belongs to nobody; it is covered all the same
        byte = content(place)
        for bit in range(8):
            change(place, byte ^ 1 << bit)
            found = backend.read(rows)
            assert found["s"][3] == TORN, (number, bit)
            assert_records_equal(found[others], records[others])
        change(place, byte)
    assert_records_equal(backend.read(rows), records)
    backend.close()


KINDS = {
    "random bits": lambda rng, shape: rng.integers(0, 2**32, shape, np.uint32).view(np.float32),
    "normal": lambda rng, shape: rng.standard_normal(shape, np.float32),
    "powers of two": lambda rng, shape: np.float32(2.0) ** rng.integers(-8, 8, shape),
    "signs": lambda rng, shape: rng.choice(np.float32([-1, 1]), shape),
    "bfloat16": lambda rng, shape: (rng.standard_normal(shape, np.float32).view(np.uint32) & 0xFFFF0000).view(
        np.float32
    ),
    "small integers": lambda rng, shape: rng.integers(0, 4, shape).astype(np.float32),
}


@pytest.mark.parametrize("numbers", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("unit", [512, 4096])
def test_mixtures_of_two_versions(path, numbers, unit):
    """Torn at any border of a sector or page, either way, or with a part that was never written."""
    schema = adam_schema(1_000)
    rng = np.random.default_rng(0)
    backend = MemmapBackend.create(path, 40, schema, stride="packed")
    rows = np.arange(40)
    versions = []
    for step in range(2):
        records = np.zeros(40, schema.dtype)
        for name in "wmv":
            records[name] = numbers(rng, (40, 1_000))
        records["t"], records["s"] = step + 1, step + 2
        backend.write(rows, records)
        backend.flush()
        versions.append(np.fromfile(path, np.uint8))
    old, new = versions
    zeros = np.concatenate([old[:PAGE], np.zeros(len(old) - PAGE, np.uint8)])
    size, stored = description_size(backend)
    for one, other in ((old, new), (new, old), (zeros, new), (new, zeros)):
        mixed = one.copy()
        for row in range(40):
            start = PAGE + row * size
            border = (start // unit + 1 + row % (stored // unit - 1)) * unit
            mixed[border : start + stored] = other[border : start + stored]
        mixed.tofile(path)
        assert (backend.read(rows)["s"] == TORN).all()
        assert all((block["s"] == TORN).all() for _, block in backend.scan(0, 40))
    backend.close()


def description_size(backend):
    return backend.describe()["stride"], stored_bytes(backend.schema)


@by_kind
def test_words_that_are_swapped_and_fields_that_are_left_old(path, kind):
    schema = adam_schema(64)
    backend = HOOKS[kind].create(path, 50, schema)
    old, new = random_records(schema, 50, 1), random_records(schema, 50, 2)
    old["s"], new["s"] = 4, 5
    for name in schema.names:
        backend.write(np.arange(50), old)
        mixed = old.copy()
        mixed[name] = new[name]
        overwrite(backend, mixed)
        assert (backend.read(np.arange(50))["s"] == TORN).all(), name
    swapped = old.copy()
    swapped["w"][:, [3, 35]] = old["w"][:, [35, 3]]
    backend.write(np.arange(50), old)
    overwrite(backend, swapped)
    assert (backend.read(np.arange(50))["s"] == TORN).all()
    backend.write(np.arange(50), old)
    assert_records_equal(backend.read(np.arange(50)), old)
    backend.close()


def overwrite(backend, records):
    """Change the records behind the checksums' back."""
    if isinstance(backend, ZarrBackend):
        for array in backend._open_arrays():
            array.scatter(np.arange(len(records)), records)
    else:
        backend.records[:] = records


def test_the_checksum_is_the_one_that_is_documented():
    """An oracle with Python's integers: fold, multiply by the place's odd factor, sum."""
    assert (factors(10_000) & 1).all()
    assert factors(10_000)[:3].tolist() == factors(3).tolist()
    records = random_records(adam_schema(5), 20, seed=3)
    words = records.view(np.int32).reshape(20, -1)
    folded = words.view(np.uint32) ^ words.view(np.uint32) >> 16 ^ words.view(np.uint32) >> 23
    sums = (folded * factors(words.shape[1]).view(np.uint32)).sum(axis=1, dtype=np.uint32)
    assert sums.tolist() == make_tables.checksums(records).tolist()


@by_kind
def test_a_record_that_is_being_written_is_not_marked(path, kind, monkeypatch):
    """What looks torn is read again: another process may be in the middle of writing it."""
    backend = HOOKS[kind].create(path, 9, adam_schema(4))
    records = random_records(backend.schema, 9, 1)
    records["s"] = 6
    overwrite(backend, records)
    monkeypatch.setattr(settling.time, "sleep", lambda seconds: backend.write(np.arange(9), records))
    assert_records_equal(backend.read(np.arange(9)), records)
    backend.close()


@by_kind
def test_the_mark_is_implausible_and_says_why(path, kind):
    description, _ = make(HOOKS[kind], path, 5, adam_schema(2), stamps=1)
    change(places(path, description, 2)[0], content(places(path, description, 2)[0]) ^ 1)
    backend = HOOKS[kind].reopen(path, description)
    found = backend.read(np.arange(5))
    found["w"], found["m"], found["v"], found["t"] = 0, 0, 0, 1
    assert first_implausible(found, ["v"]) == 2
    assert "checksum of its record does not match" in describe_fault(found, 2, {})
    assert describe_fault(found, 1, {"v": "second moment"}) == ""
    backend.close()


@pytest.mark.parametrize("backend", [None, "zarr"])
def test_training_refuses_a_torn_row_and_can_reset_it(tmp_path, backend):
    options = {"k": 0.0, "disk_dir": tmp_path / "state"} | ({"backend": backend} if backend else {})
    rows, grad = np.arange(20), np.ones((20, 4), np.float32)
    with DiskSparseRiemannianAdam({"entity": init.Zeros(100, 4)}, **options) as optimizer:
        optimizer.step({"entity": (rows, grad)})
    file = next((tmp_path / "state").glob("entity*"))
    place = (file, PAGE + 7 * 64 + 9) if file.is_file() else (file / "m" / "c" / "0" / "0", 7 * 16 + 2)
    change(place, content(place) ^ 0x10)
    assert not verify(tmp_path / "state").ok
    with DiskSparseRiemannianAdam({"entity": init.Zeros(100, 4)}, resume=True, **options) as optimizer:
        with pytest.raises(CorruptRowError, match=r"row 7 of table 'entity'.* checksum of its record does"):
            optimizer.step({"entity": (rows, grad)})
        with pytest.raises(CorruptRowError, match="row 7"):
            optimizer.read_rows(rows)
        with pytest.warns(StateWarning, match="1 rows of table 'entity'"):
            optimizer.reproject_all()
        optimizer.step({"entity": (rows, grad)})
        assert optimizer.global_step == 2
