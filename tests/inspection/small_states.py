"""Small states to look at, and what is in their directories."""

import json
import shutil
import zlib

import numpy as np

from dsa import DiskSparseRiemannianAdam, init
from dsa.state.metadata import METADATA_NAME, read_metadata

TABLES = {"entity": init.Normal(300, 4, std=0.1, seed=1), "flat": init.Zeros(40, 3)}
CURVATURES = {"entity": 1.0, "flat": 0.0}


def build(path, tables=None, **options):
    options = {"lr": 0.1, "k": CURVATURES, "allocate": "sparse", **options}
    return DiskSparseRiemannianAdam(TABLES if tables is None else tables, disk_dir=path, **options)


def batch(step, tables=None):
    """Rows and gradients of a step: always the same ones."""
    random = np.random.default_rng(step + 1_000)
    updates = {}
    for name, source in (TABLES if tables is None else tables).items():
        rows = random.integers(0, source.rows, 20)
        updates[name] = (rows, random.normal(size=(20, source.dim)).astype(np.float32))
    return updates


def train(optimizer, steps, first=0, tables=None):
    for step in range(first, first + steps):
        optimizer.step(batch(step, tables))


def content(path):
    """Every file below a path with its bytes and times."""
    return {
        str(file.relative_to(path)): (file.read_bytes(), file.stat().st_mtime_ns, file.stat().st_ino)
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def edit(path, change):
    """Change the description and keep its checksum right."""
    document = json.loads((path / METADATA_NAME).read_text())
    change(document["content"])
    document["crc32"] = f"{zlib.crc32(json.dumps(document['content'], sort_keys=True).encode()):08x}"
    (path / METADATA_NAME).write_text(json.dumps(document))


def as_left(source, target):
    """Copy a directory that is in use, as if its files were those that a killed process had."""
    shutil.copytree(source, target)
    edit(target, lambda content: content.update(files={}))
    return target


def journal(path):
    """The journal of a directory."""
    return path / read_metadata(path).journal_name
