"""What is already at a place or around it: no export may damage a state, a checkpoint, or a user's files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from dsa.checkpoint.manifest import FORMAT, ROOT
from dsa.errors import CheckpointExistsError
from dsa.shards.documents import DOCUMENT

__all__ = [
    "STATE_FILE",
    "check_inside_nothing",
    "check_replaceable",
    "foreign_entry",
    "is_committed",
    "root_attribute",
]

STATE_FILE: Final = "dsa.json"
_LARGEST_DOCUMENT: Final = 64 << 20
_JUNK: Final = (".DS_Store", "Thumbs.db", "desktop.ini")


def root_attribute(document: bytes) -> dict[str, Any] | None:
    """Return the attribute ``dsa`` of a root's document, or None when it is no checkpoint's."""
    try:
        found = json.loads(document)["attributes"][ROOT]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("format") == FORMAT else None


def is_committed(directory: Path) -> bool:
    """Tell whether a directory is a checkpoint by its root."""
    attribute = _root_of(directory)
    return attribute is not None and attribute.get("complete") is True


def _root_of(directory: Path) -> dict[str, Any] | None:
    try:
        path = directory / DOCUMENT
        return root_attribute(path.read_bytes()) if path.stat().st_size <= _LARGEST_DOCUMENT else None
    except OSError:
        return None


def check_inside_nothing(path: Path) -> None:
    """Refuse a place inside a state directory or another checkpoint, or the state directory itself.

    Raises:
        CheckpointExistsError: it is one.
    """
    if (path / STATE_FILE).exists():
        raise CheckpointExistsError(
            f"{str(path)!r} is a state directory: export to a directory outside of it"
        )
    for parent in path.parents:
        if (parent / STATE_FILE).exists():
            raise CheckpointExistsError(
                f"{str(path)!r} lies inside the state directory {str(parent)!r}: export to a directory "
                "outside of it"
            )
        if _root_of(parent) is not None:
            raise CheckpointExistsError(
                f"{str(path)!r} lies inside the checkpoint {str(parent)!r}: export beside it, a checkpoint "
                "never changes"
            )


def check_replaceable(path: Path, overwrite: bool) -> None:
    """Refuse to replace what is at a place unless it is a checkpoint, nothing but that, and it was asked for.

    Raises:
        CheckpointExistsError: it may not be replaced.
    """
    attribute = _root_of(path) if path.is_dir() else None
    if attribute is None:
        raise CheckpointExistsError(
            f"{str(path)!r} exists and is no checkpoint of dsa: choose another directory, or delete it "
            "yourself; not even overwrite=True replaces it"
        )
    if not overwrite:
        raise CheckpointExistsError(
            f"{str(path)!r} already holds the checkpoint of step {attribute.get('global_step')!r}: choose "
            "another directory or pass overwrite=True"
        )
    foreign = foreign_entry(attribute, {each.name for each in path.iterdir()})
    if foreign is not None:
        raise CheckpointExistsError(
            f"{str(path)!r} holds {foreign!r}, which is not part of the checkpoint and would be deleted with "
            "it: move it away first"
        )


def foreign_entry(attribute: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Return the first of some names that a checkpoint doesn't have at its top, or None.

    Args:
        attribute: See `root_attribute`.
        names: What is there.
    """
    tables = attribute.get("tables")
    listed = tables if isinstance(tables, list) else []
    groups = {str(each.get("group")) for each in listed if isinstance(each, dict)}
    return min(set(names) - {DOCUMENT, *groups, *_JUNK}, default=None)
