"""Tables whose rows belong to ids: checkpoints of them, weights for serving, and tables of the other kind."""

import subprocess
import sys

import numpy as np
import pyarrow.parquet
import pytest
import torch
import zarr
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors

import dsa
from dsa import IdPolicy, init
from dsa.backends import Zarr
from dsa.checkpoint.by_id import RecordsById
from dsa.checkpoint.export import write_checkpoint
from dsa.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    RowIndexError,
    RowTypeError,
    StateMismatchError,
    StateNotFoundError,
)
from dsa.schema import is_keyed
from dsa.state.opening import opened
from dsa.state.table import content_of

DIM = 4
POLICY = IdPolicy(max_rows=60, evict_after=12)


def rule(seed=4):
    return init.Normal(None, DIM, seed=seed)


def optimizer(path, resume=None, **options):
    return dsa.DiskSparseRiemannianAdam(
        {"user": rule()}, lr=0.1, k=0.0, disk_dir=path, resume=resume, ids={"user": POLICY}, **options
    )


def steps(opened, count, seed, high=150):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        ids = rng.integers(-high, high, 15)
        opened.step({"user": (ids, rng.normal(size=(15, DIM)).astype(np.float32))})
    opened.delete(rng.integers(-high, high, 20), "user")


def content(path):
    """Every field of each id, as bytes; what the directory's index says is the same."""
    with opened(path, None) as state, state.use():
        return open_content(state)


def open_content(state):
    table = state.tables["user"]
    found = {}
    for first, records in content_of(table).blocks():
        for row in np.flatnonzero(records["live"] == 1):
            found[int(records["id"][row])] = records[row].tobytes()
            assert table.keys.find(np.array([records["id"][row]])) == [first + row]
    assert len(found) == len(table.keys)
    return found


@pytest.mark.parametrize("options", [{}, {"backend": Zarr(compression="zstd")}, {"state_dtype": "bfloat16"}])
def test_a_server_follows_by_deltas(tmp_path, options):
    """Rows are evicted, deleted and given out again between the full checkpoint and each delta."""
    with optimizer(tmp_path / "run", **options) as training:
        steps(training, 12, seed=0)
        training.export_checkpoint(tmp_path / "full")
        before = set(training.ids("user").tolist())
        for number in range(3):
            steps(training, 8, seed=number + 1)
            training.export_checkpoint(tmp_path / f"delta-{number}", base=tmp_path / "full")
            after = open_content(training._state)
            assert before - set(after), "some ids have gone"
            dsa.import_checkpoint(tmp_path / f"delta-{number}", tmp_path / f"served-{number}")
            assert content(tmp_path / f"served-{number}") == after
            assert dsa.verify(tmp_path / f"delta-{number}").ok
    dsa.flatten_checkpoint(tmp_path / "delta-2", tmp_path / "flat")
    dsa.copy_checkpoint(tmp_path / "flat", tmp_path / "copy")
    dsa.import_checkpoint(tmp_path / "copy", tmp_path / "last")
    assert content(tmp_path / "last") == content(tmp_path / "run")


def test_a_run_goes_on_from_an_import_as_it_would_have(tmp_path):
    with optimizer(tmp_path / "run") as training:
        steps(training, 12, seed=0)
        training.export_checkpoint(tmp_path / "full")
        steps(training, 9, seed=1)
        expected = open_content(training._state)
    dsa.import_checkpoint(tmp_path / "full", tmp_path / "other")
    with optimizer(tmp_path / "other", resume=True) as training:
        steps(training, 9, seed=1)
        assert open_content(training._state) == expected


@pytest.mark.parametrize("rows", [0, 9_000])
def test_an_open_state_takes_a_checkpoint_whatever_its_rows(tmp_path, rows):
    with optimizer(tmp_path / "run") as training:
        steps(training, 6, seed=0)
        expected = open_content(training._state)
        training.export_checkpoint(tmp_path / "full")
    layer = dsa.DiskEmbedding(None, DIM, init=rule(), state_dir=tmp_path / "other", name="user")
    adam = dsa.DiskSparseAdam(layer.parameters(), lr=0.1)
    layer.insert(torch.arange(rows))
    layer.import_checkpoint(tmp_path / "full")
    assert sorted(layer.ids().tolist()) == sorted(expected)
    (layer(torch.tensor([0, 7_000])) ** 2).sum().backward()
    adam.step()
    assert set(layer.ids().tolist()) == {*expected, 0, 7_000}
    layer.close()


