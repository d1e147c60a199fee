"""Notices steps on the ball that are too long to be meant."""

from __future__ import annotations

from collections import deque
from typing import Final, final

from dsa.errors import TrainingWarning, notify

__all__ = ["ClampWatch"]

_STEPS: Final = 100
_SHARE: Final = 0.01


@final
class ClampWatch:
    """Warns once when over 1 % of the rows of 100 steps went to the edge by steps of over one unit.

    Rows that rest on the clamp after small steps are normal late in training and don't count.

    Example:
        >>> watch = ClampWatch()
        >>> for _ in range(100):
        ...     watch.note(rows=50, far=0)
        >>> watch.warned
        False
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[int, int]] = deque(maxlen=_STEPS)
        self._rows = 0
        self._far = 0
        self.warned = False

    def note(self, rows: int, far: int) -> None:
        """Take in one step: how many rows on balls it moved, and how many of them far, see `StepReport`."""
        if rows == 0:
            return
        if len(self._recent) == _STEPS:
            old_rows, old_far = self._recent[0]
            self._rows -= old_rows
            self._far -= old_far
        self._recent.append((rows, far))
        self._rows += rows
        self._far += far
        if not self.warned and len(self._recent) == _STEPS and self._far > _SHARE * self._rows:
            self.warned = True
            notify(
                f"{self._far} of the {self._rows} rows of the last {_STEPS} steps were carried to the edge "
                "of the ball by steps longer than one hyperbolic unit, where they hardly learn: lower the "
                "learning rate, pass max_step (0.5, say), use second_moment='row', start with a burn-in at "
                "a tenth of the rate, or raise eps",
                TrainingWarning,
            )
