"""Steps on tables larger than memory: a child process in a control group of its own, with a limit.

Linux only, and only for users who may make control groups. The child joins the group when everything is
imported, so that the limit is for what it does with the tables.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from dsa.backends.system import PAGE
from dsa.cli.bench.baselines import Naive
from dsa.cli.bench.batches import UniformBatches
from dsa.cli.bench.files import drop_pages
from dsa.cli.bench.machine import bytes_read
from dsa.cli.bench.ours import Ours
from dsa.cli.bench.results import Duration, Footprint, Group, line_from_times, set_ratio
from dsa.cli.bench.settings import Settings
from dsa.cli.bench.text import size
from dsa.cli.bench.timing import Contender, timed_step
from dsa.rules.init import Zeros

__all__ = ["control_group", "limited_group"]

_WHAT: Final = {"naive": "four np.memmap files, numpy", "dsa": "dsa"}


@contextmanager
def control_group(limit: int, root: Path = Path("/sys/fs/cgroup"), own: str | None = None) -> Iterator[Path]:
    """Make a control group below this process's one (version 1) or beside it (version 2), and remove it.

    Args:
        limit: Bytes of memory, page cache among it.
        root: Where control groups are mounted.
        own: Content of ``/proc/self/cgroup``; read from there when None.

    Raises:
        OSError: there are no control groups, or this user may not make any.
    """
    text = Path("/proc/self/cgroup").read_text() if own is None else own
    lines = [line.split(":", 2) for line in text.splitlines()]
    version1 = [path for _, names, path in lines if "memory" in names.split(",")]
    if version1:
        parent, knob = root / "memory" / version1[0].lstrip("/"), "memory.limit_in_bytes"
    else:
        path = next((path for number, _, path in lines if number == "0"), "/")
        parent, knob = (root / path.lstrip("/")).parent if path != "/" else root, "memory.max"
    group = parent / f"dsa-bench-{os.getpid()}"
    group.mkdir()
    try:
        (group / knob).write_text(str(limit))
        yield group
    finally:
        group.rmdir()


def limited_group(
    settings: Settings, batch: int, ours: Path, naive: Path, seconds: float
) -> tuple[Group | None, str]:
    """Run uniform batches of one size under `settings.memory_limit`.

    Args:
        settings: The sizes.
        batch: B.
        ours: dsa's state directory, closed.
        naive: The naive layout's directory, closed.
        seconds: For each contender.

    Returns:
        The group, or None and the reason.
    """
    limit = settings.memory_limit
    assert limit is not None
    rows, dim = settings.rows, settings.dim
    title = f"under a memory limit of {size(limit)}, {rows:,} x {dim} float32, B = {batch:,}"
    group = Group("limited", title, rows, dim, batch)
    task = {"rows": rows, "dim": dim, "batch": batch, "seconds": seconds, "seed": settings.seed}
    try:
        with control_group(limit) as place:
            for key, directory in (("naive", naive), ("dsa", ours)):
                found = _child({**task, "group": str(place), "key": key, "directory": str(directory)})
                times = [Duration(*pair) for pair in found["times"]]
                line = line_from_times(key, _WHAT[key], batch, times, Footprint(file=found["file"]))
                line.details["pages_per_row"] = found["pages"] / (batch * len(times))
                group.lines.append(line)
    except OSError as error:
        return None, f"the memory limit could not be set ({error}): nothing was measured under it"
    except subprocess.CalledProcessError as error:
        return (
            None,
            f"the process under the memory limit ended with code {error.returncode}: pass a higher one",
        )
    set_ratio(group.lines[1], group.lines[:1])
    return group, ""


def _child(task: dict[str, Any]) -> dict[str, Any]:
    # Pages that are in memory already count for whoever brought them there.
    drop_pages(path for path in Path(task["directory"]).iterdir() if path.is_file())
    command = [sys.executable, "-m", "dsa.cli.bench.limited", json.dumps(task)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def run_child(task: dict[str, Any]) -> dict[str, Any]:
    """Join the control group, take steps for a while, and return their times, pages read, and file size."""
    (Path(task["group"]) / "cgroup.procs").write_text(str(os.getpid()))
    rows, dim, directory = task["rows"], task["dim"], Path(task["directory"])
    contender: Contender
    if task["key"] == "naive":
        contender = Naive(directory, rows, dim, resume=True)
    else:
        contender = Ours(directory, Zeros(rows, dim), resume=True)
    batches = UniformBatches(rows, dim, task["batch"], task["seed"])
    timed_step(contender, batches.make(0))
    times: list[Duration] = []
    before, deadline = bytes_read(), time.perf_counter() + task["seconds"]
    while not times or time.perf_counter() < deadline:
        times.append(timed_step(contender, batches.make(1 + len(times))))
    pages = (bytes_read() - before) / PAGE
    contender.close()
    return {"times": times, "pages": pages, "file": contender.file_bytes()}


if __name__ == "__main__":
    print(json.dumps(run_child(json.loads(sys.argv[1]))))
