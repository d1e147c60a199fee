"""Tables of rows become tables of ids, and back: weights, moments, counters and all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike

from dsa.backends.id_map import Ids
from dsa.checkpoint.by_id import RecordsById
from dsa.checkpoint.delta import open_content
from dsa.checkpoint.transfer import make_state
from dsa.errors import RowIndexError, StateMismatchError
from dsa.rules.init import Initializer
from dsa.schema import Records, Schema, is_keyed, keyed
from dsa.state.coalesce import as_ids
from dsa.state.content import StateContent, TableContent, recast
from dsa.state.directories import local_directory
from dsa.state.metadata import METADATA_NAME
from dsa.state.opening import opened
from dsa.state.snapshot import Snapshot
from dsa.state.storage import StorageChoice

__all__ = ["convert_ids"]

_BLOCK_BYTES: Final = 4 << 20


def convert_ids(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    keyed: Mapping[str, ArrayLike | None] | None = None,
    dense: Mapping[str, ArrayLike] | None = None,
    init: Mapping[str, Initializer] | None = None,
    storage: StorageChoice | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Make a state directory of another one in which rows belong to ids, or no longer do.

    Rows keep weights, moments, counters and the step of their last write; tables that are not named stay as
    they are. The new directory is closed and ready to be opened with ``resume=True``.

    Args:
        source: A state directory that nobody has open, or a checkpoint; nothing is written to it.
        directory: The new state directory: absent, empty, or without tables.
        keyed: Tables whose rows are to belong to ids: the id of each row, ``(N,)`` distinct integers; None
            for the rows' numbers.
        dense: Tables whose rows belong to ids, and are to be told by their place: the ids in their order.
        init: Rules without a number of rows for first weights of ids that come later, such as
            ``dsa.init.Zeros(None, 64)``; a table that was made by a rule has one.
        storage: How to store the new state.
        storage_options: For fsspec and the source.

    Raises:
        KeyError: there is no table of a name.
        ValueError: ids can't be those of a table, or there is no rule for later ones; nothing is made.
        RowIndexError: an id has no row; nothing is made.
        StateError, CheckpointError: the source can't be used, or there is state in the directory.
        DiskSpaceError: there is no room.

    Example:
        >>> import tempfile, dsa
        >>> path = tempfile.mkdtemp()
        >>> with dsa.DiskSparseRiemannianAdam({"word": dsa.init.Normal(3, 4)}, disk_dir=f"{path}/rows"):
        ...     pass
        >>> convert_ids(f"{path}/rows", f"{path}/ids", keyed={"word": [70, -1, 5]})
        >>> rule = {"word": dsa.init.Normal(None, 4)}
        >>> with dsa.DiskSparseRiemannianAdam(rule, disk_dir=f"{path}/ids", resume=True) as optimizer:
        ...     sorted(optimizer.ids("word").tolist())
        [-1, 5, 70]
    """
    to_ids, to_rows, rules = dict(keyed or {}), dict(dense or {}), dict(init or {})
    with ExitStack() as stack:
        content = _content(source, storage_options, stack)
        names = {table.name for table in content.tables}
        if unknown := sorted({*to_ids, *to_rows, *rules} - names):
            raise KeyError(
                f"there is no table {unknown[0]!r} in {str(source)!r}: name some of {sorted(names)}"
            )
        tables = []
        for table in content.tables:
            if table.name in to_ids:
                table = _keyed(table, to_ids[table.name], rules.get(table.name))
            elif table.name in to_rows:
                table = _dense(table, to_rows[table.name], _scratch(directory), stack)
            tables.append(table)
        made = StateContent(tuple(tables), content.global_step)
        make_state(directory, made, (storage or StorageChoice()).complete())


def _content(
    source: str | os.PathLike[str], storage_options: Mapping[str, Any] | None, stack: ExitStack
) -> StateContent:
    if (Path(source) / METADATA_NAME).exists():
        state = stack.enter_context(opened(source, None))
        with state.use():
            return stack.enter_context(Snapshot(state)).content
    return open_content(source, storage_options=storage_options).content


def _scratch(directory: str | os.PathLike[str]) -> Path:
    """Return a directory that exists, on the disk that the new state is to lie on."""
    path = Path(local_directory(directory)).absolute()
    return next(each for each in (path, *path.parents) if each.is_dir())


def _keyed(table: TableContent, given: ArrayLike | None, rule: Initializer | None) -> TableContent:
    if is_keyed(table.schema) or (table.stored or table.schema).names[:1] != ("w",):
        raise StateMismatchError(
            f"the rows of table {table.name!r} belong to ids already, or their weights are a module's "
            "parameter: name tables of rows on disk"
        )
    ids = None if given is None else _distinct(table, given)
    if ids is not None and len(ids) != table.rows:
        raise ValueError(
            f"{len(ids)} ids are not those of the {table.rows} rows of table {table.name!r}: pass one for "
            "each row"
        )
    rule = table.facts.initializer if rule is None else rule
    if rule is None or rule.dim != table.schema.dim:
        raise ValueError(
            f"there is no rule for the first weights of ids that come to table {table.name!r} later: pass "
            f"init={{{table.name!r}: dsa.init.Zeros(None, {table.schema.dim})}} or another"
        )
    schema = keyed(table.schema)
    facts = replace(table.facts, schema=schema, initializer=replace(rule, rows=None), added=())

    def blocks() -> Iterator[tuple[int, Records]]:
        for first, records in table.blocks():
            made = recast(records, schema)
            rows = slice(first, first + len(records))
            made["id"] = np.arange(rows.start, rows.stop) if ids is None else ids[rows]
            made["live"], made["s"] = 1, np.maximum(made["s"], 1)
            yield first, made

    return replace(table, facts=facts, blocks=blocks)


def _dense(table: TableContent, given: ArrayLike, scratch: Path, stack: ExitStack) -> TableContent:
    if not is_keyed(table.schema):
        raise StateMismatchError(
            f"the rows of table {table.name!r} belong to no ids: name tables whose rows do"
        )
    ids = _distinct(table, given)
    records = stack.enter_context(RecordsById(table, scratch))
    schema = Schema(table.schema.dim, table.schema.fields[2:])
    block = max(1, _BLOCK_BYTES // table.schema.dtype.itemsize)
    for start in range(0, len(ids), block):
        lacking = np.flatnonzero(records.find(ids[start : start + block]) < 0)
        if len(lacking):
            raise RowIndexError(
                f"id {ids[start + lacking[0]]} has no row in table {table.name!r}: leave it out of the order"
            )

    def blocks() -> Iterator[tuple[int, Records]]:
        for start in range(0, len(ids), block):
            some = ids[start : start + block]
            yield start, recast(records.read(records.find(some)), schema)

    facts = replace(table.facts, rows=len(ids), schema=schema, initializer=None, added=())
    return replace(table, facts=facts, blocks=blocks, live=None, touched_share=None)


def _distinct(table: TableContent, given: ArrayLike) -> Ids:
    """Return ids, of which there are some, each once.

    Raises:
        ValueError: they are not.
        RowTypeError: they can't be ids.
    """
    wide = as_ids(np.asarray(given), table.name)
    if not len(wide):
        raise ValueError(f"no ids are given for table {table.name!r}: pass one at least")
    if len(np.unique(wide)) < len(wide):
        raise ValueError(f"an id comes twice among those of table {table.name!r}: pass each once")
    return wide
