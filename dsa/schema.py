"""What a record holds, as data: an ordered list of fields, convertible to a numpy dtype and to JSON.

A *record* is everything that is stored for one row. Each field is stored either once per element (a vector of
`dim` numbers) or once per row (one number). Adam's record is ``w m v t s``; other optimizers state other
lists and use the same machinery.

Every field starts on a multiple of four bytes and a record's size is a multiple of four bytes, so that a
kernel may look at records as a matrix of 32-bit words.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from dataclasses import field as member
from functools import lru_cache
from typing import Any, Final, Literal, final

import numpy as np
from numpy.typing import NDArray

from dsa.errors import StateCorruptError

__all__ = [
    "DECAY",
    "TORN",
    "Field",
    "Records",
    "Rows",
    "Schema",
    "adam_schema",
    "catches_up",
    "copy_field",
    "floating_fields",
    "has_stamp",
    "is_bfloat16",
    "is_keyed",
    "keyed",
    "read_numbers",
    "store_numbers",
    "widened",
    "with_dtypes",
]

Rows = NDArray[np.int64]
"""Row indices: 1-D, strictly increasing unless said otherwise."""

Records = NDArray[np.void]
"""A 1-D structured array of `Schema.dtype`."""

TORN: Final = -(2**31)
"""The stamp of a record that is handed out although it is not as it was written; see `StateBackend`."""

DECAY: Final = "l"
"""The field of rows that make up for decay: what the decay of their table was when they were written."""

Per = Literal["element", "row"]

# Logical dtype -> stored dtype, little endian. numpy has no bfloat16, so its bit pattern is stored.
_STORED = {
    "float16": "<f2",
    "bfloat16": "<u2",
    "float32": "<f4",
    "float64": "<f8",
    "int32": "<i4",
    "int64": "<i8",
}
_BFLOAT16: Final = np.dtype("<u2")  # which nothing else is stored as
_WORD = 4
_LARGEST = 1 << 30


@final
@dataclass(frozen=True, slots=True)
class Field:
    """One field of a record.

    Args:
        name: A Python identifier, unique in its schema.
        dtype: Logical dtype: float16, bfloat16, float32, float64, int32 or int64.
        per: ``"element"`` for a vector of `dim` numbers, ``"row"`` for a single one.

    Example:
        >>> Field("w", "float32", "element")
        Field(name='w', dtype='float32', per='element')
    """

    name: str
    dtype: str
    per: Per

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(
                f"field name {self.name!r} is not an identifier: use letters, digits and underscores"
            )
        if self.dtype not in _STORED:
            raise ValueError(
                f"field {self.name!r} has the unknown dtype {self.dtype!r}: use one of {sorted(_STORED)}"
            )
        if self.per not in ("element", "row"):
            raise ValueError(f"field {self.name!r} is stored per {self.per!r}: use 'element' or 'row'")


@final
@dataclass(frozen=True, slots=True)
class Schema:
    """The layout of one table's records.

    Args:
        dim: Elements of a per-element field, D >= 1.
        fields: The fields in storage order.

    Example:
        >>> schema = adam_schema(dim=3)
        >>> schema.names
        ('w', 'm', 'v', 't', 's')
        >>> schema.dtype.itemsize, schema.offset("t")
        (44, 36)
        >>> Schema.from_json(schema.to_json()) == schema
        True
    """

    dim: int
    fields: tuple[Field, ...]
    _dtype: np.dtype[np.void] = member(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", operator.index(self.dim))  # numpy's integers are not JSON
        if self.dim < 1:
            raise ValueError(f"dim={self.dim} is out of range: pass at least 1")
        if not self.fields:
            raise ValueError("a schema without fields stores nothing: name at least one field")
        if len(set(self.names)) != len(self.fields):
            raise ValueError(f"field names repeat in {self.names}: give each field its own name")
        size = sum(self.field_bytes(field) for field in self.fields)
        if size > _LARGEST:
            raise ValueError(
                f"a record of {size:,} bytes is too large: {_LARGEST:,} is the most, use a smaller dim"
            )
        object.__setattr__(self, "_dtype", _dtype_of(self))  # asked for in each step

    @property
    def names(self) -> tuple[str, ...]:
        """The fields' names in storage order."""
        return tuple(field.name for field in self.fields)

    @property
    def dtype(self) -> np.dtype[np.void]:
        """The structured dtype of one record, with the paddings that alignment asks for."""
        return self._dtype

    def offset(self, name: str) -> int:
        """Return the byte offset of a field inside a record."""
        fields: Any = self.dtype.fields
        return int(fields[name][1])

    def field_bytes(self, field: Field) -> int:
        """Return the bytes that one row of a field occupies, without padding."""
        count = self.dim if field.per == "element" else 1
        return count * np.dtype(_STORED[field.dtype]).itemsize

    def to_json(self) -> dict[str, Any]:
        """Return a plain description; `from_json` is its inverse."""
        return {
            "dim": self.dim,
            "fields": [{"name": f.name, "dtype": f.dtype, "per": f.per} for f in self.fields],
        }

    @classmethod
    def from_json(cls, data: Any) -> Schema:  # noqa: ANN401 - JSON is untyped until it has been checked here
        """Rebuild a schema from `to_json`'s description.

        Raises:
            StateCorruptError: the description is not one.
        """
        try:
            fields = tuple(Field(str(f["name"]), str(f["dtype"]), f["per"]) for f in data["fields"])
            return cls(data["dim"], fields)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise StateCorruptError(
                f"the record description {data!r} can't be read ({error}): restore it from a copy"
            ) from error


