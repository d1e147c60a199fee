"""Tables of version 2: those under tests/golden, read by dsa, and dsa's, read by a program without it."""

import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pytest
from zarr_tables import files_of

from dsa.backends.memmap import MemmapBackend
from dsa.backends.zarr import ZarrBackend
from dsa.backends.zarr_compressed import CompressedZarrBackend
from dsa.errors import StateCorruptError
from dsa.schema import adam_schema
from dsa.testing import random_records

GOLDEN = Path(__file__).parents[1] / "golden"
_spec = importlib.util.spec_from_file_location("make_tables", GOLDEN / "make_tables.py")
make_tables = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_tables)

KINDS = {
    "memmap": (MemmapBackend, "memmap.rec", make_tables.read_memmap),
    "zarr": (ZarrBackend, "zarr", make_tables.read_zarr),
}
by_kind = pytest.mark.parametrize("kind", KINDS)


def same(records, expected):
    return all(records[name].tobytes() == expected[name].tobytes() for name in expected.dtype.names)


def test_the_program_makes_the_tables_that_are_kept(tmp_path):
    make_tables.make(tmp_path / "tables")
    assert files_of(tmp_path / "tables") == files_of(GOLDEN / "tables")
    assert "dsa" not in {line.split()[1] for line in imports(GOLDEN / "make_tables.py")}


def imports(file):
    return [line for line in file.read_text().splitlines() if line.startswith(("import ", "from "))]


@by_kind
def test_what_is_kept_is_read_and_written(tmp_path, kind):
    backend_class, name, read = KINDS[kind]
    path = tmp_path / name
    original = GOLDEN / "tables" / name
    shutil.copytree(original, path) if original.is_dir() else shutil.copy(original, path)
    description, expected = read(path)
    backend = backend_class.open(path, description)
    assert same(backend.read(np.arange(5)), expected)
    assert expected["s"].tolist() == [7, 8, 0, 10, 11]
    rows = np.array([1, 2])
    records = random_records(backend.schema, 2, seed=1)
    backend.write(rows, records.copy())
    backend.close()
    _, found = read(path)
    assert same(found[rows], records)
    assert same(found[[0, 3, 4]], expected[[0, 3, 4]])


@by_kind
def test_what_dsa_makes_is_read_by_the_program(tmp_path, kind):
    backend_class, name, read = KINDS[kind]
    backend = backend_class.create(tmp_path / name, 101, adam_schema(3))
    rows = np.arange(0, 101, 2)
    records = random_records(backend.schema, len(rows), seed=2)
    backend.write(rows, records.copy())
    backend.close()
    description, found = read(tmp_path / name)
    assert description == backend.describe()
    assert same(found[rows], records)
    assert not found[1::2].copy().view(np.uint8).any()


def test_the_former_version_is_refused_in_words(tmp_path):
    path = tmp_path / "memmap.rec"
    content = (GOLDEN / "tables" / "memmap.rec").read_bytes()
    path.write_bytes(content.replace(b"dsa-table-2", b"dsa-table-1"))
    description, _ = make_tables.read_memmap(GOLDEN / "tables" / "memmap.rec")
    with pytest.raises(StateCorruptError, match="of version 1, which this release can't read"):
        MemmapBackend.open(path, description)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_zarr_table_without_checksums_is_refused_in_words(tmp_path, compression):
    path = tmp_path / "zarr"
    shutil.copytree(GOLDEN / "tables" / "zarr", path)
    former = make_tables.ZARR | {
        "compression": compression,
        "cuts": {name: [5, 5] for name in make_tables.FIELDS},
    }
    root = {"attributes": {"dsa_table": former}, "node_type": "group", "zarr_format": 3}
    make_tables.write_json(path / "zarr.json", root)
    shutil.rmtree(path / "c")
    with pytest.raises(StateCorruptError, match="of an older version, whose rows have no checksums"):
        (CompressedZarrBackend if compression else ZarrBackend).open(path, former)
