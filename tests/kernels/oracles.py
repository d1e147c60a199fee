"""Independent oracles for the kernels: one row at a time, textbook formulas, no code of the package.

Everything works on one row: a 1-D array of float64, or of mpmath numbers (120 digits, see `exact`). The
textbook forms of the ball lose about ``1e-16 * lambda^2`` in float64, so the tests pass mpmath numbers near
the boundary.

References: Kingma & Ba 2015, algorithm 1 (Adam); Loshchilov & Hutter 2019 (decoupled decay); Ungar 2008
(Moebius addition and gyration); Ganea, Becigneul & Hofmann 2018, lemma 2 and theorem 4 (exponential map and
transport on the ball); Becigneul & Ganea 2019 (Riemannian Adam).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import mpmath
import numpy as np

from dsa.rules.conventions import AdamOptions

Row = np.ndarray
Number = Any  # a float or a 120-digit number; both know + - * /

BALL_EPS = 1e-5
STORAGE_ROUNDING = 2.5e-7
"""A row on the clamp that was rounded to float32 may lie this far outside in k|w|^2; it is used as it is."""

SPOT_VALUES = Path(__file__).parent / "spot_values.json"

PRECISE = mpmath.mp.clone()
PRECISE.dps = 120  # 1 - tanh(h / 2) must stay visible for steps of hyperbolic length h up to 200


def exact(values: Any) -> Any:
    """Return a number, or an array of numbers, with 120 digits; the float64 inputs are taken as they are."""
    if np.ndim(values) == 0:
        return PRECISE.mpf(float(values))
    return np.array([PRECISE.mpf(float(x)) for x in values], dtype=object)


def rounded(values: Any) -> Any:
    """Return float64 numbers again."""
    return float(values) if np.ndim(values) == 0 else np.array([float(x) for x in values])


def _call(name: str, x: Number) -> Number:
    return getattr(PRECISE if isinstance(x, PRECISE.mpf) else math, name)(x)


def _norm(x: Row) -> Number:
    return _call("sqrt", x.dot(x))


def _roots(x: Row) -> Row:
    return np.array([_call("sqrt", element) for element in x], dtype=x.dtype)


# --- the ball -------------------------------------------------------------------------------------


def conformal_factor(x: Row, k: Number) -> Number:
    """Return lambda at x."""
    return 2 / (1 - k * x.dot(x))


def mobius_add(x: Row, y: Row, k: Number) -> Row:
    """Return x (+) y, from the definition."""
    xy, xx, yy = x.dot(y), x.dot(x), y.dot(y)
    return ((1 + 2 * k * xy + k * yy) * x + (1 - k * xx) * y) / (1 + 2 * k * xy + k * k * xx * yy)


def gyration(a: Row, b: Row, v: Row, k: Number) -> Row:
    """Return gyr[a, b] v = -(a (+) b) (+) (a (+) (b (+) v)), extended linearly to vectors of any length."""
    if not any(v):
        return v
    scale = 1 / (2 * _call("sqrt", k * v.dot(v)))
    moved = mobius_add(a, mobius_add(b, scale * v, k), k)
    return mobius_add(-mobius_add(a, b, k), moved, k) / scale


def exp_map(w: Row, u: Row, k: Number) -> Row:
    """Return the end of the geodesic that leaves w with velocity u."""
    if not any(u):
        return w
    root = _call("sqrt", k * u.dot(u))
    return mobius_add(w, _call("tanh", conformal_factor(w, k) * root / 2) / root * u, k)


def log_map(x: Row, y: Row, k: Number) -> Row:
    """Return the velocity at x of the geodesic that reaches y after unit time."""
    z = mobius_add(-x, y, k)
    root = _call("sqrt", k * z.dot(z))
    return 2 / conformal_factor(x, k) * _call("atanh", root) / root * z


def distance(x: Row, y: Row, k: Number) -> Number:
    """Return the geodesic distance."""
    return 2 / _call("sqrt", k) * _call("atanh", _call("sqrt", k) * _norm(mobius_add(-x, y, k)))


def transport(x: Row, y: Row, v: Row, k: Number) -> Row:
    """Return v carried from the tangent space of x to that of y along their geodesic."""
    return conformal_factor(x, k) / conformal_factor(y, k) * gyration(y, -x, v, k)


def rotation(x: Row, y: Row, k: Number) -> np.ndarray:
    """Return the orthogonal matrix G (D, D) of the transport from x to y, without its metric factor."""
    basis = np.eye(len(x), dtype=int) * (x[0] * 0 + 1)
    return np.stack([gyration(y, -x, e, k) for e in basis], axis=1)


def clamp(w: Row, k: Number) -> tuple[Row, bool]:
    """Return w pulled back along its ray to the clamp, and whether that was needed."""
    radius = _call("sqrt", k * w.dot(w))
    limit = 1 - (exact(BALL_EPS) if w.dtype == object else BALL_EPS)
    return (w * (limit / radius), True) if radius > limit else (w, False)


class Carried(NamedTuple):
    """The end of a step and what its transport does; the clamp is a second transport along the ray."""

    point: Row
    clamped: bool
    matrix: np.ndarray
    factor: Number

    def vector(self, v: Row) -> Row:
        """Carry a tangent vector."""
        return self.factor * self.matrix.dot(v)

    def rotated_root(self, v: Row) -> Row:
        """Rotate the root of v as if it were a vector."""
        return self.matrix.dot(_roots(v))

    def rotated_diagonal(self, v: Row) -> Row:
        """Rotate diag(v) as a 2-tensor and keep the diagonal."""
        return np.diag(self.matrix.dot(np.diag(v)).dot(self.matrix.T))

    def diagonal(self, v: Row) -> Row:
        """Carry diag(v) as a 2-tensor and keep the diagonal."""
        return self.factor**2 * self.rotated_diagonal(v)


def carry(w: Row, u: Row, k: Number) -> Carried:
    """Follow the geodesic from w with velocity u, clamp included."""
    free = exp_map(w, u, k)
    point, clamped = clamp(free, k)
    factor = conformal_factor(w, k) / conformal_factor(point, k)
    return Carried(point, clamped, rotation(w, free, k), factor)


# --- Adam -----------------------------------------------------------------------------------------


class RowState(NamedTuple):
    """One row after a step; `length` is the step's hyperbolic length, None in flat space."""

    w: Row
    m: Row
    v: Any
    clamped: bool = False
    length: Number = None


