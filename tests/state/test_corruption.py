"""Random bytes over any file of a state: an error, a refusal or plausible values, never a dead process.

The attempts run in child processes, so that a death by signal is seen as one. A child reports its surprises.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import nursery
import pytest
from current_files import copy_as_killed, table_file

import dsa
from dsa import DiskSparseRiemannianAdam, init
from dsa.errors import StateCorruptError, StateError
from dsa.state.metadata import METADATA_NAME, table_file_name

LOCK = "dsa.lock"
CONFIGURATIONS = {
    "flat": {"k": 0.0, "weight_decay": 0.01},
    "flat, row": {"k": 0.0, "second_moment": "row", "bias_correction": "parameter"},
    "ball": {"k": 1.0, "weight_decay": 0.01, "weight_decay_mode": "decoupled"},
    "ball, root": {"k": 1.0, "v_transport": "sqrt"},
    "ball, frame": {"k": 4.0, "second_moment": "frame", "max_step": 0.5},
    "ball, row": {"k": 0.1, "second_moment": "row"},
}

PRELUDE = """
import faulthandler, json, math, os, shutil, sys, warnings
from pathlib import Path
import numpy as np, torch
from current_files import copy_as_killed, record_checksum
from dsa import DiskSparseRiemannianAdam, init
from dsa.errors import CorruptRowError, DSAError, GradientError, StateError
from dsa.state.metadata import table_file_name

faulthandler.enable()
warnings.simplefilter("ignore")
root, configurations, seeds = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
work = root / "work"
TABLES = {"rule": init.Normal(60, 3, 0.1, seed=1), "array": init.Zeros(40, 5)}
surprises = []

def fresh(kind):
    shutil.rmtree(work, ignore_errors=True)
    copy_as_killed(root / kind, work)

def build(kind, resume=True):
    return DiskSparseRiemannianAdam(TABLES, lr=0.1, disk_dir=work, resume=resume, **configurations[kind])

def use(optimizer, seed):
    # Everything a run does; every failure must be one of ours, and what is read must be plausible.
    generator = np.random.default_rng(seed)
    def attempt(action):
        try:
            return action()
        except DSAError:
            return None
    for name, source in TABLES.items():
        for row in range(source.rows):
            weights = attempt(lambda: optimizer.read_rows([row], name))
            if weights is not None and not torch.isfinite(weights).all():
                surprises.append((seed, name, row, "a weight is not finite"))
            k = optimizer._state.tables[name].k
            if weights is not None and k > 0 and weights.double().norm() >= 1 / math.sqrt(k):
                surprises.append((seed, name, row, "a weight is outside the ball"))
            grad = generator.standard_normal((1, source.dim)).astype(np.float32)
            attempt(lambda: optimizer.step({name: ([row], grad)}))
        everything = range(source.rows)
        grad = generator.standard_normal((source.rows, source.dim)).astype(np.float32)
        attempt(lambda: optimizer.step({name: (everything, grad)}))
    attempt(lambda: optimizer.set_curvature(2.0, name="rule", map=["clip", "log0"][seed % 2]))
    optimizer.reproject_all()
    for name, source in TABLES.items():
        weights = optimizer.read_rows(range(source.rows), name)
        if not torch.isfinite(weights).all():
            surprises.append((seed, name, "not finite after reproject_all"))
        for row in range(source.rows):
            try:
                optimizer.step({name: ([row], np.ones((1, source.dim), np.float32))})
            except GradientError:  # finite but enormous moments: they can't be told from wrong ones
                pass
            except CorruptRowError as error:
                surprises.append((seed, name, row, f"after reproject_all: {error}"))
    attempt(lambda: optimizer.set_curvature(1.0, name="rule", reset_moments=True))
"""

RECORDS = """
# Bit patterns that hurt: NaN, infinities, the largest and the smallest numbers, integers at their ends.
PATTERNS = np.array([0x7FC00000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF, 1, 0x80000000, 0x80000001,
                     0x7FFFFFFF, 0xFFFFFFFF, 0x7FFFFFFE, 0x3F800000, 0x3F7FFFFF, 0x1F800000, 0], np.uint32)
