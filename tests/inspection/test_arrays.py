"""Views as labelled arrays: nothing is copied or read before it is used."""

import sys

import numpy as np
import pytest
import xarray
from small_states import build, train

from dsa import init
from dsa.inspection import open_state
from dsa.inspection.arrays import dataset, tree


def test_a_dataset_is_the_table(path):
    with open_state(path) as state:
        entity = state["entity"]
        ds = entity.to_xarray()
        assert isinstance(ds, xarray.Dataset)
        assert dict(ds.sizes) == {"row": 300, "dim": 4}
        assert not ds.coords
        assert list(ds) == ["w", "m", "v", "t", "s"]
        assert {name: array.dims for name, array in ds.items()} == {
            "w": ("row", "dim"), "m": ("row", "dim"), "v": ("row", "dim"), "t": ("row",), "s": ("row",),
        }  # fmt: skip
        for name in entity.fields:
            np.testing.assert_array_equal(ds[name], entity[name])
            assert np.shares_memory(ds[name].values, entity[name])
            assert np.shares_memory(ds[name][7:9].values, entity[name])
            assert not ds[name].values.flags.writeable
        assert ds.attrs["table"] == "entity"
        assert ds.attrs["k"] == 1.0
        assert ds.attrs["steps"] == 3
        assert "Normal" in ds.attrs["initializer"]
        assert "never written" in ds.w.attrs["long_name"]
        touched = ds.w.where(ds.s > 0, drop=True)
        assert touched.sizes["row"] == np.count_nonzero(entity["s"])


def test_one_second_moment_per_row(tmp_path):
    with build(tmp_path, k=0.0, second_moment="row") as optimizer, open_state(tmp_path) as state:
        train(optimizer, 1)
        assert state["entity"].to_xarray().v.dims == ("row",)


def test_a_tree_is_the_state(path):
    with open_state(path) as state:
        whole = state.to_xarray()
        assert isinstance(whole, xarray.DataTree)
        assert list(whole.children) == ["entity", "flat"]
        assert whole.attrs == {"directory": str(path), "status": "closed", "global_step": 3}
        assert np.shares_memory(whole["entity"]["w"].values, state["entity"]["w"])


def test_names_with_slashes_are_paths(tmp_path):
    tables = {"users/emb": init.Zeros(3, 2), "items.emb": init.Zeros(4, 2)}
    with build(tmp_path, tables, k=0.0), open_state(tmp_path) as state:
        whole = state.to_xarray()
        assert whole["users/emb"]["w"].shape == (3, 2)
        assert whole["items.emb"]["w"].shape == (4, 2)


def test_a_dataset_follows_training(tmp_path):
    with build(tmp_path) as optimizer, open_state(tmp_path) as state:
        ds = state["flat"].to_xarray()
        assert int(ds.t.sum()) == 0
        optimizer.step({"flat": ([3], np.ones((1, 3), np.float32))})
        assert int(ds.t[3]) == 1


def test_arrays_of_other_libraries_are_read_when_used():
    class Counting:
        """Like a Zarr array: its slices are numpy arrays."""

        shape, dtype = (10, 3), np.dtype("<f4")

        def __init__(self):
            self.asked = []

        def __getitem__(self, key):
            self.asked.append(key)
            return np.arange(30, dtype=np.float32).reshape(10, 3)[key]

    array = Counting()
    ds = tree({"entity": dataset({"w": array}, {})}, {})["entity"].to_dataset()
    part = ds.w[2:5]
    repr(ds)
    assert array.asked == []
    np.testing.assert_array_equal(part, np.arange(6, 15).reshape(3, 3))
    np.testing.assert_array_equal(ds.w[[7, 1]], np.arange(30).reshape(10, 3)[[7, 1]])
    assert len(array.asked) == 2


def test_without_xarray(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "xarray", None)
    with open_state(path) as state:
        for make in (state.to_xarray, state["flat"].to_xarray):
            with pytest.raises(ImportError, match=r"to_xarray needs xarray.*pip install xarray"):
                make()
