"""What a step changes beside rows: the counts of steps, carried by its journal entry."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from dsa.errors import StateCorruptError
from dsa.state.table import Table

__all__ = ["Progress", "progress_of"]


@final
@dataclass(frozen=True, slots=True)
class Progress:
    """Counts of steps.

    Args:
        global_step: Steps that the state has taken.
        steps: Per table, the steps in which it took part.

    Example:
        >>> progress = Progress(7, (7, 3))
        >>> Progress.from_bytes(progress.to_bytes(), stored=(0, 0)) == progress
        True
    """

    global_step: int
    steps: tuple[int, ...]

    def after_step(self, took_part: Sequence[int]) -> Progress:
        """Return the progress after one more step of the tables at these positions."""
        steps = list(self.steps)
        for index in took_part:
            steps[index] += 1
        return replace(self, global_step=self.global_step + 1, steps=tuple(steps))

    def to_bytes(self) -> bytes:
        """Return the form that a journal entry carries: JSON, each effect of the step by its name."""
        return json.dumps({"global_step": self.global_step, "steps": self.steps}).encode()

    @classmethod
    def from_bytes(cls, data: bytes, stored: Sequence[int]) -> Progress:
        """Rebuild what `to_bytes` has written.

        Args:
            data: The note of a journal entry.
            stored: Per table, the steps that the description tells: a table that was added after the entry is
                not in it.

        Raises:
            StateCorruptError: the data is not that.
        """
        try:
            effects = json.loads(data)
            known = set(effects) == {"global_step", "steps"} and len(effects["steps"]) <= len(stored)
            counts = (int(effects["global_step"]), *map(int, effects["steps"]))
        except (ValueError, TypeError, KeyError) as error:
            raise StateCorruptError(
                f"a journal entry's note can't be read ({error}): restore the directory from a copy"
            ) from error
        if not known or min(counts) < 0:
            raise StateCorruptError(
                f"a journal entry's note {data!r} does not fit a state of {len(stored)} tables: restore the "
                "directory from a copy"
            )
        return cls(counts[0], (*counts[1:], *map(int, stored[len(counts) - 1 :])))


def progress_of(tables: Sequence[Table], global_step: int) -> Progress:
    """Return the progress that open tables stand at."""
    return Progress(global_step, tuple(table.steps for table in tables))
