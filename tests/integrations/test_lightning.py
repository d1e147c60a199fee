"""Lightning: both ways of optimizing, and going on after kill -9 from the trainer's own checkpoints."""

import os

import lightning_program
import pytest
import world
from lightning_program import fit, module
from recipes import assert_close, needs

pytestmark = needs("lightning")
STEPS = 20


@pytest.mark.parametrize("manual", [False, True])
def test_the_loss_is_that_in_memory(manual):
    net = world.Net(world.on_disk())
    model = module(net, manual=manual)
    fit(model, STEPS)
    assert_close(model.losses, world.own_losses(STEPS, lambda step: 0.9 ** (step // world.BATCHES)))
    assert model.losses[-1] < model.losses[0]
    assert len(os.listdir("checkpoints")) <= 3
    net.table.close()


def test_killed_and_resumed_equals_uninterrupted(monkeypatch, tmp_path):
    world.assert_resumed_equals_uninterrupted(lightning_program, STEPS, 14, monkeypatch, tmp_path)
