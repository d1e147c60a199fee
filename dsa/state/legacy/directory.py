"""State directories of releases 0.1.0, 0.2.0 and 0.3.0."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from dsa.errors import StateCorruptError, StateIncompleteError, StateMismatchError
from dsa.state.content import StateContent
from dsa.state.legacy.documents import Document, read_document
from dsa.state.legacy.files import (
    FIELDS,
    GLOBAL_NAME,
    META_SUFFIX,
    Files,
    Inventory,
    Shape,
    regular_size,
    table_content,
    take_inventory,
)
from dsa.state.legacy.given import (
    Curvatures,
    Shapes,
    match_shape,
    require_curvature,
    require_shape,
    table_order,
)

__all__ = ["read_first", "read_second", "read_third", "recorded_version"]

_FIRST_FIELDS: Final = ("w", "m", "v")


def recorded_version(inventory: Inventory) -> int | None:
    """Return the newest format version that the tables' descriptions state, or None.

    A description that can't be read is passed over: whoever reads the state will say what is wrong with it.
    """
    versions = [_peek(file) for name, file in inventory.descriptions.items() if name in inventory.data]
    return max((version for version in versions if version is not None), default=None)


def _peek(file: Path) -> int | None:
    try:
        return read_document(file).version()
    except StateCorruptError:
        return None


def read_first(path: Path, shapes: Shapes | None, k: Curvatures | None) -> StateContent:
    """Read a directory of release 0.1.0."""
    inventory = _checked_inventory(path)
    tables = []
    for name in table_order(path, inventory.data, shapes):
        stored = inventory.data[name]
        if "t" in stored:
            raise StateCorruptError(
                f"{str(stored['t'])!r} is of release 0.2.0 or later but {name + META_SUFFIX!r} is missing: "
                "restore that file from a copy, or move the counters away to read the weights alone"
            )
        files = _files(path, name, stored)
        shape = require_shape(path, name, shapes, regular_size(files["w"]) // 4)
        tables.append(table_content(name, files, shape, k=require_curvature(path, name, k), reset=True))
    return StateContent(tuple(tables))


def read_second(path: Path, shapes: Shapes | None, k: Curvatures | None) -> StateContent:
    """Read a directory of release 0.2.0."""
    inventory = _checked_inventory(path)
    overall = _global_document(inventory)
    tables = []
    for name, document in _descriptions(path, inventory, shapes, version=1).items():
        recorded = _curvature(document, overall)
        kept = require_curvature(path, name, k) if recorded is None else recorded
        shape = _shape(name, document, shapes)
        files = _files(path, name, inventory.data[name])
        tables.append(table_content(name, files, shape, k=kept, reset=True))
    return StateContent(tuple(tables))


def read_third(path: Path, shapes: Shapes | None) -> StateContent:
    """Read a directory of release 0.3.0."""
    inventory = _checked_inventory(path)
    overall = _global_document(inventory)
    if overall is None:
        raise StateIncompleteError(
            f"{str(path / GLOBAL_NAME)!r} is missing, or a table called 'dsa_global' took its place: restore "
            'it from a copy, or write it anew, as {"global_step": ..., "curvature": ...}'
        )
    step = overall.count("global_step", "step")
    if step is None:
        raise overall.lacking("global_step", "step")
    overall.require_version(2, None)
    tables = []
    for name, document in _descriptions(path, inventory, shapes, version=2).items():
        k = _curvature(document, overall)
        if k is None:
            raise overall.lacking("curvature", "k")
        files = _files(path, name, inventory.data[name], FIELDS)
        tables.append(table_content(name, files, _shape(name, document, shapes), k=k, steps=step))
    return StateContent(tuple(tables), step)


def _checked_inventory(path: Path) -> Inventory:
    inventory = take_inventory(path)
    if inventory.markers:
        raise StateIncompleteError(
            f"{str(inventory.markers[0])!r} says that the state was being replaced when its process ended: "
            "restore the directory from a copy, or pass resume=False to start over"
        )
    for name, file in inventory.descriptions.items():
        if name not in inventory.data:
            raise StateCorruptError(
                f"{str(file)!r} describes a table whose data files are missing: restore them from a copy, or "
                "move it away if it is not of a table that is wanted"
            )
    if not inventory.data:
        raise StateCorruptError(
            f"{str(path)!r} holds no data file of a table ('<name>_w.dat' and so on): restore them from a "
            "copy"
        )
    return inventory


def _files(path: Path, name: str, stored: Files, needed: tuple[str, ...] = _FIRST_FIELDS) -> dict[str, Path]:
    return {**{key: path / f"{name}_{key}.dat" for key in needed}, **stored}


def _global_document(inventory: Inventory) -> Document | None:
    if inventory.overall is None:
        return None
    document = read_document(inventory.overall)
    document.require_finished()
    return document


def _descriptions(
    path: Path, inventory: Inventory, shapes: Shapes | None, version: int
) -> dict[str, Document]:
    documents = {}
    for name in table_order(path, inventory.data, shapes):
        document = read_document(path / f"{name}{META_SUFFIX}")
        document.require_finished()
        documents[name] = document
    versions = {name: document.version() for name, document in documents.items()}
    if len(set(versions.values())) > 1:
        raise StateIncompleteError(
            f"the tables in {str(path)!r} are of several releases (format versions {versions}), as an "
            "interrupted migration leaves them: restore the directory from a copy"
        )
    for document in documents.values():
        document.require_version(version)
        document.require_float32()
    return documents


def _shape(name: str, document: Document, shapes: Shapes | None) -> Shape:
    shape = document.shape()
    if shape is None:
        raise document.lacking("shape")
    match_shape(name, shape, shapes)
    return shape


def _curvature(document: Document, overall: Document | None) -> float | None:
    """Return the curvature that the two documents state alike, or one of them alone."""
    own = document.curvature()
    common = None if overall is None else overall.curvature()
    if own is not None and common is not None and own != common:
        raise StateMismatchError(
            f"{document.name} states the curvature {own!r} and {GLOBAL_NAME!r} {common!r}: an interrupted "
            "change of curvature may have left that; restore the directory from a copy, or correct the wrong "
            "one if you know it"
        )
    return common if own is None else own
