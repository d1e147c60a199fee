"""What writing a checkpoint asks of the place it goes to."""

from __future__ import annotations

from typing import Any, Protocol

from dsa.checkpoint.places import Place

__all__ = ["OutputFile", "Target"]


class OutputFile(Protocol):
    """A new file that is written from its start to its end by one thread at a time."""

    def write(self, data: Any) -> None:  # noqa: ANN401 - any buffer
        """Append bytes, all of them."""
        ...

    def skip(self, size: int) -> None:
        """Append zero bytes; where the file system can, they occupy nothing."""
        ...

    def close(self) -> None:
        """Finish the file; it then has every byte that was appended."""
        ...


class Target(Protocol):
    """A checkpoint that is being written.

    Keys are paths below the checkpoint with ``/`` between their parts. Nothing that a reader takes for a
    checkpoint is at the final place before `commit`; after it, nothing else. Several threads may write
    different files at once.
    """

    def create(self, key: str) -> OutputFile:
        """Begin a file that doesn't exist yet."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write a whole file that doesn't exist yet."""
        ...

    def written(self) -> Place:
        """Return where the files that are complete can be read before `commit`."""
        ...

    def commit(self, root: bytes) -> str:
        """Write the root's document and make the checkpoint appear; return where it is."""
        ...

    def abort(self) -> None:
        """Remove whatever was written; silent when nothing was, or after `commit`."""
        ...
