"""How a backend under test is made, opened again and looked at from behind."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from dsa.backends.base import StateBackend
from dsa.schema import Records, Schema

__all__ = ["BackendHooks", "through_json"]


class BackendHooks(ABC):
    """What the tests need to know about a backend; `BackendConformance` derives from it.

    Example:
        >>> from dsa.backends.memory import MemoryBackend
        >>> from dsa.schema import adam_schema
        >>> class Memory(BackendHooks):
        ...     def create(self, path, rows, schema):
        ...         return MemoryBackend(rows, schema)
        >>> len(Memory().create(Path("unused"), 3, adam_schema(dim=2)))
        3
    """

    @abstractmethod
    def create(self, path: Path, rows: int, schema: Schema) -> StateBackend:
        """Return a new backend of `rows` fresh records.

        Args:
            path: Where to put the files, if any. It does not exist yet; its parent does. The backend may make
                a file of it or a directory.
            rows: Number of rows, N >= 1.
            schema: Layout of a record.
        """

    def reopen(self, path: Path, description: dict[str, Any]) -> StateBackend | None:
        """Open again what `create` made at `path` and `close` closed.

        Args:
            path: The path that `create` was given.
            description: What `describe` returned, after a passage through JSON text.

        Returns:
            None if the backend keeps nothing after `close`: the tests that reopen are skipped.
        """
        return None

    def read_raw(self, path: Path, description: dict[str, Any]) -> Records | None:
        """Return all N records as they lie in the files, decoded without the backend's own code.

        With it the suite notices a `write` and a `read` that are wrong in the same way. It is called after a
        `flush` or a `close`.

        Args:
            path: The path that `create` was given.
            description: What `describe` returned, after a passage through JSON text.

        Returns:
            None if there is nothing to look at: the tests of raw bytes are skipped.
        """
        return None

    def damage(self, path: Path, description: dict[str, Any], row: int) -> bool:
        """Change a bit of what the files hold of a row, behind the backend's back.

        With it the suite checks that the backend says so. It is called after a `close`.

        Args:
            path: The path that `create` was given.
            description: What `describe` returned, after a passage through JSON text.
            row: The row, which was written.

        Returns:
            False if there is nothing to damage, or the backend can't tell: the test of damage is skipped.
        """
        return False


def through_json(description: dict[str, Any]) -> dict[str, Any]:
    """Return what a description is after it was written as JSON text and read again."""
    decoded: dict[str, Any] = json.loads(json.dumps(description))
    return decoded
