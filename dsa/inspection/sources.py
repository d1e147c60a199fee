"""The records of a table, opened for reading only, by the kind of the backend that wrote them.

To add a kind, write a function that opens its records as a `Source`, and name it in `OPENERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

from numpy.typing import NDArray

from dsa.backends.base import StateBackend
from dsa.backends.memmap import MemmapBackend
from dsa.backends.zarr import ZarrBackend
from dsa.backends.zarr_compressed import CompressedZarrBackend
from dsa.errors import StateCorruptError
from dsa.state.metadata import METADATA_NAME, table_file_name

__all__ = ["OPENERS", "Source", "open_source"]


@final
@dataclass(frozen=True, slots=True)
class Source:
    """Records that are only read.

    Args:
        backend: Reads and scans them; nothing of it that writes is called.
        field: Returns one field of all rows, ``(N, D)`` or ``(N,)``, as the files hold it and without reading
            it: a numpy array over mapped memory, or where that can't be had an object with `shape`, `dtype`
            and slices that are numpy arrays, such as a Zarr array.
        files: What is on disk for the table.
        renew: Opens the records again, where whoever trains replaces files as wholes, so that what `backend`
            remembers of them grows stale; None where it doesn't.
    """

    backend: StateBackend
    field: Callable[[str], NDArray[Any]]
    files: tuple[Path, ...]
    renew: Callable[[], StateBackend] | None = None


def _open_memmap(directory: Path, stored: Mapping[str, Any]) -> Source:
    file = directory / table_file_name(stored["name"], stored.get("generation", 0))
    backend = MemmapBackend.open(file, stored["backend"], writable=False)
    return Source(backend, lambda name: backend.records[name], (file,))


def _open_zarr(directory: Path, stored: Mapping[str, Any]) -> Source:
    file = directory / table_file_name(stored["name"], stored.get("generation", 0), "zarr")
    description, field = stored["backend"], partial(_zarr_field, file)
    files = tuple(path for path in file.rglob("*") if path.is_file())
    if description["compression"] is None:
        return Source(ZarrBackend.open(file, description, writable=False), field, files)
    renew = partial(CompressedZarrBackend.open, file, description, writable=False)
    return Source(renew(), field, files, renew)


def _zarr_field(file: Path, name: str) -> Any:  # noqa: ANN401 - a zarr.Array, whose slices are numpy arrays
    import zarr

    return zarr.open_array(file / name, mode="r")


OPENERS: Final[dict[str, Callable[[Path, Mapping[str, Any]], Source]]] = {
    "memmap": _open_memmap,
    "zarr": _open_zarr,
}
"""By kind, what opens a table's records: given the state directory and the table's description."""


def open_source(directory: Path, stored: Mapping[str, Any]) -> Source:
    """Open the records of a table.

    Args:
        directory: The state directory.
        stored: The table's description in the metadata.

    Raises:
        StateCorruptError: a file is missing, damaged, another table's, or of an unknown kind.
    """
    kind = stored["backend"].get("kind")
    opener = OPENERS.get(kind) if isinstance(kind, str) else None
    if opener is None:
        raise StateCorruptError(
            f"table {stored['name']!r} in {str(directory)!r} is stored by the unknown backend {kind!r}: this "
            f"release knows {sorted(OPENERS)}, open the state with the release that wrote it"
        )
    try:
        return opener(directory, stored)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, StateCorruptError):
            raise
        raise StateCorruptError(
            f"the description of table {stored['name']!r} in {str(directory)!r} can't be read ({error!r}): "
            f"restore {METADATA_NAME} from a copy"
        ) from error
