"""What is found when the machine has been started again: the image of a device, mounted and opened."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from filesystems import mounted
from harness import Child, Report, messages
from state_files import repair, restarted, rows_of
from training_runs import Content, Reference, Run, content_of, matches

import dsa
from dsa.errors import CorruptRowError, DSAError, StateWarning

__all__ = ["BAD", "Finding", "Moment", "Verdict", "examine", "judge", "look", "tells", "told_of"]

_TELLING = re.compile(
    r"restart|lost|lose|torn|damag|missing|unreadable|went back|gone back|as they are on disk"
)

BAD = frozenset(
    {"torn", "lost", "silent", "refused", "no way out", "export lost", "does not mount", "unexpected error"}
)
"""Verdicts that must not be."""


@dataclass
class Finding:
    """What a fresh process met.

    Args:
        kind: ``opened``, ``refused``, ``rows`` (reading rows is refused), ``failed`` (another error), or
            ``does not mount``.
        text: The error.
        content: If it opened.
        warned: The warnings about the state.
        repaired: Whether it was refused at first, and `dsa.repair` made it openable.
        exports: Checkpoints by the number of their operation, and whether each is whole.
    """

    kind: str
    text: str = ""
    content: Content | None = None
    warned: list[str] = field(default_factory=list)
    repaired: bool = False
    exports: dict[int, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Moment:
    """How far a run was.

    Args:
        made: Whether the state had been made.
        done: Operations that had returned.
        begun: Operations that had been begun.
        floor: Operations that a `flush` or `close` which returned had covered.
        exported: Numbers of the exports that had returned and were not begun again.
    """

    made: bool = False
    done: int = 0
    begun: int = 0
    floor: int = 0
    exported: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Verdict:
    """What a finding means.

    Args:
        kind: One of `BAD`, or what else it is.
        text: More.
    """

    kind: str
    text: str = ""

    @property
    def bad(self) -> bool:
        """Whether it must not be."""
        return self.kind in BAD


def examine(
    image: Path, filesystem: str, run: Run, exported: frozenset[int] = frozenset(), restarts: int = 1
) -> Finding:
    """Mount an image, open the state in it in a process of another boot, and remove the image."""
    try:
        with mounted(image, filesystem, image.with_name(f"{image.name}-mounted")) as point:
            return look(run, point, exported, restarts)
    except OSError as error:
        return Finding("does not mount", str(error))
    finally:
        image.unlink()


def look(run: Run, place: Path, exported: frozenset[int] = frozenset(), restarts: int = 0) -> Finding:
    """Open a state in a fresh process, after so many restarts of the machine."""

    def body(report: Report) -> None:
        with restarted(restarts):
            report(("finding", _open(run, place, exported)))

    child = Child(body)
    told = list(messages(child))
    status = child.wait()
    if not told:
        return Finding("failed", f"the process ended with status {status} and said nothing")
    if told[0][0] == "failed":
        return Finding("failed", told[0][2])
    return told[0][1]


def _open(run: Run, place: Path, exported: frozenset[int]) -> Finding:
    exports = {number: _is_whole(place / "checkpoints" / str(number)) for number in sorted(exported)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        finding = _open_once(run, place)
        if finding.kind == "refused" and _try_repair(place):
            finding = _open_once(run, place)
            finding.repaired = True
    finding.warned = [str(each.message) for each in caught if issubclass(each.category, StateWarning)]
    finding.exports = exports
    return finding


def _open_once(run: Run, place: Path) -> Finding:
    try:
        optimizer = run.build(place / "state", resume=True)
    except (DSAError, OSError) as error:
        return Finding("refused", f"{type(error).__name__}: {error}")
    try:
        for name, rows in rows_of(place / "state").items():
            optimizer.read_rows(range(rows), name)  # finishes what was interrupted, and judges every row
    except CorruptRowError as error:
        return Finding("rows", str(error))
    finally:
        optimizer.close()
    return Finding("opened", content=content_of(place / "state"))


def _try_repair(place: Path) -> bool:
    try:
        return repair(place / "state")
    except (DSAError, OSError):
        return False


def _is_whole(checkpoint: Path) -> bool:
    try:
        return dsa.verify(checkpoint).ok
    except (DSAError, OSError):
        return False


def told_of(finding: Finding) -> bool:
    """Whether a warning said that steps may be missing."""
    return finding.repaired or tells(finding.warned)


def tells(warned: list[str]) -> bool:
    """Whether one of some warnings says that steps may be missing."""
    return any(_TELLING.search(text) for text in warned)


def judge(finding: Finding, reference: Reference, moment: Moment) -> Verdict:
    """Say what a finding means for a run that was that far when power was lost."""
    policy = reference.run.durability
    if finding.kind == "does not mount":
        return Verdict("does not mount", finding.text)
    if not all(finding.exports.values()):
        return Verdict("export lost", f"{finding.exports}")
    if not moment.made:
        return _judge_unmade(finding, reference)
    if policy == "power":
        return _judge_strictly(finding, reference, moment.done, moment.begun)
    if moment.floor == moment.begun:
        return _judge_strictly(finding, reference, moment.floor, moment.begun)
    return _judge_loosely(finding, reference, moment)


def _judge_unmade(finding: Finding, reference: Reference) -> Verdict:
    if finding.kind == "opened":
        whole = bool(reference.indices(_content(finding), 0, 0))
        told = whole or told_of(finding) or reference.run.durability == "none"
        return Verdict("not made yet, opened" if told else "torn", matches(reference, _content(finding)))
    if finding.kind == "failed":
        return Verdict("unexpected error", finding.text)
    return Verdict(f"not made yet, {finding.text.split(':')[0]}")


def _judge_strictly(finding: Finding, reference: Reference, done: int, begun: int) -> Verdict:
    """Everything that returned is there, and nothing is half there."""
    if finding.kind != "opened" or finding.repaired:
        kind = "unexpected error" if finding.kind == "failed" else "refused"
        return Verdict(kind, finding.text or "it took a repair")
    found = _content(finding)
    if reference.indices(found, done, begun):
        return Verdict("whole")
    if earlier := reference.indices(found, 0, done):
        return Verdict("lost", f"it is the state after {earlier} operations, where {done} had returned")
    return Verdict("torn", matches(reference, found))


def _judge_loosely(finding: Finding, reference: Reference, moment: Moment) -> Verdict:
    """What is not whole says so, and there is a way on."""
    if finding.kind == "refused":
        return Verdict("no way out", finding.text)
    if finding.kind == "rows":
        return Verdict("told by rows", finding.text)
    if finding.kind == "failed":
        return Verdict("unexpected error", finding.text)
    found = _content(finding)
    if reference.indices(found, moment.floor, moment.begun):
        return Verdict("repaired, whole" if finding.repaired else "whole")
    if told_of(finding):
        return Verdict("repaired, told" if finding.repaired else "told")
    return Verdict("silent", matches(reference, found))


def _content(finding: Finding) -> Content:
    assert finding.content is not None
    return finding.content
