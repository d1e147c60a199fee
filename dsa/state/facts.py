"""What is known of a table beside its rows: one value, wherever the table is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, final

from dsa.errors import StateCorruptError, StateError, StateMismatchError
from dsa.rules.init import Initializer, from_json
from dsa.rules.known import rule_from_json
from dsa.rules.manifolds import curvature_from_json
from dsa.rules.updates import AnyRule, label_of, rule_to_json
from dsa.schema import Schema, is_bfloat16
from dsa.state.metadata import METADATA_NAME

__all__ = ["TableFacts", "describe_facts", "stored_facts", "unreadable_table"]


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

    Raises:
        ValueError: the update rule works in flat space only, and the table is on a ball.
    """

    name: str
    rows: int
    schema: Schema
    rule: AnyRule
    k: float = 0.0
    steps: int = 0
    initializer: Initializer | None = None
    init_max_norm_fraction: float = 0.5

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
    }


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
        return TableFacts(
            str(stored["name"]),
            int(backend["rows"]),
            Schema.from_json(backend["schema"]),
            rule_from_json(stored["rule"]),
            curvature_from_json(stored["k"]),
            int(stored["steps"]),
            None if init is None else from_json(init),
            float(stored["init_max_norm_fraction"]),
        )
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
