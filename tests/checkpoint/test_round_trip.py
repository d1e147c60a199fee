"""From a directory to memory, to S3 and back: training goes on as if nothing had happened."""

import fsspec
import numpy as np
import pytest

import dsa
from dsa import DiskSparseRiemannianAdam, init

ROWS, DIM = 4_000, 12


def make(path, **options):
    tables = {"ball": init.Normal(ROWS, DIM, 0.1, seed=2), "flat": np.ones((30, DIM), np.float32)}
    chosen = {"k": {"ball": 1.0, "flat": 0.0}, "lr": 0.05, "allocate": "sparse", **options}
    return DiskSparseRiemannianAdam(tables, disk_dir=path, **chosen)


def train(optimizer, first, last):
    for step in range(first, last):
        generator = np.random.default_rng(step)
        grad = generator.standard_normal((25, DIM)).astype(np.float32)
        optimizer.step(
            {"ball": (generator.integers(0, ROWS, 25), grad), "flat": (generator.integers(0, 30, 25), grad)}
        )


def records(optimizer):
    tables = optimizer._state.tables.items()
    return {name: table.backend.read(np.arange(len(table))).tobytes() for name, table in tables}


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_local_memory_s3_local(tmp_path, s3, compression, backend):
    bucket = f"s3://round-trip-{compression}-{backend}".lower()
    fsspec.filesystem("s3", **s3).mkdir(bucket)
    with make(tmp_path / "one", backend=backend) as optimizer:
        train(optimizer, 0, 12)
        local = optimizer.export_checkpoint(tmp_path / "k", compression=compression)
        train(optimizer, 12, 24)
        expected = records(optimizer)
    memory = dsa.copy_checkpoint(local, f"memory://round-trip/{compression}-{backend}")
    remote = dsa.copy_checkpoint(memory, f"{bucket}/k", target_storage_options=s3)
    back = dsa.copy_checkpoint(remote, tmp_path / "back", storage_options=s3, target_storage_options={})
    roots = {dsa.open_checkpoint(place).content_root for place in (local, memory, back)}
    assert roots == {dsa.open_checkpoint(remote, storage_options=s3).content_root}
    with make(tmp_path / "two") as other:
        other.import_checkpoint(back)
        train(other, 12, 24)
        assert records(other) == expected
    with make(tmp_path / "three") as third:
        third.import_checkpoint(remote, storage_options=s3)
        train(third, 12, 24)
        assert records(third) == expected
