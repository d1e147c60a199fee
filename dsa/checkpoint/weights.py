"""Weights alone, for serving: as a Zarr group, as one safetensors file, or as Parquet files.

The safetensors format (https://github.com/huggingface/safetensors, "Format"): the length of the header as a
little-endian uint64, the header as JSON, then the tensors one after the other. It is written here and not by
its library, which wants every tensor in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, Unpack, cast

import numpy as np

from dsa.backends.system import available_bytes, retried, sync_directory
from dsa.checkpoint.export import ExportOptions, write_checkpoint
from dsa.checkpoint.meter import metered
from dsa.checkpoint.names import group_names
from dsa.checkpoint.parquet import write_parquet
from dsa.checkpoint.places import Place, find_place
from dsa.errors import CheckpointExistsError, CheckpointMismatchError, CheckpointWriteError, DiskSpaceError
from dsa.kernels.decay import caught_up
from dsa.schema import Records, Schema, is_bfloat16, is_keyed, widened
from dsa.state.content import Blocks, StateContent, TableContent, recast
from dsa.state.facts import TableFacts
from dsa.state.keys import owned_rows

__all__ = ["write_weights"]

_SAFETENSORS: Final = ".safetensors"
_PARQUET: Final = ".parquet"
_TABLE: Final = "{table}"
_SPOOL_BYTES: Final = 16 << 20
_BLOCK_BYTES: Final = 4 << 20


def write_weights(
    content: StateContent, url: str | os.PathLike[str], **options: Unpack[ExportOptions]
) -> str:
    """Write the weights of a state; of tables whose rows belong to ids those rows, with their ids.

    Args:
        content: The state.
        url: Where to: a file or an URL that ends in ``.safetensors`` or ``.parquet``; anything else becomes a
            Zarr group as `dsa.checkpoint.write_checkpoint` writes it, with the field ``w`` only, and ``id``
            where rows belong to ids. In a safetensors file these are ``<name>.id`` and ``<name>.w``. A
            Parquet file holds one table, with the columns ``id`` (the row, where it belongs to no id) and
            ``w``; of several the names take the place of ``{table}``.
        options: Those of `write_checkpoint`; of them files take `overwrite`, `progress`, `durable` and
            `storage_options`.

    Returns:
        The path or the URL.

    Raises:
        CheckpointMismatchError: a table's weights are not in the state but in a module that isn't there; or
            no id has a row, which Zarr can't say.
        CheckpointExistsError: something is there.
        DiskSpaceError: there is too little room; nothing was written.
        CheckpointWriteError: the disk or the store refused.
        ValueError: an option has no meaning for a file, or one Parquet file is to hold several tables.
        ImportError: pyarrow is not installed, and a Parquet file is asked for.
    """
    for table in content.tables:
        if "w" not in table.schema.names:
            raise CheckpointMismatchError(
                f"the weights of table {table.name!r} are a module's parameter: export through the optimizer "
                "while the module lives, or save the module's state_dict"
            )
    served = replace(content, tables=tuple(_served(table) for table in content.tables))
    name = str(os.fspath(url))
    if not name.endswith((_SAFETENSORS, _PARQUET)):
        return write_checkpoint(_for_zarr(served), url, kind="weights", **options)
    for option in ("compression", "algorithm", "attributes"):
        if options.get(option) is not None:
            raise ValueError(
                f"{option}={options.get(option)!r} has no meaning for a file of weights: leave it out"
            )
    if name.endswith(_SAFETENSORS):
        header = _header(served)
        _write_file(
            url, options, len(header) + _size(served), lambda file: _write(file, served, header, options)
        )
    else:
        _write_parquet(served, name, options)
    return find_place(url, options.get("storage_options")).url


def _served(table: TableContent) -> TableContent:
    """Return what is served of a table: the weights as they are stored, and where rows have ids those."""
    weights = tuple(field for field in table.schema.fields if field.name == "w")
    if not is_keyed(table.schema):
        schema = Schema(table.schema.dim, weights)
        return replace(
            table, facts=_bare(table, table.rows, schema), blocks=_picked(table, schema), stored=None
        )
    schema = Schema(table.schema.dim, (table.schema.fields[0], *weights))
    live = table.live
    if live is None:
        live = sum(int(np.count_nonzero(owned_rows(records))) for _, records in table.blocks())
    return replace(table, facts=_bare(table, live, schema), blocks=_owned(table, schema), stored=None)


def _bare(table: TableContent, rows: int, schema: Schema) -> TableFacts:
    return replace(table.facts, rows=rows, schema=schema, initializer=None, decay=0.0, added=())


def _picked(table: TableContent, schema: Schema) -> Blocks:
    def blocks() -> Iterator[tuple[int, Records]]:
        for first, records in table.blocks():
            yield first, recast(caught_up(records, table.facts.decay), schema)

    return blocks


def _owned(table: TableContent, schema: Schema) -> Blocks:
    """Return the rows that belong to ids, one after the other."""

    def blocks() -> Iterator[tuple[int, Records]]:
        done = 0
        for _, records in table.blocks():
            owned = recast(caught_up(records[owned_rows(records)], table.facts.decay), schema)
            if len(owned):
                yield done, owned
                done += len(owned)

    return blocks


def _for_zarr(content: StateContent) -> StateContent:
    for table in content.tables:
        if table.rows == 0:
            raise CheckpointMismatchError(
                f"no id of table {table.name!r} has a row, and a Zarr array has at least one: export it when "
                "some have, or to a file that ends in .safetensors"
            )
    return replace(content, tables=tuple(_widened(table) for table in content.tables))


def _widened(table: TableContent) -> TableContent:
    """Return a table with weights in float32: Zarr knows no bfloat16."""
    schema = widened(table.schema)
    return replace(table, facts=_bare(table, table.rows, schema), blocks=_picked(table, schema))


def _header(content: StateContent) -> bytes:
    tensors: dict[str, Any] = {"__metadata__": {"format": "pt", "global_step": str(content.global_step)}}
    end = 0
    for table, name in zip(content.tables, group_names(t.name for t in content.tables), strict=True):
        kind = "BF16" if is_bfloat16(table.schema.dtype["w"]) else "F32"
        keyed = "id" in table.schema.names
        parts = [(f"{name}.w" if keyed else name, kind, [table.rows, table.schema.dim], "w")]
        parts += [(f"{name}.id", "I64", [table.rows], "id")] if keyed else []
        for tensor, dtype, shape, field in parts:
            size = table.rows * table.schema.dtype[field].itemsize
            tensors[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_parquet(content: StateContent, name: str, options: ExportOptions) -> None:
    if len(content.tables) > 1 and _TABLE not in name:
        raise ValueError(
            f"{name!r} is one Parquet file, which holds one table, and there are {len(content.tables)}: put "
            f"{_TABLE} into the name, for a file for each"
        )
    with metered(options.get("progress", False), _size(content), "weights") as advance:
        for table, group in zip(content.tables, group_names(t.name for t in content.tables), strict=True):
            size = table.rows * (8 + 4 * table.schema.dim)
            _write_file(
                name.replace(_TABLE, group), options, size, partial(write_parquet, table, advance=advance)
            )


def _write_file(
    url: str | os.PathLike[str], options: ExportOptions, needed: int, write: Callable[[BinaryIO], None]
) -> None:
    place = find_place(url, options.get("storage_options"))
    if place.directory is None:
        _write_remote(place, options, write)
    else:
        _write_local(place.directory, options, needed, write)


def _write_local(path: Path, options: ExportOptions, needed: int, write: Callable[[BinaryIO], None]) -> None:
    durable = options.get("durable", True)
    if path.exists() and not options.get("overwrite"):
        raise _taken(str(path))
    if path.is_dir():
        raise CheckpointExistsError(f"{str(path)!r} is a directory: choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    free = available_bytes(path.parent)
    if needed > free:
        raise DiskSpaceError(needed, free, str(path.parent))
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            write(file)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        retried(os.replace, temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            retried(temporary.unlink, True)
        if isinstance(error, OSError):
            raise _refused(str(path), error) from error
        raise
    if durable:
        sync_directory(path.parent)


def _write_remote(place: Place, options: ExportOptions, write: Callable[[BinaryIO], None]) -> None:
    if place.files.exists(place.root) and not options.get("overwrite"):
        raise _taken(place.url)
    try:
        file = place.files.open(place.root, "wb")
        try:
            write(cast("BinaryIO", file))
        except BaseException:
            # Closing would make what is there the object: not in a with statement.
            getattr(file, "discard", lambda: None)()
            with contextlib.suppress(AttributeError):
                file.closed = True  # else its destructor closes what was given up
            raise
        file.close()
    except OSError as error:
        raise _refused(place.url, error) from error


def _write(file: BinaryIO, content: StateContent, header: bytes, options: ExportOptions) -> None:
    with metered(options.get("progress", False), _size(content), "weights") as advance:
        file.write(header)
        for table in content.tables:
            with tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as ids:
                for _, records in table.blocks():
                    weights = np.ascontiguousarray(records["w"])  # the bit patterns of bfloat16
                    file.write(weights.data)
                    advance(weights.nbytes)
                    if "id" in table.schema.names:
                        ids.write(np.ascontiguousarray(records["id"]).data)
                ids.seek(0)
                while block := ids.read(_BLOCK_BYTES):
                    file.write(block)
                    advance(len(block))


def _size(content: StateContent) -> int:
    return sum(
        table.rows * table.schema.dtype[name].itemsize
        for table in content.tables
        for name in table.schema.names
    )


def _taken(url: str) -> CheckpointExistsError:
    return CheckpointExistsError(f"{url!r} exists: pass overwrite=True, or choose another name")


def _refused(url: str, error: OSError) -> CheckpointWriteError:
    return CheckpointWriteError(
        error.errno,
        f"{url!r} can't be written ({error.strerror or error}): free space, or choose another place",
    )
