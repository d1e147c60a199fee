"""A bar while a command works, which is gone when it prints its result."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["add_progress", "shown_progress"]

_DELAY: Final = 0.3


def add_progress(parser: argparse.ArgumentParser) -> None:
    """Add ``--progress`` and ``--no-progress``."""
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="show a bar, or none (shown where standard error is a terminal, if it takes a while)",
    )


@contextmanager
def shown_progress(arguments: argparse.Namespace) -> Iterator[bool | Callable[[int, int], None]]:
    """Yield what functions of the package take as `progress`: False, or a function that moves a bar.

    Args:
        arguments: With `add_progress`'s options.
    """
    if arguments.progress is False or (arguments.progress is None and not sys.stderr.isatty()):
        yield False
        return
    from tqdm import tqdm

    delay = 0.0 if arguments.progress else _DELAY
    with tqdm(desc=arguments.command, unit="B", unit_scale=True, leave=False, delay=delay) as bar:

        def report(done: int, total: int) -> None:
            begins, bar.total = bar.total is None, total
            bar.update(done - bar.n)
            if begins and not delay:
                bar.refresh()

        yield report