def _direction(m: Row, v: Any, count: int, options: AdamOptions) -> Row:
    """Return the bias-corrected quotient of the moments."""
    one = m[0] * 0 + 1
    correction1 = 1 - (one * options.beta1) ** count
    correction2 = 1 - (one * options.beta2) ** count
    if options.eps_placement == "corrected":
        root = _roots(np.atleast_1d(v / correction2))
        return m / correction1 / (root + options.eps)
    root = _roots(np.atleast_1d(v))
    return m * _call("sqrt", correction2) / correction1 / (root + options.eps)


def _effective_gradient(w: Row, g: Row, options: AdamOptions) -> Row:
    g = -g if options.maximize else g
    return g + options.weight_decay * w if options.weight_decay_mode == "l2" else g


def adam_row(
    w: Row, m: Row, v: Any, t: int, g: Row, options: AdamOptions, step: int | None = None
) -> RowState:
    """Return one row after one step of Adam in flat space."""
    count = step if options.bias_correction == "parameter" else t + 1
    h = _effective_gradient(w, g, options)
    square = h.dot(h) / len(h) if options.second_moment == "row" else h * h
    m = options.beta1 * m + (1 - options.beta1) * h
    v = options.beta2 * v + (1 - options.beta2) * square
    decay = options.lr * options.weight_decay if options.weight_decay_mode == "decoupled" else 0.0
    return RowState((1 - decay) * w - options.lr * _direction(m, v, count, options), m, v)


