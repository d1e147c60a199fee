"""Other kinds of backends: Zarr, and one whose layout is passed by whoever looks at the state."""

import json
import zlib

import numpy as np
import pytest
import zarr
from small_states import build, train

from dsa import init
from dsa.backends import CompressedZarrBackend, MemoryBackend, Source, Zarr
from dsa.errors import CorruptRowError, StateCorruptError, StateMismatchError
from dsa.inspection import open_state, summarize
from dsa.schema import adam_schema
from dsa.state.metadata import METADATA_NAME


class Copied:
    """A layout of tables that are in memory, to be looked at alone."""

    kind = "copy"
    collect_bytes = 0

    def __init__(self, tables):
        self.tables = tables

    def look(self, path, description):
        backend, group = self.tables[description["id"]]
        return Source(backend, lambda name: group[name])

    def unused(self, *arguments):
        raise AssertionError("a state that is looked at is neither made nor changed")

    sizes = create = open = like = refusal = unused


def edit(path, change):
    """Change the tables in a description."""
    document = json.loads((path / METADATA_NAME).read_text())
    for table in document["content"]["tables"]:
        change(table)
    document["crc32"] = f"{zlib.crc32(json.dumps(document['content'], sort_keys=True).encode()):08x}"
    (path / METADATA_NAME).write_text(json.dumps(document))


@pytest.fixture
def copied(path):
    """A state whose tables have changed hands, and the layout that they have now."""
    tables = {}
    with open_state(path) as state:
        for name, table in state.tables.items():
            records = table.read(range(table.rows), initial=False)
            backend = MemoryBackend(len(records), table.schema)
            backend.write(np.arange(len(records)), records)
            group = zarr.create_group(zarr.storage.MemoryStore())
            for field in records.dtype.names:
                group.create_array(field, data=np.ascontiguousarray(records[field]))
            tables[name] = backend, group
    edit(path, lambda table: table["backend"].update(kind="copy", id=table["name"]))
    return Copied(tables)


def test_a_view_over_another_kind(tmp_path, path, copied):
    with build(tmp_path / "same") as optimizer:
        train(optimizer, 3)
        expected = optimizer.read_rows(range(300), "entity")
    for file in path.glob("*.dsa"):
        file.unlink()
    with open_state(path, backend=copied) as state:
        entity = state["entity"]
        np.testing.assert_array_equal(entity.weights(range(300)), expected)
        assert isinstance(entity["w"], zarr.Array)
        np.testing.assert_array_equal(entity["t"][:], entity.read(range(300))["t"])
        assert entity.disk_bytes == 0
        assert "entity" in repr(state)
        assert "entity" in state._repr_html_()
        ds = entity.to_xarray()
        np.testing.assert_array_equal(ds.m[5:8], entity["m"][5:8])
        (summary, _) = summarize(state).tables
        assert summary.touched_rows == np.count_nonzero(entity["s"][:])


def test_a_kind_whose_layout_was_not_passed_is_named(path, copied):
    for given in (None, Zarr()):
        with pytest.raises(
            StateMismatchError,
            match=r"table 'entity' is stored .* kind 'copy'.*: pass the layout .*backend=",
        ):
            open_state(path, backend=given)


@pytest.mark.parametrize("backend", ["tape", 7, Copied, MemoryBackend(1, adam_schema(1))])
def test_what_is_no_layout_is_refused(path, backend):
    with pytest.raises(ValueError, match=r"backend=.* is not known: pass 'memmap'"):
        open_state(path, backend=backend)


def test_what_a_layout_trips_over_is_told(path, copied):
    edit(path, lambda table: table["backend"].pop("id"))
    with pytest.raises(StateCorruptError, match=r"description of table 'entity' in .* can't be read .*'id'"):
        open_state(path, backend=copied)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_zarr_table(tmp_path, compression):
    tables = {"entity": init.Normal(500, 6, seed=1)}
    backend = Zarr(compression=compression, shard_bytes=4096)
    with build(tmp_path, tables, k=0.0, backend=backend) as optimizer, open_state(tmp_path) as state:
        train(optimizer, 3, tables=tables)
        optimizer.flush()
        entity = state["entity"]
        records = entity.read(range(500), initial=False)
        for name in entity.fields:
            assert isinstance(entity[name], zarr.Array)
            np.testing.assert_array_equal(entity[name][:], records[name])
            np.testing.assert_array_equal(entity.to_xarray()[name], records[name])
        assert np.count_nonzero(records["t"]) > 0
        assert summarize(state).tables[0].touched_rows == np.count_nonzero(records["s"])
        assert f"{np.count_nonzero(records['s'])} (" in repr(state)
        assert entity.disk_bytes > 0
        with pytest.raises(ValueError, match=r"read|writ"):
            entity["w"][0] = 1.0


def test_shards_that_are_replaced_are_opened_again(tmp_path):
    tables = {"entity": init.Zeros(500, 6)}
    backend = Zarr(compression="zstd", shard_bytes=4096)
    with (
        build(tmp_path, tables, k=0.0, durability="none", backend=backend) as optimizer,
        open_state(tmp_path) as state,
    ):
        for step in range(1, 4):
            optimizer.step({"entity": (range(500), np.ones((500, 6), np.float32))})
            optimizer.flush()
            assert set(state["entity"].read(range(500))["t"].tolist()) == {step}
            assert sum(len(records) for _, records in state["entity"].scan()) == 500


def test_a_damaged_chunk_is_told(tmp_path):
    tables = {"entity": init.Zeros(500, 6)}
    with build(tmp_path, tables, k=0.0, backend=Zarr(compression="zstd")) as optimizer:
        optimizer.step({"entity": (range(500), np.ones((500, 6), np.float32))})
    with open_state(tmp_path) as state:
        (shard,) = tmp_path.glob("*.zarr/w/c/0/0")
        raw = bytearray(shard.read_bytes())
        raw[20] ^= 1
        shard.write_bytes(raw)
        with pytest.raises(CorruptRowError, match="the checksum of its record does not match"):
            state["entity"].weights([0])
        assert state["entity"].read([0])["s"] < 0  # handed out, marked
        assert state["entity"].weights([499]).shape == (1, 6)


def test_damage_that_is_a_file_being_replaced_is_read_again(tmp_path, monkeypatch):
    tables = {"entity": init.Zeros(100, 2)}
    with build(tmp_path, tables, k=0.0, backend=Zarr(compression="zstd")) as optimizer:
        optimizer.step({"entity": ([3], np.ones((1, 2), np.float32))})
        optimizer.flush()
        with open_state(tmp_path) as state:
            (shard,) = tmp_path.glob("*.zarr/w/c/0/0")
            original, calls = CompressedZarrBackend.read, []

            def read(self, rows, out=None):
                calls.append(rows)
                if len(calls) == 1:
                    shard.rename(shard.with_name("other"))
                    shard.write_bytes(shard.with_name("other").read_bytes())
                    raise StateCorruptError("the places of the old file don't fit the new one")
                return original(self, rows, out)

            monkeypatch.setattr(CompressedZarrBackend, "read", read)
            assert state["entity"].read([3])["t"].tolist() == [1]
            assert len(calls) == 2