def test_inserts_and_deletions_beside_an_export_are_not_in_it(tmp_path):
    with optimizer(tmp_path / "run") as training:
        steps(training, 12, seed=0)
        expected = open_content(training._state)
        moves = iter(range(3))

        def go_on(done, total):
            for number in moves:
                steps(training, 6, seed=number)

        training.export_checkpoint(tmp_path / "full", progress=go_on)
        assert next(moves, None) is None
        assert open_content(training._state) != expected
        training.export_checkpoint(tmp_path / "delta", base=tmp_path / "full")
        now = open_content(training._state)
    dsa.import_checkpoint(tmp_path / "full", tmp_path / "a")
    dsa.import_checkpoint(tmp_path / "delta", tmp_path / "b")
    assert content(tmp_path / "a") == expected
    assert content(tmp_path / "b") == now


def test_another_process_reads_it_with_zarr_alone(tmp_path):
    with optimizer(tmp_path / "run") as training:
        steps(training, 5, seed=0)
        ids = sorted(training.ids("user").tolist())
        training.export_checkpoint(tmp_path / "full")
        program = (
            "import sys, zarr; user = zarr.open_group(sys.argv[1], mode='r')['user']\n"
            "live = user['live'][:] == 1\n"
            "print(sorted(user['id'][:][live].tolist()), sorted(user), user['w'][:][live].shape)"
        )
        told = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "full")],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    assert told.strip() == f"{ids} ['id', 'live', 'm', 's', 't', 'v', 'w'] ({len(ids)}, {DIM})"


def damaged(tmp_path, change):
    """Return a checkpoint that is whole as a checkpoint, and whose rows are changed."""
    with optimizer(tmp_path / "run") as training:
        training.step({"user": ([5, 6, 7, 8], np.ones((4, DIM), np.float32))})
        training.export_checkpoint(tmp_path / "good")
    whole = dsa.open_checkpoint(tmp_path / "good").content()

    def blocks(table):
        for first, records in table.blocks():
            change(records)
            yield first, records

    from dataclasses import replace

    tables = tuple(replace(each, blocks=lambda each=each: blocks(each)) for each in whole.tables)
    write_checkpoint(replace(whole, tables=tables), tmp_path / "bad")
    return tmp_path / "bad"


def two_of_one(records):
    records["id"][2] = 5


def half_alive(records):
    records["live"][1] = 2


def never_written(records):
    records["s"][1] = 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (two_of_one, "4 rows .* belong to 3 ids"),
        (half_alive, "row 1 .* has live=2"),
        (never_written, "row 1 .* live=1 and the stamp 0"),
    ],
)
def test_rows_that_do_not_say_whose_they_are_are_refused(tmp_path, change, message):
    bad = damaged(tmp_path, change)
    with pytest.raises(CheckpointCorruptError, match=message):
        dsa.import_checkpoint(bad, tmp_path / "new")
    with pytest.raises(StateNotFoundError):
        dsa.open_state(tmp_path / "new")
    before = content(tmp_path / "run")
    with optimizer(tmp_path / "run", resume=True) as training:
        with pytest.raises(CheckpointCorruptError, match=message):
            training.import_checkpoint(bad)
        assert open_content(training._state) == before
        steps(training, 2, seed=0)
    assert len(list((tmp_path / "run").glob("*.ids"))) == len(list((tmp_path / "run").glob("*.dsa"))) == 1


def test_tables_of_rows_and_of_ids_are_not_imported_into_each_other(tmp_path):
    with optimizer(tmp_path / "run") as training:
        training.step({"user": ([5], np.ones((1, DIM), np.float32))})
        training.export_checkpoint(tmp_path / "ids")
    with dsa.DiskSparseRiemannianAdam({"user": init.Zeros(9, DIM)}, k=0.0, disk_dir=tmp_path / "d") as dense:
        dense.export_checkpoint(tmp_path / "rows")
        with pytest.raises(StateMismatchError, match="belong to ids in the checkpoint only"):
            dense.import_checkpoint(tmp_path / "ids")
    with (
        optimizer(tmp_path / "run", resume=True) as training,
        pytest.raises(StateMismatchError, match=r"belong to ids in the state only: .*convert_ids"),
    ):
        training.import_checkpoint(tmp_path / "rows")


@pytest.fixture
def served(tmp_path):
    tables = {"user": rule(), "item": init.Normal(7, 2, seed=3)}
    with dsa.DiskSparseRiemannianAdam(tables, lr=0.1, k=0.0, disk_dir=tmp_path / "s") as training:
        steps(training, 4, seed=0)
        yield training


