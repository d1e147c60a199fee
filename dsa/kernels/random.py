"""Random weights that are a function of (seed, key, element) and of nothing else.

The generator is Philox4x32-10, which scrambles 128-bit counters under a 64-bit key: J. K. Salmon, M. A.
Moraes, R. O. Dror and D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11. Its key is the seed.
Its counter is four 32-bit words::

    (low word of the row's key, high word of the row's key, e // 4, stream)

and one call gives a word for each of the elements ``e``, ``e + 1``, ``e + 2`` and ``e + 3``. A word ``x``
stands for the probability ``u = (x + 0.5) / 2^32``, so ``0 < u < 1``. A uniform number is
``low + (high - low) u``, a normal one ``mean + std z(u)`` with the inverse ``z`` of the normal distribution
function. An element uses one word; so its value depends neither on the order in which rows are asked for, nor
on the batch they come in, nor on the dimension.

Both distributions draw from stream 0: a uniform and a normal table with one seed are monotone functions of
the same words, and two tables of one kind with one seed start equal. Another use of the generator must take
another stream.

The inverse is P. J. Wichura's, "Algorithm AS 241: the percentage points of the normal distribution", Applied
Statistics 37 (1988), PPND16, in float64 and rounded to float32 once, at the end. Additions, multiplications,
divisions and square roots are all that is used, for the logarithm too, never fused and never reordered: IEEE
754 then fixes every bit on every machine. What a release has generated is part of its tables; it may never
change.

Measured, 2,048 rows of 128 on one core with AVX-512: normal 0.8 ms (numpy's ziggurat 2.0 ms), uniform 0.15
ms; into a field of Adam's records the same. For that numba must inline the inverse: called, it isn't
vectorised and takes 2.8 ms.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dsa.kernels.compiled import compiled

__all__ = ["MAX_NORMAL", "checked_positions", "fill_normal", "fill_uniform", "philox4x32", "standard_normal"]

MAX_NORMAL: Final = 6.338
"""No standard normal number of this generator is larger: ``z(1 - 2^-33)`` is 6.3379..."""

_MULTIPLIER_0: Final = np.uint64(0xD2511F53)
_MULTIPLIER_1: Final = np.uint64(0xCD9E8D57)
_WEYL_0: Final = np.uint64(0x9E3779B9)
_WEYL_1: Final = np.uint64(0xBB67AE85)
_MASK: Final = np.uint64(0xFFFFFFFF)
_WORD: Final = np.uint64(32)
_WEIGHTS: Final = np.uint64(0)  # the stream of initial weights

# Coefficients of AS 241, lowest power first: for |u - 1/2| <= 0.425, then for sqrt(-log(min(u, 1 - u))) <= 5.
# The paper's third pair serves roots above 5, but the smallest u, 2^-33, has the root 4.79.
_CENTRE_OVER: Final = (
    3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
    4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3,
)  # fmt: skip
_CENTRE_UNDER: Final = (
    1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
    2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3,
)  # fmt: skip
_TAIL_OVER: Final = (
    1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
    1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4,
)  # fmt: skip
_TAIL_UNDER: Final = (
    1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
    1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.475938084995344946e-4, 1.05075007164441684324e-9,
)  # fmt: skip

_LOG_2: Final = 0.6931471805599453
_FRACTION_BITS: Final = np.int64(52)
_ROOT_HALF_BITS: Final = np.int64(0x3FE6A09E667F3BCD)  # the pattern of sqrt(1/2)


def fill_normal(
    keys: NDArray[np.int64],
    seed: int,
    out: NDArray[np.float32],
    *,
    mean: float = 0.0,
    std: float = 1.0,
    positions: NDArray[np.int64] | None = None,
) -> None:
    """Write normal numbers into rows of `out`.

    Args:
        keys: ``(H,)`` int64, any values in any order.
        seed: In ``[0, 2^64)``.
        out: ``(B, D)`` float32, written in place; any strides, such as ``records["w"]``.
        mean: Added to every number, in float64.
        std: Multiplies every standard normal number, in float64.
        positions: ``(H,)`` int64, the row of `out` that each key fills; the other rows are left alone. None
            fills the rows in the order of the keys, and H is B.

    Raises:
        TypeError: `out` isn't float32 or the keys or positions aren't int64.
        ValueError: the shapes don't fit together, or `out` is read-only.
        IndexError: a position lies outside `out`.
        OverflowError: the seed is out of range.

    Example:
        >>> out = np.zeros((3, 2), np.float32)
        >>> fill_normal(np.array([39_999_999]), 7, out, positions=np.array([1]))
        >>> out.tolist()
        [[0.0, 0.0], [0.21940496563911438, -0.6488776206970215], [0.0, 0.0]]
    """
    places = checked_positions(keys, out, positions)
    _fill_normal(keys.view(np.uint64), np.uint64(seed), out, places, float(mean), float(std))


def fill_uniform(
    keys: NDArray[np.int64],
    seed: int,
    out: NDArray[np.float32],
    *,
    low: float = 0.0,
    high: float = 1.0,
    positions: NDArray[np.int64] | None = None,
) -> None:
    """Write uniform numbers into rows of `out`.

    A number is computed in float64 and rounded to float32, which can reach the float32 nearest to either
    bound.

    Args:
        keys: ``(H,)`` int64, any values in any order.
        seed: In ``[0, 2^64)``.
        out: ``(B, D)`` float32, written in place; any strides, such as ``records["w"]``.
        low: The lower bound.
        high: The upper bound.
        positions: ``(H,)`` int64, as for `fill_normal`.

    Raises:
        TypeError: `out` isn't float32 or the keys or positions aren't int64.
        ValueError: the shapes don't fit together, or `out` is read-only.
        IndexError: a position lies outside `out`.
        OverflowError: the seed is out of range.

    Example:
        >>> out = np.zeros((1, 3), np.float32)
        >>> fill_uniform(np.array([0]), 0, out)
        >>> out.tolist()
        [[0.39904648065567017, 0.880520224571228, 0.7357127666473389]]
    """
    places = checked_positions(keys, out, positions)
    _fill_uniform(keys.view(np.uint64), np.uint64(seed), out, places, float(low), float(high))


def checked_positions(
    keys: NDArray[np.int64], out: NDArray[np.float32], positions: NDArray[np.int64] | None
) -> NDArray[np.int64]:
    """Return the row of `out` that each key fills, once everything is known to fit.

    The kernels index `out` without bounds checks, so this comes first.
    """
    places = np.arange(len(out), dtype=np.int64) if positions is None else positions
    if out.dtype != np.float32 or keys.dtype != np.int64 or places.dtype != np.int64:
        raise TypeError(
            f"out is {out.dtype}, keys are {keys.dtype}, positions {places.dtype}: pass float32, int64, int64"
        )
    if out.ndim != 2 or keys.ndim != 1 or places.shape != keys.shape:
        raise ValueError(
            f"out has shape {out.shape}, keys {keys.shape} and positions {places.shape}: pass (B, D), (H,) "
            "and (H,), and without positions one key for each row of out"
        )
    if not out.flags.writeable:
        raise ValueError("out is read-only: pass an array that may be written, such as out.copy()")
    if places.size and not 0 <= places.min() <= places.max() < len(out):
        raise IndexError(
            f"positions reach from {places.min()} to {places.max()} but out has {len(out)} rows: count from 0"
        )
    return places


@compiled
def philox4x32(
    c0: np.uint64, c1: np.uint64, c2: np.uint64, c3: np.uint64, k0: np.uint64, k1: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """Return the four words of one counter under one key: ten rounds of Philox4x32.

    Args:
        c0: First word of the counter; a uint64 below 2^32, as all words here are.
        c1: Second word.
        c2: Third word.
        c3: Fourth word.
        k0: Low word of the key.
        k1: High word of the key.
    """
    for _ in range(10):
        first = _MULTIPLIER_0 * c0
        third = _MULTIPLIER_1 * c2
        c0 = (third >> _WORD) ^ c1 ^ k0
        c1 = third & _MASK
        c2 = (first >> _WORD) ^ c3 ^ k1
        c3 = first & _MASK
        k0 = (k0 + _WEYL_0) & _MASK
        k1 = (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


@compiled(inline="always")
def standard_normal(word: np.uint32) -> float:
    """Return the quantile of the standard normal distribution at ``(word + 0.5) / 2^32``.

    The distance from 1/2 and the smaller tail are exact, so ``z(2^32 - 1 - word) = -z(word)`` to the bit.
    """
    q = (np.float64(word) - 2147483647.5) * 2.0**-32
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        return q * (_polynomial(_CENTRE_OVER, r) / _polynomial(_CENTRE_UNDER, r))
    root = math.sqrt(-_log(0.5 - abs(q))) - 1.6
    return math.copysign(_polynomial(_TAIL_OVER, root) / _polynomial(_TAIL_UNDER, root), q)


@compiled(inline="always")
def _polynomial(c: tuple[float, ...], x: float) -> float:
    return ((((((c[7] * x + c[6]) * x + c[5]) * x + c[4]) * x + c[3]) * x + c[2]) * x + c[1]) * x + c[0]


@compiled
def _log(x: float) -> float:
    # Libraries differ in the last bit of a logarithm. With x = 2^e y and sqrt(1/2) <= y < sqrt(2),
    # log x = e log 2 + 2 artanh s where s = (y - 1) / (y + 1); as s^2 < 0.0295, eleven terms leave less than
    # 1e-17.
    bits = np.float64(x).view(np.int64)
    exponent = (bits - _ROOT_HALF_BITS) >> _FRACTION_BITS
    y = np.int64(bits - (exponent << _FRACTION_BITS)).view(np.float64)
    s = (y - 1.0) / (y + 1.0)
    square = s * s
    series = 0.0
    for n in range(21, 1, -2):
        series = (series + 1.0 / n) * square
    return np.float64(exponent) * _LOG_2 + 2.0 * s * (1.0 + series)


@compiled
def _fill_words(key: np.uint64, seed: np.uint64, words: NDArray[np.uint32]) -> None:
    low, high = key & _MASK, key >> _WORD
    k0, k1 = seed & _MASK, seed >> _WORD
    for block in range(len(words) // 4):
        w0, w1, w2, w3 = philox4x32(low, high, np.uint64(block), _WEIGHTS, k0, k1)
        words[4 * block] = np.uint32(w0)
        words[4 * block + 1] = np.uint32(w1)
        words[4 * block + 2] = np.uint32(w2)
        words[4 * block + 3] = np.uint32(w3)


# Both kernels finish a row in a contiguous buffer: writing each number straight into a field of records takes
# twice as long.


@compiled
def _fill_normal(
    keys: NDArray[np.uint64],
    seed: np.uint64,
    out: NDArray[np.float32],
    places: NDArray[np.int64],
    mean: float,
    std: float,
) -> None:
    dim = out.shape[1]
    words = np.empty((dim + 3) // 4 * 4, np.uint32)
    row = np.empty(dim, np.float32)
    for i in range(len(keys)):
        _fill_words(keys[i], seed, words)
        for j in range(dim):
            row[j] = np.float32(mean + std * standard_normal(words[j]))
        out[places[i]] = row


@compiled
def _fill_uniform(
    keys: NDArray[np.uint64],
    seed: np.uint64,
    out: NDArray[np.float32],
    places: NDArray[np.int64],
    low: float,
    high: float,
) -> None:
    dim = out.shape[1]
    words = np.empty((dim + 3) // 4 * 4, np.uint32)
    row = np.empty(dim, np.float32)
    for i in range(len(keys)):
        _fill_words(keys[i], seed, words)
        for j in range(dim):
            row[j] = np.float32(low + (high - low) * ((np.float64(words[j]) + 0.5) * 2.0**-32))
        out[places[i]] = row
