"""What overlay reads are worth: training with a slow disk, against a queue that drains when rows meet.

Run by hand: ``python tests/benchmarks/overlay.py [--rows N] [--batch B] [--steps S] [--delay MS]``. It
prints the throughput of the training thread for three ways of writing the same steps to the same slow disk
(each write takes 5 ms longer): in the step itself; in a queue that is drained before a step whose rows are in
it; and in a queue whose rows are read from it. The tables end up equal, which is checked.
"""

import argparse
import hashlib
import itertools
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np

from dsa import DiskSparseRiemannianAdam, init
from dsa.backends.memmap import MemmapBackend
from dsa.state.metadata import table_file_name

EXPONENT = 1.05
DIM = 16


def zipf_batches(rows, batch, steps):
    """Return batches whose row k has probability proportional to (k + 1)**-1.05, and one gradient for all."""
    weights = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -EXPONENT)
    generator = np.random.default_rng(0)
    drawn = [np.searchsorted(weights, generator.random(batch) * weights[-1]) for _ in range(steps)]
    return drawn, generator.standard_normal((batch, DIM)).astype(np.float32)


class DrainOnConflict:
    """The step of an optimizer with a queue that does not serve reads."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.writer = optimizer._state.tables["entity"].writer
        self.queued = np.zeros(len(self.writer), np.bool_)

    def step(self, updates):
        rows = updates["entity"][0]
        if self.queued[rows].any():
            self.writer.drain()
            self.queued[:] = False
        self.optimizer.step(updates)
        self.queued[rows] = True


def run(kind, path, rows, batches, grad, delay):
    """Train; return the seconds of the loop, those until everything was written, and the table's digest."""
    write = MemmapBackend.write

    def slow(backend, *batch):
        time.sleep(delay)
        write(backend, *batch)

    with mock.patch.object(MemmapBackend, "write", slow):
        optimizer = DiskSparseRiemannianAdam(
            {"entity": init.Normal(rows, DIM, 0.1)},
            k=0.0,
            disk_dir=path,
            async_writes=kind != "in the step",
        )
        trained = DrainOnConflict(optimizer) if kind == "drain on conflict" else optimizer
        start = time.perf_counter()
        for drawn in batches:
            trained.step({"entity": (drawn, grad)})
        looped = time.perf_counter() - start
        optimizer.close()
    content = (path / table_file_name("entity")).read_bytes()[4096:]
    return looped, time.perf_counter() - start, hashlib.sha256(content).hexdigest()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=1_024)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--delay", type=float, default=5.0, help="milliseconds added to each write")
    chosen = parser.parse_args()
    batches, grad = zipf_batches(chosen.rows, chosen.batch, chosen.steps)
    met = np.mean([np.isin(now, before).any() for before, now in itertools.pairwise(batches)])
    print(
        f"Zipf({EXPONENT}) over {chosen.rows:,} rows x {DIM}, {chosen.steps} steps of {chosen.batch:,} rows,"
    )
    print(f"each write {chosen.delay:g} ms slower; {met:.1%} of the batches share a row with the one before")
    looped, digests = {}, set()
    with tempfile.TemporaryDirectory() as directory:
        run("overlay", Path(directory) / "compile", chosen.rows, batches[:2], grad, 0.0)
        for kind in ("in the step", "drain on conflict", "overlay"):
            path = Path(directory) / kind
            looped[kind], whole, digest = run(kind, path, chosen.rows, batches, grad, chosen.delay / 1_000)
            digests.add(digest)
            print(
                f"{kind:>18}: {chosen.steps / looped[kind]:7.0f} steps/s, {whole:6.2f} s until all is written"
            )
    if len(digests) != 1:
        raise SystemExit("the tables differ")
    ratio = looped["drain on conflict"] / looped["overlay"]
    print(f"overlay / drain on conflict: {ratio:.1f} x (at least 5 wanted)")


if __name__ == "__main__":
    main()
