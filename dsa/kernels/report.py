"""What a kernel tells about the rows it has updated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["StepReport", "merge_reports"]


class StepReport(NamedTuple):
    """The outcome of one fused pass.

    Args:
        bad: Position in the batch of the first row that must not be stored, or -1: its old record was
            implausible, or the new one is not finite.
        clamped: Rows that ended on the clamp at the edge of the ball.
        far: Of these, rows taken there by a step longer than one hyperbolic unit.
        longest: The longest step in hyperbolic units; 0 in flat space, where it is not measured.
    """

    bad: int
    clamped: int = 0
    far: int = 0
    longest: float = 0.0

    @classmethod
    def of(cls, bad: int, told: NDArray[np.float64]) -> StepReport:
        """Return the report of a pass, see `dsa.kernels.visiting.Scratch`."""
        clamped, far, longest = told.tolist()
        return cls(bad, int(clamped), int(far), longest)


def merge_reports(reports: Iterable[StepReport]) -> StepReport:
    """Combine the reports of consecutive slices of one batch.

    Example:
        >>> merge_reports([StepReport(-1, clamped=2), StepReport(515, clamped=1)])
        StepReport(bad=515, clamped=3, far=0, longest=0.0)
    """
    merged = StepReport(-1)
    for report in reports:
        merged = StepReport(
            report.bad if merged.bad < 0 else merged.bad,
            merged.clamped + report.clamped,
            merged.far + report.far,
            max(merged.longest, report.longest),
        )
    return merged
