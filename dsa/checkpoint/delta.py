"""Differential checkpoints: the rows that changed since a full one, and how to put both together again.

A delta is an ordinary checkpoint whose tables hold some rows only, with their numbers in the array ``rows``.
It holds final values, not differences, and is always relative to a full checkpoint, so that two directories
restore any step. Which rows changed is told by their stamps: a row's ``s`` is one more than the step that
wrote it last.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, Unpack, cast, final

import numpy as np

from dsa.checkpoint.export import ExportOptions, write_checkpoint
from dsa.checkpoint.places import StorageOptions, check_apart, find_place
from dsa.checkpoint.reading import Checkpoint, open_checkpoint
from dsa.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)
from dsa.schema import Field, Records, Rows, Schema
from dsa.state.content import StateContent, TableContent, recast

__all__ = ["ROWS", "OpenedContent", "flatten_checkpoint", "open_content", "write_delta"]

ROWS: Final = "rows"
"""The array of row numbers, int64 ``(n,)``, strictly increasing."""

_ROWS_OF_TABLES: Final = "rows"
"""What the link to the base says of all tables in order: how many rows they have, of which the base may lack
some. All of those are in the delta."""

_BLOCK_BYTES: Final = 4 << 20


class OpenedContent(NamedTuple):
    """A checkpoint and what it stands for.

    Args:
        checkpoint: The checkpoint that was named.
        content: Its content; of a delta, laid over its base's.
        nbytes: Bytes that a pass over the content reads.
        sources: The checkpoints that are read.
    """

    checkpoint: Checkpoint
    content: StateContent
    nbytes: int
    sources: tuple[Checkpoint, ...]


def write_delta(
    content: StateContent,
    base: Checkpoint,
    url: str | os.PathLike[str],
    scratch: Path,
    **options: Unpack[ExportOptions],
) -> str:
    """Write the rows of a state that changed since a full checkpoint of it.

    Args:
        content: The state.
        base: A full checkpoint of its history.
        url: Where to.
        scratch: A directory on a disk with room for the changed rows, which are collected there first.
        options: Those of `dsa.checkpoint.write_checkpoint`.

    Returns:
        The path or the URL of the checkpoint.

    Raises:
        CheckpointMismatchError: `base` is a delta itself, is not of this state's history, or something
            changed that rows don't tell; export a full checkpoint then.
    """
    check_apart(base.source.place, find_place(url, options.get("storage_options")))
    _check_base(content, base)
    before = {entry.name: entry.rows for entry in base.tables}
    with ExitStack() as stack:
        changed = []
        for table in content.tables:
            file = cast("BinaryIO", stack.enter_context(tempfile.TemporaryFile(dir=scratch)))
            since = base.global_step if table.name in before else -1
            changed.append(_changed(table, since, before.get(table.name, 0), file))
        link = {
            "step": base.global_step,
            "content_root": base.content_root,
            "name": base.source.place.name,
            _ROWS_OF_TABLES: [table.rows for table in content.tables],
        }
        return write_checkpoint(
            replace(content, tables=tuple(changed)), url, kind="delta", base=link, **options
        )


def open_content(
    url: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    verify: bool = True,
    storage_options: StorageOptions | None = None,
) -> OpenedContent:
    """Open a checkpoint, full or differential, for its content.

    Args:
        url: The checkpoint.
        base: The full checkpoint that a delta is relative to; None looks for it beside the delta, under the
            name that it had when the delta was made.
        verify: Compare every block with its checksum before any row of it is yielded.
        storage_options: For fsspec, for both.

    Raises:
        CheckpointError: one of them can't be used.
        ValueError: a base is given for a checkpoint that has none.
    """
    checkpoint = open_checkpoint(url, storage_options=storage_options)
    if checkpoint.kind != "delta":
        if base is not None:
            raise ValueError(f"{checkpoint.url!r} is no differential checkpoint: leave base= out")
        return OpenedContent(checkpoint, checkpoint.content(verify), checkpoint.nbytes, (checkpoint,))
    below = _find_base(checkpoint, base, storage_options)
    nbytes = checkpoint.nbytes + below.nbytes
    return OpenedContent(checkpoint, _merged(checkpoint, below, verify), nbytes, (checkpoint, below))


def flatten_checkpoint(
    url: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    **options: Unpack[ExportOptions],
) -> str:
    """Write a full checkpoint of what a differential one and its base stand for.

    Args:
        url: The differential checkpoint.
        destination: Where the full one goes.
        base: See `open_content`.
        options: Those of `dsa.checkpoint.write_checkpoint`; `storage_options` are for all three.

    Returns:
        The path or the URL of the full checkpoint.

    Raises:
        CheckpointError: a checkpoint can't be used, or the destination can't be written.
    """
    opened = open_content(url, base=base, storage_options=options.get("storage_options"))
    place = find_place(destination, options.get("storage_options"))
    for source in opened.sources:
        check_apart(source.source.place, place)
    options.setdefault("attributes", opened.checkpoint.attributes)
    return write_checkpoint(opened.content, destination, **options)


def _check_base(content: StateContent, base: Checkpoint) -> None:
    if base.global_step >= 2**31 - 1:
        raise CheckpointMismatchError(
            f"{base.url!r} is of step {base.global_step}, beyond which stamps don't count: export a full "
            "checkpoint"
        )
    if base.kind != "full":
        raise CheckpointMismatchError(
            f"{base.url!r} is a differential checkpoint itself: pass the full one that it is relative to"
        )
    if content.exports.get(base.content_root) != base.global_step:
        raise CheckpointMismatchError(
            f"{base.url!r} is not a checkpoint that this state was exported to or imported from, so that "
            "nobody knows which rows have changed since: export a full checkpoint"
        )
    entries = {entry.name: entry for entry in base.tables}
    for table in content.tables:
        if table.stored is not None:
            raise CheckpointMismatchError(
                f"the weights of table {table.name!r} are a module's parameter, whose changes nobody counts: "
                "export a full checkpoint, or keep the weights on disk (DiskEmbedding)"
            )
        entry = entries.get(table.name)
        if entry is not None and (entry.facts.k, entry.schema) != (table.k, table.schema):
            raise CheckpointMismatchError(
                f"table {table.name!r} has curvature {table.k!r} now and {entry.facts.k!r} in {base.url!r}: "
                "export a full checkpoint after such a change"
            )


def _changed(table: TableContent, since: int, before: int, file: BinaryIO) -> TableContent:
    """Collect rows in a file and return them as a table of their own.

    Args:
        table: The table.
        since: Rows that were written after this step are taken,
        before: and all rows from this one on, which the base doesn't have.
        file: The file.
    """
    schema = Schema(table.schema.dim, (Field(ROWS, "int64", "row"), *table.schema.fields))
    count = 0
    for first, records in table.blocks():
        fresh = np.arange(first, first + len(records)) >= before
        chosen = np.flatnonzero((records["s"] > since) | fresh)
        if not len(chosen) and count == 0 and first + len(records) == table.rows:
            chosen = np.array([len(records) - 1])  # an array has at least one row: one more does no harm
        numbered = recast(records[chosen], schema)
        numbered[ROWS] = first + chosen
        file.write(numbered.data)
        count += len(chosen)
    file.flush()

    def blocks() -> Iterator[tuple[int, Records]]:
        file.seek(0)
        size = schema.dtype.itemsize
        step = max(1, _BLOCK_BYTES // size)
        for start in range(0, count, step):
            raw = file.read(min(step, count - start) * size)
            yield start, np.frombuffer(raw, schema.dtype)

    return replace(table, facts=replace(table.facts, rows=count, schema=schema), blocks=blocks)


def _find_base(
    delta: Checkpoint, given: str | os.PathLike[str] | None, storage_options: StorageOptions | None
) -> Checkpoint:
    link = delta.manifest.base or {}
    step, root, name = link.get("step"), link.get("content_root"), link.get("name")
    if given is not None:
        base = open_checkpoint(given, storage_options=storage_options)
        if base.content_root != root:
            raise CheckpointMismatchError(
                f"{base.url!r} is not the base of {delta.url!r}, which is relative to the checkpoint of step "
                f"{step} with the content root {root}: pass that one"
            )
        return base
    if isinstance(name, str) and name and "/" not in name and name not in (".", ".."):
        beside = delta.source.place.beside(name)
        with contextlib.suppress(CheckpointError):
            base = open_checkpoint(beside, storage_options=storage_options)
            if base.content_root == root:
                return base
    raise CheckpointNotFoundError(
        f"{delta.url!r} holds the rows that changed since step {step}, and the full checkpoint of that step, "
        f"{name!r}, is not beside it: pass base= with the place of the one whose content root is {root}"
    )


def _merged(delta: Checkpoint, base: Checkpoint, verify: bool) -> StateContent:
    below = base.content(verify)
    tables = {table.name: table for table in below.tables}
    above = delta.stored_content(verify)
    return replace(
        above,
        tables=tuple(
            _merged_table(delta, tables.get(each.name), each, count)
            for each, count in zip(above.tables, _rows_of(delta, len(above.tables)), strict=True)
        ),
        exports={base.content_root: base.global_step},
    )


def _rows_of(delta: Checkpoint, tables: int) -> list[int]:
    """Return how many rows the tables had when a delta was made."""
    rows = (delta.manifest.base or {}).get(_ROWS_OF_TABLES)
    known = isinstance(rows, list) and all(isinstance(each, int) and each > 0 for each in rows)
    if not isinstance(rows, list) or not known or len(rows) != tables:
        raise CheckpointCorruptError(
            f"{delta.url!r} does not say how many rows its {tables} tables have ({rows!r}): restore it from "
            "a copy"
        )
    return rows


def _merged_table(
    delta: Checkpoint, below: TableContent | None, above: TableContent, rows: int
) -> TableContent:
    schema = Schema(above.schema.dim, above.schema.fields[1:])
    if below is None:
        # A table that is younger than the base: all its rows are there.
        facts = replace(above.facts, schema=schema)
        return replace(above, facts=facts, blocks=lambda: _unnumbered(delta, above, schema))
    if (below.schema, below.k) != (schema, above.k) or rows < below.rows:
        raise CheckpointMismatchError(
            f"table {above.name!r} of {delta.url!r} does not fit that of its base: pass the base that it was "
            "exported with"
        )
    facts = replace(above.facts, rows=rows, schema=schema)
    return replace(above, facts=facts, blocks=lambda: _laid_over(delta, below, above, rows))


def _unnumbered(delta: Checkpoint, table: TableContent, schema: Schema) -> Iterator[tuple[int, Records]]:
    for first, numbered in table.blocks():
        if not np.array_equal(numbered[ROWS], np.arange(first, first + len(numbered))):
            raise _bad_rows(delta, table.name)
        yield first, recast(numbered, schema)


def _laid_over(
    delta: Checkpoint, below: TableContent, above: TableContent, total: int
) -> Iterator[tuple[int, Records]]:
    changes = _Changes(delta, above, below.schema, total)
    for first, stored in below.blocks():
        records = stored.copy()
        for rows, changed in changes.until(first + len(records)):
            records[rows - first] = changed
        yield first, records
    done = below.rows
    for rows, added in changes.until(total):
        if not np.array_equal(rows, np.arange(done, done + len(rows))):
            raise _bad_rows(delta, above.name)
        yield done, added
        done += len(rows)
    if done != total:
        raise _bad_rows(delta, above.name)


@final
class _Changes:
    """The rows of a delta, taken in order.

    Args:
        delta: The checkpoint, for messages.
        table: Its numbered rows.
        schema: The records' without numbers.
        rows: Rows of the whole table.
    """

    def __init__(self, delta: Checkpoint, table: TableContent, schema: Schema, rows: int) -> None:
        self._delta, self._name, self._schema, self._rows = delta, table.name, schema, rows
        self._blocks = table.blocks()
        self._numbered = np.empty(0, table.schema.dtype)
        self._last = -1

    def until(self, stop: int) -> Iterator[tuple[Rows, Records]]:
        """Yield the changed rows below `stop` that were not yielded yet, and their records."""
        while True:
            numbers = self._numbered[ROWS]
            count = int(np.searchsorted(numbers, stop))
            if count:
                part = self._numbered[:count]
                yield part[ROWS].astype(np.int64), recast(part, self._schema)
                self._numbered = self._numbered[count:]
            if len(self._numbered) or not self._load():
                return

    def _load(self) -> bool:
        block = next(self._blocks, None)
        if block is None:
            return False
        self._numbered = block[1]
        numbers = self._numbered[ROWS]
        # Compared, not subtracted: differences of hostile numbers overflow.
        increasing = numbers[0] > self._last and bool((numbers[1:] > numbers[:-1]).all())
        if not increasing or numbers[-1] >= self._rows:
            raise _bad_rows(self._delta, self._name)
        self._last = int(numbers[-1])
        return True


def _bad_rows(delta: Checkpoint, table: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"the row numbers of table {table!r} in {delta.url!r} are not increasing or leave the table: restore "
        "the checkpoint from a copy"
    )
