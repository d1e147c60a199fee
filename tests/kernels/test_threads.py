"""The same batches give the same bytes, whatever the number of threads."""

import threading

import numpy as np
import pytest
import torch
from current_files import table_file

from dsa import DiskSparseRiemannianAdam, init
from dsa.kernels.threads import run_slices, thread_limit

ROWS = 6_000
CONFIGURATIONS = {
    "flat": {"k": 0.0},
    "flat, row": {"k": 0.0, "second_moment": "row", "weight_decay": 0.1},
    "flat, decoupled": {"k": 0.0, "weight_decay": 0.1, "weight_decay_mode": "decoupled"},
    "ball": {"k": 1.0},
    "ball, root": {"k": 1.0, "v_transport": "sqrt", "weight_decay": 0.1},
    "ball, frame": {"k": 2.0, "second_moment": "frame", "max_step": 0.5},
    "ball, row": {"k": 0.5, "second_moment": "row", "bias_correction": "parameter"},
}


@pytest.fixture
def threads():
    """Sets the number of threads, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def train(path, options, dim):
    """Ten steps with duplicates, batches of many sizes, rows touched and not, a change of curvature."""
    tables = {
        "rule": init.Normal(ROWS, dim, 0.1, seed=5),
        "array": torch.linspace(-0.1, 0.1, ROWS * dim).view(-1, dim),
    }
    generator = np.random.default_rng(dim)
    with DiskSparseRiemannianAdam(tables, lr=0.05, disk_dir=path, **options) as optimizer:
        for size in (4_096, 1, 511, 1_024, 5_000, 1_025, 2_047, 3, 9_000, 4_096):
            batch = {}
            for name in tables:
                rows = generator.integers(0, ROWS, size)
                batch[name] = (rows, generator.standard_normal((size, dim)).astype(np.float32))
            optimizer.step(batch, current_k=options["k"] * 1.5 if size == 9_000 and options["k"] else None)
        optimizer.reproject_all()
        read = [optimizer.read_rows(range(ROWS), name).numpy().tobytes() for name in tables]
    return read, [table_file(path, name).read_bytes()[4096:] for name in tables]


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_threads_change_no_byte(tmp_path, threads, kind):
    results = []
    for number in (1, 2, 5):
        threads(number)
        results.append(train(tmp_path / str(number), CONFIGURATIONS[kind], 5))
    assert results[1] == results[0]
    assert results[2] == results[0]


def test_the_threads_are_used(tmp_path, threads, monkeypatch):
    """Otherwise the tests above compare nothing."""
    from dsa.kernels import threads as kernel_threads

    counts = []
    real = kernel_threads._crew

    def crew(number, process):
        counts.append(number)
        return real(number, process)

    monkeypatch.setattr(kernel_threads, "_crew", crew)
    threads(2)
    train(tmp_path / "two", CONFIGURATIONS["flat"], 2)
    assert set(counts) == {1}
    counts.clear()
    threads(1)
    train(tmp_path / "one", CONFIGURATIONS["flat"], 2)
    assert counts == []


def test_a_second_run_gives_the_same_bytes(tmp_path):
    assert train(tmp_path / "one", CONFIGURATIONS["ball"], 3) == train(
        tmp_path / "two", CONFIGURATIONS["ball"], 3
    )


def test_slices_inside_a_slice_need_no_threads():
    """One thread holds a lock and asks for slices while the other's slice waits for that lock."""
    lock = threading.Lock()

    def inner(start, stop):
        return stop - start

    def outer(start, stop):
        with lock:
            return sum(run_slices(inner, stop - start))

    with thread_limit(2):
        for _ in range(50):
            assert run_slices(outer, 8_192) == [4_096, 4_096]
