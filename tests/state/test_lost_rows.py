"""A row of zeros in a table whose rows were all written is no weight, wherever it is read."""

import numpy as np
import pytest
import torch
from current_files import table_file

import dsa
from dsa.errors import CorruptRowError


@pytest.fixture
def path(tmp_path):
    """A table made from an array, in which row 5 was replaced by zeros, as a lost page would."""
    weights = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
    with dsa.DiskSparseRiemannianAdam({"a": weights}, k=0.0, disk_dir=tmp_path) as optimizer:
        optimizer.step({"a": ([1, 2], np.ones((2, 4), np.float32))})
        stride = optimizer._state.tables["a"].backend.describe()["stride"]
    file = table_file(tmp_path, "a")
    raw = bytearray(file.read_bytes())
    raw[4096 + 5 * stride : 4096 + 6 * stride] = bytes(stride)
    file.write_bytes(raw)
    return tmp_path


def test_reading_and_stepping_refuse_it(path):
    tables = {"a": dsa.init.Zeros(40, 4)}
    with dsa.DiskSparseRiemannianAdam(tables, k=0.0, disk_dir=path, resume=True) as optimizer:
        assert optimizer.read_rows([4, 6]).abs().min() > 0.0
        with pytest.raises(CorruptRowError, match="row 5 of table 'a'"):
            optimizer.read_rows([4, 5])
        with pytest.raises(CorruptRowError, match="row 5 of table 'a'"):
            optimizer.step({"a": ([5], np.ones((1, 4), np.float32))})
        assert optimizer.global_step == 1


def test_a_module_refuses_it(path):
    layer = dsa.DiskEmbedding(40, 4, state_dir=path, name="a", resume=True)
    with pytest.raises(CorruptRowError, match="row 5 of table 'a'"):
        layer(torch.tensor([5]))
    layer.close()
