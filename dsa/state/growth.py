"""Tables that come to have more rows, one or several at one instant.

Where the backend can, it makes room first, which nobody sees; then the description names the new numbers of
rows, all at once, and only then are the rows used. Killed before that, the state is the old one, and what
there is room for too much goes when the state is closed. A backend that can't is made anew, as for every
change of whole tables, see `dsa.state.replacement`.

New rows are fresh: the rule for first weights gives them what it would have given them from the start, since
that depends on seed, row and place alone. In a table that was made of an array they are written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from dsa.backends.base import Growing, Layout
from dsa.kernels.decay import rounded
from dsa.rules.init import FromArray, Initializer, MatrixLike, as_initializer
from dsa.schema import DECAY, Records, catches_up
from dsa.state.content import TableContent
from dsa.state.facts import TableFacts
from dsa.state.first_weights import first_content
from dsa.state.metadata import read_metadata
from dsa.state.opening import opened
from dsa.state.replacement import replace_tables
from dsa.state.state_directory import StateDirectory
from dsa.state.storage import TableSpec
from dsa.state.table import Table, content_of, fill_untouched, stamp_of
from dsa.state.table_files import drain_backend

__all__ = ["Growth", "grow_directory", "grow_tables"]

_BLOCK_BYTES: Final = 8 << 20


class Growth(NamedTuple):
    """How a table is to grow.

    Args:
        table: A table of the state.
        rows: How many it is to have; as many as it has is no change.
        source: The first weights of the new rows, which are written: an array ``(new rows, D)``, or a rule
            that gives each the weights of its number. None goes on with the table's own rule.
    """

    table: Table
    rows: int
    source: Initializer | FromArray | None = None


def grow_tables(state: StateDirectory, wanted: Sequence[Growth]) -> None:
    """Let tables have more rows, all of them or none.

    The state is to be held (`StateDirectory.use`). A kill or a loss of power at any instant leaves all tables
    with the old numbers of rows or all with the new ones, whole, under every durability.

    Args:
        state: The state of the tables.
        wanted: What is to grow, each table once.

    Raises:
        ValueError: a table would shrink, weights are missing or don't fit, or one is not finite; nothing has
            changed.
        DiskSpaceError: there is not enough room; nothing has changed.
        OSError: the system refused; nothing has changed, unless the description could be written.
    """
    for growth in wanted:
        _check(growth)
    growing = [growth for growth in wanted if growth.rows > len(growth.table)]
    if not growing:
        return
    state.settle()
    for growth in growing:
        if "w" not in growth.table.backend.schema.names:
            growth.table.awaited = ""  # the weights that go with the moments are others now
    if all(_make_room(growth) for growth in growing):
        _adopt(state, growing)
    else:
        replace_tables(state, [_grown(growth) for growth in growing])


def grow_directory(
    directory: str | os.PathLike[str],
    rows: Mapping[str, int],
    *,
    init: Mapping[str, Initializer | FromArray | MatrixLike] | None = None,
    backend: Layout | None = None,
) -> None:
    """Let tables of a state directory that nobody has open have more rows, all of them or none.

    Rows that are there keep weights, moments and counters. Afterwards the tables are asked for with their new
    numbers of rows.

    Args:
        directory: The state directory.
        rows: For each table that is to grow how many rows it is to have.
        init: The first weights of new rows, where they are not those of the table's own rule: an array of
            those rows, or a rule of `dsa.init` for all rows.
        backend: The layout of tables whose kind is not one of the package's, see `dsa.backends.Layout`.

    Raises:
        KeyError: the state has no table of a name.
        ValueError: a table would shrink, or `init` is missing or doesn't fit; nothing has changed.
        StateError: the directory can't be used; see `dsa.errors`.
        DiskSpaceError: there is not enough room; nothing has changed.

    Example:
        >>> import tempfile, dsa
        >>> path, rule = tempfile.mkdtemp(), dsa.init.Normal
        >>> with dsa.DiskSparseRiemannianAdam({"word": rule(10, 4)}, disk_dir=path):
        ...     pass
        >>> grow_directory(path, {"word": 14})
        >>> with dsa.DiskSparseRiemannianAdam({"word": rule(14, 4)}, disk_dir=path, resume=True) as optimizer:
        ...     optimizer.read_rows([13]).shape
        torch.Size([1, 4])
    """
    given = {name: as_initializer(source) for name, source in (init or {}).items()}
    with opened(directory, backend) as state, state.use():
        unknown = sorted({*rows, *given} - set(state.tables))
        if unknown or given.keys() - rows.keys():
            raise KeyError(
                f"the tables {unknown or sorted(given)} can't grow in {str(state.path)!r}: pass rows= for "
                f"some of {sorted(state.tables)}"
            )
        grow_tables(
            state, [Growth(state.tables[name], count, given.get(name)) for name, count in rows.items()]
        )


def _check(growth: Growth) -> None:
    table, rows, source = growth
    if rows < len(table):
        raise ValueError(
            f"rows={rows!r} is less than the {len(table)} rows of table {table.name!r}, and a table never "
            "shrinks: pass at least that"
        )
    new = rows - len(table)
    if source is None:
        if new and table.initializer is None and "w" in table.backend.schema.names:
            raise ValueError(
                f"table {table.name!r} was made of an array, so that there is no rule for the weights of "
                f"{new} new rows: pass init=, an array of {new} x {table.dim} or a rule of dsa.init"
            )
        return
    if "w" not in table.backend.schema.names:
        raise ValueError(
            f"the weights of table {table.name!r} are a module's parameter: leave init= out, and give the "
            "parameter the new rows"
        )
    expected = rows if isinstance(source, Initializer) else new
    if (source.rows, source.dim) != (expected, table.dim):
        raise ValueError(
            f"init gives {source.rows} x {source.dim} where table {table.name!r} grows from {len(table)} to "
            f"{rows} rows of {table.dim} elements: pass an array of {new} x {table.dim}, or a rule for "
            f"{rows} x {table.dim}"
        )


def _make_room(growth: Growth) -> bool:
    backend = growth.table.backend
    return isinstance(backend, Growing) and backend.make_room(growth.rows)


def _facts(growth: Growth) -> TableFacts:
    facts, first = growth.table.facts, growth.table.initializer
    if first is None or first.rows is None:
        return replace(facts, rows=growth.rows)
    added = (*facts.added, (facts.rows, facts.decay)) if catches_up(facts.schema.dtype) else ()
    return replace(facts, rows=growth.rows, initializer=replace(first, rows=growth.rows), added=added)


def _adopt(state: StateDirectory, growing: Sequence[Growth]) -> None:
    """Have the new rows in memory, and switch the description; or after an error neither."""
    former = [(growth.table, growth.table.facts) for growth in growing]
    try:
        for growth in growing:
            backend, facts = growth.table.backend, _facts(growth)
            assert isinstance(backend, Growing), "there is room in it"
            with state.refusals():
                backend.adopt_rows(growth.rows)
            growth.table.facts = facts
            _write_first(state, growth, former)
        state.save()
    except BaseException:
        if not _is_described(state, growing):
            _take_back(state, former)
        raise


def _write_first(state: StateDirectory, growth: Growth, former: Sequence[tuple[Table, TableFacts]]) -> None:
    """Write the first weights that were given, durably: what the description names is whole."""
    table, source = growth.table, growth.source
    if source is None:
        return
    before = next(facts.rows for each, facts in former if each is table)
    for first, records in _first_blocks(table, before, source):
        rows = np.arange(first, first + len(records))
        records["s"] = stamp_of(state.global_step)
        table.backend.reserve(rows)
        if table.writer is None:
            table.backend.write(rows, records)
        else:
            table.writer.write_through(rows, records)
    drain_backend(table.backend)
    with state.refusals():
        table.backend.flush()


def _first_blocks(
    table: Table, before: int, source: Initializer | FromArray
) -> Iterator[tuple[int, Records]]:
    """Yield the records of a table's rows from `before` on, with the first weights that were given."""
    facts = table.facts
    if isinstance(source, FromArray):
        spec = TableSpec(replace(facts, rows=source.rows, initializer=None), source)
        for first, records in first_content(spec).blocks():
            if catches_up(records.dtype):
                records[DECAY] = rounded(facts.decay)
            yield before + first, records
        return
    ruled = replace(table, facts=replace(facts, initializer=source))
    block = max(1, _BLOCK_BYTES // facts.schema.dtype.itemsize)
    for first in range(before, facts.rows, block):
        rows = np.arange(first, min(facts.rows, first + block))
        records = np.zeros(len(rows), facts.schema.dtype)
        yield first, fill_untouched(ruled, rows, records)


def _grown(growth: Growth) -> TableContent:
    """Return a table with its new rows, to be made anew."""
    table, facts, source = growth.table, _facts(growth), growth.source
    content, before = content_of(table), len(table)

    def blocks() -> Iterator[tuple[int, Records]]:
        yield from content.blocks()
        if source is not None:
            for first, records in _first_blocks(replace(table, facts=facts), before, source):
                records["s"] = 1
                yield first, records

    return replace(content, facts=facts, blocks=blocks)


def _is_described(state: StateDirectory, growing: Sequence[Growth]) -> bool:
    stored = read_metadata(state.path)
    rows = {} if stored is None else {each["name"]: each["backend"]["rows"] for each in stored.tables}
    return all(rows.get(growth.table.name) == growth.rows for growth in growing)


def _take_back(state: StateDirectory, former: Sequence[tuple[Table, TableFacts]]) -> None:
    try:
        for table, facts in former:
            table.facts = facts
            if isinstance(table.backend, Growing) and len(table.backend) > facts.rows:
                table.backend.adopt_rows(facts.rows)
    except BaseException:
        state.abandon()  # memory says what the directory does not: whoever opens it next will see
        raise
