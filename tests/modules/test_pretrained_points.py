"""Pretrained points of a ball are taken as they are, and a step moves them as far as geoopt would."""

import numpy as np
import pytest
import torch

from dsa import DiskEmbedding, DiskSparseRiemannianAdam
from dsa.errors import StateWarning
from dsa.rules.manifolds import PoincareBall

RADII = {1.0: 1.0, 0.25: 2.0}
EDGE = 1.0 - 1e-5


def points(longest, k, rows=50, dim=4):
    """Rows in all directions, the last one the longest, which is `longest` of the radius."""
    drawn = np.random.default_rng(0).normal(size=(rows, dim))
    lengths = np.linspace(0.0, longest * RADII[k], rows)[:, None]
    return (drawn / np.linalg.norm(drawn, axis=1, keepdims=True) * lengths).astype(np.float32)


def module(path, start, k, **options):
    layer = DiskEmbedding(len(start), start.shape[1], init=start, k=k, state_dir=path, **options)
    try:
        return layer.weight[: len(start)].detach().numpy()
    finally:
        layer.close()


def pretrained(path, start, k, **options):
    layer = DiskEmbedding.from_pretrained(torch.from_numpy(start), k=k, state_dir=path, **options)
    try:
        return layer(torch.arange(len(start))).numpy()
    finally:
        layer.close()


def explicit(path, start, k, **options):
    with DiskSparseRiemannianAdam({"points": start}, k=k, disk_dir=path, **options) as optimizer:
        return optimizer.read_rows(np.arange(len(start))).numpy()


every = pytest.mark.parametrize("make", [module, pretrained, explicit])


@every
@pytest.mark.parametrize("k", RADII)
@pytest.mark.parametrize("longest", [0.3, 0.6, 0.979, 0.99998])
def test_d31_what_is_inside_is_taken_as_it_is(tmp_path, make, k, longest):
    start = points(longest, k)
    assert make(tmp_path / "state", start, k).tobytes() == start.tobytes()


@every
def test_d31_between_the_last_row_that_a_table_holds_and_the_edge_it_is_that_row(tmp_path, make):
    start = points(0.999999, 1.0)
    found = make(tmp_path / "state", start, 1.0)
    assert found[:-1].tobytes() == start[:-1].tobytes()
    assert np.linalg.norm(found[-1].astype(np.float64)) == pytest.approx(EDGE, abs=1e-7)


@every
def test_d31_what_reaches_beyond_is_scaled_and_told(tmp_path, make):
    start = points(1.7, 1.0)
    with pytest.warns(
        StateWarning, match=r"norm 1\.7, beyond 0\.5 .*scaled by 0\.2941; pass weights that are"
    ):
        found = make(tmp_path / "state", start, 1.0)
    np.testing.assert_allclose(found, start * (0.5 / 1.7), rtol=1e-6)


@every
def test_d31_a_fraction_that_is_given_holds_and_the_warning_names_the_one_that_keeps(tmp_path, make):
    start = points(0.979, 1.0)
    with pytest.warns(StateWarning, match=r"pass init_max_norm_fraction=1\.0 to keep them"):
        found = make(tmp_path / "state", start, 1.0, init_max_norm_fraction=0.5)
    np.testing.assert_allclose(found, start * (0.5 / 0.979), rtol=1e-6)
    kept = make(tmp_path / "kept", start, 1.0, init_max_norm_fraction=1.0)
    assert kept.tobytes() == start.tobytes()


@every
def test_d31_flat_tables_take_everything(tmp_path, make):
    start = points(1.7, 1.0)
    assert make(tmp_path / "state", start, 0.0).tobytes() == start.tobytes()


@pytest.mark.parametrize("k", RADII)
def test_to_geoopt_and_back(tmp_path, k):
    geoopt = pytest.importorskip("geoopt")
    first = torch.as_tensor(points(0.9999, k), dtype=torch.float32)
    ids = torch.arange(len(first))
    with torch.no_grad():
        mine = DiskEmbedding.from_pretrained(first, freeze=False, k=k, state_dir=tmp_path / "mine")
        theirs = geoopt.ManifoldParameter(mine(ids), manifold=geoopt.PoincareBall(c=k))
        assert theirs.manifold.check_point_on_manifold(theirs.double())
        back = DiskEmbedding.from_pretrained(theirs.detach(), freeze=False, k=k, state_dir=tmp_path / "back")
        assert torch.equal(back(ids), first)
    ours = PoincareBall(k).dist(first[:1].double().numpy(), first[1:].double().numpy())
    ball = geoopt.PoincareBall(c=torch.tensor(k, dtype=torch.float64))
    np.testing.assert_allclose(ours, ball.dist(first[:1].double(), first[1:].double()), rtol=1e-9)
    mine.close()
    back.close()
