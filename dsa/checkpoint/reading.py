"""Opening a checkpoint: everything it says is checked before any of its content is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar, final

from dsa.backends.shards.documents import DOCUMENT
from dsa.backends.shards.layout import ArraySpec
from dsa.checkpoint.blocks import BlockReader, corrupt_block
from dsa.checkpoint.digests import content_root, zeros_digest
from dsa.checkpoint.local import left_aside
from dsa.checkpoint.manifest import (
    FORMAT,
    FORMAT_VERSION,
    ROOT,
    Manifest,
    TableEntry,
    array_specs,
    metadata_checksum,
)
from dsa.checkpoint.meter import Advance, Progress, metered
from dsa.checkpoint.occupied import STATE_FILE
from dsa.checkpoint.places import Place, StorageOptions, find_place
from dsa.checkpoint.sources import Source
from dsa.checkpoint.stored import StoredArray, chunk_keys, stored_array
from dsa.checkpoint.streams import record_blocks, verify_arrays
from dsa.errors import (
    CheckpointCorruptError,
    CheckpointIncompleteError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    StateMismatchError,
    StateWarning,
    notify,
)
from dsa.state.content import StateContent, TableContent

__all__ = ["Checkpoint", "StoredTable", "open_checkpoint", "verify_tables"]

T = TypeVar("T")

_REASONS: Final = {
    "delta": (
        "only holds the rows that changed since its base: flatten it with that first, with "
        "dsa.flatten_checkpoint"
    ),
    "weights": (
        "only holds weights: training can't go on from it; read them with Zarr and pass them as the first "
        "weights of a new table"
    ),
}
_OLD_DOCUMENT: Final = "checkpoint.json"


@final
@dataclass(frozen=True, slots=True)
class StoredTable:
    """A table of a checkpoint.

    Args:
        entry: What its group says of it.
        arrays: Its arrays by name.
    """

    entry: TableEntry
    arrays: Mapping[str, StoredArray]

    @property
    def nbytes(self) -> int:
        """Bytes of its content, however they are stored."""
        return sum(each.spec.rows * each.spec.row_bytes for each in self.arrays.values())


@final
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint whose description was checked; `open_checkpoint` makes it.

    Nothing of it is changed by any use, and nothing needs to be closed.

    Args:
        url: Where it is.
        manifest: What its root says.
        stored: Its tables, in the state's order.
        source: Its files.
    """

    url: str
    manifest: Manifest = field(repr=False)
    stored: tuple[StoredTable, ...] = field(repr=False)
    source: Source = field(repr=False)

    @property
    def kind(self) -> str:
        """``"full"``, ``"delta"`` or ``"weights"``."""
        return self.manifest.kind

    @property
    def global_step(self) -> int:
        """Steps that the state had taken."""
        return self.manifest.global_step

    @property
    def content_root(self) -> str:
        """The name of its content: equal for equal content, wherever and however it is stored."""
        return self.manifest.content_root

    @property
    def attributes(self) -> dict[str, Any]:
        """What the writer's caller kept with it."""
        return dict(self.manifest.attributes)

    @property
    def tables(self) -> tuple[TableEntry, ...]:
        """What it says of each table, in the state's order."""
        return tuple(table.entry for table in self.stored)

    @property
    def nbytes(self) -> int:
        """Bytes of its content, however they are stored."""
        return sum(table.nbytes for table in self.stored)

    def content(self, verify: bool = True) -> StateContent:
        """Return what it holds, as tables whose blocks are read when they are asked for.

        Args:
            verify: Compare every block with its checksum before any row of it is yielded. Without, only a
                block of which a file is missing is compared.

        Raises:
            CheckpointMismatchError: it holds some rows only, or weights only.
        """
        if self.kind != "full":
            raise CheckpointMismatchError(f"{self.url!r} {_REASONS[self.manifest.kind]}")
        return self.stored_content(verify)

    def stored_content(self, verify: bool = True) -> StateContent:
        """Return what is stored; of a differential checkpoint the changed rows, with their numbers."""
        tables = tuple(self._table(table, verify) for table in self.stored)
        lineage = {self.content_root: self.global_step}
        return StateContent(tables, self.global_step, lineage, self.manifest.identity)

    def _table(self, table: StoredTable, verify: bool) -> TableContent:
        entry = table.entry
        readers = _readers(self.source, table)
        return TableContent(
            entry.facts, lambda: record_blocks(entry.schema, entry.rows, readers, verify), entry.stored
        )

    def verify(self, progress: Progress = False) -> None:
        """Read everything and compare it with the checksums.

        Args:
            progress: True for a bar, or a function of the bytes done and their total.

        Raises:
            CheckpointCorruptError: a block isn't what was written; the message names table, field and block.
        """
        with metered(progress, self.nbytes, "verify") as advance:
            verify_tables(self.source, self.stored, advance)


