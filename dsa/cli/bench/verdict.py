"""What a run says about dsa's promises, and every comparison that it lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from dsa.cli.bench.results import Group, Line, Results
from dsa.cli.bench.text import number, size

__all__ = ["goals", "losses"]

_FULL_ROWS: Final = 1_000_000
_FULL_DIM: Final = 128


class _Goal(NamedTuple):
    """A speed that is promised: `key`'s, over that of its baseline or of `other` if one is named."""

    kind: str
    batch: int
    key: str
    least: float
    other: str = ""


# What a line is held against besides the baseline of its ratio.
_RIVALS: Final = {"dsa": ("naive", "touch"), "dsa_none": ("naive", "touch"), "dsa_cold": ("naive_cold",)}

_SPEEDS: Final = (
    _Goal("warm", 2048, "dsa_none", 5.0),
    _Goal("warm", 2048, "dsa", 3.5),
    _Goal("warm", 16384, "dsa_none", 4.0),
    _Goal("warm", 16384, "dsa", 3.0),
    _Goal("warm", 64, "dsa", 1.5),
    _Goal("loop", 2048, "dsa", 1.6),
    _Goal("hyperbolic", 4096, "dsa_row", 4.0),
    _Goal("hyperbolic", 4096, "dsa_coordinate", 4.0),
    _Goal("hyperbolic", 4096, "dsa_frame", 4.0),
    _Goal("cold", 2048, "dsa_cold", 20.0, "naive_cold"),
)

# Of the cold steps: the detail of a line, its name, and what it is to be.
_OF_THE_DISK: Final = (
    ("share_of_device_limit", "share of the disk's limit", ">=", 0.6),
    ("pages_per_row", "pages read for a row", "<=", 1.5),
)


def goals(results: Results) -> list[dict[str, Any]]:
    """Return the promised figures, each with the measured one, as far as the run's sizes allow to judge."""
    if results.settings["rows"] < _FULL_ROWS or results.settings["dim"] != _FULL_DIM:
        return []
    found = []
    for speed in _SPEEDS:
        for group in results.find(speed.kind, speed.batch):
            line = group.find(speed.key)
            other = group.find(speed.other or line.baseline) if line is not None else None
            if line is not None and other is not None:
                ratio, cpu = line.ratio, line.cpu_ratio
                if speed.other or ratio is None or cpu is None:
                    ratio = other.milliseconds / line.milliseconds
                    cpu = other.cpu_milliseconds / line.cpu_milliseconds
                what = f"{speed.kind}, B = {speed.batch:,}: {line.what}, times the speed of {other.what}"
                found.append(_judged(what, ratio, cpu, ">=", speed.least))
    for group in results.find("cold", 2048):
        sustained = group.find("dsa_sustained")
        assert sustained is not None
        for detail, name, bound, goal in _OF_THE_DISK:
            value = sustained.details.get(detail, 0.0)
            if value > 0.0:
                found.append(_judged(f"cold, B = {group.batch:,}: {name}", value, None, bound, goal))
    return found


def losses(results: Results) -> list[str]:
    """Return a sentence for every comparison in which dsa was slower or took more in this run."""
    found = [loss for group in results.groups for loss in _slower(group, results)]
    found += _first_steps(results)
    found += _larger_files(results)
    return found


def _judged(what: str, measured: float, cpu: float | None, bound: str, goal: float) -> dict[str, Any]:
    met = measured >= goal if bound == ">=" else measured <= goal
    found = {"what": what, "measured": measured, "by_cpu_time": cpu, "bound": bound, "goal": goal}
    return {**found, "met": "yes" if met else "no"}


def _slower(group: Group, results: Results) -> Iterator[str]:
    for line in group.lines:
        if not line.key.startswith("dsa"):
            continue
        faster = [
            f"{number(line.milliseconds / other.milliseconds)} times as long as {other.what} "
            f"({number(other.milliseconds)} ms)"
            for other in _opponents(line, group, results)
            if other.milliseconds < line.milliseconds
        ]
        if faster:
            yield f"{group.title}: {line.what} takes {number(line.milliseconds)} ms, {', '.join(faster)}"


def _opponents(line: Line, group: Group, results: Results) -> list[Line]:
    """Return the line that the ratio refers to, and in the same group the naive layout and touching alone."""
    lines = [group.find(line.baseline)] if line.baseline else []
    if lines == [None]:
        lines = [warm.find(line.baseline) for warm in results.find("warm", group.batch)]
    rivals = _RIVALS.get(line.key, ())
    lines += [group.find(key) for key in rivals if key != line.baseline]
    return [other for other in lines if other is not None]


def _first_steps(results: Results) -> Iterator[str]:
    for group in results.find("warm")[-1:]:
        ours = group.find("dsa")
        seconds = results.first_step_seconds.get("flat")
        if ours is not None and seconds is not None and 1e3 * seconds > ours.milliseconds:
            yield (
                f"the first step of a process takes {number(seconds)} s, as long as "
                f"{number(1e3 * seconds / ours.milliseconds)} warm steps of B = {group.batch:,}: kernels are "
                "compiled, or loaded from numba's cache"
            )


def _larger_files(results: Results) -> Iterator[str]:
    for group in results.find("warm")[:1]:
        ours, theirs = group.find("dsa"), group.find("sparse_adam")
        assert ours is not None
        assert theirs is not None
        memory = theirs.footprint.anonymous
        if memory is not None and ours.footprint.file > memory:
            yield (
                f"dsa's files take {size(ours.footprint.file)} of disk where SparseAdam and its parameter "
                f"take {size(memory)} of memory: records carry two counters, and a journal is kept"
            )
