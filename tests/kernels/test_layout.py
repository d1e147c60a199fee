"""Which records a pass can go through."""

from __future__ import annotations

import pytest

from dsa.kernels.layout import WordLayout, word_layout
from dsa.schema import Field, Schema

W, M, V = (Field(name, "float32", "element") for name in "wmv")
H, U = Field("h", "float32", "row"), Field("u", "float32", "row")
T, N, S = (Field(name, "int32", "row") for name in "tns")

LAYOUTS = {
    "adam": ((W, M, V, T, S), WordLayout(w=0, m=3, v=6, t=9, s=10, dim=3, first=0)),
    "without weights": ((M, V, T, S), WordLayout(w=-1, m=0, v=3, t=6, s=7, dim=3, first=0)),
    "two counts": ((W, M, T, N, S), WordLayout(w=0, m=3, v=6, t=6, s=8, dim=3, first=0)),
    "one number per row": ((W, H, S), WordLayout(w=0, m=3, v=3, t=4, s=4, dim=3, first=0)),
    "of either sign": ((W, U, H, S), WordLayout(w=0, m=3, v=4, t=5, s=5, dim=3, first=0)),
    "no state": ((W, S), WordLayout(w=0, m=3, v=3, t=3, s=3, dim=3, first=0)),
    "nothing but the stamp": ((S,), WordLayout(w=-1, m=0, v=0, t=0, s=0, dim=1, first=0)),
}
REFUSED = {
    "a weight in the middle": (M, W, S),
    "a number of either sign after one that has none": (W, H, M, S),
    "a count before a number": (W, T, H, S),
    "a count after the stamp": (W, S, T),
    "no stamp": (W, H),
    "half a word": (W, Field("m", "bfloat16", "element"), S),
    "two words": (W, Field("d", "float64", "row"), S),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_where_fields_lie(name):
    fields, expected = LAYOUTS[name]
    assert word_layout(Schema(3, fields).dtype, ("v", "h")) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_do_not_follow(name):
    with pytest.raises(ValueError, match="do not follow one another as w m v t s: put the weight first"):
        word_layout(Schema(4, REFUSED[name]).dtype, ("v", "h"))
