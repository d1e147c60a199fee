"""Summaries against an oracle that looks at whole arrays with numpy."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_states import TABLES, build, content, train

from dsa import init
from dsa.errors import StateNotFoundError
from dsa.inspection import open_state, summarize, summarize_table
from dsa.rules.adam import ADAM
from dsa.rules.manifolds import BALL_EPS, PoincareBall
from dsa.schema import Field, Schema, adam_schema
from dsa.state.content import StateContent, TableContent
from dsa.state.facts import TableFacts

HURTS = np.array(
    [0x7FC00000, 0xFFC00000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 1, 0x80000000, 0x80000001, 0x3F800000, 0],
    np.uint32,
)


@st.composite
def tables(draw):
    """A table's content, in blocks, with any damage."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows, dim = draw(st.integers(1, 40)), draw(st.integers(1, 5))
    per = draw(st.sampled_from(["element", "row"]))
    weights = draw(st.booleans())
    k = draw(st.sampled_from([0.0, 0.25, 1.0, 7.0])) if weights else 0.0
    schema = adam_schema(dim, second_moment_per=per, weights=weights)
    records = np.zeros(rows, schema.dtype)
    if weights:
        directions = random.normal(size=(rows, dim))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        reach = random.choice([0.3, 0.9, 1.0 - BALL_EPS], rows) if k else random.lognormal(0, 2, rows)
        records["w"] = directions * (reach / (math.sqrt(k) or 1.0))[:, None]
    records["m"] = random.normal(size=(rows, dim)) * 10.0 ** random.integers(-6, 3, (rows, 1))
    records["v"] = np.square(random.normal(size=records["v"].shape)) * 1e-4
    records["t"] = random.integers(0, draw(st.sampled_from([2, 40, 5000])), rows)
    records["s"] = random.integers(0, 3, rows)
    untouched = records["s"] == 0
    for name in schema.names:
        records[name][untouched] = 0
    if draw(st.booleans()):
        words = records.view(np.uint32).reshape(rows, -1)
        hit = random.random(words.shape) < 0.03
        words[hit] = random.choice(HURTS, words.shape)[hit]
    cuts = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=3))})
    blocks = [(start, records[start:stop].copy()) for start, stop in itertools.pairwise(cuts)]
    return TableContent(TableFacts("entity", rows, schema, ADAM, k, 9), lambda: iter(blocks)), records


def as_matrix(values):
    return values.reshape(len(values), math.prod(values.shape[1:]))


def oracle(table, records):
    """What should be found, from the whole table."""
    touched = records[records["s"] != 0]
    places = np.flatnonzero(records["s"] != 0)
    fine = np.ones(len(touched), bool)
    for name in touched.dtype.names:
        values = as_matrix(touched[name])
        if values.dtype.kind == "f":
            fine &= np.isfinite(values).all(axis=1)
        if name in ("v", "t", "s"):
            fine &= ~np.signbit(values.astype(np.float64)).any(axis=1)
    good = touched[fine].astype(touched.dtype)
    moving = good[good["t"] > 0]
    first = np.sqrt(np.mean(np.square(moving["m"], dtype=np.float64), axis=1))
    second = np.sqrt(as_matrix(moving["v"]).astype(np.float64).mean(axis=1))
    found = {
        "touched_rows": len(touched),
        "stepped_rows": int(np.sum(touched["t"] > 0)),
        "implausible_rows": int(np.sum(~fine)),
        "first_implausible": int(places[~fine][0]) if (~fine).any() else None,
        "updates": moving["t"],
        "first_moments": first,
        "second_moments": second,
    }
    if "w" in records.dtype.names:
        found["weight_norms"] = np.linalg.norm(good["w"].astype(np.float64), axis=1)
    return found


@given(tables())
def test_a_summary_is_what_numpy_finds(given_table):
    table, records = given_table
    (summary,) = summarize(StateContent((table,), global_step=9)).tables
    for name, expected in oracle(table, records).items():
        found = getattr(summary, name)
        if not isinstance(expected, np.ndarray):
            assert found == expected, name
        elif len(expected) == 0:
            assert found is None, name
        else:
            assert found.count == len(expected)
            assert found.mean == pytest.approx(expected.mean(dtype=np.float64), rel=1e-6)
            assert found.minimum == pytest.approx(expected.min(), rel=1e-6)
            assert found.maximum == pytest.approx(expected.max(), rel=1e-6)
            for level, value in ((0.05, found.q05), (0.5, found.median), (0.99, found.q99)):
                exact = np.quantile(expected, level, method="inverted_cdf")
                assert value == pytest.approx(exact, rel=2e-3, abs=1e-30)
    if "w" not in table.schema.names:
        assert summary.weight_norms is None
        assert summary.rows_at_clamp is None
    json.dumps(summarize(StateContent((table,))).to_json(), allow_nan=False)


