"""More rows for a live Zarr table: new shards and documents, while what is there stays where it is.

The shards come first, then the documents of the arrays, and that of the group last, each replaced as a whole.
What an interrupted growth has left, shards and longer shapes, goes when the table is opened, or closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from dsa.backends import system
from dsa.backends.shards.layout import ArrayLayout
from dsa.backends.zarr_group import (
    MOST_MAPPED,
    array_layouts,
    checksum_layouts,
    describe_group,
    shard_files,
    write_group,
)
from dsa.schema import Schema

__all__ = ["all_layouts", "extend_group", "remove_rest", "shorten_group"]

_FEWEST_SHARDS: Final = 16


class _Growing(Protocol):
    def extend(self, layout: ArrayLayout) -> None: ...

    def shorten(self, layout: ArrayLayout) -> None: ...


def all_layouts(description: dict[str, Any]) -> list[ArrayLayout]:
    """Return how the arrays of a table are cut, checksums last."""
    return array_layouts(description) + checksum_layouts(description)


def extend_group(
    path: Path, description: dict[str, Any], rows: int, arrays: Sequence[_Growing]
) -> dict[str, Any] | None:
    """Make the shards that a table with more rows has more, and tell the documents.

    A table that was made with few rows has small shards: with many it would have far too many files. It is
    to be made anew then.

    Args:
        path: The table's directory.
        description: What there is room for.
        rows: What there is to be room for.
        arrays: The table's, in the order of `all_layouts`.

    Returns:
        The description with so many rows, or None if that won't do and nothing has changed.

    Raises:
        DiskSpaceError: there is not enough room.
        OSError: the system refuses.
    """
    grown = {**description, "rows": rows}
    schema = Schema.from_json(description["schema"])
    anew = describe_group(rows, schema, description["compression"], description["shard_bytes"])
    if _files_of(grown) > max(MOST_MAPPED, _FEWEST_SHARDS * len(arrays), 2 * _files_of(anew)):
        return None
    for array, layout in zip(arrays, all_layouts(grown), strict=True):
        array.extend(layout)  # what some of them have more than others is nobody's
    write_group(path, grown, system.write_atomically)
    return grown


def shorten_group(path: Path, description: dict[str, Any], arrays: Sequence[_Growing]) -> None:
    """Let go of everything that a table has more than its description says."""
    for array, layout in zip(arrays, all_layouts(description), strict=True):
        array.shorten(layout)
    write_group(path, description, system.write_atomically)


def remove_rest(path: Path, layout: ArrayLayout) -> None:
    """Remove the files of shards behind those of an array."""
    known = set(shard_files(path, layout))
    folder = path / layout.spec.name / "c"
    found = folder.glob("*" if layout.spec.columns is None else "*/0")
    for file in [each for each in found if each not in known]:
        system.retried(file.unlink, True)


def _files_of(description: dict[str, Any]) -> int:
    return sum(layout.shards for layout in all_layouts(description))