def verify_tables(source: Source, tables: Iterable[StoredTable], advance: Advance) -> None:
    """Read all content of some tables and compare it with their checksums.

    Args:
        source: Where their files are; a copy of those that they were opened from, for example.
        tables: The tables.
        advance: Is told of the bytes that were compared.

    Raises:
        CheckpointCorruptError: a block isn't what was written; the message names table, field and block.
    """
    verify_arrays([reader for table in tables for reader in _readers(source, table)], advance)


def _readers(source: Source, table: StoredTable) -> list[BlockReader]:
    return [BlockReader(source, array, table.entry.name) for array in table.arrays.values()]


def open_checkpoint(
    url: str | os.PathLike[str], *, storage_options: StorageOptions | None = None
) -> Checkpoint:
    """Open a checkpoint for reading; only its description is read.

    Args:
        url: A directory, or an fsspec URL.
        storage_options: For fsspec.

    Raises:
        CheckpointNotFoundError: nothing is there.
        CheckpointIncompleteError: an export or a copy was interrupted, or it never was a checkpoint.
        CheckpointMismatchError: it is of another format or version.
        CheckpointCorruptError: its description is damaged, or files are missing.
    """
    place = find_place(url, storage_options)
    source = _source(place)
    data = _root(source)
    manifest = _checked(place, "the root", lambda: Manifest.from_json(data))
    tables = tuple(_table(source, name, group) for name, group in manifest.tables)
    _check_sums(place, manifest, tables)
    return Checkpoint(source.place.url, manifest, tables, source)


def _source(place: Place) -> Source:
    if place.url.endswith(".json"):
        raise _old_release(place)
    try:
        return Source(place)
    except NotADirectoryError as error:
        raise CheckpointMismatchError(
            f"{place.url!r} is a file: pass the directory or the URL of a checkpoint"
        ) from error
    except FileNotFoundError as error:
        aside = None if place.directory is None else left_aside(place.directory)
        if aside is None:
            raise CheckpointNotFoundError(
                f"there is no checkpoint at {place.url!r}: check the path"
            ) from error
    notify(
        f"{place.url!r} was being replaced when its writer was killed: the old checkpoint is read from "
        f"{str(aside)!r}; the next export puts it back",
        StateWarning,
    )
    return Source(find_place(aside))


def _old_release(place: Place) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"{place.url!r} is a checkpoint of an older release: convert it with dsa.migrate"
    )


def _root(source: Source) -> dict[str, Any]:
    """Return the root's attribute of a complete checkpoint of our format and version."""
    place, nested = source.place, _nested(source)
    if DOCUMENT not in source.sizes:
        if _OLD_DOCUMENT in source.sizes:
            raise _old_release(place)
        if STATE_FILE in source.sizes:
            raise CheckpointMismatchError(
                f"{place.url!r} is a state directory: open it as such, with resume=True"
            )
        hint = f"; there is one inside, open {place.below(nested)!r}" if nested else ""
        raise CheckpointIncompleteError(
            f"{place.url!r} is no complete checkpoint, its root {DOCUMENT!r} is missing: the export or the "
            f"copy was interrupted, do it again{hint}"
        )
    document = _checked(place, "the root", lambda: source.document(DOCUMENT))
    attributes = document.get("attributes")
    data = attributes.get(ROOT) if isinstance(attributes, dict) else None
    if not isinstance(data, dict) or data.get("complete") is not True:
        raise CheckpointIncompleteError(
            f"{place.url!r} is no complete checkpoint, its root lacks the attribute that is written last: do "
            "the export again, or check the path"
        )
    if data.get("format") != FORMAT or data.get("version") != FORMAT_VERSION:
        raise CheckpointMismatchError(
            f"{place.url!r} is of format {data.get('format')!r}, version {data.get('version')!r}; this "
            f"release reads {FORMAT!r}, version {FORMAT_VERSION}: use the release that wrote it"
        )
    if nested:
        raise CheckpointCorruptError(
            f"{place.url!r} holds another checkpoint inside, {nested!r}: it was copied twice without slashes "
            "at the end of both paths; move the inner one out"
        )
    return data


