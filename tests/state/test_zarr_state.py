"""States whose tables are live Zarr groups: the bytes of memmap, read by others, opened again, refused."""

import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import nursery
import pytest
import torch
import zarr
from current_files import journal_file, table_file

import dsa
from dsa import DiskEmbedding, DiskSparseAdam, DiskSparseRiemannianAdam, estimate, init
from dsa.backends import Memmap, Zarr
from dsa.errors import (
    CorruptRowError,
    DiskSpaceError,
    StateCorruptError,
    StateExistsError,
    StateIncompleteError,
    StateMismatchError,
    StateWarning,
)
from dsa.state.metadata import (
    METADATA_NAME,
    Metadata,
    owned_files,
    read_metadata,
    table_file_name,
    write_metadata,
)

ROWS = {"left": 1_500, "right": 90}
DIMS = {"left": 5, "right": 3}
ZARR = Zarr(shard_bytes=1 << 12)
ZSTD = Zarr(shard_bytes=1 << 12, compression="zstd", cache_bytes=30_000, overlay_bytes=20_000)
BACKENDS = {"memmap": "memmap", "zarr": "zarr", "shards": ZARR, "zstd": ZSTD}
pytestmark = pytest.mark.filterwarnings("ignore:.*edge of the ball", "ignore:.*was stored with k=0.5")
by_backend = pytest.mark.parametrize("backend", [ZARR, ZSTD], ids=["zarr", "zstd"])


def tables():
    rng = np.random.default_rng(5)
    return {
        "left": init.Normal(ROWS["left"], DIMS["left"], 0.1, seed=1),
        "right": rng.uniform(-0.1, 0.1, (ROWS["right"], DIMS["right"])).astype(np.float32),
    }


def build(path, **options):
    options = {"lr": 0.05, "k": {"left": 1.0, "right": 0.0}, "allocate": "sparse"} | options
    return DiskSparseRiemannianAdam(tables(), disk_dir=path, **options)


def batches(count, seed=0):
    """Steps over both tables, some over one, with popular rows in almost every batch."""
    rng = np.random.default_rng(seed)
    for step in range(count):
        yield {
            name: (
                (rng.zipf(1.2, size := int(rng.integers(1, 200))) - 1) % ROWS[name],
                rng.standard_normal((size, DIMS[name])).astype(np.float32),
            )
            for name in ROWS
            if step % 5 != 3 or name == "left"
        }


def train(optimizer, count, seed=0):
    for batch in batches(count, seed):
        optimizer.step(batch)


def state_of(optimizer):
    """Return every record, and the counts."""
    held = optimizer._portable_state().tables.values()
    records = {table.name: table.backend.read(np.arange(len(table))).tobytes() for table in held}
    return records, optimizer.global_step, [(table.name, table.steps, table.k) for table in held]


def group_of(path, name="left"):
    return path / table_file_name(name, kind="zarr")


@pytest.fixture
def tmp_path(tmp_path):
    """In memory where the system has such a place: many small shards are synced here."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or shutil.disk_usage(memory).free < 1 << 28:
        yield tmp_path
    else:
        with tempfile.TemporaryDirectory(prefix="dsa-zarr-", dir=memory) as name:
            yield Path(name)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What memmap holds after each of three lives of twenty steps, and after changes of whole tables."""
    path = tmp_path_factory.mktemp("expected")
    return list(lives(path, {}))


def lives(path, options):
    for life in range(3):
        with build(path, resume=True if life else None, **options) as optimizer:
            train(optimizer, 20, seed=life)
            if life == 1:
                optimizer.flush()
                optimizer.set_curvature(0.5, name="left")
            if life == 2:
                optimizer.reproject_all()
            yield state_of(optimizer)


@pytest.mark.parametrize("durability", ["process", "power", "none"])
@pytest.mark.parametrize("async_writes", [False, True], ids=["direct", "async"])
@pytest.mark.parametrize("backend", ["zarr", "shards", "zstd"])
def test_the_same_bytes_as_memmap(tmp_path, expected, backend, async_writes, durability):
    options = {"backend": BACKENDS[backend], "async_writes": async_writes, "durability": durability}
    assert list(lives(tmp_path, options)) == expected
    with build(tmp_path, resume=True) as optimizer:
        assert state_of(optimizer) == expected[-1]


@pytest.mark.parametrize("second_moment", ["frame", "row"])
@by_backend
def test_the_same_bytes_with_other_records(tmp_path, backend, second_moment):
    found = []
    for name, one in (("memmap", "memmap"), ("zarr", backend)):
        with build(tmp_path / name, backend=one, second_moment=second_moment) as optimizer:
            train(optimizer, 15)
            found.append(state_of(optimizer))
    assert found[0] == found[1]


