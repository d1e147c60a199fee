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
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dsa.kernels.checks import count_update, is_finite, is_updatable
from dsa.kernels.compiled import compiled
from dsa.kernels.constants import StepConstants, corrections, epsilon, step_constants
from dsa.kernels.geodesic import BALL_EPS, Geodesic, gap_of, geodesic, is_long_inward, transport_coefficients
from dsa.kernels.layout import Floats, WordLayout, Words, as_words, word_layout
from dsa.kernels.report import StepReport
from dsa.schema import Records, Rows

if TYPE_CHECKING:
    from dsa.rules.conventions import AdamOptions

__all__ = ["BALL_EPS", "exp_transport", "riemannian_adam_step", "transport_diagonal"]

Doubles = NDArray[np.float64]


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
    words, floats = as_words(records)
    layout = word_layout(records.dtype)
    constants = step_constants(options, stamp, step)
    limit = math.inf if options.max_step is None else float(options.max_step)
    common = (words, floats, grad, np.arange(len(records)), layout, constants, float(k), limit)
    if options.second_moment == "row":
        return StepReport(*_row_wise_rows(*common))
    frame, tensor = options.second_moment == "frame", options.v_transport == "tensor"
    return StepReport(*_element_wise_rows(*common, frame, tensor))


@compiled(fastmath={"reassoc", "contract"})
def _load(stored: Floats, scratch: Doubles) -> float:
    square = 0.0
    for j in range(scratch.shape[0]):
        x = np.float64(stored[j])  # numba's float() leaves a float32 as it is
        scratch[j] = x
        square += x * x
    return square


@compiled(fastmath={"reassoc", "contract"})
def _dot(x: Doubles, y: Doubles) -> float:
    total = 0.0
    for j in range(x.shape[0]):
        total += x[j] * y[j]
    return total


@compiled
def _across(w: Doubles, u: Doubles, a: float, b: float) -> float:
    """Return the squared length of the part of u that is perpendicular to w."""
    total = 0.0
    for j in range(w.shape[0]):
        part = u[j] - (b / a) * w[j]
        total += part * part
    return total


@compiled
def _geodesic_of(w: Doubles, u: Doubles, a: float, gap: float, k: float, limit: float) -> Geodesic:
    b, c = _dot(w, u), _dot(u, u)
    across = _across(w, u, a, b) if is_long_inward(b, c, gap, k) else 0.0
    return geodesic(a, b, c, across, gap, k, limit)


@compiled
def _load_into_ball(stored: Floats, w: Doubles, k: float) -> tuple[float, float]:
    a = _load(stored, w)
    gap, factor = gap_of(a, k)
    if factor != 1.0:
        for j in range(w.shape[0]):
            w[j] *= factor
        a *= factor * factor
    return a, gap


@compiled
def _element_wise_rows(
    words: Words,
    floats: Floats,
    grad: Floats,
    positions: Rows,
    layout: WordLayout,
    constants: StepConstants,
    k: float,
    limit: float,
    frame: bool,
    tensor: bool,
) -> tuple[int, int, int, float]:
    beta1, beta2 = constants.beta1, constants.beta2
    sign, l2, decay = constants.sign, constants.l2, constants.decay
    dim = layout.dim
    w, u, m, v = np.empty(dim), np.empty(dim), np.empty(dim), np.empty(dim)
    clamped = far = 0
    longest = 0.0
    for i in positions:
        if not is_updatable(words, i, layout):
            return int(i), clamped, far, longest
        stored_w = floats[i, layout.w : layout.w + dim]
        stored_m = floats[i, layout.m : layout.m + dim]
        stored_v = floats[i, layout.v : layout.v + dim]
        g = grad[i]
        a, gap = _load_into_ball(stored_w, w, k)
        first, second = corrections(constants, words[i, layout.t])
        size = constants.lr * second / first
        floor = epsilon(constants, second)
        inverse_metric = 0.25 * gap * gap
        to_frame = 2.0 / gap if frame else 1.0
        for j in range(dim):
            gradient = (sign * g[j] + l2 * w[j]) * inverse_metric
            component = gradient * to_frame
            m[j] = beta1 * stored_m[j] + (1.0 - beta1) * gradient
            v[j] = beta2 * stored_v[j] + (1.0 - beta2) * (component * component)
            u[j] = -(size * (m[j] / (math.sqrt(v[j]) + floor)) + decay * w[j])
        step = _geodesic_of(w, u, a, gap, k, limit)
        rho_v = 1.0 if frame else step.rho
        if tensor:
            _transport_diagonal(w, u, v, step, rho_v)
        else:
            _transport_root(w, u, v, step, rho_v)
        m_w, m_u = transport_coefficients(step, _dot(w, m), _dot(u, m))
        for j in range(dim):
            stored_v[j] = v[j]
            stored_m[j] = step.rho * (m[j] + m_w * w[j] + m_u * u[j])
            stored_w[j] = step.along_w * w[j] + step.along_u * u[j]
        clamped += step.clamped
        far += step.clamped and step.length > 1.0
        longest = max(longest, step.length)
        count_update(words, i, layout, constants.stamp)
        if not is_finite(words, i, layout):
            return int(i), clamped, far, longest
    return -1, clamped, far, longest


