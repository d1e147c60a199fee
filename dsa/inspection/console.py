"""Printing to a console that can't show everything."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

__all__ = ["forgiving"]


@contextmanager
def forgiving(*streams: TextIO | None) -> Iterator[None]:
    r"""Replace what some streams can't show by question marks, instead of an error, for the time of a block.

    Args:
        *streams: Standard output, say; one that is None or has no encoding of its own is left alone.

    Example:
        >>> import io
        >>> console = io.TextIOWrapper(io.BytesIO(), "cp1252")
        >>> with forgiving(console):
        ...     print("词: é", file=console, flush=True)
        >>> console.buffer.getvalue()
        b'?: \xe9\n'
    """
    strict = [each for each in streams if isinstance(each, io.TextIOWrapper) and each.errors == "strict"]
    for stream in strict:
        stream.reconfigure(errors="replace")
    try:
        yield
    finally:
        for stream in strict:
            if not stream.closed:
                stream.reconfigure(errors="strict")
