"""The file that says what a state directory holds, and the names of the files beside it.

``dsa.json`` is JSON with a checksum over its content and is replaced as a whole, so that it is never half
new. It names every file that belongs to the state, by generations of tables and by the journal of this life;
what it does not name is left over from something that was interrupted, or was replaced. That makes its
replacement the one switch of every change of the whole: creation, opening, import, another curvature.

Its `status` tells how the directory was left:

- ``"creating"``: a first state is being made; there is nothing in it yet.
- ``"open"``: a process is training, or died doing so; then the journal knows more than this file.
- ``"closed"``: it was closed properly, and everything is on the device.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, final

from dsa.backends.system import write_atomically
from dsa.errors import StateCorruptError

__all__ = [
    "DURABILITIES",
    "FORMAT",
    "FORMAT_VERSION",
    "METADATA_NAME",
    "Metadata",
    "journal_files",
    "mark_failed",
    "owned_files",
    "read_metadata",
    "require_kind",
    "table_file_name",
    "unmark_failed",
    "version_of",
    "write_metadata",
]

FORMAT: Final = "dsa-state"
FORMAT_VERSION: Final = 5
"""1 and 2 are the layouts of releases 0.2 and 0.3, which `dsa.migrate` reads; 3 and 4 were never released."""

METADATA_NAME: Final = "dsa.json"
_FAILED_NAME: Final = "dsa.failed"
DURABILITIES: Final = ("process", "power", "none")
_KIND: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")
_ENDINGS: Final = {"memmap": ".dsa", "zarr": ".zarr"}
_TABLE_NAME: Final = re.compile(
    r"([a-z0-9_-]{0,40}-[0-9a-f]{16})(?:\.([0-9]+))?\.(?:dsa|zarr|[a-z][a-z0-9_]{0,31}\.dsa)"
)
_JOURNAL_NAME: Final = re.compile(r"dsa\.journal(\.[0-9]+)?")
_STATUSES: Final = ("creating", "open", "closed")


@final
@dataclass(slots=True)
class Metadata:
    """The content of ``dsa.json``.

    Args:
        status: See the module.
        identity: A random name of this state, which its journal repeats.
        global_step: Steps that the state has taken.
        tables: One JSON object per table, in the optimizer's order.
        durability: The policy under which the directory was last opened.
        boot: The run of the operating system in which it was last opened.
        note: What a ``"creating"`` status is about, in words.
        exports: Checkpoints of this history: their content roots, and the step each was made at.
        life: Counts the openings and the replacements of whole tables; each has a journal of its own.
        journal: Whether this life has one.
        durable_step: The last step that the device is known to hold.
        files: What was opened: by name, what tells the files from others, see `dsa.backends.births`. A copy
            has others.
        failed: What the device refused to sync, in words, or an empty string.
    """

    status: str
    identity: str
    global_step: int = 0
    tables: list[dict[str, Any]] = field(default_factory=list)
    durability: str = "process"
    boot: str = ""
    note: str = ""
    exports: dict[str, int] = field(default_factory=dict)
    life: int = 0
    journal: bool = False
    durable_step: int = 0
    files: dict[str, int] = field(default_factory=dict)
    failed: str = ""

    @property
    def journal_name(self) -> str:
        """The file of this life's journal."""
        return f"dsa.journal.{self.life}"

    @property
    def journal_identity(self) -> str:
        """What the header of this life's journal repeats."""
        return f"{self.identity} {self.life}"


def table_file_name(name: str, generation: int = 0, kind: str = "memmap") -> str:
    """Return a file name for a table of any name: distinct on every file system and inside the directory.

    The readable part is a hint for people; the hash of the true name makes it unique, so that ``a.b``,
    ``a_b`` and ``A.B`` never meet.

    Args:
        name: The table's.
        generation: How often its file was replaced as a whole: the new one lies beside the old one until the
            description names it.
        kind: That of its layout, see `dsa.backends.Layout`.

    Raises:
        ValueError: no layout can be of that kind.

    Example:
        >>> table_file_name("enc.emb"), table_file_name("enc.emb", 2, "sqlite")
        ('enc_emb-2c202679713f42b7.dsa', 'enc_emb-2c202679713f42b7.2.sqlite.dsa')
    """
    require_kind(kind)
    readable = re.sub(r"[^a-z0-9_-]", "_", name.lower().encode("ascii", "replace").decode())[:40]
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{readable}-{digest}{f'.{generation}' if generation else ''}{_ENDINGS.get(kind, f'.{kind}.dsa')}"


def require_kind(kind: str) -> None:
    """Raise `ValueError` when no layout can be of a kind: it is part of a file's name."""
    if not _KIND.fullmatch(kind):
        raise ValueError(
            f"the kind {kind!r} of a layout can't be part of a file's name: use at most 32 lower-case "
            "letters, digits and underscores, a letter first"
        )


