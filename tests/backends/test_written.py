"""Where a sparse table was written to: what is left out holds nothing, and most of a hole is left out."""

import os
import sys

import numpy as np
import pytest

from dsa.backends.base import Sparse
from dsa.backends.holes import written_stretches
from dsa.backends.memmap import MemmapBackend
from dsa.schema import adam_schema
from dsa.testing import random_records

pytestmark = pytest.mark.disk

ROWS = 100_000
SCHEMA = adam_schema(64)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="holes are asked for by means of Linux")


def make(path, rows, allocate):
    backend = MemmapBackend.create(path, ROWS, SCHEMA, allocate=allocate)
    records = random_records(SCHEMA, len(rows), 1)
    records["s"] = 1
    backend.reserve(rows)
    backend.write(rows, records)
    return backend


def covered(backend):
    found = np.zeros(ROWS, np.bool_)
    last = 0
    for start, stop in backend.written():
        assert last <= start < stop <= ROWS
        found[start:stop], last = True, stop
    return found


@pytest.mark.parametrize("allocate", ["sparse", "reserve"])
@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_left_out_was_never_written(tmp_path, allocate, synced, seed):
    rng = np.random.default_rng(seed)
    runs = [np.arange(first, first + 40) for first in rng.integers(0, ROWS - 40, 3 * seed)]
    rows = np.unique(np.concatenate([*runs, rng.integers(0, ROWS, 5), [0, ROWS - 1]]))
    backend = make(tmp_path / "table", rows, allocate)
    assert isinstance(backend, Sparse)
    if synced:
        backend.flush()
    assert covered(backend)[rows].all()
    backend.close()


@on_linux
def test_a_hole_is_left_out(tmp_path):
    backend = make(tmp_path / "table", np.array([5, 50_000]), "sparse")
    found = covered(backend)
    assert found[[5, 50_000]].all()
    assert found.sum() < 2_000
    backend.close()


def test_a_table_without_any_row(tmp_path):
    backend = make(tmp_path / "table", np.arange(0), "sparse")
    assert covered(backend).sum() in (0, ROWS)
    backend.close()


@on_linux
def test_stretches_near_each_other_are_one(tmp_path):
    """Leaving a small hole out would take longer than reading it."""
    path = tmp_path / "file"
    with open(path, "wb") as file:
        for place in (0, 64 << 10, 128 << 10, 4 << 20):
            file.seek(place)
            file.write(b"x" * 4096)
        file.truncate(8 << 20)
    assert list(written_stretches(path, 4096)) == [(64 << 10, 132 << 10), (4 << 20, (4 << 20) + 4096)]


@pytest.mark.parametrize("missing", [True, False])
def test_where_the_system_can_not_tell_it_is_the_whole_file(tmp_path, monkeypatch, missing):
    if missing:
        monkeypatch.delattr(os, "SEEK_DATA", raising=False)
        monkeypatch.delattr(os, "SEEK_HOLE", raising=False)
    else:
        real = os.lseek

        def refusing(file, place, whence):
            if whence in (os.SEEK_SET, os.SEEK_CUR, os.SEEK_END):
                return real(file, place, whence)
            raise OSError(22, "no")

        monkeypatch.setattr(os, "lseek", refusing)
    backend = make(tmp_path / "table", np.array([7]), "sparse")
    assert covered(backend).all()
    backend.close()
