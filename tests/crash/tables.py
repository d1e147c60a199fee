"""The records of a table as its files hold them, decoded without the package's code, for every backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numcodecs.zstd import Zstd

from dsa.backends import Memmap, Zarr
from dsa.backends.system import PAGE
from dsa.schema import Schema
from dsa.state.metadata import read_metadata, table_file_name
from dsa.state.storage import Storage
from dsa.state.table_files import open_backend

__all__ = ["BACKENDS", "change_records", "records_in", "stored_tables"]

BACKENDS = {
    "memmap": Memmap(),
    "zarr": Zarr(shard_bytes=4096),
    "zstd": Zarr(shard_bytes=4096, compression="zstd", cache_bytes=20_000, overlay_bytes=1 << 14),
}
"""Layouts in which tables of a few hundred rows have several shards, and little is collected."""

_ABSENT = 2**64 - 1


def stored_tables(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the tables that a directory's description tells of."""
    metadata = read_metadata(directory)
    return {} if metadata is None else {str(table["name"]): table for table in metadata.tables}


def records_in(directory: Path, stored: dict[str, Any]) -> bytes:
    """Return the bytes of a table's records, in order, each with its checksum where it has one."""
    backend = stored["backend"]
    path = directory / table_file_name(stored["name"], stored.get("generation", 0), backend["kind"])
    if backend["kind"] == "memmap":
        return path.read_bytes()[PAGE:]
    schema = Schema.from_json(backend["schema"])
    records = np.zeros(backend["rows"], schema.dtype)
    for name in schema.names:
        field = records[name]
        row_bytes = field.dtype.itemsize * int(np.prod(field.shape[1:]))
        chunk, shard = (rows * row_bytes for rows in backend["cuts"][name])
        parts = [
            _shard(path / name / "c" / str(number) / ("0" if field.ndim == 2 else ""), chunk, shard, backend)
            for number in range(-(-len(records) * row_bytes // shard))
        ]
        values = np.frombuffer(b"".join(parts)[: field.nbytes], field.dtype)
        records[name] = values.reshape(field.shape)
    if "c" not in backend["cuts"]:
        return records.tobytes()
    chunk, shard = (4 * rows for rows in backend["cuts"]["c"])
    parts = [
        _shard(path / "c" / "c" / str(number), chunk, shard, backend)
        for number in range(-(-4 * len(records) // shard))
    ]
    sums = np.frombuffer(b"".join(parts)[: 4 * len(records)], np.uint8).reshape(len(records), 4)
    return np.concatenate([records.view(np.uint8).reshape(len(records), -1), sums], axis=1).tobytes()


def _shard(file: Path, chunk: int, shard: int, backend: dict[str, Any]) -> bytes:
    content = file.read_bytes()
    if backend["compression"] is None:
        return content[:shard]
    chunks = shard // chunk
    places = np.frombuffer(content[-16 * chunks - 4 : -4], "<u8").reshape(chunks, 2).tolist()
    return b"".join(
        bytes(chunk) if offset == _ABSENT else bytes(Zstd().decode(content[offset : offset + length]))
        for offset, length in places
    )


def change_records(directory: Path, stored: dict[str, Any], change: Any) -> None:
    """Change a closed table's records in place."""
    backend = open_backend(directory, stored["name"], stored, Storage())
    rows = np.arange(len(backend))
    records = backend.read(rows)
    change(records)
    backend.write(rows, records)
    backend.close()
