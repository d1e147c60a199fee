"""What dsa is compared with on flat tables: torch in RAM, four memory maps, touching alone."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray

from dsa.backends.memmap import choose_stride
from dsa.cli.bench.batches import Batch
from dsa.cli.bench.files import drop_pages, total_size
from dsa.cli.bench.options import BETA1, BETA2, EPS, LR
from dsa.schema import adam_schema

__all__ = ["SPARSE_ADAM", "Naive", "SparseAdam", "Touch", "naive_bytes", "touch_bytes"]

SPARSE_ADAM: Final = ("sparse_adam", "sparse_adam_one_thread")
"""The keys of torch's lines on the CPU; whatever is compared is compared with the faster."""

_NAIVE_FIELDS: Final = ("w", "m", "v", "t")


@final
class SparseAdam:
    """`torch.optim.SparseAdam` over a parameter in memory, or on the GPU.

    Args:
        rows: N.
        dim: D.
        device: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, rows: int, dim: int, device: str = "cpu") -> None:
        self.key = "sparse_adam" if device == "cpu" else "sparse_adam_gpu"
        self.what = "torch SparseAdam in " + ("RAM" if device == "cpu" else "VRAM")
        self._wait = device != "cpu"
        self._weight = torch.nn.Parameter(torch.zeros(rows, dim, device=device))
        self._optimizer = torch.optim.SparseAdam([self._weight], lr=LR)

    def prepare(self, batch: Batch) -> None:
        """Build the sparse gradient that the backward pass of `nn.Embedding` leaves."""
        self._weight.grad = torch.sparse_coo_tensor(
            batch.indices.unsqueeze(0), batch.grad, size=tuple(self._weight.shape), check_invariants=False
        )

    def step(self) -> None:
        """Take one step."""
        self._optimizer.step()
        if self._wait:
            torch.cuda.synchronize()

    def weights(self) -> NDArray[np.float32]:
        """Return the whole table ``(N, D)``."""
        return np.asarray(self._weight.detach().cpu().numpy())

    def flush(self) -> None:
        """Do nothing: nothing of it is on disk."""

    def file_bytes(self) -> int:
        """Return 0."""
        return 0

    def close(self) -> None:
        """Let the memory go."""
        del self._optimizer, self._weight


@final
class Naive:
    """Adam in numpy over four `numpy.memmap` files with the system's default advice.

    Args:
        directory: Where the files are made.
        rows: N.
        dim: D.
        resume: Open files made earlier.
    """

    key = "naive"
    what = "four np.memmap files, numpy"

    def __init__(self, directory: Path, rows: int, dim: int, *, resume: bool = False) -> None:
        self._shapes = {"w": (rows, dim), "m": (rows, dim), "v": (rows, dim), "t": (rows,)}
        self._paths = {name: directory / f"{name}.dat" for name in _NAIVE_FIELDS}
        self._open(mode="r+" if resume else "w+")

    def prepare(self, batch: Batch) -> None:
        """Take a batch as numpy arrays."""
        self._rows, self._grad = batch.indices.numpy(), batch.grad.numpy()

    def step(self) -> None:
        """Sum duplicates, gather, update, scatter."""
        order = np.argsort(self._rows, kind="stable")
        rows = self._rows[order]
        starts = np.flatnonzero(np.concatenate(([True], rows[1:] != rows[:-1])))
        rows, grad = rows[starts], np.add.reduceat(self._grad[order], starts, axis=0)
        w, m, v, t = (self._maps[name][rows] for name in _NAIVE_FIELDS)
        t += 1
        m = BETA1 * m + (1.0 - BETA1) * grad
        v = BETA2 * v + (1.0 - BETA2) * grad * grad
        m_hat = m / (1.0 - BETA1 ** t.astype(np.float32))[:, None]
        v_hat = v / (1.0 - BETA2 ** t.astype(np.float32))[:, None]
        w -= LR * m_hat / (np.sqrt(v_hat) + EPS)
        for name, values in zip(_NAIVE_FIELDS, (w, m, v, t), strict=True):
            self._maps[name][rows] = values

    def flush(self) -> None:
        """Write every changed page to the device."""
        for memmap in self._maps.values():
            memmap.flush()

    def reopen(self, *, drop: bool) -> None:
        """Close and open the files; with `drop`, their pages leave the page cache."""
        self.close()
        if drop:
            drop_pages(self._paths.values())
        self._open(mode="r+")

    def weights(self) -> NDArray[np.float32]:
        """Return the whole table ``(N, D)``."""
        return np.array(self._maps["w"])

    def file_bytes(self) -> int:
        """Return the size of the files."""
        return total_size(self._paths.values())

    def close(self) -> None:
        """Flush and unmap."""
        self.flush()
        self._maps.clear()

    def _open(self, mode: Literal["r+", "w+"]) -> None:
        self._maps = {
            name: np.memmap(
                self._paths[name],
                dtype=np.int32 if name == "t" else np.float32,
                mode=mode,
                shape=self._shapes[name],
            )
            for name in _NAIVE_FIELDS
        }


@final
class Touch:
    """What no optimizer over such records can avoid: read the rows and write them back, without arithmetic.

    `np.take` into a buffer and an assignment, on records laid out as dsa's.

    Args:
        directory: Where the file is made.
        rows: N.
        dim: D.
    """

    key = "touch"
    what = "touching the rows: np.take and back"

    def __init__(self, directory: Path, rows: int, dim: int) -> None:
        self._path = directory / "touch.dat"
        self._table = np.memmap(self._path, np.int32, "w+", shape=(rows, _stride(dim) // 4))
        self._buffer = np.empty((0, self._table.shape[1]), np.int32)

    def prepare(self, batch: Batch) -> None:
        """Take a batch: distinct rows, sorted."""
        self._rows = np.unique(batch.indices.numpy())
        if len(self._buffer) < len(self._rows):
            self._buffer = np.empty((len(batch.indices), self._table.shape[1]), np.int32)

    def step(self) -> None:
        """Read and write."""
        out = self._buffer[: len(self._rows)]
        np.take(self._table, self._rows, axis=0, out=out, mode="clip")
        self._table[self._rows] = out

    def flush(self) -> None:
        """Write every changed page to the device."""
        self._table.flush()

    def file_bytes(self) -> int:
        """Return the size of the file."""
        return total_size([self._path])

    def close(self) -> None:
        """Flush and unmap."""
        self._table.flush()
        del self._table


def naive_bytes(rows: int, dim: int) -> int:
    """Return the size of `Naive`'s files."""
    return rows * (3 * 4 * dim + 4)


def touch_bytes(rows: int, dim: int) -> int:
    """Return the size of `Touch`'s file."""
    return rows * _stride(dim)


def _stride(dim: int) -> int:
    return choose_stride(adam_schema(dim).dtype.itemsize)
