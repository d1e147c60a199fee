"""``dsa flatten``."""

from __future__ import annotations

import argparse

from dsa.cli.commands.options import (
    add_base,
    add_compression,
    add_overwrite,
    add_work,
    export_options,
    storage_options,
)
from dsa.cli.commands.output import print_checkpoint
from dsa.cli.commands.progress import shown_progress

__all__ = ["DETAILS", "add_arguments", "run"]

DETAILS = """\
Both are verified block by block while they are read.

JSON: url, kind, global_step, content_root, tables, stored_bytes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("delta", metavar="DELTA", help="the differential checkpoint")
    parser.add_argument("target", metavar="DST", help="where the full checkpoint goes")
    add_base(parser, "the full one it is relative to, if it isn't beside it")
    add_compression(parser)
    add_overwrite(parser)
    add_work(parser, "all three")


def run(arguments: argparse.Namespace) -> int:
    """Flatten, and print what was written.

    Raises:
        DSAError, ValueError, OSError: the message says why.
    """
    from dsa.checkpoint import flatten_checkpoint

    with shown_progress(arguments) as progress:
        options = export_options(arguments, progress)
        url = flatten_checkpoint(arguments.delta, arguments.target, base=arguments.base, **options)
    print_checkpoint(url, arguments.json, storage_options(arguments))
    return 0
