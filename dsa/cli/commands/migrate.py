"""``dsa migrate``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from dsa.cli.commands.options import add_storage, add_work, storage_choice
from dsa.cli.commands.output import print_state
from dsa.cli.commands.progress import shown_progress

__all__ = ["DETAILS", "add_arguments", "run"]

DETAILS = """\
Of release 0.3.0 everything is kept, of 0.1.0 and 0.2.0 the weights. Without DST a directory is migrated in
place, and its old files are moved into a folder beside the new ones; a checkpoint always needs DST.

JSON: directory, global_step, tables."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("source", metavar="SRC", help="a state directory, or a checkpoint of release 0.3.0")
    parser.add_argument("directory", metavar="DST", nargs="?", help="a new state directory")
    parser.add_argument(
        "--shape",
        type=_shape,
        action="append",
        metavar="NAME=ROWSxDIM",
        help="of each table, where the release did not record it (0.1.0); may be repeated",
    )
    parser.add_argument(
        "--k",
        type=_curvature,
        action="append",
        metavar="K or NAME=K",
        help="curvature magnitude, where the release did not record it (0.1.0, most of 0.2.0); 0 is flat; "
        "may be repeated",
    )
    add_storage(parser)
    add_work(parser, store=None)


def run(arguments: argparse.Namespace) -> int:
    """Migrate, and print what the directory holds.

    Raises:
        DSAError, ValueError, OSError: the message says why.
    """
    from dsa.checkpoint.transfer import migrate

    storage = storage_choice(arguments)
    with shown_progress(arguments) as progress:
        migrate(
            arguments.source,
            arguments.directory,
            shapes=dict(arguments.shape) if arguments.shape else None,
            k=_curvatures(arguments.k or []),
            storage=storage,
            progress=False if arguments.directory is None else progress,
        )
    print_state(arguments.directory or arguments.source, arguments.json, storage.backend)
    return 0


def _shape(text: str) -> tuple[str, tuple[int, int]]:
    found = re.fullmatch(r"(.+)=([0-9_]+)x([0-9_]+)", text, re.DOTALL)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: write NAME=ROWSxDIM, such as emb=1000x16")
    return found[1], (int(found[2]), int(found[3]))


def _curvature(text: str) -> tuple[str | None, float]:
    name, _, number = text.rpartition("=")
    try:
        return name or None, float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no curvature: write K or NAME=K") from None


def _curvatures(given: Sequence[tuple[str | None, float]]) -> float | dict[str, float] | None:
    named = {name: k for name, k in given if name is not None}
    alone = [k for name, k in given if name is None]
    if len(alone) > 1 or (alone and named):
        raise ValueError(f"--k is given {len(given)} times: give one K for all tables, or NAME=K for each")
    return alone[0] if alone else named or None
