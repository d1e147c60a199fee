"""What dsa is compared with on the Poincaré ball: the step through geoopt, and its own kernel alone."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from dsa.cli.bench.batches import Batch
from dsa.cli.bench.options import BETA1, BETA2, EPS, LR
from dsa.kernels.poincare import riemannian_adam_step
from dsa.kernels.threads import run_slices, thread_limit
from dsa.rules.adam import adam_rule
from dsa.rules.conventions import AdamOptions, SecondMoment, VTransport
from dsa.rules.init import Uniform

__all__ = ["Geoopt", "KernelAlone", "load_geoopt", "start_in_ball"]


def load_geoopt() -> ModuleType | None:
    """Return geoopt, or None where it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("geoopt")
    except ImportError:
        return None


@final
class Geoopt:
    """Riemannian Adam as one writes it with geoopt's functions: tensors in RAM, arithmetic in float64.

    The state is float32 as dsa's. Duplicates are summed by torch's `coalesce`, as geoopt's own sparse
    optimizer does. With one second moment per coordinate its root is transported, which is what the functions
    offer.

    Args:
        geoopt: The module.
        rows: N.
        dim: D.
        second_moment: ``"row"`` or ``"coordinate"``.
    """

    def __init__(self, geoopt: ModuleType, rows: int, dim: int, second_moment: str) -> None:
        self.key = f"geoopt_{second_moment}"
        self.what = f"geoopt's functions in RAM, float64, v per {second_moment}"
        self._ball = geoopt.PoincareBall(c=1.0).double()
        self._per_row = second_moment == "row"
        self._w = torch.from_numpy(_first_weights(rows, dim))
        self._m = torch.zeros(rows, dim)
        self._v = torch.zeros(rows, 1 if self._per_row else dim)
        self._t = torch.zeros(rows, 1, dtype=torch.int32)

    def prepare(self, batch: Batch) -> None:
        """Build the sparse gradient that the backward pass of `nn.Embedding` leaves."""
        self._grad = torch.sparse_coo_tensor(
            batch.indices.unsqueeze(0), batch.grad, size=tuple(self._w.shape), check_invariants=False
        )

    @torch.no_grad()
    def step(self) -> None:
        """Gather, update, transport, scatter."""
        ball = self._ball
        grad = self._grad.coalesce()
        rows, g = grad.indices()[0], grad.values().double()
        w, m, v = self._w[rows].double(), self._m[rows].double(), self._v[rows].double()
        t = self._t[rows] + 1
        r = ball.egrad2rgrad(w, g)
        m = BETA1 * m + (1.0 - BETA1) * r
        v = BETA2 * v + (1.0 - BETA2) * (ball.inner(w, r, keepdim=True) if self._per_row else r * r)
        m_hat, v_hat = m / (1.0 - BETA1 ** t.double()), v / (1.0 - BETA2 ** t.double())
        new = ball.projx(ball.expmap(w, -LR * m_hat / (v_hat.sqrt() + EPS), project=False))
        self._w[rows] = new.float()
        self._m[rows] = ball.transp(w, new, m).float()
        self._v[rows] = (v if self._per_row else ball.transp(w, new, v.sqrt()).square()).float()
        self._t[rows] = t

    def weights(self) -> NDArray[np.float32]:
        """Return the whole table ``(N, D)``."""
        return np.asarray(self._w.numpy())

    def flush(self) -> None:
        """Do nothing: nothing of it is on disk."""

    def file_bytes(self) -> int:
        """Return 0."""
        return 0

    def close(self) -> None:
        """Let the memory go."""
        del self._w, self._m, self._v, self._t


@final
class KernelAlone:
    """The arithmetic of dsa's step: records in one buffer, nothing read, checked or written.

    Args:
        key: A short name.
        what: The same for people.
        dim: D.
        second_moment: See `AdamOptions`.
        v_transport: The same.
    """

    def __init__(
        self, key: str, what: str, dim: int, second_moment: SecondMoment, v_transport: VTransport
    ) -> None:
        self.key, self.what = key, what
        self._options = AdamOptions(LR, second_moment=second_moment, v_transport=v_transport)
        self._schema = adam_rule(second_moment).schema(dim)
        self._records = np.empty(0, self._schema.dtype)

    def prepare(self, batch: Batch) -> None:
        """Take the gradient; the records are made when the batch size is new."""
        self._grad = batch.grad.numpy()
        size = len(self._grad)
        if len(self._records) != size:
            self._records = np.zeros(size, self._schema.dtype)
            self._records["w"] = _first_weights(size, self._schema.dim)

    def step(self) -> None:
        """Update the records."""
        with thread_limit(torch.get_num_threads()):
            run_slices(self._slice, len(self._records))

    def _slice(self, start: int, stop: int) -> None:
        part = slice(start, stop)
        riemannian_adam_step(self._records[part], self._grad[part], self._options, k=1.0, stamp=1)

    def flush(self) -> None:
        """Do nothing: nothing of it is on disk."""

    def file_bytes(self) -> int:
        """Return 0."""
        return 0

    def close(self) -> None:
        """Let the memory go."""
        del self._records


def start_in_ball(rows: int, dim: int) -> Uniform:
    """Return first weights with norms of about 0.3: away from the origin, and from the edge of the ball."""
    reach = 0.5 / float(np.sqrt(dim))
    return Uniform(rows, dim, low=-reach, high=reach, seed=0)


def _first_weights(rows: int, dim: int) -> NDArray[np.float32]:
    weights = np.empty((rows, dim), np.float32)
    start_in_ball(rows, dim).fill(np.arange(rows), weights, np.arange(rows))
    return weights
