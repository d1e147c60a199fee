"""A checkpoint that is there already: its files and their sizes, small documents, and a store for Zarr.

Nothing is ever written or changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

import zarr.storage

from dsa.backends.shards.documents import DOCUMENT
from dsa.checkpoint.places import Place
from dsa.checkpoint.transport import (
    list_remote,
    lists_sizes,
    look_around,
    read_remote,
    reading,
    remote_store,
    sizes_of,
)

__all__ = ["Source"]

_LARGEST_DOCUMENT: Final = 64 << 20
_LOCAL_PIECE: Final = 1 << 20
_REMOTE_PIECE: Final = 16 << 20


@final
class Source:
    """Reads what is at a place.

    Args:
        place: The place.
        committed: Whether it must have a root to be looked through; without one, what is there may be
            somebody's home.

    Raises:
        FileNotFoundError: nothing is there.
        NotADirectoryError: a file is there.
        CheckpointReadError: the store refused, or can't be reached.
    """

    def __init__(self, place: Place, committed: bool = True) -> None:
        self.place = place
        self.sizes: dict[str, int]
        """Bytes of each file by its key; where nothing was listed, of those that were looked for."""
        self.unlisted = False
        """Whether the store lists no files, or without their sizes."""
        if place.directory is not None:
            self.sizes = _local_sizes(place.directory, committed)
        else:
            self.sizes, self.unlisted = _remote_sizes(place, committed)

    def look_for(self, keys: Iterable[str]) -> None:
        """Find out which of some files are there, where the store doesn't list them.

        Raises:
            CheckpointReadError: the store can't say.
        """
        if self.unlisted:
            self.sizes |= sizes_of(self.place, [key for key in keys if key not in self.sizes])

    def path(self, key: str) -> Path | None:
        """Return the path of a file in a directory of this machine, else None."""
        return None if self.place.directory is None else self.place.directory.joinpath(*key.split("/"))

    def pieces(self, key: str) -> Iterator[bytes]:
        """Yield a file's bytes in order, a few megabytes at a time."""
        path = self.path(key)
        if path is not None:
            with open(path, "rb") as file:
                while piece := file.read(_LOCAL_PIECE):
                    yield piece
            return
        size = self.sizes[key]
        for start in range(0, size, _REMOTE_PIECE):
            yield read_remote(self.place, key, start, min(size, start + _REMOTE_PIECE), size)

    def read_into(self, key: str, start: int, out: memoryview) -> int:
        """Fill memory with a file's bytes from a place on and return how many there were."""
        path = self.path(key)
        if path is None:
            size = self.sizes[key]
            data = read_remote(self.place, key, start, min(size, start + len(out)), size)
            out[: len(data)] = data
            return len(data)
        done = 0
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            while done < len(out) and (count := file.readinto(out[done:])):
                done += count
        return done

    def read(self, key: str) -> bytes:
        """Return a whole file."""
        return b"".join(self.pieces(key))

    def document(self, key: str) -> dict[str, Any]:
        """Return a document.

        Raises:
            ValueError: it is missing, too large or no JSON object.
        """
        self.look_for([key])
        size = self.sizes.get(key)
        if size is None:
            raise ValueError("it is missing")
        if size > _LARGEST_DOCUMENT:
            raise ValueError(f"it has {size:,} bytes")
        try:
            document = json.loads(self.read(key))
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if not isinstance(document, dict):
            raise ValueError("it is no JSON object")
        return document

    def store(self) -> zarr.storage.LocalStore | zarr.storage.FsspecStore:
        """Return a store that can't be written to."""
        if self.place.directory is not None:
            return zarr.storage.LocalStore(self.place.directory, read_only=True)
        return remote_store(self.place, self.sizes)


def _local_sizes(directory: Path, committed: bool) -> dict[str, int]:
    if not directory.is_dir():
        kind = NotADirectoryError if directory.exists() else FileNotFoundError
        raise kind(str(directory))
    sizes: dict[str, int] = {}
    whole = not committed or (directory / DOCUMENT).exists()
    for folder, folders, names in os.walk(directory):
        if not whole and folder != str(directory):
            folders.clear()  # a checkpoint that was copied into it is seen by now
        base = Path(folder).relative_to(directory).as_posix()
        for name in names:
            with suppress(FileNotFoundError):
                size = os.stat(os.path.join(folder, name)).st_size
                sizes[name if base == "." else f"{base}/{name}"] = size
    return sizes


def _remote_sizes(place: Place, committed: bool) -> tuple[dict[str, int], bool]:
    """Return the sizes of the files, and whether it is the root's alone because nobody lists others."""
    with reading(place):
        place.files.invalidate_cache()
    if not committed:
        return list_remote(place), False
    root = sizes_of(place, [DOCUMENT])
    if root:
        return (list_remote(place), False) if lists_sizes(place, DOCUMENT) else (root, True)
    around = look_around(place)
    if not around:
        raise FileNotFoundError(place.url)
    return around, False
