"""Makes the directories under `legacy/`: what releases 0.1.0, 0.2.0 and 0.3.0 left, by numpy and json alone.

Run it as ``python make_legacy.py DIRECTORY``; it gives the same bytes everywhere. Nothing of dsa is imported,
so that reader and writer can't share a mistake.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

TABLES = {"entity_emb": (7, 3), "rel.b_w": (5, 4), "a b": (1, 1)}
STEP = 12
CURVATURE = 0.5
DTYPES = {"w": "<f4", "m": "<f4", "v": "<f4", "t": "<i4"}


def pattern(size, seed):
    """Numbers in [0, 1) that every machine gives alike."""
    places = np.arange(1, size + 1, dtype=np.uint64) + np.uint64(1000 * seed)
    return ((places * np.uint64(2654435761)) % np.uint64(1 << 24)).astype(np.float64) / (1 << 24)


def array(name, field, shape):
    """The values of a field: weights within [-0.3, 0.3], small moments, counters from 0 to STEP."""
    rows, dim = shape
    if field == "t":
        return (np.arange(rows) * 5 % (STEP + 1)).astype("<i4")
    seed = sorted(TABLES).index(name) * 3 + "wmv".index(field)
    values = pattern(rows * dim, seed).reshape(rows, dim)
    scaled = {"w": 0.6 * values - 0.3, "m": 0.02 * values - 0.01, "v": 1e-4 * values}[field]
    return scaled.astype("<f4")


def write_arrays(directory, fields, tables=TABLES):
    directory.mkdir(parents=True, exist_ok=True)
    for name, shape in tables.items():
        for field in fields:
            (directory / f"{name}_{field}.dat").write_bytes(array(name, field, shape).tobytes())


def write_json(path, values):
    path.write_bytes(json.dumps(values, indent=1).encode())


def describe(name, version):
    description = {"format_version": version, "shape": list(TABLES[name]), "dtype": "float32"}
    if version == 2:
        description |= {"curvature": CURVATURE, "algorithm": "riemannian_adam"}
    return description


def make_first(directory):
    write_arrays(directory, "wmv")


def make_second(directory):
    write_arrays(directory, "wmvt")
    for name in TABLES:
        write_json(directory / f"{name}_meta.json", describe(name, 1))


def make_third(directory):
    write_arrays(directory, "wmvt")
    for name in TABLES:
        write_json(directory / f"{name}_meta.json", describe(name, 2))
    write_json(
        directory / "dsa_global_meta.json", {"format_version": 2, "global_step": STEP, "curvature": CURVATURE}
    )


def make_checkpoint(directory):
    write_arrays(directory, "wmvt")
    files = {}
    for path in sorted(directory.glob("*.dat")):
        content = path.read_bytes()
        files[path.name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    params = {name: {"shape": list(shape), "dtype": "float32"} for name, shape in TABLES.items()}
    manifest = {"format_version": 2, "global_step": STEP, "curvature": CURVATURE}
    write_json(directory / "checkpoint.json", {**manifest, "params": params, "files": files})


def make_old_checkpoint(directory):
    directory.mkdir(parents=True, exist_ok=True)
    files = {name: {field: f"/data/run/{name}_{field}.dat" for field in "wmvt"} for name in TABLES}
    write_json(directory / "checkpoint.json", {"format_version": 1, "step": STEP, "files": files})


MAKERS = {
    "0.1.0": make_first,
    "0.2.0": make_second,
    "0.2.0-checkpoint": make_old_checkpoint,
    "0.3.0": make_third,
    "0.3.0-checkpoint": make_checkpoint,
}


def main(root):
    for kind, make in MAKERS.items():
        make(root / kind)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
