"""The demo's directory: the optimizer's state, and a description of the run that made it.

``DIRECTORY/state`` belongs to the optimizer. ``DIRECTORY/demo.json`` says which settings and which graph
the state was trained with. How far the run has come is the optimizer's `global_step`, which is stored with
the rows; the loss beside the settings is for display.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from dsa.backends.system import retried, write_atomically
from dsa.cli.demo.graph import Graph
from dsa.cli.demo.settings import Settings
from dsa.errors import StateCorruptError, StateExistsError, StateMismatchError, StateNotFoundError
from dsa.inspection.directory import file_sizes

__all__ = ["Run", "disk_use", "forget_run", "load_run", "require_fresh", "save_run", "state_path"]

_NAME = "demo.json"
_FORMAT = 1


@final
@dataclass(frozen=True, slots=True)
class Run:
    """What a directory's state was trained with.

    Args:
        settings: The settings.
        fingerprint: `Graph.fingerprint` of the graph.
        loss: Mean loss of the last epoch that was finished, or None before that.
    """

    settings: Settings
    fingerprint: str
    loss: float | None = None


def state_path(directory: Path) -> Path:
    """Return the optimizer's part of the directory."""
    return directory / "state"


def disk_use(directory: Path) -> tuple[int, int]:
    """Return the bytes of all files under a directory: by their lengths, and by their blocks on disk."""
    sizes = [file_sizes(path) for path in directory.rglob("*") if path.is_file()]
    return sum(length for length, _ in sizes), sum(occupied for _, occupied in sizes)


def require_fresh(directory: Path) -> None:
    """Refuse a directory that holds a run.

    Raises:
        StateExistsError: it does.
    """
    if (directory / _NAME).exists() or state_path(directory).exists():
        raise StateExistsError(
            f"the directory {str(directory)!r} already holds a demo run: pass --resume to continue it, "
            "--fresh to start over, or another --disk-dir"
        )


def save_run(directory: Path, run: Run) -> None:
    """Write the description; a kill leaves the old or the new one."""
    data = {
        "format": _FORMAT,
        "settings": run.settings.to_json(),
        "fingerprint": run.fingerprint,
        "loss": run.loss,
    }
    write_atomically(directory / _NAME, (json.dumps(data, indent=2) + "\n").encode())


def forget_run(directory: Path) -> None:
    """Remove the description, so that none stands beside a state that is being replaced."""
    retried((directory / _NAME).unlink, True)


def load_run(directory: Path, graph: Graph, given: dict[str, Any]) -> Run:
    """Read the description of the run to continue.

    Args:
        directory: The demo's directory.
        graph: The graph that the caller has.
        given: The settings that the caller named; a value of None counts as not named.

    Raises:
        StateNotFoundError: there is no description.
        StateCorruptError: it can't be read.
        StateMismatchError: the run has another graph, or a setting with another value; more epochs than it
            has had are taken, and its learning rate then falls to their end.
    """
    run = _parse(directory / _NAME)
    if run.fingerprint != graph.fingerprint():
        raise StateMismatchError(
            f"the run in {str(directory)!r} was trained on another graph: pass the same --edges (and "
            "--closure), --fresh to start over, or another --disk-dir"
        )
    stored = run.settings.to_json()
    if (epochs := given.get("epochs")) is not None and epochs > run.settings.epochs:
        run = replace(run, settings=replace(run.settings, epochs=epochs))
        stored["epochs"] = epochs
    for name, value in given.items():
        if value is not None and value != stored[name]:
            raise StateMismatchError(
                f"the run in {str(directory)!r} has {name}={stored[name]!r} but {value!r} is asked for: "
                "leave the option out to continue it, pass --fresh to start over, or another --disk-dir"
            )
    return run


def _parse(path: Path) -> Run:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StateNotFoundError(
            f"there is no demo run to resume in {str(path.parent)!r}: leave --resume out to start one"
        ) from error
    except ValueError as error:
        raise StateCorruptError(
            f"{str(path)!r} can't be read ({error}): pass --fresh to start over"
        ) from error
    try:
        if data["format"] != _FORMAT:
            raise ValueError(f"format {data['format']!r} is not {_FORMAT}")
        loss = None if data["loss"] is None else float(data["loss"])
        return Run(Settings.from_json(data["settings"]), str(data["fingerprint"]), loss)
    except (KeyError, TypeError, ValueError) as error:
        raise StateCorruptError(
            f"{str(path)!r} doesn't describe a demo run ({error}): pass --fresh to start over"
        ) from error
