"""What the attributes of a checkpoint say: of the whole, of each table, of each array.

The attributes are written for people who open the checkpoint with plain Zarr as much as for dsa. A checksum
over all of them is kept in the root, so that a changed curvature is noticed like a changed weight; it leaves
out what may legally change: chunks, codecs, and attributes that users add.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar, final

from dsa.backends.shards.layout import ArraySpec
from dsa.checkpoint.digests import ALGORITHMS, ArrayDigest, root_digest
from dsa.checkpoint.names import is_group_name, name_from_json, name_to_json
from dsa.errors import DSAError, StateMismatchError
from dsa.rules.init import Initializer, from_json
from dsa.rules.known import rule_from_json
from dsa.rules.updates import rule_to_json
from dsa.schema import Schema
from dsa.state.facts import TableFacts, describe_decay, with_decay

__all__ = [
    "ARRAY_CHECKSUM",
    "FORMAT",
    "FORMAT_VERSION",
    "LARGEST_ARRAY",
    "ROOT",
    "ZERO_ROWS",
    "ArrayEntry",
    "Kind",
    "Manifest",
    "TableEntry",
    "array_entry",
    "array_specs",
    "metadata_checksum",
]

FORMAT: Final = "dsa-checkpoint"
FORMAT_VERSION: Final = 5
"""The number of the state directory's format that it goes with; no release has written an earlier one."""

ROOT: Final = "dsa"
ARRAY_CHECKSUM: Final = "dsa_checksum"
ZERO_ROWS: Final = "dsa_zero_rows"

LARGEST_ARRAY: Final = 1 << 44
"""Bytes of an array; what claims to be larger is taken for an attack."""

Kind = Literal["full", "delta", "weights"]
_KINDS: Final = ("full", "delta", "weights")
_LARGEST_COUNT: Final = 2**62

T = TypeVar("T")


def array_specs(schema: Schema, rows: int) -> list[ArraySpec]:
    """Return the array of each field of a table.

    Raises:
        ValueError: one of them would be larger than `LARGEST_ARRAY`.

    Example:
        >>> from dsa.schema import adam_schema
        >>> array_specs(adam_schema(2, weights=False), 10)[0]
        ArraySpec(name='m', dtype='<f4', rows=10, columns=2)
    """
    specs = []
    for part in schema.fields:
        base = schema.dtype[part.name].base
        spec = ArraySpec(part.name, base.str, rows, schema.dim if part.per == "element" else None)
        if spec.rows * spec.row_bytes > LARGEST_ARRAY:
            raise ValueError(
                f"the array {spec.name!r} of shape {spec.shape} has more than {LARGEST_ARRAY:,} bytes, which "
                "no checkpoint may have: divide the table"
            )
        specs.append(spec)
    return specs


