"""The tables of an open state as they were after one whole step, read while training goes on.

A snapshot is taken in no time: it remembers where the state stands. It is then read block by block; a row
that a later step changes before its block was read is copied aside first. Training waits only while a block
of a few megabytes is being read, or, once the rows set aside fill their budget, until the reader has caught
up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Final, Self, final

import numpy as np

from dsa.backends.overlay import lay_over
from dsa.errors import StateClosedError
from dsa.kernels.row_index import RowIndex
from dsa.schema import Records, Rows, Schema, with_dtypes
from dsa.state.content import StateContent, TableContent, recast
from dsa.state.state_directory import StateDirectory
from dsa.state.table import Table, fill_untouched

__all__ = ["Snapshot"]

_HELD_BYTES: Final = 256 << 20
_PARTS: Final = 32
_SAMPLED_ROWS: Final = 1024


@final
class _Part:
    """Rows of a range that were copied before they changed."""

    def __init__(self) -> None:
        self._index = RowIndex()
        self._batches: list[Records] = []
        self._firsts: list[int] = []
        self._count = 0
        self.held_bytes = 0

    def missing(self, rows: Rows) -> Rows:
        """Return those of `rows` that are not kept yet."""
        return rows[self._index.get(rows) < 0]

    def keep(self, rows: Rows, records: Records) -> None:
        """Keep records of rows that were missing."""
        self._index.put(rows, self._count)
        self._firsts.append(self._count)
        self._batches.append(records)
        self._count += len(rows)
        self.held_bytes += records.nbytes

    def lay_over(self, first: int, records: Records) -> None:
        """Replace, in a block that was read from the table, the rows that were kept."""
        found = self._index.get(np.arange(first, first + len(records)))
        lay_over(records, found, self._firsts, self._batches)


@final
class _Aside:
    """What was copied of one table, in parts that are dropped as the reader passes them."""

    def __init__(self, rows: int) -> None:
        self.cursor = 0
        self.started = False
        self._rows = rows
        self._part_rows = -(-rows // _PARTS)
        self._parts: dict[int, _Part] = {}

    def is_read(self, rows: Rows) -> bool:
        """Tell whether all of these rows were read."""
        return len(rows) == 0 or int(rows[-1]) < self.cursor

    def split(self, rows: Rows) -> Iterator[tuple[_Part, Rows]]:
        """Yield the rows that are not read yet, by the parts they belong to."""
        ahead = rows[np.searchsorted(rows, self.cursor) :]
        numbers = ahead // self._part_rows
        for number in np.unique(numbers).tolist():
            low, high = np.searchsorted(numbers, [number, number + 1])
            yield self._parts.setdefault(number, _Part()), ahead[low:high]

    def pass_block(self, first: int, records: Records) -> int:
        """Restore a block that was read from the table; return the bytes that are not needed any more."""
        self.cursor = first + len(records)
        for number in range(first // self._part_rows, (self.cursor - 1) // self._part_rows + 1):
            if number in self._parts:
                self._parts[number].lay_over(first, records)
        passed = [
            number for number in self._parts if min((number + 1) * self._part_rows, self._rows) <= self.cursor
        ]
        return sum(self._parts.pop(number).held_bytes for number in passed)


@final
class Snapshot:
    """What a state holds at the moment when this is made, to be read once.

    The state is to be held (`StateDirectory.exclusive`), with nothing pending, while the snapshot is made; it
    may be read and closed by any thread.

    Args:
        state: The state.
        held_bytes: How much memory the rows set aside may take before training waits.
    """

    def __init__(self, state: StateDirectory, held_bytes: int = _HELD_BYTES) -> None:
        self._state = state
        self._budget = held_bytes
        self._held = 0
        self._closed = self._entered = False
        self._gone = ""
        self._let_go: list[Callable[[], None]] = []
        self.replacements = state.replacements
        # Taken by with statements only: a signal can't be handled between that and the block.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # Copies: what a table's curvature and rule are may change while it is read.
        self._tables = [replace(table) for table in state.tables.values()]
        self._aside = {table.name: _Aside(len(table)) for table in self._tables}
        self.waits = 0
        self.content = StateContent(
            tuple(self._describe(table) for table in self._tables),
            state.global_step,
            state.exports,
            state.identity,
        )
        state.observers.append(self)

    def before_write(self, table: Table, rows: Rows) -> None:
        """Copy the rows that are not read yet, before they change."""
        frozen = self._frozen(table)
        if frozen is None:
            return  # made after the snapshot
        rows = rows[: np.searchsorted(rows, len(frozen))]  # it may have grown since
        with self._lock:
            if self._closed or self._aside[table.name].is_read(rows):
                return
            if self._held >= self._budget and not self._entered:
                self._give_up("nobody came to read it")  # whoever made it was interrupted
            if self._held >= self._budget:
                self.waits += 1
                self._changed.wait_for(lambda: self._held < self._budget or self._closed)
            for part, some in self._aside[table.name].split(rows):
                missing = part.missing(some)
                if len(missing):
                    records = _joined(frozen, missing, frozen.backend.read(missing))
                    part.keep(missing, records)
                    self._held += records.nbytes

    def takes_over(self, table: Table, let_go: Callable[[], None]) -> bool:
        """Keep the files of a table that is being replaced until they are read."""
        with self._lock:
            if self._closed or self._frozen(table) is None:
                return False
            if table.held is not None:
                self._give_up("an import has replaced the state meanwhile")  # its weights in memory, too
                return False
            self._let_go.append(let_go)
            return True

    def before_close(self) -> None:
        """End the reading: the tables go."""
        with self._lock:
            self._give_up("the state was closed meanwhile")

    def close(self) -> None:
        """Let training go on unobserved; closing twice is silent."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            while self._let_go:
                self._let_go.pop()()
        if self in self._state.observers:
            self._state.observers.remove(self)

    def _frozen(self, table: Table) -> Table | None:
        """Return the table that the snapshot reads, if it is this one and was not replaced since."""
        return next((each for each in self._tables if each.backend is table.backend), None)

    def __enter__(self) -> Self:
        self._entered = True
        return self

    def _give_up(self, reason: str) -> None:
        self._gone = reason
        self.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _describe(self, table: Table) -> TableContent:
        held = table.held is not None
        return TableContent(
            replace(table.facts, schema=_with_weights(table)) if held else table.facts,
            lambda: self._blocks(table),
            table.facts.schema if held else None,
            lambda: _touched_share(table),
            None if table.keys is None else len(table.keys),
        )

    def _blocks(self, table: Table) -> Iterator[tuple[int, Records]]:
        aside = self._aside[table.name]
        if aside.started:
            raise RuntimeError(f"the snapshot of table {table.name!r} was read already: take another one")
        aside.started = True
        blocks = table.backend.scan(0, len(table))
        while True:
            with self._lock:
                if self._gone:
                    raise StateClosedError(
                        f"the snapshot of table {table.name!r} can't be read on ({self._gone}): export again"
                    )
                block = next(blocks, None)
                if block is None:
                    return
                first, raw = block
                records = _joined(table, np.arange(first, first + len(raw)), raw)
                self._held -= aside.pass_block(first, records)
                self._changed.notify_all()
            yield first, records


def _touched_share(table: Table) -> float:
    rows = np.unique(np.linspace(0, len(table) - 1, _SAMPLED_ROWS).astype(np.int64))
    return float(np.mean(table.backend.read(rows)["s"] != 0))


def _joined(table: Table, rows: Rows, records: Records) -> Records:
    """Return records with their weights, wherever these are."""
    if table.held is None:
        return fill_untouched(table, rows, records)
    whole = recast(records, _with_weights(table))
    whole["w"] = table.held.take(rows)
    return whole


def _with_weights(table: Table) -> Schema:
    """Return the schema of a table's records with the weights in front."""
    stored = {field.name: field.dtype for field in table.backend.schema.fields}
    return with_dtypes(table.rule.schema(table.dim), stored)
