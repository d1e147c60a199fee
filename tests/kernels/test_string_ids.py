"""Ids of strings: known digests, stability, and strings that share one."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsa.errors import RowTypeError
from dsa.kernels.string_ids import find_collision, hash_strings


def test_ids_are_what_they_were():
    """Tables outlive releases: these numbers must never change."""
    assert hash_strings(["", "a", "Ω", "\ud800"]).tolist() == [
        int.from_bytes(hashlib.new("blake2b", data, digest_size=8).digest(), "little", signed=True)
        for data in (b"", b"a", b"\xce\xa9", b"\xed\xa0\x80")
    ]
    assert hash_strings(["cat"]).tolist() == [3429664268601861939]


@given(st.lists(st.text(), max_size=30))
def test_equal_strings_have_equal_ids_and_no_others(strings):
    ids = hash_strings(strings)
    assert ids.dtype == np.int64
    assert ids.shape == (len(strings),)
    assert len(np.unique(ids)) == len(set(strings))
    assert find_collision(strings, ids) is None


@given(st.lists(st.sampled_from("abcdefgh"), max_size=20), st.integers(1, 4))
def test_a_collision_is_found_if_there_is_one(strings, buckets):
    ids = np.array([ord(each) % buckets for each in strings], np.int64)
    found = find_collision(strings, ids)
    held = {}
    for string, number in zip(strings, ids.tolist(), strict=True):
        held.setdefault(number, set()).add(string)
    if all(len(each) == 1 for each in held.values()):
        assert found is None
    else:
        assert found[0] != found[1]
        assert ord(found[0]) % buckets == ord(found[1]) % buckets


@pytest.mark.parametrize("wrong", [[b"a"], ["a", 3], [None]])
def test_what_is_no_string_is_refused(wrong):
    with pytest.raises(RowTypeError, match="has no id as a string: pass"):
        hash_strings(wrong)