def test_weights_for_serving_are_those_of_live_rows_with_their_ids(served, tmp_path):
    ids = served.ids("user").tolist()
    wanted = dict(zip(ids, served.read_rows(ids, "user").tolist(), strict=True))
    group = zarr.open_group(served.export_weights(tmp_path / "w"), mode="r")
    assert sorted(group["user"].array_keys()) == ["id", "w"]
    assert sorted(group["item"].array_keys()) == ["w"]
    tensors = load_file(served.export_weights(tmp_path / "w.safetensors"))
    assert sorted(tensors) == ["item", "user.id", "user.w"]
    np.testing.assert_array_equal(tensors["item"], served.read_rows(np.arange(7), "item").numpy())
    served.export_weights(tmp_path / "{table}.parquet")
    parquet = pyarrow.parquet.read_table(tmp_path / "user.parquet")
    assert str(parquet.schema.field("w").type) == f"fixed_size_list<element: float>[{DIM}]"
    found = {
        "zarr": (group["user"]["id"][:].tolist(), group["user"]["w"][:].tolist()),
        "safetensors": (tensors["user.id"].tolist(), tensors["user.w"].tolist()),
        "parquet": (parquet["id"].to_pylist(), parquet["w"].to_pylist()),
    }
    for name, (some, weights) in found.items():
        assert dict(zip(some, weights, strict=True)) == wanted, name
        assert len(some) == len(ids)
    assert pyarrow.parquet.read_table(tmp_path / "item.parquet")["id"].to_pylist() == list(range(7))
    dsa.open_checkpoint(tmp_path / "w").verify()


def test_one_parquet_file_holds_one_table(served, tmp_path):
    with pytest.raises(ValueError, match=r"one Parquet file, which holds one table, and there are 2"):
        served.export_weights(tmp_path / "w.parquet")
    assert not list(tmp_path.glob("*.parquet"))


def test_parquet_on_a_store(served, tmp_path):
    import fsspec

    served.export_weights("memory://ids/{table}.parquet")
    with fsspec.open("memory://ids/user.parquet", "rb") as file:
        ids = pyarrow.parquet.read_table(file)["id"].to_pylist()
    assert sorted(ids) == sorted(served.ids("user").tolist())


def test_parquet_comes_in_row_groups(tmp_path, monkeypatch):
    from dsa.checkpoint import parquet

    monkeypatch.setattr(parquet, "_GROUP_BYTES", 1 << 14)
    layer = dsa.DiskEmbedding(None, 64, init=init.Normal(None, 64, seed=1), state_dir=tmp_path / "s")
    layer.insert(torch.arange(50_000) * 7)
    file = pyarrow.parquet.ParquetFile(layer.export_weights(tmp_path / "w.parquet"))
    assert file.metadata.num_row_groups > 1
    assert file.metadata.num_rows == 50_000
    layer.close()


def test_weights_in_bfloat16_and_of_no_ids(tmp_path):
    storage = {"w": "bfloat16"}
    layer = dsa.DiskEmbedding(
        None, 2, init=init.Zeros(None, 2), state_dir=tmp_path / "s", state_dtype=storage
    )
    none = load_tensors(layer.export_weights(tmp_path / "none.safetensors"))
    assert (none["embedding.id"].shape, none["embedding.w"].shape) == ((0,), (0, 2))
    assert len(pyarrow.parquet.read_table(layer.export_weights(tmp_path / "none.parquet"))) == 0
    with pytest.raises(CheckpointMismatchError, match="no id of table 'embedding' has a row"):
        layer.export_weights(tmp_path / "none")
    layer.insert(torch.tensor([-3]), torch.tensor([[1.0, 0.5]]))
    found = load_tensors(layer.export_weights(tmp_path / "w.safetensors"))
    assert found["embedding.w"].dtype is torch.bfloat16
    assert found["embedding.w"].tolist() == [[1.0, 0.5]]
    assert zarr.open_group(layer.export_weights(tmp_path / "w"), mode="r")["embedding/w"].dtype == np.float32
    assert pyarrow.parquet.read_table(layer.export_weights(tmp_path / "w.parquet"))["w"].to_pylist() == [
        [1, 0.5]
    ]
    layer.close()


