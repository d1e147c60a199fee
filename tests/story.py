"""A small run to try commands on: a state directory, checkpoints, and directories of older releases."""

import shutil
from pathlib import Path

import numpy as np

from dsa import DiskSparseRiemannianAdam, init

GOLDEN = Path(__file__).parent / "golden" / "legacy"
ROWS = {"entity": 300, "relation": 40}
DIM = 4
STEPS = {"full": 20, "delta": 30, "end": 40}


def build(path, resume=None, **options):
    weights = np.random.default_rng(7).standard_normal((ROWS["relation"], DIM)).astype(np.float32)
    tables = {"entity": init.Normal(ROWS["entity"], DIM, 0.1, seed=1), "relation": weights}
    options = {"k": {"entity": 1.0, "relation": 0.0}, "lr": 0.05, "allocate": "sparse", **options}
    return DiskSparseRiemannianAdam(tables, disk_dir=path, resume=resume, **options)


def batch(step):
    random = np.random.default_rng(1_000 + step)
    return {
        name: (random.integers(0, rows // 2, 10), random.normal(size=(10, DIM)).astype(np.float32))
        for name, rows in ROWS.items()
    }


def tell(folder):
    """Make everything in a folder."""
    with build(folder / "run") as optimizer:
        for step in range(STEPS["end"]):
            if step == STEPS["full"]:
                base = optimizer.export_checkpoint(folder / "checkpoints/step-20", attributes={"epoch": 1})
            if step == STEPS["delta"]:
                optimizer.export_checkpoint(folder / "checkpoints/step-30-changes", base=base)
            optimizer.step(batch(step))
    shutil.copytree(GOLDEN / "0.3.0", folder / "old-run")
    (folder / "older-run").mkdir()
    for field in "wmv":
        (folder / "older-run" / f"emb_{field}.dat").write_bytes(np.zeros((1_000, 16), np.float32).tobytes())


def listing(path):
    """Every file below a path with its bytes and times."""
    return {
        str(file.relative_to(path)): (file.read_bytes(), file.stat().st_mtime_ns)
        for file in sorted(Path(path).rglob("*"))
        if file.is_file()
    }


def flip(file, offset=None, bit=2):
    """Change one bit of a file; in its middle where no place is given."""
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2 if offset is None else offset] ^= 1 << bit
    file.write_bytes(raw)
