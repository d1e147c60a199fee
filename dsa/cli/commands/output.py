"""What commands print."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dsa.backends import Layout
    from dsa.checkpoint import Checkpoint

__all__ = ["KINDS", "print_checkpoint", "print_json", "print_state"]

KINDS: Final = {
    "state": "state",
    "full": "full checkpoint",
    "delta": "differential checkpoint",
    "weights": "weights",
}
"""What people call the kinds of states and checkpoints."""


def print_json(data: Mapping[str, Any]) -> None:
    """Print a document as JSON that every reader takes."""
    print(json.dumps(data, indent=2, allow_nan=False))


def print_checkpoint(url: str, as_json: bool, storage_options: Mapping[str, Any] | None) -> None:
    """Print what was written.

    Args:
        url: A checkpoint, or a safetensors or Parquet file.
        as_json: Whether as JSON.
        storage_options: For fsspec.
    """
    from dsa.checkpoint import open_checkpoint
    from dsa.inspection.text import size

    kind = url.rpartition(".")[2]
    if kind in ("safetensors", "parquet"):
        print_json({"url": url, "kind": kind}) if as_json else print(f"{url}: weights")
        return
    made = open_checkpoint(url, storage_options=storage_options)
    facts = _facts(made)
    if as_json:
        print_json(facts)
        return
    kind, stored = KINDS[made.manifest.kind], size(facts["stored_bytes"])
    tables = _tables([(each["name"], each["rows"], each["dim"]) for each in facts["tables"]])
    print(
        f"{url}: {kind}, step {made.global_step:,}, {tables}, {stored}; content root {made.content_root[:12]}"
    )


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "url": checkpoint.url,
        "kind": checkpoint.kind,
        "global_step": checkpoint.global_step,
        "content_root": checkpoint.content_root,
        "tables": [{"name": t.name, "rows": t.rows, "dim": t.schema.dim} for t in checkpoint.tables],
        "stored_bytes": sum(checkpoint.source.sizes.values()),
    }


def print_state(directory: str, as_json: bool, backend: Layout | None) -> None:
    """Print what a new state directory holds.

    Args:
        directory: The directory.
        as_json: Whether as JSON.
        backend: See `dsa.inspection.open_state`.
    """
    from dsa.inspection import open_state

    with open_state(directory, backend=backend) as state:
        tables = [(table.name, table.rows, table.dim) for table in state.tables.values()]
        if as_json:
            listed = [{"name": name, "rows": rows, "dim": dim} for name, rows, dim in tables]
            print_json({"directory": directory, "global_step": state.global_step, "tables": listed})
        else:
            print(
                f"{directory}: state at step {state.global_step:,}, {_tables(tables)}; open it with "
                "resume=True"
            )


def _tables(tables: list[tuple[str, int, int]]) -> str:
    return ", ".join(f"{name!r} {rows:,} x {dim:,}" for name, rows, dim in tables) or "no tables"
