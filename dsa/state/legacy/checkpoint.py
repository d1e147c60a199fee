"""Checkpoints of release 0.3.0: a manifest, and files that are checked against it before anything is read."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Final, NamedTuple, final

from dsa.errors import StateCorruptError, StateMismatchError
from dsa.state.content import StateContent, TableContent
from dsa.state.legacy.documents import Document, brief, read_document
from dsa.state.legacy.files import (
    FIELDS,
    MANIFEST_NAME,
    META_SUFFIX,
    Files,
    Shape,
    regular_size,
    split_data_name,
    table_content,
    take_inventory,
)
from dsa.state.legacy.given import Shapes, match_shape, require_shape, table_order

__all__ = ["is_manifest", "names_absolute_data", "old_checkpoint", "read_checkpoint"]

_TABLES: Final = ("params", "parameters", "tables")
_NAME_KEYS: Final = ("file", "path", "name")
_VERSION: Final = 2
_SHA256: Final = re.compile("[0-9a-fA-F]{64}")


class _Entry(NamedTuple):
    """What a manifest states about a file."""

    size: int
    sha256: str


@final
@dataclass(frozen=True, slots=True)
class _Whole:
    """What all tables of a checkpoint have in common."""

    manifest: Document
    listed: Mapping[str, _Entry]
    shapes: Shapes | None
    step: int
    k: float

    @property
    def path(self) -> Path:
        return self.manifest.path.parent


def read_checkpoint(path: Path, shapes: Shapes | None, *, verify: bool) -> StateContent:
    """Read a checkpoint of release 0.3.0.

    Args:
        path: The directory.
        shapes: What the caller expects, or None.
        verify: Compare SHA-256 sums; sizes are compared anyway.
    """
    manifest = read_document(path / MANIFEST_NAME)
    manifest.require_version(_VERSION, None)
    step, k = manifest.count("global_step", "step"), manifest.curvature()
    if step is None:
        raise manifest.lacking("global_step", "step")
    if k is None:
        raise manifest.lacking("curvature", "k")
    entries = _entries(manifest)
    _refuse_others(path, entries)
    for name, entry in entries.items():
        _check_file(path / name, entry, verify)
    stored = _by_table(path, entries)
    declared = _declared(manifest, stored)
    whole = _Whole(manifest, entries, shapes, step, k)
    order = table_order(path, stored, shapes)
    return StateContent(tuple(_table(whole, name, stored[name], declared.get(name)) for name in order), step)


def is_manifest(file: Path) -> bool:
    """Tell whether a file lists tables, or files with checksums."""
    try:
        document = read_document(file)
    except StateCorruptError:
        return False
    return document.value(*_TABLES) is not None or any(True for _ in _objects_with_a_sum(document))


def old_checkpoint(manifest: Path) -> StateMismatchError:
    """Return the error for a checkpoint of release 0.2.0."""
    return StateMismatchError(
        f"{str(manifest)!r} is a checkpoint of release 0.2.0, which names its files by absolute paths and is "
        "not read: open the state directory that they lie in with resume=True in its place, or "
        "export that state anew and pass the directory of the new checkpoint"
    )


def names_absolute_data(document: Document) -> bool:
    """Tell whether a data file's absolute path stands anywhere in a document."""
    waiting: list[Any] = [document.values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str) and value.endswith(".dat") and _is_absolute(value):
            return True
    return False


def _is_absolute(name: str) -> bool:
    return PurePosixPath(name).is_absolute() or PureWindowsPath(name).is_absolute()


def _entries(manifest: Document) -> dict[str, _Entry]:
    found: dict[str, _Entry] = {}
    for key, entry in _objects_with_a_sum(manifest):
        name = entry.value(*_NAME_KEYS) or key
        if not isinstance(name, str) or not _is_plain(name):
            raise StateCorruptError(
                f"{manifest.name} lists the file {brief(name)}, which is not a plain name inside the "
                "directory: nothing outside is read; restore the manifest from a copy"
            )
        stated = _entry(entry)
        if found.setdefault(name, stated) != stated:
            raise manifest.wrong(name, stated, f"{found[name]!r}, as elsewhere in it,")
    return found


def _entry(entry: Document) -> _Entry:
    size, digest = entry.count("size", "bytes"), entry.value("sha256")
    if size is None:
        raise entry.lacking("size", "bytes")
    if not isinstance(digest, str) or _SHA256.fullmatch(digest) is None:
        raise entry.wrong("sha256", digest, "a sum of 64 hexadecimal digits")
    return _Entry(size, digest.lower())


