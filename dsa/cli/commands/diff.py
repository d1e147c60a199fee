"""``dsa diff``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dsa.cli.commands.options import add_base, add_layout, add_work, named_layout, storage_options
from dsa.cli.commands.output import KINDS, print_json
from dsa.cli.commands.progress import shown_progress

if TYPE_CHECKING:
    from dsa.inspection.comparison import Comparison, FieldComparison, Side, TableComparison

__all__ = ["DETAILS", "add_arguments", "run"]

DETAILS = """\
Tables, shapes, steps, curvatures, and every row bit by bit; rows that were never written count with their
first weights. How something is stored doesn't count. Neither is changed, and a process may be training
there.

Exit code: 0 the same, 1 different, 2 trouble.

JSON: same, a, b, only_in_a, only_in_b, tables."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("a", metavar="A", help="a state directory, or a checkpoint at a path or a URL")
    parser.add_argument("b", metavar="B", help="another one")
    add_base(parser)
    add_layout(parser)
    add_work(parser, "A and B")


def run(arguments: argparse.Namespace) -> int:
    """Compare, and print where they differ.

    Raises:
        DSAError, ValueError, OSError: the message says why.
    """
    from dsa.inspection.comparison import diff

    with shown_progress(arguments) as progress:
        found = diff(
            arguments.a,
            arguments.b,
            base=arguments.base,
            progress=progress,
            storage_options=storage_options(arguments),
            backend=named_layout(arguments.backend),
        )
    print_json(found.to_json()) if arguments.json else print("\n".join(_lines(found)))
    return 0 if found.same else 1


def _lines(found: Comparison) -> Iterator[str]:
    rows = sum(table.compared for table in found.tables)
    if found.same:
        count = len(found.tables)
        tables = f"{count:,} table{'' if count == 1 else 's'}"
        yield f"the same: step {found.a.global_step:,}, {tables}, {rows:,} rows"
        return
    yield _side("A", found.a)
    yield _side("B", found.b)
    for name in found.only_in_a:
        yield f"table {name!r} is in A only"
    for name in found.only_in_b:
        yield f"table {name!r} is in B only"
    for table in found.tables:
        yield from _table(table)


def _side(letter: str, side: Side) -> str:
    return f"{letter}: {side.url} ({KINDS[side.kind]}, step {side.global_step:,})"


def _table(table: TableComparison) -> Iterator[str]:
    from dsa.inspection.text import aligned

    if table.same:
        yield f"table {table.name!r}: the same"
        return
    yield f"table {table.name!r}: {table.rows:,} of {table.compared:,} rows differ"
    if not table.compared:
        yield "  its rows can't be compared"
    for name, (one, other) in table.facts.items():
        if name != "fields":
            yield f"  {name}: {_shown(one)} in A, {_shown(other)} in B"
            continue
        for letter, fields in (("A", one), ("B", other)):
            if fields:
                yield f"  fields that only {letter} has: {', '.join(fields)}"
    if table.rows:
        header = ["field", "rows", "largest difference", "in row", "first rows"]
        yield from aligned(header, [_field(each) for each in table.fields])


def _field(field: FieldComparison) -> list[str]:
    if field.largest_row is None:
        return [field.name, "0", "", "", ""]
    first = ", ".join(f"{row:,}" for row in field.first_rows)
    more = ", ..." if field.rows > len(field.first_rows) else ""
    return [field.name, f"{field.rows:,}", f"{field.largest:.4g}", f"{field.largest_row:,}", f"{first}{more}"]


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
