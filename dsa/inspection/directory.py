"""A state directory that another process may be writing: its description and its journal, only read.

Nothing is locked. Instead, whoever reads rows asks where the directory stands before and after
(`ObservedDirectory.mark`): the description is replaced as a whole, and the journal's header tells which
entries the tables may lack.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from dsa.backends import system
from dsa.backends.base import GROWING
from dsa.errors import (
    StateClosedError,
    StateCorruptError,
    StateIncompleteError,
    StateMismatchError,
    StateNotFoundError,
)
from dsa.inspection.tail import Kept, Tail, read_entries, read_images, still_counting
from dsa.schema import Rows
from dsa.state.journal_format import BODY, Slot, read_header
from dsa.state.journal_salvage import salvage_journal
from dsa.state.legacy import find_legacy
from dsa.state.metadata import METADATA_NAME, Metadata, owned_files, read_metadata
from dsa.state.progress import Progress
from dsa.state.recovery import is_copy

__all__ = ["Mark", "ObservedDirectory", "file_sizes", "nothing_there"]

_TRIES: Final = 20
_PAUSE: Final = 0.002

Stamp = tuple[int, int, int]


class Mark(NamedTuple):
    """Where a directory stands.

    Args:
        stamp: What tells one description file from the next.
        slot: The journal's header; None when the tables hold everything there is.
        silent: Whether someone may be writing without a journal that would tell.
        broken: Whether there is a journal whose header can't be read; what is whole of the rest counts.
    """

    stamp: Stamp
    slot: Slot | None
    silent: bool = False
    broken: bool = False

    @property
    def era(self) -> tuple[Stamp, int, int, int] | None:
        """What stays the same as long as the journal holds whatever is written; None if nothing tells."""
        if self.silent:
            return None
        slot = self.slot
        # The first entry of all is the oldest kept before and after it is applied.
        return self.stamp, *((0, 0, 0) if slot is None else (slot.head_sequence, slot.applied, slot.undone))

    def covers(self, later: Mark) -> bool:
        """Tell whether the journal holds at `later` whatever may have been written to the tables since."""
        return self.era == later.era and (self.slot is None) == (later.slot is None)


@final
class ObservedDirectory:
    """Reads what a state directory says of itself, again at every call.

    Args:
        path: The directory.
        tolerant: Go on when the journal is damaged, with what is whole of it, and say so in `fault`. So it is
            done anyway where recovery would.

    Attributes:
        fault: What is wrong with the journal, in words that go on after "the journal"; empty if nothing is.
        spared: Whether records of its are damaged that the tables hold, so that nobody needs them.

    Raises:
        StateNotFoundError: it holds no state.
        StateCorruptError: its description is damaged, foreign or missing.
        StateMismatchError: it holds state of an older release.
        StateIncompleteError: its creation was interrupted, or is under way.
    """

    def __init__(self, path: Path, *, tolerant: bool = False) -> None:
        self.path = path
        self.fault = ""
        self.spared = False
        self._tolerant = tolerant
        self._stamp, self._metadata = self._load()
        self._tables = _layout(self._metadata)
        self._tail: tuple[Mark, Tail] | None = None
        self._broken_at: Stamp | None = None
        self._kept = Kept([], 0, spared=False)

    @property
    def stamp(self) -> Stamp:
        """What tells the description that was read last from others."""
        return self._stamp

    @property
    def identity(self) -> str:
        """The random name of the state."""
        return self._metadata.identity

    def metadata(self) -> Metadata:
        """Return the description as it is now.

        Raises:
            StateClosedError: the state has been removed or replaced since it was looked at first.
        """
        try:
            if _stamp(self.path) != self._stamp:
                stamp, metadata = self._load()
                if metadata.identity != self.identity or not _continues(_layout(metadata), self._tables):
                    raise StateNotFoundError(f"another state is in {str(self.path)!r} now: open it again")
                self._stamp, self._metadata = stamp, metadata
        except (FileNotFoundError, NotADirectoryError, StateIncompleteError) as error:
            raise StateClosedError(
                f"the state in {str(self.path)!r} was replaced or removed since this view of it was opened: "
                "open it again"
            ) from error
        return self._metadata

    @property
    def restarted(self) -> bool:
        """Whether a restart of the machine may have cost an open state steps, as recovery sees it."""
        metadata = self._metadata
        open_ = metadata.status == "open" and metadata.durability == "process"
        return open_ and metadata.boot != system.boot_identity()

    def mark(self) -> Mark:
        """Return where the directory stands.

        Raises:
            StateClosedError: see `metadata`.
            StateCorruptError: the journal is missing or damaged, and recovery would not go on without it.
        """
        fault = ""
        for _ in range(_TRIES):
            metadata = self.metadata()
            stamp = self._stamp
            if metadata.status != "open" or not metadata.journal:
                return Mark(stamp, None, silent=metadata.status == "open")
            try:
                with self._journal() as file:
                    return Mark(stamp, read_header(file.read(BODY), metadata.journal_identity))
            except FileNotFoundError:
                fault = "is missing"
            except ValueError as error:
                fault = str(error)
            if self._broken_at == stamp or self._does_without():
                return self._broken(stamp, fault)
            time.sleep(_PAUSE)  # whoever opens or closes the directory may be half-way
        if self._tolerant:
            return self._broken(stamp, fault)
        raise self._corrupt(fault)

    def tail(self, mark: Mark) -> Tail | None:
        """Return what the journal says beyond the tables, or None when it has gone on since `mark`.

        Raises:
            StateCorruptError: an entry that counts can't be read.
        """
        if mark.slot is None and not mark.broken:
            return Tail([])
        if self._tail is not None and self._tail[0] == mark:
            return self._tail[1]
        if mark.slot is None:
            self._tail = (mark, self._salvaged())
            return self._tail[1]
        same = self._tail is not None and self._tail[0].stamp == mark.stamp
        kept = still_counting(self._kept, mark.slot) if same else Kept([], mark.slot.head, spared=False)
        with contextlib.suppress(FileNotFoundError), self._journal() as file:
            kept = read_entries(file, mark.slot, kept)
        following = mark.slot.head_sequence + len(kept.entries)
        if following <= mark.slot.last:
            if self.mark() != mark:
                return None
            if not (self._tolerant or self._does_without()):
                raise self._corrupt(f"is damaged in entry {following} of {mark.slot.last}")
            self._tail = (mark, self._salvaged())
            return self._tail[1]
        self.spared = kept.spared
        self._kept, self._tail = kept, (mark, Tail(kept.entries))
        return self._tail[1]

    def images(
        self, mark: Mark, index: int, rows: Rows, record_bytes: int
    ) -> tuple[Rows, NDArray[np.uint8]] | None:
        """Return what rows were before a step that is under way, see `read_images`.

        Returns:
            None when the journal has gone on since `mark`.
        """
        slot = mark.slot
        if slot is None or not len(rows):
            return np.empty(0, np.int64), np.empty((0, record_bytes), np.uint8)
        # The last one known may follow what the header says, if the newer half of that is damaged.
        known = max([slot.last, *(entry.sequence for entry in self._kept.entries[-1:])])
        try:
            with self._journal() as file:
                found = read_images(file, self._kept.end, known + 1, index, rows, record_bytes)
        except (FileNotFoundError, ValueError):  # it was removed, or read in the middle of a change
            return None
        return found if self.mark() == mark else None

    def exports(self, global_step: int) -> dict[str, int]:
        """Return the checkpoints of this history: content root, and the step each was made at.

        Args:
            global_step: Where the state stands; what was exported later is of a history that was lost.
        """
        metadata = self._metadata
        silent = metadata.status == "open" and not metadata.journal
        if silent or self.fault or self.restarted or self.copied or metadata.failed:
            return {}
        return {root: step for root, step in metadata.exports.items() if step <= global_step}

    def progress(self) -> Progress:
        """Return the counts of steps as of the last step that counts.

        Where the journal goes on too fast to be read, they are those of the last flush.

        Raises:
            StateClosedError, StateCorruptError: see `mark` and `tail`.
        """
        for _ in range(_TRIES):
            tail = self.tail(self.mark())
            if tail is not None:
                if tail.note is None:
                    break
                return Progress.from_bytes(tail.note, self._described())
        return self._described()

    def journal_bytes(self) -> tuple[int, int]:
        """Return the length of the journal and the bytes that it occupies on disk; zero without one."""
        return file_sizes(self._journal_path)

    @property
    def copied(self) -> bool:
        """Whether it is a copy that was made while a process had the state open."""
        while True:
            metadata = self.metadata()
            if not is_copy(self.path, metadata):
                return False
            # Files that were replaced meanwhile have other numbers too.
            if _stamp(self.path) == self._stamp:
                return True

    @property
    def _journal_path(self) -> Path:
        return self.path / self._metadata.journal_name

    def _described(self) -> Progress:
        tables = self._metadata.tables
        return Progress(
            self._metadata.global_step,
            tuple(int(table["steps"]) for table in tables),
            tuple(float(table.get("decay", 0.0)) for table in tables),
        )

    def _does_without(self) -> bool:
        # Nobody synced the journal of such a state; what a restart, or copying, has left of it is what there
        # is.
        return self.restarted or self.copied

    def _broken(self, stamp: Stamp, fault: str) -> Mark:
        self.fault, self._broken_at = fault, stamp
        return Mark(stamp, None, broken=True)

    def _salvaged(self) -> Tail:
        found = salvage_journal(self._journal_path, self._metadata.journal_identity)
        self.fault = found.fault
        return Tail([entry for entry, _ in found.entries])

    def _journal(self) -> BinaryIO:
        return self._journal_path.open("rb")

    def _load(self) -> tuple[Stamp, Metadata]:
        # The stamp first: should the file be replaced in between, the next look sees another one.
        try:
            stamp = _stamp(self.path)
            metadata = read_metadata(self.path)
        except (FileNotFoundError, NotADirectoryError):
            metadata = None
        if metadata is None:
            raise nothing_there(self.path)
        if metadata.status == "creating":
            raise StateIncompleteError(
                f"the state in {str(self.path)!r} is being made, or its creation was interrupted "
                f"({metadata.note}): wait until it is made, or start over with resume=False"
            )
        return stamp, metadata

    def _corrupt(self, what: str) -> StateCorruptError:
        return StateCorruptError(
            f"the journal {str(self._journal_path)!r} {what}, so that the last step can't be told whole: "
            f"restore the directory from a copy, or run `dsa repair {self.path}`"
        )


def file_sizes(path: Path) -> tuple[int, int]:
    """Return a file's length and the bytes that it occupies on disk; zero when there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_size, int(getattr(status, "st_blocks", -(-status.st_size // 512))) * 512


