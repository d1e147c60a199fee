"""Train with Hugging Face's Trainer up to a step, from its last checkpoint on; perhaps die on the way."""

import glob
import sys
import warnings

import torch
import world
from recipes import recipe


class Model(torch.nn.Module):
    """A net as the Trainer wants it: the loss comes first."""

    def __init__(self, net, death=None):
        super().__init__()
        self.net, self.death, self.losses = net, death, []

    def forward(self, ids):
        if self.training:
            world.die_at(self.death, len(self.losses))
        loss = self.net.loss(ids)
        self.losses.append(loss.item())
        return {"loss": loss}


class Ids(torch.utils.data.Dataset):
    """The numbers of an epoch; the Trainer draws their order from its seed."""

    def __len__(self):
        return len(world.ids())

    def __getitem__(self, place):
        return {"ids": world.ids()[place]}


def make(net, steps, death=None, **options):
    model = Model(net, death)
    return model, recipe("trainer", "transformers")["make_trainer"](model, Ids(), steps, **options)


def main(steps, death=None):
    warnings.filterwarnings("ignore", ".*is lost")
    saved = bool(glob.glob("run/checkpoint-*"))
    net = world.Net(world.on_disk(resume=saved))
    _, trainer = make(net, steps, death)
    trainer.train(resume_from_checkpoint=saved)
    torch.save(world.learned(net), "learned.pt")
    net.table.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
