"""Between open states and checkpoints: export, import, and making a directory from a checkpoint."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np

from dsa.backends.base import Layout
from dsa.checkpoint import (
    OpenedContent,
    open_checkpoint,
    open_content,
    write_delta,
    write_weights,
)
from dsa.checkpoint.export import ExportOptions, export_content
from dsa.checkpoint.meter import Advance, Progress, metered
from dsa.errors import StateExistsError, StateMismatchError, StateWarning, notify
from dsa.rules.updates import label_of
from dsa.schema import Field, Records, is_keyed, read_numbers, widened
from dsa.state.content import StateContent, TableContent
from dsa.state.directories import local_directory
from dsa.state.holding import LOCK_NAME, HeldDirectory
from dsa.state.legacy import Curvatures, Shapes, find_legacy, read_legacy
from dsa.state.metadata import read_metadata
from dsa.state.opening import migrate_directory
from dsa.state.opening import opened as opened_directory
from dsa.state.replacement import replace_content, write_content
from dsa.state.snapshot import Snapshot
from dsa.state.state_directory import StateDirectory
from dsa.state.storage import Storage, StorageChoice
from dsa.state.table import Table

__all__ = [
    "Compression",
    "export_directory",
    "export_directory_weights",
    "export_state",
    "export_weights",
    "import_state",
    "make_state",
    "migrate",
    "restore",
]

Compression = Literal["zstd", "auto"] | None


def export_state(
    state: StateDirectory,
    url: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    **options: Unpack[ExportOptions],
) -> str:
    """Write a checkpoint of an open state as it is now; training may go on in other threads.

    Args:
        state: The state.
        url: Where to; see `dsa.checkpoint.write_checkpoint`.
        base: A full checkpoint of this state: only what has changed since is written.
        options: Those of `dsa.checkpoint.write_checkpoint`.

    Returns:
        The path or the URL of the checkpoint.
    """
    state.require_open()
    below = None if base is None else open_checkpoint(base, storage_options=options.get("storage_options"))
    with _snapshot(state) as snapshot:
        if below is not None:
            return write_delta(snapshot.content, below, url, state.path, **options)
        made = export_content(snapshot.content, url, **options)
    with state.exclusive:
        # An import meanwhile has made it another history, whatever its identity.
        if state.is_open and state.replacements == snapshot.replacements:
            state.note_export(made.content_root, snapshot.content.global_step)
    return made.url


def export_weights(
    state: StateDirectory, url: str | os.PathLike[str], **options: Unpack[ExportOptions]
) -> str:
    """Write the weights of an open state; see `dsa.checkpoint.write_weights`."""
    state.require_open()
    with _snapshot(state) as snapshot:
        return write_weights(snapshot.content, url, **options)


@contextmanager
def _snapshot(state: StateDirectory) -> Iterator[Snapshot]:
    with ExitStack() as stack:
        with state.use():
            state.settle()
            snapshot = stack.enter_context(Snapshot(state))
        yield snapshot
    if state.is_open:
        state.require_kept()  # or what was read may be older than what was written


def import_state(
    state: StateDirectory,
    opened: OpenedContent,
    progress: Progress = False,
    convert_dtypes: bool = False,
) -> None:
    """Give an open state the content of a checkpoint, wholly or not at all.

    Args:
        state: The state, whose tables have the names and fields of the checkpoint's, and at most its rows.
        opened: The checkpoint; nothing is written to it.
        progress: True for a bar, or a function of the bytes done and their total.
        convert_dtypes: Whether fields may be stored as another dtype here; numbers are rounded to the nearest
            then.

    Raises:
        StateMismatchError: the tables differ; nothing has changed.
        CheckpointCorruptError: the checkpoint is damaged; nothing has changed.
        DiskSpaceError: there is no room for old and new state; nothing has changed.
    """
    content = opened.content
    total = sum(table.rows * table.schema.dtype.itemsize for table in content.tables)
    with state.use(), metered(progress, total, "import") as advance, ExitStack() as stack:
        tables = _matched(state, content, convert_dtypes)
        if any(_is_converted(each) for each in tables.values()):
            content = replace(content, exports={})  # what is stored is in no checkpoint
        for table in state.tables.values():
            if table.held is not None:
                table.held.require_writable()
        kept = {name: stack.enter_context(_Kept(state.path, tables[name])) for name in _held_names(state)}
        state.settle()
        ordered = [tables[name] for name in state.tables]
        watched = tuple(_watched(each, advance, kept.get(each.name)) for each in ordered)
        effects = [partial(weights.put, state.tables[name]) for name, weights in kept.items()]
        try:
            replace_content(state, replace(content, tables=watched), effects)
        except BaseException:
            if not state.is_settled:
                held = stack.pop_all()  # needed by the next call, if completing it fails here too
                state.settle()  # the directory has changed: the weights in memory must, too
                held.close()
            raise


def restore(
    url: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    storage: StorageChoice | None = None,
    verify: bool = True,
    progress: Progress = False,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Make a state directory from a checkpoint, closed and ready to be opened with ``resume=True``.

    Args:
        url: The checkpoint; nothing is written to it.
        directory: The new state directory: absent, empty, or without tables.
        base: The full checkpoint that a differential one is relative to, if it isn't beside it.
        storage: How to store it.
        verify: Compare every block with its checksum.
        progress: True for a bar, or a function of the bytes done and their total.
        storage_options: For fsspec.

    Raises:
        StateExistsError: there is state in the directory.
        CheckpointError: the checkpoint can't be used.
        DiskSpaceError: there is no room.
    """
    content = open_content(url, base=base, verify=verify, storage_options=storage_options).content
    _make_metered(directory, content, (storage or StorageChoice()).complete(), progress, "import")


