"""Imports and migrations killed at random moments: ``python -m tests.checkpoint.change_kills --trials 100``.

Run it from the root. A process imports a checkpoint into a state, or migrates a directory of an older
release, until it is killed. Then the state must be the old one or the new one, whole; a migration is finished
by the next opening. Nothing may be left over.
"""

import argparse
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import numpy as np

from dsa import DiskSparseRiemannianAdam, init

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))
ROWS, DIM = 20_000, 16

NURSERY = """
import os, signal, sys, time, warnings
sys.path.insert(0, sys.argv[1])
import torch, dsa
from tests.checkpoint.change_kills import make
warnings.simplefilter("ignore")
print("ready", flush=True)
for line in sys.stdin:
    what, state, checkpoint, delay = line.rstrip("\\n").split("\\t")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        optimizer = make(state, resume=True) if what == "import" else None
        os.write(writing, b"x")
        optimizer.import_checkpoint(checkpoint) if what == "import" else dsa.migrate(state)
        os.write(writing, b"x")
        signal.pause()
    os.read(reading, 1)
    start = time.monotonic()
    time.sleep(float(delay)) if delay else os.read(reading, 1)
    lasted = time.monotonic() - start
    os.kill(child, signal.SIGKILL)
    print(os.waitpid(child, 0)[1], lasted, flush=True)
    os.close(reading)
    os.close(writing)
"""


class Nursery:
    """A process that starts the ones to be killed, so that each is there at once."""

    def __enter__(self):
        from nursery import start

        self.process = start(NURSERY, str(ROOT))
        assert self.process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *exc):
        self.process.__exit__(*exc)

    def kill_one(self, what, state, checkpoint, delay=""):
        """Kill one after some seconds, or at its end; return after how many."""
        self.process.stdin.write(f"{what}\t{state}\t{checkpoint}\t{delay}\n")
        self.process.stdin.flush()
        status, lasted = self.process.stdout.readline().split()
        assert int(status) == 9, "it ended by itself"
        return float(lasted)


def make(path, **options):
    tables = {"entity": init.Normal(ROWS, DIM, 0.1, seed=1), "other": np.ones((50, 4), np.float32)}
    return DiskSparseRiemannianAdam(tables, disk_dir=path, k=0.0, lr=0.1, allocate="sparse", **options)


def train(path, steps, seed):
    """Train a new state; return what it holds, having closed it."""
    rng = np.random.default_rng(seed)
    with make(path) as optimizer:
        for _ in range(steps):
            rows = rng.integers(0, ROWS, 500)
            optimizer.step({"entity": (rows, rng.standard_normal((500, DIM)).astype(np.float32))})
        optimizer.export_checkpoint(f"{path}-checkpoint")
    return content(path)


def content(path):
    """Open a state and return its step and records."""
    with make(path, resume=True) as optimizer:
        tables = optimizer._state.tables.items()
        found = {name: table.backend.read(np.arange(len(table))).tobytes() for name, table in tables}
        return optimizer.global_step, found


def old_release(path):
    """Make a directory of release 0.3.0."""
    from tests.golden.make_legacy import write_json

    rng = np.random.default_rng(0)
    path.mkdir()
    for name, (rows, dim) in {"entity": (ROWS, DIM), "other": (50, 4)}.items():
        for field in "wmv":
            values = np.abs(rng.standard_normal((rows, dim))) * 1e-3
            (path / f"{name}_{field}.dat").write_bytes(values.astype("<f4").tobytes())
        (path / f"{name}_t.dat").write_bytes(np.ones(rows, "<i4").tobytes())
        description = {"format_version": 2, "shape": [rows, dim], "dtype": "float32", "curvature": 0.0}
        write_json(path / f"{name}_meta.json", description)
    write_json(path / "dsa_global_meta.json", {"global_step": 7, "curvature": 0.0})


def run_trials(folder, trials, seed):
    """Kill so many imports and as many migrations; return what was found how often."""
    rng, found = random.Random(seed), Counter()
    new, old = train(folder / "new", 30, seed=1), train(folder / "old", 3, seed=2)
    old_release(folder / "legacy")
    with warnings.catch_warnings(), Nursery() as nursery:
        warnings.simplefilter("ignore")
        shutil.copytree(folder / "legacy", folder / "migrated")
        migrated = content(folder / "migrated")
        assert migrated[0] == 7
        longest = {}
        for what, source in (("import", "old"), ("migrate", "legacy")):
            state = folder / "trial"
            shutil.copytree(folder / source, state)
            longest[what] = 1.3 * nursery.kill_one(what, state, folder / "new-checkpoint")
            shutil.rmtree(state)
        for trial in range(2 * trials):
            what, source = (("import", "old"), ("migrate", "legacy"))[trial % 2]
            state = folder / "trial"
            shutil.copytree(folder / source, state)
            nursery.kill_one(what, state, folder / "new-checkpoint", rng.uniform(0.0, longest[what]))
            if what == "migrate":
                done = (state / "dsa.json").exists() and not list(state.glob("*.dat"))
                assert content(state) == migrated, f"migration {trial}"
                found[f"{what}: {'new' if done else 'finished by the next opening'}"] += 1
            else:
                after = content(state)
                assert after in (old, new), f"import {trial}"
                found[f"{what}: {'new' if after == new else 'old'}"] += 1
            assert len(list(state.glob("*.dsa"))) == 2, "something was not swept"
            shutil.rmtree(state)
    return found


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.checkpoint.change_kills", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run_trials(Path(folder), options.trials, options.seed)
    print(f"2 x {options.trials} kills:", ", ".join(f"{what} {n}" for what, n in sorted(found.items())))


if __name__ == "__main__":
    main()
