"""A summary for the terminal: a table of the tables, and small histograms of each.

Colours and line drawing are used where the terminal has them; a file or a pipe gets plain text.
"""

from __future__ import annotations

import io
import math
import sys
from typing import Final, TextIO

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from dsa.inspection.console import forgiving
from dsa.inspection.sketch import Histogram, Spread
from dsa.inspection.summary import StateSummary, TableSummary
from dsa.inspection.text import size

__all__ = ["histogram_lines", "print_summary", "render"]

_CHART_WIDTHS: Final = (38, 56)
_CHART_HEIGHT: Final = 5
_WIDTH: Final = 120
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_PLAIN_BLOCKS: Final = " .:#"
_GAP: Final = 3
_NARROW: Final = 100


def print_summary(summary: StateSummary, file: TextIO | None = None) -> None:
    """Print a summary: in colour where `file` is a terminal that has it, plain elsewhere.

    Args:
        summary: What `summarize` returns.
        file: Standard output when None.
    """
    stream = sys.stdout if file is None else file
    console = Console(file=stream, highlight=False, emoji=False)
    with forgiving(stream):
        if not console.is_terminal:
            stream.write(render(summary, unicode=not console.options.ascii_only))
        else:
            console.print(_report(summary, console.width, not console.options.ascii_only))


def render(summary: StateSummary, *, width: int = _WIDTH, color: bool = False, unicode: bool = True) -> str:
    """Return a summary as text.

    Args:
        summary: What `summarize` returns.
        width: Columns that may be used.
        color: Whether to write the escape sequences of colours.
        unicode: Whether block and line characters may be used, or ASCII only.
    """
    buffer = io.StringIO()
    console = Console(
        file=buffer,
        width=width,
        force_terminal=color,
        color_system="truecolor" if color else None,
        highlight=False,
        emoji=False,
        legacy_windows=False,
    )
    console.print(_report(summary, width, unicode))
    lines = (line.rstrip() for line in buffer.getvalue().splitlines())
    return "\n".join(lines).strip("\n") + "\n"


def _report(summary: StateSummary, width: int, unicode: bool) -> RenderableType:
    parts: list[RenderableType] = [_headline(summary), "", _overview(summary, width)]
    for table in summary.tables:
        parts += ["", *_details(table, width, unicode)]
    return Group(*parts)


def _headline(summary: StateSummary) -> Text:
    line = Text()
    if summary.path is not None:
        line.append(_printable(summary.path), "bold")
        line.append("  ")
    if summary.status is not None:
        line.append(
            summary.status,
            "yellow" if summary.status in ("open", "creating") else "green",
        )
        line.append(", ")
    line.append(f"step {summary.global_step:,}")
    sizes = [table.disk_bytes for table in summary.tables if table.disk_bytes is not None]
    if sizes:
        line.append(f", {size(sum(sizes) + (summary.journal_bytes or 0))} on disk")
    return line


def _overview(summary: StateSummary, width: int) -> Table:
    grid = Table(
        box=None, pad_edge=False, padding=(0, 3 if width >= _NARROW else 2, 0, 0), header_style="bold"
    )
    grid.add_column("table", overflow="fold", style="bold cyan", min_width=8)
    facts = [_facts(table) for table in summary.tables]
    # What there is least need for gives way first.
    left_out = () if width >= _NARROW else ("rule", "logical")
    titles = [title for title in (facts[0] if facts else {}) if title not in left_out]
    for title in titles:
        grid.add_column(title, justify="right", no_wrap=True)
    for table, row in zip(summary.tables, facts, strict=True):
        grid.add_row(Text(_printable(table.name)), *(row[title] for title in titles))
    return grid


def _facts(table: TableSummary) -> dict[str, str]:
    return {
        "rows": f"{table.rows:,}",
        "dim": f"{table.dim:,}",
        "k": f"{table.k:g}",
        "rule": table.rule,
        "steps": f"{table.steps:,}",
        "touched": f"{table.touched_rows:,}  {_share(table.touched_rows, table.rows):>5}",
        "on disk": "" if table.disk_bytes is None else size(table.disk_bytes),
        "logical": size(table.logical_bytes),
    }