@pytest.mark.parametrize("queue", [False, True], ids=["direct", "async"])
def test_zarr_reads_live_values_while_training_runs(tmp_path, queue):
    """After each step, through groups opened long before; the mapped table needs no flush."""
    with build(tmp_path, backend="zarr", async_writes=queue) as optimizer:
        groups = {name: zarr.open_group(group_of(tmp_path, name), mode="r") for name in ROWS}
        for batch in batches(12):
            optimizer.step(batch)
            if queue:
                optimizer._state._transactions.drain()
            for name, (ids, _) in batch.items():
                rows = np.unique(ids)
                assert groups[name]["t"][:][rows].min() > 0
                weights = torch.from_numpy(groups[name]["w"][:][rows])
                assert torch.equal(weights, optimizer.read_rows(rows, name))


@by_backend
def test_xarray_reads_live_values_while_training_runs(tmp_path, backend):
    xarray = pytest.importorskip("xarray")
    with build(tmp_path, backend=backend) as optimizer:
        train(optimizer, 3)
        optimizer.flush()
        dataset = xarray.open_zarr(group_of(tmp_path))
        touched = np.flatnonzero(dataset.t.values)
        weights = dataset.w.values[touched]
        assert torch.equal(torch.from_numpy(weights), optimizer.read_rows(touched, "left"))
        train(optimizer, 3, seed=1)
        optimizer.flush()
        again = xarray.open_zarr(group_of(tmp_path))
        assert len(np.flatnonzero(again.t.values)) > len(touched)


@by_backend
def test_what_lies_in_the_directory(tmp_path, backend):
    with build(tmp_path, backend=backend) as optimizer:
        train(optimizer, 2)
        names = {entry.name for entry in tmp_path.iterdir()}
        assert names == {
            METADATA_NAME,
            journal_file(tmp_path).name,
            "dsa.lock",
            *(group_of(tmp_path, n).name for n in ROWS),
        }
    assert {file.name for file in owned_files(tmp_path)} == {group_of(tmp_path, n).name for n in ROWS}
    stored = read_metadata(tmp_path).tables[0]["backend"]
    assert (stored["kind"], stored["compression"]) == ("zarr", backend.compression)
    group = zarr.open_group(group_of(tmp_path), mode="r")
    assert group.attrs["dsa_table"] == stored


MISMATCHES = [
    ("zarr", "memmap", "stored by the backend 'zarr', which backend=Memmap"),
    ("zarr", ZSTD, "stored with compression=None, which compression='zstd' is not: leave the backend out"),
    ("zarr", Memmap(stride=64), "stored by the backend 'zarr'"),
    ("zarr", Zarr(shard_bytes=1 << 8), "other shards than those of shard_bytes=256: leave shard_bytes out"),
    ("zstd", "zarr", "stored with compression='zstd', which compression=None is not"),
    ("zstd", Zarr(compression="zstd", shard_bytes=1 << 11), "other shards"),
    ("memmap", "zarr", "stored by the backend 'memmap', which backend=Zarr"),
    ("memmap", ZSTD, "stored by the backend 'memmap'"),
]


@pytest.mark.parametrize(("made", "asked", "match"), MISMATCHES)
def test_another_backend_is_refused(tmp_path, made, asked, match):
    build(tmp_path, backend=BACKENDS[made]).close()
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.name != "dsa.lock"}
    with pytest.raises(StateMismatchError, match=match):
        build(tmp_path, backend=asked, resume=True)
    assert {
        file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.name != "dsa.lock"
    } == before
    build(tmp_path, resume=True).close()
    build(tmp_path, resume=True, backend=BACKENDS[made]).close()


@pytest.mark.parametrize(
    "options", [{}, {"cache_bytes": 1}, {"overlay_bytes": 1}, {"overlay_bytes": 1 << 20}]
)
def test_what_memory_is_for_may_change_with_each_opening(tmp_path, expected, options):
    found = []
    for life in range(2):
        backend = ZSTD if life == 0 else Zarr(compression="zstd", **options)
        with build(tmp_path, backend=backend, resume=True if life else None) as optimizer:
            train(optimizer, 20, seed=life)
            found.append(state_of(optimizer))
            if life == 1:
                break
            assert found == expected[:1]


@pytest.mark.parametrize("new", ["memmap", "zarr", "zstd"])
@pytest.mark.parametrize("old", ["zarr", "zstd"])
def test_starting_over_with_another_backend(tmp_path, old, new):
    with build(tmp_path / "state", backend=BACKENDS[old]) as optimizer:
        train(optimizer, 3)
    with pytest.warns(StateWarning, match="resume=False replaces the state"):
        optimizer = build(tmp_path / "state", backend=BACKENDS[new], resume=False)
    with optimizer, build(tmp_path / "new", backend=BACKENDS[new]) as fresh:
        assert state_of(optimizer) == state_of(fresh)
    state, made = tmp_path / "state", tmp_path / "new"
    assert owned_files(state) == sorted(table_file(state, name) for name in ROWS)
    assert [file.suffix for file in owned_files(state)] == [file.suffix for file in owned_files(made)]


