"""A step along a geodesic of the Poincaré ball, as scalars of one row.

Everything that an exponential map and the parallel transports along it need follows from a few dot products
of the row, so that no vector operation of gyrovector algebra is carried out. With ``a = |w|^2``, ``b = <w,
u>``, ``c = |u|^2`` and the gap ``gamma = 1 - k a = 2 / lambda``::

    t     = sqrt(k c) / gamma                 half the hyperbolic length of the step
    f     = tanh(t) / t
    K     = k f / gamma
    delta = 1 + 2 K b + k a tanh(t)^2         the denominator of the Möbius sum
    w'    = (1 + B K c) w + B u,              B = f / delta
    gap'  = gamma sech(t)^2 / delta           = 1 - k |w'|^2 without its cancellation
    rho   = gap' / gamma                      = lambda(w) / lambda(w')
    G x   = x + (2 K / delta) ([(1 + 2 K b) q - K c p] w - [p + K a q] u),   p = <w, x>, q = <u, x>
    P x   = rho G x                           the transport of a tangent vector x

This is ``exp_w(u) = w ⊕ tanh(sqrt(k) lambda |u| / 2) u / (sqrt(k) |u|)`` (Ganea, Bécigneul & Hofmann 2018,
lemma 2) and the transport ``(lambda(w) / lambda(w')) gyr[w', -w] x`` (Ungar 2008) with ``gyr[w', -w] = gyr[w,
z]``, where ``z`` is the Möbius summand: the numerator minus the denominator times w leaves ``(1 - k a)(z + k
|z|^2 w)``, so that nearly equal numbers are never subtracted. At 1 - r = 1e-5 these forms keep 11 digits or
more where the textbook's keep 6.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from dsa.kernels.compiled import inlined

__all__ = [
    "BALL_EPS",
    "LEAST_GAP",
    "Geodesic",
    "gap_of",
    "geodesic",
    "is_long_inward",
    "transport_coefficients",
]

BALL_EPS: Final = 1e-5
"""Rows are kept at ``sqrt(k) |w| <= 1 - BALL_EPS``."""

LEAST_GAP: Final = BALL_EPS * (2.0 - BALL_EPS)
"""``1 - k |w|^2`` on the clamp."""

# Rounding a clamped row to float32 moves k|w|^2 by at most 1.2e-7; a row is outside only beyond that.
_ROUNDING: Final = 2.5e-7


# Hyperbolic length from which a step inward gets the form of its own; at this length both forms agree to
# 1e-12.
_LONG: Final = 4.0


class Geodesic(NamedTuple):
    """The coefficients of one step, see the module.

    The new point is ``along_w * w + along_u * u`` with the *given* u; `scale` is what the trust region made
    of u, which the transports need; `length` is the hyperbolic length of the step taken.
    """

    along_w: float
    along_u: float
    scale: float
    rho: float
    omega: float
    kappa1: float
    kappa2: float
    kappa3: float
    length: float
    clamped: bool


@inlined
def gap_of(a: float, k: float) -> tuple[float, float]:
    """Return ``1 - k a``, and the factor (1 if inside) that brings a row with ``|w|^2 = a`` into the ball."""
    gap = 1.0 - k * a
    if gap >= LEAST_GAP - _ROUNDING:
        return gap, 1.0
    return LEAST_GAP, (1.0 - BALL_EPS) / math.sqrt(k * a)


@inlined
def is_long_inward(b: float, c: float, gap: float, k: float) -> bool:
    """Tell whether the Möbius denominator cancels, so that `geodesic` needs the part of u across w."""
    return b < 0.0 and 2.0 * math.sqrt(k * c) > _LONG * gap


@inlined
def geodesic(a: float, b: float, c: float, across: float, gap: float, k: float, max_step: float) -> Geodesic:
    """Return the coefficients of ``exp_w(u)`` from the dots, with the clamp at the edge of the ball.

    The clamp scales the new point along its ray, and the transport along a ray is a pure rescale by the
    metric's ratio, so that forming rho from the clamped gap keeps transported vectors exact.

    Args:
        a: ``|w|^2``.
        b: ``<w, u>``.
        c: ``|u|^2``.
        across: The squared length of the part of u perpendicular to w, where `is_long_inward` says so; else
            unused.
        gap: ``1 - k a`` as `gap_of` returns it.
        k: Curvature magnitude, > 0.
        max_step: Longest step in hyperbolic units; ``inf`` for none.
    """
    length = 2.0 * math.sqrt(k * c) / gap
    inward = is_long_inward(b, c, gap, k)
    scale = 1.0
    if length > max_step:
        scale = max_step / length
        b *= scale
        c *= scale * scale
        across *= scale * scale
        length = max_step
    t = 0.5 * length
    tanh = math.tanh(t)
    f = tanh / t if t > 1e-4 else 1.0 - t * t / 3.0
    kk = k * f / gap
    kappa1 = 1.0 + 2.0 * kk * b
    delta = kappa1 + k * a * tanh * tanh
    along_u = f / delta
    along_w = 1.0 + along_u * kk * c
    if inward and length > _LONG:
        delta, along_u, along_w = _long_inward(a, b, c, across, gap, k, length, tanh, f)
    cosh = math.cosh(t)
    new_gap = gap / (cosh * cosh * delta)
    # A row that rests on the clamp and does not move keeps its bits.
    clamped = new_gap < LEAST_GAP and c > 0.0
    if clamped:
        shrink = (1.0 - BALL_EPS) / math.sqrt(1.0 - new_gap)
        along_u *= shrink
        along_w *= shrink
        new_gap = LEAST_GAP
    return Geodesic(
        along_w,
        along_u * scale,
        scale,
        new_gap / gap,
        2.0 * kk / delta,
        kappa1,
        kk * c,
        kk * a,
        length,
        clamped,
    )


@inlined
def _long_inward(
    a: float, b: float, c: float, across: float, gap: float, k: float, length: float, tanh: float, f: float
) -> tuple[float, float, float]:
    """Return ``delta`` and the multiples of u and w for a long step inward.

    With ``r = sqrt(k) |w|``, ``T = tanh t`` and the cosine of the angle between w and u,
    ``delta = (1 - r T)^2 + 2 r T (1 + cos)``. Straight inward both terms are tiny, so ``1 - r T`` is formed
    from ``1 - T`` and ``1 - r``, which are known without cancellation, and ``1 + cos = sin^2 / (1 - cos)``
    from the part across w.
    """
    r = math.sqrt(k * a)
    one_plus_cos = across / c / (1.0 - b / math.sqrt(a * c))
    one_minus_tanh = 2.0 / (math.exp(min(length, 700.0)) + 1.0)
    one_minus_r = gap / (1.0 + r)
    difference = one_minus_r + r * one_minus_tanh
    delta = difference * difference + 2.0 * r * tanh * one_plus_cos
    along_u = f / delta
    radial = (one_minus_tanh - one_minus_r) * difference + tanh * (1.0 + k * a) * one_plus_cos
    return delta, along_u, radial / (r * delta) - along_u * (b / a)


@inlined
def transport_coefficients(step: Geodesic, p: float, q: float) -> tuple[float, float]:
    """Return the multiples of w and of the given u that ``G x`` adds to x.

    Args:
        step: The step's coefficients.
        p: ``<w, x>``.
        q: ``<u, x>`` with the given u.
    """
    q *= step.scale
    along_w = step.omega * (step.kappa1 * q - step.kappa2 * p)
    along_u = -step.omega * (p + step.kappa3 * q) * step.scale
    return along_w, along_u
