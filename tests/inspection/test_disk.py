"""The Poincaré disk: geodesics, projections, names, and what is drawn."""

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import to_rgba
from small_states import build, train

from dsa import init, plots
from dsa.inspection import open_state
from dsa.inspection.plots import disk
from dsa.inspection.plots.style import COLOURS, GREY
from dsa.rules.manifolds import PoincareBall


@pytest.fixture(autouse=True)
def _figures():
    yield
    pyplot.close("all")


def disk_points(count, seed=0):
    random = np.random.default_rng(seed)
    angle = random.uniform(0.0, 2 * np.pi, count)
    radius = np.sqrt(random.uniform(0.0, 0.999, count))
    return np.column_stack([radius * np.cos(angle), radius * np.sin(angle)])


def test_arcs_are_geodesics():
    """The distances of a point of a geodesic to both of its ends add up to that of the ends."""
    start, end = disk_points(50), disk_points(50, seed=1)
    arcs = disk.geodesics(start, end, count=9)
    assert arcs[:, 0] == pytest.approx(start)
    assert arcs[:, -1] == pytest.approx(end)
    ball = PoincareBall(1.0)
    whole = ball.dist(start, end).ravel()
    for point in range(9):
        parts = ball.dist(start, arcs[:, point]).ravel() + ball.dist(arcs[:, point], end).ravel()
        assert parts == pytest.approx(whole, rel=1e-7)


def test_arcs_through_the_centre_and_of_no_length():
    start = np.array([[0.5, 0.0], [0.2, 0.1], [0.0, 0.0]])
    end = np.array([[-0.5, 0.0], [0.2, 0.1], [0.0, 0.9]])
    arcs = disk.geodesics(start, end, count=3)
    assert arcs[0] == pytest.approx(np.array([[0.5, 0.0], [0.0, 0.0], [-0.5, 0.0]]), abs=1e-12)
    assert arcs[1] == pytest.approx(np.tile([0.2, 0.1], (3, 1)))
    assert arcs[2] == pytest.approx(np.array([[0.0, 0.0], [0.0, 0.45], [0.0, 0.9]]))


def test_arcs_are_evenly_spaced():
    arcs = disk.geodesics(disk_points(50), disk_points(50, seed=1), count=7)
    steps = np.linalg.norm(np.diff(arcs, axis=1), axis=-1)
    assert steps == pytest.approx(np.repeat(steps[:, :1], 6, axis=1))


@pytest.mark.parametrize("dim", [1, 2, 3, 10])
def test_projection_keeps_the_distance_to_the_centre(dim):
    points = np.random.default_rng(dim).normal(size=(30, dim)) / (3 * dim)
    points[0] = 0.0
    flat = disk.flatten(points)
    assert flat.shape == (30, 2)
    assert np.linalg.norm(flat, axis=1) == pytest.approx(np.linalg.norm(points, axis=1))


def test_projection_finds_the_plane_that_points_lie_in():
    plane = disk_points(40) / 2
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 2)))[0]
    flat = disk.flatten(plane @ basis.T)
    angles = np.abs(flat @ flat.T)
    assert angles == pytest.approx(np.abs(plane @ plane.T), abs=1e-9)


def drawn(axes, kind):
    (found,) = [each for each in axes.collections if isinstance(each, kind)]
    return found


def test_points_are_drawn_where_they_are():
    points = disk_points(30) / 2.0
    axes = plots.poincare_disk(points, k=4.0)
    np.testing.assert_allclose(drawn(axes, PathCollection).get_offsets(), 2.0 * points)
    assert axes.get_title() == "30 points in the Poincaré disk"
    axes = plots.poincare_disk(points)
    np.testing.assert_allclose(drawn(axes, PathCollection).get_offsets(), points)


def test_groups_edges_sizes():
    points = disk_points(4)
    groups = np.array([0, 1, -1, 8])
    axes = plots.poincare_disk(
        points, edges=np.array([[1, 0], [2, 3]]), groups=groups, sizes=np.array([1.0, 2.0, 3.0, 4.0])
    )
    dots, arcs = drawn(axes, PathCollection), drawn(axes, LineCollection)
    assert [tuple(c) for c in dots.get_facecolors()] == [
        to_rgba(c) for c in (COLOURS[0], COLOURS[1], GREY, COLOURS[0])
    ]
    assert dots.get_sizes().tolist() == [1.0, 2.0, 3.0, 4.0]
    assert [tuple(c[:3]) for c in arcs.get_colors()] == [to_rgba(c)[:3] for c in (COLOURS[1], GREY)]
    for segment, (first, last) in zip(arcs.get_segments(), [(1, 0), (2, 3)], strict=True):
        np.testing.assert_allclose(segment[[0, -1]], points[[first, last]], atol=1e-12)


def test_names_find_free_places_inside_the_figure():
    points = np.vstack([disk_points(60), [[0.1, 0.1]] * 30])
    axes = plots.poincare_disk(points, names={number: f"name {number}" for number in range(90)})
    boxes = [label.get_window_extent() for label in axes.texts]
    assert 5 < len(boxes) <= 40
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    frame = axes.get_figure().bbox
    assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 for box in boxes)
    assert axes.texts[0].get_text() == "name 0"


def test_points_outside_the_ball_are_refused():
    with pytest.raises(ValueError, match=r"point 1 has 1\.5 times the radius of the ball: pass the k"):
        plots.poincare_disk(np.array([[0.0, 0.0], [1.5, 0.0]]))
    with pytest.raises(ValueError, match="point 0 has nan"):
        plots.poincare_disk(np.array([[np.nan, 0.0]]))


def test_a_table(tmp_path):
    with build(tmp_path) as optimizer, open_state(tmp_path) as state:
        train(optimizer, 2)
        entity = state["entity"]
        touched = np.flatnonzero(entity["s"])
        axes = plots.poincare_disk(entity)
        assert len(drawn(axes, PathCollection).get_offsets()) == len(touched)
        assert axes.get_title().splitlines() == [
            f"{len(touched)} rows of entity (of 300) in the Poincaré disk",
            "4 dimensions: distances to the centre are true, angles are projected",
        ]
        rows = np.array([7, 3])
        axes = plots.poincare_disk(entity, rows=rows, edges=np.array([[0, 1]]))
        lengths = np.linalg.norm(drawn(axes, PathCollection).get_offsets(), axis=1)
        np.testing.assert_allclose(lengths, np.linalg.norm(entity.weights(rows), axis=1), rtol=1e-6)
        with pytest.raises(ValueError, match="table 'flat' is flat and lies in no ball: pass"):
            plots.poincare_disk(state["flat"])


def test_a_table_that_nothing_was_done_to(tmp_path):
    with build(tmp_path, {"entity": init.Zeros(5, 2)}, k=1.0), open_state(tmp_path) as state:
        axes = plots.poincare_disk(state["entity"])
        assert axes.get_title() == "0 rows of entity (of 5) in the Poincaré disk"
