import numpy as np
import pytest
import torch

from dsa.cli.demo.loss import softmax_loss


def distance(x, y, k):
    """The asinh distance, written for autograd."""
    gaps = (1 - k * (x * x).sum(-1)) * (1 - k * (y * y).sum(-1))
    length = torch.sqrt(k * ((x - y) ** 2).sum(-1) / gaps)
    return 2 / k**0.5 * torch.asinh(length)


def loss_by_autograd(points, k, children, candidates):
    positions = torch.tensor(points, dtype=torch.float64, requires_grad=True)
    losses = []
    for child, row in zip(children, candidates, strict=True):
        others = torch.tensor([x for x in row if x >= 0])
        scores = -distance(positions[int(child)], positions[others], k)
        losses.append(-torch.log_softmax(scores, 0)[0])
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), positions.grad.numpy()


def random_batch(seed, k, dim, far):
    random = np.random.default_rng(seed)
    direction = random.normal(size=(12, dim))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    radius = random.uniform(0.0, 1.0, (12, 1)) if not far else 1.0 - 10.0 ** random.uniform(-5, -2, (12, 1))
    points = direction * radius * (1 - 1e-5) / np.sqrt(k)
    rows = np.array([random.permutation(12)[:7] for _ in range(9)])
    candidates = np.where(random.random((9, 6)) < 0.2, -1, rows[:, 1:])
    candidates[:, 0] = rows[:, 1]
    return points, rows[:, 0], candidates


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("k", [0.01, 1.0, 7.0])
@pytest.mark.parametrize("dim", [1, 2, 10])
def test_the_gradient_is_that_of_autograd(dim, k, far):
    batch = random_batch(dim, k, dim, far)
    loss, gradient = softmax_loss(batch[0], k, *batch[1:])
    expected_loss, expected = loss_by_autograd(batch[0], k, *batch[1:])
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    # In Riemannian length, of which one edge has at most 1/9. Near the edge autograd's distance loses digits.
    gap = 1 - k * (batch[0] ** 2).sum(axis=1, keepdims=True)
    assert np.max(np.abs(gradient - expected) * gap / 2) < (1e-9 if far else 1e-13)


def test_rows_that_no_edge_names_have_no_gradient():
    points, children, candidates = random_batch(3, 1.0, 4, far=False)
    children, candidates = np.minimum(children, 10), np.where(candidates == 11, -1, candidates)
    candidates[:, 0] = (children + 1) % 11
    assert np.all(softmax_loss(points, 1.0, children, candidates)[1][11] == 0.0)


def test_an_edge_contributes_at_most_its_share():
    """The Riemannian norm of the gradient of a distance is 1, so the share of one edge is at most 1/B."""
    points, children, candidates = random_batch(5, 2.0, 6, far=True)
    gradient = softmax_loss(points, 2.0, children, candidates)[1]
    norms = np.linalg.norm(gradient, axis=1) * (1.0 - 2.0 * (points * points).sum(axis=1)) / 2.0
    edges = np.bincount(children, minlength=12) * 2 + np.bincount(candidates[candidates >= 0], minlength=12)
    assert np.all(norms <= edges / 9.0 + 1e-12)


def test_without_negatives_there_is_nothing_to_learn():
    points = np.array([[0.1, 0.2], [0.3, -0.4]])
    loss, gradient = softmax_loss(points, 1.0, np.array([0]), np.array([[1, -1, -1]]))
    assert loss == 0.0
    assert np.all(gradient == 0.0)


def test_equal_positions_have_equal_shares_and_no_direction():
    points = np.zeros((3, 2))
    loss, gradient = softmax_loss(points, 1.0, np.array([0]), np.array([[1, 2]]))
    assert loss == pytest.approx(np.log(2.0))
    assert np.all(gradient == 0.0)


def test_distances_of_thousands_do_not_overflow():
    k = 1e-7
    edge = (1.0 - 1e-5) / np.sqrt(k)
    points = np.array([[edge, 0.0], [-edge, 0.0], [edge, 1.0]])
    loss, gradient = softmax_loss(points, k, np.array([0, 0]), np.array([[1, 2], [2, 1]]))
    assert loss > 10_000
    assert np.all(np.isfinite(gradient))
