"""Changing the curvature: what becomes of weights, moments and counters."""

import math

import numpy as np
import pytest
import torch
from current_files import table_file

from dsa import DiskSparseRiemannianAdam, init
from dsa.errors import StateWarning
from dsa.rules.adam import adam_rule
from dsa.rules.curvature import map_weights, recurve
from dsa.rules.manifolds import BALL_EPS, manifold_of
from dsa.schema import adam_schema

ROWS, DIM = 8, 3
CURVATURES = [0.0, 1e-4, 0.37, 1.0, 4.0]
MODES = ["coordinate", "frame", "row"]
PAIRS = [(a, b) for a in CURVATURES for b in CURVATURES if a != b]


def points(limit, seed=0):
    """Rows of norm up to `limit`, the origin among them."""
    generator = np.random.default_rng(seed)
    directions = generator.standard_normal((ROWS, DIM))
    norms = np.linspace(0.0, limit, ROWS)[:, None]
    return (directions / np.linalg.norm(directions, axis=1, keepdims=True) * norms).astype(np.float32)


def records_at(weights, seed=0, per="element"):
    generator = np.random.default_rng(seed)
    records = np.zeros(len(weights), adam_schema(DIM, second_moment_per=per).dtype)
    records["w"] = weights
    records["m"] = generator.standard_normal(records["m"].shape)
    records["v"] = generator.random(records["v"].shape)
    records["t"] = np.arange(len(weights)) + 1
    records["s"] = 5
    return records


def build(path, tables=None, **options):
    return DiskSparseRiemannianAdam(
        tables or {"entity": torch.from_numpy(points(0.2))}, disk_dir=path, **options
    )


def stored(path, dim=DIM, rows=ROWS, mode="coordinate", name="entity"):
    dtype = adam_schema(dim, second_moment_per="row" if mode == "row" else "element").dtype
    raw = np.fromfile(table_file(path, name), np.uint8, offset=4096).reshape(rows, -1)
    return raw[:, : dtype.itemsize].copy().view(dtype).reshape(-1)


def norms(weights):
    return np.linalg.norm(np.asarray(weights, np.float64), axis=1)


# ---------------------------------------------------------------- the formulas


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_moments_are_those_that_the_new_curvature_would_have_gathered(tmp_path, old, new, mode):
    """With lr = 0 the rows stay, so that the moving averages of both curvatures can be compared."""
    gradients = np.random.default_rng(3).standard_normal((6, ROWS, DIM)).astype(np.float32)
    weights = torch.from_numpy(points(0.2))
    options = {"lr": 0.0, "second_moment": mode, "init_max_norm_fraction": 1.0}
    with build(tmp_path / "changed", {"entity": weights}, k=old, **options) as optimizer:
        for grad in gradients:
            optimizer.step({"entity": (range(ROWS), grad)})
        optimizer.set_curvature(new, name="entity")
    with build(tmp_path / "from the start", {"entity": weights}, k=new, **options) as optimizer:
        for grad in gradients:
            optimizer.step({"entity": (range(ROWS), grad)})
    changed, expected = (stored(tmp_path / path, mode=mode) for path in ("changed", "from the start"))
    for field in ("w", "m", "v"):
        np.testing.assert_allclose(changed[field], expected[field], rtol=3e-6, err_msg=field)
    assert changed["t"].tolist() == expected["t"].tolist() == [6] * ROWS


