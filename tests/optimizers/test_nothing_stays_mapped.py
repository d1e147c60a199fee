"""After close nothing of a state is mapped, whatever error of a step somebody still holds (D40)."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dsa
from dsa.errors import CorruptRowError, GradientError


def mapped(directory):
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("the mappings of a process can't be told here")
    return [line for line in maps.read_text().splitlines() if str(directory) in line]


def failing_update(path):
    optimizer = dsa.DiskSparseRiemannianAdam({"a": dsa.init.Zeros(5_000, 8)}, k=0.0, disk_dir=path)
    rows = np.arange(3_000)
    optimizer.step({"a": (rows, np.ones((3_000, 8), np.float32))})
    with pytest.raises(GradientError) as caught:
        optimizer.step({"a": (rows, np.full((3_000, 8), 3e38, np.float32))})
    return optimizer, caught.value


def damaged_row(path):
    layer = dsa.DiskEmbedding(50, 4, state_dir=path)
    optimizer = dsa.DiskSparseAdam(layer.parameters(), lr=0.1)
    layer(torch.arange(50)).sum().backward()
    backend = layer.weight.table.backend
    records = backend.read(np.array([7]))
    records["v"] = -1.0
    backend.write(np.array([7]), records)
    with pytest.raises(CorruptRowError) as caught:
        optimizer.step()
    return optimizer, caught.value


@pytest.mark.parametrize("fail", [failing_update, damaged_row])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_kept_error_keeps_nothing_mapped(tmp_path, fail, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        optimizer, error = fail(tmp_path / "state")
        assert mapped(tmp_path / "state")
        optimizer.close()
        assert not mapped(tmp_path / "state")
        assert error.__traceback__ is not None, "the error is still held"
        # Of another error something may stand here for good: a tracer that raised inside a handler leaves it.
        assert sys.exc_info()[1] is not error, "the error isn't being handled any more"
    finally:
        torch.set_num_threads(before)
