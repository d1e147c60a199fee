"""How long training waits for an export: steps timed without one, and while a thread writes one.

Run by hand: ``python tests/benchmarks/export_stall.py [--rows N] [--dim D] [--batch B]``. It also prints what
a differential checkpoint of 5 % of the rows takes beside the full one.
"""

import argparse
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from dsa import DiskSparseRiemannianAdam, init


def timed(optimizer, rows, grad, generator, until):
    """Take steps until told to stop; return what each took, in milliseconds."""
    times = []
    while not until(len(times)):
        updates = {"table": (generator.integers(0, rows, len(grad)), grad)}
        start = time.perf_counter()
        optimizer.step(updates)
        times.append(1e3 * (time.perf_counter() - start))
    return times


def line(what, times):
    middle, most = np.quantile(times, [0.5, 0.99])
    steps, longest = len(times), max(times)
    print(f"{what:>16}: {steps:6,} steps, median {middle:7.2f} ms, 99 % {most:7.2f}, longest {longest:7.2f}")


def stored(path):
    return sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2_048)
    parser.add_argument("--directory", type=Path, default=None)
    chosen = parser.parse_args()
    generator = np.random.default_rng(0)
    grad = generator.standard_normal((chosen.batch, chosen.dim)).astype(np.float32)
    with tempfile.TemporaryDirectory(dir=chosen.directory) as folder:
        tables = {"table": init.Zeros(chosen.rows, chosen.dim)}
        optimizer = DiskSparseRiemannianAdam(tables, k=0.0, disk_dir=f"{folder}/state")
        for start in range(0, chosen.rows, 1 << 16):
            some = np.arange(start, min(chosen.rows, start + (1 << 16)))
            optimizer.step({"table": (some, np.ones((len(some), chosen.dim), np.float32))})
        line("without", timed(optimizer, chosen.rows, grad, generator, lambda count: count >= 1_000))
        start = time.perf_counter()
        thread = threading.Thread(
            target=optimizer.export_checkpoint, args=(f"{folder}/k",), kwargs={"durable": False}
        )
        thread.start()
        during = timed(optimizer, chosen.rows, grad, generator, lambda count: not thread.is_alive())
        took = time.perf_counter() - start
        line("during an export", during)
        print(f"the export took {took:.1f} s beside training, {stored(f'{folder}/k') / 1e9:.2f} GB")
        base = optimizer.export_checkpoint(f"{folder}/base", durable=False)
        some = generator.choice(chosen.rows, chosen.rows // 20, replace=False)
        optimizer.step({"table": (some, np.ones((len(some), chosen.dim), np.float32))})
        delta = optimizer.export_checkpoint(f"{folder}/delta", base=base, durable=False)
        print(f"5 % of the rows changed: {stored(delta) / stored(base):.3f} of the full one's bytes")
        optimizer.close()


if __name__ == "__main__":
    main()