def export_directory(
    directory: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    backend: Layout | None = None,
    **options: Unpack[ExportOptions],
) -> str:
    """Write a checkpoint of a state directory that nobody has open.

    Weights that are a module's parameter are not in the directory, and so not in the checkpoint.

    Args:
        directory: The state directory.
        url: Where to; see `dsa.checkpoint.write_checkpoint`, whose options follow.
        base: A full checkpoint of this state: only what has changed since is written.
        backend: The layout of tables whose kind is not one of the package's, see `dsa.backends.Layout`.
        options: Those options.

    Returns:
        The path or the URL of the checkpoint.

    Raises:
        StateNotFoundError: there is no state in the directory.
        StateLockedError: another process has it open: export from there.
    """
    with opened_directory(directory, backend) as state:
        return export_state(state, url, base=base, **options)


def export_directory_weights(
    directory: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    backend: Layout | None = None,
    **options: Unpack[ExportOptions],
) -> str:
    """Write the weights of a state directory that nobody has open.

    Args:
        directory: The state directory.
        url: Where to: a file that ends in ``.safetensors`` or ``.parquet``, or a Zarr group; see
            `dsa.checkpoint.write_weights`.
        backend: The layout of tables whose kind is not one of the package's, see `dsa.backends.Layout`.
        options: Those of `dsa.checkpoint.write_weights`.

    Returns:
        The path or the URL.

    Raises:
        StateNotFoundError: there is no state in the directory.
        StateLockedError: another process has it open: export from there.
        CheckpointMismatchError: the weights of a table are a module's parameter, and not in the directory.
    """
    with opened_directory(directory, backend) as state:
        return export_weights(state, url, **options)


