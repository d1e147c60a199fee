"""Plots: what is drawn is what was given, axes are labelled, and nothing is left behind."""

import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from small_states import build, train

from dsa import DiskSparseRiemannianAdam, init, plots
from dsa.inspection import open_state, summarize
from dsa.inspection.plots.sampling import touched_rows

RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _figures():
    yield
    pyplot.close("all")


@pytest.fixture
def state(path):
    with open_state(path) as state:
        yield state


def heights(axes):
    (patch,) = axes.patches
    return np.asarray(patch.get_data().values)


def saved(axes, tmp_path):
    axes.get_figure().savefig(tmp_path / "figure.png")
    return (tmp_path / "figure.png").stat().st_size


CASES = {
    "norms": lambda ax=None: plots.row_norms(RANDOM.normal(size=(500, 8)), ax=ax),
    "ball": lambda ax=None: plots.row_norms(RANDOM.normal(size=(500, 8)) / 20.0, k=1.0, ax=ax),
    "long tail": lambda ax=None: plots.row_norms(RANDOM.lognormal(0.0, 2.0, (500, 1)), ax=ax),
    "counts": lambda ax=None: plots.touch_counts(RANDOM.integers(0, 9, 500), ax=ax),
    "many counts": lambda ax=None: plots.touch_counts(RANDOM.zipf(1.5, 5000), ax=ax),
    "moments": lambda ax=None: plots.moment_scales(
        RANDOM.normal(size=(500, 8)), RANDOM.random((500, 8)), ax=ax
    ),
    "disk": lambda ax=None: plots.poincare_disk(RANDOM.uniform(-0.5, 0.5, (500, 2)), ax=ax),
    "loss": lambda ax=None: plots.loss(RANDOM.random(500), ax=ax),
    "log loss": lambda ax=None: plots.loss(RANDOM.random(500), log=True, label="run", ax=ax),
}


@pytest.mark.parametrize("case", CASES)
def test_new_axes_and_given_ones(tmp_path, case):
    before = dict(mpl.rcParams)
    fresh = CASES[case]()
    assert isinstance(fresh, Axes)
    assert len(pyplot.get_fignums()) == 1
    pyplot.close("all")
    _, (left, right) = pyplot.subplots(1, 2)
    assert CASES[case](left) is left
    assert not right.has_data()
    assert len(pyplot.get_fignums()) == 1
    assert saved(left, tmp_path) > 5_000
    assert dict(mpl.rcParams) == before
    if case != "disk":
        assert left.get_xlabel()
        assert left.get_ylabel()


def test_norms_of_an_array():
    weights = RANDOM.normal(size=(1000, 8))
    axes = plots.row_norms(weights, bins=20)
    counts, edges, _ = axes.patches[0].get_data()
    assert len(counts) <= 20
    np.testing.assert_array_equal(counts, np.histogram(np.linalg.norm(weights, axis=1), edges)[0])
    assert axes.get_title().startswith("1,000 rows, median 2.")
    assert axes.get_xlabel() == "Euclidean norm of a row"


def test_norms_on_a_ball_are_distances(state):
    weights = state["entity"].weights(np.flatnonzero(state["entity"]["s"]))
    for axes in (plots.row_norms(weights, k=1.0, bins=40), plots.row_norms(state["entity"])):
        assert heights(axes).sum() == len(weights)
        assert axes.get_xlabel() == "hyperbolic distance of a row from the centre"
        (above,) = axes.child_axes
        assert above.get_xlabel() == "norm as a part of the radius"
    with pytest.raises(ValueError, match=r"row 0 has norm 2, outside the ball of k=1\.0"):
        plots.row_norms(np.array([[2.0, 0.0]]), k=1.0)


def test_a_table_and_its_summary_give_the_same(state):
    summary = {table.name: table for table in summarize(state).tables}
    for name in ("entity", "flat"):
        for plot in (plots.row_norms, plots.touch_counts):
            np.testing.assert_array_equal(heights(plot(state[name])), heights(plot(summary[name])))
            assert plot(state[name]).get_title().startswith(f"{name}: ")


def test_counts(state):
    counters = state["entity"]["t"]
    axes = plots.touch_counts(counters)
    assert heights(axes).sum() == np.count_nonzero(counters)
    assert axes.get_title().startswith(f"{np.count_nonzero(counters)} of 300 rows, median ")
    assert axes.get_xlabel() == "updates of a row"
    wide = plots.touch_counts(np.append(np.ones(900, int), RANDOM.integers(1, 1000, 100)))
    assert wide.get_xscale() == "log"
    assert wide.get_yscale() == "log"


def test_moments_are_corrected_for_their_start():
    """A row whose gradients are all the same lies on the diagonal, however young it is."""
    gradients = RANDOM.lognormal(0.0, 2.0, (200, 1)) * np.ones((1, 4))
    counts = RANDOM.integers(1, 50, 200)
    m = gradients * -np.expm1(counts * np.log(0.9))[:, None]
    v = gradients**2 * -np.expm1(counts * np.log(0.999))[:, None]
    axes = plots.moment_scales(m, v, counts=counts)
    decades = axes.collections[0].get_offsets()
    np.testing.assert_allclose(decades[:, 0], decades[:, 1], atol=0.1)
    assert np.sum(axes.collections[0].get_array()) == 200
    assert axes.get_xscale() == axes.get_yscale() == "log"


