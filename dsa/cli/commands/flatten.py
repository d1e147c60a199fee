"""``dsa flatten``."""

from __future__ import annotations

import argparse

from dsa.cli.commands.options import (
    add_json,
    add_overwrite,
    add_storage_option,
    storage_options,
)
from dsa.cli.commands.output import print_checkpoint
from dsa.cli.commands.progress import add_progress, shown_progress

__all__ = ["DETAILS", "add_arguments", "run"]

DETAILS = """\
Both are verified block by block while they are read.

JSON: url, kind, global_step, content_root, tables, stored_bytes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("delta", metavar="DELTA", help="the differential checkpoint")
    parser.add_argument("target", metavar="DST", help="where the full checkpoint goes")
    parser.add_argument("--base", metavar="URL", help="the full one it is relative to, if it isn't beside it")
    parser.add_argument(
        "--compression",
        choices=("none", "zstd", "auto"),
        default="none",
        help="auto: all but weights of which less than half were ever written (none)",
    )
    add_overwrite(parser)
    add_storage_option(parser, what="all three")
    add_progress(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Flatten, and print what was written.

    Raises:
        DSAError, ValueError, OSError: the message says why.
    """
    from dsa.checkpoint import flatten_checkpoint

    store = storage_options(arguments.storage_option)
    with shown_progress(arguments) as progress:
        url = flatten_checkpoint(
            arguments.delta,
            arguments.target,
            base=arguments.base,
            overwrite=arguments.overwrite,
            compression=None if arguments.compression == "none" else arguments.compression,
            progress=progress,
            storage_options=store,
        )
    print_checkpoint(url, arguments.json, store)
    return 0
