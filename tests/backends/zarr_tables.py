"""Live Zarr tables for tests: made, damaged, and looked at from behind."""

import os
from pathlib import Path

import numpy as np
import zarr

from dsa.backends.shards.encoding import index_bytes, read_index
from dsa.backends.zarr import ZarrBackend
from dsa.backends.zarr_compressed import CompressedZarrBackend
from dsa.backends.zarr_group import array_layouts
from dsa.errors import StateCorruptError
from dsa.schema import Schema
from dsa.testing import BackendHooks, random_records


def decode(path, description):
    """Return the records of a table as zarr reads them."""
    schema = Schema.from_json(description["schema"])
    group = zarr.open_group(path, mode="r")
    records = np.zeros(description["rows"], schema.dtype)
    for name in schema.names:
        records[name] = group[name][:]
    return records


def damage(path, description, row):
    """Change one bit of the first field of a row, or of the chunk that it is in."""
    layout = array_layouts(description)[0]
    shard, place = divmod(row, layout.shard_rows)
    file = path / layout.spec.name / layout.shard_key(shard)
    content = bytearray(file.read_bytes())
    at = place * layout.spec.row_bytes
    if description["compression"] is not None:
        tail = index_bytes(layout.chunks_per_shard)
        places = read_index(layout, bytes(content[-tail:]), len(content) - tail)
        offset, length = places[place // layout.chunk_rows]
        at = offset + length // 2
    content[at] ^= 4
    file.write_bytes(content)
    return True


class Mapped(BackendHooks):
    """The backend of mapped shards."""

    def __init__(self, shard_bytes=None, allocate="sparse"):
        self.shard_bytes, self.allocate = shard_bytes, allocate

    def create(self, path, rows, schema):
        return ZarrBackend.create(path, rows, schema, shard_bytes=self.shard_bytes, allocate=self.allocate)

    def reopen(self, path, description, **options):
        return ZarrBackend.open(path, description, **options)

    def read_raw(self, path, description):
        return decode(path, description)

    def damage(self, path, description, row):
        return damage(path, description, row)


class Compressed(BackendHooks):
    """The backend of compressed shards."""

    def __init__(self, shard_bytes=None, cache_bytes=1 << 20):
        self.shard_bytes, self.cache_bytes = shard_bytes, cache_bytes

    def create(self, path, rows, schema):
        return CompressedZarrBackend.create(
            path, rows, schema, shard_bytes=self.shard_bytes, cache_bytes=self.cache_bytes
        )

    def reopen(self, path, description, **options):
        return CompressedZarrBackend.open(path, description, cache_bytes=self.cache_bytes, **options)

    def read_raw(self, path, description):
        return decode(path, description)

    def damage(self, path, description, row):
        return damage(path, description, row)


HOOKS = {"mapped": Mapped(shard_bytes=1 << 12), "compressed": Compressed(shard_bytes=1 << 12)}


def make(hooks, path, rows, schema, seed=0, stamps=None):
    """Create, fill and close a table, with stamps if they are given; return its description and records."""
    backend = hooks.create(path, rows, schema)
    records = random_records(schema, rows, seed)
    if stamps is not None:
        records["s"] = stamps
    backend.write(np.arange(rows), records.copy())
    backend.close()
    return backend.describe(), records


def files_of(path):
    """Return the content of every file below a directory."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def occupied(path):
    """Return the bytes that the files below a directory take on disk."""
    return sum(file.stat().st_blocks for file in path.rglob("*") if file.is_file()) * 512


def open_files():
    """Return the paths behind this process's descriptors."""
    return [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]


def refusal(hooks, path, description, writable=True):
    """Open a table that must not open; return the error's text, having checked that nothing changed."""
    before = files_of(path) if path.is_dir() else None
    try:
        hooks.reopen(path, description, writable=writable).close()
    except StateCorruptError as error:
        assert before is None or files_of(path) == before
        return str(error)
    raise AssertionError("the table was opened")
