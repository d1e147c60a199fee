"""Weights alone, for serving: as a Zarr group, or as one safetensors file.

The safetensors format (https://github.com/huggingface/safetensors, "Format"): the length of the header as a
little-endian uint64, the header as JSON, then the tensors one after the other. It is written here and not by
its library, which wants every tensor in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Final, Unpack, cast

import numpy as np

from dsa.backends.system import available_bytes, retried, sync_directory
from dsa.checkpoint.export import ExportOptions, write_checkpoint
from dsa.checkpoint.meter import metered
from dsa.checkpoint.names import group_names
from dsa.checkpoint.places import Place, find_place
from dsa.errors import CheckpointExistsError, CheckpointMismatchError, CheckpointWriteError, DiskSpaceError
from dsa.kernels.decay import caught_up
from dsa.schema import Field, Records, Schema, is_bfloat16
from dsa.state.content import StateContent, TableContent, recast

__all__ = ["write_weights"]

_SUFFIX: Final = ".safetensors"
_WEIGHTS: Final = Field("w", "float32", "element")


def write_weights(
    content: StateContent, url: str | os.PathLike[str], **options: Unpack[ExportOptions]
) -> str:
    """Write the weights of a state.

    Args:
        content: The state.
        url: Where to: a file or an URL that ends in ``.safetensors``; anything else becomes a Zarr group as
            `dsa.checkpoint.write_checkpoint` writes it, with the field ``w`` only.
        options: Those of `write_checkpoint`; of them a safetensors file takes `overwrite`, `progress`,
            `durable` and `storage_options`.

    Returns:
        The path or the URL.

    Raises:
        CheckpointMismatchError: a table's weights are not in the state but in a module that isn't there.
        CheckpointExistsError: something is there.
        DiskSpaceError: there is too little room; nothing was written.
        CheckpointWriteError: the disk or the store refused.
        ValueError: an option has no meaning for safetensors.
    """
    for table in content.tables:
        if "w" not in table.schema.names:
            raise CheckpointMismatchError(
                f"the weights of table {table.name!r} are a module's parameter: export through the optimizer "
                "while the module lives, or save the module's state_dict"
            )
    if not str(os.fspath(url)).endswith(_SUFFIX):
        tables = tuple(_weights_only(table) for table in content.tables)
        return write_checkpoint(replace(content, tables=tables), url, kind="weights", **options)
    return _write_safetensors(content, url, options)


def _weights_only(table: TableContent) -> TableContent:
    schema = Schema(table.schema.dim, (_WEIGHTS,))

    def blocks() -> Iterator[tuple[int, Records]]:
        for first, records in table.blocks():
            yield first, recast(caught_up(records, table.facts.decay), schema)

    facts = replace(table.facts, schema=schema, initializer=None, decay=0.0, added=())
    return replace(table, facts=facts, blocks=blocks, stored=None)


def _write_safetensors(content: StateContent, url: str | os.PathLike[str], options: ExportOptions) -> str:
    for name in ("compression", "algorithm", "attributes"):
        if options.get(name) is not None:
            raise ValueError(
                f"{name}={options.get(name)!r} has no meaning for a safetensors file: leave it out"
            )
    place = find_place(url, options.get("storage_options"))
    if place.directory is None:
        _write_remote(content, place, options)
    else:
        _write_local(content, place.directory, options)
    return place.url


def _header(content: StateContent) -> bytes:
    tensors: dict[str, Any] = {"__metadata__": {"format": "pt", "global_step": str(content.global_step)}}
    end = 0
    for table, name in zip(content.tables, group_names(t.name for t in content.tables), strict=True):
        shape = [table.rows, table.schema.dim]
        size = _bytes_of(table)
        kind = "BF16" if is_bfloat16(table.schema.dtype["w"]) else "F32"
        tensors[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_local(content: StateContent, path: Path, options: ExportOptions) -> None:
    header, durable = _header(content), options.get("durable", True)
    if path.exists() and not options.get("overwrite"):
        raise _taken(str(path))
    if path.is_dir():
        raise CheckpointExistsError(f"{str(path)!r} is a directory: choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    needed, free = len(header) + _size(content), available_bytes(path.parent)
    if needed > free:
        raise DiskSpaceError(needed, free, str(path.parent))
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            _write(file, content, header, options)
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


def _write_remote(content: StateContent, place: Place, options: ExportOptions) -> None:
    if place.files.exists(place.root) and not options.get("overwrite"):
        raise _taken(place.url)
    try:
        file = place.files.open(place.root, "wb")
        try:
            _write(cast("BinaryIO", file), content, _header(content), options)
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
            for _, stored in table.blocks():
                records = caught_up(stored, table.facts.decay)
                weights = np.ascontiguousarray(records["w"])  # the bit patterns of bfloat16
                file.write(weights.data)
                advance(weights.nbytes)


def _size(content: StateContent) -> int:
    return sum(_bytes_of(table) for table in content.tables)


def _bytes_of(table: TableContent) -> int:
    return table.rows * int(table.schema.dtype["w"].itemsize)


def _taken(url: str) -> CheckpointExistsError:
    return CheckpointExistsError(f"{url!r} exists: pass overwrite=True, or choose another name")


def _refused(url: str, error: OSError) -> CheckpointWriteError:
    return CheckpointWriteError(
        error.errno,
        f"{url!r} can't be written ({error.strerror or error}): free space, or choose another place",
    )
