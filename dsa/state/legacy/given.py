"""What the caller says about tables, where a release did not record it."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
from pathlib import Path

from dsa.errors import StateMismatchError
from dsa.state.legacy.files import Shape

__all__ = ["Curvatures", "Shapes", "match_shape", "require_curvature", "require_shape", "table_order"]

Shapes = Mapping[str, tuple[int, int]]
Curvatures = float | Mapping[str, float]


def table_order(path: Path, stored: Collection[str], shapes: Shapes | None) -> list[str]:
    """Return the names of the tables in the caller's order, or in the stored one.

    Raises:
        StateMismatchError: the stored tables are others than the caller's, or one has no name.
    """
    if "" in stored:
        raise StateMismatchError(
            f"{str(path)!r} holds a table whose name is empty, which this release does not keep: put a name "
            "in front of the names of its files ('_w.dat' and so on)"
        )
    if shapes is None:
        return list(stored)
    if set(shapes) != set(stored):
        raise StateMismatchError(
            f"{str(path)!r} holds the tables {sorted(stored)} but shapes are given for {sorted(shapes)}: "
            "give the shape of each stored table, or move the files of a table that is not wanted away"
        )
    return list(shapes)


def match_shape(name: str, recorded: Shape, shapes: Shapes | None) -> None:
    """Refuse a recorded shape that is not the caller's.

    Raises:
        StateMismatchError: it is another one.
    """
    if shapes is not None and (given := _given_shape(name, shapes)) != recorded:
        raise StateMismatchError(
            f"table {name!r} was stored with the shape {recorded} and not {given}: pass the stored one"
        )


def require_shape(path: Path, name: str, shapes: Shapes | None, numbers: int) -> Shape:
    """Return the shape of a table whose release did not record it.

    Args:
        path: The directory.
        name: The table.
        shapes: The caller's.
        numbers: How many numbers the weights are, for the message.

    Raises:
        StateMismatchError: the caller did not say, or named an impossible shape.
    """
    if shapes is None:
        raise StateMismatchError(
            f"the shape of table {name!r} in {str(path)!r} was not recorded by its release: say it, as "
            f"shapes={{{name!r}: (rows, dim)}} with rows * dim = {numbers:,}"
        )
    return _given_shape(name, shapes)


def require_curvature(path: Path, name: str, k: Curvatures | None) -> float:
    """Return the curvature magnitude of a table whose release did not record it.

    Raises:
        StateMismatchError: the caller did not say, or named an impossible one.
    """
    value = k.get(name) if isinstance(k, Mapping) else k
    if value is None:
        raise StateMismatchError(
            f"the curvature of table {name!r} in {str(path)!r} was not recorded by its release: say the k of "
            "that training, 0.0 if it was Euclidean (that release's own default was 1.0)"
        )
    if not math.isfinite(value) or value < 0.0:
        raise StateMismatchError(f"k={value!r} is no curvature of table {name!r}: pass a finite number >= 0")
    return float(value)


def _given_shape(name: str, shapes: Shapes) -> Shape:
    shape = tuple(operator.index(size) for size in shapes[name])
    if len(shape) != 2 or min(shape) < 1:
        raise StateMismatchError(
            f"the shape {shape} of table {name!r} is not that of a table: pass rows and dim, each at least 1"
        )
    return shape[0], shape[1]