@final
@dataclass(frozen=True, slots=True)
class ArrayEntry:
    """What an array's attributes say.

    Args:
        digest: Its checksum, with its shape and type.
        zero_rows: Half-open runs of rows that are zero in every byte and whose shards were left out.
    """

    digest: ArrayDigest
    zero_rows: tuple[tuple[int, int], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the array's attributes."""
        return {ARRAY_CHECKSUM: self.digest.to_json(), ZERO_ROWS: [list(run) for run in self.zero_rows]}


def array_entry(attributes: Mapping[str, Any], spec: ArraySpec) -> ArrayEntry:
    """Return what an array's attributes say, checked against what its table makes it.

    Raises:
        ValueError: they are no attributes of such an array.
    """
    data = _of_type(attributes.get(ARRAY_CHECKSUM), dict, ARRAY_CHECKSUM)
    algorithm, blocks = data.get("algorithm"), _of_type(data.get("blocks"), list, "blocks")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"the checksum algorithm {algorithm!r} is unknown")
    if not all(isinstance(block, str) and len(block) == 64 for block in blocks):
        raise ValueError("the checksum's blocks are no digests")
    digest = ArrayDigest(algorithm, spec, tuple(blocks), root_digest(algorithm, spec, blocks))
    if digest.to_json() != data or len(blocks) != -(-spec.rows // digest.block_rows):
        raise ValueError("its checksum belongs to other blocks, another shape or another type")
    runs = []
    end = 0
    for run in _of_type(attributes.get(ZERO_ROWS, []), list, ZERO_ROWS):
        start, stop = (_count(bound, ZERO_ROWS) for bound in _of_type(run, list, ZERO_ROWS))
        if not end <= start < stop <= spec.rows:
            raise ValueError(f"{ZERO_ROWS} {run!r} are no rows of it")
        runs.append((start, stop))
        end = stop
    return ArrayEntry(digest, tuple(runs))


@final
@dataclass(frozen=True, slots=True)
class TableEntry:
    """What a table's attributes say.

    Args:
        facts: What the table is. The schema is that of the fields that are stored.
        group: The name of its group.
        stored: The fields of a record of the state that it came from, when those are others.
        touched_rows: Rows that were ever written, or None where the schema doesn't tell.
    """

    facts: TableFacts
    group: str
    stored: Schema | None = None
    touched_rows: int | None = None

    @property
    def name(self) -> str:
        """The user's name for the table."""
        return self.facts.name

    @property
    def rows(self) -> int:
        """N."""
        return self.facts.rows

    @property
    def schema(self) -> Schema:
        """The fields that are stored."""
        return self.facts.schema

    @property
    def k(self) -> float:
        """Curvature magnitude; the space has curvature -k."""
        return self.facts.k

    @property
    def steps(self) -> int:
        """Optimizer steps in which the table took part."""
        return self.facts.steps

    @property
    def initializer(self) -> Initializer | None:
        """The rule for first weights of rows that are stored only where they were written."""
        return self.facts.initializer

    def to_json(self) -> dict[str, Any]:
        """Return the group's attributes."""
        facts, first = self.facts, self.facts.initializer
        return {
            "name": name_to_json(facts.name),
            "kind": "poincare" if facts.k else "euclidean",
            "k": float(facts.k),
            "rows": facts.rows,
            "dim": facts.schema.dim,
            "touched_rows": self.touched_rows,
            "steps": facts.steps,
            "rule": rule_to_json(facts.rule),
            "init_max_norm_fraction": float(facts.init_max_norm_fraction),
            "initializer": None if first is None else first.to_json(),
            "schema": facts.schema.to_json(),
            "stored_schema": None if self.stored is None else self.stored.to_json(),
            **describe_decay(facts),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], group: str) -> TableEntry:
        """Rebuild the entry from the group's attributes.

        Raises:
            StateMismatchError: the update rule is not known to this release.
            ValueError: they describe no table.
        """
        stored, touched = data.get("stored_schema"), data.get("touched_rows")
        try:
            entry = cls(
                _facts(data),
                group,
                None if stored is None else Schema.from_json(stored),
                None if touched is None else _count(touched, "touched_rows"),
            )
        except StateMismatchError:
            raise
        except DSAError as error:
            raise ValueError(str(error)) from error
        entry._check()
        _agree(data, entry.to_json())
        return entry

    def _check(self) -> None:
        facts, first = self.facts, self.facts.initializer
        if facts.k < 0 or facts.init_max_norm_fraction < 0:
            raise ValueError(f"k is {facts.k!r} and init_max_norm_fraction {facts.init_max_norm_fraction!r}")
        if first is not None and first.dim != facts.schema.dim:
            raise ValueError(f"its initialiser has dim {first.dim}, not {facts.schema.dim}")
        if not all(name.isascii() for name in facts.schema.names):
            raise ValueError(f"its fields {facts.schema.names} are no names of arrays")


def _facts(data: Mapping[str, Any]) -> TableFacts:
    first = data.get("initializer")
    facts = TableFacts(
        name_from_json(data.get("name")),
        _count(data.get("rows"), "rows"),
        Schema.from_json(data.get("schema")),
        rule_from_json(data.get("rule")),
        _number(data.get("k"), "k"),
        _count(data.get("steps"), "steps"),
        None if first is None else from_json(first),
        _number(data.get("init_max_norm_fraction"), "init_max_norm_fraction"),
    )
    try:
        return with_decay(facts, data)
    except (KeyError, TypeError) as error:
        raise ValueError(f"its decay can't be read ({error!r})") from error


