"""How a table's weights start: by a rule that gives any row on demand, or from an array.

`Normal`, `Uniform` and `Zeros` are *lazy*: a few numbers describe all rows, so a table of any size is created
at once and an untouched row costs nothing. A weight depends on the seed, on its row and on its place in the
row, never on the order in which rows are touched (see `dsa.kernels.random`). Two tables with one seed start
equal where their rows coincide, so give each table a seed of its own. Rules are compared and stored by their
parameters.

Where rows belong to ids of which nobody knows how many there will be, `rows` is None, and weights depend on
the seed, the id and the place.

`FromArray` is copied into the table when the table is created.

Example:
    >>> from dsa import init
    >>> rule = init.Normal(rows=100_000_000, dim=2, std=0.02, seed=1)
    >>> weights = np.empty((1, 2), np.float32)
    >>> rule.fill(np.array([99_999_999]), weights)
    >>> weights.tolist()
    [[-0.002893923781812191, 0.011923096142709255]]
    >>> init.from_json(rule.to_json()) == rule
    True
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from numbers import Integral, Real
from typing import Any, Final, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from dsa.errors import StateCorruptError
from dsa.kernels.random import MAX_NORMAL, checked_positions, fill_normal, fill_uniform
from dsa.rules.from_array import FromArray, MatrixLike

__all__ = [
    "FromArray",
    "Initializer",
    "MatrixLike",
    "Normal",
    "Uniform",
    "Zeros",
    "as_initializer",
    "from_json",
]

Keys = NDArray[np.int64]
Weights = NDArray[np.float32]

_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)

# Smallest value, and bits that the value must fit into.
_INTEGERS: Final = {"rows": (1, 63), "dim": (1, 31), "seed": (0, 64)}


@final
@dataclass(frozen=True, slots=True)
class Normal:
    """Independent normal weights.

    Args:
        rows: Number of rows N of the table, at least 1; None for a table whose rows belong to ids.
        dim: Elements of a row D, at least 1.
        std: Standard deviation, at least 0.
        mean: Mean.
        seed: In ``[0, 2^64)``.

    Raises:
        TypeError: an argument isn't a number of the right kind.
        ValueError: an argument is out of range.

    Example:
        >>> Normal(10, 4, std=0.5) == Normal(10, 4, 0.5, seed=0)
        True
    """

    rows: int | None
    dim: int
    std: float = 1.0
    mean: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _normalise(self)
        if self.std < 0.0:
            raise ValueError(f"std is {self.std!r}: pass a standard deviation >= 0")
        if abs(self.mean) + MAX_NORMAL * self.std > _FLOAT32_MAX:
            raise ValueError(
                f"mean {self.mean!r} with std {self.std!r} overflows float32: choose smaller numbers"
            )

    def fill(self, keys: Keys, out: Weights, positions: Keys | None = None) -> None:
        """Write the weights of some rows: always the same ones, whichever rows are asked for together.

        Args:
            keys: ``(H,)`` int64, any values in any order: rows, or ids where a table is addressed by ids.
            out: ``(B, D)`` float32, written in place; any strides, such as ``records["w"]``.
            positions: ``(H,)`` int64, the row of `out` that each key fills; the other rows are left alone.
                None fills the rows in the order of the keys, and H is B.

        Raises:
            TypeError: an array has another dtype.
            ValueError: the shapes don't fit together or not to the table.
            IndexError: a position lies outside `out`.
        """
        _check_dim(self.dim, out)
        fill_normal(keys, self.seed, out, mean=self.mean, std=self.std, positions=positions)

    def to_json(self) -> dict[str, Any]:
        """Return the kind and the parameters; `from_json` is the inverse."""
        return {"kind": "normal", **asdict(self)}


@final
@dataclass(frozen=True, slots=True)
class Uniform:
    """Independent uniform weights between two bounds.

    Args:
        rows: Number of rows N of the table, at least 1; None for a table whose rows belong to ids.
        dim: Elements of a row D, at least 1.
        low: Lower bound.
        high: Upper bound, at least `low`. Rounding to float32 can reach either bound.
        seed: In ``[0, 2^64)``.

    Raises:
        TypeError: an argument isn't a number of the right kind.
        ValueError: an argument is out of range.

    Example:
        >>> weights = np.empty((2, 3), np.float32)
        >>> Uniform(10, 3, low=-0.001, high=0.001).fill(np.array([4, 7]), weights)
        >>> bool((np.abs(weights) <= 0.001).all())
        True
    """

    rows: int | None
    dim: int
    low: float = -1.0
    high: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _normalise(self)
        if self.low > self.high:
            raise ValueError(f"low is {self.low!r} and high is {self.high!r}: swap them")
        if max(-self.low, self.high) > _FLOAT32_MAX:
            raise ValueError(
                f"low {self.low!r} or high {self.high!r} overflows float32: choose smaller numbers"
            )

    def fill(self, keys: Keys, out: Weights, positions: Keys | None = None) -> None:
        """Write the weights of some rows, as `Normal.fill` does.

        Args:
            keys: ``(H,)`` int64, as for `Normal.fill`.
            out: ``(B, D)`` float32, written in place.
            positions: ``(H,)`` int64 or None, as for `Normal.fill`.
        """
        _check_dim(self.dim, out)
        fill_uniform(keys, self.seed, out, low=self.low, high=self.high, positions=positions)

    def to_json(self) -> dict[str, Any]:
        """Return the kind and the parameters; `from_json` is the inverse."""
        return {"kind": "uniform", **asdict(self)}


@final
@dataclass(frozen=True, slots=True)
class Zeros:
    """Weights that start at zero.

    Args:
        rows: Number of rows N of the table, at least 1; None for a table whose rows belong to ids.
        dim: Elements of a row D, at least 1.

    Raises:
        TypeError: an argument isn't an integer.
        ValueError: an argument is out of range.

    Example:
        >>> Zeros(10, 4).to_json()
        {'kind': 'zeros', 'rows': 10, 'dim': 4}
    """

    rows: int | None
    dim: int

    def __post_init__(self) -> None:
        _normalise(self)

    def fill(self, keys: Keys, out: Weights, positions: Keys | None = None) -> None:
        """Write zeros.

        Args:
            keys: ``(H,)`` int64, as for `Normal.fill`.
            out: ``(B, D)`` float32, written in place.
            positions: ``(H,)`` int64 or None, as for `Normal.fill`.
        """
        _check_dim(self.dim, out)
        out[checked_positions(keys, out, positions)] = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the kind and the parameters; `from_json` is the inverse."""
        return {"kind": "zeros", **asdict(self)}


