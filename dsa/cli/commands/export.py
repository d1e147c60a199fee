"""``dsa export``."""

from __future__ import annotations

import argparse

from dsa.cli.commands.options import (
    add_base,
    add_compression,
    add_layout,
    add_overwrite,
    add_work,
    export_options,
    named_layout,
    storage_options,
)
from dsa.cli.commands.output import print_checkpoint
from dsa.cli.commands.progress import shown_progress

__all__ = ["DETAILS", "add_arguments", "run"]

DETAILS = """\
Nobody may have the directory open: a program that trains exports itself, with export_checkpoint. The
checkpoint appears as a whole at the end, and is verified by every import. What it replaces stays until
then.

JSON: url, kind, global_step, content_root, tables, stored_bytes; of a file of weights url and kind."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("state_dir", metavar="STATE_DIR", help="the state directory")
    parser.add_argument(
        "url", metavar="URL", help="a new directory, or a URL of fsspec such as s3://bucket/run/step-100"
    )
    add_base(parser, "a full checkpoint of this state: write only the rows that changed since")
    parser.add_argument(
        "--weights",
        action="store_true",
        help="the weights alone: as Zarr, or as files if URL ends in .safetensors or {table}.parquet",
    )
    add_compression(parser)
    add_overwrite(parser)
    add_layout(parser)
    add_work(parser)


def run(arguments: argparse.Namespace) -> int:
    """Export, and print what was written.

    Raises:
        DSAError, ValueError, OSError: the message says why.
    """
    from dsa.checkpoint.transfer import export_directory, export_directory_weights

    if arguments.weights and arguments.base is not None:
        raise ValueError(
            f"--base {arguments.base} makes a differential checkpoint, which weights alone are not: leave "
            "out one of --base and --weights"
        )
    layout = named_layout(arguments.backend)
    with shown_progress(arguments) as progress:
        options = export_options(arguments, progress)
        if arguments.weights:
            url = export_directory_weights(arguments.state_dir, arguments.url, backend=layout, **options)
        else:
            url = export_directory(
                arguments.state_dir, arguments.url, base=arguments.base, backend=layout, **options
            )
    print_checkpoint(url, arguments.json, storage_options(arguments))
    return 0
