"""Turning the directory of an older release into one of this, in place.

The new tables are written beside the old files and become the state at one instant, see
`dsa.state.replacement`. Then the old files are moved to a folder of their own: nothing is lost, and whoever
has looked at the result removes it. Killed at any moment, the next opening with ``resume=True`` goes on.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from dsa.backends.system import retried, sync_directory
from dsa.errors import StateWarning, notify
from dsa.state.content import StateContent
from dsa.state.holding import HeldDirectory
from dsa.state.legacy import find_legacy, legacy_files
from dsa.state.replacement import write_content
from dsa.state.storage import Storage

__all__ = ["SET_ASIDE", "migrate_in_place", "set_aside"]

SET_ASIDE: Final = "before-migration"


def migrate_in_place(held: HeldDirectory, storage: Storage, content: StateContent) -> None:
    """Migrate a directory; afterwards it is a closed state of this release.

    Args:
        held: The directory.
        storage: How to store the state.
        content: What the directory holds, as `dsa.state.legacy.read_legacy` returns it.

    Raises:
        StateError: the old state can't be used; nothing has changed.
        DiskSpaceError: there is no room for both; nothing has changed.
    """
    release = find_legacy(held.path)
    write_content(held, content, storage)
    kept = (
        "weights, moments and counters" if release == "0.3.0" else "weights; moments and counters start anew"
    )
    notify(
        f"the state in {str(held.path)!r} was migrated from release {release}, keeping its {kept}",
        StateWarning,
    )
    set_aside(held.path)


def set_aside(path: Path) -> None:
    """Move the files of an older release into a folder of their own, with a warning that names it."""
    files = legacy_files(path)
    # Never over files that were set aside before.
    names = (SET_ASIDE, *(f"{SET_ASIDE}-{number}" for number in range(2, 1_000_000)))
    folder = next(
        path / name for name in names if not any((path / name / file.name).exists() for file in files)
    )
    folder.mkdir(exist_ok=True)
    for file in files:
        retried(os.replace, file, folder / file.name)
    sync_directory(folder)
    sync_directory(path)
    notify(
        f"the files of the older release are in {str(folder)!r} now: remove that folder once you are "
        "satisfied",
        StateWarning,
    )