@lru_cache(maxsize=64)
def _dtype_of(schema: Schema) -> np.dtype[np.void]:
    offsets: list[int] = []
    end = 0
    for field in schema.fields:
        offsets.append(_round_up(end, _WORD))
        end = offsets[-1] + schema.field_bytes(field)
    return np.dtype(
        {
            "names": list(schema.names),
            "formats": [_format(field, schema.dim) for field in schema.fields],
            "offsets": offsets,
            "itemsize": _round_up(end, _WORD),
        }
    )


def _format(field: Field, dim: int) -> Any:  # noqa: ANN401 - numpy's dtype-like
    stored = _STORED[field.dtype]
    return (stored, (dim,)) if field.per == "element" else stored


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def adam_schema(
    dim: int, *, second_moment_per: Per = "element", weights: bool = True, decay: bool = False
) -> Schema:
    """Return the record of Adam: weight, moments, counter, stamp.

    ``t`` counts the updates of the row. ``s`` is the stamp: 0 in a record that was never written, otherwise
    one more than the step of its last write; it tells a hole of a sparse file from a row whose weight was
    set.

    Args:
        dim: Elements of a row.
        second_moment_per: ``"row"`` stores one number of ``v`` per row (row-wise Adam).
        weights: Whether the weights are part of the record, or stay with a parameter in memory.
        decay: Whether rows make up for decay that they have missed, see `dsa.kernels.decay`.

    Example:
        >>> adam_schema(2, second_moment_per="row").dtype.itemsize
        28
        >>> adam_schema(2, weights=False).names
        ('m', 'v', 't', 's')
    """
    weight = (Field("w", "float32", "element"),) if weights else ()
    owed = (Field(DECAY, "float32", "row"),) if decay else ()
    return Schema(
        dim,
        (
            *weight,
            Field("m", "float32", "element"),
            Field("v", "float32", second_moment_per),
            *owed,
            Field("t", "int32", "row"),
            Field("s", "int32", "row"),
        ),
    )


_KEYS: Final = (Field("id", "int64", "row"), Field("live", "int32", "row"))


def keyed(schema: Schema) -> Schema:
    """Return the record of a table whose rows belong to ids: in front of the fields, whose it is.

    ``id`` is any 64-bit integer, and means something where ``live`` is 1. In a row that was deleted ``live``
    is 0 and so is every other number but the stamp, which tells when that was.

    Args:
        schema: The record of a row that has none.

    Example:
        >>> keyed(adam_schema(2)).names
        ('id', 'live', 'w', 'm', 'v', 't', 's')
    """
    return Schema(schema.dim, (*_KEYS, *schema.fields))


def is_keyed(schema: Schema) -> bool:
    """Tell whether a table's rows belong to ids, see `keyed`."""
    return schema.fields[: len(_KEYS)] == _KEYS


