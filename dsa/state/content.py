"""What a state holds, wherever it is: in an open directory, a checkpoint, or a directory of an older release.

Exporting, importing and migrating are the same copy between such contents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import final

import numpy as np

from dsa.rules.updates import AnyRule
from dsa.schema import Records, Schema, copy_field
from dsa.state.facts import TableFacts

__all__ = ["Blocks", "StateContent", "TableContent", "recast"]

Blocks = Callable[[], Iterator[tuple[int, Records]]]
"""Starts a pass over a table: consecutive blocks ``(first row, records)`` that cover every row once.

The blocks are in order. A record that was never written has its first weight and stamp 0.
"""


@final
@dataclass(frozen=True, slots=True)
class TableContent:
    """A table as it is copied from one place to another.

    Args:
        facts: What it is. Its schema is that of what `blocks` yields; with `w` wherever the weights are to be
            had.
        blocks: See `Blocks`.
        stored: The schema of a record on disk, when that is another: without `w`, for a table whose weights
            are a parameter in memory.
        touched_share: Estimates the share of the rows that were ever written, without a pass over them; None
            where a pass is as good.
        live: How many rows belong to an id; None where that is not known without a pass, or none can.
    """

    facts: TableFacts
    blocks: Blocks
    stored: Schema | None = None
    touched_share: Callable[[], float] | None = None
    live: int | None = None

    @property
    def name(self) -> str:
        """The user's name for it."""
        return self.facts.name

    @property
    def rows(self) -> int:
        """N."""
        return self.facts.rows

    @property
    def schema(self) -> Schema:
        """The layout of the records that `blocks` yields."""
        return self.facts.schema

    @property
    def rule(self) -> AnyRule:
        """The update rule whose fields the records hold."""
        return self.facts.rule

    @property
    def k(self) -> float:
        """Curvature magnitude."""
        return self.facts.k


@final
@dataclass(frozen=True, slots=True)
class StateContent:
    """Tables that belong together.

    Args:
        tables: In the state's order.
        global_step: Steps that the state has taken.
        exports: Checkpoints of this very history: content root and the step each was made at. Rows with a
            stamp above that step may have changed since.
        identity: The random name of the state, by which a state dict refers to it.
    """

    tables: tuple[TableContent, ...]
    global_step: int = 0
    exports: dict[str, int] = field(default_factory=dict)
    identity: str = ""


def recast(records: Records, schema: Schema) -> Records:
    """Return new records of a schema, with what others say of its fields; zero in those that they lack.

    Args:
        records: ``(B,)``. A field of another dtype is converted, see `dsa.schema.store_numbers`.
        schema: The schema.

    Example:
        >>> from dsa.schema import Field, adam_schema
        >>> weights = Schema(1, (Field("w", "float32", "element"),))
        >>> recast(np.ones(1, adam_schema(1).dtype), weights)["w"].tolist()
        [[1.0]]
    """
    made = np.zeros(len(records), schema.dtype)
    for name in schema.names:
        if name in (records.dtype.names or ()):
            copy_field(records, name, made)
    return made
