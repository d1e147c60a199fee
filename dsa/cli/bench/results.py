"""What a run of the benchmark yields, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, final

import numpy as np

__all__ = ["Duration", "Footprint", "Group", "Line", "Results", "line_from_times", "set_ratio"]


class Duration(NamedTuple):
    """What a step took.

    Args:
        wall: Seconds on the wall's clock.
        cpu: Seconds of processor time, all threads of this process together.
        traps: Accesses to pages that the system had to map, or to make writable, first.
    """

    wall: float
    cpu: float
    traps: int = 0


@final
@dataclass(frozen=True, slots=True)
class Footprint:
    """Where the state of one contender lies, in bytes; None where this system doesn't tell.

    Args:
        anonymous: Memory of the process that no file backs.
        file: Size of its files.
        vram: Memory of the GPU.
    """

    anonymous: int | None = None
    file: int = 0
    vram: int = 0


@final
@dataclass(slots=True)
class Line:
    """One contender in one group.

    Args:
        key: A short name that programs may rely on.
        what: The same for people.
        steps: Number of timed steps.
        milliseconds: Median of a step.
        quartiles: First and third quartile of a step, in milliseconds.
        cpu_milliseconds: Median of a step's processor time, all threads together.
        traps_per_row: Page faults of a step, over B; the mean.
        rows_per_second: Batch rows over the median.
        baseline: Key of the line that `ratio` refers to; empty if there is none.
        ratio: The baseline's median, in races with this one, over this one's: above 1, this is the faster.
        cpu_ratio: The same of processor times, which other load on the machine disturbs less.
        footprint: Its memory.
        details: Further numbers, by name.
    """

    key: str
    what: str
    steps: int
    milliseconds: float
    quartiles: tuple[float, float]
    cpu_milliseconds: float
    traps_per_row: float
    rows_per_second: float
    baseline: str = ""
    ratio: float | None = None
    cpu_ratio: float | None = None
    footprint: Footprint = field(default_factory=Footprint)
    details: dict[str, float] = field(default_factory=dict)


@final
@dataclass(slots=True)
class Group:
    """Contenders that took the same batches.

    Args:
        kind: ``"warm"``, ``"loop"``, ``"small"``, ``"gpu"``, ``"hyperbolic"``, ``"cold"`` or ``"limited"``.
        title: The heading.
        rows: N.
        dim: D.
        batch: B.
        lines: The contenders.
        notes: What a reader has to know.
    """

    kind: str
    title: str
    rows: int
    dim: int
    batch: int
    lines: list[Line] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def find(self, key: str) -> Line | None:
        """Return the line of that key, or None."""
        return next((line for line in self.lines if line.key == key), None)


@final
@dataclass(slots=True)
class Results:
    """Everything that one run measured.

    Args:
        machine: See `dsa.cli.bench.machine.describe_machine`.
        settings: The sizes of the run.
        first_step_seconds: First step of the process, in which the kernels are compiled or loaded, by space.
        device: Random reads and writes of the disk, or None if not measured.
        groups: The tables.
        losses: Sentences about every comparison that dsa lost.
        goals: The figures that dsa is meant to reach, each with what was measured.
        notes: What applies to the whole run.
    """

    machine: dict[str, Any]
    settings: dict[str, Any]
    first_step_seconds: dict[str, float] = field(default_factory=dict)
    device: dict[str, Any] | None = None
    groups: list[Group] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    goals: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def find(self, kind: str, batch: int | None = None) -> list[Group]:
        """Return the groups of a kind, of one batch size if given."""
        return [g for g in self.groups if g.kind == kind and batch in (None, g.batch)]

    def to_json(self) -> dict[str, Any]:
        """Return it as dictionaries, lists and numbers."""
        return asdict(self)


def line_from_times(
    key: str, what: str, batch: int, times: Sequence[Duration], footprint: Footprint | None = None
) -> Line:
    """Summarise the times of the steps of one contender.

    Args:
        key: A short name.
        what: The same for people.
        batch: B.
        times: Of each step; at least one.
        footprint: Its memory.

    Example:
        >>> times = [Duration(0.001, 0.001), Duration(0.002, 0.004), Duration(0.003, 0.003)]
        >>> line = line_from_times("dsa", "dsa", 10, times)
        >>> line.milliseconds, line.cpu_milliseconds
        (2.0, 3.0)
    """
    low, middle, high = (float(q) for q in np.quantile([t.wall for t in times], [0.25, 0.5, 0.75]))
    return Line(
        key,
        what,
        len(times),
        1e3 * middle,
        (1e3 * low, 1e3 * high),
        1e3 * float(np.median([t.cpu for t in times])),
        float(np.mean([t.traps for t in times])) / batch,
        batch / middle,
        footprint=footprint or Footprint(),
    )


def set_ratio(line: Line, rivals: Sequence[Line]) -> None:
    """Set what a line is compared with.

    Args:
        line: Changed.
        rivals: Lines of the same batch size, of which the faster counts; none leaves the line as it is.
    """
    if rivals:
        fastest = min(rivals, key=lambda other: other.milliseconds)
        line.baseline = fastest.key
        line.ratio = fastest.milliseconds / line.milliseconds
        line.cpu_ratio = min(other.cpu_milliseconds for other in rivals) / line.cpu_milliseconds
