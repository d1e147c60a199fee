"""Weights alone: what the serving side's own libraries read equals what training reads."""

import errno
import os

import numpy as np
import pytest
import torch
import zarr
from safetensors import safe_open
from safetensors.numpy import load_file

import dsa
from dsa import DiskSparseAdam, DiskSparseRiemannianAdam, init
from dsa.checkpoint import weights as module
from dsa.errors import CheckpointExistsError, CheckpointMismatchError, CheckpointWriteError, DiskSpaceError

ROWS = {"entity": 3_000, "a/b": 7}


@pytest.fixture
def optimizer(tmp_path):
    tables = {"entity": init.Normal(3_000, 8, 0.1, seed=1), "a/b": np.ones((7, 3), np.float32)}
    with DiskSparseRiemannianAdam(tables, k=0.0, lr=0.1, disk_dir=tmp_path / "s") as opened:
        opened.step(
            {"entity": ([3, 5], np.ones((2, 8), np.float32)), "a/b": ([0], np.ones((1, 3), np.float32))}
        )
        yield opened


def expected(optimizer):
    return {name: optimizer.read_rows(np.arange(rows), name).numpy() for name, rows in ROWS.items()}


@pytest.mark.parametrize("place", ["{tmp}/deep/w.safetensors", "memory://weights/w.safetensors"])
def test_safetensors(optimizer, tmp_path, place):
    url = optimizer.export_weights(place.format(tmp=tmp_path))
    if url.startswith("memory"):
        import fsspec

        (tmp_path / "w.safetensors").write_bytes(fsspec.filesystem("memory").cat(url))
        url = tmp_path / "w.safetensors"
    found = load_file(url)
    wanted = expected(optimizer)
    assert len(found) == 2
    np.testing.assert_array_equal(found["entity"], wanted["entity"])
    (other,) = (value for name, value in found.items() if name != "entity")
    np.testing.assert_array_equal(other, wanted["a/b"])
    with safe_open(url, "pt") as file:
        assert file.metadata()["global_step"] == "1"
        assert file.get_slice("entity")[10:12].shape == (2, 8)


def test_zarr(optimizer, tmp_path):
    url = optimizer.export_weights(tmp_path / "w")
    group = zarr.open_group(url, mode="r")
    assert sorted(group["entity"].array_keys()) == ["w"]
    np.testing.assert_array_equal(group["entity"]["w"][:], expected(optimizer)["entity"])
    checkpoint = dsa.open_checkpoint(url)
    checkpoint.verify()
    assert checkpoint.kind == "weights"
    with pytest.raises(CheckpointMismatchError, match="only holds weights"):
        optimizer.import_checkpoint(url)


@pytest.mark.parametrize("name", ["w", "w.safetensors"])
def test_nothing_is_replaced_unasked(optimizer, tmp_path, name):
    optimizer.export_weights(tmp_path / name)
    with pytest.raises(CheckpointExistsError, match="overwrite"):
        optimizer.export_weights(tmp_path / name)
    optimizer.export_weights(tmp_path / name, overwrite=True)


def test_a_directory_is_not_replaced_by_a_file(optimizer, tmp_path):
    (tmp_path / "w.safetensors").mkdir()
    with pytest.raises(CheckpointExistsError, match="is a directory"):
        optimizer.export_weights(tmp_path / "w.safetensors", overwrite=True)


def test_a_disk_that_is_or_becomes_full(optimizer, tmp_path, monkeypatch):
    path = tmp_path / "out" / "w.safetensors"
    optimizer.export_weights(path)
    before = path.read_bytes()
    monkeypatch.setattr(module, "available_bytes", lambda directory: 1_000)
    with pytest.raises(DiskSpaceError):
        optimizer.export_weights(path, overwrite=True)
    monkeypatch.undo()

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "_write", full)
    with pytest.raises(CheckpointWriteError, match=r"w.safetensors.*No space left.*free space"):
        optimizer.export_weights(path, overwrite=True)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["w.safetensors"]


def test_weights_of_a_module(tmp_path):
    embedding = torch.nn.Embedding(20, 2, sparse=True)
    with DiskSparseAdam(embedding.parameters(), lr=0.1, state_dir=tmp_path / "s") as optimizer:
        optimizer.export_weights(tmp_path / "w.safetensors")
    np.testing.assert_array_equal(load_file(tmp_path / "w.safetensors")["param_0"], embedding.weight.detach())


def test_a_failed_upload_leaves_what_was_there(optimizer, s3, monkeypatch):
    import fsspec

    fsspec.filesystem("s3", **s3).mkdir("weights-bucket")
    url = "s3://weights-bucket/w.safetensors"
    optimizer.export_weights(url, storage_options=s3)
    before = fsspec.filesystem("s3", **s3).cat(url)

    def half(file, *arguments):
        file.write(before[: len(before) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_write", half)
    for each in (url, "s3://weights-bucket/new.safetensors"):
        with pytest.raises(KeyboardInterrupt):
            optimizer.export_weights(each, overwrite=True, storage_options=s3)
    assert fsspec.filesystem("s3", **s3).cat(url) == before
    assert fsspec.filesystem("s3", **s3).ls("weights-bucket", detail=False) == [
        "weights-bucket/w.safetensors"
    ]
