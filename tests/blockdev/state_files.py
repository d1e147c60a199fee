"""What the harness knows of dsa beyond its public interface: names of files, and how a restart is told."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import dsa
import dsa.backends.system

__all__ = ["journal_files", "repair", "restarted", "rows_of", "table_files"]


def table_files(state: Path) -> list[Path]:
    """Return the files that hold the records of a state."""
    zarr = [path for group in state.glob("*.zarr") for path in sorted(group.rglob("*")) if path.is_file()]
    return sorted(state.glob("*.dsa")) + [path for path in zarr if path.name != "zarr.json"]


def journal_files(state: Path) -> list[Path]:
    """Return the files of its journal."""
    return sorted(state.glob("dsa.journal*"))


def rows_of(state: Path) -> dict[str, int]:
    """Return the rows of each table, as the description says; none where it can't be read."""
    try:
        tables = json.loads((state / "dsa.json").read_text())["content"]["tables"]
        return {each["name"]: each["backend"]["rows"] for each in tables}
    except (OSError, ValueError, KeyError):
        return {}


@contextlib.contextmanager
def restarted(times: int = 1) -> Iterator[None]:
    """Let the process believe that the machine was started again so often."""
    if times == 0:
        yield
        return
    with mock.patch.object(dsa.backends.system, "boot_identity", return_value=f"run {times} of the machine"):
        yield


def repair(state: Path) -> bool:
    """Try to make a refused state usable; return whether there is such a thing and it raised nothing."""
    call = getattr(dsa, "repair", None)
    if call is None:
        return False
    call(state)
    return True
