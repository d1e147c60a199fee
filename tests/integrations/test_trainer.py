"""Hugging Face's Trainer: the same loss as its own loop in memory, and going on after kill -9."""

import torch
import trainer_program
import world
from recipes import assert_close, needs
from trainer_program import make

import dsa

pytestmark = needs("transformers", "accelerate")
STEPS = 20


class InMemory(torch.optim.Optimizer):
    """SparseAdam and AdamW as one, in the few lines that this test needs."""

    def __init__(self, net):
        self.halves = [
            torch.optim.SparseAdam(net.table.parameters(), lr=0.05),
            torch.optim.AdamW(net.head.parameters(), lr=0.01, weight_decay=0.0),
        ]
        super().__init__([group for half in self.halves for group in half.param_groups], {})

    def load_state_dict(self, state_dict):
        """Nothing: accelerate would load what it was given into groups that the halves do not share."""

    def step(self, closure=None):
        for half in self.halves:
            half.step()


def test_the_loss_is_that_in_memory():
    net, own = world.Net(world.on_disk()), world.Net(world.in_memory())
    model, trainer = make(net, STEPS)
    trainer.train()
    other, plain = make(own, STEPS)
    plain.optimizer_cls_and_kwargs, plain.optimizer = None, InMemory(own)
    plain.args.save_strategy = "no"
    plain.accelerator.clip_grad_norm_ = (
        dsa.clip_grad_norm_
    )  # torch's does not know sparse gradients in memory
    plain.train()
    assert_close(model.losses, other.losses)
    assert len(model.losses) == STEPS
    net.table.close()


def test_killed_and_resumed_equals_uninterrupted(monkeypatch, tmp_path):
    world.assert_resumed_equals_uninterrupted(trainer_program, STEPS, 14, monkeypatch, tmp_path)
