"""The file of a table in a state directory: made, opened and removed by the kind of its backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dsa.backends.base import StateBackend
from dsa.backends.memmap import MemmapBackend, file_bytes
from dsa.metadata import owned_files, table_file_name
from dsa.schema import Schema
from dsa.storage import Storage

__all__ = ["make_backend", "open_backend", "remove_table_file", "sweep", "table_bytes"]


def table_bytes(rows: int, schema: Schema, storage: Storage) -> int:
    """Return the size of the file of a table."""
    return file_bytes(rows, schema, storage.stride)


def make_backend(file: Path, rows: int, schema: Schema, storage: Storage) -> StateBackend:
    """Make the file of a table, none of whose rows is written.

    Whatever an interrupted creation has left under that name goes: no description names it.

    Raises:
        DiskSpaceError: there is not enough room; nothing is left behind.
    """
    remove_table_file(file)
    return MemmapBackend.create(file, rows, schema, stride=storage.stride, allocate=storage.allocate)


def open_backend(directory: Path, name: str, stored: Mapping[str, Any]) -> StateBackend:
    """Open the file of a table.

    Args:
        directory: The state directory.
        name: The table's name.
        stored: Its description in the metadata.

    Raises:
        StateCorruptError: the file is missing, damaged, or another table's.
    """
    return MemmapBackend.open(
        directory / table_file_name(name, stored.get("generation", 0)), stored["backend"]
    )


def remove_table_file(file: Path) -> None:
    """Remove the file of a table, if it is there."""
    file.unlink(missing_ok=True)


def sweep(directory: Path, in_use: Iterable[tuple[str, int]]) -> None:
    """Remove what a replacement of whole tables has left: generations that are not in use.

    Args:
        directory: The state directory.
        in_use: Name and generation of each table.
    """
    current = {table_file_name(*each) for each in in_use}
    stems = {name.partition(".")[0] for name in current}
    for file in owned_files(directory):
        if file.name not in current and file.name.partition(".")[0] in stems:
            remove_table_file(file)
