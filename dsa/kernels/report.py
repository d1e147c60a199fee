"""What a kernel tells about the rows it has updated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["StepReport", "merge_reports"]


class StepReport(NamedTuple):
    """The outcome of one fused pass.

    Args:
        bad: Position in the batch of the first row that must not be stored, or -1: its old record was
            implausible, or the new one is not finite.
        clamped: Rows that ended on the clamp at the edge of the ball.
        far: Of these, rows taken there by a step longer than one hyperbolic unit.
    """

    bad: int
    clamped: int = 0
    far: int = 0


def merge_reports(reports: Iterable[StepReport]) -> StepReport:
    """Combine the reports of consecutive slices of one batch."""
    merged = StepReport(-1)
    for report in reports:
        bad = merged.bad if merged.bad >= 0 else report.bad
        merged = StepReport(bad, merged.clamped + report.clamped, merged.far + report.far)
    return merged
