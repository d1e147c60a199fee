"""Steps in place and staged ones: the same batches give the same bytes, and those of other programs."""

import contextlib
import itertools
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsa
from dsa import DiskSparseAdam, DiskSparseRiemannianAdam, init
from dsa.backends import Memmap, Zarr
from dsa.kernels.adam import adam_step
from dsa.kernels.poincare import riemannian_adam_step
from dsa.rules.conventions import AdamOptions

SHARDS = Zarr(shard_bytes=1024)
IN_PLACE = {
    "process": {"durability": "process"},
    "none": {"durability": "none"},
    "zarr": {"backend": SHARDS},
    "zarr, none": {"backend": SHARDS, "durability": "none"},
}
STAGED = {
    "power": {"durability": "power"},
    "queue": {"async_writes": True},
    "zarr, power": {"backend": SHARDS, "durability": "power"},
    "zarr, queue": {"backend": SHARDS, "async_writes": True},
    "zstd": {"backend": Zarr(compression="zstd", shard_bytes=4096)},
}
WAYS = IN_PLACE | STAGED
ROWS = 30
RULES = [("coordinate", 0.0), ("row", 0.0), ("coordinate", 1.0), ("frame", 0.5), ("row", 2.0)]
by_rule = pytest.mark.parametrize(("second_moment", "k"), RULES, ids=[f"{mode}, k={k}" for mode, k in RULES])


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def workspace():
    path = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def build(path, source, way, second_moment="coordinate", k=0.0, **options):
    options = WAYS[way] | options
    optimizer = DiskSparseRiemannianAdam(
        {"table": source}, lr=0.05, k=k, disk_dir=path, second_moment=second_moment, **options
    )
    table = optimizer._state.tables["table"]
    assert optimizer._state.can_be_in_place([table]) == (way in IN_PLACE)
    return optimizer


def records_of(optimizer):
    """The records of every table; a row that was never written is all zeros."""
    return b"".join(
        table.backend.read(np.arange(len(table))).tobytes()
        for table in optimizer._portable_state().tables.values()
    )


def run(path, source, way, batches, second_moment="coordinate", k=0.0):
    """Return the records that a run leaves, and all weights."""
    with build(path, source, way, second_moment, k) as optimizer:
        for batch in batches:
            optimizer.step({"table": batch})
        return records_of(optimizer), optimizer.read_rows(range(ROWS))


DIMS = st.sampled_from([1, 2, 3, 4, 5, 8, 13, 16, 17, 33])
IDS = st.lists(st.integers(0, ROWS - 1), max_size=40)


@by_rule
@settings(max_examples=12)
@given(dim=DIMS, ids=st.lists(IDS, min_size=1, max_size=4), seed=st.integers(0, 999), by_array=st.booleans())
def test_the_same_bytes_in_every_way(second_moment, k, dim, ids, seed, by_array):
    """Ids that repeat, rows never written beside written ones, records of every size."""
    rng = np.random.default_rng(seed)
    array = rng.uniform(-0.2, 0.2, (ROWS, dim)).astype(np.float32) / dim
    source = array if by_array else init.Normal(ROWS, dim, std=0.1 / dim, seed=seed)
    batches = [(np.array(each, int), rng.normal(size=(len(each), dim)).astype(np.float32)) for each in ids]
    with workspace() as space:
        found = {way: run(space / way, source, way, batches, second_moment, k) for way in WAYS}
    expected, weights = found["power"]
    for way, (records, read) in found.items():
        assert records == expected, way
        assert torch.equal(read, weights), way