@given(st.sampled_from([0.1, 1.0, 4.0]), st.integers(0, 2**32))
def test_distances_on_a_ball(k, seed):
    random = np.random.default_rng(seed)
    ball = PoincareBall(k)
    schema = adam_schema(3)
    records = np.zeros(50, schema.dtype)
    records["s"] = 1
    directions = random.normal(size=(50, 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    parts = np.append(random.uniform(0.0, 0.99, 40), np.full(10, 1.0 - BALL_EPS))
    records["w"] = directions * (parts / math.sqrt(k))[:, None]
    table = TableContent(TableFacts("entity", 50, schema, ADAM, k), lambda: iter([(0, records)]))
    (summary,) = summarize(StateContent((table,))).tables
    assert summary.rows_at_clamp == 10
    points = ball.project(records["w"].astype(np.float64))[0]
    exact = ball.dist(np.zeros_like(points), points)
    assert summary.distances.median == pytest.approx(np.quantile(exact, 0.5, method="inverted_cdf"), rel=2e-3)
    assert summary.distances.maximum == pytest.approx(exact.max(), rel=1e-2)
    assert sum(summary.distances.histogram.counts) == 50


def test_a_directory(path):
    before = content(path)
    seen = []
    summary = summarize(path, progress=lambda *given: seen.append(given))
    assert content(path) == before
    assert (summary.path, summary.status, summary.global_step) == (str(path), "closed", 3)
    assert summary.journal_bytes == 0
    assert seen == [("entity", 300, 300), ("flat", 40, 40)]
    with open_state(path) as state:
        assert summarize(state) == summary == summarize(str(path))
        for table, view in zip(summary.tables, state.tables.values(), strict=True):
            assert summarize_table(view) == table
            assert table.touched_rows == np.count_nonzero(view["s"])
            assert (table.disk_bytes, table.file_bytes) == (view.disk_bytes, view.file_bytes)
            assert table.initializer == TABLES[table.name].to_json()
            assert table.k == view.k
            assert table.fields[-1] == {"name": "s", "dtype": "int32", "per": "row"}
    assert json.loads(json.dumps(summary.to_json()))["tables"][1]["name"] == "flat"


def test_an_open_directory_has_a_journal(tmp_path):
    with build(tmp_path) as optimizer:
        train(optimizer, 1)
        summary = summarize(tmp_path)
        assert summary.status == "open"
        assert summary.journal_bytes > 0


def test_what_was_never_trained(tmp_path):
    with build(tmp_path, {"entity": init.Normal(100, 4)}, k=0.0):
        pass
    (table,) = summarize(tmp_path).tables
    assert (table.touched_rows, table.stepped_rows, table.implausible_rows) == (0, 0, 0)
    assert table.updates is None
    assert table.weight_norms is None
    assert 0 <= table.disk_bytes < table.file_bytes + 4096


def test_weights_that_were_given_are_touched_but_not_stepped(tmp_path):
    weights = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)
    with build(tmp_path, {"entity": weights}, k=0.0):
        pass
    (table,) = summarize(tmp_path).tables
    assert (table.touched_rows, table.stepped_rows) == (100, 0)
    assert table.initializer is None
    assert table.weight_norms.maximum == pytest.approx(np.linalg.norm(weights, axis=1).max())


def test_blocks_that_hold_other_fields():
    """A table of weights alone, and one without stamps: every row counts."""
    for schema in (
        Schema(2, (Field("w", "float32", "element"),)),
        Schema(2, (Field("w", "float32", "element"), Field("t", "int32", "row"))),
    ):
        records = np.zeros(5, schema.dtype)
        records["w"] = 1.0
        content = TableContent(
            TableFacts("entity", 5, schema, ADAM), lambda records=records: iter([(0, records)])
        )
        (table,) = summarize(StateContent((content,))).tables
        assert table.touched_rows == 5
        assert table.weight_norms.count == 5
        assert table.first_moments is None
        assert table.second_moments is None
        assert table.file_bytes is None


def test_a_directory_without_state(tmp_path):
    with pytest.raises(StateNotFoundError, match="there is no state"):
        summarize(tmp_path)


def test_memory_does_not_grow_with_the_table(tmp_path):
    import tracemalloc

    def peak(rows):
        with build(tmp_path / str(rows), {"entity": init.Normal(rows, 16)}, k=0.0) as optimizer:
            optimizer.step({"entity": (np.arange(0, rows, 10), np.ones((rows // 10, 16), np.float32))})
        summarize(tmp_path / str(rows))
        tracemalloc.start()
        summarize(tmp_path / str(rows))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    assert peak(400_000) < 1.2 * peak(100_000)
