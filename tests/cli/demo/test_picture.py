import struct
import sys

import numpy as np
import pytest

from dsa.cli.demo import picture
from dsa.cli.demo.graph import EdgeList, build_graph, parse_edges, read_mammals


def disk_points(count, seed=0):
    random = np.random.default_rng(seed)
    angle = random.uniform(0.0, 2 * np.pi, count)
    radius = np.sqrt(random.uniform(0.0, 0.999, count))
    return np.column_stack([radius * np.cos(angle), radius * np.sin(angle)])


def test_the_nearest_ancestor_is_the_deepest():
    graph = build_graph(parse_edges(["c\ta", "c\tb", "b\ta", "d\ta"]))
    found = {graph.names[u]: graph.names[v] for u, v in enumerate(picture.nearest_ancestors(graph)) if v >= 0}
    assert found == {"c": "b", "b": "a", "d": "a"}


def test_branches_are_large_unrelated_and_keep_their_descendants():
    graph = build_graph(read_mammals())
    branch = picture.branches(graph)
    of = {
        name: branch[graph.names.index(name)]
        for name in ("carnivore.n.01", "dog.n.01", "rodent.n.01", "mammal.n.01")
    }
    assert of["carnivore.n.01"] == of["dog.n.01"] != of["rodent.n.01"]
    assert of["mammal.n.01"] == -1
    assert set(branch.tolist()) == set(range(-1, 8))


def size_of_png(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_a_picture_is_written_and_leaves_no_trace(tmp_path, tree, dim):
    import matplotlib

    before = dict(matplotlib.rcParams)
    points = np.random.default_rng(0).normal(size=(len(tree), dim))
    points *= 0.2 / np.linalg.norm(points, axis=1, keepdims=True)
    picture.draw(tree, points, 4.0, tmp_path / "ball.png")
    width, height = size_of_png(tmp_path / "ball.png")
    assert width > height > 1000
    assert dict(matplotlib.rcParams) == before
    assert "matplotlib.pyplot" not in sys.modules or not matplotlib.pyplot.get_fignums()


def test_two_nodes_on_one_spot_and_names_that_are_markup(tmp_path):
    names = ("a$b_{$", "root", "x" * 300)
    graph = build_graph(EdgeList(names, np.array([0, 2]), np.array([1, 0])))
    picture.draw(graph, np.zeros((3, 2)), 1.0, tmp_path / "ball.png")
    assert size_of_png(tmp_path / "ball.png")[0] > 1000


def test_names_do_not_lie_on_each_other(tmp_path, monkeypatch):
    axes = []
    original = picture.draw_names
    monkeypatch.setattr(picture, "draw_names", lambda *given: (axes.append(given[0]), original(*given)))
    graph = build_graph(read_mammals())
    picture.draw(graph, disk_points(len(graph)), 1.0, tmp_path / "ball.png")
    boxes = [label.get_window_extent() for label in axes[0].texts]
    assert len(boxes) > 20
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_a_large_graph_is_drawn_in_part(tmp_path, monkeypatch, tree):
    monkeypatch.setattr(picture, "_MOST_NODES", 10)
    titles = []
    monkeypatch.setattr("matplotlib.axes.Axes.set_title", lambda self, text, **options: titles.append(text))
    picture.draw(tree, disk_points(len(tree)), 1.0, tmp_path / "ball.png")
    assert "the 10 nodes with the most descendants are drawn" in titles[0]
