"""What differs between systems: all works with each facility hidden; locks; files replaced as a whole."""

import contextlib
import errno
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from current_files import table_file

import dsa
from dsa import DiskSparseRiemannianAdam, init
from dsa.backends import system
from dsa.errors import DiskSpaceError, StateCorruptError, StateError, StateLockedError

pytestmark = pytest.mark.disk

ROWS, DIM = 3_000, 4
TABLES = {"rule": init.Normal(ROWS, DIM, 0.1, seed=1), "array": torch.linspace(-0.1, 0.1, 40).reshape(10, 4)}


def hide_advice(monkeypatch):
    monkeypatch.delattr(os, "posix_fadvise", raising=False)


def hide_reservation(monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate", raising=False)


def hide_memory_advice(monkeypatch):
    for name in [name for name in dir(mmap) if name.startswith("MADV_")]:
        monkeypatch.delattr(mmap, name)


def hide_locks(monkeypatch):
    monkeypatch.setattr(system, "fcntl", None)


def hide_counters(monkeypatch):
    monkeypatch.setattr(system, "resource", None)


def hide_data_sync(monkeypatch):
    monkeypatch.delattr(os, "fdatasync", raising=False)


def hide_everything(monkeypatch):
    for hide in HIDDEN.values():
        if hide is not hide_everything:
            hide(monkeypatch)


HIDDEN = {
    "nothing": lambda monkeypatch: None,
    "posix_fadvise": hide_advice,
    "posix_fallocate": hide_reservation,
    "madvise": hide_memory_advice,
    "fcntl": hide_locks,
    "resource": hide_counters,
    "fdatasync": hide_data_sync,
    "everything": hide_everything,
}


def train(path, **options):
    """The essentials: create, step, read, change the curvature, repair, close, resume, refuse, start over."""
    with DiskSparseRiemannianAdam(TABLES, lr=0.05, disk_dir=path, **options) as optimizer:
        for step in range(3):
            generator = np.random.default_rng(step)
            rows = generator.integers(0, ROWS, 1_500)
            optimizer.step({"rule": (rows, generator.standard_normal((1_500, DIM)))})
        optimizer.flush()
    with DiskSparseRiemannianAdam(TABLES, lr=0.05, disk_dir=path, resume=True) as optimizer:
        assert optimizer.global_step == 3
        optimizer.set_curvature(2.0)
        optimizer.reproject_all()
        optimizer.step({"array": (range(10), np.ones((10, DIM)))})
        read = optimizer.read_rows(range(ROWS), "rule").numpy().tobytes()
    with pytest.raises(FileExistsError):
        DiskSparseRiemannianAdam(TABLES, lr=0.05, disk_dir=path)
    return [read, *(table_file(path, name).read_bytes()[4096:] for name in TABLES)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return train(tmp_path_factory.mktemp("expected") / "state")


@pytest.mark.parametrize("allocate", ["reserve", "sparse"])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_the_essentials_without(tmp_path, monkeypatch, expected, hidden, allocate):
    HIDDEN[hidden](monkeypatch)
    assert train(tmp_path / "state", allocate=allocate) == expected
    os.truncate(table_file(tmp_path / "state", "array"), 4_400)
    with pytest.raises(StateCorruptError, match="truncated"):
        DiskSparseRiemannianAdam(TABLES, lr=0.05, k=2.0, disk_dir=tmp_path / "state", resume=True)


BARE = """
import sys, mmap, os
import torch  # it may use what is hidden from dsa
for name in ("fcntl", "resource"):
    sys.modules[name] = None
for name in ("posix_fadvise", "posix_fallocate", "fdatasync", "sched_getaffinity"):
    if hasattr(os, name):
        delattr(os, name)
for name in [name for name in dir(mmap) if name.startswith("MADV_")]:
    delattr(mmap, name)
from dsa import DiskSparseRiemannianAdam, init
from dsa.backends import system
assert system.fcntl is None and system.resource is None
for resume in (None, True):
    tables = {"a": init.Zeros(2000, 3)}
    with DiskSparseRiemannianAdam(tables, lr=0.1, disk_dir=sys.argv[1], resume=resume) as optimizer:
        optimizer.step({"a": (torch.arange(2000), torch.ones(2000, 3))})
        assert optimizer.read_rows([7]).abs().min() > 0
        optimizer.reproject_all()
print(optimizer.global_step)
"""


def run(code, *arguments):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(Path(dsa.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_system_that_has_none_of_it(tmp_path):
    done = run(BARE, tmp_path / "state")
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


# ---------------------------------------------------------------- reservation


@pytest.fixture
def descriptor(tmp_path):
    with (tmp_path / "file").open("w+b", buffering=0) as file:
        yield file.fileno()


def test_reserving_takes_the_blocks(descriptor, tmp_path):
    system.reserve(descriptor, 3_000_001, str(tmp_path))
    assert os.fstat(descriptor).st_size == 3_000_001
    if hasattr(os.fstat(descriptor), "st_blocks"):
        assert os.fstat(descriptor).st_blocks * 512 >= 3_000_001


def test_reserving_by_writing_zeros(descriptor, tmp_path, monkeypatch):
    hide_reservation(monkeypatch)
    os.write(descriptor, b"left over")
    system.reserve(descriptor, 3_000_001, str(tmp_path))
    assert os.fstat(descriptor).st_size == 3_000_001
    assert not any((tmp_path / "file").read_bytes())


def failing(number):
    def call(*_, **__):
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_a_file_system_that_can_not_reserve(descriptor, tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "posix_fallocate", failing(number), raising=False)
    system.reserve(descriptor, 2_000_000, str(tmp_path))
    assert os.fstat(descriptor).st_size == 2_000_000


def test_a_disk_that_fills_while_it_is_reserved(descriptor, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC), raising=False)
    with pytest.raises(
        DiskSpaceError, match=r"2,000,000 bytes are needed in .* available: free space"
    ) as caught:
        system.reserve(descriptor, 2_000_000, str(tmp_path))
    assert caught.value.errno == errno.ENOSPC
    assert isinstance(caught.value.__cause__, OSError)


def test_another_error_of_the_disk_is_not_hidden(descriptor, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EIO), raising=False)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
        system.reserve(descriptor, 2_000_000, str(tmp_path))
    assert not isinstance(caught.value, DiskSpaceError)


def test_too_much_is_refused_before_a_block_is_taken(descriptor, tmp_path):
    with pytest.raises(DiskSpaceError) as caught:
        system.reserve(descriptor, 2**60, str(tmp_path))
    assert caught.value.needed == 2**60
    assert 0 < caught.value.available < 2**60
    assert os.fstat(descriptor).st_size == 0


# ---------------------------------------------------------------- locks


def test_a_lock_is_held_once(tmp_path):
    if system.fcntl is None:
        pytest.skip("this system has no flock")
    first, second = (os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT, 0o644) for _ in range(2))
    assert system.lock_file(first)
    assert not system.lock_file(second)
    assert system.lock_file(first), "who holds it may ask again"
    os.close(first)
    assert system.lock_file(second)
    os.close(second)


HOLD = """
import os, sys
from dsa.backends import system
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o644)
print(system.lock_file(descriptor), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no SIGKILL")
def test_a_lock_ends_with_its_process(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / "lock"],
        env=os.environ | {"PYTHONPATH": str(Path(dsa.__file__).parents[1])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"True\n"
    descriptor = os.open(tmp_path / "lock", os.O_RDWR)
    assert not system.lock_file(descriptor)
    process.kill()
    process.communicate(timeout=60)
    assert system.lock_file(descriptor)
    os.close(descriptor)


def test_an_error_of_the_lock_itself_is_not_taken_for_a_holder(tmp_path, monkeypatch):
    """ENOLCK of a network mount, say: the message must not send the user after another process."""
    if system.fcntl is None:
        pytest.skip("this system has no flock")
    monkeypatch.setattr(system.fcntl, "flock", failing(errno.ENOLCK))
    with pytest.raises(StateError, match=os.strerror(errno.ENOLCK)) as caught:
        DiskSparseRiemannianAdam({"a": init.Zeros(3, 2)}, disk_dir=tmp_path)
    assert not isinstance(caught.value, StateLockedError)


# ---------------------------------------------------------------- files replaced as a whole

WRITE = """
import os, sys
from pathlib import Path
from dsa.backends import system
def gate(*ignored, **also_ignored):
    print("at the gate", flush=True)
    sys.stdin.read()
if sys.argv[2] == "half written":
    os.fsync = gate
elif sys.argv[2] == "before the rename":
    os.replace = gate
else:
    system.sync_directory = gate
system.write_atomically(Path(sys.argv[1]), b"new" * 100_000)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no SIGKILL")
@pytest.mark.parametrize(
    ("moment", "left"),
    [("half written", b"old"), ("before the rename", b"old"), ("after the rename", b"new" * 100_000)],
)
def test_a_kill_leaves_the_old_or_the_new(tmp_path, moment, left):
    target = tmp_path / "file"
    system.write_atomically(target, b"old")
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE, target, moment],
        env=os.environ | {"PYTHONPATH": str(Path(dsa.__file__).parents[1])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"at the gate\n"
    process.kill()
    process.communicate(timeout=60)
    assert target.read_bytes() == left
    system.write_atomically(target, b"next")
    assert target.read_bytes() == b"next"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_and_no_litter(tmp_path, monkeypatch, broken):
    target = tmp_path / "file"
    system.write_atomically(target, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, broken, failing(errno.EIO))
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            system.write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


# ---------------------------------------------------------------- advice


def test_advice_names_whole_ranges(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: calls.append(arguments), raising=False)
    monkeypatch.setattr(os, "POSIX_FADV_WILLNEED", "will need", raising=False)
    system.announce_ranges(7, [0, 8192], [4096, 8192])
    assert calls == [(7, 0, 4096, "will need"), (7, 8192, 8192, "will need")]


def test_cache_can_be_dropped_anywhere(descriptor, monkeypatch):
    system.drop_cache(descriptor)
    hide_advice(monkeypatch)
    system.drop_cache(descriptor)


def test_counting_blocks_or_not(monkeypatch):
    assert system.blocks_read() >= -1
    hide_counters(monkeypatch)
    assert system.blocks_read() == -1


def test_advice_for_a_mapping_without_the_method():
    system.advise_random(object())


def test_directories_can_be_synced(tmp_path):
    system.sync_directory(tmp_path)
    with contextlib.closing((tmp_path / "file").open("wb")) as file:
        file.write(b"x")
        file.flush()
        system.sync_file(file.fileno())
