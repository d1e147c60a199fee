"""The rules that keep little or nothing, against programs that go row by row in float64."""

from __future__ import annotations

import numpy as np
import pytest
from sampling import off_by_ulps

from dsa.kernels.visiting import visit_records
from dsa.rules.lion import LION, LionOptions
from dsa.rules.sgd import SGD, SGDOptions


def sgd_row(row, g, options):
    """The fields of a row after the step."""
    return {"w": row["w"] - options.lr * ((-g if options.maximize else g) + options.weight_decay * row["w"])}


def lion_row(row, g, options):
    """The fields of a row after the step."""
    g = -g if options.maximize else g
    blend = options.beta1 * row["m"] + (1 - options.beta1) * g
    return {
        "w": row["w"] * (1 - options.lr * options.weight_decay) - options.lr * np.sign(blend),
        "m": options.beta2 * row["m"] + (1 - options.beta2) * g,
    }


CASES = {
    "lion": (LION, LionOptions(0.1), lion_row),
    "lion, decay": (LION, LionOptions(0.1, weight_decay=0.2), lion_row),
    "lion, ascent": (LION, LionOptions(0.1, 0.5, 0.8, weight_decay=0.2, maximize=True), lion_row),
    "lion, no momentum": (LION, LionOptions(0.1, 0.0, 0.0), lion_row),
    "lion, rate zero": (LION, LionOptions(0.0), lion_row),
    "sgd": (SGD, SGDOptions(0.1), sgd_row),
    "sgd, l2": (SGD, SGDOptions(0.1, weight_decay=0.2), sgd_row),
    "sgd, ascent": (SGD, SGDOptions(0.1, weight_decay=0.2, maximize=True), sgd_row),
    "sgd, rate zero": (SGD, SGDOptions(0.0), sgd_row),
}


def used_records(rule, rng, rows, dim):
    records = np.zeros(rows, rule.schema(dim).dtype)
    for name in set(records.dtype.names) - {"s"}:
        records[name] = rng.normal(size=records[name].shape)
    records["s"] = rng.integers(0, 9, rows)
    return records


@pytest.mark.parametrize("dim", [1, 2, 7, 64])
@pytest.mark.parametrize("name", CASES)
def test_one_step_equals_the_oracle(name, dim):
    rule, options, oracle = CASES[name]
    rng = np.random.default_rng(dim)
    records, grad = used_records(rule, rng, 30, dim), rng.normal(size=(30, dim)).astype(np.float32)
    fields = [field for field in records.dtype.names if field != "s"]
    before = records.copy()
    expected = [
        oracle({field: each[field].astype(np.float64) for field in fields}, g.astype(np.float64), options)
        for each, g in zip(records, grad, strict=True)
    ]
    update, constants = rule.pass_for(options, k=0.0, stamp=5, step=4)
    assert visit_records(update, records, grad, constants).bad == -1
    assert (records["s"] == 5).all()
    for field in fields:
        assert off_by_ulps(records[field], [each[field] for each in expected], before[field]) <= 2.0


@pytest.mark.parametrize("name", CASES)
def test_weights_in_memory_take_the_same_step(name):
    rule, options, _ = CASES[name]
    rng = np.random.default_rng(3)
    records, grad = used_records(rule, rng, 20, 5), rng.normal(size=(20, 5)).astype(np.float32)
    bare, weights = np.zeros(20, rule.schema(5, weights=False).dtype), records["w"].copy()
    for field in bare.dtype.names:
        bare[field] = records[field]
    update, constants = rule.pass_for(options, k=0.0, stamp=5, step=4)
    visit_records(update, records, grad, constants)
    visit_records(update, bare, grad, constants, weights)
    assert np.array_equal(weights, records["w"])
    for field in bare.dtype.names:
        assert np.array_equal(bare[field], records[field])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_not_stored(name, bad):
    rule, options, _ = CASES[name]
    records, grad = np.zeros(3, rule.schema(4).dtype), np.ones((3, 4), np.float32)
    grad[1, 2] = bad
    update, constants = rule.pass_for(options, k=0.0, stamp=2, step=1)
    assert visit_records(update, records, grad, constants).bad == 1


def test_lion_goes_nowhere_without_direction():
    records = np.zeros(1, LION.schema(3).dtype)
    update, constants = LION.pass_for(LionOptions(), k=0.0, stamp=2, step=1)
    visit_records(update, records, np.zeros((1, 3), np.float32), constants)
    assert records["w"].tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("name", "value"), [("beta1", 1.0), ("beta2", -0.1), ("beta2", np.nan), ("weight_decay", -1.0)]
)
def test_options_of_lion_out_of_range(name, value):
    with pytest.raises(ValueError, match=rf"{name}={value!r} is out of range: pass a"):
        LionOptions(**{name: value})
