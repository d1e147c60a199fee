"""Random operations on every backend, compared with the memory backend after each."""

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from zarr_tables import Compressed, Mapped

from dsa.backends.memmap import MemmapBackend, stored_bytes
from dsa.backends.memory import MemoryBackend
from dsa.schema import Schema
from dsa.testing import BackendHooks, BackendMachine


class Memory(BackendHooks):
    def create(self, path, rows, schema):
        return MemoryBackend(rows, schema)


class Memmap(BackendHooks):
    """With the given stride beyond the record's own bytes and its checksum."""

    def __init__(self, padding):
        self.padding = padding

    def create(self, path, rows, schema):
        stride = stored_bytes(schema) + self.padding
        return MemmapBackend.create(path, rows, schema, stride=stride, allocate="sparse")

    def reopen(self, path, description):
        return MemmapBackend.open(path, description)

    def read_raw(self, path, description):
        schema = Schema.from_json(description["schema"])
        content = np.fromfile(path, np.uint8)[4096:].reshape(description["rows"], description["stride"])
        return content[:, : schema.dtype.itemsize].copy().view(schema.dtype).reshape(-1)


def on_disk(hooks):
    """Return the machine's test with a third of the profile's examples: each waits for the disk often."""
    case = BackendMachine.over(hooks).TestCase
    case.settings = settings(case.settings, max_examples=case.settings.max_examples // 3)
    return case


TestMemoryMachine = BackendMachine.over(Memory()).TestCase
TestMemmapMachine = on_disk(Memmap(padding=0))
TestMemmapOddStrideMachine = on_disk(Memmap(padding=4))
TestZarrMachine = on_disk(Mapped())
TestZarrSmallShardsMachine = on_disk(Mapped(shard_bytes=1 << 10))
TestCompressedMachine = on_disk(Compressed(shard_bytes=1 << 13))
TestCompressedSmallCacheMachine = on_disk(Compressed(shard_bytes=1 << 13, cache_bytes=1))


class _Delegating:
    """A memory backend with one fault, which a subclass adds."""

    def __init__(self, rows, schema):
        self.inner = MemoryBackend(rows, schema)

    def __len__(self):
        return len(self.inner)

    def __getattr__(self, name):
        return getattr(self.inner, name)


class LosesWritesAfterFlush(_Delegating):
    flushed = False

    def flush(self):
        self.flushed = True

    def write(self, rows, records):
        if not (self.flushed and len(rows) > 1):
            self.inner.write(rows, records)


class ScansASnapshot(_Delegating):
    def scan(self, start, stop):
        snapshot = self.inner.read(np.arange(start, stop))
        yield from ((start + i, snapshot[i : i + 1]) for i in range(len(snapshot)))


@pytest.mark.parametrize("faulty", [LosesWritesAfterFlush, ScansASnapshot])
def test_the_machine_finds_a_fault(faulty):
    class Hooks(BackendHooks):
        def create(self, path, rows, schema):
            return faulty(rows, schema)

    with pytest.raises(AssertionError, match="field"):
        run_state_machine_as_test(
            BackendMachine.over(Hooks()),
            settings=settings(derandomize=True, deadline=None, phases=[Phase.generate]),
        )
