"""The layout of a record: offsets against a table made by hand, laws, JSON round trips, refusals."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsa.errors import StateCorruptError
from dsa.schema import Field, Schema, adam_schema, keyed

WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}


def fields(text):
    """Return the fields of a line such as "w:float32:element t:int32:row"."""
    return tuple(Field(*part.split(":")) for part in text.split())


schemas = st.builds(
    lambda dim, parts: Schema(dim, tuple(Field(f"f{i}", *part) for i, part in enumerate(parts))),
    st.integers(1, 200),
    st.lists(st.tuples(st.sampled_from(sorted(WIDTHS)), st.sampled_from(("element", "row"))), min_size=1),
)


@pytest.mark.parametrize(
    ("schema", "offsets", "size"),
    [
        (adam_schema(1), [0, 4, 8, 12, 16], 20),
        (adam_schema(3), [0, 12, 24, 36, 40], 44),
        (adam_schema(128), [0, 512, 1024, 1536, 1540], 1544),
        (adam_schema(3, second_moment_per="row"), [0, 12, 24, 28, 32], 36),
        (Schema(5, fields("w:float32:element")), [0], 20),
        (Schema(3, fields("h:float16:element s:int32:row")), [0, 8], 12),
        (Schema(3, fields("h:bfloat16:element")), [0], 8),
        (Schema(1, fields("a:float16:row b:float16:row")), [0, 4], 8),
        (Schema(2, fields("t:int32:row d:float64:element")), [0, 4], 20),
        (Schema(1, fields("n:int64:row t:int32:row")), [0, 8], 12),
        (keyed(adam_schema(2)), [0, 8, 12, 20, 28, 36, 40], 44),
    ],
)
def test_layout(schema, offsets, size):
    assert [schema.offset(name) for name in schema.names] == offsets
    assert schema.dtype.itemsize == size


@given(schemas)
def test_fields_are_aligned_and_do_not_overlap(schema):
    end = 0
    for field in schema.fields:
        start = schema.offset(field.name)
        assert start % 4 == 0
        assert end <= start < end + 4
        end = start + schema.field_bytes(field)
        assert schema.field_bytes(field) == WIDTHS[field.dtype] * (
            schema.dim if field.per == "element" else 1
        )
    assert schema.dtype.itemsize % 4 == 0
    assert end <= schema.dtype.itemsize < end + 4
    assert schema.dtype.names == schema.names


@given(schemas)
def test_dtype_is_little_endian_and_shaped(schema):
    records = np.zeros(2, schema.dtype)
    for field in schema.fields:
        stored = records[field.name]
        assert stored.shape == ((2, schema.dim) if field.per == "element" else (2,))
        assert stored.dtype == stored.dtype.newbyteorder("<")
        assert stored.dtype.kind == ("u" if field.dtype == "bfloat16" else field.dtype[0])


@given(schemas)
def test_json_round_trip(schema):
    again = Schema.from_json(json.loads(json.dumps(schema.to_json())))
    assert again == schema
    assert again.dtype == schema.dtype


@given(schemas, schemas)
def test_schemas_are_equal_when_their_descriptions_are(one, other):
    assert (one == other) == (one.to_json() == other.to_json())
    assert one == Schema(one.dim, one.fields)
    assert hash(one) == hash(Schema(one.dim, one.fields))


def test_json_form_is_fixed():
    """Files of earlier releases hold this text."""
    assert adam_schema(3).to_json() == {
        "dim": 3,
        "fields": [
            {"name": "w", "dtype": "float32", "per": "element"},
            {"name": "m", "dtype": "float32", "per": "element"},
            {"name": "v", "dtype": "float32", "per": "element"},
            {"name": "t", "dtype": "int32", "per": "row"},
            {"name": "s", "dtype": "int32", "per": "row"},
        ],
    }


def test_a_dim_of_numpy_is_described_as_json():
    """`weight.shape` holds Python numbers, but a caller's own arithmetic may not."""
    assert json.loads(json.dumps(adam_schema(np.int64(3)).to_json())) == adam_schema(3).to_json()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Field("w v", "float32", "row"), r"field name 'w v' is not an identifier: use"),
        (lambda: Field("", "float32", "row"), r"field name '' is not an identifier: use"),
        (lambda: Field("../w", "float32", "row"), r"field name '\.\./w' is not an identifier: use"),
        (lambda: Field("w", "float8", "row"), r"field 'w' has the unknown dtype 'float8': use one of \["),
        (lambda: Field("w", "<f4", "row"), r"field 'w' has the unknown dtype '<f4': use one of \["),
        (
            lambda: Field("w", "float32", "column"),
            r"field 'w' is stored per 'column': use 'element' or 'row'",
        ),
        (lambda: adam_schema(0), r"dim=0 is out of range"),
        (lambda: adam_schema(-3), r"dim=-3 is out of range"),
        (lambda: Schema(3, ()), r"a schema without fields stores nothing: name"),
        (lambda: Schema(3, fields("w:int32:row w:int64:row")), r"field names repeat in \('w', 'w'\): give"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()


GOOD = adam_schema(2).to_json()


@pytest.mark.parametrize(
    "data",
    [
        None,
        3,
        "adam",
        [],
        {},
        {"dim": 2},
        {"fields": GOOD["fields"]},
        GOOD | {"dim": 0},
        GOOD | {"dim": None},
        GOOD | {"dim": "two"},
        GOOD | {"dim": float("inf")},
        GOOD | {"dim": float("nan")},
        GOOD | {"dim": 2.5},
        GOOD | {"dim": 10**30},
        GOOD | {"fields": []},
        GOOD | {"fields": None},
        GOOD | {"fields": "wmv"},
        GOOD | {"fields": [None]},
        GOOD | {"fields": [{"name": "w"}]},
        GOOD | {"fields": [{"name": "w", "dtype": "float32", "per": ["row"]}]},
        GOOD | {"fields": [{"name": "w", "dtype": "complex64", "per": "row"}]},
        GOOD | {"fields": [{"name": 3, "dtype": "float32", "per": "row"}]},
        GOOD | {"fields": GOOD["fields"] * 2},
    ],
)
def test_what_is_not_a_description_is_refused(data):
    with pytest.raises(StateCorruptError, match=r"can't be read \(.*restore it from a copy"):
        Schema.from_json(data)