def _details(table: TableSummary, width: int, unicode: bool) -> list[RenderableType]:
    title = Text(f"{_printable(table.name)} ", "bold cyan")
    line = Rule(title, align="left", characters="─" if unicode else "-", style="bright_black")
    remarks = _remarks(table)
    across = 2 if width >= 2 * _CHART_WIDTHS[0] + _GAP else 1
    chart_width = max(_CHART_WIDTHS[0], min(_CHART_WIDTHS[1], (width + _GAP) // across - _GAP))
    charts = [chart for chart in _charts(table, chart_width, unicode) if chart is not None]
    if not charts and not remarks:
        remarks = [Text("no row was ever written", "bright_black")]
    grid = Table.grid(padding=(0, _GAP, 0, 0))
    for _ in range(across):
        grid.add_column(width=chart_width)
    for start in range(0, len(charts), across):
        grid.add_row()
        grid.add_row(*charts[start : start + across])
    return [line, *remarks, *([grid] if charts else [])]


def _remarks(table: TableSummary) -> list[RenderableType]:
    remarks: list[RenderableType] = []
    if table.live_rows is not None and table.freed_rows is not None:
        unused = table.rows - table.live_rows - table.freed_rows
        remarks.append(
            Text(
                f"{table.live_rows:,} ids have a row, {table.freed_rows:,} rows wait for another id, "
                f"{unused:,} were never given out",
                "bright_black",
            )
        )
    if table.implausible_rows:
        remarks.append(
            Text(
                f"{table.implausible_rows:,} rows hold implausible values, the first is row "
                f"{table.first_implausible:,}: restore a copy, or call reproject_all, which resets them",
                "bold red",
            )
        )
    if table.rows_at_clamp:
        share = _share(table.rows_at_clamp, table.touched_rows)
        remarks.append(
            Text(
                f"{table.rows_at_clamp:,} rows ({share} of those touched) are at the edge of the ball: a "
                "smaller learning rate, or max_step, keeps them off it",
                "yellow",
            )
        )
    return remarks


def _charts(table: TableSummary, width: int, unicode: bool) -> list[RenderableType | None]:
    return [
        _chart("updates per row", table.updates, "green", width, unicode),
        # Near the edge of a ball norms say nothing, distances everything.
        _chart("norm of the weight", None if table.distances else table.weight_norms, "cyan", width, unicode),
        _chart("distance from the centre", table.distances, "cyan", width, unicode),
        _chart("first moment, rms of m", table.first_moments, "magenta", width, unicode),
        _chart("second moment, rms of the root of v", table.second_moments, "yellow", width, unicode),
    ]


def _chart(title: str, spread: Spread | None, style: str, width: int, unicode: bool) -> RenderableType | None:
    if spread is None:
        return None
    text = Text(f"{title}\n", "bold")
    if spread.minimum == spread.maximum:
        return text.append(f"{_number(spread.median)} in each of {spread.count:,} rows", "not bold")
    lines = histogram_lines(spread.histogram, width, _CHART_HEIGHT, unicode=unicode)
    edges = spread.histogram.edges
    low, high = _number(edges[0]), _number(spread.maximum)
    scale = "log scale" if spread.histogram.scale == "log" else ""
    axis = f"{low}{scale:^{max(0, width - len(low) - len(high))}}{high}"
    text.append("\n".join(lines) + "\n", style)
    text.append(("▔" if unicode else "-") * width + "\n", "bright_black")
    text.append(axis + "\n", "bright_black")
    most = f"{_number(spread.q05, 2)}{'–' if unicode else ' to '}{_number(spread.q95, 2)}"
    text.append(f"median {_number(spread.median)}, 90% {most}", "not bold")
    return text


def histogram_lines(histogram: Histogram, width: int, height: int, *, unicode: bool = True) -> list[str]:
    """Return a histogram as lines of text, the highest bar as high as there are lines.

    Args:
        histogram: At least one bin.
        width: Columns.
        height: Lines.
        unicode: Whether block characters may be used, or ASCII only.

    Example:
        >>> histogram = Histogram((0.0, 1.0, 2.0), (1, 2), "linear")
        >>> histogram_lines(histogram, width=4, height=2)
        ['  ██', '████']
    """
    blocks = _BLOCKS if unicode else _PLAIN_BLOCKS
    parts = len(blocks) - 1
    columns = _columns(histogram, width)
    tallest = max(columns, default=0) or 1
    # A bar that stands for anything at all is seen.
    levels = [max(round(count / tallest * height * parts), 1 if count else 0) for count in columns]
    return [
        "".join(blocks[min(max(level - line * parts, 0), parts)] for level in levels)
        for line in reversed(range(height))
    ]


def _columns(histogram: Histogram, width: int) -> list[int]:
    """Return the largest count of the bins that each column of a chart meets."""
    position = math.log if histogram.scale == "log" else float
    places = [position(edge) for edge in histogram.edges]
    low, span = places[0], places[-1] - places[0]
    columns = [0] * width
    for count, start, stop in zip(histogram.counts, places[:-1], places[1:], strict=True):
        first = round((start - low) / span * width)
        last = max(first + 1, round((stop - low) / span * width))
        for column in range(min(first, width - 1), min(last, width)):
            columns[column] = max(columns[column], count)
    return columns


def _share(part: int, whole: int) -> str:
    share = part / whole if whole else 0.0
    return f"{share:.0%}" if share in (0.0, 1.0) or share >= 0.1 else f"{share:.1%}"


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _number(value: float, digits: int = 3) -> str:
    """Return about so many digits.

    Example:
        >>> _number(0.0), _number(1234567.0), _number(0.58129), _number(3.1e-7)
        ('0', '1,234,567', '0.581', '3.1e-07')
    """
    if value == 0.0:
        return "0"
    if value >= 1000.0 and value < 1e9:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"
