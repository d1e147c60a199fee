"""A table that is made anew is laid out as it was asked for first, whoever makes it anew."""

import warnings

import numpy as np
import pytest

import dsa
import dsa.errors
import dsa.state.metadata
from dsa.backends import Memmap, Zarr

LAYOUTS = {
    "page": Memmap(stride="page"),
    "packed": Memmap(stride="packed"),
    "bytes": Memmap(stride=256),
    "shards": Zarr(shard_bytes=4096),
    "compressed": Zarr(compression="zstd", shard_bytes=4096),
}


def build(path, **options):
    tables = {"a": dsa.init.Uniform(500, 10, -0.01, 0.01, seed=1), "b": dsa.init.Zeros(60, 3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dsa.errors.StateWarning)
        return dsa.DiskSparseRiemannianAdam(tables, disk_dir=path, **options)


def layout_of(optimizer):
    tables = optimizer._state.tables.values()
    return [
        {name: value for name, value in table.backend.describe().items() if name != "id"} for table in tables
    ]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("change", ["curvature", "import", "repair"])
@pytest.mark.parametrize("named", [False, True], ids=["left out", "kind named"])
def test_layouts_survive_changes_of_whole_tables(tmp_path, layout, change, named):
    path = tmp_path / "state"
    with build(path, backend=layout) as optimizer:
        optimizer.step({"a": ([1, 2], np.ones((2, 10), np.float32))})
        optimizer.export_checkpoint(tmp_path / "checkpoint")
        wanted = layout_of(optimizer)
    # The layout left out, or as little of it said as there can be.
    options = {"backend": Zarr(compression=layout.compression) if layout.kind == "zarr" else "memmap"}
    again = {"resume": True, **(options if named else {})}
    optimizer = build(path, **again)
    if change == "curvature":
        optimizer.set_curvature(0.5)
    elif change == "import":
        optimizer.import_checkpoint(tmp_path / "checkpoint")
    else:
        optimizer._state.metadata.failed = "made up"
        optimizer._state.held.check()
        with pytest.raises(dsa.errors.StateFailedError):
            optimizer.close()
        stored = dsa.state.metadata.read_metadata(path)
        stored.failed = "made up"
        dsa.state.metadata.write_metadata(path, stored)
        dsa.repair(path)
        optimizer = build(path, **again)
    assert layout_of(optimizer) == wanted
    optimizer.close()
    build(path, resume=True, backend=layout).close()
