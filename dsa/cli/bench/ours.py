"""dsa itself as a contender."""

from __future__ import annotations

from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from dsa.backends.base import Layout
from dsa.cli.bench.batches import Batch
from dsa.cli.bench.files import drop_pages, total_size
from dsa.cli.bench.options import BETA1, BETA2, EPS, LR
from dsa.optimizers.arguments import DEFAULT_BACKEND
from dsa.optimizers.sparse_riemannian_adam import DiskSparseRiemannianAdam
from dsa.rules.conventions import SecondMoment, VTransport
from dsa.rules.init import Initializer
from dsa.state.storage import Durability

__all__ = ["Ours"]


@final
class Ours:
    """`DiskSparseRiemannianAdam` over one table.

    Args:
        directory: The state directory.
        table: Its size and first weights.
        k: Curvature magnitude; 0 is flat.
        second_moment: See `dsa.conventions.AdamOptions`.
        v_transport: The same.
        key: A short name.
        what: The same for people.
        durability: See `DiskSparseRiemannianAdam`.
        backend: The same.
        resume: Open a state made earlier.
    """

    def __init__(
        self,
        directory: Path,
        table: Initializer,
        *,
        k: float = 0.0,
        second_moment: SecondMoment = "coordinate",
        v_transport: VTransport = "tensor",
        key: str = "dsa",
        what: str = "dsa",
        durability: Durability = "process",
        backend: str | Layout = DEFAULT_BACKEND,
        resume: bool | None = None,
    ) -> None:
        self.key, self.what = key, what
        self._directory, self._source, self._k = directory, table, k
        self._second_moment, self._v_transport = second_moment, v_transport
        self._durability, self._backend = durability, backend
        self._optimizer = self._open(resume)

    def prepare(self, batch: Batch) -> None:
        """Take a batch as tensors."""
        self._updates = {"table": (batch.indices, batch.grad)}

    def step(self) -> None:
        """Take one step."""
        self._optimizer.step(self._updates)

    def flush(self) -> None:
        """Write everything to the device."""
        self._optimizer.flush()

    def reopen(self, *, drop: bool) -> None:
        """Close and open the state directory; with `drop`, its pages leave the page cache."""
        self.close()
        if drop:
            drop_pages(self._files())
        self._optimizer = self._open(resume=True)

    def weights(self) -> NDArray[np.float32]:
        """Return the whole table ``(N, D)``."""
        rows = self._source.rows
        assert rows is not None, "these tables are not keyed"
        return np.asarray(self._optimizer.read_rows(np.arange(rows)).numpy())

    def file_bytes(self) -> int:
        """Return the size of the files."""
        return total_size(self._files())

    def close(self) -> None:
        """Close the optimizer."""
        self._optimizer.close()

    def _files(self) -> list[Path]:
        return [path for path in self._directory.rglob("*") if path.is_file()]

    def _open(self, resume: bool | None) -> DiskSparseRiemannianAdam:
        return DiskSparseRiemannianAdam(
            {"table": self._source},
            lr=LR,
            beta1=BETA1,
            beta2=BETA2,
            eps=EPS,
            k=self._k,
            disk_dir=self._directory,
            resume=resume,
            second_moment=self._second_moment,
            v_transport=self._v_transport,
            durability=self._durability,
            backend=self._backend,
        )
