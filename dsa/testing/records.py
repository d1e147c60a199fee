"""Tables to test with: sizes and schemas, random records, and their comparison bit by bit."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsa.schema import Field, Records, Rows, Schema, adam_schema

__all__ = ["CASES", "MIXED", "Case", "assert_records_equal", "random_records", "selections"]

MIXED = Schema(
    3,
    (
        Field("half", "float16", "element"),
        Field("double", "float64", "row"),
        Field("brain", "bfloat16", "element"),
        Field("wide", "float64", "element"),
        Field("count", "int64", "row"),
        Field("single", "float32", "row"),
        Field("last", "bfloat16", "row"),
    ),
)
"""Every width of number, in an order that needs padding between fields and after the last."""

_STAMPED = Schema(
    3,
    (Field("half", "float16", "element"), Field("s", "int32", "row"), Field("double", "float64", "row")),
)


class Case(NamedTuple):
    """The size of one table.

    Example:
        >>> Case(7, adam_schema(dim=1)).rows
        7
    """

    rows: int
    schema: Schema


CASES: dict[str, Case] = {
    "one-number": Case(1, Schema(1, (Field("w", "float32", "element"),))),
    "dim-1": Case(10_007, adam_schema(1)),
    "dim-13": Case(4_099, adam_schema(13)),
    "dim-128": Case(521, adam_schema(128)),
    "per-row": Case(1_021, adam_schema(13, second_moment_per="row")),
    "mixed": Case(1_031, MIXED),
    "stamped": Case(1_033, _STAMPED),
}
"""Sizes where a block, a page or a chunk does not come out even: the numbers of rows are prime or one."""


def random_records(schema: Schema, count: int, seed: int) -> Records:
    """Return records whose fields hold random bits.

    NaNs with payloads, infinities and subnormal numbers are among them: a backend moves bits and must not
    care.

    Args:
        schema: Layout of a record.
        count: How many records, B.
        seed: The same seed gives the same records.

    Returns:
        ``(B,)`` of `schema.dtype`; the padding is zero.

    Example:
        >>> records = random_records(adam_schema(dim=2), 3, seed=1)
        >>> records["w"].shape
        (3, 2)
        >>> assert_records_equal(records, random_records(adam_schema(dim=2), 3, seed=1))
    """
    generator = np.random.default_rng(seed)
    records = np.zeros(count, schema.dtype)
    for name in schema.names:
        field = records[name]
        field[...] = np.frombuffer(generator.bytes(field.nbytes), field.dtype).reshape(field.shape)
    return records


def selections(count: int) -> dict[str, Rows]:
    """Return batches of rows with names, the same in every run.

    Args:
        count: Rows of the table, N >= 1.
    """
    half = np.random.default_rng(count).random(count) < 0.5
    half[0] = True
    return {
        "one row": np.array([count // 2]),
        "the first row": np.array([0]),
        "the last row": np.array([count - 1]),
        "both ends": np.unique([0, count - 1]),
        "every third row": np.arange(0, count, 3),
        "half of the rows": np.flatnonzero(half),
        "all rows": np.arange(count),
    }


def assert_records_equal(actual: Records, expected: Records, what: str = "records") -> None:
    """Compare two batches of records field by field and bit by bit; padding is not compared.

    Args:
        actual: ``(B,)`` records that the code under test returned.
        expected: ``(B,)`` records they should be.
        what: Words for the message.

    Raises:
        AssertionError: dtype, length or a bit differs; the message names the first field and position.

    Example:
        >>> schema = adam_schema(dim=2)
        >>> assert_records_equal(np.zeros(3, schema.dtype), random_records(schema, 3, seed=0), "three rows")
        Traceback (most recent call last):
        ...
        AssertionError: three rows: field 'w' differs in 3 of 3 records, first at position 0: ...
    """
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype!r} instead of {expected.dtype!r}"
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape!r} instead of {expected.shape!r}"
    for name in expected.dtype.names or ():
        differs = (_bits(actual[name]) != _bits(expected[name])).any(axis=1)
        if differs.any():
            at = int(differs.argmax())
            raise AssertionError(
                f"{what}: field {name!r} differs in {differs.sum()} of {len(actual)} records, first at "
                f"position {at}: {actual[name][at]!r} instead of {expected[name][at]!r}"
            )


def _bits(field: NDArray[Any]) -> NDArray[np.uint8]:
    width = field.dtype.itemsize * int(np.prod(field.shape[1:]))
    return np.ascontiguousarray(field).view(np.uint8).reshape(len(field), width)
