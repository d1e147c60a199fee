"""What ids cost: a training step through the map beside a dense table's, and steps while rows come.

    python tests/benchmarks/ids.py [--rows 1000000] [--dim 128] [--batch 2048] [--steps 60] [--new 2000000]

Both tables take the same batches in turn; medians are told. Then a table of ids is filled by batches of ids
that are all new, and the distribution of its steps' times is told.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import dsa


def step(layer, optimizer, ids):
    """Return the seconds of one step."""
    began = time.perf_counter()
    optimizer.zero_grad()
    layer(ids).sum().backward()
    optimizer.step()
    return time.perf_counter() - began


def known_ids(arguments, directory):
    """Compare steps in which every id has a row."""
    rng = np.random.default_rng(0)
    ids = rng.integers(-(2**63), 2**63, arguments.rows)
    dense = dsa.DiskEmbeddingBag(arguments.rows, arguments.dim, mode="sum", state_dir=directory / "dense")
    keyed = dsa.DiskEmbeddingBag(None, arguments.dim, mode="sum", state_dir=directory / "keyed")
    began = time.perf_counter()
    keyed.insert(torch.from_numpy(ids))
    print(f"{arguments.rows:,} ids inserted in {time.perf_counter() - began:.1f} s")
    dense.set_rows(torch.arange(arguments.rows), torch.zeros(arguments.rows, arguments.dim))
    tables = {"dense": dense, "keyed": keyed}
    optimizers = {name: dsa.DiskSparseAdam(layer.parameters()) for name, layer in tables.items()}
    times = {name: [] for name in tables}
    for _ in range(arguments.steps):
        rows = rng.integers(0, arguments.rows, (arguments.batch, 1))
        batches = {"dense": torch.from_numpy(rows), "keyed": torch.from_numpy(ids[rows])}
        for name, layer in tables.items():
            times[name].append(step(layer, optimizers[name], batches[name]))
    medians = {name: float(np.median(each[5:])) * 1e3 for name, each in times.items()}
    print(", ".join(f"{name} {each:.2f} ms" for name, each in medians.items()), end="; ")
    print(f"{medians['keyed'] / medians['dense']:.2f}x")
    dense.close()
    keyed.close()


def new_ids(arguments, directory):
    """Tell how long steps take whose ids are all new."""
    rng = np.random.default_rng(1)
    layer = dsa.DiskEmbeddingBag(None, arguments.dim, mode="sum", state_dir=directory / "new")
    optimizer = dsa.DiskSparseAdam(layer.parameters())
    times = []
    for _ in range(arguments.new // arguments.batch):
        ids = torch.from_numpy(rng.integers(-(2**63), 2**63, (arguments.batch, 1)))
        times.append(step(layer, optimizer, ids) * 1e3)
    quantiles = np.quantile(times, [0.5, 0.9, 0.99, 0.999, 1.0])
    labels = ("median", "90 %", "99 %", "99.9 %", "longest")
    print(f"{len(times)} steps of {arguments.batch} new ids, ms:", end=" ")
    print(", ".join(f"{label} {each:.1f}" for label, each in zip(labels, quantiles, strict=True)))
    layer.close()


def main():
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = {"rows": 1_000_000, "dim": 128, "batch": 2048, "steps": 60, "new": 2_000_000}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--directory", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        known_ids(arguments, Path(directory))
        new_ids(arguments, Path(directory))


if __name__ == "__main__":
    main()