@final
@dataclass(frozen=True, slots=True)
class Manifest:
    """What the root says.

    Args:
        kind: ``"full"``, ``"delta"`` for the rows that changed since another checkpoint, or ``"weights"`` for
            serving.
        global_step: Steps that the state had taken.
        content_root: See `dsa.checkpoint.digests`.
        tables: Name and group of each table, in the state's order.
        created: When, in UTC (ISO 8601).
        versions: The libraries that wrote it.
        attributes: What the caller wanted to keep with it.
        base: Of a delta: the ``step`` and ``content_root`` of the checkpoint it is relative to.
        metadata: `metadata_checksum`, empty until it is known.
        identity: The state's; see `dsa.state.content.StateContent`.
    """

    kind: Kind
    global_step: int
    content_root: str
    tables: tuple[tuple[str, str], ...]
    created: str
    versions: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    base: Mapping[str, Any] | None = None
    metadata: str = ""
    identity: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the root's attribute ``dsa``."""
        data: dict[str, Any] = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "complete": True,
            "kind": self.kind,
            "global_step": self.global_step,
            "identity": self.identity,
            "created": self.created,
            "tables": [{"name": name_to_json(name), "group": group} for name, group in self.tables],
            "versions": dict(self.versions),
            "attributes": dict(self.attributes),
            "content_root": self.content_root,
            "metadata_checksum": self.metadata,
        }
        if self.base is not None:
            data["base"] = dict(self.base)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """Rebuild the manifest from the root's attribute, whose format and completeness the caller checks.

        Raises:
            ValueError: it is no manifest.
        """
        tables = []
        for each in _of_type(data.get("tables"), list, "tables"):
            table = _of_type(each, dict, "tables")
            name, group = name_from_json(table.get("name")), table.get("group")
            if group is None or not is_group_name(group):
                raise ValueError(f"the table {name!r} is in {group!r}, which is no group's name")
            tables.append((name, group))
        if len({name for name, _ in tables}) < len(tables) or len({group for _, group in tables}) < len(
            tables
        ):
            raise ValueError("a table or a group is named twice")
        kind = data.get("kind")
        if kind not in _KINDS:
            raise ValueError(f"kind is {kind!r}")
        base = data.get("base")
        manifest = cls(
            kind,
            _count(data.get("global_step"), "global_step"),
            _of_type(data.get("content_root"), str, "content_root"),
            tuple(tables),
            _of_type(data.get("created"), str, "created"),
            _of_type(data.get("versions"), dict, "versions"),
            _of_type(data.get("attributes"), dict, "attributes"),
            None if base is None else _of_type(base, dict, "base"),
            _of_type(data.get("metadata_checksum"), str, "metadata_checksum"),
            _of_type(data.get("identity"), str, "identity"),
        )
        _agree(data, manifest.to_json())
        return manifest


def metadata_checksum(
    root: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]], arrays: Mapping[str, Mapping[str, Any]]
) -> str:
    """Return the SHA-256 of everything that the attributes say, as JSON with sorted keys and no spaces.

    Args:
        root: `Manifest.to_json`, whose own ``metadata_checksum`` doesn't count.
        groups: `TableEntry.to_json` by group.
        arrays: `ArrayEntry.to_json` by path.
    """
    everything = {
        "root": {key: value for key, value in root.items() if key != "metadata_checksum"},
        "groups": groups,
        "arrays": arrays,
    }
    text = json.dumps(everything, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _agree(data: Mapping[str, Any], canonical: Mapping[str, Any]) -> None:
    """Refuse what would be written down otherwise: then something was changed that nothing else notices."""
    for key, value in canonical.items():
        if data.get(key) != value:
            raise ValueError(f"{key} is {data.get(key)!r}, not {value!r}")


def _of_type(value: Any, kind: type[T], what: str) -> T:  # noqa: ANN401 - JSON is untyped
    if not isinstance(value, kind):
        raise ValueError(f"{what} is {value!r}")
    return value


def _count(value: Any, what: str) -> int:  # noqa: ANN401 - JSON is untyped
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST_COUNT:
        raise ValueError(f"{what} is {value!r}, no count")
    return value


def _number(value: Any, what: str) -> float:  # noqa: ANN401 - JSON is untyped
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{what} is {value!r}, no number")
    return float(value)
