"""Weights in memory beside moments on disk: one transaction, and never other weights than the moments'.

Cases D35 to D37.
"""

import contextlib
import sys
import warnings

import numpy as np
import pytest
import torch

import dsa
from dsa.errors import StateMismatchError, StateWarning

ROWS, DIM = 40, 4


def model(seed=1, names=("first", "second"), saved=None, dtype=torch.float32):
    torch.manual_seed(seed)
    layers = torch.nn.ModuleDict(
        {name: torch.nn.Embedding(ROWS, DIM, sparse=True, dtype=dtype) for name in names}
    )
    if saved is not None:
        layers.load_state_dict(saved)
    return layers


def loss(layers, seed):
    draws = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, ROWS, (12,), generator=draws) for _ in layers]
    return sum(layer(each).float().square().sum() for layer, each in zip(layers.values(), ids, strict=True))


def step(layers, optimizer, seed):
    optimizer.zero_grad()
    loss(layers, seed).backward()
    optimizer.step()


def copied(layers):
    return {name: value.clone() for name, value in layers.state_dict().items()}


@pytest.fixture
def trained(tmp_path):
    """Trains two steps in a directory and returns the weights; by names or by order."""

    def train(named, dtype=torch.float32, clean=True):
        layers = model(dtype=dtype)
        optimizer = build(layers, tmp_path, named)
        for seed in range(2):
            step(layers, optimizer, seed)
        optimizer.close() if clean else optimizer._portable_state().abandon()
        return copied(layers)

    return train


def build(layers, tmp_path, named, swapped=False, resume=None):
    params = list(layers.named_parameters()) if named else list(layers.parameters())
    if swapped:
        params = params[::-1]
    return dsa.DiskSparseAdam(params, lr=0.1, state_dir=tmp_path / "state", resume=resume)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_right_weights_go_on_without_a_word(tmp_path, trained, named, dtype):
    layers = model(seed=9, saved=trained(named, dtype), dtype=dtype)
    with build(layers, tmp_path, named, resume=True) as optimizer:
        step(layers, optimizer, 3)
        assert optimizer.global_step == 3


def test_fresh_weights_are_told_by_name(tmp_path, trained):
    trained(True)
    layers = model(seed=9)
    with build(layers, tmp_path, True, resume=True) as optimizer:
        with pytest.warns(StateWarning, match=r"first\.weight, second\.weight are not those .* at step 2"):
            step(layers, optimizer, 3)
        step(layers, optimizer, 4)  # told once


@pytest.mark.parametrize("change", ["one element", "the other layer's", "not loaded"])
def test_one_changed_weight_is_enough(tmp_path, trained, change):
    saved = trained(True)
    layers = model(seed=9, saved=saved)
    with torch.no_grad():
        if change == "one element":
            layers["second"].weight[ROWS - 1, DIM - 1] += 1e-6
        elif change == "the other layer's":
            layers["second"].weight.copy_(saved["first.weight"])
        else:
            torch.nn.init.normal_(layers["second"].weight)
    told = pytest.warns(StateWarning, match=r"in memory of second\.weight are not those")
    with build(layers, tmp_path, True, resume=True) as optimizer, told:
        step(layers, optimizer, 3)


@pytest.mark.parametrize("swapped", [True, False])
def test_without_names_other_weights_are_refused_and_nothing_changes(tmp_path, trained, swapped):
    saved = trained(False)
    layers = model(seed=9, saved=saved if swapped else None)
    before = copied(layers)
    what = "are those of another parameter" if swapped else "are others"
    with build(layers, tmp_path, False, swapped, resume=True) as optimizer:
        for _ in range(2):
            with pytest.raises(StateMismatchError, match=what):
                step(layers, optimizer, 3)
        assert optimizer.global_step == 2
    assert all(torch.equal(before[name], value) for name, value in layers.state_dict().items())
    layers = model(seed=9, saved=saved)
    with build(layers, tmp_path, False, resume=True) as optimizer:
        step(layers, optimizer, 3)


def test_weights_that_are_loaded_after_the_optimizer_is_built(tmp_path, trained):
    saved = trained(False)
    layers = model(seed=9)
    with build(layers, tmp_path, False, resume=True) as optimizer:
        layers.load_state_dict(saved)
        step(layers, optimizer, 3)


@pytest.mark.parametrize("named", [True, False])
def test_after_a_kill_nobody_can_tell(tmp_path, trained, named):
    layers = model(seed=9, saved=trained(named, clean=False))
    told = pytest.warns(StateWarning, match=r"nobody can tell whether .* are those of step 2")
    with build(layers, tmp_path, named, resume=True) as optimizer, told:
        step(layers, optimizer, 3)


