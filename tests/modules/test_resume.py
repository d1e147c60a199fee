"""Training that is killed: what `DiskEmbedding` holds afterwards, and how it goes on."""

import os
import signal
import textwrap

import numpy as np
import pytest
import torch
from nursery import start

from dsa import DiskSparseAdam
from dsa.optimizers.update import update_in_place

ROWS, DIM, STEPS = 60, 4, 120

TRAINER = f"""
import sys
import torch
from dsa import DiskEmbedding, DiskSparseAdam, init

def train(directory, steps, resume, report):
    def table(name, seed):
        rule = init.Normal({ROWS}, {DIM}, seed=seed)
        return DiskEmbedding({ROWS}, {DIM}, init=rule, state_dir=directory, name=name, resume=resume)

    users, items = table("users", 1), table("items", 2)
    optimizer = DiskSparseAdam([users.weight, items.weight], lr=0.05, weight_decay=0.01)
    for step in range(optimizer.global_step, steps):
        draws = torch.Generator().manual_seed(step)
        user, item = torch.randint(0, {ROWS}, (2, 16), generator=draws)
        optimizer.zero_grad()
        ((users(user) * items(item)).sum(1) - 1.0).square().mean().backward()
        optimizer.step()
        report(optimizer.global_step)
    return optimizer
"""
exec(TRAINER)

CHILD = TRAINER + textwrap.dedent(
    """
    def report(step):
        sys.stdout.write(f"{step}\\n")
        sys.stdout.flush()

    train(sys.argv[1], 10**9, None, report)
    """
)


def trained(make, where, steps, resume=None, report=lambda step: None):
    """Train to a step, close, and return the raw records of both tables."""
    optimizer = train(make.directory(where), steps, resume, report)  # noqa: F821 - defined by TRAINER
    optimizer.close()
    assert optimizer.global_step == steps
    return [make.records(name, ROWS, DIM, where=where).tobytes() for name in ("users", "items")]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_training_that_is_killed_goes_on_bit_by_bit(make):
    with start(CHILD, make.directory("killed")) as child:
        for line in child.stdout:
            if int(line) >= 30:
                break
        os.kill(child.pid, signal.SIGKILL)
        reported = [int(line), *map(int, child.stdout.read().split())]
    assert child.returncode == -signal.SIGKILL
    seen = []
    steps = max(STEPS, reported[-1] + 20)
    assert trained(make, "killed", steps, True, seen.append) == trained(make, "whole", steps)
    assert seen[0] - 1 in (reported[-1], reported[-1] + 1), (
        "a step that had returned is there, one under way is there or not"
    )


def test_a_run_in_three_sessions_is_the_run_in_one(make):
    trained(make, "parts", 40)
    trained(make, "parts", 41, True)
    assert trained(make, "parts", STEPS, True) == trained(make, "whole", STEPS)


@pytest.mark.parametrize(
    "options", [{"async_writes": True}, {"durability": "power"}, {"durability": "none"}], ids=str
)
def test_how_it_is_stored_does_not_change_what_is_learned(make, options):
    def session(where, steps, resume=None, **options):
        layer = make.disk(ROWS, DIM, 0.5, where=where, resume=resume, **options)
        optimizer = make.adam(layer, where=where)
        for step in range(optimizer.global_step, steps):
            ids = torch.randint(0, ROWS, (16,), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            (layer(ids) * torch.linspace(-1, 1, DIM)).sum().backward()
            optimizer.step()
        optimizer.close()
        return make.records(layer, ROWS, DIM, where=where).tobytes()

    session("parts", 20, **options)
    assert session("parts", 40, True, **options) == session("whole", 40)


def test_a_step_that_is_interrupted_while_it_is_stored_counts_everywhere(make, monkeypatch):
    """Ctrl-C in a notebook: the next call completes the tables, so weights in memory have to follow too."""
    layer = torch.nn.Embedding(4, 2, sparse=True)
    torch.nn.init.zeros_(layer.weight)
    optimizer = make.adam(layer)
    layer(torch.tensor([1])).sum().backward()
    with monkeypatch.context() as patch:
        patch.setattr("dsa.state.transactions.Transactions.apply", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    optimizer.flush()
    assert optimizer.global_step == 1
    assert make.records("param_0", 4, 2, weights=False)["t"].tolist() == [0, 1, 0, 0]
    np.testing.assert_allclose(layer.weight.detach()[1], -0.1, rtol=1e-6)


def _interrupt(*given):
    raise KeyboardInterrupt


def _then_interrupt(function, calls):
    def call(*given):
        report = function(*given)
        calls[0] -= 1
        if not calls[0]:
            raise KeyboardInterrupt
        return report

    return call


@pytest.mark.parametrize("calls", [[1], [2]], ids=["the first table changed", "both tables changed"])
def test_a_step_that_fails_half_way_is_no_step(make, monkeypatch, calls):
    """An error before the commit leaves tables, weights in memory and counts as they were."""
    calls = list(calls)
    disk, plain = make.disk(6, 2, 0.5), torch.nn.Embedding(6, 2, sparse=True)
    optimizer = DiskSparseAdam([disk.weight, plain.weight], lr=0.1)
    (disk(torch.tensor([1])).sum() + plain(torch.tensor([1])).sum()).backward()
    before, stored = plain.weight.detach().clone(), make.records(disk, 6, 2).tobytes()
    with monkeypatch.context() as patch:
        patch.setattr("dsa.optimizers.stepping.update_in_place", _then_interrupt(update_in_place, calls))
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert torch.equal(plain.weight, before)
    assert make.records(disk, 6, 2).tobytes() == stored
    assert optimizer.global_step == 0
    optimizer.step()
    assert optimizer.global_step == 1
    np.testing.assert_allclose(make.records(disk, 6, 2)["w"][1], 0.4, rtol=1e-6)
