"""`dsa bench`: the command."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dsa.cli.bench.report import render
from dsa.cli.bench.runs import measure
from dsa.cli.bench.settings import FULL, KINDS, QUICK, Settings, check_room
from dsa.state.directories import directory_argument

__all__ = ["add_arguments", "run", "settings_from"]

_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument("--rows", type=int, metavar="N", help=f"rows of the tables ({FULL.rows:,})")
    parser.add_argument("--dim", type=int, metavar="D", help=f"elements of a row ({FULL.dim})")
    parser.add_argument(
        "--batch", type=int, nargs="+", metavar="B", help=f"batch sizes ({_listed(FULL.batches)})"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help=f"time for measuring, preparations not counted ({FULL.seconds:g})",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of rows and gradients (0)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"small sizes ({QUICK.rows:,} x {QUICK.dim}, {QUICK.seconds:g} s): a first look",
    )
    parser.add_argument(
        "--only", nargs="+", choices=KINDS, metavar="GROUP", help=f"of {', '.join(KINDS)} (all)"
    )
    parser.add_argument(
        "--memory-limit",
        type=int,
        metavar="MIB",
        help="also take steps in a control group with this limit (Linux; needs the right to make one)",
    )
    parser.add_argument(
        "--dir",
        type=directory_argument,
        default=Path(),
        metavar="DIR",
        help="where a temporary folder with all files is made (the current directory, since the system's "
        "temporary one may be a RAM disk)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers there")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and return the exit code.

    Raises:
        ValueError: an option is out of range, or the run doesn't fit on this machine.
    """
    settings = settings_from(arguments)
    check_room(settings)
    _check_target(arguments.json)
    try:
        with tempfile.TemporaryDirectory(prefix="dsa-bench-", dir=settings.directory) as directory:
            results = measure(settings, Path(directory), _say)
    except KeyboardInterrupt:
        print("dsa bench: interrupted; its files were removed", file=sys.stderr)
        return _INTERRUPTED
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results.to_json(), indent=1) + "\n")
    print(render(results))
    return 0


def settings_from(arguments: argparse.Namespace) -> Settings:
    """Return the settings that the options ask for.

    Raises:
        ValueError: an option is out of range.
    """
    limit = arguments.memory_limit
    if limit is not None and limit < 1:
        raise ValueError(f"memory_limit={limit!r} is out of range: pass MiB, at least 1")
    return (QUICK if arguments.quick else FULL).with_sizes(
        rows=arguments.rows,
        dim=arguments.dim,
        batches=None if arguments.batch is None else tuple(arguments.batch),
        seconds=arguments.seconds,
        seed=arguments.seed,
        kinds=None if arguments.only is None else tuple(arguments.only),
        directory=arguments.dir,
        memory_limit=None if limit is None else limit << 20,
    )


def _check_target(target: Path | None) -> None:
    if target is not None and (target.is_dir() or not target.parent.is_dir()):
        raise ValueError(
            f"{str(target)!r} can't be written: pass the name of a file in a directory that exists"
        )


def _listed(numbers: Sequence[int]) -> str:
    return " ".join(str(number) for number in numbers)


def _say(text: str) -> None:
    print(f"dsa bench: {text}", file=sys.stderr, flush=True)
