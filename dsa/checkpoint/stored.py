"""Arrays of a checkpoint that somebody else may have written: their documents are checked before any use.

Accepted is whatever plain Zarr may have made of a checkpoint without changing its content: any chunks, with
or without shards, the codecs ``bytes``, ``zstd``, ``gzip`` and ``crc32c``. Everything else is refused, and
so is an array that is larger than the files behind it can be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from dsa.backends.shards.layout import ArrayLayout, ArraySpec
from dsa.checkpoint.manifest import ArrayEntry, array_entry
from dsa.checkpoint.plain import plain_layout

__all__ = ["StoredArray", "chunk_keys", "stored_array"]

_TYPES: Final = {
    "<f2": "float16",
    "<f4": "float32",
    "<f8": "float64",
    "<u2": "uint16",
    "<i4": "int32",
    "<i8": "int64",
}
_CODECS: Final = ("bytes", "zstd", "gzip", "crc32c", "sharding_indexed")
Run = tuple[int, int]

_MOST_ASKED: Final = 1 << 20
_PLENTY: Final = 1 << 30
_LARGEST_CHUNK: Final = 4 << 30
_LARGEST_RATIO: Final = 1 << 16
"""No codec was seen to shrink an array that isn't zero further."""


@final
@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array that can be read.

    Args:
        path: Where it is in the checkpoint.
        entry: What its attributes say.
        missing: Half-open runs of rows for which a file is missing although they weren't declared to be zero.
        absent: Runs of rows that were declared to be zero and of which there is no file indeed.
        chunk: Shape of what a file holds.
        key_form: What a file's key begins with, and what separates its numbers.
        plain: How it is cut, if it is stored as an uncompressed export stores it; see `dsa.checkpoint.plain`.
    """

    path: str
    entry: ArrayEntry
    missing: tuple[Run, ...]
    absent: tuple[Run, ...]
    chunk: tuple[int, ...]
    key_form: tuple[str, str]
    plain: ArrayLayout | None = None

    @property
    def spec(self) -> ArraySpec:
        """Its shape and type."""
        return self.entry.digest.spec

    def files_of(self, start: int, stop: int) -> list[str]:
        """Return the keys of the files that hold a half-open range of rows, if they exist."""
        prefix, separator = self.key_form
        tails = _tails(self.spec, self.chunk, separator)
        numbers = range(start // self.chunk[0], -(-stop // self.chunk[0]))
        return [f"{self.path}/{prefix}{number}{tail}" for number in numbers for tail in tails]


def stored_array(
    document: Mapping[str, Any], spec: ArraySpec, path: str, sizes: Mapping[str, int]
) -> StoredArray:
    """Check an array's document.

    Args:
        document: Its ``zarr.json``.
        spec: What its table makes it.
        path: Where it is in the checkpoint.
        sizes: The files below its directory, by key: bytes.

    Raises:
        ValueError: it isn't an array that can be accepted.
    """
    _check_type(document, spec)
    chunk = _chunk_shape(document.get("chunk_grid"), spec)
    _check_codecs(document.get("codecs"), chunk, spec)
    attributes = document.get("attributes")
    entry = array_entry(attributes if isinstance(attributes, dict) else {}, spec)
    form = _key_form(document.get("chunk_key_encoding"))
    rows_of_files = _rows_of_files(spec, chunk, form, sizes)
    complete = [rows for rows, files in rows_of_files.items() if files == _files_per_row(spec, chunk)]
    missing = _complement([*complete, *entry.zero_rows], spec.rows)
    absent = _common(entry.zero_rows, _complement(rows_of_files, spec.rows))
    declared = sum(stop - start for start, stop in entry.zero_rows)
    claimed = (spec.rows - declared) * spec.row_bytes
    if claimed > _PLENTY + _LARGEST_RATIO * sum(sizes.values()):
        raise ValueError(f"its shape {spec.shape} is larger than the files behind it can hold")
    return StoredArray(path, entry, missing, absent, chunk, form, plain_layout(document, spec))


def _check_type(document: Mapping[str, Any], spec: ArraySpec) -> None:
    expected = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(spec.shape),
        "data_type": _TYPES[spec.dtype],
        "fill_value": 0,
    }
    for key, value in expected.items():
        found: Any = document.get(key)
        if found != value or isinstance(found, bool) or (found == 0 and math.copysign(1, found) < 0):
            raise ValueError(f"its {key} is {found!r}, not {value!r}")
    if document.get("storage_transformers"):
        raise ValueError("it has storage transformers, which are not accepted")


def _chunk_shape(grid: Any, spec: ArraySpec) -> tuple[int, ...]:  # noqa: ANN401 - JSON
    if not isinstance(grid, dict) or grid.get("name") != "regular":
        raise ValueError(f"its chunk grid {grid!r} is not accepted: only 'regular'")
    return _shape(grid, spec)


def _shape(holder: Mapping[str, Any], spec: ArraySpec) -> tuple[int, ...]:
    """Return the ``chunk_shape`` of a configuration, which must not be far larger than the array."""
    configuration = holder.get("configuration")
    shape = configuration.get("chunk_shape") if isinstance(configuration, dict) else None
    whole = isinstance(shape, list) and all(type(size) is int and size >= 1 for size in shape)
    if not whole or not isinstance(shape, list) or len(shape) != len(spec.shape):
        raise ValueError(f"its chunks {shape!r} don't fit its shape {spec.shape}")
    size = math.prod(shape) * (spec.row_bytes // (spec.columns or 1))
    if size > min(_LARGEST_CHUNK, 4 * spec.rows * spec.row_bytes + (16 << 20)):
        raise ValueError(f"its chunks {shape!r} of {size:,} bytes are too large")
    return tuple(shape)


def _check_codecs(
    codecs: Any,  # noqa: ANN401 - JSON
    outer: tuple[int, ...],
    spec: ArraySpec,
    nested: bool = False,
) -> None:
    if not isinstance(codecs, list) or not codecs:
        raise ValueError(f"its codecs {codecs!r} can't be read")
    for codec in codecs:
        name = codec.get("name") if isinstance(codec, dict) else codec
        if name not in _CODECS:
            reason = "a damaged chunk of it can crash the process" if name == "blosc" else "not one of ours"
            raise ValueError(
                f"its codec {name!r} is not accepted ({reason}): rewrite the array with zstd or without"
            )
        if name == "sharding_indexed":
            if nested or not isinstance(codec, dict):
                raise ValueError("its shards are nested, which is not accepted")
            inner = _shape(codec, spec)
            if any(size % part for size, part in zip(outer, inner, strict=True)):
                raise ValueError(f"its chunks {list(inner)} don't divide its shards {list(outer)}")
            _check_codecs(codec["configuration"].get("codecs"), inner, spec, nested=True)
            _check_codecs(codec["configuration"].get("index_codecs"), inner, spec, nested=True)


def _key_form(encoding: Any) -> tuple[str, str]:  # noqa: ANN401 - JSON
    """Return what a chunk's key begins with and what separates its numbers."""
    configuration = encoding.get("configuration") if isinstance(encoding, dict) else None
    separator = configuration.get("separator") if isinstance(configuration, dict) else None
    name = encoding.get("name") if isinstance(encoding, dict) else None
    if name == "default" and separator in (None, "/", "."):
        return f"c{separator or '/'}", separator or "/"
    if name == "v2" and separator in (None, "/", "."):
        return "", separator or "."
    raise ValueError(f"its chunk keys {encoding!r} are not accepted")


