"""``dsa copy``."""

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
The copy is read back and compared with the checksums, and appears as a whole at the end. A differential
checkpoint is copied without its base: copy that too.

JSON: url, kind, global_step, content_root, tables, stored_bytes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("source", metavar="SRC", help="the checkpoint: a directory, or a URL of fsspec")
    parser.add_argument("target", metavar="DST", help="a new directory or URL")
    add_overwrite(parser)
    add_storage_option(parser, what="SRC, and for DST unless that has its own")
    add_storage_option(parser, "--target-storage-option", "DST")
    add_progress(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Copy, and print what was written.

    Raises:
        DSAError, ValueError, OSError: the message says why.
    """
    from dsa.checkpoint import copy_checkpoint

    store = storage_options(arguments)
    target_store = storage_options(arguments, "target_storage_option") or store
    with shown_progress(arguments) as progress:
        url = copy_checkpoint(
            arguments.source,
            arguments.target,
            overwrite=arguments.overwrite,
            progress=progress,
            storage_options=store,
            target_storage_options=target_store,
        )
    print_checkpoint(url, arguments.json, target_store)
    return 0
