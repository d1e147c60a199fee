"""How much disk a table takes, before it is made."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

from dsa.backends.base import Layout
from dsa.backends.layouts import Memmap
from dsa.rules.conventions import SecondMoment
from dsa.rules.known import rule_of
from dsa.schema import Schema, keyed
from dsa.state.journal_format import BODY, layout_of
from dsa.state.storage import narrowed

__all__ = ["Estimate", "estimate"]

_NOTE_BYTES: Final = 128
_JOURNAL_BYTES: Final = 1 << 20
_INDEX_BYTES: Final = 40
"""Bytes of the index for an id, at most: slots of 16 bytes, two fifths of a new segment's being taken."""


@final
@dataclass(frozen=True, slots=True)
class Estimate:
    """Disk that one table occupies, in bytes.

    Args:
        fields: Bytes of each field; of Adam w, m, v, t and the stamp s.
        logical: All of them but s. A checkpoint without compression holds the stamps besides, 4 bytes a row.
        file: The table's file, or files, with stamps, padding and header. What compression saves depends on
            the rows that are trained: with it, the size before.
        while_exporting: The file and one uncompressed checkpoint beside it.
        record: One row in the file, with its padding.
        journal: The journal of a state with this table alone, for steps of `batch` rows; beside the file
            while the state is open, and until the next opening after a kill. ``durability="power"`` and
            ``async_writes`` keep more, 64 MiB at least.
        index: From ids to rows, at most, where rows belong to ids; beside the file.
    """

    fields: dict[str, int]
    logical: int
    file: int
    while_exporting: int
    record: int
    journal: int
    index: int = 0


def estimate(
    rows: int,
    dim: int,
    *,
    second_moment: SecondMoment = "coordinate",
    rule: str | None = None,
    state_dtype: str | Mapping[str, str] | None = None,
    backend: Layout | None = None,
    batch: int = 16_384,
    ids: bool = False,
) -> Estimate:
    """Return what a table will take on disk.

    Args:
        rows: Number of rows N.
        dim: Elements of a row D.
        second_moment: Of Adam; ``"row"`` stores one number of v per row.
        rule: The name of another update rule, such as ``"adagrad"``.
        state_dtype: How fields are stored: ``"bfloat16"`` for all but the weight, or a dict with a dtype for
            some fields.
        backend: The layout; the default one when None.
        batch: Distinct rows of the largest step, on which the journal's size depends.
        ids: Whether the rows belong to ids, which are stored with them.

    Example:
        >>> estimate(10_000_000, 128).fields["w"], estimate(10_000_000, 128).logical
        (5120000000, 15400000000)
        >>> estimate(10_000_000, 128, rule="row_wise_adagrad").logical
        5160000000
        >>> estimate(10_000_000, 128, state_dtype="bfloat16").logical
        10280000000
        >>> estimate(10_000_000, 128, ids=True).index
        400000000
    """
    rows = operator.index(rows)
    if rows < 1:
        raise ValueError(f"rows={rows!r} is out of range: pass at least 1")
    batch = operator.index(batch)
    if batch < 1:
        raise ValueError(f"batch={batch!r} is out of range: pass at least 1")
    schema = narrowed(rule_of(second_moment, rule).schema(dim), state_dtype)
    schema = keyed(schema) if ids else schema
    fields = {field.name: rows * schema.field_bytes(field) for field in schema.fields}
    logical = sum(fields.values()) - fields["s"]
    layout = Memmap() if backend is None else backend
    journal = _journal_bytes(min(batch, rows), schema, layout)
    sizes = layout.sizes(rows, schema)
    index = rows * _INDEX_BYTES if ids else 0
    return Estimate(fields, logical, sizes.filled, sizes.filled + logical, sizes.record, journal, index)


def _journal_bytes(batch: int, schema: Schema, layout: Layout) -> int:
    """Return the length that the ring grows to: it keeps the last step's entry while it takes the next."""
    if layout.collect_bytes:
        return BODY + layout.collect_bytes
    # With the checksum that belongs to what a record was.
    entry = layout_of(_NOTE_BYTES, [(batch, schema.dtype.itemsize + 4)]).length
    return BODY + (_JOURNAL_BYTES if 2 * entry <= _JOURNAL_BYTES else 3 * entry)
