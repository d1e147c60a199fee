"""Whole runs of Riemannian Adam in float64: the formulas of the fused pass without its float32 storage."""

from __future__ import annotations

import numpy as np
from sampling import at_radius

from dsa.kernels.poincare import exp_transport, transport_diagonal
from dsa.rules.manifolds import PoincareBall

BETA1, BETA2 = 0.9, 0.999


class Float64Run:
    """Riemannian Adam over (B, D) rows in float64."""

    def __init__(self, w, k=1.0, lr=1e-2, eps=1e-8, mode="coordinate", transport="tensor"):
        self.w, self.k, self.lr, self.eps, self.mode, self.transport = w.copy(), k, lr, eps, mode, transport
        self.m, self.v, self.t = np.zeros_like(w), np.zeros_like(w), 0
        if mode == "row":
            self.v = np.zeros((len(w), 1))

    def step(self, euclidean_gradient):
        ball = PoincareBall(self.k)
        self.t += 1
        lam, grad = ball.scale(self.w), ball.rgrad(self.w, euclidean_gradient)
        squares = {"coordinate": grad**2, "frame": (lam * grad) ** 2, "row": (lam * grad) ** 2}[self.mode]
        if self.mode == "row":
            squares = squares.sum(axis=1, keepdims=True)
        self.m = BETA1 * self.m + (1 - BETA1) * grad
        self.v = BETA2 * self.v + (1 - BETA2) * squares
        root = np.sqrt(self.v / (1 - BETA2**self.t))
        u = -self.lr * self.m / (1 - BETA1**self.t) / (root + self.eps)
        self._follow(u, lam)

    def _follow(self, u, lam):
        vectors = [self.m, np.sqrt(self.v)] if self.transport == "sqrt" and self.mode != "row" else [self.m]
        end, moved = exp_transport(self.w, u, vectors, self.k)
        rho = lam / PoincareBall(self.k).scale(end) if self.mode == "frame" else 1.0
        if len(moved) == 2:
            self.v = (moved[1] / rho) ** 2
        elif self.mode != "row":
            self.v = transport_diagonal(self.w, u, self.v, self.k) / rho**2
        self.w, self.m = end, moved[0]


def pull(w, target):
    """Return the Euclidean gradient of a bounded, non-radial loss: a softened distance to a target."""
    delta = w - target
    return delta / np.sqrt(1e-2 + (delta * delta).sum(axis=1, keepdims=True))


def start(radius=0.9, rows=6, dim=8, k=1.0, seed=0):
    rng = np.random.default_rng(seed)
    return at_radius(rng, rows, dim, radius, k), at_radius(rng, rows, dim, radius, k)
