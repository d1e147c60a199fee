"""What a state or a checkpoint holds, row by row, whatever its backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dsa.checkpoint import open_content
from dsa.state.state_directory import StateDirectory
from dsa.state.table import read_records

__all__ = ["Standing", "stand", "stand_exported", "stand_to_export"]

_HASHED = np.random.default_rng(1).integers(0, 2**63, 256, dtype=np.uint64) | np.uint64(1)


class Standing(NamedTuple):
    """What a state holds: its step, and of each table the steps, the curvature and a hash of each row."""

    step: int
    tables: dict[str, tuple[int, float, bytes]]


def stand(state: StateDirectory) -> Standing:
    """Return what an open state holds on disk."""
    tables = {}
    for table in state.tables.values():
        records = table.backend.read(np.arange(len(table)))
        hashes = _hashes([records[name] for name in table.backend.schema.names])
        tables[table.name] = table.steps, table.k, hashes.tobytes()
    return Standing(state.global_step, tables)


def stand_to_export(state: StateDirectory) -> Standing:
    """Return what a checkpoint of an open state is to hold: weights in memory too, and stamps are no part."""
    tables = {}
    for table in state.tables.values():
        rows = np.arange(len(table))
        records = read_records(table, rows)
        weights = records["w"] if table.held is None else table.held.take(rows)
        hashes = _hashes([weights, *(records[name] for name in "mvt")])
        tables[table.name] = table.steps, table.k, hashes.tobytes()
    return Standing(state.global_step, tables)


def stand_exported(path: Path) -> Standing:
    """Return what a checkpoint holds."""
    content = open_content(path).content
    tables = {}
    for table in content.tables:
        hashes = [_hashes([records[name] for name in "wmvt"]) for _, records in table.blocks()]
        tables[table.name] = table.facts.steps, table.k, np.concatenate(hashes).tobytes()
    return Standing(content.global_step, tables)


def _hashes(fields: Sequence[np.ndarray]) -> np.ndarray:
    columns = [np.ascontiguousarray(each).reshape(len(each), -1).view(np.uint32) for each in fields]
    words = np.concatenate(columns, axis=1).astype(np.uint64)
    with np.errstate(over="ignore"):
        mixed = (words + np.uint64(0x9E3779B9)) * _HASHED[: words.shape[1]]
        return (mixed ^ (mixed >> np.uint64(29))).sum(axis=1, dtype=np.uint64)
