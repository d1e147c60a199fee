"""Riemannian Adam on the Poincaré ball over a batch of records, in one fused pass.

One step of a row, with ``g`` the Euclidean gradient (Bécigneul & Ganea 2019, algorithm 1;
`dsa.kernels.geodesic` for the map)::

    grad_R = (g + weight_decay w) / lambda^2                  decay in the mode "l2"
    m      = beta1 m + (1 - beta1) grad_R
    v      = beta2 v + (1 - beta2) h^2                        h = grad_R; in "frame" lambda grad_R
    u      = -lr (m_hat / (sqrt(v_hat) + eps) + decay w)      decay in the mode "decoupled"
    w      = exp_w(u);  m, v follow by parallel transport

In "row" mode ``h^2`` is the squared Riemannian norm ``lambda^2 |grad_R|^2``, one number.
Epsilon is compared with ``|g| / lambda^2`` in coordinate mode, hence Adam with four times epsilon as k -> 0,
and with ``|g| / lambda`` in frame and row mode, where the limit has half the learning rate and twice epsilon.
Arithmetic is float64, storage float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsa.kernels.compiled import compiled, inlined
from dsa.kernels.constants import StepConstants, corrections, epsilon, step_constants
from dsa.kernels.geodesic import BALL_EPS, Geodesic, gap_of, geodesic, is_long_inward, transport_coefficients
from dsa.kernels.layout import Floats
from dsa.kernels.report import StepReport
from dsa.kernels.visiting import Scratch, Visit, pass_of, visit_records
from dsa.schema import Records

if TYPE_CHECKING:
    from dsa.rules.conventions import AdamOptions

__all__ = [
    "BALL_EPS",
    "BallConstants",
    "ball_constants",
    "ball_pass",
    "exp_transport",
    "riemannian_adam_step",
    "row_wise_ball_pass",
    "transport_diagonal",
]

Doubles = NDArray[np.float64]


class BallConstants(NamedTuple):
    """What of a step on the ball does not depend on the row.

    Args:
        adam: What of it is Adam's.
        k: Curvature magnitude.
        limit: Longest step in hyperbolic units.
        frame: Whether the second moment is that of the gradient in the orthonormal frame.
        tensor: Whether it follows as the diagonal of a 2-tensor.
        stamp: The stamp of the new records.
    """

    adam: StepConstants
    k: float
    limit: float
    frame: bool
    tensor: bool
    stamp: int


def ball_constants(options: AdamOptions, k: float, stamp: int, step: int | None) -> BallConstants:
    """Return the constants of one step; see `dsa.kernels.constants.step_constants`."""
    return BallConstants(
        adam=step_constants(options, stamp, step),
        k=float(k),
        limit=math.inf if options.max_step is None else float(options.max_step),
        frame=options.second_moment == "frame",
        tensor=options.v_transport == "tensor",
        stamp=stamp,
    )


def riemannian_adam_step(
    records: Records,
    grad: Floats,
    options: AdamOptions,
    *,
    k: float,
    stamp: int,
    step: int | None = None,
) -> StepReport:
    """Update `records` in place by one step of Riemannian Adam on the ball of curvature -k.

    Args:
        records: ``(B,)`` of `dsa.schema.adam_schema`, C-contiguous; the one buffer this function writes. Rows
            that lie outside the ball are brought back to the clamp first.
        grad: ``(B, D)`` float32, C-contiguous, finite: the Euclidean gradient.
        options: `second_moment` ``"row"`` needs a schema with one ``v`` per row.
        k: Curvature magnitude, > 0.
        stamp: What the records' ``s`` becomes.
        step: The table's step count, 1 at the first step; used when the options ask for bias correction per
            parameter.

    Returns:
        The report; when ``report.bad >= 0`` the contents of `records` must be thrown away.
    """
    update = row_wise_ball_pass if options.second_moment == "row" else ball_pass
    return visit_records(update, records, grad, ball_constants(options, k, stamp, step))


@inlined(fastmath={"reassoc", "contract"})
def _load(stored: Floats, scratch: Doubles) -> float:
    square = 0.0
    for j in range(scratch.shape[0]):
        x = np.float64(stored[j])  # numba's float() leaves a float32 as it is
        scratch[j] = x
        square += x * x
    return square


@inlined(fastmath={"reassoc", "contract"})
def _dot(x: Doubles, y: Doubles) -> float:
    total = 0.0
    for j in range(x.shape[0]):
        total += x[j] * y[j]
    return total


@inlined
def _across(w: Doubles, u: Doubles, a: float, b: float) -> float:
    """Return the squared length of the part of u that is perpendicular to w."""
    total = 0.0
    for j in range(w.shape[0]):
        part = u[j] - (b / a) * w[j]
        total += part * part
    return total


@inlined
def _geodesic_of(w: Doubles, u: Doubles, a: float, gap: float, k: float, limit: float) -> Geodesic:
    b, c = _dot(w, u), _dot(u, u)
    across = _across(w, u, a, b) if is_long_inward(b, c, gap, k) else 0.0
    return geodesic(a, b, c, across, gap, k, limit)


@inlined
def _load_into_ball(stored: Floats, w: Doubles, k: float) -> tuple[float, float]:
    a = _load(stored, w)
    gap, factor = gap_of(a, k)
    if factor != 1.0:
        for j in range(w.shape[0]):
            w[j] *= factor
        a *= factor * factor
    return a, gap


@inlined
def _update(visit: Visit, constants: BallConstants, scratch: Scratch, p: int, slot: int) -> None:
    adam, k, frame = constants.adam, constants.k, constants.frame
    beta1, beta2 = adam.beta1, adam.beta2
    sign, l2, decay = adam.sign, adam.l2, adam.decay
    layout, g = visit.layout, scratch.gradient
    dim = layout.dim
    w, u, m, v = scratch.vectors[0], scratch.vectors[1], scratch.vectors[2], scratch.vectors[3]
    old, new = visit.images[slot].view(np.float32), visit.table[visit.places[p]].view(np.float32)
    old_m, old_v = old[layout.m : layout.m + dim], old[layout.v : layout.v + dim]
    new_w, new_m = new[layout.w : layout.w + dim], new[layout.m : layout.m + dim]
    new_v = new[layout.v : layout.v + dim]
    a, gap = _load_into_ball(old[layout.w : layout.w + dim], w, k)
    first, second = corrections(adam, visit.images[slot, layout.t])
    size = adam.lr * second / first
    floor = epsilon(adam, second)
    inverse_metric = 0.25 * gap * gap
    to_frame = 2.0 / gap if frame else 1.0
    for j in range(dim):
        gradient = (sign * g[j] + l2 * w[j]) * inverse_metric
        component = gradient * to_frame
        m[j] = beta1 * old_m[j] + (1.0 - beta1) * gradient
        v[j] = beta2 * old_v[j] + (1.0 - beta2) * (component * component)
        u[j] = -(size * (m[j] / (math.sqrt(v[j]) + floor)) + decay * w[j])
    step = _geodesic_of(w, u, a, gap, k, constants.limit)
    rho_v = 1.0 if frame else step.rho
    if constants.tensor:
        _transport_diagonal(w, u, v, step, rho_v)
    else:
        _transport_root(w, u, v, step, rho_v)
    m_w, m_u = transport_coefficients(step, _dot(w, m), _dot(u, m))
    for j in range(dim):
        new_v[j] = v[j]
        new_m[j] = step.rho * (m[j] + m_w * w[j] + m_u * u[j])
        new_w[j] = step.along_w * w[j] + step.along_u * u[j]
    _tell(scratch, step)


@inlined
def _tell(scratch: Scratch, step: Geodesic) -> None:
    scratch.told[0] += step.clamped
    scratch.told[1] += step.clamped and step.length > 1.0
    scratch.told[2] = max(scratch.told[2], step.length)


@inlined(fastmath={"reassoc", "contract"})
def _transport_diagonal(w: Doubles, u: Doubles, v: Doubles, step: Geodesic, rho: float) -> None:
    """Replace v by ``rho^2 diag(G diag(v) G^T)``: a diagonal 2-tensor's transport, never negative, O(D).

    G is orthogonal, so that the diagonal stays between the smallest and the largest element of v; holding it
    there costs nothing and mends the cancellation of long steps straight inward.
    """
    ww = wu = uu = 0.0
    smallest = largest = v[0]
    for j in range(v.shape[0]):
        smallest, largest = min(smallest, v[j]), max(largest, v[j])
    s = step.scale
    for j in range(v.shape[0]):
        su = s * u[j]
        ww += w[j] * w[j] * v[j]
        wu += w[j] * su * v[j]
        uu += su * su * v[j]
    k1, k2, k3, omega = step.kappa1, step.kappa2, step.kappa3, step.omega
    aa = omega * omega * (k1 * k1 * uu - 2.0 * k1 * k2 * wu + k2 * k2 * ww)
    ab = -2.0 * omega * omega * (k1 * (wu + k3 * uu) - k2 * (ww + k3 * wu))
    bb = omega * omega * (ww + 2.0 * k3 * wu + k3 * k3 * uu)
    # The part that is linear in omega: 2 omega w_i u_i (k1 - 1) - 2 omega (k2 w_i^2 + k3 u_i^2), with k1 - 1
    # = 2 K b.
    for j in range(v.shape[0]):
        su = s * u[j]
        wj, cross = w[j] * w[j], w[j] * su
        linear = 1.0 + 2.0 * omega * ((k1 - 1.0) * cross - k2 * wj - k3 * su * su)
        turned = v[j] * linear + aa * wj + ab * cross + bb * su * su
        v[j] = rho * rho * min(max(turned, smallest), largest)


@inlined(fastmath={"reassoc", "contract"})
def _transport_root(w: Doubles, u: Doubles, v: Doubles, step: Geodesic, rho: float) -> None:
    """Replace v by the square of its transported root, the original reading: not equivariant under flips."""
    p = q = 0.0
    for j in range(v.shape[0]):
        v[j] = math.sqrt(v[j])
        p += w[j] * v[j]
        q += u[j] * v[j]
    along_w, along_u = transport_coefficients(step, p, q)
    for j in range(v.shape[0]):
        root = rho * (v[j] + along_w * w[j] + along_u * u[j])
        v[j] = root * root


@inlined(fastmath={"reassoc", "contract"})
def _update_row_wise(visit: Visit, constants: BallConstants, scratch: Scratch, p: int, slot: int) -> None:
    # The direction is u = -(phi m + decay w), a combination of two vectors that are at hand, so that it never
    # has to exist.
    adam, k = constants.adam, constants.k
    beta1, sign, l2, decay = adam.beta1, adam.sign, adam.l2, adam.decay
    layout, g = visit.layout, scratch.gradient
    dim = layout.dim
    w, m = scratch.vectors[0], scratch.vectors[1]
    old, new = visit.images[slot].view(np.float32), visit.table[visit.places[p]].view(np.float32)
    old_m = old[layout.m : layout.m + dim]
    new_w, new_m = new[layout.w : layout.w + dim], new[layout.m : layout.m + dim]
    a, gap = _load_into_ball(old[layout.w : layout.w + dim], w, k)
    inverse_metric = 0.25 * gap * gap
    squares = wm = mm = 0.0
    for j in range(dim):
        euclidean = sign * g[j] + l2 * w[j]
        m[j] = beta1 * old_m[j] + (1.0 - beta1) * (euclidean * inverse_metric)
        squares += euclidean * euclidean
        wm += w[j] * m[j]
        mm += m[j] * m[j]
    v = adam.beta2 * np.float64(old[layout.v])
    v += (1.0 - adam.beta2) * (squares * inverse_metric)
    first, second = corrections(adam, visit.images[slot, layout.t])
    phi = adam.lr * second / first / (math.sqrt(v) + epsilon(adam, second))
    wu = -(phi * wm + decay * a)
    # Where decay balances the moment the sum rounds to either side of zero.
    uu = max(phi * phi * mm + 2.0 * phi * decay * wm + decay * decay * a, 0.0)
    across = phi * phi * _across(w, m, a, wm) if is_long_inward(wu, uu, gap, k) else 0.0
    step = geodesic(a, wu, uu, across, gap, k, constants.limit)
    m_w, m_u = transport_coefficients(step, wm, -(phi * mm + decay * wm))
    keep_m, add_w = step.rho * (1.0 - m_u * phi), step.rho * (m_w - m_u * decay)
    w_w, w_m = step.along_w - step.along_u * decay, -step.along_u * phi
    new[layout.v] = v
    for j in range(dim):
        new_m[j] = keep_m * m[j] + add_w * w[j]
        new_w[j] = w_w * w[j] + w_m * m[j]
    _tell(scratch, step)


ball_pass = pass_of(_update)
row_wise_ball_pass = pass_of(_update_row_wise)


def exp_transport(
    w: Doubles, u: Doubles, vectors: Sequence[Doubles], k: float, max_step: float | None = None
) -> tuple[Doubles, list[Doubles]]:
    """Return ``exp_w(u)`` and tangent vectors of w transported there, by the formulas of the fused pass.

    Args:
        w: ``(B, D)`` float64, points of the ball.
        u: ``(B, D)`` float64, tangent vectors: the steps.
        vectors: Arrays ``(B, D)`` float64 of further tangent vectors.
        k: Curvature magnitude, > 0.
        max_step: Longest step in hyperbolic units, or None.
    """
    moved = np.empty((len(vectors), *w.shape))
    for target, source in zip(moved, vectors, strict=True):
        target[:] = source
    new = np.array(w, dtype=np.float64)
    _exp_transport_rows(new, np.ascontiguousarray(u), moved, k, math.inf if max_step is None else max_step)
    return new, list(moved)


@compiled
def _exp_transport_rows(points: Doubles, steps: Doubles, vectors: Doubles, k: float, limit: float) -> None:
    w = np.empty(points.shape[1])
    for i in range(points.shape[0]):
        u = steps[i]
        a, gap = _load_into_ball(points[i], w, k)
        step = _geodesic_of(w, u, a, gap, k, limit)
        for n in range(vectors.shape[0]):
            x = vectors[n, i]
            along_w, along_u = transport_coefficients(step, _dot(w, x), _dot(u, x))
            for j in range(w.shape[0]):
                x[j] = step.rho * (x[j] + along_w * w[j] + along_u * u[j])
        for j in range(w.shape[0]):
            points[i, j] = step.along_w * w[j] + step.along_u * u[j]


def transport_diagonal(w: Doubles, u: Doubles, v: Doubles, k: float) -> Doubles:
    """Return the diagonal of the transported 2-tensor ``diag(v)`` along ``exp_w(u)``.

    Args:
        w: ``(B, D)`` float64, points of the ball.
        u: ``(B, D)`` float64, the steps.
        v: ``(B, D)`` float64, >= 0.
        k: Curvature magnitude, > 0.
    """
    new = np.array(v, dtype=np.float64)
    _transport_diagonal_rows(np.ascontiguousarray(w), np.ascontiguousarray(u), new, k)
    return new


@compiled
def _transport_diagonal_rows(points: Doubles, steps: Doubles, diagonals: Doubles, k: float) -> None:
    w = np.empty(points.shape[1])
    for i in range(points.shape[0]):
        u = steps[i]
        a, gap = _load_into_ball(points[i], w, k)
        step = _geodesic_of(w, u, a, gap, k, math.inf)
        _transport_diagonal(w, u, diagonals[i], step, step.rho)
