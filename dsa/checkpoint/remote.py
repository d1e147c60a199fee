"""Writing a checkpoint to a store that can't rename: the root's document, put last, makes it one.

Everything else is uploaded first, listed again, and compared by size; then the root is created, exclusively
where the store can. Without its root a checkpoint is incomplete and no import accepts it. To replace one, its
root is removed first and then the rest: there is never a mixture, but from then until the end there is no
checkpoint at all. Give each step an address of its own where that matters. Two exports to one address at the
same time are not kept apart by such stores; what comes out may fail its verification.
"""

from __future__ import annotations

import inspect
import json
import posixpath
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, final

from dsa.backends.shards.documents import DOCUMENT
from dsa.checkpoint.manifest import ARRAY_CHECKSUM
from dsa.checkpoint.occupied import STATE_FILE, check_folder, check_replaceable, root_attribute
from dsa.checkpoint.places import Place
from dsa.checkpoint.transport import list_remote, told
from dsa.errors import CheckpointExistsError, CheckpointReadError, CheckpointWriteError, DSAError

__all__ = ["RemoteTarget"]

_ZEROS: Final = bytes(1 << 20)
_LEFT_OVER: Final = re.compile(r"[^/]+/(?:zarr\.json|[A-Za-z_][A-Za-z0-9_]*/(?:zarr\.json|c/\d+(?:/0)?))")
"""The keys that an interrupted upload leaves."""


@final
class RemoteTarget:
    """A checkpoint that is being written to a store; what it replaces is removed at once.

    Args:
        place: Where it will be.
        overwrite: Whether it may replace a checkpoint, or what an interrupted export has left.

    Raises:
        CheckpointExistsError: something is there that may not be replaced, or that the place lies inside of.
    """

    def __init__(self, place: Place, *, overwrite: bool) -> None:
        self.place = place
        self._files = place.files
        self._sizes: dict[str, int] = {}
        self._open: set[_RemoteFile] = set()
        with _writing(place):
            place.files.invalidate_cache()
            _check_inside_nothing(place)
            existing = list_remote(place)
            if existing:
                _check_replaceable(place, sorted(existing), overwrite)
                self._remove(existing)

    def create(self, key: str) -> _RemoteFile:
        """Begin a file; see `dsa.checkpoint.targets.Target`."""
        self._sizes[key] = -1
        with _writing(self.place):
            file = _RemoteFile(self._files.open(self.place.remote_path(key), "wb"), self, key)
        self._open.add(file)
        return file

    def put(self, key: str, data: bytes) -> None:
        """Write a whole file."""
        self._sizes[key] = len(data)
        with _writing(self.place):
            self._files.pipe_file(self.place.remote_path(key), data)

    def closed(self, file: _RemoteFile, key: str, size: int) -> None:
        """Take note of a file that is complete."""
        self._open.discard(file)
        self._sizes[key] = size

    def written(self) -> Place:
        """Return where the files can be read before they are committed."""
        return self.place

    def commit(self, root: bytes) -> str:
        """Compare what is there with what was written, put the root, and return the URL.

        Raises:
            CheckpointWriteError: a file is missing or has another size.
            CheckpointExistsError: somebody else has put a root meanwhile.
        """
        with _writing(self.place):
            self._files.invalidate_cache()
            found = list_remote(self.place)
        for key in sorted(self._sizes.keys() | found.keys()):
            if key != DOCUMENT and found.get(key) != self._sizes.get(key):
                raise CheckpointWriteError(
                    f"{key!r} at {self.place.url!r} has {found.get(key)} bytes after it was written with "
                    f"{self._sizes.get(key)}: somebody else writes there too, or the store failed; try again"
                )
        try:
            with _writing(self.place):
                self._put_once(self.place.remote_path(DOCUMENT), root)
        except FileExistsError as error:
            self._sizes.clear()
            raise CheckpointExistsError(
                f"somebody else has completed a checkpoint at {self.place.url!r} meanwhile; both may be "
                "spoilt: verify it, and choose another address"
            ) from error
        self._sizes.clear()
        return self.place.url

    def _put_once(self, path: str, data: bytes) -> None:
        kind = type(self._files)
        parameters = inspect.signature(getattr(kind, "_pipe_file", kind.pipe_file)).parameters
        if "mode" in parameters:
            with suppress(NotImplementedError):
                self._files.pipe_file(path, data, mode="create")
                return
        if self._files.exists(path):
            raise FileExistsError(path)
        self._files.pipe_file(path, data)

    def abort(self) -> None:
        """Remove what was uploaded, as far as the store lets us."""
        for file in list(self._open):
            with suppress(Exception):
                file.discard()
        written, self._sizes = list(self._sizes), {}
        with suppress(Exception):  # what happened before is what the user has to know
            self._files.invalidate_cache()
            self._remove(key for key in written if key in list_remote(self.place))

    def _remove(self, keys: Iterator[str] | dict[str, int]) -> None:
        every = sorted(keys)
        if DOCUMENT in every:
            self._files.rm_file(self.place.remote_path(DOCUMENT))
        rest = [self.place.remote_path(key) for key in every if key != DOCUMENT]
        if rest:
            self._files.rm(rest)


