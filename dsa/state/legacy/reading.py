"""Which release wrote a directory, and its content."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from dsa.errors import StateCorruptError, StateNotFoundError
from dsa.state.content import StateContent
from dsa.state.legacy.checkpoint import is_manifest, names_absolute_data, old_checkpoint, read_checkpoint
from dsa.state.legacy.directory import read_first, read_second, read_third, recorded_version
from dsa.state.legacy.documents import read_document
from dsa.state.legacy.files import Inventory, take_inventory
from dsa.state.legacy.given import Curvatures, Shapes

__all__ = ["LegacyRelease", "find_legacy", "legacy_files", "read_legacy"]

LegacyRelease = Literal["0.1.0", "0.2.0", "0.3.0", "0.2.0 checkpoint", "0.3.0 checkpoint"]


def find_legacy(path: str | os.PathLike[str]) -> LegacyRelease | None:
    """Tell which older release wrote a directory, by the names of its files and by small descriptions.

    Data is not looked at, and damage is no error here: `read_legacy` names it.

    Args:
        path: A directory, or the single JSON file that a checkpoint of release 0.2.0 may be.

    Returns:
        The release, or None for a path at which no older release left anything.
    """
    place = Path(path)
    if place.is_file():
        return "0.2.0 checkpoint" if _is_old_manifest(place) else None
    return _release(take_inventory(place)) if place.is_dir() else None


def read_legacy(
    path: str | os.PathLike[str],
    shapes: Shapes | None = None,
    *,
    k: Curvatures | None = None,
    verify: bool = True,
) -> StateContent:
    """Return what a state directory or checkpoint of an older release holds.

    Every file is checked before this returns, but for the numbers in it: each pass over a table reads them
    block by block, and a pass raises `StateCorruptError` at the first row that is implausible. Let nothing
    write to the files meanwhile.

    Args:
        path: The directory.
        shapes: ``{name: (rows, dim)}`` of every table, in the order wanted. Release 0.1.0 did not record
            them, so that it needs them; where they are recorded, given ones must agree.
        k: Curvature magnitude, one for all tables or ``{name: k}``, for tables whose release did not record
            it: those of 0.1.0, and of 0.2.0 for the most part. A recorded one is kept.
        verify: Compare the SHA-256 sums of a checkpoint. A state directory has none.

    Raises:
        StateNotFoundError: no older release left anything there.
        StateCorruptError: a file is damaged, truncated, extended, missing or foreign.
        StateIncompleteError: the state was being replaced or migrated when its process ended, or its global
            description is missing.
        StateMismatchError: `shapes` or `k` is needed, or differs from what is stored; or two states are
            mixed; or it is a checkpoint of release 0.2.0.
    """
    place = Path(path)
    release = find_legacy(place)
    if release is None:
        raise StateNotFoundError(
            f"there is no state or checkpoint of an older release in {str(place)!r}: pass the directory of "
            "one"
        )
    if release == "0.2.0 checkpoint":
        raise old_checkpoint(place)
    if release == "0.3.0 checkpoint":
        return read_checkpoint(place, shapes, verify=verify)
    if release == "0.3.0":
        return read_third(place, shapes)
    return (read_first if release == "0.1.0" else read_second)(place, shapes, k)


def _is_old_manifest(file: Path) -> bool:
    if file.suffix != ".json":
        return False
    try:
        return names_absolute_data(read_document(file))
    except StateCorruptError:
        return False


def _release(inventory: Inventory) -> LegacyRelease | None:
    state = _state_release(inventory)
    manifest = inventory.manifest
    if manifest is None:
        return state
    if _is_old_manifest(manifest):
        # It holds no data of its own, so that the state in whose directory it was saved loses nothing.
        return state if state in ("0.2.0", "0.3.0") else "0.2.0 checkpoint"
    return "0.3.0 checkpoint" if _has_weights(inventory) or is_manifest(manifest) else state


def _state_release(inventory: Inventory) -> LegacyRelease | None:
    version = recorded_version(inventory)
    if version is not None:
        return "0.2.0" if version == 1 else "0.3.0"
    if inventory.overall is not None:
        return "0.3.0"
    if any(name in inventory.data for name in inventory.descriptions):
        return "0.2.0"
    return "0.1.0" if _has_weights(inventory) else None


def _has_weights(inventory: Inventory) -> bool:
    return any("w" in files for files in inventory.data.values())


def legacy_files(path: str | os.PathLike[str]) -> list[Path]:
    """Return the files of an older release's state in a directory."""
    inventory = take_inventory(Path(path))
    files = [file for fields in inventory.data.values() for file in fields.values()]
    files += [*inventory.descriptions.values(), *inventory.markers]
    files += [file for file in (inventory.overall, inventory.manifest) if file is not None]
    return sorted(files)
