"""``dsa repair``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from dsa.cli.commands.options import add_layout, add_work, named_layout
from dsa.cli.commands.output import print_json
from dsa.cli.commands.progress import shown_progress

if TYPE_CHECKING:
    from dsa.inspection.repairs import Repair, RepairedTable

__all__ = ["DETAILS", "add_arguments", "run"]

DETAILS = """\
For a copy that was made while a process had the state open, a lost or damaged journal, bits that the disk has
lost, a loss of power that cost steps, a device that refused to sync. What is whole is taken; rows that are
not are reset to their first weights, or to zero where no rule gives these, and listed in a file
dsa-repair-N.json in the directory. The result is a closed state. A state that is whole stays as it is.

The description, dsa.json, has to be readable, and the tables' files have to be of their length.

Exit code: 0 whole, 1 something was lost or reset, 2 an error.

JSON: whole, reset_rows, later_rows, directory, dry_run, problems, tables, durable_step, global_step,
newest_step, exports_forgotten, changed, report."""

_SHOWN: Final = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("directory", metavar="PATH", help="a state directory that no process has open")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and change nothing")
    add_layout(parser)
    add_work(parser, store=None)


def run(arguments: argparse.Namespace) -> int:
    """Repair, and print what was found.

    Raises:
        DSAError, ValueError, OSError: the message says why.
    """
    from dsa.inspection.repairs import repair

    with shown_progress(arguments) as progress:
        found = repair(
            arguments.directory,
            dry_run=arguments.dry_run,
            progress=progress,
            backend=named_layout(arguments.backend),
        )
    print_json(found.to_json()) if arguments.json else print(_text(found))
    return 0 if found.whole else 1


def _text(found: Repair) -> str:
    return "\n".join(f"{'' if number == 0 else '  '}{line}" for number, line in enumerate(_lines(found)))


def _lines(found: Repair) -> list[str]:
    if found.whole:
        lines = [f"{found.directory}: whole, step {found.global_step:,}"]
        if found.changed:
            lines.append("it would be marked as closed" if found.dry_run else "it is marked as closed")
        return lines
    lines = [f"{found.directory}: {'would be ' if found.dry_run else ''}repaired, step {found.global_step:,}"]
    lines += found.problems
    lines += [_about(table, found.dry_run) for table in found.tables if table.reset]
    if found.later_rows:
        lines.append(
            f"{found.later_rows:,} rows are of steps after {found.durable_step:,}, which others may lack"
        )
    if found.exports_forgotten:
        lines.append("the next checkpoint has to be a full one")
    if found.report is not None:
        lines.append(f"everything is listed in {found.report}")
    return lines


def _about(table: RepairedTable, dry_run: bool) -> str:
    rows = ", ".join(f"{row:,}" for row in table.reset[:_SHOWN])
    more = ", ..." if len(table.reset) > _SHOWN else ""
    done = "would be reset" if dry_run else "were reset"
    return f"table {table.name!r}: {len(table.reset):,} of {table.rows:,} rows {done}: {rows}{more}"
