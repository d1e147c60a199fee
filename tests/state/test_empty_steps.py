"""A step that names no table, after steps whose records are still queued: it must not let these go."""

import threading

import numpy as np
import pytest

from dsa import DiskSparseRiemannianAdam, init
from dsa.backends import Zarr
from dsa.backends.memmap import MemmapBackend

ROWS = np.arange(40)
KINDS = {"compressed": {"backend": Zarr(compression="zstd")}, "queued": {"async_writes": True}}


def build(path, **options):
    tables = {"left": init.Zeros(len(ROWS), 3)}
    return DiskSparseRiemannianAdam(tables, lr=0.1, k=0.0, disk_dir=path, **options)


def content(optimizer):
    return optimizer.global_step, optimizer.read_rows(ROWS, "left").numpy().tobytes()


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_queued_survives_the_process(tmp_path, monkeypatch, kind, durability):
    options = KINDS[kind] | {"durability": durability}

    read = threading.Event()

    def refuse(*given):
        read.wait()  # a failure that comes earlier is told to whoever reads
        raise OSError(5, "the queue's thread comes to nothing")

    optimizer = build(tmp_path, **options)
    with monkeypatch.context() as patch:
        patch.setattr(MemmapBackend, "write", refuse)
        optimizer.step({"left": (ROWS, np.ones((len(ROWS), 3), np.float32))})
        expected = content(optimizer)[1]
        read.set()
        try:
            optimizer.step({})
            steps = 2
        except OSError:  # the queue has failed already
            steps = 1
        optimizer._state.abandon()
    with build(tmp_path, resume=True, **options) as again:
        assert content(again) == (steps, expected)