Initializer: TypeAlias = Normal | Uniform | Zeros
"""A lazy initialiser: `rows`, `dim`, `fill`, `to_json`. The set is closed: stored tables name their kind."""

_KINDS: Final[dict[str, type[Initializer]]] = {"normal": Normal, "uniform": Uniform, "zeros": Zeros}


def from_json(data: Any) -> Initializer:  # noqa: ANN401 - JSON is untyped until it has been checked here
    """Rebuild a lazy initialiser from its `to_json`.

    Raises:
        StateCorruptError: the description is of an unknown kind, incomplete, or holds impossible values.

    Example:
        >>> from_json({"kind": "zeros", "rows": 3, "dim": 2})
        Zeros(rows=3, dim=2)
    """
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise StateCorruptError(
            f"the initialiser {data!r} is of the unknown kind {kind!r}: this release knows {sorted(_KINDS)}, "
            "open the state with the release that wrote it"
        )
    parameters = {name: value for name, value in data.items() if name != "kind"}
    expected = [field.name for field in fields(_KINDS[kind])]
    if parameters.keys() != set(expected):
        raise StateCorruptError(
            f"the initialiser {data!r} can't be read, since kind {kind!r} has parameters {expected}: restore "
            "the description that holds it from a copy"
        )
    try:
        return _KINDS[kind](**parameters)
    except (TypeError, ValueError, OverflowError) as error:
        raise StateCorruptError(
            f"the initialiser {data!r} can't be read ({error}): restore the description that holds it from a "
            "copy"
        ) from error


def as_initializer(value: Initializer | FromArray | MatrixLike) -> Initializer | FromArray:
    """Return an initialiser as it is and an array as a `FromArray`.

    Raises:
        TypeError: the value is neither an initialiser nor an array of real floating-point numbers.
        ValueError: the array isn't 2-D, is empty, or is on the meta device.

    Example:
        >>> as_initializer(np.zeros((3, 2))).rows, as_initializer(Zeros(5, 2)).rows
        (3, 5)
    """
    return value if isinstance(value, Initializer | FromArray) else FromArray(value)


def _normalise(rule: Initializer) -> None:
    # numpy's numbers become Python's, so that equal parameters give equal JSON.
    for name, value in asdict(rule).items():
        if name == "rows" and value is None:
            continue
        object.__setattr__(rule, name, _integer(name, value) if name in _INTEGERS else _finite(name, value))


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {value!r}: pass an integer")
    low, bits = _INTEGERS[name]
    if not low <= int(value) < 2**bits:
        raise ValueError(f"{name} is {value!r}: choose an integer from {low} to 2**{bits} - 1")
    return int(value)


def _finite(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}: pass a number")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}: weights must be finite, choose a finite number")
    return float(value)


def _check_dim(dim: int, out: Weights) -> None:
    if out.ndim != 2 or out.shape[1] != dim:
        raise ValueError(
            f"out has shape {out.shape!r}: this table's rows have {dim} elements, pass (B, {dim})"
        )
