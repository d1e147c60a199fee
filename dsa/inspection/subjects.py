"""A state directory or a checkpoint: told apart by what is there, and opened for reading."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from dsa.backends.base import Layout
from dsa.checkpoint import Checkpoint, open_checkpoint, open_content
from dsa.checkpoint.places import StorageOptions, find_place
from dsa.errors import CheckpointNotFoundError
from dsa.inspection import StateView, open_state
from dsa.state.content import StateContent
from dsa.state.legacy import find_legacy
from dsa.state.metadata import METADATA_NAME, owned_files

__all__ = ["Kind", "Subject", "find_checkpoint", "open_subject", "state_directory"]

Kind = Literal["state", "full", "delta", "weights"]


@final
@dataclass(frozen=True, slots=True)
class Subject:
    """What a state directory or a checkpoint holds.

    Args:
        url: Where it is.
        kind: ``"state"``, or the kind of the checkpoint.
        content: Its tables; of a delta, laid over those of its base.
        nbytes: Bytes that a pass over the content reads.
        view: Of a state directory, the view that `content` is read through.
        checkpoint: Of a checkpoint, itself.
    """

    url: str
    kind: Kind
    content: StateContent
    nbytes: int
    view: StateView | None = None
    checkpoint: Checkpoint | None = None


def state_directory(
    url: str | os.PathLike[str], storage_options: StorageOptions | None = None
) -> Path | None:
    """Return the path of a state directory, or of what is left of one; None where there is none.

    Args:
        url: A directory, or an fsspec URL.
        storage_options: For fsspec.
    """
    path = find_place(url, storage_options).directory
    if path is None or not path.is_dir():
        return None
    if (path / METADATA_NAME).exists() or owned_files(path):
        return path
    release = find_legacy(path)
    return None if release is None or release.endswith("checkpoint") else path


def find_checkpoint(url: str | os.PathLike[str], storage_options: StorageOptions | None = None) -> Checkpoint:
    """Open a checkpoint where a state directory could have been as well.

    Raises:
        CheckpointError: see `dsa.checkpoint.open_checkpoint`.
    """
    try:
        return open_checkpoint(url, storage_options=storage_options)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(
            f"there is neither a state nor a checkpoint at {os.fspath(url)!r}: check the path"
        ) from error


@contextmanager
def open_subject(
    url: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    storage_options: StorageOptions | None = None,
    backend: Layout | None = None,
) -> Iterator[Subject]:
    """Open a state directory or a checkpoint for reading; nothing of it is changed.

    Args:
        url: A directory, or an fsspec URL.
        base: See `dsa.checkpoint.open_content`; without a meaning for what is no differential checkpoint.
        storage_options: For fsspec.
        backend: See `dsa.inspection.open_state`.

    Yields:
        What is there; every block of a checkpoint is compared with its checksum while it is read.

    Raises:
        StateError: the state directory can't be read, see `dsa.inspection.open_state`.
        CheckpointError: the checkpoint can't be read.
    """
    directory = state_directory(url, storage_options)
    if directory is not None:
        with open_state(directory, backend=backend) as view:
            content = view.content()
            nbytes = sum(table.rows * table.schema.dtype.itemsize for table in content.tables)
            yield Subject(str(view.path), "state", content, nbytes, view)
        return
    checkpoint = find_checkpoint(url, storage_options)
    if checkpoint.kind == "delta":
        opened = open_content(url, base=base, storage_options=storage_options)
        yield Subject(checkpoint.url, "delta", opened.content, opened.nbytes, checkpoint=opened.checkpoint)
        return
    content = checkpoint.stored_content()
    yield Subject(checkpoint.url, checkpoint.manifest.kind, content, checkpoint.nbytes, None, checkpoint)
