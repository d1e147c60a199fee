"""The records of a table, opened for reading only, by the layout of its kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsa.backends.base import Layout, Source
from dsa.errors import StateCorruptError, StateError
from dsa.state.metadata import METADATA_NAME, table_file_name
from dsa.state.table_files import layout_for

__all__ = ["files_at", "open_source", "table_path"]


def table_path(directory: Path, stored: Mapping[str, Any]) -> Path:
    """Return where a table is: a file or a directory.

    Args:
        directory: The state directory.
        stored: The table's description in the metadata.
    """
    return directory / table_file_name(stored["name"], stored.get("generation", 0), stored["backend"]["kind"])


def files_at(path: Path) -> list[Path]:
    """Return what is on disk for a table at a path: the file, or the files of the directory."""
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


def open_source(directory: Path, stored: Mapping[str, Any], given: Layout | None = None) -> Source:
    """Open the records of a table.

    Args:
        directory: The state directory.
        stored: The table's description in the metadata.
        given: The layout of tables whose kind is not one of the package's.

    Raises:
        StateCorruptError: a file is missing, damaged or another table's.
        StateMismatchError: no layout of its kind is known.
    """
    try:
        return layout_for(stored, given).look(table_path(directory, stored), stored["backend"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, StateError):
            raise
        raise StateCorruptError(
            f"the description of table {stored['name']!r} in {str(directory)!r} can't be read ({error!r}): "
            f"restore {METADATA_NAME} from a copy"
        ) from error