def _stamp(path: Path) -> Stamp:
    status = (path / METADATA_NAME).stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


def _layout(metadata: Metadata) -> list[tuple[Any, int]]:
    """Return what has to stay for open files to be those of the tables described, and the rows of each."""
    kept = [
        {key: value for key, value in table["backend"].items() if key not in ("rows", GROWING)}
        for table in metadata.tables
    ]
    return [
        ((table["name"], table.get("generation", 0), backend), int(table["backend"]["rows"]))
        for table, backend in zip(metadata.tables, kept, strict=True)
    ]


def _continues(later: list[tuple[Any, int]], earlier: list[tuple[Any, int]]) -> bool:
    """Tell whether tables are still there, of which some may have grown."""
    return len(later) >= len(earlier) and all(
        new[0] == old[0] and new[1] >= old[1] for new, old in zip(later, earlier, strict=False)
    )


def nothing_there(path: Path) -> Exception:
    """Return the error about a directory without a description: what it is instead of a state."""
    release = find_legacy(path)
    if release is not None:
        return StateMismatchError(
            f"{str(path)!r} holds state of release {release}, which can't be looked at as it is: migrate it "
            "first, by dsa.migrate or by an optimizer with resume=True"
        )
    files = owned_files(path) if path.is_dir() else []
    if files:
        return StateCorruptError(
            f"{str(path)!r} holds the table file {files[0].name!r} but no {METADATA_NAME}: restore the "
            "description from a copy"
        )
    if (path / "zarr.json").exists():
        return StateMismatchError(
            f"{str(path)!r} is a Zarr group, such as a checkpoint, not a state directory: open it by "
            "dsa.open_checkpoint, xarray or zarr"
        )
    return StateNotFoundError(
        f"there is no state in {str(path)!r}: pass the directory that an optimizer was given as its disk_dir "
        "or state_dir"
    )
