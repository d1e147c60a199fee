"""The data files of older releases: what lies in a directory, and records streamed from raw arrays."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, final

import numpy as np

from dsa.errors import StateCorruptError
from dsa.kernels.plausible import describe_fault, first_implausible
from dsa.rules.adam import ADAM
from dsa.schema import Records, Schema
from dsa.state.content import TableContent
from dsa.state.facts import TableFacts

__all__ = [
    "FIELDS",
    "GLOBAL_NAME",
    "MANIFEST_NAME",
    "META_SUFFIX",
    "Files",
    "Inventory",
    "Shape",
    "regular_size",
    "split_data_name",
    "table_content",
    "take_inventory",
]

Shape = tuple[int, int]
"""Rows N and elements of a row D."""

Files = Mapping[str, Path]
"""Paths by field."""

FIELDS: Final = ("w", "m", "v", "t")
GLOBAL_NAME: Final = "dsa_global_meta.json"
MANIFEST_NAME: Final = "checkpoint.json"
META_SUFFIX: Final = "_meta.json"

_GLOBAL_TABLE: Final = GLOBAL_NAME.removesuffix(META_SUFFIX)
_MARKER: Final = "reinit"
_BLOCK_BYTES: Final = 4 << 20
_DTYPES: Final = {"w": "<f4", "m": "<f4", "v": "<f4", "t": "<i4"}


@final
@dataclass(slots=True)
class Inventory:
    """What lies in a directory, by the names of the files alone.

    Args:
        data: Data files by table and field, tables sorted by name.
        descriptions: ``<name>_meta.json`` by table.
        overall: ``dsa_global_meta.json``, or None.
        manifest: ``checkpoint.json``, or None.
        markers: Files that an interrupted replacement left.
    """

    data: dict[str, dict[str, Path]] = field(default_factory=dict)
    descriptions: dict[str, Path] = field(default_factory=dict)
    overall: Path | None = None
    manifest: Path | None = None
    markers: list[Path] = field(default_factory=list)


def split_data_name(file_name: str) -> tuple[str, str] | None:
    """Return table and field of a data file's name, or None when it is not one.

    Example:
        >>> split_data_name("enc.emb_w_m.dat"), split_data_name("w.dat")
        (('enc.emb_w', 'm'), None)
    """
    for name in FIELDS:
        if file_name.endswith(f"_{name}.dat"):
            return file_name.removesuffix(f"_{name}.dat"), name
    return None


def take_inventory(path: Path) -> Inventory:
    """List what older releases may have left in a directory.

    A table called ``dsa_global`` has the description whose name release 0.3.0 gave to the global one; where
    such a table is, the file is taken for its.
    """
    found = Inventory()
    for file_name in sorted(os.listdir(path)):
        file = path / file_name
        if (place := split_data_name(file_name)) is not None:
            found.data.setdefault(place[0], {})[place[1]] = file
        elif file_name.endswith(META_SUFFIX):
            found.descriptions[file_name.removesuffix(META_SUFFIX)] = file
        elif file_name == MANIFEST_NAME:
            found.manifest = file
        elif _MARKER in file_name.lower():
            found.markers.append(file)
    if _GLOBAL_TABLE not in found.data:
        found.overall = found.descriptions.pop(_GLOBAL_TABLE, None)
    found.data = dict(sorted(found.data.items()))
    return found


def regular_size(path: Path) -> int:
    """Return the size of a regular file, or of the one that a link leads to.

    Raises:
        StateCorruptError: there is none, or something else.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        raise StateCorruptError(
            f"{str(path)!r} is missing: restore it from a copy, or move the other files of its table away"
        ) from error
    except (OSError, ValueError) as error:
        raise StateCorruptError(f"{str(path)!r} can't be read ({error}): restore it from a copy") from error
    if not stat.S_ISREG(status.st_mode):
        raise StateCorruptError(f"{str(path)!r} is not a regular file: restore it from a copy")
    return status.st_size


def table_content(
    name: str, files: Files, shape: Shape, *, k: float, steps: int = 0, reset: bool = False
) -> TableContent:
    """Return a table over raw arrays, once every file has the size that the shape asks for.

    Args:
        name: The table.
        files: At least ``w``, ``m`` and ``v``, and ``t`` unless `reset`.
        shape: N and D.
        k: Curvature magnitude.
        steps: Optimizer steps in which the table took part.
        reset: Keep the weights alone; moments and counters are zero.

    Raises:
        StateCorruptError: a file is missing or of another size, or D is more than a record holds.
    """
    rows, dim = shape
    for key, file in files.items():
        _check_size(file, shape, 4 * rows * (1 if key == "t" else dim))
    try:
        schema = ADAM.schema(dim)
    except ValueError as error:
        raise StateCorruptError(
            f"table {name!r} has the shape {shape} ({error}): restore its description from a copy"
        ) from error
    kept = {key: files[key] for key in (("w",) if reset else FIELDS)}
    facts = TableFacts(name, rows, schema, ADAM, k, steps)
    return TableContent(facts, partial(_stream, name, rows, schema, kept))


def _check_size(file: Path, shape: Shape, expected: int) -> None:
    size = regular_size(file)
    if size != expected:
        what = "truncated" if size < expected else "too long"
        raise StateCorruptError(
            f"{str(file)!r} is {what} for a table of {shape[0]} x {shape[1]}: {size:,} bytes instead of "
            f"{expected:,}; restore it from a copy, or correct the shape if that is wrong"
        )


def _stream(name: str, rows: int, schema: Schema, files: Files) -> Iterator[tuple[int, Records]]:
    block_rows = max(1, _BLOCK_BYTES // schema.dtype.itemsize)
    with contextlib.ExitStack() as opened:
        # Read, not mapped: a file that shrinks meanwhile is then an error and not the end of the process.
        sources = {key: opened.enter_context(open(file, "rb")) for key, file in files.items()}
        for first in range(0, rows, block_rows):
            records = np.zeros(min(block_rows, rows - first), schema.dtype)
            for key, source in sources.items():
                _fill(records, key, source, files[key])
            records["s"] = 1
            _require_plausible(name, first, records, files)
            yield first, records


def _fill(records: Records, key: str, source: BinaryIO, file: Path) -> None:
    target = records[key]
    values = np.fromfile(source, _DTYPES[key], target.size)
    if values.size != target.size:
        raise StateCorruptError(
            f"{str(file)!r} was truncated while it was read: let nothing else write to it, and try again"
        )
    target[...] = values.reshape(target.shape)


def _require_plausible(name: str, first: int, records: Records, files: Files) -> None:
    position = first_implausible(records, ADAM.non_negative)
    if position >= 0:
        raise StateCorruptError(
            f"row {first + position} of table {name!r} in {str(files['w'].parent)!r} can't be used: "
            f"{describe_fault(records, position, ADAM.non_negative)}; restore its files from a copy, or "
            "overwrite that row in each of them, such as with zeros"
        )
