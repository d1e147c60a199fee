"""The memory backend keeps the contract; it is the model that the others are compared with."""

import numpy as np

from dsa.backends.memory import MemoryBackend
from dsa.schema import adam_schema
from dsa.testing import BackendConformance


class TestMemoryBackend(BackendConformance):
    def create(self, path, rows, schema):
        return MemoryBackend(rows, schema)


def test_fields_land_where_their_names_say():
    """A check by hand, independent of the suite's own comparison."""
    backend = MemoryBackend(3, adam_schema(2))
    records = backend.read(np.array([1]))
    records["w"], records["m"], records["v"], records["t"], records["s"] = [1, 2], [3, 4], [5, 6], 7, 8
    backend.write(np.array([1]), records)
    words = backend.read(np.array([0, 1, 2])).view(np.uint8).reshape(3, 32)
    assert words[1, :24].view("<f4").tolist() == [1, 2, 3, 4, 5, 6]
    assert words[1, 24:].view("<i4").tolist() == [7, 8]
    assert not words[[0, 2]].any()
