"""Asking for what the system could not write back: which files, how often, and what comes of an answer.

`tests/blockdev/test_write_back.py` has the real answers, of a device that fails.
"""

import errno
import os
import sys
import warnings

import numpy as np
import pytest
from current_files import description

from dsa import DiskSparseRiemannianAdam, init
from dsa.backends import Zarr, system
from dsa.errors import StateFailedError, StateWarning
from dsa.state import write_back
from dsa.state.write_back import WriteBack, look_at

BATCH = {"left": (np.array([1, 5]), np.ones((2, 3), np.float32))}
KINDS = {"plain": {}, "queued": {"async_writes": True}, "zarr": {"backend": Zarr()}}
every_durability = pytest.mark.parametrize("durability", ["process", "power", "none"])


def build(path, **options):
    return DiskSparseRiemannianAdam({"left": init.Normal(40, 3, seed=1)}, lr=0.1, disk_dir=path, **options)


class Asked:
    """Takes the system's place: notes which files it is asked for, and once has an answer for one."""

    def __init__(self, monkeypatch):
        self.files = []
        self.refused = ""
        monkeypatch.setattr(system, "refused_write_back", self)

    def __call__(self, file):
        self.files.append(os.path.basename(file))
        if not self.refused or self.refused not in file:
            return None
        self.refused = ""
        return OSError(errno.EIO, os.strerror(errno.EIO), file)


@pytest.fixture
def asked(monkeypatch):
    return Asked(monkeypatch)


@pytest.fixture
def clock(monkeypatch):
    """Seconds, in a list."""
    seconds = [100.0]
    monkeypatch.setattr(write_back.time, "monotonic", lambda: seconds[0])
    return seconds


def names(directory, count):
    found = {".": 1}
    for number in range(count):
        (directory / f"{number:03}").write_bytes(b"")
        found[f"{number:03}"] = number
    return found


def test_it_is_asked_every_few_milliseconds(tmp_path, asked, clock):
    files, watched = names(tmp_path, 3), WriteBack(tmp_path)
    for after, count in ((0.0, 3), (0.0, 3), (0.004, 3), (0.002, 6), (0.001, 6), (0.005, 9)):
        clock[0] += after
        assert watched.glance(files) is None
        assert len(asked.files) == count


def test_many_files_take_turns(tmp_path, asked, clock):
    files, watched = names(tmp_path, 40), WriteBack(tmp_path)
    (tmp_path / "group" / "inner").mkdir(parents=True)
    (tmp_path / "group" / "inner" / "shard").write_bytes(b"")
    files["group"] = 7
    most = 0
    for _ in range(3):
        before = len(asked.files)
        clock[0] += 1.0
        watched.glance(files)
        most = max(most, len(asked.files) - before)
    assert most == 16
    assert set(asked.files) == {*(set(files) - {".", "group"}), "shard"}
    asked.files.clear()
    assert look_at(tmp_path, files) is None
    assert len(asked.files) == 41


def test_other_files_are_asked_for_after_a_change(tmp_path, asked, clock):
    watched = WriteBack(tmp_path)
    watched.glance({"old": 1})
    clock[0] += 1.0
    watched.glance({"new": 1})
    assert asked.files == ["old", "new"]
    clock[0] += 1.0
    assert watched.glance({}) is None


@every_durability
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("refused", ["left", "journal"])
def test_an_answer_ends_the_state(tmp_path, asked, clock, durability, kind, refused):
    options = KINDS[kind] | {"durability": durability}
    path = tmp_path / "state"
    optimizer = build(path, **options)
    optimizer.step(BATCH)
    assert {each for each in asked.files if ".dsa" in each or "journal" in each} <= set(
        description(path)["files"]
    )
    asked.refused = refused
    clock[0] += 1.0
    if refused == "journal" and durability == "none":
        optimizer.step(BATCH)
        optimizer.close()
        assert not description(path)["failed"]
        return
    for use in (
        lambda: optimizer.step(BATCH),
        lambda: optimizer.read_rows([1], "left"),
        lambda: optimizer.flush(),
        lambda: optimizer.close(),
    ):
        with pytest.raises(StateFailedError, match=r"has refused to keep .*Input/output") as caught:
            use()
        assert caught.value.errno == errno.EIO
        assert description(path)["failed"]
    optimizer.close()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = build(path, resume=True, **options)
    with again:
        assert again.global_step == 1
        told = any("the device refused" in str(each.message) for each in caught)
        assert told == (durability != "power")
        clock[0] += 1.0
        again.step(BATCH)


@every_durability
def test_an_opening_asks_for_what_a_dead_process_has_left(tmp_path, asked, durability):
    path = tmp_path / "state"
    optimizer = build(path, durability=durability)
    optimizer.flush()
    optimizer.step(BATCH)
    optimizer._state.abandon()
    file = next(path.glob("*.dsa")).name
    asked.refused = file
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = build(path, resume=True, durability=durability)
    told = any("the device refused to keep" in str(each.message) for each in caught)
    assert told == (durability != "power")
    with again:
        assert next(path.glob("*.dsa")).name != file, "blocks that were refused are used again"
    asked.files.clear()
    with build(path, resume=True):
        assert asked.files == [], "it was closed, and the device has everything"


def test_an_opening_remembers_what_it_was_told_once(tmp_path, asked, monkeypatch):
    """It dies before it has made the files anew: the system doesn't say it again."""
    path = tmp_path / "state"
    optimizer = build(path)
    optimizer.step(BATCH)
    optimizer._state.abandon()
    asked.refused = ".dsa"
    with monkeypatch.context() as patch:
        patch.setattr("dsa.state.recovery.make_anew", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build(path, resume=True)
    assert description(path)["failed"]
    with pytest.warns(StateWarning, match="the device refused to keep"):
        build(path, resume=True).close()


def test_an_export_asks_for_all_files_at_its_end(tmp_path, asked, monkeypatch):
    monkeypatch.setattr(write_back, "_EVERY", 1e9)
    optimizer = build(tmp_path / "state")
    optimizer.step(BATCH)
    asked.refused = "left"
    with pytest.raises(StateFailedError, match="has refused to keep"):
        optimizer.export_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(StateFailedError):
        optimizer.close()
    optimizer.close()


def test_a_sound_file_has_no_answer(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_bytes(b"x" * 10_000)
    assert system.refused_write_back(str(file)) is None
    assert system.refused_write_back(str(tmp_path)) is None
    assert system.refused_write_back(str(tmp_path / "missing")) is None
    monkeypatch.setattr(system, "_SYNC_FILE_RANGE", None)
    assert system.refused_write_back(str(file)) is None


@pytest.mark.skipif(sys.platform != "linux", reason="the call is Linux's")
def test_the_system_is_really_asked(tmp_path, monkeypatch):
    """With a range that is none, it says so: that is no answer either, unlike an error of the device."""
    file = tmp_path / "file"
    file.write_bytes(b"x")
    assert system._SYNC_FILE_RANGE is not None
    monkeypatch.setattr(system, "_BEYOND", -1)
    assert system.refused_write_back(str(file)) is None
    monkeypatch.setattr(system, "_CAN_NOT_TELL", ())
    error = system.refused_write_back(str(file))
    assert error is not None
    assert (error.errno, error.filename) == (errno.EINVAL, str(file))
