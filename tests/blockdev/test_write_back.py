"""A device that refuses what the system writes back on its own, after which the rows leave the memory.

Nobody has synced, so that nobody has been told: on real ext4, what a running state, an export and the opening
after a kill make of it.
"""

import contextlib
import os
import signal
import warnings

import numpy as np
import pytest
import torch
from device import BlockDevice
from filesystems import SIZE, extents, forget, new, sync
from harness import Child, messages
from state_files import table_files

import dsa
from dsa import DiskEmbedding, DiskSparseAdam, DiskSparseRiemannianAdam, init
from dsa.backends import Zarr
from dsa.errors import StateFailedError, StateWarning
from dsa.state import write_back

pytestmark = pytest.mark.usefixtures("block_devices")

ROWS = np.arange(600)
GRAD = np.ones((len(ROWS), 8), np.float32)
BACKENDS = {"memmap": "memmap", "zarr": Zarr(shard_bytes=1 << 13)}
every_durability = pytest.mark.parametrize("durability", ["process", "power", "none"])


@pytest.fixture(scope="module")
def device(block_devices):
    with BlockDevice(SIZE) as device:
        yield device


@pytest.fixture
def point(device):
    with new(device, "ext4", device.directory / "mounted") as point:
        yield point


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Every call looks, at all files."""
    monkeypatch.setattr(write_back, "_EVERY", 0.0)
    monkeypatch.setattr(write_back, "_AT_ONCE", 1000)


def build(point, durability, backend="memmap", **options):
    return DiskSparseRiemannianAdam(
        {"left": init.Zeros(len(ROWS), 8)},
        lr=0.1,
        k=0.0,
        disk_dir=point / "state",
        durability=durability,
        backend=BACKENDS[backend],
        **options,
    )


def step(optimizer):
    optimizer.step({"left": (ROWS, GRAD)})


def lose(device, point, change):
    """Refuse what is written back of what is changed in the tables, forget it, and work again."""
    device.fail([each for file in table_files(point / "state") for each in extents(file)])
    change()
    sync(point)
    forget(point)
    assert device.figures()["failed_writes"]
    device.fail(())


@contextlib.contextmanager
def trained(device, point, durability, backend="memmap"):
    """An optimizer whose second step the device has not kept."""
    optimizer = build(point, durability, backend)
    step(optimizer)
    optimizer.flush()
    before = optimizer.read_rows(ROWS, "left").numpy()
    lose(device, point, lambda: step(optimizer))
    try:
        yield optimizer, before
    finally:
        with contextlib.suppress(StateFailedError):
            optimizer.close()
        optimizer.close()


USES = {
    "step": step,
    "read": lambda optimizer: optimizer.read_rows(ROWS, "left"),
    "flush": lambda optimizer: optimizer.flush(),
    "curvature": lambda optimizer: optimizer.set_curvature(1.0),
}


@every_durability
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_next_call_says_so(device, point, durability, use, backend):
    with trained(device, point, durability, backend) as (optimizer, _):
        for each in (use, "step", "read"):
            with pytest.raises(StateFailedError, match=r"has refused to keep .* Input/output"):
                USES[each](optimizer)
        assert optimizer.global_step == 2


@every_durability
def test_the_next_opening_makes_the_files_anew(device, point, durability):
    with trained(device, point, durability) as (optimizer, before), pytest.raises(StateFailedError):
        step(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = build(point, durability, resume=True)
    told = [str(each.message) for each in caught if each.category is StateWarning]
    with optimizer:
        assert optimizer.global_step == 2
        found = optimizer.read_rows(ROWS, "left").numpy()
        if durability == "power":
            assert (found < before).all(), "the journal has the second step"
            assert told == []
        else:
            # What is read is what the device holds; which rows went back is for nobody to know.
            assert any("after step 1 may have gone back" in each for each in told)
        step(optimizer)
    assert dsa.verify(point / "state").ok


def test_an_export_that_read_what_went_back_fails(device, point, tmp_path, monkeypatch):
    """Nobody asks while it reads: in the end it does."""
    monkeypatch.setattr(write_back, "_EVERY", 1e9)
    with trained(device, point, "process") as (optimizer, _):
        with pytest.raises(StateFailedError, match="has refused to keep"):
            optimizer.export_checkpoint(tmp_path / "checkpoint")
        with pytest.raises(StateFailedError):
            step(optimizer)


def test_a_lookup_of_a_module_says_so(device, point):
    embedding = DiskEmbedding(600, 8, state_dir=point / "state", name="left", init=init.Zeros(600, 8))
    optimizer = DiskSparseAdam([("left", embedding.weight)], lr=0.1, state_dir=point / "state")
    embedding(torch.from_numpy(ROWS)).sum().backward()
    optimizer.step()
    embedding(torch.from_numpy(ROWS)).sum().backward()
    lose(device, point, optimizer.step)
    with pytest.raises(StateFailedError, match="has refused to keep"):
        embedding(torch.from_numpy(ROWS))
    with pytest.raises(StateFailedError):
        optimizer.close()
    optimizer.close()


@every_durability
def test_an_opening_after_a_kill_still_hears_of_it(device, point, durability):
    """Nobody in the dead process had asked: as long as the system has the file in memory, it says so."""

    def die(report):
        optimizer = build(point, durability)
        step(optimizer)
        optimizer.flush()
        report(("flushed",))
        lose(device, point, lambda: step(optimizer))
        os.kill(os.getpid(), signal.SIGKILL)

    child = Child(die)
    assert [kind for kind, *_ in messages(child)] == ["flushed"]
    assert child.wait() == -signal.SIGKILL
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = build(point, durability, resume=True)
    told = [str(each.message) for each in caught if each.category is StateWarning]
    assert any("the device refused to keep" in each for each in told) == (durability != "power")
    with optimizer:
        assert optimizer.global_step == 2 or durability == "none"
        step(optimizer)
    assert dsa.verify(point / "state").ok
