"""The one door through which rows and gradients enter: types, range, shape, duplicates, order.

What has passed here is trusted further down: rows are int64, inside the table, strictly increasing; gradients
are float32, and it is told which belong to each row. Whether they are finite is seen by the update, which
looks at every element anyway; `require_finite` says which was not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa.errors import GradientError, RowIndexError, RowTypeError
from dsa.kernels.layout import Floats
from dsa.kernels.rows import first_non_finite_row, group_rows, inspect_rows, sort_stable
from dsa.kernels.visiting import Gradients, sum_gradients
from dsa.schema import Rows

__all__ = ["as_gradient", "as_ids", "as_rows", "average", "coalesce", "merge", "require_finite"]


def as_ids(given: NDArray[Any], table: str) -> NDArray[np.int64]:
    """Return ids as int64, unsigned ones by two's complement.

    Args:
        given: ``(B,)`` of an integer dtype.
        table: The table's name, for messages.

    Raises:
        RowTypeError: they are of another kind.
    """
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise RowTypeError(
            f"ids of shape {given.shape} and {given.dtype.name} can't be those of table {table!r}: pass a "
            "1-D array of integers, and strings through dsa.hash_strings"
        )
    wide = given.astype(np.uint64 if given.dtype.kind == "u" else np.int64)
    return np.ascontiguousarray(wide).view(np.int64)


def as_rows(indices: NDArray[Any], rows: int, table: str) -> Rows:
    """Check row indices as a user gives them: any order, duplicates allowed.

    Args:
        indices: ``(B,)`` of an integer dtype.
        rows: Number of rows of the table.
        table: The table's name, for messages.

    Returns:
        ``(B,)`` int64, every entry inside ``[0, rows)``.

    Raises:
        RowTypeError: the dtype is not an integer's (a boolean mask is not one either), or the shape is not
            1-D.
        RowIndexError: an index is negative or too large.

    Example:
        >>> as_rows(np.array([3, 1], dtype=np.int32), rows=4, table="entity")
        array([3, 1])
    """
    if indices.dtype.kind not in "iu":
        kind = "a boolean mask" if indices.dtype.kind == "b" else f"of dtype {indices.dtype.name}"
        raise RowTypeError(
            f"the indices for table {table!r} are {kind}: pass integer row numbers, such as int64"
        )
    if indices.ndim != 1:
        raise RowTypeError(
            f"the indices for table {table!r} have shape {indices.shape}: pass a 1-D array, flattened if "
            "need be"
        )
    if len(indices) == 0:
        return np.empty(0, dtype=np.int64)
    checked = np.ascontiguousarray(indices, dtype=np.int64)
    lowest, highest, _ = inspect_rows(checked)
    if lowest < 0 or highest >= rows:
        wrong = indices[(checked < 0) | (checked >= rows)][0]
        raise RowIndexError(
            f"index {int(wrong)} is outside table {table!r}, whose rows are 0 to {rows - 1}: drop padding "
            "entries such as -1 before the step, or make the table larger"
        )
    return checked


def as_gradient(grad: NDArray[Any], rows: Rows, dim: int, table: str) -> Floats:
    """Check a gradient as a user gives it.

    Args:
        grad: ``(B, D)`` of a floating dtype.
        rows: ``(B,)``, the rows that came with it, as `as_rows` returns them.
        dim: D, the elements of a row.
        table: The table's name, for messages.

    Returns:
        ``(B, D)`` float32, C-contiguous; infinite where float32 can't represent an element.

    Raises:
        RowTypeError: the dtype is not a floating one.
        GradientError: the shape is another.
    """
    if grad.dtype.kind != "f":
        raise RowTypeError(
            f"the gradient for table {table!r} is of dtype {grad.dtype.name}: pass a floating one, such as "
            "float32"
        )
    if grad.shape != (len(rows), dim):
        raise GradientError(
            f"the gradient for table {table!r} has shape {grad.shape} but {len(rows)} indices of a table "
            f"with {dim} elements a row need {(len(rows), dim)}: pass one gradient row for each index"
        )
    if grad.dtype == np.float32:
        return np.ascontiguousarray(grad)
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(grad, dtype=np.float32)


def coalesce(rows: Rows, grad: Floats) -> tuple[Rows, Gradients]:
    """Sort a checked batch and tell which gradients belong to each row; none is copied or summed.

    Args:
        rows: ``(B,)`` as `as_rows` returns them.
        grad: ``(B, D)`` as `as_gradient` returns it.

    Returns:
        The distinct rows, strictly increasing, and their gradients.

    Example:
        >>> rows, gradients = coalesce(np.array([3, 1, 3]), np.array([[1], [5], [2]], dtype=np.float32))
        >>> rows, merge(gradients)
        (array([1, 3]), array([[5.], [3.]], dtype=float32))
    """
    each = np.arange(len(rows) + 1)
    if len(rows) == 0:
        return rows, Gradients(grad, each[:-1], each)
    _, highest, increasing = inspect_rows(rows)
    if increasing:
        return rows, Gradients(grad, each[:-1], each)
    order, unique = sort_stable(rows, highest), np.empty_like(rows)
    count = group_rows(rows, order, unique, each)
    return unique[:count], Gradients(grad, order, each[: count + 1])


def merge(gradients: Gradients) -> Floats:
    """Return the sum of the gradients of each distinct row, as an update takes it.

    Sums are float32 in the order of occurrence, so that the same batch gives the same bits.

    Returns:
        ``(U, D)`` float32.
    """
    merged = np.empty((len(gradients.starts) - 1, gradients.values.shape[1]), np.float32)
    sum_gradients(gradients, merged)
    return merged


def average(gradients: Gradients) -> Gradients:
    """Return gradients whose sums are the means of those of each distinct row.

    Each is divided by how many there are, so that what is wrong with one can still be told.

    Args:
        gradients: As `coalesce` returns them; they stay as they are.

    Example:
        >>> _, gradients = coalesce(np.array([3, 1, 3]), np.array([[1], [5], [2]], dtype=np.float32))
        >>> merge(average(gradients))
        array([[5. ],
               [1.5]], dtype=float32)
    """
    counts = np.diff(gradients.starts)
    if (counts == 1).all():
        return gradients
    divisors = np.empty((len(gradients.order), 1), np.float32)
    divisors[gradients.order, 0] = np.repeat(counts, counts)
    return gradients._replace(values=gradients.values / divisors)


def require_finite(gradients: Gradients, rows: Rows, table: str) -> None:
    """Refuse gradients that are not finite, or whose sums are not: what an update of theirs finds out first.

    Args:
        gradients: The gradients.
        rows: ``(U,)`` int64, the distinct rows.
        table: The table's name, for messages.

    Raises:
        GradientError: an element, or a sum, is not finite in float32.
    """
    values, order, starts = gradients
    position = first_non_finite_row(values.view(np.int32))
    if position >= 0:
        place = int(np.flatnonzero(order == position)[0])
        row = int(rows[np.searchsorted(starts, place, side="right") - 1])
        raise GradientError(
            f"the gradient for table {table!r} holds a value that float32 can't represent in row {position} "
            f"of the batch, which is row {row} of the table: nothing was changed; skip the batch, clip the "
            "gradient or lower the learning rate"
        )
    position = first_non_finite_row(merge(gradients).view(np.int32))
    if position >= 0:
        raise GradientError(
            f"the summed gradient of row {int(rows[position])} of table {table!r} overflows float32: nothing "
            "was changed; scale the loss down"
        )