@by_backend
def test_an_interrupted_creation(tmp_path, backend):
    """The directory of a table that no description names, and one whose description says what it is."""
    build(tmp_path, backend=backend).close()
    description = (tmp_path / METADATA_NAME).read_bytes()
    (tmp_path / METADATA_NAME).unlink()
    with pytest.raises(StateCorruptError, match=f"holds the table file .*zarr' but no {METADATA_NAME}"):
        build(tmp_path, backend=backend)
    write_metadata(tmp_path, Metadata("creating", "", note="making a new state"))
    (group_of(tmp_path) / "zarr.json").unlink()
    with pytest.raises(StateIncompleteError):
        build(tmp_path, backend=backend, resume=True)
    build(tmp_path, backend=backend).close()
    assert (tmp_path / METADATA_NAME).read_bytes() != description
    build(tmp_path, resume=True).close()


@by_backend
def test_existing_state_is_not_overwritten(tmp_path, backend):
    build(tmp_path, backend=backend).close()
    with pytest.raises(StateExistsError, match="pass resume=True"):
        build(tmp_path, backend=backend)


@by_backend
@pytest.mark.parametrize("damage", ["missing", "file", "shard", "document", "swapped"])
def test_a_damaged_table_is_refused(tmp_path, backend, damage):
    build(tmp_path, backend=backend).close()
    table, other = group_of(tmp_path), group_of(tmp_path, "right")
    if damage == "missing":
        shutil.rmtree(table)
    elif damage == "file":
        shutil.rmtree(table)
        table.write_bytes(b"not a directory")
    elif damage == "shard":
        (table / "m" / "c" / "0" / "0").unlink()
    elif damage == "document":
        (table / "zarr.json").write_text("{}")
    else:
        table.rename(tmp_path / "aside")
        other.rename(table)
        (tmp_path / "aside").rename(other)
    with pytest.raises(StateCorruptError, match=f"the table '.*{table.name if damage != 'swapped' else ''}'"):
        build(tmp_path, resume=True)


