"""Records with bfloat16: what a pass makes of them, against a second program in numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa.kernels.adagrad import adagrad_pass, row_wise_adagrad_pass
from dsa.kernels.adam import adam_pass, row_wise_adam_pass
from dsa.kernels.constants import step_constants
from dsa.kernels.layout import PackedLayout, WordLayout, as_words, record_layout
from dsa.kernels.lion import LionConstants, lion_pass
from dsa.kernels.packing import fill_dither, pack, unpack
from dsa.kernels.poincare import ball_constants, ball_pass, row_wise_ball_pass
from dsa.kernels.sgd import SGDConstants, sgd_pass
from dsa.kernels.visiting import visit_records
from dsa.rules.adagrad import ADAGRAD, ROW_WISE_ADAGRAD, AdagradOptions
from dsa.rules.conventions import AdamOptions
from dsa.rules.known import RULES
from dsa.schema import adam_schema, read_numbers, store_numbers, with_dtypes
from tests.kernels.oracles import oracle_philox

SEED, STAMP = 0x1234_5678_9ABC_DEF, 77


def dither_of(row, stamp, seed, count):
    """The random halves of a row, from a Philox of its own: two for each 32-bit word, the lower one first."""
    blocks, key = range(-(-count // 8)), [seed % 2**32, seed // 2**32]
    words = [w for b in blocks for w in oracle_philox([row % 2**32, row // 2**32, stamp, 1 + b], key)]
    return np.array([half for word in words for half in (word & 0xFFFF, word >> 16)], np.uint32)[:count]


def rounded(values, halves):
    """float32 to bit patterns of bfloat16: the neighbour away from zero where the random half carries."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + halves) >> 16).astype(np.uint16)


