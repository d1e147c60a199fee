"""The ``zarr.json`` files: what dsa writes into them (Zarr v3 specification, core and sharding_indexed)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np

from dsa.backends.shards.layout import ArrayLayout

__all__ = ["DOCUMENT", "ZSTD_LEVEL", "Compression", "array_document", "encode_document", "group_document"]

DOCUMENT: Final = "zarr.json"
ZSTD_LEVEL: Final = 1

Compression = Literal["zstd"] | None

_DATA_TYPES: Final = {
    "<f2": "float16",
    "<f4": "float32",
    "<f8": "float64",
    "<u2": "uint16",
    "<i4": "int32",
    "<i8": "int64",
}
# What Zarr v3 has no name for in its core: the numbers are ``(bits.astype("uint32") << 16).view("float32")``.
_LOGICAL: Final[dict[str, dict[str, str]]] = {"<u2": {"dsa_dtype": "bfloat16"}}
_BYTES: Final = {"name": "bytes", "configuration": {"endian": "little"}}


def array_document(
    layout: ArrayLayout, compression: Compression, attributes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the document of a sharded array.

    Args:
        layout: Shape, dtype and cut.
        compression: ``"zstd"`` compresses each inner chunk and gives it a checksum; None stores it as it is.
        attributes: The user's part.
    """
    spec = layout.spec
    tail = () if spec.columns is None else (spec.columns,)
    codecs: list[dict[str, Any]] = [_BYTES]
    if compression == "zstd":
        codecs.append({"name": "zstd", "configuration": {"level": ZSTD_LEVEL, "checksum": True}})
    sharding = {
        "chunk_shape": [layout.chunk_rows, *tail],
        "codecs": codecs,
        "index_codecs": [_BYTES, {"name": "crc32c"}],
        "index_location": "end",
    }
    grid = {"name": "regular", "configuration": {"chunk_shape": [layout.shard_rows, *tail]}}
    return {
        "shape": list(spec.shape),
        "data_type": _DATA_TYPES[spec.dtype],
        "chunk_grid": grid,
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0.0 if np.dtype(spec.dtype).kind == "f" else 0,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {**attributes, **_LOGICAL.get(spec.dtype, {})},
        "dimension_names": ["row"] if spec.columns is None else ["row", "dim"],
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }


def group_document(
    attributes: Mapping[str, Any], consolidated: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the document of a group.

    Args:
        attributes: The user's part.
        consolidated: The documents of everything below, by path; for the root only.
    """
    document: dict[str, Any] = {
        "attributes": dict(attributes),
        "zarr_format": 3,
        "node_type": "group",
    }
    if consolidated is not None:
        document["consolidated_metadata"] = {
            "kind": "inline",
            "must_understand": False,
            "metadata": {path: dict(each) for path, each in sorted(consolidated.items())},
        }
    return document


def encode_document(document: Mapping[str, Any]) -> bytes:
    """Return a document as a file's bytes: strict JSON, in which NaN and infinity don't exist."""
    return json.dumps(document, indent=1, allow_nan=False).encode()
