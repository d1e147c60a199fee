"""The backend of `dsa.examples.own_backend` passes the shipped suite; and kills, full disks and damage."""

import os
import signal
import sqlite3
import subprocess
import sys
import zlib
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

import dsa
from dsa.backends.writer import WriteBehind
from dsa.errors import StateClosedError, StateCorruptError, StateLockedError
from dsa.examples import own_backend
from dsa.examples.own_backend import SqliteBackend
from dsa.schema import Schema, adam_schema
from dsa.testing import CASES, BackendConformance, BackendMachine, assert_records_equal, random_records

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(dsa.__file__).parents[1])}
SCHEMA = adam_schema(3)


# [suite]
class TestSqliteBackend(BackendConformance):
    def create(self, path, rows, schema):
        return SqliteBackend.create(path, rows, schema)

    def reopen(self, path, description):
        return SqliteBackend.open(path, description)

    def read_raw(self, path, description):
        """Decode the file without the backend: with the standard library and numpy alone."""
        dtype = Schema.from_json(description["schema"]).dtype
        size = description["block_rows"]
        records = np.zeros(-(-description["rows"] // size) * size, dtype)
        with closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as connection:
            for number, content in connection.execute("SELECT number, records FROM blocks"):
                records[number * size :][:size] = np.frombuffer(zlib.decompress(content), dtype)
        return records[: description["rows"]]


# [end of suite]


class TestBehindAWriteQueue(TestSqliteBackend):
    """The package's own wrapper around it; one size of table will do."""

    @pytest.fixture
    def case(self):
        return CASES["dim-13"]

    def create(self, path, rows, schema):
        return WriteBehind(SqliteBackend.create(path, rows, schema), max_queue_size=2)

    def reopen(self, path, description):
        return WriteBehind(SqliteBackend.open(path, description), max_queue_size=2)


TestMachine = BackendMachine.over(TestSqliteBackend()).TestCase
TestMachine.settings = settings(TestMachine.settings, max_examples=10)


def made(path, rows=1_000):
    return SqliteBackend.create(path, rows, SCHEMA, block_rows=100)


def test_the_recipe_packs_what_was_trained(tmp_path):
    vectors = own_backend.main(tmp_path, rows=2_000, dim=4, steps=20)
    ids = torch.randint(0, 2_000, (64,), generator=torch.Generator().manual_seed(19)).unique()
    embedding = dsa.DiskEmbedding(2_000, 4, state_dir=tmp_path / "state", resume=True)
    assert torch.equal(vectors, embedding(ids).detach())
    assert vectors.any()
    embedding.close()


def test_rows_that_were_never_written_take_no_room(tmp_path):
    with closing(made(tmp_path / "table", rows=50_000_000)) as backend:
        backend.write(np.array([49_999_999]), random_records(SCHEMA, 1, seed=1))
    assert (tmp_path / "table").stat().st_size < 50_000


def test_a_write_that_returned_survives_a_kill(tmp_path):
    program = f"""
import os, signal, numpy as np
from dsa.examples.own_backend import SqliteBackend
from dsa.schema import adam_schema
from dsa.testing import random_records
backend = SqliteBackend.create({tmp_path / "table"!r}, 1_000, adam_schema(3), block_rows=100)
backend.write(np.arange(0, 1_000, 3), random_records(backend.schema, 334, seed=1))
os.kill(os.getpid(), signal.SIGKILL)
""".replace("PosixPath", "__import__('pathlib').Path")
    ended = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, check=False)
    assert ended.returncode == -signal.SIGKILL
    description = {"kind": "sqlite", "rows": 1_000, "block_rows": 100, "schema": SCHEMA.to_json()}
    with closing(SqliteBackend.open(tmp_path / "table", description)) as backend:
        assert_records_equal(backend.read(np.arange(0, 1_000, 3)), random_records(SCHEMA, 334, seed=1))
        assert not backend.read(np.arange(1, 1_000, 3))["w"].any()


def test_another_process_is_refused(tmp_path):
    with closing(made(tmp_path / "table")) as backend:
        with pytest.raises(StateLockedError, match="in use by another process"):
            SqliteBackend.open(tmp_path / "table", backend.describe())
        backend.write(np.array([5]), random_records(SCHEMA, 1, seed=1))


def test_a_full_disk_leaves_everything_as_it_was(tmp_path):
    with closing(made(tmp_path / "table")) as backend:
        before = random_records(SCHEMA, 300, seed=1)
        backend.write(np.arange(300), before)
        pages = backend._connection.execute("PRAGMA page_count").fetchone()[0]
        backend._connection.execute(f"PRAGMA max_page_count = {pages + 1}")
        with pytest.raises(sqlite3.OperationalError, match="full"):
            backend.write(np.arange(1_000), random_records(SCHEMA, 1_000, seed=2))
        assert_records_equal(backend.read(np.arange(300)), before)
        assert not backend.read(np.arange(300, 1_000))["w"].any()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:5_000], "can't be read .*malformed"),
        (lambda content: b"x" * len(content), "can't be read .*not a database"),
        (lambda content: b"", "can't be read .*no such table"),
    ],
)
def test_a_damaged_file_is_an_error(tmp_path, damage, message):
    with closing(made(tmp_path / "table")) as backend:
        backend.write(np.arange(1_000), random_records(SCHEMA, 1_000, seed=1))
    content = (tmp_path / "table").read_bytes()
    (tmp_path / "table").write_bytes(damage(content))
    with pytest.raises(StateCorruptError, match=f"{message}.*restore it from a copy"):
        SqliteBackend.open(tmp_path / "table", backend.describe()).read(np.arange(1_000))


@pytest.mark.parametrize("content", [b"nonsense", zlib.compress(b"too short")])
def test_a_damaged_block_is_an_error(tmp_path, content):
    with closing(made(tmp_path / "table")) as backend:
        backend.write(np.arange(1_000), random_records(SCHEMA, 1_000, seed=1))
    with closing(sqlite3.connect(tmp_path / "table")) as connection, connection:
        connection.execute("UPDATE blocks SET records = ? WHERE number = 3", (content,))
    with closing(SqliteBackend.open(tmp_path / "table", backend.describe())) as again:
        again.read(np.arange(300))
        with pytest.raises(
            StateCorruptError, match=r"block 3 .* is damaged .*: restore the file from a copy"
        ):
            again.read(np.array([300]))


def test_a_missing_file_is_not_made(tmp_path):
    with pytest.raises(StateCorruptError, match="is missing: restore it from a copy"):
        SqliteBackend.open(tmp_path / "table", {})
    assert not list(tmp_path.iterdir())


def test_a_closed_backend_says_so(tmp_path):
    backend = made(tmp_path / "table")
    backend.close()
    for use in (lambda: backend.read(np.array([0])), backend.flush):
        with pytest.raises(StateClosedError, match="was closed: open the file again"):
            use()
