"""Weights of one table as a Parquet file: the columns ``id`` and ``w``, row group by row group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from dsa.checkpoint.meter import Advance
from dsa.schema import read_numbers
from dsa.state.content import TableContent

__all__ = ["write_parquet"]

_GROUP_BYTES: Final = 16 << 20

_Rows = tuple[NDArray[np.int64], NDArray[np.float32]]


def write_parquet(table: TableContent, file: BinaryIO, *, advance: Advance) -> None:
    """Write a table to an open file; some 40 MB of memory are used, whatever its size.

    Args:
        table: With the field ``w``, and ``id`` or none; ids are the rows' numbers then.
        file: Written from where it stands.
        advance: Is told of the bytes of content that were written.

    Raises:
        ImportError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            f"table {table.name!r} can't be written as Parquet without pyarrow: pip install pyarrow"
        ) from error
    dim = table.schema.dim
    schema = pyarrow.schema(
        [("id", pyarrow.int64()), ("w", pyarrow.list_(pyarrow.float32(), dim))],
        metadata={"table": table.name.encode("utf-8", "surrogatepass")},
    )
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for ids, weights in _gathered(table):
            flat = pyarrow.array(weights.reshape(-1))
            columns = [pyarrow.array(ids), pyarrow.FixedSizeListArray.from_arrays(flat, dim)]
            writer.write_table(pyarrow.table(columns, schema=schema))
            advance(len(ids) * sum(table.schema.field_bytes(field) for field in table.schema.fields))


def _gathered(table: TableContent) -> Iterator[_Rows]:
    """Yield ids and weights ``(B, D)`` in blocks that are worth a row group."""
    waiting: list[_Rows] = []
    held = 0
    for first, records in table.blocks():
        ids = records["id"] if "id" in table.schema.names else np.arange(first, first + len(records))
        waiting.append((np.ascontiguousarray(ids), np.ascontiguousarray(read_numbers(records, "w"))))
        held += sum(each.nbytes for each in waiting[-1])
        if held >= _GROUP_BYTES:
            yield _joined(waiting)
            waiting, held = [], 0
    if waiting:
        yield _joined(waiting)


def _joined(parts: list[_Rows]) -> _Rows:
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([weights for _, weights in parts])
