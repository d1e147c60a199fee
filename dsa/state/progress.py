"""What a transaction changes beside rows, carried by its journal entry: steps, decay, ids of rows."""

from __future__ import annotations

import json
import math
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
        decays: Per table, its decay, see `dsa.state.facts.TableFacts`.
        keys: What the transaction changes in the ids of tables, by their positions.

    Example:
        >>> progress = Progress(7, (7, 3), (0.0, 0.25))
        >>> Progress.from_bytes(progress.to_bytes(), stored=Progress(0, (0, 0), (0.0, 0.0))) == progress
        True
    """

    global_step: int
    steps: tuple[int, ...]
    decays: tuple[float, ...]
    keys: Mapping[int, KeyChange | ArrivalChange] = field(default_factory=dict)

    def after_step(self, took_part: Mapping[int, float]) -> Progress:
        """Return the progress after one more step.

        Args:
            took_part: By the positions of the tables that take part, by how much their decay grows.
        """
        steps, decays = list(self.steps), list(self.decays)
        for index, growth in took_part.items():
            steps[index] += 1
            decays[index] += growth
        return Progress(self.global_step + 1, tuple(steps), tuple(decays))

    def to_bytes(self) -> bytes:
        """Return the form that a journal entry carries: JSON, each effect of the step by its name."""
        if not self.keys and not any(self.decays):  # what `json.dumps` makes of it, in a fifth of its time
            return f'{{"global_step": {self.global_step}, "steps": {list(self.steps)}}}'.encode()
        effects: dict[str, Any] = {"global_step": self.global_step, "steps": self.steps}
        if any(self.decays):
            effects["decays"] = self.decays
        if self.keys:
            effects["keys"] = {str(index): change.to_json() for index, change in self.keys.items()}
        return json.dumps(effects).encode()

    @classmethod
    def from_bytes(cls, data: bytes, stored: Progress) -> Progress:
        """Rebuild what `to_bytes` has written.

        Args:
            data: The note of a journal entry.
            stored: What the description tells: a table that was added after the entry is not in it.

        Raises:
            StateCorruptError: the data is not that.
        """
        try:
            effects = json.loads(data)
            named, count = effects.pop("keys", {}), len(effects["steps"])
            decays = tuple(map(float, effects.pop("decays", [0.0] * count)))
            known = set(effects) == {"global_step", "steps"} and len(decays) == count <= len(stored.steps)
            counts = (int(effects["global_step"]), *map(int, effects["steps"]))
            keys = {int(index): _key_change(change) for index, change in named.items()}
            known = known and all(0 <= index < count for index in keys)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StateCorruptError(
                f"a journal entry's note can't be read ({error}): restore the directory from a copy"
            ) from error
        if not known or min(counts) < 0 or not all(0.0 <= decay < math.inf for decay in decays):
            raise StateCorruptError(
                f"a journal entry's note {data[:200]!r} does not fit a state of {len(stored.steps)} tables: "
                "restore the directory from a copy"
            )
        return cls(counts[0], (*counts[1:], *stored.steps[count:]), (*decays, *stored.decays[count:]), keys)


def progress_of(tables: Sequence[Table], global_step: int) -> Progress:
    """Return the progress that open tables stand at."""
    return Progress(
        global_step, tuple(table.steps for table in tables), tuple(table.decay for table in tables)
    )


def _key_change(data: Any) -> KeyChange | ArrivalChange:  # noqa: ANN401 - JSON is untyped until it has been checked
    return (ArrivalChange if data["kind"] == "count" else KeyChange).from_json(data)
