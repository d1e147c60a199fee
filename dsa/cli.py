"""The command line: thin layers over the package's functions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import dsa
from dsa.bench import command as bench
from dsa.demo import command as demo
from dsa.errors import DSAError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the return value is the process's exit code.

    Args:
        arguments: The command line without the program's name; `sys.argv` when None.
    """
    parsed = _parser().parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except (DSAError, OSError, ValueError) as error:
        print(f"dsa {parsed.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dsa", description=dsa.__doc__)
    parser.add_argument("--version", action="version", version=f"dsa {dsa.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module, text in (
        ("demo", demo, "train hyperbolic embeddings of a hierarchy from a table on disk"),
        ("bench", bench, "measure this machine: torch SparseAdam, a naive memmap, and dsa, in one run"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