def test_the_own_state_dict_of_that_step_vouches(tmp_path):
    layers = model()
    optimizer = build(layers, tmp_path, False)
    for seed in range(2):
        step(layers, optimizer, seed)
    saved, state = copied(layers), optimizer.state_dict()
    optimizer._portable_state().abandon()
    layers = model(seed=9, saved=saved)
    with build(layers, tmp_path, False, resume=True) as optimizer:
        optimizer.load_state_dict(state)
        step(layers, optimizer, 3)


def test_a_checkpoint_brings_the_weights(tmp_path):
    layers = model()
    optimizer = build(layers, tmp_path, False)
    step(layers, optimizer, 0)
    optimizer.export_checkpoint(tmp_path / "checkpoint")
    step(layers, optimizer, 1)
    optimizer._portable_state().abandon()
    layers = model(seed=9)
    with build(layers, tmp_path, False, resume=True) as optimizer:
        optimizer.import_checkpoint(tmp_path / "checkpoint")
        step(layers, optimizer, 1)
        assert optimizer.global_step == 2


def test_a_state_that_is_opened_and_closed_without_a_step_keeps_its_fingerprints(tmp_path, trained):
    saved = trained(False)
    for clean in (True, False):
        optimizer = build(model(seed=9), tmp_path, False, resume=True)
        optimizer.close() if clean else optimizer._portable_state().abandon()
    layers = model(seed=8)
    with build(layers, tmp_path, False, resume=True) as optimizer:
        with pytest.raises(StateMismatchError, match="are others"):
            step(layers, optimizer, 3)
        layers.load_state_dict(saved)
        step(layers, optimizer, 3)


class _Interrupted:
    """Raises KeyboardInterrupt once, before the n-th line of the package that runs inside a call."""

    def __init__(self, at):
        self.left = at

    def __enter__(self):
        sys.settrace(self._enter)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def _enter(self, frame, event, argument):
        return self._line if "/dsa/" in frame.f_code.co_filename else None

    def _line(self, frame, event, argument):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._line


def lines_of_a_step(tmp_path):
    layers = model()
    counting = _Interrupted(10**9)
    with build(layers, tmp_path, True) as optimizer:
        step(layers, optimizer, 0)
        optimizer.zero_grad()
        loss(layers, 1).backward()
        with counting:
            optimizer.step()
    return 10**9 - counting.left


def whole_steps(tmp_path):
    """Weights and moments after one, two and three steps."""
    layers, found = model(), {}
    with build(layers, tmp_path, True) as optimizer:
        for seed in range(3):
            step(layers, optimizer, seed)
            found[seed + 1] = contents(layers, optimizer)
    return found


def contents(layers, optimizer):
    tables = optimizer._portable_state().tables.values()
    return [
        *(table.backend.read(np.arange(ROWS)).tobytes() for table in tables),
        *(layer.weight.detach().numpy().tobytes() for layer in layers.values()),
    ]


def test_an_interrupt_anywhere_leaves_weights_and_moments_of_one_step(tmp_path):
    """The next call completes both, or neither moved (D35)."""
    reference = whole_steps(tmp_path / "whole")
    reached = set()
    for at in range(1, lines_of_a_step(tmp_path / "count") + 1, 3):
        layers = model()
        optimizer = build(layers, tmp_path / f"{at}", True)
        step(layers, optimizer, 0)
        optimizer.zero_grad()
        loss(layers, 1).backward()
        with contextlib.suppress(KeyboardInterrupt), _Interrupted(at):
            optimizer.step()
        torch.set_grad_enabled(True)  # torch's own context may have been left half-way
        optimizer.flush()  # any call
        done = optimizer.global_step
        assert contents(layers, optimizer) == reference[done], f"interrupted at line {at} of a step"
        reached.add(done)
        if done == 1:
            optimizer.step()
        step(layers, optimizer, 2)
        assert contents(layers, optimizer) == reference[3]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.close()
    assert reached == {1, 2}


def test_another_parameter_under_the_same_name_is_told(tmp_path):
    """An optimizer that is built again while the directory stays open."""
    disk = dsa.DiskEmbedding(10, 2, state_dir=tmp_path / "state", name="disk")
    for number in range(2):
        layer = torch.nn.Embedding(ROWS, DIM, sparse=True)
        optimizer = dsa.DiskSparseAdam([("disk", disk.weight), ("word", layer.weight)], lr=0.1)
        told = (
            pytest.warns(StateWarning, match="weights in memory of word")
            if number
            else contextlib.nullcontext()
        )
        layer(torch.arange(5)).sum().backward()
        with told:
            optimizer.step()
        del optimizer
    disk.close()
