"""Two changed lines, timed: whole training steps and optimizer steps, beside torch's in one process.

Run by hand: ``python tests/benchmarks/drop_in.py [--rows N] [--dim D] [--batch B] [--seconds S]
[--optimizer adagrad]``. Each of our loops races torch's: turns of some steps over the same batches; medians.
A whole step is forward, backward and update of an embedding bag with one id per bag; the optimizer's step
alone starts from the gradient that is there. Torch runs with its own number of threads and with one; the
faster counts. One table on disk at a time, as in training: of several, each would mostly meet pages that the
system has written back meanwhile.
"""

import argparse
import functools
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import dsa

BLOCK = 20
WARM_UP = 5


class Loop:
    """One module and its optimizer, and a gradient for its output."""

    def __init__(self, what, module, optimizer, threads):
        self.what, self.module, self.optimizer, self.threads = what, module, optimizer, threads
        self.whole, self.update = [], []

    def step(self, ids, bags, grad, timed):
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.module(ids, bags).backward(grad)
        middle = time.perf_counter()
        self.optimizer.step()
        end = time.perf_counter()
        if timed:
            self.whole.append(end - start)
            self.update.append(end - middle)


OPTIMIZERS = {
    "adam": (torch.optim.SparseAdam, dsa.DiskSparseAdam),
    "adagrad": (torch.optim.Adagrad, dsa.DiskSparseAdagrad),
}


def torch_loops(rows, dim, rule):
    """Return torch's loop with its own number of threads and with one."""
    bag = torch.nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, _weight=torch.zeros(rows, dim))
    optimizer = OPTIMIZERS[rule][0](list(bag.parameters()), lr=0.001)
    what = f"EmbeddingBag + {type(optimizer).__name__} in RAM"
    return [
        Loop(what, bag, optimizer, torch.get_num_threads()),
        Loop(f"{what}, one thread", bag, optimizer, 1),
    ]


def disk_state(folder, rows, dim, rule):
    """Return the loop with weights in RAM and the optimizer's state on disk."""
    held = torch.nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, _weight=torch.zeros(rows, dim))
    optimizer = OPTIMIZERS[rule][1](held.parameters(), lr=0.001, state_dir=folder)
    what = f"EmbeddingBag + {type(optimizer).__name__}"
    return Loop(what, held, optimizer, torch.get_num_threads())


def disk_table(folder, rows, dim, rule, durability):
    """Return the loop with everything on disk."""
    zeros = dsa.init.Zeros(rows, dim)
    bag = dsa.DiskEmbeddingBag(
        rows, dim, mode="sum", init=zeros, state_dir=folder, state=rule, durability=durability
    )
    optimizer = OPTIMIZERS[rule][1](bag.parameters(), lr=0.001)
    what = f"DiskEmbeddingBag + {type(optimizer).__name__}, {durability!r}"
    return Loop(what, bag, optimizer, torch.get_num_threads())


OURS = (
    disk_state,
    functools.partial(disk_table, durability="process"),
    functools.partial(disk_table, durability="none"),
)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2_048)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--directory", type=Path, default=None, help="where the tables are made")
    chosen = parser.parse_args()
    print(f"{chosen.rows:,} x {chosen.dim}, B = {chosen.batch:,}, torch {torch.__version__}")
    print(f"{'':50} {'whole step':>18} {'optimizer step':>18}")
    for make in OURS:
        with tempfile.TemporaryDirectory(dir=chosen.directory) as folder:
            sizes = chosen.rows, chosen.dim, chosen.optimizer
            torchs, ours = torch_loops(*sizes), make(folder, *sizes)
            race([*torchs, ours], chosen)
            ours.optimizer.close()
        report(torchs, ours)


def race(loops, chosen):
    """Let loops take turns."""
    generator = np.random.default_rng(0)
    bags = torch.arange(chosen.batch)
    grad = torch.from_numpy(generator.standard_normal((chosen.batch, chosen.dim)).astype(np.float32))
    for loop in loops:  # every row once, so that no file has holes and no page is fresh
        for start in range(0, chosen.rows, 1 << 16):
            rows = torch.arange(start, min(chosen.rows, start + (1 << 16)))
            loop.step(rows, torch.arange(len(rows)), torch.ones(len(rows), chosen.dim), timed=False)
    deadline = time.perf_counter() + chosen.seconds / len(OURS)
    turn = 0
    while turn < 3 or time.perf_counter() < deadline:
        batches = [torch.from_numpy(generator.integers(0, chosen.rows, chosen.batch)) for _ in range(BLOCK)]
        for index in range(len(loops)):
            loop = loops[(index + turn) % len(loops)]
            torch.set_num_threads(loop.threads)
            for number, ids in enumerate(batches[:WARM_UP] + batches):
                loop.step(ids, bags, grad, timed=number >= WARM_UP)
        turn += 1
    torch.set_num_threads(loops[0].threads)


def report(torchs, ours):
    """Print medians, and how much faster than torch's faster loop ours is."""
    whole, update = (min(np.median(getattr(loop, kind)) for loop in torchs) for kind in ("whole", "update"))
    for loop in (*torchs, ours):
        mine, own = np.median(loop.whole), np.median(loop.update)
        print(
            f"{loop.what:50} {1e3 * mine:8.3f} ms {whole / mine:5.2f}x {1e3 * own:8.3f} ms "
            f"{update / own:5.2f}x",
            flush=True,
        )


if __name__ == "__main__":
    main()
