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
            loss = self.net.loss(batch)
            self.losses.append(loss.item())
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                if self.trainer.is_last_batch:
                    self.lr_schedulers().step()
            return loss

    return Module()


def fit(model, steps, death=None):
    import lightning

    saver = lightning.pytorch.callbacks.ModelCheckpoint("files", every_n_train_steps=4, save_last=True)
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        callbacks=[saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(world.ids(), batch_size=world.BATCH)
    trainer.fit(model, loader, ckpt_path=LAST if LAST.exists() else None)


def main(steps, death=None):
    warnings.filterwarnings("ignore", "state .*starts over|.*is lost")
    net = world.Net(world.on_disk(resume=LAST.exists()))
    fit(module(net, death), steps, death)
    torch.save(world.learned(net), "learned.pt")
    net.table.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
