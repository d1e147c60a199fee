"""Running the Python blocks of a Markdown page as its reader would: top to bottom, in one session.

A block of Python that is followed by a block of text prints exactly that text.
"""

import contextlib
import io
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block of a page, and whether only blank lines stand between it and the one before."""

    language: str
    text: str
    follows: bool


def fenced(page):
    """Return the fenced blocks of a page in their order."""
    found, end = [], 0
    for match in _FENCE.finditer(page):
        found.append(Block(match[1], match[2], not page[end : match.start()].strip()))
        end = match.end()
    return found


def blocks(page, language):
    """Return the texts of the blocks in a language."""
    return [block.text for block in fenced(page) if block.language == language]


def run(page, name):
    """Run the Python blocks of a page in the current directory and return everything they print.

    Args:
        page: The text of the page.
        name: Its name, for tracebacks.
    """
    namespace, printed, number = {}, [], 0
    every = fenced(page)
    for block, after in zip(every, [*every[1:], None], strict=True):
        if block.language == "python":
            number += 1
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(block.text, f"{name} block {number}", "exec"), namespace)
            printed.append(output.getvalue())
            if after is not None and after.language == "text" and after.follows:
                shown = f"{name}: block {number} prints\n{output.getvalue()}instead of\n{after.text}"
                assert output.getvalue() == after.text, shown
    return "".join(printed)