def _objects_with_a_sum(manifest: Document) -> Iterator[tuple[str | None, Document]]:
    """Yield every object with a checksum, and the key that it stands under unless that is in a list."""
    waiting: list[tuple[str | None, Any]] = [(None, manifest.values)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, list):
            waiting += [(None, item) for item in reversed(value)]
        elif isinstance(value, dict):
            if "sha256" in value:
                yield key, Document(manifest.path, value, f"the entry of file {brief(key)}")
            waiting += reversed(value.items())


def _is_plain(name: str) -> bool:
    if name in ("", ".", "..") or any(character in name for character in "/\\\0"):
        return False
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return Path(name).name == name


def _refuse_others(path: Path, entries: Mapping[str, _Entry]) -> None:
    """Refuse data that lies in the directory and is not the checkpoint's."""
    inventory = take_inventory(path)
    data = [file for files in inventory.data.values() for file in files.values()]
    overall = [] if inventory.overall is None else [inventory.overall]
    for file in (*data, *overall):
        if file.name not in entries:
            raise StateMismatchError(
                f"{str(file)!r} is not listed in {MANIFEST_NAME!r} with a 'sha256', as if another state lay "
                "in the same directory: move what is not the checkpoint's to another directory, or restore "
                "the manifest from a copy"
            )


def _check_file(file: Path, entry: _Entry, verify: bool) -> None:
    size = regular_size(file)
    if not file.resolve().is_relative_to(file.parent.resolve()):
        raise StateCorruptError(
            f"{str(file)!r} leads out of the checkpoint, and nothing outside is read: put a copy of the file "
            "there"
        )
    if size != entry.size:
        raise StateCorruptError(
            f"{str(file)!r} has {size:,} bytes instead of {entry.size:,}: restore it from a copy, or export "
            "anew"
        )
    if verify and (digest := _digest(file)) != entry.sha256:
        raise StateCorruptError(
            f"{str(file)!r} does not match its SHA-256 sum (it has {digest}): it was damaged or changed; "
            "restore it from a copy, or export anew"
        )


def _digest(file: Path) -> str:
    with open(file, "rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _by_table(path: Path, entries: Mapping[str, _Entry]) -> dict[str, dict[str, Path]]:
    stored: dict[str, dict[str, Path]] = {}
    for file_name in entries:
        if (place := split_data_name(file_name)) is not None:
            stored.setdefault(place[0], {})[place[1]] = path / file_name
    if not stored:
        raise StateCorruptError(
            f"{str(path / MANIFEST_NAME)!r} lists no data file ('<name>_w.dat' and so on, each with a "
            "'sha256'): restore it from a copy, or export anew"
        )
    return stored


def _declared(manifest: Document, stored: dict[str, dict[str, Path]]) -> dict[str, Document]:
    tables = manifest.value(*_TABLES)
    if tables is None:
        return {}
    values = manifest.part(tables, _TABLES[0]).values
    if set(values) != set(stored):
        raise StateCorruptError(
            f"{manifest.name} describes the tables {brief(sorted(values))} but lists files of "
            f"{brief(sorted(stored))}: restore it from a copy, or export anew"
        )
    return {name: manifest.part(value, f"table {name!r}") for name, value in values.items()}


def _table(whole: _Whole, name: str, stored: Files, declared: Document | None) -> TableContent:
    for key in FIELDS:
        if key not in stored:
            raise whole.manifest.lacking(f"{name}_{key}.dat")
    shape = _recorded_shape(whole, name, declared)
    if shape is None:
        shape = require_shape(whole.path, name, whole.shapes, regular_size(stored["w"]) // 4)
    match_shape(name, shape, whole.shapes)
    return table_content(name, stored, shape, k=whole.k, steps=whole.step)


def _recorded_shape(whole: _Whole, name: str, declared: Document | None) -> Shape | None:
    """Return the shape by the manifest or by a description beside it, once those agree with all else."""
    shape: Shape | None = None
    documents = [] if declared is None else [declared]
    if (file_name := f"{name}{META_SUFFIX}") in whole.listed:
        documents.append(read_document(whole.path / file_name))
    for document in documents:
        document.require_version(_VERSION, None)
        document.require_float32()
        own_k, own_shape = document.curvature(), document.shape()
        if own_k not in (None, whole.k):
            raise document.wrong("curvature", own_k, f"{whole.k!r}, that of the checkpoint,")
        if None not in (own_shape, shape) and own_shape != shape:
            raise document.wrong("shape", own_shape, f"{shape}, that of the manifest,")
        shape = shape or own_shape
    return shape
