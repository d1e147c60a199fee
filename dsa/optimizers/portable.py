"""What everything with a state directory can do with checkpoints: methods that its classes take over.

They export and import the whole directory, every table in it, whoever asks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

from dsa.checkpoint import open_content, transfer
from dsa.checkpoint.meter import Progress
from dsa.checkpoint.transfer import Compression
from dsa.state.state_directory import StateDirectory

__all__ = [
    "HasState",
    "export_checkpoint",
    "export_weights",
    "import_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
]


class HasState(Protocol):
    """Who has a state directory."""

    def _portable_state(self) -> StateDirectory: ...


def export_checkpoint(  # noqa: D417 - self is not said
    self: HasState,
    url: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    compression: Compression = None,
    durable: bool = True,
    progress: Progress = False,
    attributes: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> str:
    """Write a checkpoint: an ordinary Zarr v3 group, complete as soon as it is visible.

    It holds the state after one whole step: every table with weights, moments and counters, the step, and
    each curvature. Weights that are a module's parameter are in it too. Another thread may go on
    training: a step waits for a block of a few megabytes to be read at most, unless it would have to set
    aside more than 256 MB of rows that are not written yet.

    Args:
        url: A directory that does not exist, or an fsspec URL such as ``s3://bucket/run/step-100``.
        base: A full checkpoint that this state was exported to or imported from: only rows that changed
            since are written. Restoring takes both; `dsa.flatten_checkpoint` makes one of them.
        overwrite: Replace a checkpoint that is there; it stays until the new one is complete.
        compression: None, ``"zstd"``, or ``"auto"``, which compresses moments of sparsely touched tables.
        durable: Return only once everything is on the device; for directories.
        progress: True for a bar, or a function of the bytes done and their total.
        attributes: More to keep with it, as JSON: the epoch, the learning rate's schedule, ...
        storage_options: For fsspec.

    Returns:
        The path or the URL of the checkpoint.

    Raises:
        CheckpointExistsError: something is there.
        CheckpointMismatchError: `base` is not a full checkpoint of this state's history.
        DiskSpaceError: there is too little room; nothing was written.
        CheckpointWriteError: the disk or the store refused; what was there before is untouched.
    """
    return transfer.export_state(
        self._portable_state(),
        url,
        base=base,
        overwrite=overwrite,
        compression=compression,
        durable=durable,
        progress=progress,
        attributes=attributes,
        storage_options=storage_options,
    )


def export_weights(  # noqa: D417 - self is not said
    self: HasState,
    url: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Progress = False,
    storage_options: Mapping[str, Any] | None = None,
) -> str:
    """Write the weights alone, for serving.

    Args:
        url: A file or an URL that ends in ``.safetensors`` or ``.parquet``; anything else becomes a Zarr
            group with one array ``w`` per table. Rows that were never touched hold their first weights. Of
            tables whose rows belong to ids, those rows and their ids are written; see
            `dsa.checkpoint.write_weights`.
        overwrite: Replace what is there.
        progress: True for a bar, or a function of the bytes done and their total.
        storage_options: For fsspec.

    Returns:
        The path or the URL.

    Raises:
        CheckpointExistsError: something is there.
        DiskSpaceError: there is too little room; nothing was written.
        CheckpointWriteError: the disk or the store refused.
    """
    return transfer.export_weights(
        self._portable_state(),
        url,
        overwrite=overwrite,
        progress=progress,
        storage_options=storage_options,
    )


def import_checkpoint(  # noqa: D417 - self is not said
    self: HasState,
    url: str | os.PathLike[str],
    verify_hashes: bool = True,
    *,
    base: str | os.PathLike[str] | None = None,
    progress: Progress = False,
    storage_options: Mapping[str, Any] | None = None,
    convert_dtypes: bool = False,
) -> None:
    """Replace the whole state with a checkpoint's: tables, step and curvatures.

    Needs only read access to the checkpoint, and room for old and new state side by side. Every block is
    verified before it is used; a failure, or a kill at any moment, leaves the state as it was.

    Args:
        url: A directory, or an fsspec URL.
        verify_hashes: Compare every block with its checksum.
        base: The full checkpoint that a differential one is relative to, if it isn't beside it.
        progress: True for a bar, or a function of the bytes done and their total.
        storage_options: For fsspec.
        convert_dtypes: Whether the checkpoint may store fields in another dtype than these tables
            (``state_dtype``): every number becomes the nearest one that the field holds.

    Raises:
        CheckpointNotFoundError, CheckpointIncompleteError, CheckpointMismatchError: there is no
            checkpoint that this release can read.
        CheckpointCorruptError: the checkpoint is damaged.
        StateMismatchError: its tables are not the state's.
        DiskSpaceError: there is no room for both.
    """
    self._portable_state().require_open()
    opened = open_content(url, base=base, verify=verify_hashes, storage_options=storage_options)
    transfer.import_state(self._portable_state(), opened, progress, convert_dtypes)


def save_checkpoint(self: HasState, directory: str | os.PathLike[str], **options: Any) -> str:  # noqa: ANN401
    """Do what `export_checkpoint` does."""
    return export_checkpoint(self, directory, **options)


def load_checkpoint(self: HasState, directory: str | os.PathLike[str], **options: Any) -> None:  # noqa: ANN401
    """Do what `import_checkpoint` does."""
    import_checkpoint(self, directory, **options)