def migrate(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str] | None = None,
    *,
    shapes: Shapes | None = None,
    k: Curvatures | None = None,
    storage: StorageChoice | None = None,
    progress: Progress = False,
) -> None:
    """Bring state of release 0.1.0, 0.2.0 or 0.3.0 into the form of this one.

    What each release's state keeps is told in `dsa.state.legacy`: all of 0.3.0, the weights of the others.

    Args:
        source: A state directory, or a checkpoint directory of 0.3.0.
        directory: A new state directory; None migrates a state directory in place, and moves its files into a
            folder beside.
        shapes: ``{name: (rows, dim)}``; release 0.1.0 did not record them.
        k: Curvature magnitude, one or ``{name: k}``, for releases that did not record it.
        storage: How to store the state.
        progress: True for a bar, or a function of the bytes done and their total; with a new directory only.

    Raises:
        StateNotFoundError: no older release left anything there.
        StateError: what is there can't be used; nothing has changed.
        ValueError: a checkpoint was to be migrated in place.
        DiskSpaceError: there is no room.
    """
    chosen = (storage or StorageChoice()).complete()
    if directory is not None:
        _make_metered(directory, read_legacy(source, shapes, k=k), chosen, progress, "migrate")
        return
    if find_legacy(source) == "0.3.0 checkpoint":
        raise ValueError(
            f"{str(source)!r} is a checkpoint, which stays as it is: pass a directory for the state made of "
            "it"
        )
    if progress:
        raise ValueError(
            f"progress={progress!r} is for a migration into a new directory: leave it out, or pass one"
        )
    migrate_directory(source, chosen, shapes, k)


def _make_metered(
    directory: str | os.PathLike[str], content: StateContent, storage: Storage, progress: Progress, what: str
) -> None:
    total = sum(table.rows * table.schema.dtype.itemsize for table in content.tables)
    with metered(progress, total, what) as advance:
        tables = tuple(_watched(each, advance, None) for each in content.tables)
        make_state(directory, replace(content, tables=tables), storage)


def make_state(directory: str | os.PathLike[str], content: StateContent, storage: Storage) -> None:
    """Make a closed state directory of some content; see `restore`."""
    path = Path(local_directory(directory)).absolute()
    stored = read_metadata(path) if path.is_dir() else None
    if stored is not None and stored.tables:
        raise StateExistsError(
            f"{str(path)!r} already holds state at step {stored.global_step}: choose another directory, or "
            "open it and call import_checkpoint, which replaces what it holds"
        )
    made = [each for each in (path, *path.parents) if not each.exists()]
    was_empty = bool(made) or not any(path.iterdir())
    path.mkdir(parents=True, exist_ok=True)
    held = HeldDirectory.take(path)
    try:
        # A table without its weights stays one: they are a parameter's, which isn't here.
        write_content(held, content, storage)
    except BaseException:
        with suppress(OSError):  # as long as it is held: nobody else makes a state there meanwhile
            if was_empty:
                (path / LOCK_NAME).unlink()
            for each in made:
                each.rmdir()
        raise
    finally:
        held.release()


def _held_names(state: StateDirectory) -> list[str]:
    return [name for name, table in state.tables.items() if table.held is not None]