@compiled(fastmath={"reassoc", "contract"})
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


@compiled(fastmath={"reassoc", "contract"})
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


@compiled(fastmath={"reassoc", "contract"})
def _row_wise_rows(
    words: Words,
    floats: Floats,
    grad: Floats,
    positions: Rows,
    layout: WordLayout,
    constants: StepConstants,
    k: float,
    limit: float,
) -> tuple[int, int, int, float]:
    # The direction is u = -(phi m + decay w), a combination of two vectors that are at hand, so that it never
    # has to exist.
    beta1, sign, l2, decay = constants.beta1, constants.sign, constants.l2, constants.decay
    dim = layout.dim
    w, m = np.empty(dim), np.empty(dim)
    clamped = far = 0
    longest = 0.0
    for i in positions:
        if not is_updatable(words, i, layout):
            return int(i), clamped, far, longest
        stored_w = floats[i, layout.w : layout.w + dim]
        stored_m = floats[i, layout.m : layout.m + dim]
        g = grad[i]
        a, gap = _load_into_ball(stored_w, w, k)
        inverse_metric = 0.25 * gap * gap
        squares = wm = mm = 0.0
        for j in range(dim):
            euclidean = sign * g[j] + l2 * w[j]
            m[j] = beta1 * stored_m[j] + (1.0 - beta1) * (euclidean * inverse_metric)
            squares += euclidean * euclidean
            wm += w[j] * m[j]
            mm += m[j] * m[j]
        v = constants.beta2 * np.float64(floats[i, layout.v])
        v += (1.0 - constants.beta2) * (squares * inverse_metric)
        first, second = corrections(constants, words[i, layout.t])
        phi = constants.lr * second / first / (math.sqrt(v) + epsilon(constants, second))
        wu = -(phi * wm + decay * a)
        # Where decay balances the moment the sum rounds to either side of zero.
        uu = max(phi * phi * mm + 2.0 * phi * decay * wm + decay * decay * a, 0.0)
        across = phi * phi * _across(w, m, a, wm) if is_long_inward(wu, uu, gap, k) else 0.0
        step = geodesic(a, wu, uu, across, gap, k, limit)
        m_w, m_u = transport_coefficients(step, wm, -(phi * mm + decay * wm))
        keep_m, add_w = step.rho * (1.0 - m_u * phi), step.rho * (m_w - m_u * decay)
        w_w, w_m = step.along_w - step.along_u * decay, -step.along_u * phi
        floats[i, layout.v] = v
        for j in range(dim):
            stored_m[j] = keep_m * m[j] + add_w * w[j]
            stored_w[j] = w_w * w[j] + w_m * m[j]
        clamped += step.clamped
        far += step.clamped and step.length > 1.0
        longest = max(longest, step.length)
        count_update(words, i, layout, constants.stamp)
        if not is_finite(words, i, layout):
            return int(i), clamped, far, longest
    return -1, clamped, far, longest


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
