"""The spaces that tables live in, for everything beside the fused step.

All functions take and return float64 arrays of shape ``(B, D)``, one point or tangent vector per row, and are
pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from dsa.errors import StateCorruptError
from dsa.kernels.geodesic import BALL_EPS
from dsa.kernels.poincare import exp_transport

__all__ = ["BALL_EPS", "Euclidean", "Manifold", "PoincareBall", "curvature_from_json", "manifold_of"]

Doubles = NDArray[np.float64]


class Manifold(Protocol):
    """A space with a metric that is a multiple of the flat one at each point."""

    @property
    def k(self) -> float:
        """Curvature magnitude: the curvature is -k."""
        ...

    def scale(self, w: Doubles) -> Doubles:
        """Return lambda ``(B, 1)``: the length of a tangent vector is lambda times its Euclidean length."""
        ...

    def rgrad(self, w: Doubles, g: Doubles) -> Doubles:
        """Return the Riemannian gradient ``g / lambda^2`` of a Euclidean one."""
        ...

    def step(
        self, w: Doubles, u: Doubles, *vectors: Doubles, max_step: float | None = None
    ) -> tuple[Doubles, list[Doubles]]:
        """Return the end of the geodesic that starts at w along u, and tangent vectors transported to it."""
        ...

    def project(self, w: Doubles) -> tuple[Doubles, NDArray[np.bool_]]:
        """Return the rows brought back into the space, and which of them had to be, ``(B,)`` bool."""
        ...

    def dist(self, x: Doubles, y: Doubles) -> Doubles:
        """Return the distances ``(B,)`` between points."""
        ...

    def log(self, x: Doubles, y: Doubles) -> Doubles:
        """Return the tangent vectors at x whose geodesics end at y."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Euclidean:
    """Flat space.

    Example:
        >>> Euclidean().dist(np.zeros((1, 2)), np.array([[3.0, 4.0]]))
        array([5.])
    """

    @property
    def k(self) -> float:
        """Zero."""
        return 0.0

    def scale(self, w: Doubles) -> Doubles:
        """Return ones."""
        return np.ones((len(w), 1))

    def rgrad(self, w: Doubles, g: Doubles) -> Doubles:
        """Return the gradient itself."""
        return g

    def step(
        self, w: Doubles, u: Doubles, *vectors: Doubles, max_step: float | None = None
    ) -> tuple[Doubles, list[Doubles]]:
        """Return ``w + u`` and the vectors unchanged; the step is shortened to `max_step`."""
        if max_step is not None:
            length = np.linalg.norm(u, axis=1, keepdims=True)
            u = u * np.minimum(1.0, max_step / np.maximum(length, np.finfo(np.float64).tiny))
        return w + u, list(vectors)

    def project(self, w: Doubles) -> tuple[Doubles, NDArray[np.bool_]]:
        """Return the rows unchanged: all of flat space is allowed."""
        return w, np.zeros(len(w), dtype=np.bool_)

    def dist(self, x: Doubles, y: Doubles) -> Doubles:
        """Return ``|y - x|``."""
        return np.asarray(np.linalg.norm(y - x, axis=1))

    def log(self, x: Doubles, y: Doubles) -> Doubles:
        """Return ``y - x``."""
        return y - x


@final
@dataclass(frozen=True, slots=True)
class PoincareBall:
    """The Poincaré ball of curvature -k and radius ``1 / sqrt(k)`` (Nickel & Kiela 2017; Ungar 2008).

    Args:
        k: Curvature magnitude, finite and > 0.

    Raises:
        ValueError: k is not.

    Example:
        >>> ball = PoincareBall(1.0)
        >>> ball.dist(np.array([[0.0, 0.0]]), np.array([[0.5, 0.0]])).round(6)
        array([1.098612])
    """

    k: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.k) and self.k > 0.0):
            raise ValueError(
                f"k={self.k!r} is not the curvature of a ball: pass a finite number > 0, or 0 for flat space"
            )

    def scale(self, w: Doubles) -> Doubles:
        """Return ``lambda = 2 / (1 - k |w|^2)``."""
        return 2.0 / self._gap(w)

    def rgrad(self, w: Doubles, g: Doubles) -> Doubles:
        """Return ``g / lambda^2``."""
        return g * (0.5 * self._gap(w)) ** 2

    def step(
        self, w: Doubles, u: Doubles, *vectors: Doubles, max_step: float | None = None
    ) -> tuple[Doubles, list[Doubles]]:
        """Return ``exp_w(u)`` and the transported vectors, see `dsa.kernels.geodesic`."""
        return exp_transport(w, u, vectors, self.k, max_step)

    def project(self, w: Doubles) -> tuple[Doubles, NDArray[np.bool_]]:
        """Scale rows beyond ``(1 - BALL_EPS) / sqrt(k)`` back to it.

        A row on that sphere whose rounding to float32 carried it outward does not count as beyond.
        """
        radius = (1.0 - BALL_EPS) / math.sqrt(self.k)
        norm = np.linalg.norm(w, axis=1, keepdims=True)
        outside = norm > radius * (1.0 + 1.2e-7)
        return np.where(outside, w * (radius / np.where(outside, norm, 1.0)), w), outside[:, 0]

    def dist(self, x: Doubles, y: Doubles) -> Doubles:
        """Return ``(2 / sqrt(k)) asinh(sqrt(k) |y - x| / sqrt(gap_x gap_y))``.

        The form with asinh is accurate for short distances at the boundary, where acosh is not.
        """
        root = math.sqrt(self.k)
        gaps = np.sqrt(self._gap(x) * self._gap(y))[:, 0]
        return np.asarray((2.0 / root) * np.arcsinh(root * np.linalg.norm(y - x, axis=1) / gaps))

    def log(self, x: Doubles, y: Doubles) -> Doubles:
        """Return ``(d gap_x / 2) z / |z|``, z along ``(-x) ⊕ y``, formed from the difference y - x."""
        delta = y - x
        z = self._gap(x) * delta - self.k * np.sum(delta * delta, axis=1, keepdims=True) * x
        norm = np.linalg.norm(z, axis=1, keepdims=True)
        length = 0.5 * self.dist(x, y)[:, None] * self._gap(x)
        return np.where(norm > 0.0, z * (length / np.where(norm > 0.0, norm, 1.0)), 0.0)

    def _gap(self, w: Doubles) -> Doubles:
        return np.asarray(1.0 - self.k * np.sum(w * w, axis=1, keepdims=True))


def manifold_of(k: float) -> Manifold:
    """Return the space of curvature -k: flat for 0, a ball for k > 0.

    Raises:
        ValueError: k is negative or not finite.

    Example:
        >>> manifold_of(0.0), manifold_of(2.0)
        (Euclidean(), PoincareBall(k=2.0))
    """
    return Euclidean() if k == 0.0 else PoincareBall(k)


def curvature_from_json(value: Any) -> float:  # noqa: ANN401 - JSON is untyped until it has been checked here
    """Return a stored curvature.

    Raises:
        StateCorruptError: the value is not one.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value < 0.0
    ):
        raise StateCorruptError(
            f"the stored curvature {value!r} is not a finite number >= 0: restore the metadata from a copy"
        )
    return float(value)