def packed(wide, schema, rows, stamp, seed):
    """Records with float32 as a step stores them, field by field."""
    dtypes = {field.name: field.dtype for field in schema.fields}
    made = np.zeros(len(wide), schema.dtype)
    for i, row in enumerate(rows):
        used = 0
        for name in schema.names:
            if dtypes[name] != "bfloat16":
                made[name][i] = wide[name][i]
                continue
            values = np.atleast_1d(wide[name][i])
            even = -(-len(values) // 2) * 2  # a field begins on a word
            halves = dither_of(int(row), stamp, seed, used + even)[used:]
            made[name][i] = rounded(values, halves[: len(values)]).reshape(made[name][i].shape)
            used += even
    return made


def widened(records, dtype):
    made = np.zeros(len(records), dtype)
    for name in dtype.names:
        made[name] = read_numbers(records, name)
    return made


def random_wide(schema, count, seed=1):
    draws = np.random.default_rng(seed)
    records = np.zeros(count, schema.dtype)
    for name in schema.names:
        shape = records[name].shape
        if name in ("t", "s"):
            records[name] = draws.integers(1, 50, shape)
        else:
            records[name] = draws.standard_normal(shape) * 0.1
            if name in ("v", "h"):
                records[name] = records[name] ** 2
    return records


ADAM = AdamOptions(lr=0.1, weight_decay=0.01)
CASES = {
    "adam": (adam_pass, "adam", step_constants(ADAM, STAMP, None)),
    "row": (row_wise_adam_pass, "row_wise_adam", step_constants(ADAM, STAMP, None)),
    "ball": (ball_pass, "adam", ball_constants(ADAM, 0.7, STAMP, None)),
    "ball by rows": (row_wise_ball_pass, "row_wise_adam", ball_constants(ADAM, 0.7, STAMP, None)),
    "adagrad": (
        adagrad_pass, "adagrad", ADAGRAD.pass_for(AdagradOptions(0.1), k=0.0, stamp=STAMP, step=1)[1]
    ),
    "adagrad by rows": (
        row_wise_adagrad_pass,
        "row_wise_adagrad",
        ROW_WISE_ADAGRAD.pass_for(AdagradOptions(0.1), k=0.0, stamp=STAMP, step=1)[1],
    ),
    "lion": (lion_pass, "lion", LionConstants(0.1, 0.9, 0.99, 1.0, 0.001, STAMP)),
    "sgd": (sgd_pass, "sgd", SGDConstants(0.1, 1.0, 0.01, STAMP)),
}  # fmt: skip


@pytest.mark.parametrize("dim", [1, 2, 7, 16])
@pytest.mark.parametrize("name", CASES)
def test_a_pass_over_packed_records_is_the_pass_over_wide_ones_and_a_rounding(name, dim):
    update, rule_name, constants = CASES[name]
    rule = next(rule for rule in RULES if rule.name == rule_name)
    whole = rule.schema(dim)
    floating = [field.name for field in whole.fields if field.dtype == "float32"]
    for chosen in (floating, floating[1:], floating[-1:]):
        schema = with_dtypes(whole, dict.fromkeys(chosen, "bfloat16"))
        rows = np.array([0, 3, 2**32 + 5, 2**40])
        records = np.zeros(4, schema.dtype)
        start = random_wide(whole, 4)
        for field in schema.names:
            store_numbers(records, field, start[field])
        wide = widened(records, whole.dtype)
        grad = np.random.default_rng(2).standard_normal((4, dim)).astype(np.float32)
        non_negative = tuple(rule.non_negative)
        assert visit_records(update, wide, grad, constants, None, non_negative).bad == -1
        report = visit_records(update, records, grad, constants, None, non_negative, rows, SEED)
        assert report.bad == -1
        expected = packed(wide, schema, rows, STAMP, SEED)
        assert records.tobytes() == expected.tobytes()


@given(row=st.integers(0, 2**44), stamp=st.integers(1, 2**31 - 1), seed=st.integers(0, 2**63 - 1))
@settings(max_examples=30)
def test_the_random_words_are_philox(row, stamp, seed):
    words = np.empty(8, np.int32)
    fill_dither(row, stamp, seed, words)
    halves = dither_of(row, stamp, seed, 16)
    assert words.view(np.uint32).tolist() == (halves[::2] + (halves[1::2] << 16)).tolist()


def test_what_is_a_bfloat16_already_is_not_changed():
    """So that a row on which no step acts keeps its bytes, and unpacking loses nothing."""
    schema = with_dtypes(adam_schema(2), {"w": "bfloat16", "m": "bfloat16", "v": "bfloat16"})
    layout = record_layout(schema.dtype, ("v",))
    assert isinstance(layout, PackedLayout)
    patterns = np.setdiff1d(np.arange(2**16), [*range(0x7F80, 0x8000), *range(0xFF80, 0x10000)])
    records = np.zeros(len(patterns), schema.dtype)
    records["w"], records["m"] = patterns[:, None], patterns[::-1, None]
    words = as_words(records)[0]
    wide, again = np.zeros(layout.wide.s + 1, np.int32), np.zeros_like(words[0])
    dither = np.full(4, -1, np.int32)  # the largest halves
    for record in words[::37]:
        unpack(record, layout, wide)
        pack(wide, layout, dither, again)
        assert (again == record).all()


def test_the_mean_of_a_rounding_is_the_number():
    draws = np.random.default_rng(5)
    values = (draws.standard_normal(64) * 10.0 ** draws.integers(-6, 3, 64)).astype(np.float32)
    layout = record_layout(with_dtypes(adam_schema(64), {"m": "bfloat16"}).dtype, ("v",))
    wide = np.zeros(layout.wide.s + 1, np.int32)
    wide[64:128] = values.view(np.int32)
    stored, dither = np.zeros(layout.s + 1, np.int32), np.zeros(32, np.int32)
    back, sums, count = np.zeros_like(wide), np.zeros(64), 20_000
    for row in range(count):
        fill_dither(row, 3, SEED, dither)
        pack(wide, layout, dither, stored)
        unpack(stored, layout, back)
        sums += back[64:128].view(np.float32)
    unit = 2.0 ** (np.floor(np.log2(np.abs(values))) - 7)
    # Five standard errors of a mean; the standard deviation is at most half a unit.
    assert (np.abs(sums / count - values) < 5 * unit / 2 / np.sqrt(count)).all()
    assert np.abs(np.mean((sums / count - values) / unit)) < 1e-3


def test_a_second_moment_decays_where_the_nearest_would_stall():
    """With gradients of zero v is beta2^n of what it was: on average with dithering, not at all without."""
    count, steps, options = 200, 1000, AdamOptions(lr=0.0)
    schema = with_dtypes(adam_schema(16), {"m": "bfloat16", "v": "bfloat16"})
    records = np.zeros(count, schema.dtype)
    store_numbers(records, "v", np.full((count, 16), 0.7, np.float32))
    records["s"] = records["t"] = 1
    first = read_numbers(records, "v").astype(np.float64)
    nearest = records.copy()
    none = np.zeros((count, 16), np.float32)
    for stamp in range(2, steps + 2):
        visit_records(adam_pass, records, none, step_constants(options, stamp, None), seed=SEED)
        if stamp < 20:
            store_numbers(nearest, "v", np.float32(options.beta2) * read_numbers(nearest, "v"))
    expected = first.mean() * options.beta2**steps
    assert read_numbers(records, "v").mean() == pytest.approx(expected, rel=0.01)
    assert (read_numbers(nearest, "v") == first).all()


@pytest.mark.parametrize(
    "damage", [("v", 0x8001), ("v", 0x8000), ("m", 0x7F80), ("w", 0x7FC1), ("m", 0x7FFF), ("v", 0x7F80)]
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_damaged_numbers_are_refused(damage, place):
    name, pattern = damage
    schema = with_dtypes(adam_schema(3), {"w": "bfloat16", "m": "bfloat16", "v": "bfloat16"})
    records = np.zeros(2, schema.dtype)
    records["s"] = 1
    records[name][1, place] = pattern
    constants = step_constants(AdamOptions(lr=0.1), STAMP, None)
    assert visit_records(adam_pass, records, np.ones((2, 3), np.float32), constants).bad == 1


def test_a_rounding_that_would_overflow_is_refused():
    largest = np.full((1, 64), 3.4e38, np.float32)  # beyond the last bfloat16
    constants = LionConstants(0.1, 0.0, 0.0, 1.0, 0.0, STAMP)
    for dtypes, bad in ({}, -1), ({"m": "bfloat16"}, 0):
        records = np.zeros(1, with_dtypes(RULES[-1].schema(64), dtypes).dtype)
        assert visit_records(lion_pass, records, largest, constants, non_negative=()).bad == bad


def test_a_table_without_bfloat16_has_the_plain_layout():
    assert isinstance(record_layout(adam_schema(3).dtype, ("v",)), WordLayout)