def test_a_damaged_chunk_stops_a_step_and_changes_nothing(tmp_path):
    """The error names table and row; other rows can be trained."""
    with build(tmp_path, backend=ZSTD) as optimizer:
        train(optimizer, 10)
    file = group_of(tmp_path) / "w" / "c" / "0" / "0"
    content = bytearray(file.read_bytes())
    content[len(content) // 6] ^= 0x40
    file.write_bytes(content)
    with build(tmp_path, resume=True) as optimizer:
        step = optimizer.global_step
        for _ in range(2):
            with pytest.raises(CorruptRowError, match=r"row \d+ of table 'left' .* checksum of its record"):
                optimizer.step({"left": (np.arange(200), np.ones((200, 5), np.float32))})
        assert optimizer.global_step == step
        optimizer.step({"left": (np.arange(1_000, 1_400), np.ones((400, 5), np.float32))})
        assert optimizer.global_step == step + 1


CHILD = """
import os, signal, sys
sys.path[:0] = {here!r}
from pathlib import Path
import test_zarr_state as module
optimizer = module.build(Path(sys.argv[1]), backend=module.BACKENDS[sys.argv[2]], durability=sys.argv[3])
module.train(optimizer, 20)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
@pytest.mark.parametrize(
    ("backend", "durability"), [("shards", "process"), ("zstd", "process"), ("zstd", "none")]
)
def test_a_killed_process_loses_no_step(tmp_path, expected, backend, durability):
    """Without a journal, a table of compressed shards stands at its last drain, and every shard is whole."""
    code = CHILD.format(here=[str(directory) for directory in Path(__file__).parents[:2]])
    done = nursery.run(code, tmp_path, backend, durability)
    assert done.returncode == -9, done.stderr
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StateWarning)
        optimizer = build(tmp_path, resume=True)
    with optimizer:
        if durability == "none":
            optimizer.read_rows(np.arange(ROWS["left"]), "left")
        else:
            assert state_of(optimizer) == expected[0]
    assert not list(tmp_path.rglob("*.tmp"))


@by_backend
def test_checkpoints_of_zarr_states(tmp_path, expected, backend):
    """Export, and import into every kind of state."""
    with build(tmp_path / "one", backend=backend) as optimizer:
        train(optimizer, 20)
        optimizer.export_checkpoint(tmp_path / "checkpoint")
    for name, other in BACKENDS.items():
        with build(tmp_path / name, backend=other) as optimizer:
            train(optimizer, 2, seed=9)
            optimizer.import_checkpoint(tmp_path / "checkpoint")
            assert state_of(optimizer) == expected[0]
            train(optimizer, 2, seed=3)
            found = state_of(optimizer)
        with build(tmp_path / name, resume=True) as optimizer:
            assert state_of(optimizer) == found
        assert len(owned_files(tmp_path / name)) == 2


@by_backend
def test_modules_and_optimizers_share_a_state(tmp_path, backend):
    """Later ones need not say the backend, may say the same, and may not say another."""
    found = []
    for name, one in (("memmap", "memmap"), ("zarr", backend)):
        torch.manual_seed(0)
        path = tmp_path / name
        first = DiskEmbedding(300, 4, state_dir=path, name="first", backend=one)
        second = DiskEmbedding(200, 4, state_dir=path, name="second")
        other = Memmap() if one is backend else "zarr"
        with pytest.raises(ValueError, match=r"backend=.* differs from .*, with which"):
            DiskEmbedding(200, 4, state_dir=path, name="third", backend=other)
        third = DiskEmbedding(200, 4, state_dir=path, name="third", backend=one)
        optimizer = DiskSparseAdam([*first.parameters(), *second.parameters(), *third.parameters()], lr=0.1)
        ids = torch.arange(0, 200, 3)
        for _ in range(4):
            (first(ids) * second(ids) * third(ids)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.cat([first(ids), second(ids), third(ids)]).tolist())
        first.close()
    assert found[0] == found[1]
    again = DiskEmbedding(300, 4, state_dir=tmp_path / "zarr", name="first", resume=True)
    with pytest.warns(StateWarning, match="holds no table 'fourth'"):
        DiskEmbedding(10, 4, state_dir=tmp_path / "zarr", name="fourth", resume=True)
    kinds = {table["backend"]["kind"] for table in read_metadata(tmp_path / "zarr").tables}
    assert kinds == {"zarr"}
    again.close()
    with pytest.raises(StateMismatchError, match="table 'first' is stored by the backend 'zarr'"):
        DiskEmbedding(10, 4, state_dir=tmp_path / "zarr", name="fifth", resume=True, backend="memmap")


def test_estimates(tmp_path):
    for backend in (Zarr(), ZARR):
        guess = estimate(1_500, 5, backend=backend)
        assert guess.logical == estimate(1_500, 5).logical
        build(tmp_path / str(backend.shard_bytes), backend=backend).close()
        files = group_of(tmp_path / str(backend.shard_bytes)).rglob("*")
        shards = sum(file.stat().st_size for file in files if file.is_file() and file.name != "zarr.json")
        assert guess.file <= shards <= guess.file + 5 * (1 << 12)
    assert (
        estimate(1_500, 5, backend=ZSTD).logical
        == estimate(1_500, 5).logical
        <= estimate(1_500, 5, backend=ZSTD).file
    )


def test_a_disk_without_room(tmp_path, monkeypatch):
    monkeypatch.setattr(dsa.backends.system, "available_bytes", lambda directory: 50_000)
    with pytest.raises(DiskSpaceError, match="bytes are needed"):
        build(tmp_path, backend="zarr", allocate="reserve")
    assert not owned_files(tmp_path)


def test_stats_tell_of_what_is_collected(tmp_path):
    with build(tmp_path, backend=Zarr(compression="zstd")) as optimizer:
        train(optimizer, 5)
        assert optimizer.stats()["queue_depth"] > 5
        assert optimizer.stats()["writer_status"] == "running"
        optimizer.flush()
        assert optimizer.stats()["queue_depth"] == 0
    with build(tmp_path / "plain", backend="zarr") as optimizer:
        train(optimizer, 1)
        assert optimizer.stats()["writer_status"] == "none"


def test_small_drains_are_rare(tmp_path, monkeypatch):
    """What is collected is written at once when the room for it is used up, for all tables together."""
    from dsa.backends.zarr_compressed import CompressedZarrBackend

    written = []
    write = CompressedZarrBackend.write

    def counting(backend, rows, records):
        written.append(len(rows))
        write(backend, rows, records)

    monkeypatch.setattr(CompressedZarrBackend, "write", counting)
    overlay = Zarr(compression="zstd", overlay_bytes=1 << 18)
    with build(tmp_path, backend=overlay) as optimizer:
        written.clear()
        train(optimizer, 120)
        drains = len(written)
        bytes_written = optimizer.stats()["record_bytes_written"]
    assert 2 <= drains <= 2 * (1 + 1.2 * bytes_written // (1 << 18))
