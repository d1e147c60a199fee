"""D38: memory that a caller hands over never ends the process, whatever the system lets be done with it."""

import os
import sys
import warnings

import numpy as np
import pytest
import torch

from dsa import DiskSparseAdam, DiskSparseRiemannianAdam, init
from dsa.optimizers import memory
from dsa.optimizers.resident import ParameterWeights

ROWS, DIM = 3_000, 4


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights.npy"
    np.save(path, np.ones((ROWS, DIM), np.float32))
    return path


@pytest.fixture(params=["list of mappings", "a byte"])
def way(request, monkeypatch):
    """Both ways of finding out, where the system has them."""
    listed = request.param == "list of mappings"
    if listed and sys.platform != "linux":
        pytest.xfail("there is no list of mappings")
    if not listed and not hasattr(os, "readv"):
        pytest.xfail("the system can't be asked")
    monkeypatch.setattr(memory, "_has_mappings", lambda: listed)


def mapped(file, mode="r", part=slice(None)):
    return tensor(np.load(file, mmap_mode=mode)[part])


def tensor(array):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns once of an array that is not writable
        return torch.from_numpy(array)


def step(parameter, optimizer):
    rows = torch.arange(len(parameter))[None]
    parameter.grad = torch.sparse_coo_tensor(
        rows, torch.ones_like(parameter), parameter.shape, check_invariants=True
    )
    optimizer.step()


@pytest.mark.parametrize("part", [slice(None), slice(1_000, None), slice(None, None, 2)], ids=str)
def test_a_file_mapped_for_reading_is_refused_at_once(tmp_path, file, way, part):
    layer = torch.nn.Embedding.from_pretrained(mapped(file, part=part), freeze=False, sparse=True)
    with pytest.raises(ValueError, match=r"'word' is read-only, .*: pass a copy"):
        DiskSparseAdam([("word", layer.weight)], state_dir=tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_weights_that_become_read_only_are_refused_in_the_step(tmp_path, file, way):
    parameter = torch.nn.Parameter(torch.ones(ROWS, DIM))
    with DiskSparseAdam([("word", parameter)], state_dir=tmp_path / "state") as optimizer:
        step(parameter, optimizer)
        kept = parameter.data
        parameter.data = mapped(file)
        with pytest.raises(ValueError, match="'word' is read-only"):
            step(parameter, optimizer)
        assert optimizer.global_step == 1
        optimizer.export_checkpoint(tmp_path / "checkpoint")
        with pytest.raises(ValueError, match="'word' is read-only"):
            optimizer.import_checkpoint(tmp_path / "checkpoint")
        parameter.data = kept
        step(parameter, optimizer)
        assert optimizer.global_step == 2


def test_an_added_group_is_looked_at_too(tmp_path, file):
    parameter = torch.nn.Parameter(torch.ones(ROWS, DIM))
    with DiskSparseAdam([("word", parameter)], state_dir=tmp_path / "state") as optimizer:
        with pytest.raises(ValueError, match="'other' is read-only"):
            optimizer.add_param_group({"params": [("other", torch.nn.Parameter(mapped(file)))]})
        assert optimizer.param_names == ["word"]
        step(parameter, optimizer)


@pytest.mark.parametrize("mode", ["c", "r+"])
def test_files_mapped_for_writing_are_trained(tmp_path, file, way, mode):
    parameter = torch.nn.Parameter(mapped(file, mode))
    with DiskSparseAdam([parameter], lr=0.5, state_dir=tmp_path / "state") as optimizer:
        step(parameter, optimizer)
    np.testing.assert_allclose(parameter.detach(), 0.5, rtol=1e-5)
    assert np.load(file)[0, 0] == (1.0 if mode == "c" else parameter[0, 0].item())


def test_an_array_that_is_only_flagged_is_no_danger(tmp_path):
    array = np.ones((ROWS, DIM), np.float32)
    array.flags.writeable = False
    parameter = torch.nn.Parameter(tensor(array))
    with DiskSparseAdam([parameter], state_dir=tmp_path / "state") as optimizer:
        step(parameter, optimizer)


def test_weights_whose_memory_was_freed(tmp_path):
    """As wrappers do that gather weights for the time of a forward pass; numpy would prevent it."""
    parameter = torch.nn.Parameter(torch.ones(ROWS, DIM, dtype=torch.bfloat16))
    with DiskSparseAdam([("word", parameter)], state_dir=tmp_path / "state") as optimizer:
        step(parameter, optimizer)
        gradient = parameter.grad
        parameter.untyped_storage().resize_(0)
        parameter.grad = gradient
        with pytest.raises(ValueError, match="'word' is gone"):
            optimizer.step()
        assert optimizer.global_step == 1


def test_another_storage_at_the_same_place_is_looked_at_again(monkeypatch):
    from dsa.optimizers import resident

    looked = []
    monkeypatch.setattr(resident, "is_writable", lambda start, size: looked.append(size) or True)
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    held = ParameterWeights(parameter, "word")
    held.require_writable()
    held.require_writable()
    assert looked == [64]
    parameter.data = torch.from_numpy(parameter.data.numpy())
    held.require_writable()
    assert looked == [64, 64]


@pytest.mark.parametrize("number", [3, 2_000])
@pytest.mark.parametrize("kind", ["read-only", "unaligned", "backwards"])
def test_rows_and_gradients_are_only_read(tmp_path, kind, number):
    def given(array):
        if kind == "backwards":
            return array[::-1]
        if kind == "read-only":
            array = array.copy()
            array.flags.writeable = False
            return array
        moved = np.ndarray(array.shape, array.dtype, np.zeros(array.nbytes + 1, np.uint8).data, 1)
        moved[...] = array
        return moved

    tables = {"a": init.Zeros(5_000, DIM)}
    rows, gradient = given(np.arange(number)), given(np.ones((number, DIM), np.float32))
    with DiskSparseRiemannianAdam(tables, lr=0.1, k=0.0, disk_dir=tmp_path / "state") as optimizer:
        optimizer.step({"a": (rows, gradient)})
        np.testing.assert_allclose(optimizer.read_rows(rows), -0.1, rtol=1e-5)
        optimizer.prefetch(rows)
    assert (gradient == 1.0).all()