def version_of(file: Path) -> tuple[str, int]:
    """Return of a table's file the part of its name that all generations share, and its generation."""
    found = _TABLE_NAME.fullmatch(file.name)
    assert found is not None, "only files that dsa has named have a version"
    return found[1], int(found[2] or 0)


def owned_files(directory: Path) -> list[Path]:
    """Return the table files in a directory that dsa has made, by their names; some are directories."""
    return sorted(path for path in directory.iterdir() if _TABLE_NAME.fullmatch(path.name))


def journal_files(directory: Path) -> list[Path]:
    """Return the journals in a directory, of whatever life."""
    return sorted(path for path in directory.iterdir() if _JOURNAL_NAME.fullmatch(path.name))


def mark_failed(directory: Path, held: int | None) -> None:
    """Leave a note that a sync was refused, for a description that can't be written either.

    It is not synced: that would be refused, too. The same run of the system sees it, and another has no pages
    that only seem to be on the device.
    """
    with contextlib.suppress(OSError):
        name = _FAILED_NAME if held is not None else str(directory / _FAILED_NAME)
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=held))


def unmark_failed(directory: Path) -> None:
    """Remove the note: the files that it was about are not the state's any more."""
    (directory / _FAILED_NAME).unlink(missing_ok=True)


def write_metadata(directory: Path, metadata: Metadata, held: int | None = None) -> None:
    """Replace ``dsa.json`` durably.

    Args:
        directory: The state directory.
        metadata: The new content.
        held: A descriptor of the directory, to write into it wherever it has been moved.
    """
    content = {"format": FORMAT, "version": FORMAT_VERSION, **asdict(metadata)}
    document = {"content": content, "crc32": _checksum(content)}
    write_atomically(directory / METADATA_NAME, json.dumps(document, indent=1).encode(), held)


def read_metadata(directory: Path) -> Metadata | None:
    """Return the metadata of a directory, or None when there is no ``dsa.json``.

    Raises:
        StateCorruptError: the file is damaged, foreign, or of a format that this release doesn't know.
    """
    path = directory / METADATA_NAME
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    except IsADirectoryError as error:
        raise _corrupt(path, "is a directory") from error
    try:
        document = json.loads(raw)
        content, checksum = document["content"], document["crc32"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _corrupt(path, f"can't be read ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _corrupt(path, "was not written by dsa")
    if content.get("version") != FORMAT_VERSION:
        raise _corrupt(
            path, f"has format version {content.get('version')!r} where this release knows {FORMAT_VERSION}"
        )
    if checksum != _checksum(content):
        raise _corrupt(path, "does not match its checksum")
    metadata = _validated(path, content)
    if metadata.status == "open" and not metadata.failed and (directory / _FAILED_NAME).exists():
        metadata.failed = "a sync was refused, and this description could not be written then"
    return metadata


def _validated(path: Path, content: dict[str, Any]) -> Metadata:
    values = {name: value for name, value in content.items() if name not in ("format", "version")}
    try:
        metadata = Metadata(**values)
        good = (
            metadata.status in _STATUSES
            and isinstance(metadata.identity, str)
            and isinstance(metadata.global_step, int)
            and metadata.global_step >= 0
            and all(_is_table(table) for table in metadata.tables)
            and metadata.durability in DURABILITIES
            and _are_numbers(metadata.exports)
            and _are_numbers(metadata.files)
            and isinstance(metadata.journal, bool)
            and isinstance(metadata.failed, str)
            and isinstance(metadata.life, int)
            and metadata.life >= 0
            and isinstance(metadata.durable_step, int)
        )
    except TypeError:
        good = False
    if not good:
        raise _corrupt(path, "lacks entries that every state has")
    return metadata


def _are_numbers(values: object) -> bool:
    return isinstance(values, dict) and all(isinstance(value, int) for value in values.values())


def _is_table(table: Any) -> bool:  # noqa: ANN401 - JSON is untyped until it has been checked here
    if not isinstance(table, dict):
        return False
    kinds = {
        "name": str,
        "k": float | int,
        "steps": int,
        "rule": dict,
        "init_max_norm_fraction": float | int,
    }
    known = all(isinstance(table.get(key), kind) for key, kind in kinds.items())
    known &= isinstance(table.get("generation", 0), int)
    backend = table.get("backend")
    if not known or not isinstance(backend, dict):
        return False
    kind = backend.get("kind")
    return (
        isinstance(backend.get("schema"), dict)
        and isinstance(backend.get("rows"), int)
        and isinstance(kind, str)
        and _KIND.fullmatch(kind) is not None
    )


def _checksum(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def _corrupt(path: Path, what: str) -> StateCorruptError:
    return StateCorruptError(
        f"the state description {str(path)!r} {what}: restore it from a copy, choose another directory, or "
        "pass resume=False to start over"
    )
