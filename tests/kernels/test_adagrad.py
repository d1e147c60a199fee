"""Adagrad's passes against a program that goes row by row in float64, and numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from sampling import off_by_ulps

from dsa.kernels.visiting import visit_records
from dsa.rules.adagrad import ADAGRAD, ROW_WISE_ADAGRAD, AdagradOptions

RULES = {"element": ADAGRAD, "row": ROW_WISE_ADAGRAD}
DIALECTS = {
    "plain": {},
    "decayed rate": {"lr_decay": 0.1},
    "l2": {"weight_decay": 0.1},
    "ascent": {"maximize": True},
    "ascent, l2": {"maximize": True, "weight_decay": 0.1},
    "a sum that begins high": {"initial_accumulator_value": 0.5},
    "large eps": {"eps": 1e-2},
    "rate zero": {"lr": 0.0},
}


def oracle(w, h, g, options, step, row_wise):
    """The row after the step, all in float64."""
    g = (-g if options.maximize else g) + options.weight_decay * w
    h = h + (np.mean(g**2) if row_wise else g**2)
    lr = options.lr / (1 + (step - 1) * options.lr_decay)
    return w - lr * g / (np.sqrt(options.initial_accumulator_value + h) + options.eps), h


def used_records(rule, rng, rows, dim, size):
    records = np.zeros(rows, rule.schema(dim).dtype)
    records["w"] = rng.normal(size=(rows, dim))
    records["h"] = size**2 * rng.uniform(0.0, 3.0, records["h"].shape)
    records["s"] = rng.integers(0, 9, rows)
    return records


@pytest.mark.parametrize("dim", [1, 2, 7, 64])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("per", RULES)
def test_one_step_equals_the_oracle(per, dialect, dim):
    rule, rng = RULES[per], np.random.default_rng(dim)
    options = AdagradOptions(**({"lr": 1e-2} | DIALECTS[dialect]))
    for size in (1.0, 1e-4, 1e6):
        records = used_records(rule, rng, 20, dim, size)
        grad = (size * rng.normal(size=(20, dim))).astype(np.float32)
        wide = [
            oracle(r["w"].astype(float), r["h"].astype(float), g.astype(float), options, 38, per == "row")
            for r, g in zip(records, grad, strict=True)
        ]
        before = records["w"].copy()
        update, constants = rule.pass_for(options, k=0.0, stamp=39, step=38)
        report = visit_records(update, records, grad, constants, non_negative=("h",))
        assert report.bad == -1
        assert (records["s"] == 39).all()
        assert off_by_ulps(records["w"], [w for w, _ in wide], before) <= 2.0
        assert off_by_ulps(records["h"], [h for _, h in wide]) <= 4.0


@pytest.mark.parametrize("per", RULES)
def test_weights_in_memory_take_the_same_step(per):
    rule, rng = RULES[per], np.random.default_rng(3)
    records = used_records(rule, rng, 20, 5, 1.0)
    bare = np.zeros(20, rule.schema(5, weights=False).dtype)
    bare["h"], bare["s"], weights = records["h"], records["s"], records["w"].copy()
    grad = rng.normal(size=(20, 5)).astype(np.float32)
    update, constants = rule.pass_for(AdagradOptions(0.1, weight_decay=0.1), k=0.0, stamp=9, step=1)
    visit_records(update, records, grad, constants, non_negative=("h",))
    visit_records(update, bare, grad, constants, weights, non_negative=("h",))
    assert np.array_equal(weights, records["w"])
    assert np.array_equal(bare["h"], records["h"])
    assert np.array_equal(bare["s"], records["s"])


@pytest.mark.parametrize("per", RULES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_what_is_not_finite_is_not_stored(per, bad):
    rule = RULES[per]
    records, grad = np.zeros(3, rule.schema(4).dtype), np.ones((3, 4), np.float32)
    grad[1, 2] = bad
    update, constants = rule.pass_for(AdagradOptions(0.1), k=0.0, stamp=2, step=1)
    assert visit_records(update, records, grad, constants, non_negative=("h",)).bad == 1


@pytest.mark.parametrize("name", ["lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"])
@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
def test_options_out_of_range(name, value):
    with pytest.raises(ValueError, match=rf"{name}={value!r} is out of range: pass a finite number >"):
        AdagradOptions(**({"lr": 0.1} | {name: value}))


def test_epsilon_keeps_the_denominator_from_zero():
    with pytest.raises(ValueError, match=r"eps=0\.0 is out of range: pass a finite number > 0"):
        AdagradOptions(0.1, eps=0.0)