def riemannian_adam_row(
    w: Row, m: Row, v: Any, t: int, g: Row, options: AdamOptions, k: Number, step: int | None = None
) -> RowState:
    """Return one row after one step of Riemannian Adam on the ball of curvature -k."""
    count = step if options.bias_correction == "parameter" else t + 1
    if k * w.dot(w) > (1 - BALL_EPS) ** 2 + STORAGE_ROUNDING:
        w, _ = clamp(w, k)
    lam = conformal_factor(w, k)
    h = _effective_gradient(w, g, options)
    square = {
        "coordinate": (h / lam**2) ** 2,
        "frame": (h / lam) ** 2,
        "row": h.dot(h) / lam**2,
    }[options.second_moment]
    m = options.beta1 * m + (1 - options.beta1) * (h / lam**2)
    v = options.beta2 * v + (1 - options.beta2) * square
    u = _direction(m, v, count, options)
    if options.weight_decay_mode == "decoupled":
        u = u + options.weight_decay * w
    u = -options.lr * u
    length = lam * _call("sqrt", k * u.dot(u))
    if options.max_step is not None and length > options.max_step:
        u, length = u * (options.max_step / length), options.max_step
    end = carry(w, u, k)
    if options.second_moment != "row":
        # In the frame the components are already multiplied by lambda, so the tensor only rotates.
        factor = (end.factor if options.second_moment == "coordinate" else 1) ** 2
        v = (
            end.rotated_root(v) ** 2 * factor
            if options.v_transport == "sqrt"
            else end.rotated_diagonal(v) * factor
        )
    return RowState(end.point, end.vector(m), v, end.clamped, length)


# --- frozen values --------------------------------------------------------------------------------


def spot_inputs() -> list[dict[str, Any]]:
    """Return the inputs of the frozen values: D = 4, four radii, three curvatures, steps of four lengths."""
    rng = np.random.default_rng(19)
    cases = []
    for radius in (0.1, 0.9, 0.999, 0.99999):
        for k in (1.0, 0.25, 9.0):
            for length in (1.5e-4, 1e-3, 0.1, 1.0):
                w, u, v = rng.normal(size=(3, 4))
                w *= radius / np.linalg.norm(w) / np.sqrt(k)
                u *= length * (1 - k * (w @ w)) / 2 / np.linalg.norm(u) / np.sqrt(k)
                cases.append(
                    {
                        "radius": radius,
                        "k": k,
                        "length": length,
                        "w": w.tolist(),
                        "u": u.tolist(),
                        "v": v.tolist(),
                        "diagonal": (v * v).tolist(),
                    }
                )
    return cases


def spot_outputs(case: dict[str, Any]) -> dict[str, Any]:
    """Return the results of one case, computed with 120 digits and rounded to float64 at the end."""
    k = exact(case["k"])
    w, u, v, diagonal = (exact(case[name]) for name in ("w", "u", "v", "diagonal"))
    end = carry(w, u, k)
    return {
        "new_w": rounded(end.point).tolist(),
        "new_v": rounded(end.vector(v)).tolist(),
        "new_diagonal": rounded(end.diagonal(diagonal)).tolist(),
        "clamped": end.clamped,
    }


def write_spot_values() -> None:
    """Write `spot_values.json` anew: ``python -c "import oracles; oracles.write_spot_values()"`` beside it.

    The results do not depend on the package; they change only together with `spot_inputs`.
    """
    cases = [case | spot_outputs(case) for case in spot_inputs()]
    lines = ",\n".join(json.dumps(case) for case in cases)
    SPOT_VALUES.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def read_spot_values() -> list[dict[str, Any]]:
    """Return the frozen cases, inputs and outputs."""
    cases: list[dict[str, Any]] = json.loads(SPOT_VALUES.read_text(encoding="utf-8"))
    return cases


def oracle_philox(counter, key):
    """Philox4x32-10 in Python's integers, written from section 3.3 of the paper."""
    left_0, right_0, left_1, right_1 = counter
    for turn in range(10):
        round_key = [(key[0] + turn * 0x9E3779B9) % 2**32, (key[1] + turn * 0xBB67AE85) % 2**32]
        high_0, low_0 = divmod(left_0 * 0xD2511F53, 2**32)
        high_1, low_1 = divmod(left_1 * 0xCD9E8D57, 2**32)
        left_0, right_0 = high_1 ^ right_0 ^ round_key[0], low_1
        left_1, right_1 = high_0 ^ right_1 ^ round_key[1], low_0
    return [left_0, right_0, left_1, right_1]
