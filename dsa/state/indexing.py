"""The indexes of tables whose rows belong to ids, when a state is opened: trusted, or made anew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dsa.backends import system
from dsa.schema import is_keyed
from dsa.state.keys import Keys
from dsa.state.metadata import Metadata
from dsa.state.table import Table
from dsa.state.table_files import file_of

__all__ = ["make_keys", "open_keys"]


def open_keys(path: Path, stored: Metadata, tables: Sequence[Table]) -> None:
    """Open the indexes that can be trusted, of tables whose rows belong to ids.

    That of a process that died can where nothing else did, once the last entries of its journal were applied
    again.
    """
    died = stored.status == "open" and stored.journal and stored.boot == system.boot_identity()
    if stored.failed or not (died or stored.status == "closed"):
        return
    moment = None if died else stored.journal_identity
    for table in tables:
        if is_keyed(table.backend.schema):
            table.keys = Keys.open(file_of(path, table), moment)


def make_keys(path: Path, tables: Sequence[Table]) -> None:
    """Make the indexes anew that could not be trusted or don't fit, of recovered tables."""
    for table in tables:
        if table.keys is not None and not table.keys.fits(table.backend):
            table.keys.close(None)
            table.keys = None
        if is_keyed(table.backend.schema) and table.keys is None:
            table.keys = Keys.make(file_of(path, table), table.backend)
