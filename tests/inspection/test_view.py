"""Views of closed and open directories: the numbers that the optimizer has, and nothing written."""

import gc
import sys

import numpy as np
import pytest
from small_states import TABLES, build, content, train

from dsa import DiskSparseAdam, DiskSparseRiemannianAdam, init
from dsa.backends import Memmap, Zarr
from dsa.errors import CorruptRowError, RowIndexError, RowTypeError, StateClosedError
from dsa.inspection import open_state
from dsa.rules.adam import FRAME_ADAM
from dsa.state.metadata import table_file_name


def test_what_a_view_says_of_a_state(path):
    with open_state(str(path)) as state:
        assert (state.path, state.status, state.global_step) == (path, "closed", 3)
        assert list(state) == list(state.tables) == list(TABLES)
        assert len(state) == 2
        assert "entity" in state
        assert "other" not in state
        entity = state["entity"]
        assert (entity.name, entity.rows, entity.dim, entity.shape) == ("entity", 300, 4, (300, 4))
        assert (entity.k, entity.steps, entity.rule) == (1.0, 3, FRAME_ADAM)
        assert entity.initializer == TABLES["entity"]
        assert entity.fields == ("w", "m", "v", "t", "s")
        assert entity.logical_bytes == 300 * (3 * 16 + 4)
        assert entity.file_bytes == (path / table_file_name("entity")).stat().st_size
        assert entity.disk_bytes > 0
        with pytest.raises(KeyError, match=r"no table 'other': name one of \['entity', 'flat'\]"):
            state["other"]
        with pytest.raises(KeyError, match="table 'entity' has no field 'u': use one of w, m, v, t, s"):
            entity["u"]
        with pytest.raises(TypeError):
            state.tables["entity"] = entity


@pytest.mark.parametrize("backend", [Memmap(), Zarr(), Zarr(compression="zstd")])
@pytest.mark.parametrize("status", ["closed", "open"])
def test_weights_are_what_the_optimizer_reads(tmp_path, status, backend):
    rows = np.array([5, 299, 0, 5, 17])
    with build(tmp_path, backend=backend) as optimizer:
        train(optimizer, 4)
        expected = {name: optimizer.read_rows(range(source.rows), name) for name, source in TABLES.items()}
        if status == "closed":
            optimizer.close()
        with open_state(tmp_path) as state:
            assert state.status == status
            assert state.global_step == 4
            for name, weights in expected.items():
                np.testing.assert_array_equal(state[name].weights(range(len(weights))), weights)
            np.testing.assert_array_equal(state["entity"].weights(rows), expected["entity"][rows])
            assert state["entity"].weights([]).shape == (0, 4)


def test_a_view_follows_the_optimizer(tmp_path):
    with build(tmp_path) as optimizer, open_state(tmp_path) as state:
        assert state.global_step == 0
        for step in range(3):
            train(optimizer, 1, first=step)
            assert (state.global_step, state["flat"].steps) == (step + 1, step + 1)
            np.testing.assert_array_equal(
                state["entity"].weights(range(300)), optimizer.read_rows(range(300), "entity")
            )
        optimizer.set_curvature(4.0, name="entity")
        with pytest.raises(StateClosedError, match="was replaced or removed since this view"):
            state["entity"].weights(range(300))
    with build(tmp_path, resume=True, k={"entity": 4.0, "flat": 0.0}) as optimizer:
        state = open_state(tmp_path)
        assert state["entity"].k == 4.0
        np.testing.assert_array_equal(
            state["entity"].weights(range(300)), optimizer.read_rows(range(300), "entity")
        )
        optimizer.close()
        assert state.status == "closed"
        assert state.global_step == 3
        state.close()
    curvatures = {"entity": 4.0, "flat": 0.0}
    with build(tmp_path, resume=True, k=curvatures) as optimizer, open_state(tmp_path) as state:
        train(optimizer, 1, first=3)
        assert state.global_step == 4


def test_fields_are_views_of_the_file(path):
    records = np.fromfile(path / table_file_name("entity"), np.uint8)[4096:].reshape(300, -1)
    with open_state(path) as state:
        entity = state["entity"]
        raw = {name: entity[name] for name in entity.fields}
        assert {name: array.shape for name, array in raw.items()} == {
            "w": (300, 4), "m": (300, 4), "v": (300, 4), "t": (300,), "s": (300,),
        }  # fmt: skip
        for name, array in raw.items():
            assert not array.flags.writeable
            assert not array.flags.owndata
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.flags.writeable = True
            offset = entity.schema.offset(name)
            stored = records[:, offset : offset + array[:1].nbytes].copy().view(array.dtype)
            np.testing.assert_array_equal(array, stored.reshape(array.shape))
        untouched = raw["s"] == 0
        assert untouched.any()
        assert not untouched.all()
        assert (raw["w"][untouched] == 0.0).all()
        filled = entity.read(range(300))
        np.testing.assert_array_equal(filled["w"][~untouched], raw["w"][~untouched])
        assert (filled["w"][untouched] != 0.0).all()
        assert (filled["s"] == raw["s"]).all()
        filled["w"] = 0.0  # belongs to the caller
        assert raw["w"].any()
        del raw, array


