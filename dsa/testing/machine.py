"""Random operations on a backend, compared with `MemoryBackend` after each."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dsa.backends.base import StateBackend
from dsa.backends.memory import MemoryBackend
from dsa.schema import Field, Rows, Schema, adam_schema
from dsa.testing.hooks import BackendHooks, through_json
from dsa.testing.records import MIXED, assert_records_equal, random_records

__all__ = ["BackendMachine"]

_SCHEMAS = (
    adam_schema(1),
    adam_schema(13),
    adam_schema(128),
    adam_schema(3, second_moment_per="row"),
    Schema(2, (Field("w", "float32", "element"),)),
    MIXED,
)
_MOST_ROWS = 200
_seeds = st.integers(0, 2**32 - 1)


class BackendMachine(RuleBasedStateMachine):
    """A Hypothesis state machine over one backend.

    The rules read, write, reserve, scan (with writes between its blocks), hint, flush and reopen; after each
    the whole content equals the model's. A backend that keeps nothing after `close` starts again from zero.

    Example:
        >>> class Memory(BackendHooks):
        ...     def create(self, path, rows, schema):
        ...         return MemoryBackend(rows, schema)
        >>> TestMemoryMachine = BackendMachine.over(Memory()).TestCase
    """

    hooks: ClassVar[BackendHooks]

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.tables = 0
        self.backend: StateBackend | None = None

    @classmethod
    def over(cls, hooks: BackendHooks) -> type[BackendMachine]:
        """Return the machine for the backend that `hooks` make; its `TestCase` is what pytest collects."""
        return type(f"{type(hooks).__name__}Machine", (cls,), {"hooks": hooks})

    def teardown(self) -> None:
        """Close the backend and remove its files."""
        with self.directory:
            if self.backend is not None:
                self.backend.close()

    @initialize(rows=st.integers(1, _MOST_ROWS), schema=st.sampled_from(_SCHEMAS))
    def create(self, rows: int, schema: Schema) -> None:
        """Make the table and its model."""
        self.tables += 1
        self.path = Path(self.directory.name) / f"table-{self.tables}"
        self.backend = self.hooks.create(self.path, rows, schema)
        self.model = MemoryBackend(rows, schema)
        self.description = through_json(self.backend.describe())

    @rule(data=st.data(), seed=_seeds)
    def write(self, data: st.DataObject, seed: int) -> None:
        """Replace some rows."""
        rows = self._draw_rows(data)
        records = random_records(self.model.schema, len(rows), seed)
        self.model.write(rows, records)
        self._live.write(rows, records)

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """Read some rows, compare, and spoil the copy."""
        rows = self._draw_rows(data)
        records = self._live.read(rows)
        assert_records_equal(records, self.model.read(rows), "the rows read")
        records.view(np.uint8)[...] = 0xFF

    @rule(data=st.data())
    def hint(self, data: st.DataObject) -> None:
        """Announce some rows."""
        self._live.hint(self._draw_rows(data))

    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        """Make sure that some rows can be written."""
        self._live.reserve(self._draw_rows(data))

    @rule(data=st.data(), seed=_seeds)
    def scan(self, data: st.DataObject, seed: int) -> None:
        """Scan a range, writing before and after its first block: each shows what its rows hold then."""
        row = st.integers(0, len(self.model))
        start, stop = sorted(data.draw(st.tuples(row, row), "range"))
        blocks = self._live.scan(start, stop)
        self.write(data, seed)
        done = start
        for first, records in blocks:
            assert first == done
            done += len(records)
            assert_records_equal(records, self.model.read(np.arange(first, done)), "a block of a scan")
            if first == start:
                self.write(data, seed + 1)
        assert done == stop

    @rule()
    def flush(self) -> None:
        """Flush, then look behind the backend where the hooks allow it."""
        self._live.flush()
        self._check_raw()

    @rule()
    def reopen(self) -> None:
        """Close, twice, and open again."""
        self._live.close()
        self._live.close()
        self._check_raw()
        again = self.hooks.reopen(self.path, self.description)
        if again is None:
            self.create(len(self.model), self.model.schema)
        else:
            self.backend = again

    @invariant()
    def same_as_model(self) -> None:
        """Every record is the model's, and so is the description."""
        if self.backend is None:
            return
        everything = np.arange(len(self.model))
        assert len(self.backend) == len(self.model)
        assert_records_equal(self.backend.read(everything), self.model.read(everything), "all rows")
        assert through_json(self.backend.describe()) == self.description

    @property
    def _live(self) -> StateBackend:
        assert self.backend is not None
        return self.backend

    def _draw_rows(self, data: st.DataObject) -> Rows:
        rows = data.draw(st.sets(st.integers(0, len(self.model) - 1)), "rows")
        return np.array(sorted(rows), np.int64)

    def _check_raw(self) -> None:
        records = self.hooks.read_raw(self.path, self.description)
        if records is not None:
            assert_records_equal(records, self.model.read(np.arange(len(self.model))), "the files")