@by_rule
@pytest.mark.parametrize("dim", [3, 16])
def test_the_same_bytes_on_any_number_of_threads(tmp_path, second_moment, k, dim):
    """Slices end at distinct rows, whose gradients are summed in one of them; a third of the rows is new."""
    rows, rng = 6_000, np.random.default_rng(dim)
    source = init.Normal(rows, dim, std=0.01, seed=4)
    batches = []
    for number in range(3):
        ids = rng.integers(0, rows * (number + 1) // 3, 7_000)
        ids[1_000:1_600] = ids[0]
        batches.append((ids, rng.normal(size=(len(ids), dim)).astype(np.float32)))
    found, kinds = {}, {"memmap": Memmap(), "zarr": Zarr(shard_bytes=1 << 16)}
    for way, kind in itertools.product(("process", "none", "power"), kinds):
        for count in (1, 2, 4):
            path, options = tmp_path / f"{way} {kind} {count}", {"backend": kinds[kind]}
            with threads(count), build(path, source, way, second_moment, k, **options) as optimizer:
                for batch in batches:
                    optimizer.step({"table": batch})
                found[way, kind, count] = records_of(optimizer)
    assert len(set(found.values())) == 1, {each: hash(records) for each, records in found.items()}


@by_rule
def test_a_step_in_place_is_that_of_records_in_memory(tmp_path, second_moment, k):
    """Which `tests/kernels` compares with oracles of their own; gradients of one row are summed in order."""
    rng, dim = np.random.default_rng(1), 7
    source = rng.uniform(-0.1, 0.1, (ROWS, dim)).astype(np.float32)
    options = AdamOptions(lr=0.05, second_moment=second_moment)
    with build(tmp_path, source, "process", second_moment, k) as optimizer:
        backend = optimizer._state.tables["table"].backend
        expected = backend.read(np.arange(ROWS))
        for number in range(5):
            ids = rng.integers(0, ROWS, 45)
            grad = rng.normal(size=(45, dim)).astype(np.float32)
            sums = {}
            for row, each in zip(ids.tolist(), grad, strict=True):
                sums[row] = sums[row] + each if row in sums else each
            rows = np.array(sorted(sums))
            some, stamp = expected[rows], number + 2
            merged = np.stack([sums[row] for row in rows.tolist()])
            if k:
                riemannian_adam_step(some, merged, options, k=k, stamp=stamp)
            else:
                adam_step(some, merged, options, stamp=stamp)
            expected[rows] = some
            optimizer.step({"table": (ids, grad)})
            np.testing.assert_array_equal(backend.read(np.arange(ROWS)), expected)


def adam_in_float64(w, m, v, t, gradient, lr):
    """One row, by Kingma & Ba's algorithm 1."""
    m, v, t = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2, t + 1
    return w - lr * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8), m, v, t


def test_many_steps_in_place_stay_with_a_program_in_float64(tmp_path):
    rng, dim = np.random.default_rng(2), 5
    start = rng.normal(size=(ROWS, dim)).astype(np.float32)
    rows = [(w.astype(np.float64), np.zeros(dim), np.zeros(dim), 0) for w in start]
    with build(tmp_path, start, "process") as optimizer:
        for _ in range(60):
            ids = rng.integers(0, ROWS, 20)
            grad = rng.normal(size=(20, dim)).astype(np.float32)
            for row in set(ids.tolist()):
                rows[row] = adam_in_float64(*rows[row], grad[ids == row].astype(np.float64).sum(axis=0), 0.05)
            optimizer.step({"table": (ids, grad)})
        found = optimizer._state.tables["table"].backend.read(np.arange(ROWS))
    for number, name in enumerate("wmvt"):
        np.testing.assert_allclose(found[name], [row[number] for row in rows], rtol=2e-4, atol=2e-6)


@settings(max_examples=15)
@given(dim=DIMS, ids=st.lists(IDS, min_size=1, max_size=3), seed=st.integers(0, 999))
def test_weights_in_memory_and_on_disk(dim, ids, seed):
    """A module in memory and one on disk beside each other: the same weights and moments in every way."""
    found = {}
    for way in WAYS:
        with workspace() as space:
            found[way] = _train_modules(space / "state", WAYS[way], dim, ids, seed)
    for way, (weights, records) in found.items():
        assert torch.equal(weights[0], weights[1]), way
        assert torch.equal(weights[0], found["power"][0][0]), way
        assert records == found["power"][1], way


def _train_modules(path, options, dim, ids, seed):
    options = {"state_dir": path} | options
    rng = np.random.default_rng(seed)
    start = torch.from_numpy(rng.normal(size=(ROWS, dim)).astype(np.float32))
    memory = torch.nn.Embedding.from_pretrained(start.clone(), freeze=False, sparse=True)
    disk = dsa.DiskEmbedding(ROWS, dim, name="disk", init=start.numpy(), **options)
    with DiskSparseAdam([("memory", memory.weight), ("disk", disk.weight)], lr=0.05, **options) as optimizer:
        for each in ids:
            rows = torch.tensor(each, dtype=torch.int64)
            factors = torch.from_numpy(rng.normal(size=(len(each), dim)).astype(np.float32))
            optimizer.zero_grad()
            ((memory(rows) + disk(rows)) * factors).sum().backward()
            optimizer.step()
        with torch.no_grad():
            weights = memory.weight.detach().clone(), disk(torch.arange(ROWS)).clone()
        return weights, records_of(optimizer)
