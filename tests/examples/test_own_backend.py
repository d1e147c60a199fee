"""The storage of `dsa.examples.own_backend`: the shipped suites, kills, full disks, damage, states on it."""

import os
import re
import signal
import sqlite3
import zlib
from contextlib import closing

import numpy as np
import pytest
import torch
from deaths import die, in_child
from hypothesis import settings

import dsa
from dsa.backends import Memmap
from dsa.backends.writer import WriteBehind
from dsa.cli.program import main as run
from dsa.errors import StateClosedError, StateCorruptError, StateMismatchError, StateWarning
from dsa.examples import own_backend
from dsa.examples.own_backend import SqliteBackend, SqliteLayout
from dsa.schema import Field, Schema, adam_schema
from dsa.state.storage import StorageChoice
from dsa.testing import (
    CASES,
    BackendConformance,
    BackendMachine,
    LayoutConformance,
    assert_records_equal,
    random_records,
)

SCHEMA = adam_schema(3)
NAME = "dsa.examples.own_backend:SqliteLayout"


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
        with closing(sqlite3.connect(f"file:{path}/table.sqlite?immutable=1", uri=True)) as connection:
            for number, content in connection.execute("SELECT number, records FROM blocks"):
                records[number * size :][:size] = np.frombuffer(zlib.decompress(content), dtype)
        return records[: description["rows"]]

    def damage(self, path, description, row):
        damage_block(path, row // description["block_rows"], b"nonsense")
        return True


class TestSqliteLayout(LayoutConformance):
    def layout(self):
        return SqliteLayout()

    def differing(self):
        return SqliteLayout(block_rows=64)


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


class TestNothingCollected(TestSqliteLayout):
    """Every step writes its blocks; the table has others."""

    @pytest.fixture
    def case(self):
        return CASES["dim-13"]

    def layout(self):
        return SqliteLayout(block_rows=7, collect_bytes=0)


TestMachine = BackendMachine.over(TestSqliteBackend()).TestCase
TestMachine.settings = settings(TestMachine.settings, max_examples=10)


def made(path, rows=1_000):
    return SqliteBackend.create(path, rows, SCHEMA, block_rows=100)


def damage_block(path, number, content):
    with closing(sqlite3.connect(path / "table.sqlite")) as connection, connection:
        changed = connection.execute("UPDATE blocks SET records = ? WHERE number = ?", (content, number))
        assert changed.rowcount == 1


def test_the_recipe_goes_on_after_a_kill(tmp_path, capfd):
    assert own_backend.main(tmp_path, steps=60, kill_at=20)
    assert f"the process ended with {-signal.SIGKILL}" in capfd.readouterr().out
    assert not dsa.diff(tmp_path / "whole", forgotten(tmp_path), backend=SqliteLayout()).same


def forgotten(tmp_path):
    """A state of fewer steps: the comparison above must be able to fail."""
    own_backend.train(tmp_path / "shorter", 59)
    return tmp_path / "shorter"


def test_rows_that_were_never_written_take_no_room(tmp_path):
    with closing(made(tmp_path / "table", rows=50_000_000)) as backend:
        backend.write(np.array([49_999_999]), random_records(SCHEMA, 1, seed=1))
    assert (tmp_path / "table" / "table.sqlite").stat().st_size < 50_000


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
        backend._connection.execute("PRAGMA max_page_count = 1000000")
        backend.write(np.arange(1_000), random_records(SCHEMA, 1_000, seed=2))
        assert_records_equal(backend.read(np.arange(1_000)), random_records(SCHEMA, 1_000, seed=2))


class Refusing:
    """A connection to a device that refuses to sync."""

    def __init__(self, connection):
        self.connection = connection

    def execute(self, statement):
        raise sqlite3.OperationalError("disk I/O error")

    def close(self):
        self.connection.close()


def test_a_refused_sync_is_an_error_of_the_system(tmp_path):
    backend = made(tmp_path / "table")
    backend._connection = Refusing(backend._connection)
    with pytest.raises(OSError, match=r"can't be synced .*disk I/O error"):
        backend.close()


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
    file = tmp_path / "table" / "table.sqlite"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(StateCorruptError, match=f"{message}.*restore it from a copy"):
        SqliteBackend.open(tmp_path / "table", backend.describe()).read(np.arange(1_000))


@pytest.mark.parametrize("content", [b"nonsense", zlib.compress(b"too short")])
def test_a_damaged_block_of_records_without_a_stamp_is_an_error(tmp_path, content):
    schema = Schema(3, (Field("w", "float32", "element"),))
    with closing(SqliteBackend.create(tmp_path / "table", 1_000, schema, block_rows=100)) as backend:
        backend.write(np.arange(1_000), random_records(schema, 1_000, seed=1))
    damage_block(tmp_path / "table", 3, content)
    with closing(SqliteBackend.open(tmp_path / "table", backend.describe())) as again:
        again.read(np.arange(300))
        with pytest.raises(StateCorruptError, match=r"block 3 of .* is damaged .*: restore it from a copy"):
            again.read(np.array([300]))


def test_a_closed_backend_says_so(tmp_path):
    backend = made(tmp_path / "table")
    backend.close()
    for use in (lambda: backend.read(np.array([0])), backend.flush):
        with pytest.raises(StateClosedError, match="was closed: open the file again"):
            use()


TABLES = {"entity": dsa.init.Normal(400, 3, seed=1)}


def build(path, layout, **options):
    return dsa.DiskSparseRiemannianAdam(TABLES, k=0.0, disk_dir=path, backend=layout, **options)


def steps(optimizer, count):
    for _ in range(count):
        draws = np.random.default_rng(optimizer.global_step)
        rows = np.unique(draws.integers(0, 400, 50))
        optimizer.step({"entity": (rows, draws.standard_normal((len(rows), 3), np.float32))})


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("collect", [0, 4_000, 1 << 20])
@pytest.mark.parametrize("queue", [False, True])
def test_steps_that_returned_survive_a_kill(tmp_path, durability, collect, queue):
    layout = SqliteLayout(block_rows=16, collect_bytes=collect)

    def killed():
        optimizer = build(tmp_path / "killed", layout, durability=durability, async_writes=queue)
        steps(optimizer, 7)
        die()

    assert in_child(killed) == -signal.SIGKILL
    with dsa.open_state(tmp_path / "killed", backend=layout) as state:
        assert state.global_step == 7
        before = state["entity"].read(range(400))
    with build(tmp_path / "whole", Memmap()) as optimizer:
        steps(optimizer, 12)
    with build(tmp_path / "killed", layout, durability=durability, resume=True) as optimizer:
        assert optimizer.global_step == 7
        steps(optimizer, 5)
    assert np.count_nonzero(before["s"])
    assert dsa.diff(tmp_path / "whole", tmp_path / "killed", backend=layout).same


def test_kills_at_any_moment_lose_no_step_that_returned(tmp_path):
    layout, taken = SqliteLayout(block_rows=16, collect_bytes=2_000), 0
    with build(tmp_path / "whole", Memmap()) as optimizer:
        steps(optimizer, 200)
    draws = np.random.default_rng(1)
    build(tmp_path / "killed", layout).close()
    while taken < 200:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(reading)
                optimizer = build(tmp_path / "killed", layout, resume=True)
                while optimizer.global_step < 200:
                    steps(optimizer, 1)
                    os.write(writing, bytes([optimizer.global_step]))
            finally:
                os._exit(0)
        os.close(writing)
        for _ in range(draws.integers(1, 60)):  # it goes on meanwhile
            step = os.read(reading, 1)
            taken = step[0] if step else taken
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        with dsa.open_state(tmp_path / "killed", backend=layout) as state:
            assert state.global_step >= taken
    build(tmp_path / "killed", layout, resume=True).close()
    assert dsa.diff(tmp_path / "whole", tmp_path / "killed", backend=layout).same


def test_a_step_on_a_full_disk_is_completed_when_there_is_room(tmp_path):
    with build(tmp_path / "whole", Memmap()) as optimizer:
        steps(optimizer, 4)
    with build(tmp_path / "state", SqliteLayout(collect_bytes=0)) as optimizer:
        steps(optimizer, 1)
        connection = optimizer._state.tables["entity"].backend._connection
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(sqlite3.OperationalError, match="full"):
            steps(optimizer, 3)
        connection.execute("PRAGMA max_page_count = 1000000")
        optimizer.flush()  # completes the step that was sealed
        steps(optimizer, 4 - optimizer.global_step)
    assert dsa.diff(tmp_path / "whole", tmp_path / "state", backend=SqliteLayout()).same


@pytest.mark.parametrize("make", [dsa.DiskEmbedding, dsa.DiskEmbeddingBag])
def test_modules_live_on_it(tmp_path, make):
    found = []
    for name, backend in (("ours", "memmap"), ("theirs", SqliteLayout())):
        torch.manual_seed(0)
        module = make(300, 4, state_dir=tmp_path / name, backend=backend)
        # Who comes later may say the same, or nothing, and no other.
        second = make(200, 4, state_dir=tmp_path / name, name="second")
        with pytest.raises(ValueError, match=r"backend=.* differs from .*, with which"):
            make(200, 4, state_dir=tmp_path / name, name="third", backend=SqliteLayout(block_rows=8))
        ids = torch.arange(30).reshape(5, 6)
        with dsa.DiskSparseAdam([*module.parameters(), *second.parameters()], lr=0.1) as optimizer:
            for _ in range(3):
                optimizer.zero_grad()
                (module(ids).square().sum() + second(ids).square().sum()).backward()
                optimizer.step()
            found.append((module(ids) + second(ids)).detach().clone())
    assert torch.equal(*found)
    assert dsa.diff(tmp_path / "ours", tmp_path / "theirs", backend=SqliteLayout()).same
    again = make(300, 4, state_dir=tmp_path / "theirs", resume=True, backend=SqliteLayout())
    again.close()


def test_weights_in_memory_have_their_moments_on_it(tmp_path):
    found = []
    for name, backend in (("ours", "memmap"), ("theirs", SqliteLayout())):
        torch.manual_seed(0)
        module = torch.nn.Embedding(300, 4, sparse=True)
        options = {"lr": 0.1, "state_dir": tmp_path / name, "backend": backend}
        with dsa.DiskSparseAdam(module.parameters(), **options) as optimizer:
            for _ in range(3):
                optimizer.zero_grad()
                module(torch.arange(7)).square().sum().backward()
                optimizer.step()
        found.append(module.weight.detach().clone())
    assert torch.equal(*found)


def test_a_state_without_its_layout_is_refused_by_name(tmp_path, capsys):
    with build(tmp_path / "state", SqliteLayout()) as optimizer:
        steps(optimizer, 2)
        optimizer.export_checkpoint(tmp_path / "checkpoint")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    wanted = r"table 'entity' is stored by a backend of the kind 'sqlite'.*: pass the layout that made it"
    for use in (
        lambda: dsa.DiskSparseRiemannianAdam(TABLES, k=0.0, disk_dir=tmp_path / "state", resume=True),
        lambda: dsa.open_state(tmp_path / "state"),
        lambda: dsa.verify(tmp_path / "state"),
        lambda: dsa.repair(tmp_path / "state"),
        lambda: dsa.diff(tmp_path / "state", tmp_path / "checkpoint"),
        lambda: dsa.export_checkpoint(tmp_path / "state", tmp_path / "other"),
        lambda: dsa.export_weights(tmp_path / "state", tmp_path / "other.safetensors"),
    ):
        with pytest.raises(StateMismatchError, match=wanted):
            use()
    for layout in (Memmap(), SqliteLayout(block_rows=8)):
        with pytest.raises(StateMismatchError, match=r"is stored (by the backend 'sqlite'|in blocks of 256)"):
            build(tmp_path / "state", layout, resume=True)
    assert run(["verify", str(tmp_path / "state")]) == 2
    assert re.search(wanted, capsys.readouterr().err)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_commands_take_its_name(tmp_path, capsys):
    state, checkpoint = str(tmp_path / "state"), str(tmp_path / "checkpoint")
    with build(state, SqliteLayout()) as optimizer:
        steps(optimizer, 2)
    for command in (
        ["verify", state],
        ["inspect", state],
        ["repair", state],
        ["export", state, checkpoint],
        ["export", state, str(tmp_path / "weights.safetensors"), "--weights"],
        ["import", checkpoint, str(tmp_path / "again")],
        ["diff", state, str(tmp_path / "again")],
        ["verify", str(tmp_path / "again")],
        ["estimate", "1000", "3", "--no-measure"],
    ):
        assert run([*command, "--backend", NAME]) == 0, command
    assert dsa.diff(tmp_path / "again", checkpoint, backend=SqliteLayout()).same
    capsys.readouterr()
    for name, message in (
        ("sqlite", "'sqlite' is not known"),
        ("nowhere:Layout", "--backend nowhere:Layout can't be had .*set PYTHONPATH"),
        ("dsa.examples.own_backend:Nothing", "can't be had .*Nothing"),
        ("dsa.examples.own_backend:_BLOCK_ROWS", "backend=256 is not known"),
    ):
        assert run(["verify", state, "--backend", name]) == 2
        assert re.search(message, capsys.readouterr().err)


def test_an_import_chooses_it(tmp_path):
    with build(tmp_path / "ours", Memmap()) as optimizer:
        steps(optimizer, 3)
        optimizer.export_checkpoint(tmp_path / "checkpoint")
        steps(optimizer, 2)
    choice = StorageChoice(backend=SqliteLayout(block_rows=8))
    dsa.import_checkpoint(tmp_path / "checkpoint", tmp_path / "theirs", storage=choice)
    with build(tmp_path / "theirs", SqliteLayout(), resume=True) as optimizer:
        steps(optimizer, 2)
    assert dsa.diff(tmp_path / "ours", tmp_path / "theirs", backend=SqliteLayout()).same


def test_damage_is_told_and_repaired(tmp_path):
    with build(tmp_path, SqliteLayout(block_rows=100)) as optimizer:
        optimizer.step({"entity": (range(400), np.ones((400, 3), np.float32))})
    (path,) = tmp_path.glob("*.sqlite.dsa")
    damage_block(path, 3, b"nonsense")
    found = dsa.verify(tmp_path, backend=SqliteLayout())
    assert not found.ok
    assert "row 300 of table 'entity' can't be used" in found.problems[0]
    assert dsa.repair(tmp_path, backend=SqliteLayout()).reset_rows == 100
    assert dsa.verify(tmp_path, backend=SqliteLayout()).ok
    build(tmp_path, SqliteLayout(), resume=True).close()


def test_a_device_that_refused_has_its_files_made_anew_in_the_same_blocks(tmp_path):
    with build(tmp_path, SqliteLayout(block_rows=100)) as optimizer:
        steps(optimizer, 3)
    metadata = dsa.state.metadata.read_metadata(tmp_path)
    metadata.failed = "made up"
    dsa.state.metadata.write_metadata(tmp_path, metadata)
    dsa.repair(tmp_path, backend=SqliteLayout())
    with dsa.open_state(tmp_path, backend=SqliteLayout()) as state:
        (stored,) = state.observed.metadata().tables
    assert (stored["generation"], stored["backend"]["block_rows"]) == (1, 100)
    (path,) = tmp_path.glob("*.dsa")
    assert path.name.endswith(".1.sqlite.dsa")


def test_blocks_stay_when_tables_are_made_anew(tmp_path):
    tables = {"entity": dsa.init.Uniform(400, 3, -0.1, 0.1, seed=1)}
    for backend, resume in ((SqliteLayout(block_rows=100), None), (SqliteLayout(collect_bytes=0), True)):
        options = {"k": 0.7 if resume else 1.0, "disk_dir": tmp_path, "backend": backend, "resume": resume}
        with dsa.DiskSparseRiemannianAdam(tables, **options) as optimizer:
            steps(optimizer, 1)
            optimizer.set_curvature(0.5 if resume else 0.7)
            assert optimizer._state.tables["entity"].backend.describe()["block_rows"] == 100
            assert optimizer._state.storage.layout.collect_bytes == backend.collect_bytes


def test_replacing_a_state_of_another_kind_leaves_none_of_it(tmp_path):
    build(tmp_path, SqliteLayout()).close()
    (tmp_path / "notes-0123456789abcdef.txt").write_text("not dsa's")
    with pytest.warns(StateWarning, match="resume=False replaces the state"):
        build(tmp_path, "memmap", resume=False).close()
    with pytest.warns(StateWarning, match="resume=False replaces the state"):
        build(tmp_path, SqliteLayout(), resume=False).close()
    names = [file.name for file in tmp_path.iterdir()]
    assert len([name for name in names if name.endswith(".dsa")]) == 1
    assert "notes-0123456789abcdef.txt" in names


def test_the_state_is_read_beside_a_training_process(tmp_path):
    with build(tmp_path, SqliteLayout(collect_bytes=3_000)) as optimizer:
        steps(optimizer, 1)
        with dsa.open_state(tmp_path, backend=SqliteLayout()) as state:
            for _ in range(20):
                steps(optimizer, 1)
                assert state.global_step == optimizer.global_step
                expected = optimizer.read_rows(range(400), "entity")
                np.testing.assert_array_equal(state["entity"].weights(range(400)), expected)
            optimizer.flush()
            stored = state["entity"].read(range(400), initial=False)
            np.testing.assert_array_equal(state["entity"]["t"], stored["t"])
            np.testing.assert_array_equal(state["entity"]["w"][-5:, 1], stored["w"][-5:, 1])
