"""Copying a checkpoint between directories and stores, with the guarantees of an export."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import replace

import numpy as np

from dsa.backends.shards.documents import DOCUMENT
from dsa.checkpoint.export import open_target
from dsa.checkpoint.meter import Progress, metered
from dsa.checkpoint.occupied import is_part
from dsa.checkpoint.places import StorageOptions, check_apart, find_target
from dsa.checkpoint.reading import Checkpoint, open_checkpoint, verify_tables
from dsa.checkpoint.sources import Source
from dsa.checkpoint.targets import Target
from dsa.checkpoint.workers import Task, Workers, worker_count
from dsa.errors import CheckpointCorruptError

__all__ = ["copy_checkpoint"]


def copy_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    verify: bool = True,
    durable: bool = True,
    progress: Progress = False,
    storage_options: StorageOptions | None = None,
    target_storage_options: StorageOptions | None = None,
) -> str:
    """Copy a checkpoint as it is: chunks, codecs and attributes stay, and so does its content root.

    The copy appears as a whole at the end, as an export does. Files that are not part of the checkpoint are
    left behind.

    Args:
        source: A directory, or an fsspec URL.
        target: Another one.
        overwrite: Replace a checkpoint. Anything else is never replaced.
        verify: Read the copy back and compare everything with the checksums before it is completed.
        durable: Return only once everything is on the device; for directories.
        progress: True for a bar, or a function of the bytes done and their total.
        storage_options: For fsspec and the source.
        target_storage_options: For fsspec and the target; None takes those of the source.

    Returns:
        The path or the URL of the copy.

    Raises:
        CheckpointError: the source is no checkpoint, or is damaged; there is something at the target; or
            the target refuses. Nothing is left at the target then.
    """
    checkpoint = open_checkpoint(source, storage_options=storage_options)
    origin, place = (
        checkpoint.source,
        find_target(target, storage_options if target_storage_options is None else target_storage_options),
    )
    if place.directory is None:  # a directory is replaced when the new one is complete
        check_apart(origin.place, place)
    keys = _keys(checkpoint)
    root = origin.read(DOCUMENT)
    total = sum(origin.sizes[key] for key in keys) + (checkpoint.nbytes if verify else 0)
    output = open_target(place, overwrite=overwrite, durable=durable)
    try:
        with metered(progress, total, "copy") as advance:
            waiting: deque[Task[int]] = deque()
            with Workers("dsa-copy") as workers:
                for key in keys:
                    if len(waiting) >= 2 * worker_count():
                        advance(waiting.popleft().result())
                    waiting.append(workers.submit(_copy, origin, key, output))
                while waiting:
                    advance(waiting.popleft().result())
            if verify:
                # What is wrong in the copy is so in the source: that is what messages name.
                written = replace(output.written(), url=origin.place.url)
                verify_tables(Source(written, committed=False), checkpoint.stored, advance)
        return output.commit(root)
    except BaseException:
        output.abort()
        raise


def _keys(checkpoint: Checkpoint) -> list[str]:
    groups = {table.group for table in checkpoint.tables}
    return sorted(key for key in checkpoint.source.sizes if key != DOCUMENT and is_part(key, groups))


def _copy(source: Source, key: str, target: Target) -> int:
    size = 0
    file = target.create(key)
    try:
        for piece in source.pieces(key):
            size += len(piece)
            if np.frombuffer(piece, np.uint8).any():
                file.write(piece)
            else:
                file.skip(len(piece))
    finally:
        file.close()
    if size != source.sizes[key]:
        raise CheckpointCorruptError(
            f"{key!r} of {source.place.url!r} has {size} bytes, not the {source.sizes[key]} that it had a "
            "moment ago: somebody changes the checkpoint; copy it when that is over"
        )
    return size
