"""Checkpoints that go with the state dicts of a trainer: one of each step that a state dict refers to.

Trainers save state dicts, which only refer to what is on disk. After a kill the state is steps ahead of what
was saved last; a checkpoint of that very step, named in the reference, is what it goes back to.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from dsa.checkpoint import open_checkpoint
from dsa.checkpoint.transfer import export_state
from dsa.optimizers.options import as_index
from dsa.state.directories import local_directory
from dsa.state.state_directory import StateDirectory

__all__ = ["CheckpointKeeper"]

_REMOVED: Final = "removed-"


@final
class CheckpointKeeper:
    """Makes a checkpoint of a state's present step when a state dict is asked for.

    There is one for each step, and one more whenever rows were set, given out or taken back since without a
    step.

    Args:
        place: The directory of the checkpoints, which are named ``step-N``, and from the second of a step on
            ``step-N-2``.
        keep: How many to keep, at least 2, since a kill may come when a checkpoint is complete and the file
            that refers to it is not; None keeps all.

    Raises:
        ValueError: the place is no local directory, or `keep` is less than 2.
    """

    def __init__(self, place: str | os.PathLike[str], keep: int | None) -> None:
        if keep is not None and as_index("keep", keep) < 2:
            raise ValueError(
                f"keep={keep!r} is too few: pass 2 or more, for the newest checkpoint may be one that no "
                "saved file refers to yet, or None to keep all"
            )
        self._place = Path(local_directory(place, "checkpoints")).absolute()
        self._keep = keep
        self._made: tuple[str, int, int] | None = None
        self._written: list[tuple[int, int]] = []
        self._times = 0
        self._reference: dict[str, str] | None = None

    def serve(self, state: StateDirectory) -> None:
        """Make the checkpoints of a state from here on.

        Raises:
            ValueError: the place is inside the state's directory, where no checkpoint can be.
        """
        if Path(os.path.realpath(self._place)).is_relative_to(os.path.realpath(state.path)):
            raise ValueError(
                f"checkpoints={str(self._place)!r} is inside the state directory {str(state.path)!r}: pass a "
                "directory beside it"
            )
        state.keeper = self

    def __call__(self, state: StateDirectory) -> dict[str, str] | None:
        """Return where a checkpoint of the present step is and the name of its content, making it if need be.

        Returns:
            ``url`` and ``content_root``; None at step 0, of which there is nothing to be kept.

        Raises:
            StateClosedError: there is none of the present step, and the state is closed.
            CheckpointError, DiskSpaceError: see `dsa.optimizers.portable.export_checkpoint`.
        """
        now = state.identity, state.replacements, state.global_step
        if state.global_step == 0:
            return None
        written = [(len(table), table.rows_written) for table in state.tables.values()]
        if (self._made, self._written) != (now, written):
            self._place.mkdir(parents=True, exist_ok=True)
            # What this object has made of the step is referred to. Anything else there is of a run that was
            # killed later and has gone back.
            self._times = self._times + 1 if self._made == now else 1
            name = f"step-{state.global_step}" + (f"-{self._times}" if self._times > 1 else "")
            url = export_state(state, self._place / name, overwrite=True)
            self._reference = {"url": url, "content_root": open_checkpoint(url).content_root}
            self._made, self._written = now, written
            self._remove_old()
        return self._reference

    def _remove_old(self) -> None:
        for left in self._place.glob(f"{_REMOVED}*"):
            shutil.rmtree(left, ignore_errors=True)
        if self._keep is None:
            return
        found = sorted(self._place.glob("step-*/zarr.json"), key=lambda root: root.stat().st_mtime_ns)
        for root in found[: -self._keep]:
            # Renamed first: what is half removed must not be taken for a damaged checkpoint.
            with suppress(OSError):
                shutil.rmtree(root.parent.rename(self._place / f"{_REMOVED}{root.parent.name}"))
