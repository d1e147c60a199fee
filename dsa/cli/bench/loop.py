"""Whole training steps: forward, backward and update of an embedding bag with one id in each bag."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import final

import torch

from dsa.cli.bench.batches import Batch
from dsa.cli.bench.entry import Tournament, enter, with_one_thread
from dsa.cli.bench.files import total_size
from dsa.cli.bench.options import LR
from dsa.cli.bench.results import Group
from dsa.cli.bench.settings import Settings
from dsa.cli.bench.timing import Contender
from dsa.modules.embedding import DiskEmbeddingBag
from dsa.optimizers.sparse_adam import DiskSparseAdam
from dsa.rules.init import Zeros
from dsa.state.storage import Durability

__all__ = ["Loop", "all_in_memory", "all_on_disk", "loop_groups", "state_on_disk"]


@final
class Loop:
    """A module and its optimizer.

    Args:
        key: A short name.
        what: The same for people.
        module: Called with ids and with where each bag begins.
        optimizer: Of its weight.
        directory: Where its files are, if it has any; of nobody else.
    """

    def __init__(
        self,
        key: str,
        what: str,
        module: torch.nn.EmbeddingBag | DiskEmbeddingBag,
        optimizer: torch.optim.SparseAdam | DiskSparseAdam,
        directory: Path | None = None,
    ) -> None:
        self.key, self.what = key, what
        self.module, self._optimizer, self._directory = module, optimizer, directory

    def prepare(self, batch: Batch) -> None:
        """Take a batch; its gradient is that of the module's output."""
        self._batch, self._bags = batch, torch.arange(len(batch.indices))

    def step(self) -> None:
        """Take one step."""
        self._optimizer.zero_grad()
        self.module(self._batch.indices, self._bags).backward(self._batch.grad)
        self._optimizer.step()

    def flush(self) -> None:
        """Write everything to the device."""
        if isinstance(self._optimizer, DiskSparseAdam):
            self._optimizer.flush()

    def file_bytes(self) -> int:
        """Return the size of the files."""
        return 0 if self._directory is None else total_size(self._directory.iterdir())

    def close(self) -> None:
        """Close the state directory."""
        if isinstance(self._optimizer, DiskSparseAdam):
            self._optimizer.close()
        del self.module, self._optimizer


def all_in_memory(rows: int, dim: int) -> Loop:
    """Return torch's loop."""
    module = _bag(rows, dim)
    optimizer = torch.optim.SparseAdam(list(module.parameters()), lr=LR)
    return Loop("sparse_adam", "EmbeddingBag + SparseAdam in RAM", module, optimizer)


def state_on_disk(directory: Path, rows: int, dim: int) -> Loop:
    """Return the loop with weights in RAM and the moments on disk."""
    module = _bag(rows, dim)
    optimizer = DiskSparseAdam(module.parameters(), lr=LR, state_dir=directory)
    return Loop("dsa_state", "EmbeddingBag + DiskSparseAdam", module, optimizer, directory)


def all_on_disk(directory: Path, rows: int, dim: int, durability: Durability) -> Loop:
    """Return the loop with everything on disk."""
    zeros = Zeros(rows, dim)
    module = DiskEmbeddingBag(rows, dim, mode="sum", init=zeros, state_dir=directory, durability=durability)
    key = "dsa" if durability == "process" else f"dsa_{durability}"
    what = f"DiskEmbeddingBag + DiskSparseAdam, {durability!r}"
    return Loop(key, what, module, DiskSparseAdam(module.parameters(), lr=LR), directory)


def loop_groups(settings: Settings, directory: Path, seconds: float) -> list[Group]:
    """Compare whole steps with torch's, at every batch size; one table with files at a time.

    Args:
        settings: The sizes.
        directory: For files.
        seconds: In all.
    """
    rows, dim = settings.rows, settings.dim
    title = f"forward, backward and step, warm, {rows:,} x {dim} float32"
    groups = [Group("loop", f"{title}, B = {batch:,}", rows, dim, batch) for batch in settings.batches]
    makers: list[Callable[[Path], Contender]] = [
        lambda folder: state_on_disk(folder, rows, dim),
        *(partial(all_on_disk, rows=rows, dim=dim, durability=each) for each in _POLICIES),
    ]
    with ExitStack() as stack:
        torchs = enter(stack, lambda: all_in_memory(rows, dim), rows, dim)
        tournament = Tournament(groups, with_one_thread(torchs), settings.seed)
        for make in makers:
            with tempfile.TemporaryDirectory(dir=directory) as folder, ExitStack() as inner:
                entry = enter(inner, partial(make, Path(folder)), rows, dim)
                tournament.race([entry], seconds / len(makers))
        tournament.finish()
    return groups


_POLICIES: tuple[Durability, ...] = ("process", "none")


def _bag(rows: int, dim: int) -> torch.nn.EmbeddingBag:
    return torch.nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, _weight=torch.zeros(rows, dim))
