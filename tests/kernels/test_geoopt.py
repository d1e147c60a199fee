"""Beside geoopt: its functions on the ball away from the boundary, and its optimizers against row mode.

geoopt's ball takes its curvature in torch's default dtype, and its formulas need float64, hence the fixture.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from runs import Float64Run, pull
from sampling import at_radius, fresh_records, off_by_ulps

from dsa.kernels.poincare import exp_transport, riemannian_adam_step
from dsa.rules.conventions import AdamOptions
from dsa.rules.manifolds import PoincareBall

geoopt = pytest.importorskip("geoopt")


@pytest.fixture(autouse=True)
def _float64_by_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("k", [1.0, 0.1, 10.0])
@pytest.mark.parametrize("radius", [0.1, 0.7, 0.99])
def test_exponential_map_transport_and_log(radius, k):  # oracle 16
    rng = np.random.default_rng(1)
    w = at_radius(rng, 10, 4, radius, k)
    u = at_radius(rng, 10, 4, 0.3, k) * (1 - radius**2)
    v = rng.normal(size=w.shape)
    theirs = geoopt.PoincareBallExact(c=k)
    tw, tu, tv = map(torch.from_numpy, (w, u, v))
    end, (moved,) = exp_transport(w, u, [v], k)
    expected, expected_moved = theirs.expmap_transp(tw, tu, tv)
    ours = PoincareBall(k)
    size = np.abs(v).max()
    np.testing.assert_allclose(end, expected.numpy(), rtol=0, atol=1e-11)
    np.testing.assert_allclose(
        moved, expected_moved.numpy(), rtol=0, atol=1e-11 * size * max(1.0, float(np.abs(moved).max()))
    )
    np.testing.assert_allclose(ours.scale(w)[:, 0], theirs.lambda_x(tw).numpy(), rtol=1e-11)
    np.testing.assert_allclose(ours.rgrad(w, v), theirs.egrad2rgrad(tw, tv).numpy(), rtol=1e-11)
    np.testing.assert_allclose(ours.dist(w, end), theirs.dist(tw, torch.from_numpy(end)).numpy(), rtol=1e-10)


def their_optimizer(kind, parameter, lr, decay):
    if kind == "sparse":
        return geoopt.optim.SparseRiemannianAdam([parameter], lr=lr)
    return geoopt.optim.RiemannianAdam([parameter], lr=lr, weight_decay=decay)


RUNS = [("sparse", 0.0), ("dense", 0.0), ("dense", 0.1)]


@pytest.mark.parametrize("k", [1.0, 0.1, 10.0])
@pytest.mark.parametrize(("kind", "decay"), RUNS)
def test_row_mode_is_geoopts_algorithm(kind, decay, k):  # oracle 15
    """100 steps over all rows: 1e-12 in float64, float32 roundings for the fused pass."""
    rng = np.random.default_rng(2)
    w, target = (at_radius(rng, 6, 4, 0.6, k).astype(np.float32).astype(float) for _ in range(2))
    parameter = geoopt.ManifoldParameter(torch.from_numpy(w.copy()), manifold=geoopt.PoincareBallExact(c=k))
    theirs = their_optimizer(kind, parameter, 1e-2, decay)
    run, records = Float64Run(w, k=k, mode="row"), fresh_records(w, "row")
    options = AdamOptions(lr=1e-2, second_moment="row", weight_decay=decay)
    for step in range(1, 101):
        gradient = pull(run.w, target).astype(np.float32)
        exact = gradient.astype(float)
        parameter.grad = torch.from_numpy(exact.copy())
        if kind == "sparse":
            parameter.grad = parameter.grad.to_sparse(1)
        theirs.step()
        run.step(exact + decay * run.w)
        assert riemannian_adam_step(records, gradient, options, k=k, stamp=step)[:3] == (-1, 0, 0)
    assert np.linalg.norm(run.w - w, axis=1).min() > 0.1
    np.testing.assert_allclose(run.w, parameter.detach().numpy(), rtol=0, atol=1e-12)
    state = theirs.state[parameter]
    np.testing.assert_allclose(run.m, state["exp_avg"].numpy(), rtol=0, atol=1e-12)
    # geoopt keeps D copies of the row's scalar.
    np.testing.assert_allclose(run.v, state["exp_avg_sq"].numpy()[:, :1], rtol=1e-11)
    assert off_by_ulps(records["w"], parameter.detach().numpy()) <= 50
    assert off_by_ulps(records["m"], state["exp_avg"].numpy()) <= 200
    assert off_by_ulps(records["v"], state["exp_avg_sq"].numpy()[:, 0]) <= 100
