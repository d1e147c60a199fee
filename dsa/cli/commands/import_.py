"""``dsa import``."""

from __future__ import annotations

import argparse

from dsa.cli.commands.options import add_base, add_storage, add_work, storage_choice, storage_options
from dsa.cli.commands.output import print_state
from dsa.cli.commands.progress import shown_progress

__all__ = ["DETAILS", "add_arguments", "run"]

DETAILS = """\
Every block is compared with its checksum before a row of it is used. Training goes on from there as if it
had never stopped, when the optimizer is built with resume=True and the options it had.

JSON: directory, global_step, tables."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("url", metavar="URL", help="the checkpoint: a directory, or a URL of fsspec")
    parser.add_argument(
        "state_dir", metavar="STATE_DIR", help="the new state directory: absent, empty, or without tables"
    )
    add_base(parser)
    add_storage(parser)
    add_work(parser)


def run(arguments: argparse.Namespace) -> int:
    """Import, and print what the directory holds.

    Raises:
        DSAError, ValueError, OSError: the message says why.
    """
    from dsa.checkpoint.transfer import restore

    storage = storage_choice(arguments)
    with shown_progress(arguments) as progress:
        restore(
            arguments.url,
            arguments.state_dir,
            base=arguments.base,
            storage=storage,
            progress=progress,
            storage_options=storage_options(arguments),
        )
    print_state(arguments.state_dir, arguments.json, storage.backend)
    return 0
