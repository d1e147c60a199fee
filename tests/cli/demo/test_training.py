import numpy as np
import pytest

from dsa.cli.demo.directory import Run, load_run, save_run
from dsa.cli.demo.graph import build_graph, read_mammals
from dsa.cli.demo.metrics import reconstruction
from dsa.cli.demo.settings import default_settings
from dsa.cli.demo.training import open_table, read_positions, train

MODES = ["row", "frame", "coordinate"]


def new_run(graph, **given):
    settings = default_settings(graph.edges, {"dim": 4, "epochs": 6, "batch_size": 16, "pool": 20, **given})
    return Run(settings, graph.fingerprint())


class StopAfter:
    """Says stop once it has been asked a number of times."""

    def __init__(self, steps):
        self.left = steps

    def __call__(self):
        self.left -= 1
        return self.left <= 0


def trained(graph, run, directory, resume=None, stop=lambda: False):
    with open_table(graph, run, directory, resume) as optimizer:
        if not resume:
            save_run(directory, run)
        outcome = train(graph, run, directory, optimizer, stop=stop)
        return outcome, read_positions(optimizer, len(graph))


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_falls(tmp_path, tree, mode):
    run = new_run(tree, second_moment=mode, epochs=60)
    losses = []
    with open_table(tree, run, tmp_path, None) as optimizer:
        outcome = train(
            tree, run, tmp_path, optimizer, on_step=lambda epoch, loss: losses.append((epoch, loss))
        )
        points = read_positions(optimizer, len(tree))
    last = np.mean([loss for epoch, loss in losses if epoch == 59])
    assert outcome == (len(losses), True, pytest.approx(last))
    first_after_burn_in = np.mean([loss for epoch, loss in losses if epoch == run.settings.burn_in])
    assert last < 0.25 * first_after_burn_in
    assert reconstruction(tree, points, 1.0).mean_average_precision > 0.9


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", [1, 7, 8, 25])
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path, tree, mode, first):
    """An epoch has 7 or 8 batches; the interruptions fall inside of epochs and between them."""
    run = new_run(tree, second_moment=mode)
    _, whole = trained(tree, run, tmp_path / "whole")
    (tmp_path / "parts").mkdir()
    outcome, _ = trained(tree, run, tmp_path / "parts", stop=StopAfter(first))
    assert (outcome.steps, outcome.finished) == (first, False)
    outcome, points = trained(tree, load_run(tmp_path / "parts", tree, {}), tmp_path / "parts", resume=True)
    assert outcome.finished
    assert points.tobytes() == whole.tobytes()


def test_a_finished_run_takes_no_further_step(tmp_path, tree):
    run = new_run(tree)
    outcome, points = trained(tree, run, tmp_path)
    again, same = trained(tree, load_run(tmp_path, tree, {}), tmp_path, resume=True)
    assert again == outcome
    assert same.tobytes() == points.tobytes()


def test_another_seed_is_another_run(tmp_path, tree):
    points = [trained(tree, new_run(tree, seed=seed), tmp_path / str(seed))[1] for seed in (1, 2)]
    assert not np.allclose(*points)


class Spy:
    """Stands before the optimizer and notes which rows are asked for."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.read, self.written = [], []

    @property
    def global_step(self):
        return self._optimizer.global_step

    def read_rows(self, rows):
        self.read.append(rows)
        return self._optimizer.read_rows(rows)

    def step(self, updates):
        self.written.append(updates["nodes"][0])
        self._optimizer.step(updates)

    def flush(self):
        self._optimizer.flush()


def test_a_step_touches_its_batch_only(tmp_path, tree):
    run = new_run(tree, batch_size=4, pool=5, epochs=2)
    with open_table(tree, run, tmp_path, None) as optimizer:
        spy = Spy(optimizer)
        train(tree, run, tmp_path, spy)
    assert len(spy.read) == len(spy.written) == spy.global_step
    for read, written in zip(spy.read, spy.written, strict=True):
        assert read.tolist() == written.tolist()
        assert len(read) <= 4 + 4 + 5


def test_a_ball_of_another_curvature_is_the_same_picture(tmp_path, tree):
    """Positions start within 1e-3 of the origin in units of the radius."""
    for k in (1.0, 100.0):
        with open_table(tree, new_run(tree, k=k), tmp_path / str(k), None) as optimizer:
            points = np.sqrt(k) * read_positions(optimizer, len(tree))
        assert 0.5e-3 < np.abs(points).max() <= 1e-3


def test_mammals_from_disk_in_a_tenth_of_the_epochs(tmp_path):
    """The full demo reaches .989 and 1.03; a defect of the loss or of the sampling shows here already."""
    graph = build_graph(read_mammals())
    run = Run(default_settings(graph.edges, {"epochs": 30}), graph.fingerprint())
    _, points = trained(graph, run, tmp_path)
    found = reconstruction(graph, points, 1.0)
    assert found.mean_average_precision > 0.95
    assert found.mean_rank < 1.3
