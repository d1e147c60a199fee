"""What is known of a table beside its rows: one value, wherever the table is."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from dsa.errors import StateCorruptError, StateError, StateMismatchError
from dsa.rules.init import Initializer, from_json
from dsa.rules.known import rule_from_json
from dsa.rules.manifolds import curvature_from_json
from dsa.rules.updates import AnyRule, label_of, rule_to_json
from dsa.schema import Rows, Schema, catches_up, is_bfloat16
from dsa.state.metadata import METADATA_NAME

__all__ = [
    "TableFacts",
    "describe_decay",
    "describe_facts",
    "first_decays",
    "stored_facts",
    "unreadable_table",
    "with_decay",
]


@final
@dataclass(frozen=True, slots=True)
class TableFacts:
    """What a table is.

    Args:
        name: The user's name for it, any string that is not empty.
        rows: N.
        schema: The layout of a record.
        rule: The update rule whose fields the records hold.
        k: Curvature magnitude; the space has curvature -k.
        steps: Optimizer steps in which the table took part.
        initializer: The rule that gives rows their first weights until they are written; None when every row
            was written at creation, or the records hold no weights.
        init_max_norm_fraction: Largest norm of a fresh row on the ball, as a fraction of its radius.
        decay: What a row's weight has decayed by that was there from the beginning, see `dsa.kernels.decay`;
            0 unless rows make up for what they miss of it.
        added: Where the table has grown since it has a decay: the first of the new rows, whose first weights
            decay from then on, and the decay at that time.

    Raises:
        ValueError: the update rule works in flat space only, and the table is on a ball; or weights that are
            not in the table are to make up for decay; or the decay is none.
    """

    name: str
    rows: int
    schema: Schema
    rule: AnyRule
    k: float = 0.0
    steps: int = 0
    initializer: Initializer | None = None
    init_max_norm_fraction: float = 0.5
    decay: float = 0.0
    added: tuple[tuple[int, float], ...] = ()

    @property
    def seed(self) -> int:
        """What tells its random roundings from those of other tables, in [0, 2^63): a hash of its name."""
        return _seed_of(self.name)

    def __post_init__(self) -> None:
        if self.k != 0.0 and "w" in self.schema.names and is_bfloat16(self.schema.dtype["w"]):
            raise ValueError(
                f"table {self.name!r} has weights in bfloat16 and k={self.k!r}: near the edge of a ball "
                "bfloat16 can't tell points apart; keep the weights in float32 (the other fields may be "
                "bfloat16), or pass k=0"
            )
        if self.k != 0.0 and not self.rule.curved:
            raise ValueError(
                f"table {self.name!r} has the update rule {label_of(self.rule)}, which works in flat "
                f"space only, and k={self.k!r}: pass k=0, or choose another rule"
            )
        if catches_up(self.schema.dtype) and "w" not in self.schema.names:
            raise ValueError(
                f"table {self.name!r} has the update rule {label_of(self.rule)}, and its weights are a "
                "parameter in memory, which is read as it is: make it a DiskEmbedding, or leave "
                "weight_decay_catch_up out"
            )
        decays = [0.0, *(decay for _, decay in self.added), self.decay]
        if not math.isfinite(self.decay) or not all(a <= b for a, b in pairwise(decays)):
            raise ValueError(
                f"decay={self.decay!r} and added={self.added!r} of table {self.name!r} are no sums of what "
                "steps took: restore it from a copy"
            )


@lru_cache(maxsize=256)
def _seed_of(name: str) -> int:
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def describe_facts(facts: TableFacts) -> dict[str, Any]:
    """Return what the description of a state says of a table, but for its shape, which the backend tells."""
    return {
        "name": facts.name,
        "k": facts.k,
        "steps": facts.steps,
        "rule": rule_to_json(facts.rule),
        "init_max_norm_fraction": facts.init_max_norm_fraction,
        "init": None if facts.initializer is None else facts.initializer.to_json(),
        **describe_decay(facts),
    }


def describe_decay(facts: TableFacts) -> dict[str, Any]:
    """Return what descriptions say of the decay that rows make up for: nothing where they don't.

    Beside the array of a row's own, `decay` says what a reader needs: ``w * exp(-(float32(decay) - l))``.
    """
    if not catches_up(facts.schema.dtype):
        return {}
    return {"decay": facts.decay, "added": [list(each) for each in facts.added]}


def with_decay(facts: TableFacts, described: Mapping[str, Any]) -> TableFacts:
    """Return the facts of a table with the decay that a description tells.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    if not catches_up(facts.schema.dtype):
        return facts
    added = tuple((int(first), float(decay)) for first, decay in described["added"])
    return replace(facts, decay=float(described["decay"]), added=added)


def first_decays(facts: TableFacts, rows: Rows) -> NDArray[np.float32]:
    """Return what the decay of a table was when rows came to be, ``(B,)``, as they would store it."""
    firsts = [0, *(first for first, _ in facts.added)]
    decays = np.array([0.0, *(decay for _, decay in facts.added)], np.float32)
    return np.asarray(decays[np.searchsorted(firsts, rows, side="right") - 1])


def stored_facts(path: Path, stored: Mapping[str, Any]) -> TableFacts:
    """Return what the description of a state says of a table.

    Args:
        path: The state directory.
        stored: The table's part of the description.

    Raises:
        StateMismatchError: its update rule is not known to this release.
        StateCorruptError: it can't be read.
    """
    try:
        init, backend = stored["init"], stored["backend"]
        facts = TableFacts(
            str(stored["name"]),
            int(backend["rows"]),
            Schema.from_json(backend["schema"]),
            rule_from_json(stored["rule"]),
            curvature_from_json(stored["k"]),
            int(stored["steps"]),
            None if init is None else from_json(init),
            float(stored["init_max_norm_fraction"]),
        )
        return with_decay(facts, stored)
    except StateMismatchError as error:
        raise StateMismatchError(
            f"table {stored.get('name')!r} in {str(path)!r} can't be used ({error}): open it with a release "
            "that knows its update rule"
        ) from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, StateError):
            raise
        raise unreadable_table(path, str(stored.get("name")), error) from error


def unreadable_table(path: Path, name: str, error: Exception) -> StateCorruptError:
    """Return the error that says why the description of a table can't be read."""
    return StateCorruptError(
        f"the description of table {name!r} in {str(path)!r} can't be read ({error!r}): restore "
        f"{METADATA_NAME} from a copy"
    )
