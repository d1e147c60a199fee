"""exp_transport and transport_diagonal against frozen values that were computed with 120 digits."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import read_spot_values, spot_inputs, spot_outputs

from dsa.kernels.poincare import exp_transport, transport_diagonal

EPS = np.finfo(np.float64).eps
CASES = read_spot_values()


def name_of(case):
    return f"r={case['radius']}, k={case['k']}, h={case['length']}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_kernel_equals_the_frozen_values(case):
    w, u, v, diagonal = (np.array([case[name]]) for name in ("w", "u", "v", "diagonal"))
    k, lam = case["k"], 2 / (1 - case["radius"] ** 2)
    new_w, (new_v,) = exp_transport(w, u, [v], k)
    new_diagonal = transport_diagonal(w, u, diagonal, k)
    np.testing.assert_allclose(new_w[0], case["new_w"], rtol=0, atol=4 * EPS / np.sqrt(k))
    scale = np.abs(case["new_v"]).max()
    np.testing.assert_allclose(new_v[0], case["new_v"], rtol=0, atol=4 * EPS * lam * scale)
    scale = np.abs(case["new_diagonal"]).max()
    np.testing.assert_allclose(new_diagonal[0], case["new_diagonal"], rtol=0, atol=8 * EPS * lam * scale)


def test_the_frozen_values_cover_the_radii_and_the_clamp():
    assert {case["radius"] for case in CASES} == {0.1, 0.9, 0.999, 0.99999}
    assert any(case["clamped"] for case in CASES)
    assert not all(case["clamped"] for case in CASES if case["radius"] == 0.99999)


@pytest.mark.parametrize("index", [0, 22, 47])
def test_the_generator_still_gives_the_frozen_values(index):
    inputs = spot_inputs()[index]
    frozen = CASES[index]
    # Not to the last bit: norms and square roots of a library differ between processors.
    for name, value in inputs.items():
        np.testing.assert_allclose(frozen[name], value, rtol=4 * EPS, atol=0, err_msg=name)
    for name, value in spot_outputs({name: frozen[name] for name in inputs}).items():
        np.testing.assert_array_equal(frozen[name], value, err_msg=name)  # mpmath's, the same everywhere
