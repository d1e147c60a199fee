"""``dsa verify``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dsa.cli.commands.options import add_base, add_layout, add_work, named_layout, storage_options
from dsa.cli.commands.output import KINDS, print_json
from dsa.cli.commands.progress import shown_progress

if TYPE_CHECKING:
    from dsa.inspection.verification import Verification

__all__ = ["DETAILS", "add_arguments", "run"]

DETAILS = """\
A checkpoint: every block is compared with its checksum, and a differential one together with its base. A
state directory: description, headers and sizes of files, the journal, the checksum of every record, and
whether its values are some that training produces. What can't be found is a record that is whole and of an
earlier step than it should be. Nothing is changed, and a process may be training there.

Exit code: 0 whole, 1 damaged, 2 it can't be told.

JSON: ok, url, kind, global_step, tables, nbytes, problems, remarks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("url", metavar="PATH|URL", help="a state directory, or a checkpoint")
    add_base(parser)
    add_layout(parser)
    add_work(parser)


def run(arguments: argparse.Namespace) -> int:
    """Verify, and print what was found.

    Raises:
        DSAError, ValueError, OSError: the message says why.
    """
    from dsa.inspection.verification import verify

    with shown_progress(arguments) as progress:
        found = verify(
            arguments.url,
            base=arguments.base,
            progress=progress,
            storage_options=storage_options(arguments),
            backend=named_layout(arguments.backend),
        )
    print_json(found.to_json()) if arguments.json else print(_text(found))
    return 0 if found.ok else 1


def _text(found: Verification) -> str:
    from dsa.inspection.text import size

    if found.kind is None or found.global_step is None:
        head = f"{found.url}: DAMAGED"
    else:
        tables = f"{found.tables:,} table{'' if found.tables == 1 else 's'}"
        verdict = "whole" if found.ok else "DAMAGED"
        head = (
            f"{found.url}: {verdict}; {KINDS[found.kind]}, step {found.global_step:,}, {tables}, "
            f"{size(found.nbytes)} read"
        )
    return "\n".join(
        [head, *(f"  {each}" for each in found.problems), *(f"  note: {each}" for each in found.remarks)]
    )
