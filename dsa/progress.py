"""The small part of a state that changes with every step: what a journal entry carries beside rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from dsa.errors import StateCorruptError
from dsa.manifolds import curvature_from_json
from dsa.table import Table

__all__ = ["Progress", "progress_of"]


@final
@dataclass(frozen=True, slots=True)
class Progress:
    """Counts, curvatures and a pending change.

    Args:
        global_step: Steps that the state has taken.
        steps: Per table, the steps in which it took part.
        curvatures: Per table, its curvature magnitude.
        change: A whole-table change that is under way, as plain JSON with the row up to which it is done, or
            None.

    Example:
        >>> progress = Progress(7, (7, 3), (0.0, 1.0), None)
        >>> Progress.from_bytes(progress.to_bytes(), tables=2) == progress
        True
    """

    global_step: int
    steps: tuple[int, ...]
    curvatures: tuple[float, ...]
    change: dict[str, Any] | None

    def after_step(self, took_part: Sequence[int]) -> Progress:
        """Return the progress after one more step of the tables at these positions."""
        steps = list(self.steps)
        for index in took_part:
            steps[index] += 1
        return replace(self, global_step=self.global_step + 1, steps=tuple(steps))

    def with_change(self, change: dict[str, Any] | None) -> Progress:
        """Return the progress with another pending change."""
        return replace(self, change=change)

    def with_curvature(self, index: int, k: float) -> Progress:
        """Return the progress with another curvature of the table at a position."""
        curvatures = (*self.curvatures[:index], k, *self.curvatures[index + 1 :])
        return replace(self, curvatures=curvatures)

    def to_bytes(self) -> bytes:
        """Return the form that a journal entry carries."""
        return json.dumps([self.global_step, self.steps, self.curvatures, self.change]).encode()

    @classmethod
    def from_bytes(cls, data: bytes, tables: int) -> Progress:
        """Rebuild what `to_bytes` has written, for so many tables or, before some were added, for fewer.

        Raises:
            StateCorruptError: the data is not that.
        """
        try:
            step, steps, curvatures, change = json.loads(data)
            good = len(steps) == len(curvatures) <= tables and (change is None or isinstance(change, dict))
            counts = (int(step), *map(int, steps))
        except (ValueError, TypeError) as error:
            raise StateCorruptError(
                f"a journal entry's note can't be read ({error}): restore the directory from a copy"
            ) from error
        if not good or min(counts) < 0:
            raise StateCorruptError(
                f"a journal entry's note {data!r} does not fit a state of {tables} tables: restore the "
                "directory from a copy"
            )
        return cls(counts[0], counts[1:], tuple(map(curvature_from_json, curvatures)), change)


def progress_of(tables: Sequence[Table], global_step: int, change: dict[str, Any] | None) -> Progress:
    """Return the progress that open tables stand at."""
    steps = tuple(table.steps for table in tables)
    return Progress(global_step, steps, tuple(table.k for table in tables), change)
