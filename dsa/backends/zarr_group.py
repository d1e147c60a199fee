"""The directory of a live Zarr table: a Zarr v3 group that holds one array for each field of the record.

::

    zarr.json        the group; its attribute `dsa_table` is the table's description
    w/zarr.json      an array; its attribute `dsa_field` names the table's id and the field
    w/c/0/0          a shard: inner chunks, a label, the index
    t/c/0            a shard of a field with one number per row
    c/zarr.json      an array of dsa's own: a checksum for each row

A reader takes the chunks from where the index says that they are, so that bytes of our own may lie before it:
the label, which says of which table, field and place a shard is. Truncated, swapped and foreign files are
told apart from sound ones when the table is opened.

The checksum of a row is that of `dsa.kernels.checksums` over its fields in the record's order, each number
cut into int32 words, or into int16 ones where a row of its field is no whole number of words; the n-th word
has the n-th factor. Rows of zeros have the checksum 0. Compressed chunks have checksums of zstd's besides,
which tell damage, but not fields of different times.

The documents are compared by what they say and not byte by byte: consolidated metadata or attributes that
someone adds do no harm.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from dsa.backends import system
from dsa.backends.base import GROWING
from dsa.backends.shards.documents import (
    DOCUMENT,
    Compression,
    array_document,
    encode_document,
    group_document,
)
from dsa.backends.shards.encoding import index_bytes
from dsa.backends.shards.layout import SHARD_BYTES, ArrayLayout, ArraySpec, plan_layout
from dsa.errors import StateCorruptError
from dsa.schema import Schema, has_stamp

__all__ = [
    "LABEL_BYTES",
    "MOST_MAPPED",
    "array_layouts",
    "check_group",
    "checksum_layouts",
    "corrupt",
    "describe_group",
    "disk_bytes",
    "open_field",
    "shard_files",
    "shard_label",
    "sync_tree",
    "write_group",
]

LABEL_BYTES: Final = 64
_CHECKSUM_NOTE: Final = "checksum of the row's record, by which dsa knows damage; no part of the state"
_LIVE_SHARD_BYTES: Final = 256 << 20
MOST_MAPPED: Final = 100
_COMPRESSED_CHUNK_ROWS: Final = 64
_LARGEST_CHUNK: Final = 1 << 30
_DECISIVE: Final = (
    "zarr_format",
    "node_type",
    "shape",
    "data_type",
    "chunk_grid",
    "chunk_key_encoding",
    "fill_value",
    "codecs",
)


def describe_group(
    rows: int, schema: Schema, compression: Compression, shard_bytes: int | None
) -> dict[str, Any]:
    """Return the description of a new table: what `array_layouts` reads the layout from, for ever.

    Without compression every shard is mapped, and its file open: shards grow until a table has at most a
    hundred. With it a shard is rewritten for any of its rows: shards are small, and all fields are cut at the
    same rows.
    """
    if rows < 1:
        raise ValueError(f"rows={rows!r} is out of range: pass at least 1")
    specs = [*_specs(rows, schema), *_checksum_specs(rows, schema)]
    if compression is None:
        layouts = _mapped_layouts(specs, shard_bytes)
    else:
        widest = max(specs, key=lambda spec: spec.row_bytes)
        chunk = max(1, min(_COMPRESSED_CHUNK_ROWS, _LARGEST_CHUNK // widest.row_bytes))
        cut = plan_layout(widest, shard_bytes=shard_bytes or SHARD_BYTES, chunk_rows=chunk)
        layouts = [ArrayLayout(spec, cut.chunk_rows, cut.shard_rows) for spec in specs]
    return {
        "kind": "zarr",
        "id": secrets.token_hex(8),
        "rows": rows,
        "schema": schema.to_json(),
        "compression": compression,
        "shard_bytes": shard_bytes,
        "cuts": {each.spec.name: [each.chunk_rows, each.shard_rows] for each in layouts},
    }


def _mapped_layouts(specs: list[ArraySpec], shard_bytes: int | None) -> list[ArrayLayout]:
    if shard_bytes is not None:
        return [_balanced(_small_layout(spec, shard_bytes)) for spec in specs]
    size = _LIVE_SHARD_BYTES
    while True:
        layouts = [_balanced(plan_layout(spec, shard_bytes=size)) for spec in specs]
        files = sum(layout.shards for layout in layouts)
        if files <= max(MOST_MAPPED, len(specs)):
            return layouts
        size *= 2


def _balanced(layout: ArrayLayout) -> ArrayLayout:
    """Return a layout with as many shards of nearly equal length: each file has a whole shard's length."""
    chunks = -(-layout.spec.rows // layout.chunk_rows)
    return ArrayLayout(layout.spec, layout.chunk_rows, -(-chunks // layout.shards) * layout.chunk_rows)


def _small_layout(spec: ArraySpec, shard_bytes: int) -> ArrayLayout:
    """Return a layout whose chunks are smaller than usual where a shard is to be."""
    usual = plan_layout(spec, shard_bytes=shard_bytes)
    if usual.chunk_bytes <= shard_bytes:
        return usual
    rows = max(1, shard_bytes // spec.row_bytes)
    return plan_layout(spec, shard_bytes=shard_bytes, chunk_rows=1 << (rows.bit_length() - 1))


def _specs(rows: int, schema: Schema) -> list[ArraySpec]:
    fields: Any = schema.dtype.fields
    specs = []
    for field in schema.fields:
        stored: np.dtype[Any] = fields[field.name][0]
        columns = schema.dim if field.per == "element" else None
        specs.append(ArraySpec(field.name, stored.base.str, rows, columns))
    return specs


def _checksum_specs(rows: int, schema: Schema) -> list[ArraySpec]:
    """Return the array of checksums, if there is one: of records without a stamp there is none to mark."""
    if not has_stamp(schema):
        return []
    name = "c"
    while name in schema.names:
        name += "_"
    return [ArraySpec(name, "<i4", rows, None)]


def checksum_layouts(description: dict[str, Any]) -> list[ArrayLayout]:
    """Return how the array of checksums is cut, if there is one."""
    specs = _checksum_specs(description["rows"], Schema.from_json(description["schema"]))
    return [ArrayLayout(spec, *description["cuts"][spec.name]) for spec in specs]


def array_layouts(description: dict[str, Any]) -> list[ArrayLayout]:
    """Return how the fields of a table are cut, in the record's order."""
    schema = Schema.from_json(description["schema"])
    return [
        ArrayLayout(spec, *description["cuts"][spec.name]) for spec in _specs(description["rows"], schema)
    ]


def disk_bytes(description: dict[str, Any]) -> tuple[int, int]:
    """Return what a table takes before rows are written, without its documents, and its largest file.

    The first counts the blocks that ``allocate="reserve"`` takes.
    """
    total = largest = 0
    for layout in array_layouts(description) + checksum_layouts(description):
        tail = LABEL_BYTES + index_bytes(layout.chunks_per_shard)
        data = layout.spec.rows * layout.spec.row_bytes if description["compression"] is None else 0
        total += data + layout.shards * tail
        largest = max(largest, layout.shard_bytes + tail)
    return total, largest


def open_field(path: Path, name: str) -> Any:  # noqa: ANN401 - a zarr.Array, whose slices are numpy arrays
    """Return a field of all rows as zarr-python reads it, which is imported only for that."""
    import zarr

    return zarr.open_array(path / name, mode="r")


def shard_label(identity: str, field: int, shard: int) -> bytes:
    """Return the label of a shard.

    Args:
        identity: The table's id.
        field: The field's place in the record.
        shard: The shard's place in the array.
    """
    return f"dsa-shard-1 {identity} {field} {shard}\n".encode().ljust(LABEL_BYTES, b"\0")


def shard_files(path: Path, layout: ArrayLayout) -> list[Path]:
    """Return the files of an array's shards, in order."""
    return [path / layout.spec.name / layout.shard_key(shard) for shard in range(layout.shards)]


def write_group(
    path: Path, description: dict[str, Any], write: Callable[[Path, bytes], object] = Path.write_bytes
) -> None:
    """Write the documents, the group's last: with it the directory becomes a Zarr group of so many rows.

    Args:
        path: The table's directory.
        description: The table's.
        write: Writes a document; where there is one already, it has to replace it as a whole.
    """
    fields = Schema.from_json(description["schema"]).names
    documents = {}
    for layout in array_layouts(description) + checksum_layouts(description):
        name = layout.spec.name
        attributes: dict[str, Any] = {"dsa_field": [description["id"], name]}
        if name not in fields:
            attributes["description"] = _CHECKSUM_NOTE
        documents[name] = array_document(layout, description["compression"], attributes)
    for name, document in documents.items():
        write(path / name / DOCUMENT, encode_document(document))
    root = group_document({"dsa_table": description}, documents)
    write(path / DOCUMENT, encode_document(root))


def check_group(path: Path, description: dict[str, Any]) -> bool:
    """Check the documents of a table's directory.

    Returns:
        Whether they name more rows than the description, as an interrupted growth leaves them, see `GROWING`.

    Raises:
        StateCorruptError: one is missing, damaged or another table's.
    """
    root = _document(path / DOCUMENT, path)
    attributes = root.get("attributes")
    stored = attributes.get("dsa_table") if isinstance(attributes, dict) else None
    growing = description.get(GROWING)
    description = {key: value for key, value in description.items() if key != GROWING}
    rows: Any = description.get("rows")
    told = rows
    if growing:
        told = _more_than(rows, stored)
    if _text(stored) != _text({**description, "rows": told}) or root.get("node_type") != "group":
        what = "is another table's" if isinstance(stored, dict) else "was not written by dsa"
        raise corrupt(path, f"{what}, or its {DOCUMENT} is damaged")
    # The description is what `describe_group` made, so that its values need no further check.
    if len(description["cuts"]) < _arrays_of(description):
        what = "is of an older version, whose rows have no checksums and which this release can't read"
        raise StateCorruptError(f"the table {str(path)!r} {what}: start over, or import a checkpoint")
    for layout in array_layouts(description) + checksum_layouts(description):
        name = layout.spec.name
        expected = array_document(layout, description["compression"], {})
        found = _document(path / name / DOCUMENT, path)
        shape = found.get("shape")
        if growing and isinstance(shape, list) and shape:
            expected["shape"][0] = _more_than(rows, {"rows": shape[0]})
            told = max(told, expected["shape"][0])
        attributes = found.get("attributes")
        mark = attributes.get("dsa_field") if isinstance(attributes, dict) else None
        if mark != [description["id"], name]:
            what = f"has an array of another table or field in place of its field {name!r}"
            raise corrupt(path, f"{what}, or its {DOCUMENT} is damaged")
        if any(_text(found.get(key)) != _text(expected[key]) for key in _DECISIVE):
            raise corrupt(path, f"has a damaged {DOCUMENT} of its field {name!r}")
    return bool(told > rows)


def _more_than(rows: int, stored: object) -> int:
    """Return how many rows something stored names, if these are more, and else `rows`."""
    told = stored.get("rows") if isinstance(stored, dict) else None
    return told if isinstance(told, int) and told > rows else rows


def _arrays_of(description: dict[str, Any]) -> int:
    schema = Schema.from_json(description["schema"])
    return len(schema.fields) + has_stamp(schema)


def _document(file: Path, path: Path) -> dict[str, Any]:
    where = file.relative_to(path)
    try:
        document = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise corrupt(path, f"lacks its file {str(where)!r}") from error
    except (ValueError, RecursionError) as error:
        raise corrupt(path, f"has a damaged file {str(where)!r} ({error})") from error
    if not isinstance(document, dict):
        raise corrupt(path, f"has a damaged file {str(where)!r}")
    return document


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def corrupt(path: Path, what: str) -> StateCorruptError:
    """Return the error about a table's directory."""
    return StateCorruptError(f"the table {str(path)!r} {what}: restore it from a copy, or start over")


def sync_tree(path: Path, files: Iterator[Path]) -> None:
    """Return once the names and documents below a directory, and some other files, are on the device."""
    for file in (*path.rglob(DOCUMENT), *files):
        descriptor = os.open(file, os.O_RDWR | getattr(os, "O_BINARY", 0))
        try:
            system.sync_file(descriptor)
        finally:
            os.close(descriptor)
    for directory, _, _ in os.walk(path, topdown=False):
        system.sync_directory(directory)
    system.sync_directory(path.parent)