def _nested(source: Source) -> str:
    """Return the name of a checkpoint that a careless copy has put inside, or an empty string."""
    names = {source.place.name}
    if DOCUMENT not in source.sizes:
        names = {key.partition("/")[0] for key in source.sizes if key.count("/") == 1}
    for name in sorted(names):
        key = f"{name}/{DOCUMENT}"
        if key in source.sizes:
            try:
                attributes = source.document(key).get("attributes")
            except ValueError:
                continue
            if isinstance(attributes, dict) and ROOT in attributes:
                return name
    return ""


def _table(source: Source, name: str, group: str) -> StoredTable:
    place, what = source.place, f"the table {name!r}"
    document = _checked(place, what, lambda: source.document(f"{group}/{DOCUMENT}"))
    attributes = document.get("attributes")
    data = attributes if isinstance(attributes, dict) else {}
    entry = _checked(place, what, lambda: TableEntry.from_json(data, group))
    if entry.name != name:
        raise _corrupt(place, what, f"its group {group!r} says that it is {entry.name!r}")
    arrays = {}
    for spec in _checked(place, what, lambda: array_specs(entry.schema, entry.rows)):
        read = partial(_array, source, spec, f"{group}/{spec.name}")
        arrays[spec.name] = _checked(place, f"field {spec.name!r} of {what}", read)
        _check_missing(source, arrays[spec.name], name)
    return StoredTable(entry, arrays)


def _array(source: Source, spec: ArraySpec, path: str) -> StoredArray:
    document = source.document(f"{path}/{DOCUMENT}")
    if source.unlisted:
        source.look_for(f"{path}/{key}" for key in chunk_keys(document, spec))
    files = {
        key.removeprefix(f"{path}/"): size for key, size in source.sizes.items() if key.startswith(f"{path}/")
    }
    return stored_array(document, spec, path, files)


def _check_missing(source: Source, array: StoredArray, table: str) -> None:
    """Refuse an array when a block of which nothing is there should not be zero."""
    digest = array.entry.digest
    for start, stop in array.missing:
        for block in range(-(-start // digest.block_rows), -(-stop // digest.block_rows)):
            first, last = block * digest.block_rows, min(array.spec.rows, (block + 1) * digest.block_rows)
            size = (last - first) * array.spec.row_bytes
            if last <= stop and digest.blocks[block] != zeros_digest(digest.algorithm, size):
                raise corrupt_block(source, array, table, block, "is missing")


def _check_sums(place: Place, manifest: Manifest, tables: tuple[StoredTable, ...]) -> None:
    arrays = {array.path: array for table in tables for array in table.arrays.values()}
    groups = {table.entry.group: table.entry.to_json() for table in tables}
    attributes = {path: array.entry.to_json() for path, array in arrays.items()}
    checksum = _checked(
        place, "its description", lambda: metadata_checksum(manifest.to_json(), groups, attributes)
    )
    roots = {path: array.entry.digest.root for path, array in arrays.items()}
    if content_root(roots) != manifest.content_root or checksum != manifest.metadata:
        raise _corrupt(place, "its description", "it doesn't match its checksum")


def _checked(place: Place, what: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except StateMismatchError as error:
        raise CheckpointMismatchError(
            f"{what} of {place.url!r} can't be used ({error}): open it with a release that knows its "
            "update rule"
        ) from error
    except (ValueError, RecursionError) as error:
        raise _corrupt(place, what, str(error)) from error


def _corrupt(place: Place, what: str, reason: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"the checkpoint {place.url!r} is damaged, {what} can't be used: {reason}; restore it from a copy"
    )
