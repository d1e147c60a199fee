"""What the tests of trainers learn: whether a number is odd, from a row of a table and a dense layer."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from recipes import weights

import dsa

ROWS, DIM, BATCH, BATCHES = 200, 8, 16, 8
HERE = Path(__file__).parent


class Net(torch.nn.Module):
    """A table, in memory or on disk, and a dense layer, from the same first weights."""

    def __init__(self, table):
        super().__init__()
        torch.manual_seed(3)
        self.table = table
        self.head = torch.nn.Linear(DIM, 1)

    def forward(self, ids):
        return self.head(self.table(ids)).squeeze(-1)

    def loss(self, ids):
        return torch.nn.functional.mse_loss(self(ids), (ids % 2).float())


def in_memory():
    return torch.nn.Embedding.from_pretrained(_first(), freeze=False, sparse=True)


def on_disk(resume=None):
    return dsa.DiskEmbedding(ROWS, DIM, init=_first(), state_dir="tables", resume=resume)


def _first():
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(2))


def ids():
    """The numbers of an epoch, in the order in which they come."""
    return torch.randint(0, ROWS, (BATCHES * BATCH,), generator=torch.Generator().manual_seed(4))


def own_losses(steps, rates=lambda step: 1.0, net=None):
    """The losses of the plain loop in memory: SparseAdam and AdamW, clipped at 1."""
    net = Net(in_memory()) if net is None else net
    sparse = torch.optim.SparseAdam(net.table.parameters(), lr=0.05)
    dense = torch.optim.AdamW(net.head.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        for optimizer, rate in ((sparse, 0.05), (dense, 0.01)):
            optimizer.param_groups[0]["lr"] = rate * rates(step)
            optimizer.zero_grad()
        loss = net.loss(ids().view(BATCHES, BATCH)[step % BATCHES])
        loss.backward()
        dsa.clip_grad_norm_(net.parameters(), 1.0)
        sparse.step()
        dense.step()
        losses.append(loss.item())
    return losses


def learned(net):
    """Everything that a net has learned."""
    return {
        "table": weights(net.table),
        **{key: value.clone() for key, value in net.head.state_dict().items()},
    }


def die_at(step, now):
    """End this process as kill -9 does when a step is reached."""
    if step is not None and now >= step:
        os.kill(os.getpid(), signal.SIGKILL)


def run(program, *arguments):
    """Run one of the programs beside this file here, and return its exit status."""
    path = os.pathsep.join([str(HERE), str(HERE.parent / "documents"), *sys.path])
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-W",
            "error::UserWarning:dsa",
            program.__file__,
            *map(str, arguments),
        ],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-4000:]
    return done.returncode


def assert_resumed_equals_uninterrupted(program, steps, kill, monkeypatch, tmp_path):
    """Kill a program at a step, start it again, and compare what it learns with what a whole run does."""
    found = {}
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        if name == "whole":
            program.main(steps)
        else:
            assert run(program, steps, kill) == -signal.SIGKILL
            assert run(program, steps) == 0
        found[name] = torch.load("learned.pt", weights_only=True)
    assert all(torch.equal(found["whole"][key], found["killed"][key]) for key in found["whole"])