@pytest.mark.parametrize("mapping", ["clip", "log0"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("old", "new"), [(1.0, 0.37), (1.0, 4.0), (0.0, 1.0), (1.0, 0.0)])
def test_moments_scale_as_covectors(old, new, mode, mapping):
    per = "row" if mode == "row" else "element"
    before = records_at(points(0.3), per=per)
    after = recurve(before, manifold_of(old), manifold_of(new), adam_rule(mode), mapping, False)
    there, here = (before["w"].astype(np.float64), after["w"].astype(np.float64))
    ratio = (manifold_of(old).scale(there) / manifold_of(new).scale(here)) ** 2
    np.testing.assert_allclose(after["m"], before["m"] * ratio, rtol=1e-5)
    if mode == "coordinate":
        np.testing.assert_allclose(after["v"], before["v"] * ratio**2, rtol=1e-5)
    elif mode == "frame":
        np.testing.assert_allclose(after["v"], before["v"] * ratio, rtol=1e-5)
    else:
        dims = (DIM if old == 0.0 else 1) / (DIM if new == 0.0 else 1)
        np.testing.assert_allclose(after["v"], before["v"] * ratio[:, 0] * dims, rtol=1e-5)
    assert (after["v"] >= 0).all()
    assert after["t"].tolist() == before["t"].tolist()


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_clip_keeps_the_coordinates_that_fit(old, new):
    radius = (1.0 - BALL_EPS) / math.sqrt(max(old, new, 1e-9))
    inside = points(min(0.9 * radius, 2.0)).astype(np.float64)
    np.testing.assert_array_equal(map_weights(inside, manifold_of(old), manifold_of(new), "clip"), inside)


@pytest.mark.parametrize(("old", "new"), [(1.0, 4.0), (0.0, 1.0), (0.37, 1.0)])
def test_clip_brings_the_rest_to_the_edge(old, new):
    radius = 1.0 / math.sqrt(new)
    outside = points(1.5 * radius).astype(np.float64)
    clipped = map_weights(outside, manifold_of(old), manifold_of(new), "clip")
    assert norms(clipped).max() < radius
    cosines = np.sum(clipped * outside, axis=1)[1:] / (norms(clipped) * norms(outside))[1:]
    np.testing.assert_allclose(cosines, 1.0, rtol=1e-12)
    far = norms(outside) > radius
    np.testing.assert_allclose(norms(clipped)[far], (1.0 - BALL_EPS) * radius, rtol=1e-9)


@pytest.mark.parametrize(("old", "new"), [pair for pair in PAIRS if 0.0 not in pair])
def test_log0_keeps_the_distance_to_the_origin(old, new):
    x = points(min(0.9 / math.sqrt(old), 2.0)).astype(np.float64)
    y = map_weights(x, manifold_of(old), manifold_of(new), "log0")
    origin = np.zeros_like(x)
    np.testing.assert_allclose(manifold_of(new).dist(origin, y), manifold_of(old).dist(origin, x), rtol=1e-9)
    np.testing.assert_allclose(
        map_weights(y, manifold_of(new), manifold_of(old), "log0"), x, rtol=1e-9, atol=1e-15
    )


@pytest.mark.parametrize("k", [1e-4, 1.0, 4.0])
def test_log0_between_a_ball_and_flat_space(k):
    """A length in flat space is one at the origin of the ball, whose metric doubles the coordinates."""
    x = points(0.9 / math.sqrt(k)).astype(np.float64)
    origin = np.zeros_like(x)
    flat = map_weights(x, manifold_of(k), manifold_of(0.0), "log0")
    np.testing.assert_allclose(norms(flat), manifold_of(k).dist(origin, x), rtol=1e-9)
    np.testing.assert_allclose(
        map_weights(flat, manifold_of(0.0), manifold_of(k), "log0"), x, rtol=1e-9, atol=1e-15
    )


def test_recurve_leaves_its_input():
    before = records_at(points(0.3))
    copy = before.copy()
    recurve(before, manifold_of(1.0), manifold_of(4.0), adam_rule("coordinate"), "clip", True)
    assert before.tobytes() == copy.tobytes()


# ---------------------------------------------------------------- through the optimizer


def test_c56_after_the_change_every_row_is_inside(tmp_path):
    weights = torch.tensor([[0.8, 0.0], [0.0, -0.1]])
    build(tmp_path, {"entity": weights}, k=1.0, init_max_norm_fraction=1.0).close()
    for asked in (4.0, 0.0):
        with pytest.warns(
            StateWarning, match=rf"stored with k=1\.0, .* k={asked} .* set_curvature\({asked}\)"
        ):
            build(tmp_path, {"entity": weights}, k=asked, resume=True).close()
    with pytest.warns(StateWarning, match="set_curvature"):
        optimizer = build(tmp_path, {"entity": weights}, k=4.0, resume=True)
    assert optimizer.read_rows([0, 1]).tolist() == weights.tolist()
    optimizer.set_curvature(4.0)
    rows = optimizer.read_rows([0, 1])
    assert norms(rows).max() < 0.5
    assert rows[1].tolist() == weights[1].tolist()
    assert rows[0].tolist() == pytest.approx([0.5, 0.0], rel=1e-4)
    optimizer.close()
    build(tmp_path, {"entity": weights}, k=4.0, resume=True).close()
    assert norms(stored(tmp_path, dim=2, rows=2)["w"]).max() < 0.5


def test_the_change_is_kept_and_told(tmp_path):
    with build(tmp_path, k=1.0) as optimizer:
        optimizer.step({"entity": ([1], np.ones((1, DIM), np.float32))})
        optimizer.set_curvature(0.25)
        assert "k=0.25;" in repr(optimizer)
        assert optimizer.global_step == 1
    with build(tmp_path, k=0.25, resume=True) as optimizer:
        assert "k=0.25;" in repr(optimizer)
        assert optimizer.global_step == 1
        optimizer.step({"entity": ([1], np.ones((1, DIM), np.float32))})


@pytest.mark.parametrize("value", [2.0, 2, torch.tensor(2.0), np.float32(2.0), {"entity": 2.0}])
def test_the_kinds_of_number(tmp_path, value):
    with build(tmp_path, k=1.0) as optimizer:
        optimizer.set_curvature(value)
        assert "k=2;" in repr(optimizer)


def test_reset_moments(tmp_path):
    with build(tmp_path, k=1.0) as optimizer:
        for _ in range(3):
            optimizer.step({"entity": (range(ROWS), np.ones((ROWS, DIM), np.float32))})
        before = optimizer.read_rows(range(ROWS))
        optimizer.set_curvature(1.0, reset_moments=True)
        assert torch.equal(optimizer.read_rows(range(ROWS)), before)
    records = stored(tmp_path)
    assert not records["m"].any()
    assert not records["v"].any()
    assert not records["t"].any()
    assert records["s"].all()


def test_the_same_curvature_changes_nothing(tmp_path):
    with build(tmp_path, k=1.0) as optimizer:
        optimizer.step({"entity": (range(ROWS), np.ones((ROWS, DIM), np.float32))})
        optimizer.flush()
        before = stored(tmp_path).tobytes()
        optimizer.set_curvature(1.0)
        optimizer.set_curvature({"entity": 1.0}, map="log0")
        optimizer.step({}, current_k=1.0)
        optimizer.flush()
        assert stored(tmp_path).tobytes() == before


def test_untouched_rows_start_in_the_new_space(tmp_path):
    """They are drawn when they are first met, and clipped to the ball that there is then."""
    tables = {"entity": init.Normal(ROWS, DIM, std=3.0, seed=1)}
    with build(tmp_path / "changed", tables, k=1.0) as optimizer:
        optimizer.step({"entity": ([2], np.zeros((1, DIM), np.float32))})
        optimizer.set_curvature(25.0)
        assert norms(optimizer.read_rows(range(ROWS))).max() < 0.2
        changed = optimizer.read_rows([0, 1, 3, 4])
    assert stored(tmp_path / "changed")["s"].astype(bool).tolist() == [row == 2 for row in range(ROWS)]
    with build(tmp_path / "fresh", tables, k=25.0) as optimizer:
        assert torch.equal(optimizer.read_rows([0, 1, 3, 4]), changed)


def test_the_step_after_a_change_is_one_of_the_new_curvature(tmp_path):
    """`current_k` is `set_curvature` and a step."""
    batch = {"entity": ([1, 5], np.ones((2, DIM), np.float32))}
    with build(tmp_path / "one", k=1.0) as optimizer:
        optimizer.step(batch)
        optimizer.set_curvature(2.0)
        optimizer.step(batch)
    with build(tmp_path / "two", k=1.0) as optimizer:
        optimizer.step(batch)
        optimizer.step(batch, current_k=torch.tensor(2.0))
    assert stored(tmp_path / "one").tobytes() == stored(tmp_path / "two").tobytes()


def test_a_schedule_of_curvatures(tmp_path):
    with build(tmp_path, k=1.0, lr=0.05) as optimizer:
        for step, k in enumerate(np.linspace(1.0, 3.0, 15)):
            grad = np.random.default_rng(step).standard_normal((ROWS, DIM))
            optimizer.step({"entity": (range(ROWS), grad)}, current_k=k)
            assert norms(optimizer.read_rows(range(ROWS))).max() < 1.0 / math.sqrt(k)
        assert "k=3;" in repr(optimizer)


def several(path):
    tables = {name: torch.from_numpy(points(0.3)) for name in ("flat", "ball", "other")}
    return build(path, tables, k={"flat": 0.0, "ball": 1.0, "other": 2.0})


def test_a_number_goes_to_every_ball(tmp_path):
    with several(tmp_path) as optimizer:
        optimizer.set_curvature(0.5)
        assert "flat: 8 x 3, k=0, ball: 8 x 3, k=0.5, other: 8 x 3, k=0.5" in repr(optimizer)
        optimizer.step({}, current_k=0.25)
        assert "flat: 8 x 3, k=0, ball: 8 x 3, k=0.25, other: 8 x 3, k=0.25" in repr(optimizer)


def test_a_name_or_a_dictionary_chooses(tmp_path):
    with several(tmp_path) as optimizer:
        optimizer.set_curvature(0.5, name="flat")
        optimizer.set_curvature({"ball": 0.0, "other": 3.0})
        assert "flat: 8 x 3, k=0.5, ball: 8 x 3, k=0, other: 8 x 3, k=3" in repr(optimizer)


def test_a_table_becomes_flat_and_curved_again(tmp_path):
    with build(tmp_path, k=1.0) as optimizer:
        before = optimizer.read_rows(range(ROWS))
        optimizer.set_curvature(0.0)
        optimizer.step({"entity": ([0], np.zeros((1, DIM), np.float32))})
        optimizer.set_curvature(1.0)
        torch.testing.assert_close(optimizer.read_rows(range(ROWS)), before)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((-1.0,), {}, ValueError, "k=-1.0"),
        ((math.nan,), {}, ValueError, "k=nan"),
        ((math.inf,), {}, ValueError, "k=inf"),
        (({"ball": 1.0, "other": -1.0},), {}, ValueError, "k=-1.0"),
        (({"x": 1.0},), {}, KeyError, "no table 'x'"),
        ((1.0,), {"name": "x"}, KeyError, "no table 'x'"),
        (({"ball": 1.0},), {"name": "ball"}, ValueError, "both name='ball' and a dict"),
        ((1.0,), {"map": "exp0"}, ValueError, "map='exp0' is not known: use 'clip' or 'log0'"),
        ((None,), {}, TypeError, None),
    ],
)
def test_what_is_refused_changes_nothing(tmp_path, arguments, options, error, match):
    with several(tmp_path) as optimizer:
        with pytest.raises(error, match=match):
            optimizer.set_curvature(*arguments, **options)
        assert "flat: 8 x 3, k=0, ball: 8 x 3, k=1, other: 8 x 3, k=2" in repr(optimizer)


