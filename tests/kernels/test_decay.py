"""Decay that rows make up for: one factor stands for the product of all that they have missed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsa.kernels.decay import catch_up, caught_up, rounded
from dsa.schema import Field, Schema, adam_schema, read_numbers, store_numbers, with_dtypes

SHARES = st.lists(st.floats(0.0, 0.3), min_size=1, max_size=60)


@given(SHARES, st.lists(st.booleans(), min_size=60, max_size=60))
def test_factors_telescope_whenever_a_row_is_touched(shares, touched):
    """Against the product in float64, which no logarithm and no rounding has seen."""
    table, since, product = 0.0, np.zeros(1, np.float32), 1.0
    weights = np.ones((1, 1), np.float32)
    for share, touch in zip(shares, touched, strict=False):
        table += -math.log1p(-share)
        product *= 1.0 - share
        if touch:
            catch_up(weights, since, table)
            since[:] = rounded(table)
    catch_up(weights, since, table)
    ulp = np.spacing(np.float32(table))
    # Half a unit of the sum, and that of a product of float32 for each time it was touched.
    assert weights[0, 0] == pytest.approx(product, rel=float(ulp) + (1 + sum(touched)) * 1.2e-7)


def test_a_row_that_was_just_written_is_as_it_is():
    weights = np.random.default_rng(1).standard_normal((50, 3)).astype(np.float32)
    kept = weights.copy()
    catch_up(weights, np.full(50, rounded(7.123456789), np.float32), 7.123456789)
    assert weights.tobytes() == kept.tobytes()


def test_who_looks_without_knowing_the_last_steps_takes_what_is_there():
    weights = np.ones((1, 2), np.float32)
    catch_up(weights, np.array([3.0], np.float32), 2.5)
    assert weights.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_decay_leaves_no_weight(bad):
    weights = np.ones((1, 2), np.float32)
    catch_up(weights, np.array([bad], np.float32), 2.5)
    assert not np.isfinite(weights).any()


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_records_become_what_a_reader_sees(stored):
    schema = with_dtypes(adam_schema(4, decay=True), {"w": stored})
    draws = np.random.default_rng(5)
    records = np.zeros(30, schema.dtype)
    store_numbers(records, "w", draws.standard_normal((30, 4)))
    records["l"] = draws.uniform(0.0, 2.0, 30)
    before = records.copy()
    seen = np.array(read_numbers(records, "w"), np.float32)
    catch_up(seen, np.ascontiguousarray(records["l"]), 2.0)
    made = caught_up(records, 2.0)
    expected = records.copy()
    store_numbers(expected, "w", seen)
    assert made["w"].tobytes() == expected["w"].tobytes()
    assert (made["l"] == 2.0).all()
    assert records.tobytes() == before.tobytes()
    assert caught_up(made, 2.0).tobytes() == made.tobytes()


def test_other_records_stay_as_they_are():
    records = np.ones(3, adam_schema(2).dtype)
    assert caught_up(records, 1.0) is records
    other = np.ones(3, Schema(2, (Field("w", "float32", "element"), Field("l", "int32", "row"))).dtype)
    assert caught_up(other, 1.0) is other
