"""Reading from stores that fsspec addresses, without believing more than they said.

Stores differ in what they leave out: a web server lists names without sizes or lists nothing, sends a whole
file where a part was asked for, doesn't know its length, or hangs up. None of that says anything about a
checkpoint. What is returned here are the bytes that were asked for, all of them; whatever else happens is a
`CheckpointReadError` with the address.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, final

import zarr.storage
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.spec import AbstractFileSystem

from dsa.checkpoint.places import Place
from dsa.checkpoint.workers import Workers
from dsa.errors import CheckpointReadError, DSAError

__all__ = [
    "list_remote",
    "lists_sizes",
    "look_around",
    "read_remote",
    "reading",
    "remote_store",
    "sizes_of",
    "told",
]

_ASKING_THREADS: Final = 8
_ABSENT: Final = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_STORE_ROOT: Final = "checkpoint"


@contextmanager
def reading(place: Place) -> Iterator[None]:
    """Turn whatever a store's library raises into an error that says where it happened.

    Raises:
        CheckpointReadError: the store refused, or can't be reached.
        FileNotFoundError: there is no such thing.
    """
    try:
        yield
    except (DSAError, *_ABSENT):
        raise
    except Exception as error:  # of whatever kind the store's library has
        code, reason = told(error)
        raise CheckpointReadError(
            code,
            f"{place.url!r} can't be read ({reason}): check the address, the connection, the rights and the "
            "storage_options",
        ) from error


def told(error: BaseException) -> tuple[int, str]:
    """Return the error number and the words in which a store's library says what was wrong."""
    code = error.errno if isinstance(error, OSError) else None
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return code or errno.EIO, reason


def lists_sizes(place: Place, key: str) -> bool:
    """Tell whether the store lists what is at a place, with sizes: many web servers don't.

    Args:
        place: The place.
        key: A file that is known to be there.
    """
    try:
        listed = place.files.ls(place.root, detail=True)
        return any(place.key_of(str(each["name"])) == key and _size(each) is not None for each in listed)
    except Exception:  # who may not list may still read
        return False


def look_around(place: Place) -> dict[str, int]:
    """Return what is near the top of a place that is no checkpoint, directories too, as far as it can be had.

    It is for a hint, and never more is asked for: a web site could be behind the address.
    """
    try:
        near = _listing(place, maxdepth=2, withdirs=True)
    except Exception:
        return {}
    sizes = {key: size for key, size in near.items() if size is not None}
    return sizes | sizes_of(place, [key for key in near.keys() - sizes.keys() if key.endswith(".json")])


def list_remote(place: Place) -> dict[str, int]:
    """Return the bytes of each file at a place that isn't a directory of this machine, by its key.

    Raises:
        CheckpointReadError: the store refused.
    """
    with reading(place):
        listed = _listing(place)
    known = {key: size for key, size in listed.items() if size is not None}
    return known | sizes_of(place, listed.keys() - known.keys())


def _listing(place: Place, **options: Any) -> dict[str, int | None]:  # noqa: ANN401 - fsspec's
    sizes = {}
    for path, info in place.files.find(place.root, detail=True, **options).items():
        key = place.key_of(str(path))
        if key is not None:
            sizes[key] = _size(info)
    return sizes


def _size(info: Mapping[str, Any]) -> int | None:
    size = 0 if info.get("type") == "directory" else info.get("size")
    return None if size is None else int(size)


def sizes_of(place: Place, keys: Iterable[str]) -> dict[str, int]:
    """Return the bytes of those of some files that exist.

    Raises:
        CheckpointReadError: the store can't say whether one exists.
    """
    every = sorted(keys)
    if not every:
        return {}
    with Workers("dsa-look", min(_ASKING_THREADS, len(every))) as workers:
        tasks = [(key, workers.submit(_size_of, place, key)) for key in every]
        found = [(key, task.result()) for key, task in tasks]
    return {key: size for key, size in found if size is not None}


def _size_of(place: Place, key: str) -> int | None:
    """Return a file's bytes, counted where nobody tells them, or None when there is none."""
    path = place.remote_path(key)
    with reading(place):
        try:
            info = place.files.info(path)
            if info.get("type") == "directory":
                return None
            size = _size(info)
            if size is not None:
                return size
        except _ABSENT:
            pass  # which fsspec also says of a server that is out of order
        try:
            return len(place.files.cat_file(path))
        except _ABSENT:
            return None


def read_remote(place: Place, key: str, start: int, stop: int, size: int) -> bytes:
    """Return a part of a file: all of it.

    Args:
        place: The checkpoint.
        key: The file.
        start: First byte.
        stop: One more than the last, at most `size`.
        size: Of the whole file.

    Raises:
        CheckpointReadError: the store refused, or sent something else.
    """
    if start >= stop:
        return b""
    with reading(place):
        try:
            data = bytes(place.files.cat_file(place.remote_path(key), start=start, end=stop))
        except _ABSENT as error:
            raise CheckpointReadError(
                errno.ENOENT,
                f"{key!r} of {place.url!r} was there a moment ago and is not any more: somebody changes the "
                "checkpoint, try again when that is over",
            ) from error
    if len(data) == size != stop - start:  # a server that sends whole files, whatever it is asked for
        data = data[start:stop]
    if len(data) != stop - start:
        raise CheckpointReadError(
            errno.EIO,
            f"{place.url!r} has sent {len(data):,} bytes of {key!r} where {stop - start:,} of its {size:,} "
            "were asked for: somebody changes the checkpoint, or the connection failed; try again",
        )
    return data


def remote_store(place: Place, sizes: Mapping[str, int]) -> zarr.storage.FsspecStore:
    """Return a store for Zarr that reads as `read_remote` does.

    Args:
        place: The checkpoint.
        sizes: Its files; there are no others.
    """
    files = AsyncFileSystemWrapper(_Known(place, sizes), asynchronous=True)
    return zarr.storage.FsspecStore(files, read_only=True, path=_STORE_ROOT)


@final
class _Known(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The files of a checkpoint as a file system of fsspec's, as far as Zarr reads it."""

    cachable = False
    protocol = "dsa-checkpoint"

    def __init__(self, place: Place, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self._place = place
        self._sizes = sizes

    def _key(self, path: str) -> str:
        key = path.removeprefix(f"{_STORE_ROOT}/")
        if key not in self._sizes:
            raise FileNotFoundError(path)
        return key

    def info(self, path: str, **_: Any) -> dict[str, Any]:  # noqa: ANN401 - fsspec's
        """Return what is known of a file."""
        return {"name": path, "size": self._sizes[self._key(path)], "type": "file"}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:  # noqa: ANN401
        """Return a part of a file; negative numbers count from its end."""
        key = self._key(path)
        size = self._sizes[key]
        low, high, _step = slice(start, end).indices(size)
        return read_remote(self._place, key, low, high, size)
