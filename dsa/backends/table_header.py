"""The header page of a memmap table's file: what the file is, by which others are told apart from it.

It repeats the description of the table as it was made, and never changes: a table that has grown has more
rows than its header says.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any, Final

from dsa.backends import system
from dsa.backends.base import GROWING
from dsa.errors import StateCorruptError

__all__ = ["check_file", "header_page"]

_MAGIC: Final = b"dsa-table-2\n"
_FORMER_MAGIC: Final = b"dsa-table-1\n"


def header_page(header: dict[str, Any]) -> bytes:
    """Return the page that says what a table is.

    Raises:
        ValueError: the header does not fit into a page.
    """
    text = json.dumps(header, sort_keys=True).encode()
    page = _MAGIC + f"{zlib.crc32(text):08x}\n".encode() + text + b"\n"
    if len(page) > system.PAGE:
        raise ValueError(
            f"the header takes {len(page)} of {system.PAGE} bytes: use fewer fields or shorter names"
        )
    return page.ljust(system.PAGE, b"\0")


def check_file(file: int, path: Path, description: dict[str, Any]) -> None:
    """Check that an open file is whole and the one described.

    Raises:
        StateCorruptError: it is not.
    """
    os.lseek(file, 0, os.SEEK_SET)
    page = os.read(file, system.PAGE)
    if page.startswith(_FORMER_MAGIC):
        raise StateCorruptError(
            f"the table file {str(path)!r} is of version 1, which this release can't read (it reads version "
            "2, whose records have checksums): start over, or import a checkpoint"
        )
    header = {key: value for key, value in description.items() if key != GROWING}
    if page != header_page({**header, "rows": _rows_in(page, description.get("rows"))}):
        what = "another table's" if page.startswith(_MAGIC) else "not one of dsa's"
        raise StateCorruptError(
            f"the header of the table file {str(path)!r} is damaged or {what}: restore the file from a copy, "
            "or start over"
        )
    # The description is what `create` wrote, so that its values need no further check.
    expected = system.PAGE + description["rows"] * description["stride"]
    size = os.fstat(file).st_size
    more = size - expected
    if more < 0 or (more > 0 and not description.get(GROWING)) or more % description["stride"]:
        what = "truncated" if size < expected else "longer than it was made"
        raise StateCorruptError(
            f"the table file {str(path)!r} is {what}: {size:,} bytes instead of {expected:,}; restore it "
            "from a copy, or start over"
        )


def _rows_in(page: bytes, rows: object) -> object:
    """Return how many rows a page says that a table was made with, if it may have grown to `rows`."""
    try:
        made = json.loads(page.split(b"\n")[2])["rows"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return rows
    return made if type(made) is type(rows) is int and 1 <= made <= rows else rows