@pytest.mark.parametrize("second_moment", ["coordinate", "row"])
def test_moments_of_a_table(tmp_path, second_moment):
    with build(tmp_path, second_moment=second_moment) as optimizer, open_state(tmp_path) as state:
        train(optimizer, 3)
        axes = plots.moment_scales(state["entity"])
        stepped = np.count_nonzero(state["entity"]["t"])
        assert np.sum(axes.collections[0].get_array()) == stepped
        assert axes.get_title() == f"entity: a sample of {stepped} rows"


def test_losses():
    values = np.concatenate([np.linspace(1.0, 0.1, 200), [np.nan, np.inf], np.full(50, 0.1)])
    axes = plots.loss(values, label="first")
    faint, bold = axes.lines
    assert len(faint.get_xdata()) == len(bold.get_xdata()) == 250
    assert bold.get_xdata()[-1] == 252
    assert bold.get_ydata()[-1] == pytest.approx(0.1, abs=0.01)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss")
    plots.loss(3.0 * np.nan_to_num(values, posinf=1.0), label="second", ax=axes)
    assert len({line.get_color() for line in axes.lines}) == 2
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["first", "second"]
    assert axes.get_ylim()[1] > 2.9


def test_running_means():
    values = RANDOM.random(300)
    axes = plots.loss(values, smoothing=10.0)
    weights = 0.5 ** (np.arange(300)[::-1] / 10.0)
    assert axes.lines[1].get_ydata()[-1] == pytest.approx(np.average(values, weights=weights))
    alone = plots.loss(values, smoothing=0.0, steps=np.arange(300) * 5)
    (line,) = alone.lines
    np.testing.assert_array_equal(line.get_ydata(), values)
    assert line.get_xdata()[-1] == 1495
    assert len(plots.loss(RANDOM.random(100_000)).lines[0].get_xdata()) <= 25_000


def test_a_spike_does_not_flatten_the_curve():
    values = np.append(np.linspace(1.0, 0.1, 1000), 1e6)
    assert plots.loss(values).get_ylim()[1] < 10.0


def test_a_run_that_has_not_begun(tmp_path):
    assert saved(plots.loss([]), tmp_path)
    assert saved(plots.loss([0.5], log=True), tmp_path)
    assert saved(plots.loss([0.0, 0.0], log=True), tmp_path)


@pytest.mark.parametrize(
    ("draw", "match"),
    [
        (
            lambda state: plots.touch_counts(np.zeros(5, int)),
            "no row was ever updated, so that",
        ),
        (lambda state: plots.row_norms(np.zeros((0, 3))), "there is nothing to draw"),
        (lambda state: plots.moment_scales(np.zeros((3, 2)), np.zeros((3, 2))), "no row has moments"),
        (lambda state: plots.moment_scales(np.zeros((3, 2))), "without second ones: pass v, or a table"),
        (lambda state: plots.loss([1.0, 2.0], steps=[1]), r"\(1,\) steps don't fit losses of shape \(2,\)"),
        (lambda state: plots.loss([1.0], smoothing=-1.0), "smoothing=-1.0 is out of range"),
    ],
)
def test_what_cannot_be_drawn(state, draw, match):
    with pytest.raises(ValueError, match=match):
        draw(state)


def test_samples_of_large_tables(tmp_path):
    tables = {"big": init.Zeros(300_000, 2)}
    with build(tmp_path, tables, k=0.0) as optimizer, open_state(tmp_path) as state:
        rows = np.arange(0, 300_000, 3)
        optimizer.step({"big": (rows, np.ones((len(rows), 2), np.float32))})
        found = touched_rows(state["big"], 5_000)
        assert len(found) == 5_000
        assert (np.diff(found) > 0).all()
        assert (found % 3 == 0).all()
        assert found[0] < 1_000
        assert found[-1] > 299_000
        some = touched_rows(state["big"], 1_000_000)
        assert 0.3 < len(some) / 100_000 < 0.37


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in CASES.values():
        with pytest.raises(ImportError, match=r"plots need matplotlib.*pip install matplotlib"):
            draw()


def test_what_is_heavy_is_imported_when_it_is_needed():
    code = (
        "import sys, dsa, dsa.inspection.plots;"
        "print([name for name in ('matplotlib', 'xarray', 'rich', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("second_moment", ["row", "frame", "coordinate"])
@pytest.mark.parametrize("k", [0.0, 1.0])
def test_moments_of_one_steady_gradient_lie_on_the_diagonal(tmp_path, second_moment, k):
    """After the first step both corrected moments are the gradient, whatever the units."""
    weights = np.random.default_rng(0).standard_normal((40, 5)).astype(np.float32) * 0.1
    with DiskSparseRiemannianAdam(
        {"entity": weights}, lr=1e-6, k=k, disk_dir=tmp_path / "s", second_moment=second_moment
    ) as optimizer:
        grad = np.random.default_rng(1).standard_normal((40, 5)).astype(np.float32)
        optimizer.step({"entity": (np.arange(40), grad)})
    with open_state(tmp_path / "s") as state:
        axes = plots.moment_scales(state["entity"])
        first, second = axes.collections[0].get_offsets().T[::-1]
        np.testing.assert_allclose(first, second, rtol=0, atol=0.03)  # decades, on a hexagonal grid
    pyplot.close(axes.figure)