def has_stamp(schema: Schema) -> bool:
    """Tell whether records have a stamp: an int32 ``s`` for each row.

    Example:
        >>> has_stamp(adam_schema(2)), has_stamp(Schema(2, (Field("s", "float32", "row"),)))
        (True, False)
    """
    return Field("s", "int32", "row") in schema.fields


def catches_up(dtype: np.dtype[np.void]) -> bool:
    """Tell whether weights are to decay by what their rows have missed before they are read.

    Args:
        dtype: That of a schema.
    """
    return DECAY in (dtype.names or ()) and dtype[DECAY] == np.dtype("<f4")


def floating_fields(dtype: np.dtype[np.void]) -> tuple[str, ...]:
    """Return the names of the fields that hold floating-point numbers, in storage order.

    Args:
        dtype: That of a schema.

    Example:
        >>> floating_fields(adam_schema(2).dtype)
        ('w', 'm', 'v')
    """
    return tuple(
        name for name in dtype.names or () if dtype[name].base.kind == "f" or is_bfloat16(dtype[name])
    )


def read_numbers(records: Records, name: str) -> NDArray[Any]:
    """Return what a field of records holds as numbers: bfloat16 as float32, everything else as it is stored.

    Args:
        records: ``(B,)`` of a schema's dtype.
        name: The field's.

    Returns:
        ``(B, D)`` or ``(B,)``; a view of the records but for bfloat16.

    Example:
        >>> records = np.zeros(1, Schema(2, (Field("v", "bfloat16", "element"),)).dtype)
        >>> store_numbers(records, "v", np.array([[1.0, 3.0e-5]]))
        >>> read_numbers(records, "v").dtype, records["v"].tolist(), read_numbers(records, "v")[0, 0].item()
        (dtype('float32'), [[16256, 14332]], 1.0)
    """
    values = records[name]
    if not is_bfloat16(records.dtype[name]):
        return values
    return (values.astype(np.uint32) << 16).view(np.float32)


def store_numbers(records: Records, name: str, values: Any) -> None:  # noqa: ANN401 - what numpy converts
    """Write numbers into a field of records, rounded to the nearest that the field holds, ties to even.

    Args:
        records: ``(B,)`` of a schema's dtype, written in place.
        name: The field's.
        values: What the field's shape ``(B, D)`` or ``(B,)`` takes.
    """
    if not is_bfloat16(records.dtype[name]):
        records[name] = values
        return
    wide = np.asarray(values, np.float32)
    bits = wide.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
    # Rounding could carry the payload of what is not a number into the sign.
    records[name] = np.where(np.isnan(wide), (bits >> 16) | 0x40, rounded)


def copy_field(source: Records, name: str, target: Records) -> None:
    """Copy a field from one array of records to another, as numbers where it is stored in different ways.

    Args:
        source: ``(B,)`` of a schema's dtype.
        name: The field's.
        target: ``(B,)``, written in place.
    """
    if source.dtype[name].base == target.dtype[name].base:
        target[name] = source[name]
    else:
        store_numbers(target, name, read_numbers(source, name))


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Tell whether a field's dtype stands for bfloat16, whose bit patterns are stored as uint16."""
    return dtype.base == _BFLOAT16


def widened(schema: Schema) -> Schema:
    """Return a schema with float32 in the place of bfloat16.

    Example:
        >>> widened(with_dtypes(adam_schema(2), {"v": "bfloat16"})) == adam_schema(2)
        True
    """
    narrow = [field.name for field in schema.fields if field.dtype == "bfloat16"]
    return with_dtypes(schema, dict.fromkeys(narrow, "float32"))


def with_dtypes(schema: Schema, dtypes: Mapping[str, str]) -> Schema:
    """Return a schema with other dtypes of some fields.

    Args:
        schema: The schema.
        dtypes: A dtype for each field that is to have another.

    Raises:
        ValueError: it has no such field, or a dtype is not known.

    Example:
        >>> with_dtypes(adam_schema(128), {"m": "bfloat16", "v": "bfloat16"}).dtype.itemsize
        1032
    """
    unknown = sorted(set(dtypes) - set(schema.names))
    if unknown:
        raise ValueError(
            f"there is no field {unknown[0]!r} to be stored as another dtype: use {schema.names}"
        )
    return Schema(
        schema.dim,
        tuple(replace(field, dtype=dtypes.get(field.name, field.dtype)) for field in schema.fields),
    )