def test_an_empty_dictionary_is_no_wish(tmp_path):
    with several(tmp_path) as optimizer:
        optimizer.set_curvature({})
        assert "flat: 8 x 3, k=0, ball: 8 x 3, k=1, other: 8 x 3, k=2" in repr(optimizer)


def test_several_flat_tables_have_to_be_named(tmp_path):
    with build(tmp_path, [init.Zeros(3, 2)] * 2, k=0.0) as optimizer:
        with pytest.raises(ValueError, match=r"every table is flat, .* pass name="):
            optimizer.set_curvature(1.0)
        with pytest.raises(ValueError, match="every table is flat"):
            optimizer.step({"param_0": ([1], np.ones((1, 2), np.float32))}, current_k=1.0)
        assert optimizer.global_step == 0
        assert not optimizer.read_rows([1], "param_0").any()


@pytest.mark.parametrize("k", [1e-12, 1e-6, 1e4, 1e8])
def test_extreme_curvatures(tmp_path, k):
    with build(tmp_path, k=1.0) as optimizer:
        for _ in range(2):
            optimizer.step({"entity": (range(ROWS), np.ones((ROWS, DIM), np.float32))})
        optimizer.set_curvature(k)
        optimizer.step({"entity": (range(ROWS), np.ones((ROWS, DIM), np.float32))})
        rows = optimizer.read_rows(range(ROWS))
        assert torch.isfinite(rows).all()
        assert norms(rows).max() < 1.0 / math.sqrt(k)


def test_resetting_moments_leaves_rows_to_their_ids(tmp_path):
    with build(tmp_path, {"entity": init.Uniform(None, DIM, -0.1, 0.1)}, k=1.0, lr=0.1) as optimizer:
        optimizer.step({"entity": ([7, -2], np.ones((2, DIM), np.float32))})
        before = optimizer.read_rows([7, -2])
        optimizer.set_curvature(0.5, reset_moments=True)
        assert torch.equal(optimizer.read_rows([7, -2]), before)
    with build(tmp_path, {"entity": init.Uniform(None, DIM, -0.1, 0.1)}, k=0.5, resume=True) as optimizer:
        assert sorted(optimizer.ids()) == [-2, 7]
