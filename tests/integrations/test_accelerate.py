"""accelerate: prepared, with accumulation, and gone back by its own save_state and load_state."""

import pytest
import torch
import world
from recipes import assert_close, needs, recipe

pytestmark = needs("accelerate")


def train(accelerator, net, optimizer, loader, epochs=2):
    losses = []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(net):
                loss = accelerator.unwrap_model(net).loss(batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def prepared(**options):
    import accelerate

    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, **options)
    loader = torch.utils.data.DataLoader(world.ids(), batch_size=world.BATCH)
    net = world.Net(world.on_disk())
    return accelerator, *recipe("accelerate", "accelerate")["prepare"](accelerator, net, loader)


def test_the_loss_is_that_in_memory():
    accelerator, net, optimizer, loader = prepared()
    assert_close(train(accelerator, net, optimizer, loader), world.own_losses(2 * world.BATCHES))
    accelerator.unwrap_model(net).table.close()


def test_accumulated_steps():
    accelerator, net, optimizer, loader = prepared(gradient_accumulation_steps=4)
    train(accelerator, net, optimizer, loader)
    assert optimizer.optimizer.global_step == 2 * world.BATCHES // 4
    accelerator.unwrap_model(net).table.close()


def test_going_back():
    accelerator, net, optimizer, loader = prepared()
    train(accelerator, net, optimizer, loader, 1)
    accelerator.save_state("saved")
    expected = train(accelerator, net, optimizer, loader, 1)
    accelerator.load_state("saved")
    assert optimizer.optimizer.global_step == world.BATCHES
    assert train(accelerator, net, optimizer, loader, 1) == pytest.approx(expected, rel=1e-6)
    accelerator.unwrap_model(net).table.close()