@final
class _RemoteFile:
    def __init__(self, file: Any, target: RemoteTarget, key: str) -> None:  # noqa: ANN401 - fsspec's files
        self._file = file
        self._target = target
        self._key = key
        self._size = 0

    def write(self, data: Any) -> None:  # noqa: ANN401 - any buffer
        self._size += memoryview(data).nbytes
        with _writing(self._target.place):
            self._file.write(data)

    def skip(self, size: int) -> None:
        for start in range(0, size, len(_ZEROS)):
            self.write(_ZEROS[: size - start])

    def close(self) -> None:
        with _writing(self._target.place):
            self._file.close()
        self._target.closed(self, self._key, self._size)

    def discard(self) -> None:
        """Give an upload up."""
        discard = getattr(self._file, "discard", None)
        if discard is not None:
            discard()


@contextmanager
def _writing(place: Place) -> Iterator[None]:
    """Turn whatever a store's library raises into an error that says where it happened.

    Raises:
        CheckpointWriteError: the store refused, or can't be reached.
        FileExistsError: something is there that was to be made.
    """
    try:
        yield
    except CheckpointReadError as error:
        raise _refused(place, error.__cause__ or error) from error
    except (DSAError, FileExistsError):
        raise
    except Exception as error:  # of whatever kind the store's library has
        raise _refused(place, error) from error


def _refused(place: Place, error: BaseException) -> CheckpointWriteError:
    code, reason = told(error)
    return CheckpointWriteError(
        code,
        f"{place.url!r} can't be written to ({reason}): check the bucket, the endpoint and the "
        "storage_options",
    )


def _check_inside_nothing(place: Place) -> None:
    folder = place.root
    while folder.strip("/"):
        own = folder == place.root
        try:
            is_state = place.files.exists(f"{folder}/{STATE_FILE}")
            is_checkpoint = not own and _root_of(place, folder) is not None
        except PermissionError:
            # Credentials for a prefix only: nothing above is anybody's here.
            if own:
                raise
            return
        check_folder(place.url, folder, own, is_state, is_checkpoint)
        folder = posixpath.dirname(folder)


def _root_of(place: Place, folder: str) -> dict[str, Any] | None:
    try:
        return root_attribute(place.files.cat_file(f"{folder}/{DOCUMENT}"))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None


def _is_left_over(place: Place, keys: list[str]) -> bool:
    """Tell whether everything is what an interrupted upload of ours leaves, by names and by documents."""
    if DOCUMENT in keys or not all(map(_LEFT_OVER.fullmatch, keys)):
        return False
    documents = [key for key in keys if key.endswith(f"/{DOCUMENT}")]
    return bool(documents) and all(_is_ours(place, key) for key in documents)


def _is_ours(place: Place, key: str) -> bool:
    try:
        attributes = json.loads(place.files.cat_file(place.remote_path(key))).get("attributes")
    except (OSError, ValueError, AttributeError):
        return False
    return isinstance(attributes, dict) and bool({ARRAY_CHECKSUM, "stored_schema"} & set(attributes))


def _check_replaceable(place: Place, keys: list[str], overwrite: bool) -> None:
    attribute = _root_of(place, place.root)
    if attribute is not None or not _is_left_over(place, keys):
        check_replaceable(place.url, attribute, lambda: keys, "a checkpoint", overwrite)
    elif not overwrite:
        raise CheckpointExistsError(
            f"{place.url!r} already holds an incomplete checkpoint: choose another address or pass "
            "overwrite=True"
        )
