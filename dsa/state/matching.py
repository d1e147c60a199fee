"""Is what is stored what is asked for?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsa.errors import StateCorruptError, StateMismatchError, StateWarning, notify
from dsa.rules.updates import label_of
from dsa.schema import Schema, is_keyed
from dsa.state.content import TableContent
from dsa.state.facts import TableFacts, stored_facts
from dsa.state.metadata import METADATA_NAME
from dsa.state.storage import Storage, TableSpec
from dsa.state.table import Table
from dsa.state.table_files import match_layout

__all__ = ["match_content", "match_names", "match_stored_table", "match_table", "warn_of_curvature"]


def match_names(path: Path, specs: Sequence[TableSpec], by_name: Mapping[str, object]) -> None:
    """Raise `StateMismatchError` when a stored state has other tables than those asked for."""
    wanted = {spec.name for spec in specs}
    if wanted != set(by_name):
        raise StateMismatchError(
            f"the state in {str(path)!r} holds the tables {sorted(by_name)} but {sorted(wanted)} are asked "
            "for: pass the stored ones, or another directory"
        )


def match_stored_table(path: Path, spec: TableSpec, stored: dict[str, Any], storage: Storage) -> None:
    """Raise `StateMismatchError` when a stored table is not the one asked for.

    Args:
        path: The state directory.
        spec: What is asked for.
        stored: The table's description in the metadata.
        storage: How it is to be stored.
    """
    description = stored.get("backend")
    if not isinstance(description, dict) or not isinstance(description.get("rows"), int):
        raise StateCorruptError(
            f"the description of table {spec.name!r} in {str(path)!r} lacks its backend: restore "
            f"{METADATA_NAME} from a copy"
        )
    facts = stored_facts(path, stored)
    try:
        _match(facts, spec)
        match_layout(spec.name, description, storage.backend)
    except StateMismatchError as error:
        raise StateMismatchError(f"in {str(path)!r}, {error}") from None


def match_table(table: Table, spec: TableSpec) -> None:
    """Raise `StateMismatchError` when an open table is not the one asked for."""
    _match(table.facts, spec)


def match_content(content: TableContent, spec: TableSpec) -> None:
    """Raise `StateMismatchError` when a table of older state is not the one asked for."""
    _match(content.facts, spec)


def _match(stored: TableFacts, spec: TableSpec) -> None:
    wanted, schema = spec.facts, stored.schema
    rows = stored.rows if is_keyed(schema) and is_keyed(wanted.schema) else wanted.rows
    if (stored.rows, schema.dim) != (rows, wanted.schema.dim):
        raise StateMismatchError(
            f"table {spec.name!r} is stored as {stored.rows} x {schema.dim} but {wanted.rows} x "
            f"{wanted.schema.dim} is asked for: pass a table of the stored shape, or another directory"
        )
    if stored.rule not in (wanted.rule, *spec.alternatives) or schema != wanted.schema:
        raise StateMismatchError(
            f"table {spec.name!r} is stored with the update rule {label_of(stored.rule)} and the fields "
            f"{_fields(schema)} but {label_of(wanted.rule)} with {_fields(wanted.schema)} is asked for: the "
            "stored fields would be misread; pass the stored options, or another directory"
        )


def _fields(schema: Schema) -> str:
    return ", ".join(f"{field.name} {field.dtype} per {field.per}" for field in schema.fields)


def warn_of_curvature(table: Table, spec: TableSpec) -> None:
    """Warn when the curvature asked for is not the stored one, which is kept."""
    if table.k != (k := spec.facts.k):
        notify(
            f"table {table.name!r} was stored with k={table.k!r}, which is kept; the k={k!r} asked for "
            f"is ignored: call set_curvature({k!r}) to change it",
            StateWarning,
        )
