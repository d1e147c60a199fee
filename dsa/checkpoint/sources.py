"""A checkpoint that is there already: its files and their sizes, small documents, and a store for Zarr.

Nothing is ever written or changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

import zarr.storage
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

from dsa.checkpoint.places import Place
from dsa.shards.documents import DOCUMENT

__all__ = ["Source", "list_remote"]

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
    """

    def __init__(self, place: Place, committed: bool = True) -> None:
        self.place = place
        if place.directory is not None:
            self.sizes = _local_sizes(place.directory, committed)
        else:
            self.sizes = _remote_sizes(place)
        """Bytes of each file by its key."""

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
        remote = self.place.remote_path(key)
        for start in range(0, self.sizes[key], _REMOTE_PIECE):
            stop = min(self.sizes[key], start + _REMOTE_PIECE)
            yield self.place.files.cat_file(remote, start=start, end=stop)

    def read_into(self, key: str, start: int, out: memoryview) -> int:
        """Fill memory with a file's bytes from a place on and return how many there were."""
        path = self.path(key)
        if path is None:
            data = self.place.files.cat_file(self.place.remote_path(key), start=start, end=start + len(out))
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
        files = AsyncFileSystemWrapper(self.place.files, asynchronous=True)
        return zarr.storage.FsspecStore(files, read_only=True, path=self.place.root)


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


def list_remote(place: Place) -> dict[str, int]:
    """Return the bytes of each file at a place that isn't a directory of this machine, by its key."""
    sizes = {}
    for path, info in place.files.find(place.root, detail=True).items():
        key = place.key_of(str(path))
        if key is not None:
            sizes[key] = int(info.get("size") or 0)
    return sizes


def _remote_sizes(place: Place) -> dict[str, int]:
    place.files.invalidate_cache()
    sizes = list_remote(place)
    if not sizes:
        raise FileNotFoundError(place.url)
    return sizes