for kind, seed in ((kind, seed) for kind in configurations for seed in range(seeds)):
    print(kind, seed, flush=True)
    fresh(kind)
    generator = np.random.default_rng(seed)
    with build(kind) as optimizer:
        sizes = {n: (t.backend.schema.dtype.itemsize, t.backend._stride)
                 for n, t in optimizer._state.tables.items()}
    for name in TABLES:
        file = work / table_file_name(name)
        content = np.fromfile(file, np.uint8)
        words = content[4096:].view(np.uint32)
        hit = generator.random(len(words)) < generator.choice([0.003, 0.05, 0.5, 1.0])
        kinds = [generator.integers(0, 2**32, len(words)).astype(np.uint32),
                 generator.choice(PATTERNS, len(words)),
                 words ^ (1 << generator.integers(0, 32, len(words))).astype(np.uint32)]
        words[hit] = kinds[seed % 3][hit]
        if seed // 3 % 2:  # a program's fault, not the disk's: the checksums match
            size, stride = (number // 4 for number in sizes[name])
            for record in words.reshape(-1, stride):
                record[size] = record_checksum(record[:size])
        content.tofile(file)
    try:
        with build(kind) as optimizer:
            use(optimizer, seed)
        build(kind).close()
    except BaseException as error:
        surprises.append((kind, seed, repr(error)))
print(json.dumps(surprises, default=str))
"""

FILES = """
for kind, seed in ((kind, seed) for kind in configurations for seed in range(seeds)):
    generator = np.random.default_rng(seed)
    for name in sorted(file.name for file in (root / kind).iterdir()):
        print(kind, seed, name, flush=True)
        fresh(kind)
        content = np.fromfile(work / name, np.uint8)
        if not content.any():
            continue
        # The records have a test of their own; a journal ends in zeros, of which one page is enough.
        used = min(len(content), int(np.flatnonzero(content)[-1]) + 4096)
        within = min(len(content), 4096) if name.endswith(".dsa") else used
        start = int(generator.integers(0, within))
        stop = int(min(within, start + generator.choice([1, 1, 4, 64, 4096])))
        noise = generator.integers(0, 256, stop - start).astype(np.uint8)
        flipped = content[start:stop] ^ (1 << generator.integers(0, 8, stop - start)).astype(np.uint8)
        content[start:stop] = [noise, flipped, noise * 0, content[start:stop][::-1]][seed % 4]
        content.tofile(work / name)
        for resume in (None, True):
            try:
                with build(kind, resume) as optimizer:
                    optimizer.step({"array": ([1], np.ones((1, 5), np.float32))})
                    if not torch.isfinite(optimizer.read_rows(range(60), "rule")).all():
                        surprises.append((kind, seed, name, start, stop, "not finite"))
            except StateError:
                pass
            except BaseException as error:
                surprises.append((kind, seed, name, start, stop, repr(error)))
print(json.dumps(surprises, default=str))
"""


def tables():
    return {"rule": init.Normal(60, 3, 0.1, seed=1), "array": init.Zeros(40, 5)}


def make(path, copy=None, **options):
    """A state with rows touched and untouched in each table, closed; and a copy as a kill would leave it."""
    with DiskSparseRiemannianAdam(tables(), lr=0.1, disk_dir=path, **options) as optimizer:
        for step in range(5):
            generator = np.random.default_rng(step)
            optimizer.step(
                {
                    name: (
                        generator.integers(0, source.rows, 20),
                        generator.standard_normal((20, source.dim)),
                    )
                    for name, source in tables().items()
                }
            )
        if copy is not None:
            copy_as_killed(path, copy)
    return path


def child(code, root, configurations, seeds):
    """Run code in a child that must end by itself; return what surprised it."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = nursery.run(PRELUDE + code, root, json.dumps(configurations), seeds, env=environment)
    *cases, last = done.stdout.splitlines() or [""]
    assert done.returncode == 0, (
        f"it ended with {done.returncode} at case {last or cases}:\n{done.stderr[-3000:]}"
    )
    return json.loads(last)


def test_random_bytes_in_the_records(tmp_path):
    for kind, options in CONFIGURATIONS.items():
        make(tmp_path / kind, **options)
    assert child(RECORDS, tmp_path, CONFIGURATIONS, seeds=6) == []


def test_random_bytes_in_the_descriptions(tmp_path):
    """And in the journal, where there is one: of a directory that was closed, and of one that was not."""
    make(tmp_path / "closed", copy=tmp_path / "killed", k=1.0)
    assert len(list((tmp_path / "killed").iterdir())) > len(list((tmp_path / "closed").iterdir()))
    assert child(FILES, tmp_path, {"closed": {"k": 1.0}, "killed": {"k": 1.0}}, seeds=16) == []


def content(path):
    return {file.name: file.read_bytes() for file in sorted(path.iterdir()) if file.name != LOCK}


def refuse(path, error):
    before = content(path)
    for resume in (None, True):
        with pytest.raises(error):
            DiskSparseRiemannianAdam(tables(), lr=0.1, k=1.0, disk_dir=path, resume=resume)
        assert content(path) == before


LENGTHS = {
    "a byte short": lambda size: size - 1,
    "a record short": lambda size: size - 44,
    "a page short": lambda size: size - 4096,
    "half": lambda size: size // 2,
    "one byte": lambda size: 1,
    "empty": lambda size: 0,
    "a byte long": lambda size: size + 1,
    "a page long": lambda size: size + 4096,
    "double": lambda size: 2 * size,
}


@pytest.mark.parametrize("change", LENGTHS)
@pytest.mark.parametrize("name", [METADATA_NAME, table_file_name("rule"), table_file_name("array")])
def test_truncated_and_extended_files_are_refused(tmp_path, name, change):
    good = make(tmp_path / "good", k=1.0)
    size = (good / name).stat().st_size
    os.truncate(good / name, max(0, LENGTHS[change](size)))
    for resume in (None, True):
        before = content(good)
        # A directory that is not to be resumed is refused for being there, whatever its tables hold.
        expected = StateCorruptError if resume or name == METADATA_NAME else StateError
        with pytest.raises(expected):
            DiskSparseRiemannianAdam(tables(), lr=0.1, k=1.0, disk_dir=good, resume=resume)
        assert content(good) == before


def test_a_file_cut_by_a_copy_that_ran_out(tmp_path):
    """Every length from none to all but one byte, of each file in turn, in steps."""
    good = make(tmp_path / "good", k=1.0)
    for name in (METADATA_NAME, table_file_name("array")):
        whole = (good / name).read_bytes()
        for length in {*range(0, len(whole), 97), len(whole) - 1, len(whole) - 2}:
            if whole[length:].strip():
                (good / name).write_bytes(whole[:length])
                refuse(good, StateError)
        (good / name).write_bytes(whole)
    DiskSparseRiemannianAdam(tables(), lr=0.1, k=1.0, disk_dir=good, resume=True).close()


def test_every_bit_of_a_header_counts(tmp_path):
    good = make(tmp_path / "good", k=1.0)
    file = table_file(good, "rule")
    whole = file.read_bytes()
    for position in [*range(0, 600, 7), *range(600, 4096, 211), 4095]:
        changed = bytearray(whole)
        changed[position] ^= 1 << (position % 8)
        file.write_bytes(changed)
        with pytest.raises(StateCorruptError, match="header"):
            DiskSparseRiemannianAdam(tables(), lr=0.1, k=1.0, disk_dir=good, resume=True)
    file.write_bytes(whole)
    DiskSparseRiemannianAdam(tables(), lr=0.1, k=1.0, disk_dir=good, resume=True).close()


def test_starting_over_repairs_every_damage(tmp_path):
    for damage in (b"", b"\xff" * 5000, b'{"content": []}'):
        good = make(tmp_path / "good", k=1.0)
        for name in content(good):
            (good / name).write_bytes(damage)
        with pytest.warns(dsa.errors.StateWarning, match="resume=False"):
            optimizer = DiskSparseRiemannianAdam(tables(), lr=0.1, k=1.0, disk_dir=good, resume=False)
        with optimizer:
            optimizer.step({"array": ([1], np.ones((1, 5), np.float32))})
            assert optimizer.global_step == 1
        shutil.rmtree(good)
