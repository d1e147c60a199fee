"""How long training waits for a table that grows: steps timed while rows are added in blocks.

Run by hand: ``python tests/benchmarks/growth.py [--rows N] [--more M] [--dim D] [--block-bytes B]``. A table
of N rows, all of which were written, comes to have M more in blocks of about so many bytes, one every few
steps. It prints the steps, the growths, each growth with the step after it, and the page faults of steps
before and after.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from dsa import DiskSparseRiemannianAdam, init


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def line(what, times):
    middle, most = np.quantile(times, [0.5, 0.99])
    print(
        f"{what:>24}: {len(times):5,} times, median {middle:7.2f} ms, 99 % {most:7.2f}, longest "
        f"{max(times):7.2f}"
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--more", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2_048)
    parser.add_argument("--block-bytes", type=int, default=64 << 20)
    parser.add_argument("--steps", type=int, default=40, help="between two blocks")
    parser.add_argument("--backend", default="memmap")
    parser.add_argument("--durability", default="process")
    parser.add_argument("--directory", type=Path, default=None)
    chosen = parser.parse_args()
    generator = np.random.default_rng(0)
    gradient = generator.standard_normal((chosen.batch, chosen.dim)).astype(np.float32)
    with tempfile.TemporaryDirectory(dir=chosen.directory) as folder:
        optimizer = DiskSparseRiemannianAdam(
            {"table": init.Zeros(chosen.rows, chosen.dim)},
            k=0.0,
            disk_dir=f"{folder}/state",
            backend=chosen.backend,
            durability=chosen.durability,
        )
        table = optimizer._state.tables["table"]
        for start in range(0, chosen.rows, 1 << 16):
            some = np.arange(start, min(chosen.rows, start + (1 << 16)))
            optimizer.step({"table": (some, np.ones((len(some), chosen.dim), np.float32))})

        def steps(count):
            times = []
            for _ in range(count):
                rows = generator.integers(0, len(table), chosen.batch)
                begin = time.perf_counter()
                optimizer.step({"table": (rows, gradient)})
                times.append(1e3 * (time.perf_counter() - begin))
            return times

        steps(20)
        before = faults()
        line("steps before", steps(10 * chosen.steps))
        print(f"{'page faults':>24}: {(faults() - before) / (10 * chosen.steps):.0f} a step")
        block = max(1, chosen.block_bytes // (table.backend.schema.dtype.itemsize + 4))
        taken, growths, firsts = [], [], []
        while len(table) < chosen.rows + chosen.more:
            begin = time.perf_counter()
            optimizer.grow("table", min(len(table) + block, chosen.rows + chosen.more))
            growths.append(1e3 * (time.perf_counter() - begin))
            times = steps(chosen.steps)
            firsts.append(growths[-1] + times[0])
            taken += times
        line("steps between growths", taken)
        line("growths", growths)
        line("growth and next step", firsts)
        before = faults()
        line("steps after", steps(10 * chosen.steps))
        print(f"{'page faults':>24}: {(faults() - before) / (10 * chosen.steps):.0f} a step")
        optimizer.close()


if __name__ == "__main__":
    main()
