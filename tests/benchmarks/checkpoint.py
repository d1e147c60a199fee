"""Exporting and importing, timed beside `cp` and beside zarr-python on the same bytes.

Run by hand: ``python tests/benchmarks/checkpoint.py [--rows N] [--dim D] [--rounds R] [--dir PATH]``. In
every round each contender takes its turn, into a directory of its own that is deleted before the next;
medians over the rounds, and ratios of medians. The records are in memory, so that what is measured is
splitting them into arrays, hashing and writing. ``cp`` copies the files that our export has made.
zarr-python writes the same arrays in the same shards; with hashing, it hashes every block with hashlib
before it writes it.
"""

import argparse
import hashlib
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import zarr

from dsa.backends.shards.layout import block_rows
from dsa.checkpoint import open_checkpoint, write_checkpoint
from dsa.rules.adam import ADAM
from dsa.schema import adam_schema
from dsa.state.content import StateContent, TableContent
from dsa.state.facts import TableFacts

FIELDS = ("w", "m", "v", "t", "s")


def make_content(rows, dim):
    """Return a state of one table, all of whose rows were touched, and its arrays."""
    schema, rng = adam_schema(dim), np.random.default_rng(0)
    records = np.empty(rows, schema.dtype)
    for name in "wmv":
        records[name] = rng.standard_normal((rows, dim), dtype=np.float32)
    records["t"] = records["s"] = 1
    block = max(1, (4 << 20) // schema.dtype.itemsize)

    def blocks():
        for start in range(0, rows, block):
            yield start, records[start : start + block]

    arrays = {name: np.ascontiguousarray(records[name]) for name in FIELDS}
    return StateContent((TableContent(TableFacts("table", rows, schema, ADAM), blocks),)), arrays


def zarr_write(arrays, path, template, hashing):
    """Write the arrays with zarr-python, block by block, in the shards of our export."""
    like = zarr.open_group(template, mode="r")["table"]
    group = zarr.open_group(path, mode="w")
    for name, values in arrays.items():
        array = group.create_array(
            name, shape=values.shape, dtype=values.dtype, chunks=like[name].chunks, shards=like[name].shards,
            compressors=None,
        )  # fmt: skip
        step = block_rows(len(values), values.nbytes // len(values))
        for start in range(0, len(values), step):
            block = values[start : start + step]
            if hashing:
                hashlib.sha256(block).hexdigest()
            array[start : start + step] = block


def zarr_read(path, hashing):
    group = zarr.open_group(path, mode="r")["table"]
    for _, array in group.arrays():
        step = array.attrs["dsa_checksum"]["block_rows"]
        for start in range(0, array.shape[0], step):
            block = array[start : start + step]
            if hashing:
                hashlib.sha256(np.ascontiguousarray(block)).hexdigest()


def consume(content):
    for table in content.tables:
        for _ in table.blocks():
            pass


def contenders(content, arrays, template):
    """Yield the name, the baseline's name, the goal and the run of each; a run gets a directory."""
    return {
        "export": {
            "cp": lambda path: subprocess.run(["cp", "-r", template, path], check=True),
            "cp and sync": lambda path: (
                subprocess.run(["cp", "-r", template, path], check=True),
                subprocess.run(["sync", "-f", template], check=True),
            ),
            "zarr-python": lambda path: zarr_write(arrays, path, template, False),
            "zarr-python and hashlib": lambda path: zarr_write(arrays, path, template, True),
            "ours": lambda path: write_checkpoint(content, path, durable=False),
            "ours, durable": lambda path: write_checkpoint(content, path),
            "ours, zstd": lambda path: write_checkpoint(content, path, durable=False, compression="zstd"),
        },
        "import": {
            "cp": lambda path: subprocess.run(["cp", "-r", template, path], check=True),
            "zarr-python": lambda path: zarr_read(template, False),
            "zarr-python and hashlib": lambda path: zarr_read(template, True),
            "ours, verified": lambda path: consume(open_checkpoint(template).content()),
            "ours, not verified": lambda path: consume(open_checkpoint(template).content(verify=False)),
            "ours, verify()": lambda path: open_checkpoint(template).verify(),
        },
    }  # fmt: skip


GOALS = [
    ("export", "ours", "cp", 0.35),
    ("export", "ours", "zarr-python", 0.8),
    ("export", "ours", "zarr-python and hashlib", 1.5),
    ("import", "ours, verified", "cp", 0.35),
    ("import", "ours, not verified", "zarr-python", 0.8),
    ("import", "ours, verified", "zarr-python and hashlib", 1.5),
]


def race(runs, folder, size, rounds):
    """Return the median rate of each contender in GB/s."""
    rates = {name: [] for name in runs}
    for turn in range(rounds):
        names = list(runs)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            path = str(folder / "run")
            start = time.perf_counter()
            runs[name](path)
            rates[name].append(size / (time.perf_counter() - start) / 1e9)
            shutil.rmtree(path, ignore_errors=True)
    return {name: statistics.median(values) for name, values in rates.items()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=660_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--dir", type=Path, default=None, help="where the files go; default: the temporary directory"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    content, arrays = make_content(options.rows, options.dim)
    size = sum(values.nbytes for values in arrays.values())
    print(f"{size / 1e9:.2f} GB, {options.rounds} rounds, {os.cpu_count()} processors; median GB/s")
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        template = write_checkpoint(content, Path(folder) / "template")
        rates = {}
        for what, runs in contenders(content, arrays, template).items():
            for name, rate in race(runs, Path(folder), size, options.rounds).items():
                rates[what, name] = rate
                print(f"  {what:7} {name:26} {rate:6.2f}", flush=True)
    for what, name, baseline, goal in GOALS:
        ratio = rates[what, name] / rates[what, baseline]
        print(
            f"{what}: {name} / {baseline} = {ratio:.2f}, wanted {goal}{'' if ratio >= goal else '  MISSED'}"
        )


if __name__ == "__main__":
    main()
