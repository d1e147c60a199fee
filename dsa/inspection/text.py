"""A state and its tables in a few lines: for a prompt, and for a notebook."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from dsa.errors import DSAError

if TYPE_CHECKING:
    from dsa.inspection.state_view import StateView
    from dsa.inspection.table_view import TableView

__all__ = ["aligned", "safely", "size", "state_html", "state_text", "table_html", "table_text"]

# Counting touched rows reads a page for each: tables up to this many rows are counted, others sampled.
_MOST_COUNTED: Final = 20_000
_SAMPLE: Final = 2_000
# No seed that anybody trains with: the same draws would find the rows of the first batches.
_SEED: Final = 0x6473615F_6C6F6F6B

_STYLE: Final = "border-collapse:collapse;margin:0.3em 0;font-variant-numeric:tabular-nums"
_CELL: Final = "padding:0.15em 0.9em;text-align:{};border:none"


def size(count: float) -> str:
    """Return a number of bytes with three digits and a unit.

    Example:
        >>> size(999), size(1_540_000_000), size(51_200_000)
        ('999 B', '1.54 GB', '51.2 MB')
    """
    if count < 1000:
        return f"{count:.0f} B"
    value = float(count)
    for unit in ("kB", "MB", "GB"):
        value /= 1000.0
        if value < 999.5:
            return f"{value:.3g} {unit}"
    return f"{value / 1000.0:,.2f} TB"


def safely(what: str, describe: Callable[[], str], *, html: bool = False) -> str:
    """Return a description, or what keeps it from being made: printing an object must not fail."""
    try:
        return describe()
    except (DSAError, OSError) as error:
        line = f"<{what}: {error}>"
        return f"<pre>{_escape(line)}</pre>" if html else line


def state_text(state: StateView) -> str:
    """Return a line about a state and a table of its tables."""
    state.require_open()
    title = f"<dsa state {str(state.path)!r}: {_standing(state)}>"
    return "\n".join([title, *aligned(*_tables(state))])


def state_html(state: StateView) -> str:
    """Return the same as HTML."""
    state.require_open()
    title = f"<b>dsa state</b> <code>{_escape(str(state.path))}</code>: {_escape(_standing(state))}"
    return f"<div>{title}{_html_table(*_tables(state))}</div>"


def table_text(table: TableView) -> str:
    """Return a line about a table and a table of its fields."""
    return "\n".join([f"<dsa table {table.name!r}: {_about(table)}>", *aligned(*_fields(table))])


def table_html(table: TableView) -> str:
    """Return the same as HTML."""
    title = f"<b>dsa table</b> <code>{_escape(table.name)}</code>: {_escape(_about(table))}"
    return f"<div>{title}{_html_table(*_fields(table))}</div>"


def _standing(state: StateView) -> str:
    return f"{state.status}, step {state.global_step:,}"


def _about(table: TableView) -> str:
    space = "flat" if table.k == 0.0 else f"k={table.k:g}"
    return (
        f"{table.rows:,} x {table.dim}, {space}, {table.rule.name}, {table.steps:,} steps, "
        f"{_touched(table)} rows touched, {size(table.disk_bytes)} on disk"
    )


def _tables(state: StateView) -> tuple[list[str], list[list[str]]]:
    header = ["table", "shape", "k", "rule", "steps", "touched", "on disk", "logical"]
    rows = [
        [
            table.name,
            f"{table.rows:,} x {table.dim}",
            f"{table.k:g}",
            table.rule.name,
            f"{table.steps:,}",
            _touched(table),
            size(table.disk_bytes),
            size(table.logical_bytes),
        ]
        for table in state.tables.values()
    ]
    return header, rows


def _fields(table: TableView) -> tuple[list[str], list[list[str]]]:
    schema = table.schema
    rows = []
    for field in schema.fields:
        shape = f"({table.rows}, {table.dim})" if field.per == "element" else f"({table.rows},)"
        rows.append([field.name, shape, field.dtype, size(table.rows * schema.field_bytes(field))])
    return ["field", "shape", "dtype", "logical"], rows


def _touched(table: TableView) -> str:
    """Return how many rows were ever written, or belong to an id; of a large table, about what share."""
    stamps = table["s" if table.num_ids is None else "live"]
    if table.rows <= _MOST_COUNTED:
        count = int(np.count_nonzero(stamps))
        return f"{count:,} ({count / table.rows:.0%})"
    # The same rows each time; in order, which is how a disk likes them.
    rows = np.unique(np.random.default_rng(_SEED).integers(0, table.rows, _SAMPLE))
    table.announce(rows)
    return f"about {np.count_nonzero(stamps[rows]) / len(rows):.0%}"


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table of text, the first column to the left and the others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return [
        "  ".join(
            ["", line[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        )
        for line in lines
    ]


def _html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str, rule: str) -> str:
        sides = ["left", *["right"] * (len(cells) - 1)]
        return "".join(
            f'<{tag} style="{_CELL.format(side)}{rule}">{_escape(cell)}</{tag}>'
            for cell, side in zip(cells, sides, strict=True)
        )

    top = line(header, "th", ";border-bottom:1px solid currentColor")
    body = "".join(f"<tr>{line(row, 'td', '')}</tr>" for row in rows)
    return f'<table style="{_STYLE}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'


def _escape(text: str) -> str:
    return html.escape(text)
