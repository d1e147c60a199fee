"""Train with Lightning up to a step, from the last checkpoint on; perhaps die on the way."""

import sys
import warnings
from pathlib import Path

import torch
import world
from recipes import recipe

LAST = Path("files/last.ckpt")


def module(net, death=None, manual=False):
    base = recipe("lightning", "lightning")["OnDisk"]

    class Module(base):
        def __init__(self):
            super().__init__()
            self.net, self.losses = net, []
            self.automatic_optimization = not manual

        def training_step(self, batch, index):
            world.die_at(death, self.global_step)
            # After a kill in an epoch Lightning takes the loader's batches from the first one on again.
            batch = world.ids().view(world.BATCHES, world.BATCH)[self.global_step % world.BATCHES]
            loss = self.net.loss(batch)
            self.losses.append(loss.item())
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=1.0)
                optimizer.step()
                if self.trainer.is_last_batch:
                    self.lr_schedulers().step()
            return loss

    return Module()


def fit(model, steps):
    import lightning

    saver = lightning.pytorch.callbacks.ModelCheckpoint("files", every_n_train_steps=4, save_last=True)
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        callbacks=[saver],
        gradient_clip_val=1.0 if model.automatic_optimization else None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(world.ids(), batch_size=world.BATCH)
    trainer.fit(model, loader, ckpt_path=LAST if LAST.exists() else None)


def main(steps, death=None):
    warnings.filterwarnings("ignore", "state .*starts over|.*is lost")
    net = world.Net(world.on_disk(resume=LAST.exists()))
    fit(module(net, death), steps)
    torch.save(world.learned(net), "learned.pt")
    net.table.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
