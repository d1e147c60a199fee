"""Messages of the package in the command line's words: its options for the arguments of functions."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["in_options"]

_WORDS: Final = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"\boverwrite=True\b", "--overwrite"),
        (r"\bpass base= with\b", "pass --base with"),
        (r"\bleave base= out\b", "leave --base out"),
        (r"\bcompression='zstd'", "--compression zstd"),
        (r"\ballocate='sparse'", "--allocate sparse"),
        (r"\bshapes=\{'(.+?)': \(rows, dim\)\}", r"--shape \1=ROWSxDIM"),
        (r"\bsay the k of that training\b", "pass the k of that training as --k"),
        (
            r"\bdsa\.(?:flatten|import|export|copy)_checkpoint\b",
            lambda found: f"dsa {found[0][4:].partition('_')[0]}",
        ),
        (r"\bdsa\.migrate\b", "dsa migrate"),
    )
)


def in_options(message: str) -> str:
    """Return a message on one line, with the options that stand for arguments.

    Example:
        >>> in_options("it exists: choose another directory or pass overwrite=True")
        'it exists: choose another directory or pass --overwrite'
    """
    line = " ".join(message.split())
    for pattern, words in _WORDS:
        line = pattern.sub(words, line)
    return line
