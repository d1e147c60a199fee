"""Holding a directory: whatever is done to its path, one process writes to a state, and to its own."""

import errno
import os
import shutil
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import nursery
import pytest
from current_files import copy_as_killed, table_file
from deaths import die, in_child

import dsa
from dsa import DiskSparseRiemannianAdam, init
from dsa.backends import Zarr, system
from dsa.errors import StateCorruptError, StateError, StateLockedError, StateMovedError, StateWarning
from dsa.state.holding import LOCK_NAME, HeldDirectory
from dsa.state.metadata import read_metadata
from dsa.state.recovery import is_copy

ROWS = 30
ALL = {"a": (np.arange(ROWS), np.ones((ROWS, 2), np.float32))}
KINDS = {
    "plain": {},
    "power": {"durability": "power"},
    "no journal": {"durability": "none"},
    "queued": {"async_writes": True},
    "zarr": {"backend": Zarr()},
    "compressed": {"backend": Zarr(compression="zstd")},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")


def build(path, resume=None, **options):
    options = {"lr": 1.0, "k": 0.0, "disk_dir": path, "resume": resume, **options}
    return DiskSparseRiemannianAdam({"a": init.Zeros(ROWS, 2)}, **options)


def content(path):
    """Every file below a path with its bytes, but for the lock, whose content is a hint."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(Path(path).rglob("*"))
        if file.is_file() and file.name != LOCK_NAME
    }


def counts(optimizer):
    return np.unique(optimizer._state.tables["a"].backend.read(np.arange(ROWS))["t"]).tolist()


def in_another_process(path, steps, resume=True):
    """Open, step and close in a process of its own; tell the steps, or the error's name."""
    code = """
import sys, warnings
import numpy as np
from dsa import DiskSparseRiemannianAdam, init
from dsa.errors import StateError
warnings.simplefilter("ignore")
try:
    with DiskSparseRiemannianAdam({"a": init.Zeros(30, 2)}, lr=1.0, k=0.0, disk_dir=sys.argv[1],
                                  resume={"True": True, "None": None}[sys.argv[3]]) as optimizer:
        for _ in range(int(sys.argv[2])):
            optimizer.step({"a": (np.arange(30), np.ones((30, 2), np.float32))})
        print(optimizer.global_step)
except StateError as error:
    print(type(error).__name__)
"""
    done = nursery.run(code, path, steps, resume)
    return done.stdout.strip() or done.stderr


# ---------------------------------------------------------------- what happens to the path


def moved(path):
    path.rename(path.with_name("elsewhere"))


def removed(path):
    shutil.rmtree(path)


def replaced(path):
    moved(path)
    with build(path) as other:
        for _ in range(5):
            other.step(ALL)


def replaced_by_a_link(path):
    moved(path)
    path.symlink_to(path.with_name("elsewhere-too"))
    with build(path.with_name("elsewhere-too")) as other:
        for _ in range(5):
            other.step(ALL)


def replaced_by_a_file(path):
    moved(path)
    path.write_text("mine")


def swapped_by_a_parent(path):
    path.parent.rename(path.parent.with_name("parent-elsewhere"))
    path.parent.mkdir()


FATES = [moved, removed, replaced, replaced_by_a_link, replaced_by_a_file, swapped_by_a_parent]


@pytest.mark.parametrize("fate", FATES, ids=lambda fate: fate.__name__)
@every_kind
def test_a_state_whose_path_leads_elsewhere_writes_nothing(tmp_path, kind, fate):
    """The old directory keeps its last whole step; whatever lies at the path now is another's."""
    path = tmp_path / "parent" / "state"
    optimizer = build(path, **KINDS[kind])
    optimizer.step(ALL)
    optimizer.step(ALL)
    optimizer.flush()
    fate(path)
    before = content(tmp_path)
    for use in (
        lambda: optimizer.step(ALL),
        lambda: optimizer.step({}),
        lambda: optimizer.read_rows([1]),
        lambda: optimizer.flush(),
        lambda: optimizer.set_curvature(1.0),
        lambda: optimizer.reproject_all(),
        lambda: optimizer.export_checkpoint(tmp_path / "checkpoint"),
        lambda: optimizer.close(),
    ):
        with pytest.raises(StateMovedError, match=r"open it with resume=True where it is now") as caught:
            use()
        assert str(path) in str(caught.value)
        assert content(tmp_path) == before
    optimizer.close()
    assert content(tmp_path) == before
    for place in (tmp_path / "parent/elsewhere", tmp_path / "parent-elsewhere/state"):
        if place.is_dir():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", StateWarning)
                found = build(place, True, **KINDS[kind])
            with found:
                assert (found.global_step, counts(found)) == (2, [2])
    if fate in (replaced, replaced_by_a_link):
        with build(path, True) as other:
            assert (other.global_step, counts(other)) == (5, [5])


@pytest.mark.parametrize("kind", ["plain", "queued"])
def test_a_queue_writes_nothing_into_a_directory_that_was_made_anew(tmp_path, kind):
    """What waits for the disk when the directory is replaced goes to the old one or nowhere."""
    path = tmp_path / "state"
    optimizer = build(path, **KINDS[kind])
    for _ in range(4):
        optimizer.step(ALL)
    replaced(path)
    with pytest.raises(StateMovedError):
        optimizer.close()
    with build(path, True) as other:
        assert (other.global_step, counts(other)) == (5, [5])
    with build(tmp_path / "elsewhere", True) as found:
        assert (found.global_step, counts(found)) == (4, [4])


@pytest.mark.skipif(system.fcntl is None, reason="directories can't be locked")
def test_without_its_lock_file_a_directory_is_still_held(tmp_path):
    """``rm dsa.lock`` lets no second writer in, and takes the first one nothing."""
    path = tmp_path / "state"
    with build(path) as optimizer:
        for _ in range(3):
            optimizer.step(ALL)
        (path / LOCK_NAME).unlink()
        assert in_another_process(path, 5) == "StateLockedError"
        for resume in (None, True, False):
            with pytest.raises(StateLockedError):
                build(path, resume)
        optimizer.step(ALL)
    with build(path, True) as again:
        assert (again.global_step, counts(again)) == (4, [4])


def only_files_are_locked(monkeypatch, code=errno.ENOLCK):
    real = system.lock_file

    def lock_file(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(code, os.strerror(code))
        return real(descriptor)

    monkeypatch.setattr(system, "lock_file", lock_file)


@pytest.mark.skipif(sys.platform != "linux", reason="directories are told by /proc")
@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_that_locks_files_only(tmp_path, monkeypatch, code):
    """The lock file then is what is held: without it, the state is not used any more."""
    only_files_are_locked(monkeypatch, code)
    path = tmp_path / "state"
    optimizer = build(path)
    optimizer.step(ALL)
    with pytest.raises(StateLockedError):
        build(path, True)
    assert in_another_process(path, 1) == "StateLockedError"
    (path / LOCK_NAME).unlink()
    with build(path, True) as other:
        for _ in range(4):
            other.step(ALL)
        before = content(path)
        for use in (lambda: optimizer.step(ALL), optimizer.flush, optimizer.close):
            with pytest.raises(StateMovedError):
                use()
        assert content(path) == before
        assert (other.global_step, counts(other)) == (5, [5])
        other.step(ALL)
    with build(path, True) as again:
        assert (again.global_step, counts(again)) == (6, [6])


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch, code):
    def lock_file(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(system, "lock_file", lock_file)
    with pytest.raises(StateError, match=r"refuses to lock a file .* use a local file system") as caught:
        build(tmp_path / "state")
    assert caught.value.__cause__.errno == code
    assert content(tmp_path) == {}


def test_a_symbolic_link_to_the_directory_is_as_good(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with build(tmp_path / "link") as optimizer:
        optimizer.step(ALL)
        with pytest.raises(StateLockedError):
            build(tmp_path / "real", True)
        optimizer.flush()
    with build(tmp_path / "real", True) as again:
        assert again.global_step == 1


# ---------------------------------------------------------------- copies


@every_kind
def test_a_copy_of_a_live_directory_is_refused(tmp_path, kind):
    """Its files are of different moments, even if they seem to fit."""
    with build(tmp_path / "state", **KINDS[kind]) as optimizer:
        optimizer.step(ALL)
        optimizer.flush()
        shutil.copytree(tmp_path / "state", tmp_path / "copy")
        before = content(tmp_path / "copy")
        with pytest.raises(StateCorruptError, match="is a copy that was made while a process had") as caught:
            build(tmp_path / "copy", True, **KINDS[kind])
        assert f"`dsa repair {tmp_path / 'copy'}`" in str(caught.value)
        assert content(tmp_path / "copy") == before
        optimizer.step(ALL)
    shutil.copytree(tmp_path / "state", tmp_path / "closed")
    with build(tmp_path / "closed", True, **KINDS[kind]) as again:
        assert (again.global_step, counts(again)) == (2, [2])


@every_kind
@pytest.mark.parametrize("anew", [True, False])
def test_a_backup_of_a_live_directory_that_is_put_back(tmp_path, kind, anew):
    """New files are seen. Where those that are there are written into, nothing is left that could tell."""
    path = tmp_path / "state"
    optimizer = build(path, **KINDS[kind])
    optimizer.step(ALL)
    optimizer.flush()
    shutil.copytree(path, tmp_path / "backup")
    optimizer._state.abandon()
    if anew:
        shutil.rmtree(path)
    for file in (tmp_path / "backup").rglob("*"):
        target = path / file.relative_to(tmp_path / "backup")
        if file.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    assert is_copy(path, read_metadata(path)) == anew


@pytest.mark.parametrize("part", ["the table", "the journal", "the description's directory"])
def test_a_directory_of_which_a_part_is_a_copy(tmp_path, part):
    """As a backup leaves it that put one file back."""
    path = tmp_path / "state"
    optimizer = build(path)
    optimizer.step(ALL)
    optimizer._state.abandon()
    if part == "the description's directory":
        path.rename(tmp_path / "old")
        path.mkdir()
        for file in (tmp_path / "old").iterdir():
            file.rename(path / file.name)
    else:
        file = table_file(path, "a") if part == "the table" else next(path.glob("dsa.journal.*"))
        shutil.copy(file, tmp_path / "kept")
        (tmp_path / "kept").replace(file)
    with pytest.raises(StateCorruptError, match="is a copy"):
        build(path, True)


@needs_fork
@every_kind
def test_a_directory_may_be_moved_after_a_kill(tmp_path, kind):
    """``mv`` keeps the files; so does a rename of a directory above."""
    path = tmp_path / "parent" / "state"

    def killed():
        optimizer = build(path, **KINDS[kind])
        for _ in range(3):
            optimizer.step(ALL)
        optimizer.flush()
        die()

    in_child(killed)
    path.rename(tmp_path / "parent" / "moved")
    (tmp_path / "parent").rename(tmp_path / "above")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StateWarning)
        optimizer = build(tmp_path / "above" / "moved", True, **KINDS[kind])
    with optimizer:
        assert (optimizer.global_step, counts(optimizer)) == (3, [3])


def test_the_helper_makes_what_a_kill_leaves(tmp_path):
    with build(tmp_path / "state") as optimizer:
        optimizer.step(ALL)
        copy_as_killed(tmp_path / "state", tmp_path / "copy")
        with build(tmp_path / "copy", True) as again:
            assert again.global_step == 1


# ---------------------------------------------------------------- forks


@needs_fork
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python 3.12: the process has threads
def test_children_forked_while_another_thread_opens_and_closes_keep_no_lock(tmp_path):
    """As a DataLoader starts its workers: a child that lives on must not hold the directory."""
    path = tmp_path / "state"
    build(path).close()
    children, done = [], threading.Event()
    reading, writing = os.pipe()

    def fork():
        while not done.is_set() and len(children) < 60:
            child = os.fork()
            if child == 0:
                os.close(writing)
                os.read(reading, 1)  # until the parent closes its end
                os._exit(0)
            children.append(child)

    forker = threading.Thread(target=fork)
    forker.start()
    try:
        opened = 0
        while forker.is_alive() or opened < 5:
            with build(path, True) as optimizer:
                optimizer.step(ALL)
            opened += 1
        assert len(children) == 60
        assert in_another_process(path, 1) == str(opened + 1)
    finally:
        done.set()
        forker.join()
        os.close(writing)
        os.close(reading)
        for child in children:
            os.waitpid(child, 0)


@needs_fork
def test_a_child_lets_nothing_go(tmp_path):
    """It may close, forget or collect what it has inherited; the parent holds its directory."""
    with build(tmp_path / "state") as optimizer:
        optimizer.step(ALL)

        def child():
            optimizer.close()
            optimizer._state.held.release()
            optimizer._state.abandon()

        assert in_child(child) == 0
        with pytest.raises(StateLockedError):
            build(tmp_path / "state", True)
        optimizer.step(ALL)
        assert in_another_process(tmp_path / "state", 1) == "StateLockedError"
    assert in_another_process(tmp_path / "state", 1) == "3"


# ---------------------------------------------------------------- a failed import and its queue


def test_a_failed_import_holds_the_directory_until_its_queue_is_gone(tmp_path, monkeypatch):
    """No other process gets in while batches wait that could still be written over its rows."""
    path = tmp_path / "state"
    optimizer = build(path, async_writes=True)
    optimizer.export_checkpoint(tmp_path / "checkpoint")
    backend = optimizer._state.tables["a"].writer._backend

    def refuse(*ignored, **also_ignored):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    condition = optimizer._state.tables["a"].writer._changed
    with monkeypatch.context() as patch:
        patch.setattr(type(backend), "write", refuse)
        optimizer.step(ALL)
        with condition:
            assert condition.wait_for(lambda: optimizer.stats()["writer_status"] == "failed", 20)
        patch.setattr("dsa.state.creation.write_metadata", refuse)
        with pytest.raises(OSError, match="Input/output"):
            optimizer.import_checkpoint(tmp_path / "checkpoint")
        assert in_another_process(path, 50) == "StateLockedError"
    optimizer.flush()
    assert (optimizer.global_step, counts(optimizer)) == (1, [1])
    optimizer.close()
    assert in_another_process(path, 50) == "51"
    dsa.backends.writer._drain_at_exit()
    with build(path, True) as again:
        assert (again.global_step, counts(again)) == (51, [51])


def test_what_is_queued_for_a_state_that_was_let_go_is_never_written(tmp_path, monkeypatch):
    """The switch has happened on disk and not in memory: the queue is emptied before the lock is free."""
    path = tmp_path / "state"
    optimizer = build(path, async_writes=True)
    optimizer.step(ALL)
    optimizer.export_checkpoint(tmp_path / "checkpoint")
    writer = optimizer._state.tables["a"].writer
    with monkeypatch.context() as patch:
        patch.setattr(type(optimizer._state), "adopt", lambda *ignored: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.import_checkpoint(tmp_path / "checkpoint")
    assert writer.queued == 0
    assert not optimizer._state.is_open
    assert in_another_process(path, 2) == "3"
    dsa.backends.writer._drain_at_exit()
    with build(path, True) as again:
        assert (again.global_step, counts(again)) == (3, [3])


def test_a_held_directory_by_itself(tmp_path):
    held = HeldDirectory.take(tmp_path)
    assert held.is_held
    held.check()
    with pytest.raises(StateLockedError, match="in use by this very process"):
        HeldDirectory.take(tmp_path)
    held.release()
    held.release()
    assert not held.is_held
    again = HeldDirectory.take(tmp_path)
    again.release()
    assert read_metadata(tmp_path) is None
