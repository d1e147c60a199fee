"""What is already at a place or around it: no export may damage a state, a checkpoint, or a user's files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from dsa.backends.shards.documents import DOCUMENT
from dsa.checkpoint.manifest import FORMAT, ROOT
from dsa.errors import CheckpointExistsError

__all__ = [
    "STATE_FILE",
    "check_folder",
    "check_inside_nothing",
    "check_local",
    "check_replaceable",
    "is_committed",
    "is_part",
    "is_vacant",
    "root_attribute",
]

STATE_FILE: Final = "dsa.json"
_LARGEST_DOCUMENT: Final = 64 << 20
_JUNK: Final = (".DS_Store", "Thumbs.db", "ehthumbs.db", "desktop.ini", ".directory", ".localized")
_JUNK_FOLDERS: Final = (
    ".ipynb_checkpoints",
    "__MACOSX",
    "@eaDir",
    ".Spotlight-V100",
    ".fseventsd",
    ".Trashes",
)
_COMPANION: Final = "._"
"""What macOS calls the second file that it writes beside one, where a file system can't hold all of it."""

_ARRAY_FILE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*/(?:zarr\.json|(?:c[/.])?\d+(?:[/.]\d+)*)")


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
    for folder in (path, *path.parents):
        own = folder == path
        is_checkpoint = not own and _root_of(folder) is not None
        check_folder(str(path), str(folder), own, (folder / STATE_FILE).exists(), is_checkpoint)


def check_folder(url: str, folder: str, own: bool, is_state: bool, is_checkpoint: bool) -> None:
    """Refuse a place whose own folder, or one of those above, belongs to a state or to a checkpoint.

    Args:
        url: The place.
        folder: The folder.
        own: Whether it is the place's own.
        is_state: Whether it is a state directory.
        is_checkpoint: Whether it is one above, and a checkpoint.

    Raises:
        CheckpointExistsError: it belongs to one.
    """
    if is_state:
        raise CheckpointExistsError(
            f"{url!r} {'is' if own else 'lies inside'} the state directory {folder!r}: export to a directory "
            "outside of it"
        )
    if is_checkpoint:
        raise CheckpointExistsError(
            f"{url!r} lies inside the checkpoint {folder!r}: export beside it, a checkpoint never changes"
        )


def check_local(path: Path, overwrite: bool) -> None:
    """Refuse to replace what is at a path of this machine; see `check_replaceable`."""
    attribute = _root_of(path) if path.is_dir() else None
    what = f"the checkpoint of step {(attribute or {}).get('global_step')!r}"
    check_replaceable(str(path), attribute, lambda: _files(path), what, overwrite)


def check_replaceable(
    url: str,
    attribute: Mapping[str, Any] | None,
    files: Callable[[], Iterable[str]],
    what: str,
    overwrite: bool,
) -> None:
    """Refuse to replace what is at a place unless it is a checkpoint, nothing but that, and it was asked for.

    Args:
        url: The place.
        attribute: See `root_attribute`; None where there is no checkpoint.
        files: Returns the keys of what is there.
        what: What a message calls it.
        overwrite: Whether it was asked for.

    Raises:
        CheckpointExistsError: it may not be replaced.
    """
    if attribute is None:
        raise CheckpointExistsError(
            f"{url!r} exists and is no checkpoint of dsa: choose another place, or delete it yourself; not "
            "even overwrite=True replaces it"
        )
    if not overwrite:
        raise CheckpointExistsError(
            f"{url!r} already holds {what}: choose another place or pass overwrite=True"
        )
    foreign = _foreign_entry(attribute, set(files()))
    if foreign is not None:
        raise CheckpointExistsError(
            f"{url!r} holds {foreign!r}, which is not part of the checkpoint and would be deleted with it: "
            "move it away first"
        )


def is_vacant(path: Path) -> bool:
    """Tell whether a directory holds nothing, or nothing but what systems and viewers leave everywhere."""
    files = set(_files(path))
    return all(_is_junk(key, files) for key in files)


def _files(path: Path) -> Iterator[str]:
    """Yield the files below a directory as keys; a link is one, wherever it leads."""
    for folder, folders, names in os.walk(path):
        base = Path(folder).relative_to(path).as_posix()
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        yield from (name if base == "." else f"{base}/{name}" for name in (*names, *links))


def _foreign_entry(attribute: Mapping[str, Any], known: Collection[str]) -> str | None:
    """Return the first of some files that is neither a part of a checkpoint nor junk, or None."""
    tables = attribute.get("tables")
    listed = tables if isinstance(tables, list) else []
    groups = {str(each.get("group")) for each in listed if isinstance(each, dict)}
    others = (key for key in known if not is_part(key, groups) and not _is_junk(key, known))
    return min(others, default=None)


def is_part(key: str, groups: Collection[str]) -> bool:
    """Tell whether a file is one of a checkpoint's, by its name.

    Args:
        key: The file.
        groups: The checkpoint's tables.
    """
    group, slash, rest = key.partition("/")
    if not slash:
        return key == DOCUMENT
    return group in groups and (rest == DOCUMENT or _ARRAY_FILE.fullmatch(rest) is not None)


def _is_junk(key: str, files: Collection[str]) -> bool:
    """Tell whether a file was left by a system or a viewer, without anybody's data in it.

    A copy that Jupyter keeps of a notebook is somebody's work, and so is a file like ``._notes`` that goes
    with no other.
    """
    *folders, name = key.split("/")
    if name.endswith(".ipynb"):
        return False
    if name in _JUNK or any(folder in _JUNK_FOLDERS for folder in folders):
        return True
    if not name.startswith(_COMPANION):
        return False
    companion = "/".join([*folders, name.removeprefix(_COMPANION)])
    return companion in files or any(each.startswith(f"{companion}/") for each in files)