def _files_per_row(spec: ArraySpec, chunk: tuple[int, ...]) -> int:
    return 1 if spec.columns is None else -(-spec.columns // chunk[1])


def chunk_keys(document: Mapping[str, Any], spec: ArraySpec) -> list[str]:
    """Return the keys that an array's chunks may have below its directory, for places that don't list them.

    Args:
        document: Its ``zarr.json``.
        spec: What its table makes it.

    Raises:
        ValueError: it isn't an array that can be accepted, or has more chunks than anybody can ask for.
    """
    chunk = _chunk_shape(document.get("chunk_grid"), spec)
    prefix, separator = _key_form(document.get("chunk_key_encoding"))
    rows, columns = -(-spec.rows // chunk[0]), _files_per_row(spec, chunk)
    if rows * columns > _MOST_ASKED:
        raise ValueError(f"its {rows * columns:,} chunks are not listed where it is, and too many to ask for")
    tails = _tails(spec, chunk, separator)
    return [f"{prefix}{row}{tail}" for row in range(rows) for tail in tails]


def _tails(spec: ArraySpec, chunk: tuple[int, ...], separator: str) -> list[str]:
    """Return what follows the number of a chunk's rows in its key."""
    if spec.columns is None:
        return [""]
    return [f"{separator}{column}" for column in range(_files_per_row(spec, chunk))]


def _rows_of_files(
    spec: ArraySpec, chunk: tuple[int, ...], form: tuple[str, str], sizes: Mapping[str, int]
) -> dict[Run, int]:
    """Return the rows of the chunks that are there, half-open, and how many files each of these runs has.

    Files that are no chunks of the array, whatever their names, are not counted.
    """
    prefix, separator = form
    columns = _files_per_row(spec, chunk)
    found: dict[Run, int] = {}
    for key in sizes:
        numbers = key.removeprefix(prefix).split(separator)
        if key.startswith(prefix) and len(numbers) == len(chunk) and all(map(_is_number, numbers)):
            start = int(numbers[0]) * chunk[0]
            if start < spec.rows and (len(numbers) == 1 or int(numbers[1]) < columns):
                rows = (start, min(spec.rows, start + chunk[0]))
                found[rows] = found.get(rows, 0) + 1
    return found


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20 and (text == "0" or text[0] != "0")


def _complement(runs: Iterable[Run], rows: int) -> tuple[Run, ...]:
    """Return the runs of the rows that are in none of some runs."""
    rest = []
    end = 0
    for start, stop in [*sorted(runs), (rows, rows)]:
        if start > end:
            rest.append((end, start))
        end = max(end, stop)
    return tuple(rest)


def _common(some: Sequence[Run], others: Sequence[Run]) -> tuple[Run, ...]:
    """Return the rows that are in both of two lists of runs, which are in order."""
    both = []
    i = j = 0
    while i < len(some) and j < len(others):
        start, stop = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if start < stop:
            both.append((start, stop))
        if some[i][1] <= others[j][1]:
            i += 1
        else:
            j += 1
    return tuple(both)
