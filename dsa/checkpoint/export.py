"""Writing a checkpoint: an ordinary Zarr v3 group, verifiable without dsa."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple, TypedDict, Unpack

from dsa.backends.shards.documents import encode_document, group_document
from dsa.backends.system import available_bytes
from dsa.checkpoint.digests import DEFAULT_ALGORITHM, content_root, new_hash
from dsa.checkpoint.local import LocalTarget
from dsa.checkpoint.manifest import ROOT, Kind, Manifest, array_specs, metadata_checksum
from dsa.checkpoint.meter import Progress, metered
from dsa.checkpoint.names import group_names
from dsa.checkpoint.places import Place, StorageOptions, find_target
from dsa.checkpoint.remote import RemoteTarget
from dsa.checkpoint.tables import CompressionChoice, TableWriter, WrittenTable
from dsa.checkpoint.targets import Target
from dsa.errors import DiskSpaceError
from dsa.state.content import StateContent

__all__ = ["ExportOptions", "Exported", "export_content", "open_target", "write_checkpoint"]


class ExportOptions(TypedDict, total=False):
    """The options of `export_content` that callers pass through."""

    overwrite: bool
    compression: CompressionChoice
    durable: bool
    algorithm: str
    progress: Progress
    attributes: Mapping[str, Any] | None
    storage_options: StorageOptions | None


class Exported(NamedTuple):
    """A checkpoint that was written.

    Args:
        url: Its path or URL.
        content_root: The name of its content.
    """

    url: str
    content_root: str


# By the names of their distributions.
_LIBRARIES: Final = {"dsa": "disk-sparse-adam", "numpy": "numpy", "torch": "torch", "zarr": "zarr"}
_METADATA_BYTES: Final = 1 << 20


def write_checkpoint(
    content: StateContent,
    url: str | os.PathLike[str],
    *,
    kind: Kind = "full",
    base: Mapping[str, Any] | None = None,
    **options: Unpack[ExportOptions],
) -> str:
    """Write a state to a new checkpoint, as `export_content` does, and return its path or URL."""
    return export_content(content, url, kind=kind, base=base, **options).url


def export_content(
    content: StateContent,
    url: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    compression: CompressionChoice = None,
    durable: bool = True,
    algorithm: str = DEFAULT_ALGORITHM,
    progress: Progress = False,
    attributes: Mapping[str, Any] | None = None,
    storage_options: StorageOptions | None = None,
    kind: Kind = "full",
    base: Mapping[str, Any] | None = None,
) -> Exported:
    """Write a state to a new checkpoint.

    The checkpoint appears as a whole when everything is written, and what it replaces stays until then; on
    stores that can't rename, what it replaces is removed first (see `dsa.checkpoint.remote`). About 30 MB of
    memory are used, whatever the tables' sizes.

    Args:
        content: The tables.
        url: A directory, or an fsspec URL such as ``s3://bucket/run/step-100``.
        overwrite: Replace a checkpoint. Anything else is never replaced.
        compression: ``"zstd"`` compresses every array; ``"auto"`` all but the weights of tables of which less
            than half the rows were ever written, after reading the tables up to that insight; None nothing.
        durable: Return only once everything is on the device; for directories.
        algorithm: The checksums: ``"sha256-rows-v1"`` or ``"blake2b-rows-v1"``.
        progress: True for a bar, or a function of the bytes done and their total.
        attributes: More to keep with it: anything that JSON can hold.
        storage_options: For fsspec.
        kind: What `content` is: a whole state, the rows of `dsa.checkpoint.delta`, or weights alone.
        base: What a delta is relative to.

    Returns:
        Where it is, and its content root.

    Raises:
        ValueError: an argument is not one of those above, or can't be kept as JSON.
        CheckpointExistsError: something is there, or the place is inside a state directory or a checkpoint.
        DiskSpaceError: the directory's file system has too little room; nothing was written.
        CheckpointWriteError: the disk or the store refused; what was there before is untouched.
    """
    _check_options(compression, algorithm, attributes or {})
    place = find_target(url, storage_options)
    total = _content_bytes(content)
    target = open_target(place, overwrite=overwrite, durable=durable)
    try:
        if place.directory is not None and compression is None:
            _check_space(total, place.directory)
        with metered(progress, total, "export") as advance:
            writer = TableWriter(target, compression, algorithm, advance)
            groups = group_names(table.name for table in content.tables)
            tables = [writer.write(*each) for each in zip(content.tables, groups, strict=True)]
        arrays = {path: array for table in tables for path, array in table.arrays.items()}
        root = content_root({path: array.digest.root for path, array in arrays.items()})
        manifest = Manifest(
            kind,
            content.global_step,
            root,
            tuple((each.entry.name, each.entry.group) for each in tables),
            datetime.now(UTC).isoformat(timespec="seconds"),
            _versions(),
            attributes or {},
            base,
            identity=content.identity,
        )
        return Exported(target.commit(_root_document(manifest, tables)), root)
    except BaseException:
        target.abort()
        raise


def _root_document(manifest: Manifest, tables: Sequence[WrittenTable]) -> bytes:
    checksum = metadata_checksum(
        manifest.to_json(),
        {each.entry.group: each.entry.to_json() for each in tables},
        {path: array.to_json() for table in tables for path, array in table.arrays.items()},
    )
    everything = {path: document for table in tables for path, document in table.documents.items()}
    root = group_document({ROOT: {**manifest.to_json(), "metadata_checksum": checksum}}, everything)
    return encode_document(root)


def open_target(place: Place, *, overwrite: bool, durable: bool) -> Target:
    """Begin a checkpoint at a place.

    Raises:
        CheckpointExistsError: something is there.
        ValueError: it ends in ``.json``.
    """
    if place.url.endswith(".json"):
        raise ValueError(
            f"{place.url!r} is named as the checkpoints of older releases are, which would hide it from "
            "readers: a checkpoint is a directory, leave the ending out"
        )
    if place.directory is not None:
        return LocalTarget(place.directory, overwrite=overwrite, durable=durable)
    return RemoteTarget(place, overwrite=overwrite)


def _check_options(compression: Any, algorithm: str, attributes: Mapping[str, Any]) -> None:  # noqa: ANN401
    if compression not in (None, "zstd", "auto"):
        raise ValueError(f"compression is {compression!r}: use None, 'zstd' or 'auto'")
    new_hash(algorithm)
    try:
        text = json.dumps(dict(attributes), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"attributes can't be kept as JSON ({error}): use plain numbers and text") from error
    if json.loads(text) != attributes:
        raise ValueError(
            "attributes change when they are written as JSON: use lists for tuples, text for keys"
        )


def _content_bytes(content: StateContent) -> int:
    return sum(
        spec.row_bytes * spec.rows
        for table in content.tables
        for spec in array_specs(table.schema, table.rows)
    )


def _check_space(needed: int, directory: Path) -> None:
    free = available_bytes(directory.parent)
    if needed + _METADATA_BYTES > free:
        raise DiskSpaceError(
            needed,
            free,
            str(directory.parent),
            "or pass compression='zstd', with which nobody knows the size before it is written",
        )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for library, distribution in _LIBRARIES.items():
        try:
            found[library] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return found
