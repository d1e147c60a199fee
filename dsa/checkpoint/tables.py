"""Writing one table: a group with an array for each field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, final

import numpy as np

from dsa.backends.shards.documents import DOCUMENT, Compression, encode_document, group_document
from dsa.backends.shards.layout import ArraySpec, plan_layout
from dsa.checkpoint.arrays import ArrayWriter
from dsa.checkpoint.digests import DEFAULT_ALGORITHM
from dsa.checkpoint.manifest import ArrayEntry, TableEntry, array_specs
from dsa.checkpoint.meter import Advance
from dsa.checkpoint.pipeline import ArrayPipeline
from dsa.checkpoint.targets import Target
from dsa.schema import Records
from dsa.state.content import TableContent

__all__ = ["CompressionChoice", "TableWriter", "WrittenTable"]

CompressionChoice = Literal["zstd", "auto"] | None
"""``"auto"`` compresses the fields of tables of which few rows were ever written, but not their weights."""

_WEIGHTS: Final = "w"
_STAMP: Final = "s"
_SPARSE: Final = 0.5


@final
@dataclass(frozen=True, slots=True)
class WrittenTable:
    """A table that is written.

    Args:
        entry: What its group's attributes say.
        arrays: What its arrays' attributes say, by path in the checkpoint.
        documents: The documents of the group and of its arrays, by path in the checkpoint.
    """

    entry: TableEntry
    arrays: Mapping[str, ArrayEntry]
    documents: Mapping[str, dict[str, Any]]


@final
@dataclass(frozen=True, slots=True)
class TableWriter:
    """How tables are written.

    Args:
        target: Where to.
        compression: See `CompressionChoice`.
        algorithm: See `dsa.checkpoint.digests`.
        advance: Is told of the bytes of content that were handed over.
    """

    target: Target
    compression: CompressionChoice = None
    algorithm: str = DEFAULT_ALGORITHM
    advance: Advance = field(default=lambda size: None)

    def write(self, table: TableContent, group: str) -> WrittenTable:
        """Write a table.

        Args:
            table: Its content; its blocks must not be changed after they were yielded.
            group: The name of its group.

        Raises:
            ValueError: its blocks don't cover its rows once each, in order, or aren't of its schema.
            OSError: the target refuses.
        """
        specs = array_specs(table.schema, table.rows)
        sparse = self.compression == "auto" and _is_sparse(table)
        writers = [self._array(group, spec, sparse) for spec in specs]
        touched = 0
        with ArrayPipeline(writers) as pipeline:
            for records in _checked_blocks(table):
                touched += _touched(records)
                pipeline.add([records[spec.name] for spec in specs])
                self.advance(sum(spec.row_bytes for spec in specs) * len(records))
            pipeline.finish()
            finished = {writer.path: writer.finish() for writer in writers}
        entry = TableEntry(
            table.facts, group, table.stored, touched if _STAMP in table.schema.names else None
        )
        document = group_document(entry.to_json())
        self.target.put(f"{group}/{DOCUMENT}", encode_document(document))
        return WrittenTable(
            entry,
            {path: array for path, (array, _) in finished.items()},
            {group: document, **{path: document for path, (_, document) in finished.items()}},
        )

    def _array(self, group: str, spec: ArraySpec, sparse: bool) -> ArrayWriter:
        compression: Compression = "zstd" if self.compression == "zstd" else None
        if sparse and spec.name != _WEIGHTS:
            compression = "zstd"
        return ArrayWriter(
            self.target, f"{group}/{spec.name}", plan_layout(spec), compression, self.algorithm
        )


def _checked_blocks(table: TableContent) -> Iterator[Records]:
    row = 0
    for first, records in table.blocks():
        if first != row or row + len(records) > table.rows:
            raise ValueError(
                f"the table {table.name!r} of {table.rows} rows yields rows {first} to "
                f"{first + len(records)} after row {row}: yield every row once, in order"
            )
        if records.dtype != table.schema.dtype:
            raise ValueError(
                f"the table {table.name!r} yields records of {records.dtype}, not of its schema "
                f"{table.schema.dtype}: convert them"
            )
        row += len(records)
        yield records
    if row != table.rows:
        raise ValueError(f"the table {table.name!r} yields {row} of its {table.rows} rows: yield all of them")


def _touched(records: Records) -> int:
    names: Sequence[str] = records.dtype.names or ()
    return int(np.count_nonzero(records[_STAMP] > 0)) if _STAMP in names else 0


def _is_sparse(table: TableContent) -> bool:
    """Tell whether less than half of the rows were ever written; stops reading as soon as that is known."""
    if _STAMP not in table.schema.names:
        return False
    if table.touched_share is not None:
        return table.touched_share() < _SPARSE
    touched = 0
    for first, records in table.blocks():
        touched += _touched(records)
        untouched = first + len(records) - touched
        if touched >= _SPARSE * table.rows or untouched > _SPARSE * table.rows:
            break
    return touched < _SPARSE * table.rows
