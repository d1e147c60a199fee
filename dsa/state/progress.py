"""What a transaction changes beside rows, carried by its journal entry: counts of steps, ids of rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from dsa.errors import StateCorruptError
from dsa.state.arrivals import ArrivalChange
from dsa.state.keys import KeyChange
from dsa.state.table import Table

__all__ = ["Progress", "progress_of"]


@final
@dataclass(frozen=True, slots=True)
class Progress:
    """What a state stands at after a transaction.

    Args:
        global_step: Steps that the state has taken.
        steps: Per table, the steps in which it took part.
        keys: What the transaction changes in the ids of tables, by their positions.

    Example:
        >>> progress = Progress(7, (7, 3))
        >>> Progress.from_bytes(progress.to_bytes(), stored=(0, 0)) == progress
        True
    """

    global_step: int
    steps: tuple[int, ...]
    keys: Mapping[int, KeyChange | ArrivalChange] = field(default_factory=dict)

    def after_step(self, took_part: Sequence[int]) -> Progress:
        """Return the progress after one more step of the tables at these positions."""
        steps = list(self.steps)
        for index in took_part:
            steps[index] += 1
        return Progress(self.global_step + 1, tuple(steps))

    def to_bytes(self) -> bytes:
        """Return the form that a journal entry carries: JSON, each effect of the step by its name."""
        effects: dict[str, Any] = {"global_step": self.global_step, "steps": self.steps}
        if self.keys:
            effects["keys"] = {str(index): change.to_json() for index, change in self.keys.items()}
        return json.dumps(effects).encode()

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
            named = effects.pop("keys", {})
            known = set(effects) == {"global_step", "steps"} and len(effects["steps"]) <= len(stored)
            counts = (int(effects["global_step"]), *map(int, effects["steps"]))
            keys = {int(index): _key_change(change) for index, change in named.items()}
            known = known and all(0 <= index < len(effects["steps"]) for index in keys)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StateCorruptError(
                f"a journal entry's note can't be read ({error}): restore the directory from a copy"
            ) from error
        if not known or min(counts) < 0:
            raise StateCorruptError(
                f"a journal entry's note {data[:200]!r} does not fit a state of {len(stored)} tables: "
                "restore the directory from a copy"
            )
        return cls(counts[0], (*counts[1:], *map(int, stored[len(counts) - 1 :])), keys)


def progress_of(tables: Sequence[Table], global_step: int) -> Progress:
    """Return the progress that open tables stand at."""
    return Progress(global_step, tuple(table.steps for table in tables))


def _key_change(data: Any) -> KeyChange | ArrivalChange:  # noqa: ANN401 - JSON is untyped until it has been checked
    return (ArrivalChange if data["kind"] == "count" else KeyChange).from_json(data)
