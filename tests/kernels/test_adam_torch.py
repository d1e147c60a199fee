"""Euclidean Adam beside torch's optimizers, where the definitions coincide.

Two comparisons for each setting. *In step*: after every step the record is set to torch's state, so each step
is compared alone. *Apart*: both run on their own for all steps, and only roundings may separate them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling import ULP32, fresh_records

from dsa.kernels.adam import adam_step
from dsa.rules.conventions import AdamOptions

SPARSE = {"eps_placement": "uncorrected", "bias_correction": "parameter"}
DENSE = {"eps_placement": "corrected"}
FAMILIES = {
    "SparseAdam": (torch.optim.SparseAdam, SPARSE),
    "Adam": (torch.optim.Adam, DENSE),
    "AdamW": (torch.optim.AdamW, DENSE | {"weight_decay_mode": "decoupled"}),
}
SETTINGS = {
    "defaults": {},
    "rate 10": {"lr": 10.0},
    "beta1 0": {"beta1": 0.0},
    "betas 0": {"beta1": 0.0, "beta2": 0.0},
    "beta2 .99999": {"beta2": 0.99999},
    "eps 1e-3": {"eps": 1e-3},
    "ascent": {"maximize": True},
}
DECAYS = {"no decay": 0.0, "decay": 0.1, "strong decay": 5.0}
CASES = [
    pytest.param(
        family, options | ({"weight_decay": decay} if decay else {}), id=f"{family}, {setting}, {name}"
    )
    for family in FAMILIES
    for setting, options in SETTINGS.items()
    for name, decay in DECAYS.items()
    if not (family == "SparseAdam" and decay)
    # torch moves the moments by old + (1 - beta) (new - old) there: with beta2 = 0 it loses the square of a
    # gradient much smaller than the one before, and the step is too long by any factor.
    if not (family == "SparseAdam" and setting == "betas 0")
    if not (family == "AdamW" and options.get("lr", 0.0) * decay > 1.0)  # both overflow within the run
]
ROWS, DIM, STEPS = 5, 4, 25


class TorchRun:
    """A torch optimizer over one (ROWS, DIM) parameter, fed with given gradients."""

    def __init__(self, family, options, weights):
        self.parameter = torch.nn.Parameter(torch.from_numpy(weights.copy()))
        made = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8} | options
        arguments = {name: made[name] for name in ("lr", "eps")} | {"betas": (made["beta1"], made["beta2"])}
        arguments |= {name: made[name] for name in ("maximize",) if name in made}
        if family != "SparseAdam":
            arguments |= {"weight_decay": made.get("weight_decay", 0.0), "foreach": False}
        self.sparse = family == "SparseAdam"
        self.optimizer = FAMILIES[family][0]([self.parameter], **arguments)

    def step(self, grad):
        grad = torch.from_numpy(grad)
        self.parameter.grad = grad.to_sparse(1) if self.sparse else grad.clone()
        self.optimizer.step()

    def state(self):
        """Return copies of w, m, v."""
        state = self.optimizer.state[self.parameter]
        tensors = (self.parameter.detach(), state["exp_avg"], state["exp_avg_sq"])
        return tuple(tensor.numpy().copy() for tensor in tensors)


def options_of(family, options):
    return AdamOptions(**({"lr": 1e-2} | FAMILIES[family][1] | options))


@pytest.mark.parametrize("size", [1.0, 1e-9])
@pytest.mark.parametrize(("family", "options"), CASES)
def test_each_step_equals_torch(family, options, size):
    rng = np.random.default_rng(7)
    weights = rng.normal(size=(ROWS, DIM)).astype(np.float32)
    run, records = TorchRun(family, options, weights), fresh_records(weights)
    for step in range(1, STEPS + 1):
        grad = (size * rng.normal(size=weights.shape)).astype(np.float32)
        before = records["w"].copy()
        assert adam_step(records, grad, options_of(family, options), stamp=step, step=step).bad == -1
        run.step(grad)
        w, m, v = run.state()
        np.testing.assert_allclose(records["m"], m, rtol=2 * ULP32, atol=2 * ULP32 * np.abs(m).max())
        np.testing.assert_allclose(records["v"], v, rtol=4 * ULP32, atol=4 * ULP32 * np.abs(v).max())
        largest = max(np.abs(before).max(), np.abs(w).max())
        np.testing.assert_allclose(records["w"], w, rtol=0, atol=4 * ULP32 * largest)
        records["w"], records["m"], records["v"] = w, m, v


@pytest.mark.parametrize(("family", "options"), CASES)
def test_runs_stay_together(family, options):
    rng = np.random.default_rng(8)
    weights = rng.normal(size=(ROWS, DIM)).astype(np.float32)
    run, records = TorchRun(family, options, weights), fresh_records(weights)
    largest = 1.0
    for step in range(1, STEPS + 1):
        grad = rng.normal(size=weights.shape).astype(np.float32)
        assert adam_step(records, grad, options_of(family, options), stamp=step, step=step).bad == -1
        run.step(grad)
        largest = max(largest, float(np.abs(records["w"]).max()))
    w, _, v = run.state()
    # A rounding in each step, of numbers as large as the weights were, adding up like a random walk.
    tolerance = 4 * ULP32 * largest * np.sqrt(STEPS)
    np.testing.assert_allclose(records["w"], w, rtol=0, atol=tolerance)
    np.testing.assert_allclose(records["v"], v, rtol=20 * ULP32, atol=4 * ULP32 * np.abs(v).max())
    np.testing.assert_array_equal(records["t"], STEPS)


def test_a_row_met_late_equals_sparse_adam_under_the_parameter_counter():  # case C06
    weights = np.zeros((2, 3), np.float32)
    run, records = TorchRun("SparseAdam", {}, weights), fresh_records(weights)
    options = options_of("SparseAdam", {})
    for step in range(1, 31):
        touched = [0, 1] if step > 20 else [0]
        grad = np.full((len(touched), 3), 0.5, np.float32)
        batch = records[touched]
        adam_step(batch, grad, options, stamp=step, step=step)
        records[touched] = batch
        run.parameter.grad = torch.sparse_coo_tensor(
            [touched], torch.from_numpy(grad), (2, 3), check_invariants=False
        )
        run.optimizer.step()
    w, m, v = run.state()
    for name, expected in zip("wmv", (w, m, v), strict=True):
        np.testing.assert_allclose(records[name], expected, rtol=20 * ULP32)
    np.testing.assert_array_equal(records["t"], [30, 10])