def test_rows_that_cannot_be_used(path):
    with open_state(path) as state:
        for read in (state["entity"].weights, state["entity"].read):
            with pytest.raises(RowIndexError, match="index 300 is outside table 'entity'"):
                read([0, 300])
            with pytest.raises(RowIndexError, match="index -1"):
                read(np.array([-1]))
            with pytest.raises(RowTypeError, match="boolean mask"):
                read(np.ones(300, bool))
            with pytest.raises(RowTypeError, match="float64"):
                read([0.5])


def test_an_implausible_row_is_told(path):
    with build(path, resume=True) as optimizer:
        optimizer.step({"flat": ([7], np.ones((1, 3), np.float32))})
    file = path / table_file_name("flat")
    words = np.fromfile(file, np.float32)
    view = words[1024:].reshape(40, -1)
    view[7, 0] = np.nan
    words.tofile(file)
    with open_state(path) as state:
        assert np.isnan(state["flat"]["w"][7, 0])
        assert np.isnan(state["flat"].read([7])["w"][0, 0])
        with pytest.raises(CorruptRowError, match="row 7 of table 'flat'"):
            state["flat"].weights([7])
        assert state["flat"].weights([8]).shape == (1, 3)


def test_a_table_whose_weights_are_in_memory(tmp_path):
    import torch

    layer = torch.nn.Embedding(50, 4, sparse=True)
    with DiskSparseAdam(layer.parameters(), lr=0.1, state_dir=tmp_path) as optimizer:
        layer(torch.tensor([3, 4])).sum().backward()
        optimizer.step()
    with open_state(tmp_path) as state:
        (table,) = state.tables.values()
        assert table.fields == ("m", "v", "t", "s")
        assert table["t"].nonzero()[0].tolist() == [3, 4]
        assert table.read([4])["t"].tolist() == [1]
        with pytest.raises(KeyError, match="holds no weights, they are a parameter in memory"):
            table.weights([3])
        with pytest.raises(KeyError, match="has no field 'w'"):
            table["w"]


@pytest.mark.parametrize("options", [{"second_moment": "row"}, {"backend": None}, {"durability": "none"}])
def test_other_layouts(tmp_path, options):
    options = {"backend": Memmap(stride="page")} if "backend" in options else options
    tables = {"entity": init.Uniform(50, 5, seed=2)}
    with build(tmp_path, tables, k=0.0, **options) as optimizer, open_state(tmp_path) as state:
        train(optimizer, 2, tables=tables)
        np.testing.assert_array_equal(state["entity"].weights(range(50)), optimizer.read_rows(range(50)))
        row = options.get("second_moment") == "row"
        assert state["entity"]["v"].shape == ((50,) if row else (50, 5))
        optimizer.flush()
        assert state.global_step == 2


def test_nothing_is_written(path):
    before = content(path)
    with open_state(path) as state:
        repr(state)
        state._repr_html_()
        for table in state.tables.values():
            repr(table)
            table._repr_html_()
            table.weights(range(table.rows))
            for _ in table.scan():
                pass
        for table in state.content().tables:
            for _ in table.blocks():
                pass
        state.to_xarray().load()
    assert content(path) == before


def test_closing(path, monkeypatch):
    monkeypatch.setattr(
        "dsa.backends.system.sync_mapping", lambda *_: pytest.fail("a reader waits for no disk")
    )
    state = open_state(path)
    entity, weights = state["entity"], state["entity"]["w"]
    expected = weights.copy()
    state.close()
    state.close()
    assert state.closed
    for use in (
        lambda: entity["w"], lambda: entity.weights([0]), lambda: entity.read([0]),
        lambda: state.global_step, entity.content, lambda: next(entity.scan()), entity.to_xarray,
    ):  # fmt: skip
        with pytest.raises(StateClosedError, match=r"this view of .*state' was closed: call open_state\("):
            use()
    np.testing.assert_array_equal(weights, expected)  # an array that is held stays what it is
    assert "was closed" in repr(state)
    assert "was closed" in entity._repr_html_()


@pytest.mark.skipif(sys.platform != "linux", reason="mappings are counted by means of Linux")
@pytest.mark.parametrize("close", [True, False])
def test_files_are_let_go(path, close):
    def held():
        from pathlib import Path

        maps = Path("/proc/self/maps").read_text().count(str(path))
        links = [str(link.resolve()) for link in Path("/proc/self/fd").iterdir()]
        return maps + sum(str(path) in link for link in links)

    state = open_state(path)
    weights = state["entity"]["w"]
    assert held() > 0
    if close:
        state.close()
        assert held() > 0  # the array keeps its memory
    del weights, state
    gc.collect()
    assert held() == 0


