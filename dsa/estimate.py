"""How much disk a table takes, before it is made."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import final

from dsa.backends.memmap import Memmap, file_bytes
from dsa.conventions import AdamOptions, SecondMoment
from dsa.schema import adam_schema

__all__ = ["Estimate", "estimate"]


@final
@dataclass(frozen=True, slots=True)
class Estimate:
    """Disk that one table occupies, in bytes.

    Args:
        fields: Bytes of each field: w, m, v, t and the stamp s.
        logical: w + m + v + t, what a checkpoint without compression holds.
        file: The table's file with stamps, padding and header.
        while_exporting: The file and one uncompressed checkpoint beside it.
    """

    fields: dict[str, int]
    logical: int
    file: int
    while_exporting: int


def estimate(
    rows: int, dim: int, *, second_moment: SecondMoment = "coordinate", backend: Memmap | None = None
) -> Estimate:
    """Return what a table of Adam's state will take on disk.

    Args:
        rows: Number of rows N.
        dim: Elements of a row D.
        second_moment: ``"row"`` stores one number of v per row.
        backend: The layout; the default one when None.

    Example:
        >>> estimate(10_000_000, 128).fields["w"], estimate(10_000_000, 128).logical
        (5120000000, 15400000000)
    """
    rows = operator.index(rows)
    if rows < 1:
        raise ValueError(f"rows={rows!r} is out of range: a table has at least one row")
    AdamOptions(lr=0.0, second_moment=second_moment)
    schema = adam_schema(dim, second_moment_per="row" if second_moment == "row" else "element")
    fields = {field.name: rows * schema.field_bytes(field) for field in schema.fields}
    logical = sum(fields.values()) - fields["s"]
    file = file_bytes(rows, schema, None if backend is None else backend.stride)
    return Estimate(fields, logical, file, file + logical)
