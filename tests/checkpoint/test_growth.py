"""Checkpoints of tables that grow: full ones, differential ones on fewer rows, and importing them."""

import json

import numpy as np
import pytest

import dsa
from dsa import DiskSparseRiemannianAdam, init
from dsa.backends import Zarr
from dsa.errors import CheckpointCorruptError, StateMismatchError

BACKENDS = ["memmap", "zarr", Zarr(compression="zstd")]


def build(path, rows, resume=None, **options):
    tables = {"a": init.Normal(rows, 3, 0.1, seed=2), "b": init.Zeros(20, 3)}
    return DiskSparseRiemannianAdam(tables, lr=0.1, k=1.0, disk_dir=path, resume=resume, **options)


def train(optimizer, rows, steps):
    for step in steps:
        rng = np.random.default_rng(step)
        rows_of = {"a": rows, "b": 20}
        optimizer.step(
            {
                name: (rng.integers(0, count, 9), rng.standard_normal((9, 3)).astype(np.float32))
                for name, count in rows_of.items()
            }
        )


@pytest.fixture(params=BACKENDS, ids=["memmap", "zarr", "zstd"])
def run(request, tmp_path):
    """A state of 50 rows with a full checkpoint, grown to 200 with a full and a differential one."""
    with build(tmp_path / "state", 50, backend=request.param) as optimizer:
        train(optimizer, 50, range(3))
        optimizer.export_checkpoint(tmp_path / "before")
        optimizer.grow("a", 200)
        train(optimizer, 120, range(3, 5))
        optimizer.export_checkpoint(tmp_path / "delta", base=tmp_path / "before")
        optimizer.export_checkpoint(tmp_path / "after")
    return tmp_path


def test_what_was_exported_after_a_growth_is_as_ever(run):
    with build(run / "whole", 200) as optimizer:
        train(optimizer, 50, range(3))
        train(optimizer, 120, range(3, 5))
        optimizer.export_checkpoint(run / "expected")
    assert dsa.diff(run / "expected", run / "after").same
    dsa.flatten_checkpoint(run / "delta", run / "flat")
    assert dsa.diff(run / "expected", run / "flat").same
    assert dsa.verify(run / "delta").ok


def test_the_manifest_of_a_differential_one_tells_the_rows(run):
    link = dsa.open_checkpoint(run / "delta").manifest.base
    assert link["rows"] == [200, 20]


@pytest.mark.parametrize("which", ["after", "delta"])
@pytest.mark.parametrize("opened", [True, False])
def test_importing_grows_a_state_with_fewer_rows(run, which, opened):
    if opened:
        with build(run / "other", 50) as optimizer:
            train(optimizer, 50, range(20, 22))
            optimizer.import_checkpoint(run / which)
            assert optimizer.read_rows([199], "a").shape == (1, 3)
            train(optimizer, 200, range(5, 7))
    else:
        dsa.import_checkpoint(run / which, run / "other")
        with build(run / "other", 200, True) as optimizer:
            train(optimizer, 200, range(5, 7))
    with build(run / "state", 200, True) as optimizer:
        train(optimizer, 200, range(5, 7))
    assert dsa.diff(run / "state", run / "other").same


def test_importing_fewer_rows_is_refused(run):
    with build(run / "state", 200, True) as optimizer:
        with pytest.raises(StateMismatchError, match=r"has 50 rows in the checkpoint but 200 here"):
            optimizer.import_checkpoint(run / "before")
        assert optimizer.global_step == 5


def test_a_module_follows_an_import(tmp_path):
    import torch

    donor = dsa.DiskEmbedding(30, 3, init=init.Zeros(30, 3), state_dir=tmp_path / "donor")
    donor.export_checkpoint(tmp_path / "checkpoint")
    donor.close()
    module = dsa.DiskEmbedding(10, 3, init=init.Zeros(10, 3), state_dir=tmp_path / "state")
    module.import_checkpoint(tmp_path / "checkpoint")
    assert module.num_embeddings == 30
    assert module(torch.tensor([29])).shape == (1, 3)
    assert module.weight.shape == (30, 3)
    module.close()


def test_differences_in_rows_are_told(run):
    found = dsa.diff(run / "before", run / "after")
    assert not found.same
    assert "50" in str(found)
    assert "200" in str(found)


def test_a_differential_one_that_lacks_new_rows_is_damaged(run):
    """Whoever wrote it, the rows that the base doesn't have are all there."""
    path = run / "delta" / "zarr.json"
    document = json.loads(path.read_text())
    for rows in ([300, 20], [200], [-1, 20], None, ["200", 20]):
        link = document["attributes"]["dsa"]["base"]
        changed = (
            {**link, "rows": rows} if rows is not None else {k: v for k, v in link.items() if k != "rows"}
        )
        attributes = {**document["attributes"], "dsa": {**document["attributes"]["dsa"], "base": changed}}
        path.write_text(json.dumps({**document, "attributes": attributes}))
        with pytest.raises(CheckpointCorruptError):
            dsa.import_checkpoint(run / "delta", run / "other")
