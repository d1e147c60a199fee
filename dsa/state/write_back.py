"""What the system could not write back in the background, asked for beside training.

What is stored to a mapped file is written to the device by the system, when it likes. If the device refuses,
the pages are called clean all the same, and may leave the memory: whoever reads them then finds what the file
held before, and only the next sync would tell. But the system remembers the error, and says it to whoever
asks, see `dsa.backends.system.refused_write_back`. It is said once: who hears it has to note it for good.

Asking takes some 5 to 10 microseconds for each file, nearly all of them for opening it; a descriptor that
stays open would make it one microsecond, and be one more for each table and shard. A step of a few rows takes
200. So a `glance` asks every few milliseconds only, and a few files each time, in turn.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, final

from dsa.backends import system
from dsa.state.keys import index_files

__all__ = ["WriteBack", "look_at"]

_EVERY: Final = 0.005
"""Seconds between two glances."""
_AT_ONCE: Final = 16
"""Files of a glance: together with `_EVERY`, at most some 2 percent of the time."""


@final
class WriteBack:
    """Looks at the files of an open state.

    Args:
        path: The state directory; its files are those that are open.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: Mapping[str, int] = {}
        self._files: list[str] = []
        self._next = itertools.cycle(self._files)
        self._due = 0.0

    def glance(self, names: Mapping[str, int]) -> OSError | None:
        """Return what could not be written back of some of the files, if it is time to ask.

        Args:
            names: Those of the files, as `dsa.state.metadata.Metadata.files` has them. When they change, that
                is another object.
        """
        now = time.monotonic()
        if now < self._due:
            return None
        self._due = now + _EVERY
        if names is not self._names:
            self._names, self._files = names, _files(self._path, names)
            self._next = itertools.cycle(self._files)
        return _first_error(itertools.islice(self._next, min(_AT_ONCE, len(self._files))))


def look_at(path: Path, names: Mapping[str, int]) -> OSError | None:
    """Return what could not be written back of any file of a state, and was not told to anybody.

    Args:
        path: The state directory.
        names: Those of the files, as `dsa.state.metadata.Metadata.files` has them.
    """
    return _first_error(_files(path, names))


def _files(path: Path, names: Mapping[str, int]) -> list[str]:
    """Return the regular files under some names, and the indexes beside them."""
    found: list[Path] = []
    for file in (path / name for name in names if name != "."):
        found += sorted(each for each in file.rglob("*") if each.is_file()) if file.is_dir() else [file]
        found += [each for each in index_files(file) if each.exists()]
    return [str(each) for each in found]


def _first_error(files: Iterable[str]) -> OSError | None:
    return next((error for error in map(system.refused_write_back, files) if error is not None), None)