@pytest.mark.parametrize("through", ["directory", "checkpoint"])
def test_rows_get_ids_and_lose_them_again(tmp_path, through):
    """Weights, moments, counters and stamps go with them."""
    dense = {"user": init.Normal(40, DIM, seed=9), "item": init.Zeros(5, 2)}
    grads = np.random.default_rng(0).normal(size=(12, DIM)).astype(np.float32)
    with dsa.DiskSparseRiemannianAdam(dense, lr=0.1, k=0.0, disk_dir=tmp_path / "rows") as training:
        for start in (0, 6):
            training.step({"user": (np.arange(start, start + 12), grads)})
        training.export_checkpoint(tmp_path / "checkpoint")
        weights = training.read_rows(np.arange(40), "user")
    ids = np.random.default_rng(1).integers(0, 2**64, 40, dtype=np.uint64)
    source = tmp_path / ("rows" if through == "directory" else "checkpoint")
    dsa.convert_ids(source, tmp_path / "ids", keyed={"user": ids})
    keyed = {"user": init.Normal(None, DIM, seed=9), "item": dense["item"]}
    with dsa.DiskSparseRiemannianAdam(
        keyed, lr=0.1, k=0.0, disk_dir=tmp_path / "ids", resume=True
    ) as training:
        assert torch.equal(training.read_rows(ids, "user"), weights)
        training.step({"user": (ids[3:15], grads)})
        training.step({"user": ([77], grads[:1])})
        assert training.global_step == 4
    back = np.array(ids.view(np.int64).tolist())
    dsa.convert_ids(tmp_path / "ids", tmp_path / "back", dense={"user": [*back[::-1], 77]})
    plain = {"user": init.Normal(41, DIM, seed=9), "item": dense["item"]}
    with dsa.DiskSparseRiemannianAdam(
        dense, lr=0.1, k=0.0, disk_dir=tmp_path / "rows", resume=True
    ) as training:
        training.step({"user": (np.arange(3, 15), grads)})
    with dsa.open_state(tmp_path / "rows") as one, dsa.open_state(tmp_path / "back") as other:
        expected, found = one["user"].read(np.arange(40)), other["user"].read(np.arange(39, -1, -1))
        for name in ("w", "m", "v", "t"):
            np.testing.assert_array_equal(expected[name], found[name])
        assert not is_keyed(other["user"].schema)
    assert plain["user"].rows == 41


def test_rows_numbers_become_ids(tmp_path):
    with dsa.DiskSparseRiemannianAdam(
        {"user": np.ones((6, DIM), np.float32)}, k=0.0, disk_dir=tmp_path / "a"
    ):
        pass
    with pytest.raises(ValueError, match=r"no rule for the first weights .*Zeros\(None, 4\)"):
        dsa.convert_ids(tmp_path / "a", tmp_path / "b", keyed={"user": None})
    dsa.convert_ids(tmp_path / "a", tmp_path / "b", keyed={"user": None}, init={"user": rule()})
    assert sorted(content(tmp_path / "b")) == list(range(6))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keyed": {"x": None}}, KeyError, "no table 'x'"),
        ({"keyed": {"user": None}}, StateMismatchError, "belong to ids already"),
        ({"dense": {"item": [1]}}, StateMismatchError, "belong to no ids"),
        ({"dense": {"user": [1, 1]}}, ValueError, "comes twice"),
        ({"dense": {"user": [0.5]}}, RowTypeError, "1-D array of integers"),
        ({"dense": {"user": [10**6]}}, RowIndexError, "id 1000000 has no row"),
        ({"keyed": {"item": [1, 2]}}, ValueError, "2 ids are not those of the 7 rows"),
    ],
)
def test_conversions_that_can_not_be(served, tmp_path, options, error, message):
    served.export_checkpoint(tmp_path / "c")
    with pytest.raises(error, match=message):
        dsa.convert_ids(tmp_path / "c", tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_records_are_found_by_id_in_any_order(tmp_path):
    layer = dsa.DiskEmbedding(None, DIM, init=rule(), state_dir=tmp_path / "run", name="user")
    layer.insert(torch.arange(300) * 3)
    layer.delete(torch.arange(100) * 6)
    layer.export_checkpoint(tmp_path / "c")
    layer.close()
    (table,) = dsa.open_checkpoint(tmp_path / "c").content().tables
    with RecordsById(table) as records:
        assert len(records) == 200
        places = records.find(np.array([897, 3, 6, 9, 897, 291]))
        assert (places < 0).tolist() == [False, False, True, False, False, False]
        assert records.read(places[places >= 0])["id"].tolist() == [897, 3, 9, 897, 291]
