"""What the Zarr backends cost, and what compression saves: steps of one table in three backends.

Run by hand: ``python tests/benchmarks/live_zarr.py [--rows N] [--dim D] [--batch B] [--steps S]``. The same
steps are taken with memmap, with mapped Zarr shards and with compressed ones, one step of each in turn, so
that all meet the same machine; the rows of a step are uniform, or Zipf-distributed over shuffled ids. Rows
start from a rule: a row that was never touched takes no disk but what is reserved.

Every batch is met twice. The median is over the second half, where all pages are in memory and written to: a
warm step. Compressed shards are rewritten once in many steps, so that for them the mean, which is over all
steps, tells what a step costs, drains included. The tables end up equal, which is checked.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from dsa import DiskSparseRiemannianAdam, init
from dsa.backends import Memmap, Zarr

KINDS = {"memmap": Memmap(), "zarr": Zarr(), "zstd": Zarr(compression="zstd")}
EXPONENT = 0.9


def batches(kind, rows, size, count):
    """Return batches of distinct rows."""
    generator = np.random.default_rng(0)
    if kind == "uniform":
        return [np.sort(generator.choice(rows, size, replace=False)) for _ in range(count)]
    weights = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -EXPONENT)
    shuffled = generator.permutation(rows)
    drawn = (np.searchsorted(weights, generator.random(size) * weights[-1]) for _ in range(count))
    return [np.unique(shuffled[np.minimum(each, rows - 1)]) for each in drawn]


def occupied(path):
    """Return the bytes that the tables take on disk; the journal is apart."""
    files = [each for each in path.rglob("*") if each.is_file() and each.name != "dsa.journal"]
    return sum(each.stat().st_blocks for each in files) * 512


def run(path, ids, chosen, kinds):
    """Take every step in each backend; return the seconds of each, what is occupied, and the end."""
    grad = np.random.default_rng(1).standard_normal((chosen.batch, chosen.dim)).astype(np.float32)
    made = {
        kind: DiskSparseRiemannianAdam(
            {"entity": init.Normal(chosen.rows, chosen.dim, 0.1, seed=0)},
            k=0.0,
            disk_dir=path / kind,
            backend=KINDS[kind],
            allocate="sparse",
        )
        for kind in kinds
    }
    seconds = {kind: [] for kind in kinds}
    for rows in ids * 2:
        for kind, optimizer in made.items():
            start = time.perf_counter()
            optimizer.step({"entity": (rows, grad[: len(rows)])})
            seconds[kind].append(time.perf_counter() - start)
    sample = np.arange(0, chosen.rows, 97)
    ends, disk = [], {}
    for kind, optimizer in made.items():
        start = time.perf_counter()
        optimizer.flush()
        seconds[kind].append(time.perf_counter() - start)
        ends.append(optimizer._state.tables["entity"].backend.read(sample).tobytes())
        optimizer.close()
        disk[kind] = occupied(path / kind)
    if len(set(ends)) != 1:
        raise SystemExit("the tables differ")
    return seconds, disk


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2_048)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--directory", type=Path, help="where to work; it must not exist")
    chosen = parser.parse_args()
    root = chosen.directory or Path(tempfile.mkdtemp(prefix="dsa-live-zarr-"))
    root.mkdir(exist_ok=True)
    try:
        run(root / "compile", batches("uniform", chosen.rows, chosen.batch, 2), chosen, chosen.kinds)
        for access in ("uniform", "zipf"):
            ids = batches(access, chosen.rows, chosen.batch, chosen.steps)
            touched = len(np.unique(np.concatenate(ids))) / chosen.rows
            seconds, disk = run(root / access, ids, chosen, chosen.kinds)
            shutil.rmtree(root / access)
            print(
                f"{access}: {chosen.rows:,} rows x {chosen.dim}, 2 x {chosen.steps} steps of "
                f"{np.mean([len(each) for each in ids]):,.0f} rows, {touched:.0%} of the rows touched"
            )
            first = np.median(seconds[chosen.kinds[0]][chosen.steps : -1])
            for kind, times in seconds.items():
                median, mean = np.median(times[chosen.steps : -1]), np.mean(times[:-1])
                print(
                    f"  {kind:>7}: {1e3 * median:8.2f} ms a step (median), {median / first:5.1f} x; "
                    f"{1e3 * mean:8.2f} ms mean; {times[-1]:6.2f} s to flush; {disk[kind] / 1e6:8,.0f} MB"
                )
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