def test_content_is_the_state(tmp_path):
    with build(tmp_path) as optimizer:
        train(optimizer, 3)
        optimizer.set_curvature(2.0, name="entity")
        expected = optimizer.read_rows(range(300), "entity").numpy()
    with open_state(tmp_path) as state:
        content = state.content()
        assert content.global_step == 3
        entity, flat = content.tables
        assert (entity.name, entity.rows, entity.k, entity.facts.steps) == ("entity", 300, 2.0, 3)
        assert (flat.name, flat.schema, flat.facts.initializer) == (
            "flat",
            state["flat"].schema,
            TABLES["flat"],
        )
        blocks = list(entity.blocks())
        rows = np.concatenate([np.arange(first, first + len(records)) for first, records in blocks])
        assert rows.tolist() == list(range(300))
        np.testing.assert_allclose(np.concatenate([r["w"] for _, r in blocks]), expected, atol=1e-7)
        np.testing.assert_array_equal(np.concatenate([r["s"] for _, r in blocks]), state["entity"]["s"])


def test_scanning_goes_block_by_block(tmp_path, monkeypatch):
    monkeypatch.setattr("dsa.backends.memmap._BLOCK_BYTES", 64 * 7)
    with build(tmp_path) as optimizer:
        train(optimizer, 3)
    with open_state(tmp_path) as state:
        blocks = list(state["entity"].scan())
        assert [first for first, _ in blocks] == list(range(0, 300, 7))
        np.testing.assert_array_equal(np.concatenate([r["t"] for _, r in blocks]), state["entity"]["t"])
        filled = list(state["entity"].content().blocks())
        np.testing.assert_array_equal(
            np.concatenate([r["w"] for _, r in filled]), state["entity"].read(range(300))["w"]
        )


def test_printing(path):
    with open_state(path) as state:
        title, header, entity, flat = repr(state).splitlines()
        assert title == f"<dsa state {str(path)!r}: closed, step 3>"
        assert header.split() == [
            "table", "shape", "k", "rule", "steps", "touched", "on", "disk", "logical",
        ]  # fmt: skip
        touched = np.count_nonzero(state["entity"]["s"])
        assert entity.split()[:8] == [
            "entity", "300", "x", "4", "1", "frame_adam", "3", str(touched),
        ]  # fmt: skip
        assert f"({touched / 300:.0%})" in entity
        assert "1.6 kB" in flat
        lines = repr(state["entity"]).splitlines()
        assert lines[0].startswith("<dsa table 'entity': 300 x 4, k=1, frame_adam, 3 steps, ")
        assert [line.split()[0] for line in lines[2:]] == ["w", "m", "v", "t", "s"]
        page = state._repr_html_()
        assert page.startswith("<div><b>dsa state</b>")
        assert page.count("<tr>") == 3
        assert ">300 x 4</td>" in page


def test_names_are_escaped(tmp_path):
    tables = {"<b>&": init.Zeros(3, 2)}
    with build(tmp_path, tables, k=0.0), open_state(tmp_path) as state:
        assert "&lt;b&gt;&amp;" in state._repr_html_()
        assert "<b>&" not in state._repr_html_().replace("<b>dsa state</b>", "")
        assert "&lt;b&gt;&amp;" in state["<b>&"]._repr_html_()


def test_large_tables_are_sampled_when_printed(tmp_path, monkeypatch):
    tables = {"big": init.Zeros(100_000, 2)}
    with DiskSparseRiemannianAdam(tables, lr=0.1, k=0.0, disk_dir=tmp_path, allocate="sparse") as optimizer:
        optimizer.step({"big": (np.arange(0, 100_000, 2), np.ones((50_000, 2), np.float32))})
        with open_state(tmp_path) as state:
            assert "about 5" in repr(state)
            assert "about 4" not in repr(state)
            assert "rows touched" in repr(state["big"])


def test_a_large_table_is_not_read_when_it_is_opened(tmp_path):
    """A terabyte of table is opened and sliced at once."""
    from dsa.schema import adam_schema

    rows = 100_000_000
    tables = {"big": init.Zeros(rows, 128)}
    with build(tmp_path, tables, k=0.0) as optimizer, open_state(tmp_path) as state:
        optimizer.step({"big": ([rows - 1], np.ones((1, 128), np.float32))})
        big = state["big"]
        assert big.file_bytes > rows * adam_schema(128).dtype.itemsize > 1000 * big.disk_bytes
        assert big["t"][rows - 1] == 1
        assert big.to_xarray().t[rows - 1] == 1
        assert repr(big.to_xarray())
        assert big.to_xarray()._repr_html_()
        assert "about 0%" in repr(state)
        assert (big["w"][-1] == big.weights([rows - 1])[0]).all()