class _Kept:
    """The weights of a checkpoint's table in a file without a name, until they can be put into a parameter.

    Args:
        directory: Where the file is.
        content: The table.
    """

    def __init__(self, directory: Path, content: TableContent) -> None:
        self._directory = directory
        self._shape = (content.rows, content.schema.dim)
        self._there = "w" in content.schema.names
        if not self._there:
            notify(
                f"the checkpoint holds no weights of table {content.name!r}, only the optimizer's state: "
                "those of the module stay; load them with its state_dict",
                StateWarning,
            )

    def __enter__(self) -> _Kept:
        self._file = tempfile.TemporaryFile(dir=self._directory)
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, records: Records) -> None:
        """Keep the weights of the next block."""
        if self._there:
            self._file.write(np.ascontiguousarray(read_numbers(records, "w")).data)

    def put(self, table: Table) -> None:
        """Hand the weights over."""
        assert table.held is not None, "only tables with weights in memory are kept"
        if not self._there:
            return
        table.awaited = None
        rows, dim = self._shape
        self._file.seek(0)
        step = max(1, (4 << 20) // (4 * dim))
        for start in range(0, rows, step):
            count = min(step, rows - start)
            block = np.frombuffer(self._file.read(4 * dim * count), np.float32).reshape(count, dim)
            table.held.put(np.arange(start, start + count), block.copy())


def _watched(table: TableContent, advance: Advance, kept: _Kept | None) -> TableContent:
    """Return a table whose blocks are counted, and whose weights are kept, as they pass."""

    def blocks() -> Iterator[tuple[int, Records]]:
        for first, records in table.blocks():
            if kept is not None:
                kept.add(records)
            yield first, records
            advance(records.nbytes)

    return replace(table, blocks=blocks)


def _is_converted(content: TableContent) -> bool:
    return content.stored is not None and not set(content.stored.fields) <= set(content.schema.fields)


def _matched(state: StateDirectory, content: StateContent, convert: bool) -> dict[str, TableContent]:
    """Return the content of each of a state's tables, to be stored with the fields that the state stores."""
    found = {table.name: table for table in content.tables}
    if set(found) != set(state.tables):
        raise StateMismatchError(
            f"the checkpoint holds the tables {sorted(found)} but the state in {str(state.path)!r} holds "
            f"{sorted(state.tables)}: import it where the same tables are, or make a directory of it with "
            "dsa.import_checkpoint"
        )
    return {name: _fitting(table, found[name], convert) for name, table in state.tables.items()}


def _fitting(table: Table, content: TableContent, convert: bool) -> TableContent:
    schema, wanted = content.schema, table.backend.schema
    if is_keyed(schema) != is_keyed(wanted):
        raise StateMismatchError(
            f"the rows of table {table.name!r} belong to ids in the "
            f"{'checkpoint' if is_keyed(schema) else 'state'} only: make a state of the other kind with "
            "dsa.convert_ids"
        )
    if is_keyed(wanted) and schema.dim == wanted.dim:
        return _with_fields(table, content, convert)  # of free rows nobody counts how many there are
    if content.rows < len(table) and schema.dim == wanted.dim:
        raise StateMismatchError(
            f"table {table.name!r} has {content.rows} rows in the checkpoint but {len(table)} here, and a "
            "table never shrinks: make a new directory of the checkpoint with dsa.import_checkpoint"
        )
    longer = content.rows > len(table) and table.held is None  # then it grows
    if schema.dim != wanted.dim or (content.rows != len(table) and not longer):
        raise StateMismatchError(
            f"table {table.name!r} is {content.rows} x {schema.dim} in the checkpoint but {len(table)} x "
            f"{wanted.dim} here: open a state of the checkpoint's shape"
        )
    return _with_fields(table, content, convert)


def _with_fields(table: Table, content: TableContent, convert: bool) -> TableContent:
    """Return a content of fitting shape, to be stored with the fields of a table."""
    schema, wanted = content.schema, table.backend.schema
    if content.rule != table.rule or not set(widened(wanted).fields) <= set(widened(schema).fields):
        raise StateMismatchError(
            f"table {table.name!r} has the update rule {label_of(content.rule)} and the fields "
            f"{_names(schema.names)} in the checkpoint but {label_of(table.rule)} and {_names(wanted.names)} "
            "here: its fields would be misread; build the optimizer with the checkpoint's options"
        )
    other = [each for each in wanted.fields if each not in schema.fields]
    if other and not convert:
        theirs = [each for each in schema.fields if each.name in {field.name for field in other}]
        raise StateMismatchError(
            f"table {table.name!r} has {_typed(theirs)} in the checkpoint but {_typed(other)} here: pass "
            "convert_dtypes=True to round every number to the nearest, or build the optimizer with the "
            "checkpoint's state_dtype"
        )
    facts = content.facts if "w" in wanted.names else replace(content.facts, initializer=None)
    return replace(content, facts=facts, stored=wanted)


def _names(names: Sequence[str]) -> str:
    return ", ".join(names)


def _typed(fields: Sequence[Field]) -> str:
    return ", ".join(f"{each.name} {each.dtype}" for each in fields)
