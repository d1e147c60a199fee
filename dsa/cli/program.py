"""The command line: thin layers over the package's functions.

argparse and not a library for command lines, because `dsa --help` and a mistyped option then answer at once;
and only the command that is asked for is imported. Exit codes: 0 done; 1 a negative result, such as damage or
a difference; 2 wrong usage, or an error; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import dsa
from dsa.cli.commands.wording import in_options
from dsa.errors import DSAError
from dsa.inspection.console import forgiving

__all__ = ["COMMANDS", "Command", "main"]

_INTERRUPTED: Final = 130
_BROKEN_PIPE: Final = 141
_WIDEST: Final = 110


class Command(NamedTuple):
    """A command.

    Args:
        module: Where its `add_arguments` and `run` are, and perhaps `DETAILS`.
        help: What it does, in a line.
        examples: Command lines that work.
        failure: The exit code of an error.
    """

    module: str
    help: str
    examples: tuple[str, ...]
    failure: int = 2


COMMANDS: Final = {
    "demo": Command(
        "dsa.cli.demo.command",
        "train hyperbolic embeddings of a hierarchy from a table on disk",
        ("dsa demo", "dsa demo --dim 2 --picture mammals.png"),
        failure=1,
    ),
    "bench": Command(
        "dsa.cli.bench.command",
        "measure this machine: torch SparseAdam, a naive memmap, and dsa, in one run",
        ("dsa bench", "dsa bench --quick --only warm"),
        failure=1,
    ),
    "estimate": Command(
        "dsa.cli.commands.estimate",
        "tell what a table takes on disk, and how long its steps",
        ("dsa estimate 10_000_000 128", "dsa estimate 1e6 64 --second-moment row --no-measure"),
    ),
    "inspect": Command(
        "dsa.cli.commands.inspect",
        "describe a state directory or a checkpoint in numbers and histograms",
        ("dsa inspect run", "dsa inspect checkpoints/step-20 --json"),
    ),
    "verify": Command(
        "dsa.cli.commands.verify",
        "find out whether a state directory or a checkpoint is whole",
        ("dsa verify checkpoints/step-20", "dsa verify run"),
    ),
    "repair": Command(
        "dsa.cli.commands.repair",
        "make a state directory that is damaged usable again, and list what was lost",
        ("dsa repair run --dry-run", "dsa repair run"),
    ),
    "export": Command(
        "dsa.cli.commands.export",
        "write a checkpoint of a state directory, or its weights",
        (
            "dsa export run checkpoints/step-40",
            "dsa export run checkpoints/step-40-changes --base checkpoints/step-20",
            "dsa export run entity.safetensors --weights",
        ),
    ),
    "import": Command(
        "dsa.cli.commands.import_",
        "make a state directory from a checkpoint",
        ("dsa import checkpoints/step-20 restored",),
    ),
    "copy": Command(
        "dsa.cli.commands.copy",
        "copy a checkpoint between directories and stores, verified",
        (
            "dsa copy checkpoints/step-20 /media/backup/step-20",
            "dsa copy checkpoints/step-20 s3://bucket/step-20 --target-storage-option "
            "endpoint_url=http://localhost:9000",
        ),
    ),
    "diff": Command(
        "dsa.cli.commands.diff",
        "tell where two states or checkpoints differ",
        ("dsa diff run restored", "dsa diff run checkpoints/step-20"),
    ),
    "migrate": Command(
        "dsa.cli.commands.migrate",
        "bring state of release 0.1, 0.2 or 0.3 into the form of this one",
        ("dsa migrate old-run new-run", "dsa migrate older-run new --shape emb=1000x16 --k 1.0"),
    ),
    "flatten": Command(
        "dsa.cli.commands.flatten",
        "make a full checkpoint of a differential one and its base",
        ("dsa flatten checkpoints/step-30-changes checkpoints/step-30",),
    ),
}
"""By name, in the order in which help lists them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the return value is the process's exit code.

    Args:
        arguments: The command line without the program's name; `sys.argv` when None.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    with forgiving(sys.stdout, sys.stderr):
        return _main(given)


def _main(given: list[str]) -> int:
    name = _chosen(given)
    prefix = "dsa" if name is None else f"dsa {name}"
    try:
        parsed = _parser(name).parse_args(given)
        with _warnings_as_lines(prefix):
            return _run(COMMANDS[parsed.command], prefix, parsed)
    except KeyboardInterrupt:
        print(f"{prefix}: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _run(command: Command, prefix: str, parsed: argparse.Namespace) -> int:
    try:
        code = int(parsed.run(parsed))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever reads has had enough; what is still in the buffer is not to fail again when Python ends.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except (DSAError, OSError, ValueError, ImportError) as error:
        print(f"{prefix}: {in_options(str(error))}", file=sys.stderr)
    except Exception as error:
        if not _is_of_a_store(error, parsed):
            raise
        print(f"{prefix}: {type(error).__name__}: {in_options(str(error))}", file=sys.stderr)
    return command.failure


def _is_of_a_store(error: Exception, parsed: argparse.Namespace) -> bool:
    """Tell whether a library beneath fsspec raised an error of its own: no credentials, no connection."""
    if not any("://" in str(value) for value in vars(parsed).values()):
        return False
    return type(error).__module__.partition(".")[0] not in ("builtins", "dsa", "numpy", "numba", "torch")


@contextlib.contextmanager
def _warnings_as_lines(prefix: str) -> Iterator[None]:
    def show(message: Warning | str, *_: Any, **__: Any) -> None:  # noqa: ANN401 - what `warnings` hands over
        print(f"{prefix}: warning: {in_options(str(message))}", file=sys.stderr)

    with warnings.catch_warnings():
        shown: Callable[..., None] = show
        warnings.showwarning = shown
        yield


def _chosen(arguments: Sequence[str]) -> str | None:
    """Return the command that is asked for: no option before it takes a value."""
    first = next((each for each in arguments if not each.startswith("-")), None)
    return first if first in COMMANDS else None


def _parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """Return the parser, with the options of one command."""
    parser = argparse.ArgumentParser(
        prog="dsa",
        description=dsa.__doc__,
        epilog="dsa COMMAND --help explains a command and shows examples. Exit codes: 0 done, 1 damaged or "
        "different, 2 an error, 130 interrupted.",
        formatter_class=_Formatter,
    )
    parser.add_argument("--version", action="version", version=f"dsa {dsa.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for name, command in COMMANDS.items():
        added = commands.add_parser(name, help=command.help, formatter_class=_Formatter)
        if name == chosen:
            module = importlib.import_module(command.module)
            details = getattr(module, "DETAILS", "")
            added.description = f"{command.help}\n\n{details}".rstrip()
            added.epilog = "\n  ".join(["examples:", *command.examples])
            module.add_arguments(added)
            added.set_defaults(run=module.run)
    return parser


class _Formatter(argparse.HelpFormatter):
    """Wraps each paragraph of a description for itself, and leaves lines that are indented as they are."""

    def __init__(self, prog: str) -> None:
        width = min(_WIDEST, argparse.HelpFormatter(prog)._width)
        super().__init__(prog, max_help_position=28, width=width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.split("\n\n")
        return "\n\n".join(
            indent + part if "\n  " in part else super(_Formatter, self)._fill_text(part, width, indent)
            for part in paragraphs
        )


if __name__ == "__main__":
    sys.exit(main())
