"""Distributions against numpy's, on any numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsa.inspection.sketch import Sketch, count_scale, norm_scale

ZERO_BELOW = 2.0**-100
"""Smaller numbers count as zero."""

sizes = st.floats(0.0, 1e40, allow_subnormal=False) | st.floats(0.5, 2.0) | st.sampled_from([0.0, 1.0, 3e-31])
numbers = st.lists(sizes.map(lambda x: x if x >= ZERO_BELOW else 0.0), min_size=1, max_size=60)
counters = st.lists(st.integers(1, 2**31 - 1) | st.integers(1, 40), min_size=1, max_size=60)


def sketch_of(values, parts=3, **options):
    sketch = Sketch(**options)
    for part in np.array_split(np.array(values, np.float64), parts):
        sketch.add(part)
    return sketch


@given(numbers)
def test_totals_are_exact(values):
    sketch = sketch_of(values)
    assert sketch.count == len(values)
    assert sketch.total == pytest.approx(np.sum(values))
    assert (sketch.minimum, sketch.maximum) == (min(values), max(values))


@given(numbers, st.floats(0.0, 1.0))
def test_quantiles_are_near_those_of_the_numbers(values, level):
    exact = np.quantile(values, level, method="inverted_cdf")
    assert sketch_of(values).quantile(level) == pytest.approx(exact, rel=1e-3, abs=ZERO_BELOW)


@given(counters, st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]))
def test_small_integers_are_told_exactly(values, level):
    exact = np.quantile(values, level, method="inverted_cdf")
    found = sketch_of(values, integers=True).quantile(level)
    assert found == int(found)
    assert found == (exact if exact <= 2048 else pytest.approx(exact, rel=1e-3))


@given(numbers, st.integers(1, 50), st.sampled_from(["linear", "log"]))
def test_histograms_are_exact(values, bins, scale):
    histogram = sketch_of(values).histogram(bins, scale)
    edges = np.array(histogram.edges)
    assert len(histogram.counts) == len(edges) - 1 <= bins
    assert (np.diff(edges) > 0.0).all()
    inside = np.array(values)[np.array(values) >= edges[0]]
    assert list(histogram.counts) == np.histogram(inside, edges)[0].tolist()
    assert histogram.below + sum(histogram.counts) == len(values)
    if scale == "linear":
        assert histogram.below == 0
    else:
        assert histogram.below <= 0.001 * len(values) + sum(value == 0.0 for value in values)


@given(counters, st.integers(2, 50), st.sampled_from(["linear", "log"]))
def test_histograms_of_integers_are_exact_and_even(values, bins, scale):
    histogram = sketch_of(values, integers=True).histogram(bins, scale)
    edges = np.array(histogram.edges)
    assert list(histogram.counts) == np.histogram(values, edges)[0].tolist()
    assert sum(histogram.counts) == len(values)
    assert edges[0] <= min(values) <= max(values) < edges[-1]
    if max(values) < 1024:
        assert (edges == np.round(edges)).all()
        widths = np.diff(edges)[:-1]
        assert len(widths) == 0 or scale == "log" or (widths == widths[0]).all()
    if scale == "log":
        assert (np.log2(edges[:-1]) % 1.0 == 0.0).all()


def test_a_spread_of_one_number():
    spread = sketch_of([5.0] * 7).spread(10, "linear")
    assert (spread.count, spread.mean, spread.minimum, spread.median, spread.maximum) == (7, 5, 5, 5, 5)
    assert spread.histogram.counts == (7,)
    assert sketch_of([]).spread(10, "linear") is None
    assert sketch_of([]).histogram(10, "log").counts == ()


def test_scales():
    assert count_scale(sketch_of([1, 2, 30])) == "linear"
    assert count_scale(sketch_of([1, 2, 31])) == "log"
    assert norm_scale(sketch_of([1.0, 1.0, 8.0])) == "linear"
    assert norm_scale(sketch_of([1.0, 1.0, 9.0])) == "log"
    assert norm_scale(sketch_of([0.0, 1.0, 1.0, 9.0])) == "linear"
    assert norm_scale(sketch_of([])) == "linear"


def test_memory_is_bounded_whatever_comes():
    import tracemalloc

    sketch = Sketch()
    sketch.add(np.ones(1000))
    tracemalloc.start()
    for seed in range(50):
        sketch.add(np.random.default_rng(seed).lognormal(0.0, 20.0, 10_000))
    assert tracemalloc.get_traced_memory()[0] < 100_000
    tracemalloc.stop()
    assert sketch.count == 501_000
