"""A machine that went down under ``durability="process"``: what the disk kept is opened, with a warning."""

import shutil

import numpy as np
import pytest

from dsa import DiskSparseRiemannianAdam, init
from dsa.creation import JOURNAL_NAME
from dsa.errors import StateCorruptError, StateWarning

ROWS = np.arange(10)
GRAD = np.ones((10, 3), np.float32)


def make(path, **options):
    tables = {"ball": init.Uniform(50, 3, low=-0.01, high=0.01, seed=1)}
    return DiskSparseRiemannianAdam(tables, disk_dir=path, lr=0.1, **options)


@pytest.fixture
def left(tmp_path):
    """A directory as a machine left it that went down three steps after a flush."""
    with make(tmp_path / "run") as optimizer:
        optimizer.step({"ball": (ROWS, GRAD)})
        optimizer.flush()
        for _ in range(3):
            optimizer.step({"ball": (ROWS, GRAD)})
        shutil.copytree(tmp_path / "run", tmp_path / "left")
    return tmp_path / "left"


@pytest.fixture
def restart(monkeypatch):
    return lambda: monkeypatch.setattr("dsa.system.boot_identity", lambda: "another run of the system")


def damage(path, how):
    journal = path / JOURNAL_NAME
    if how == "missing":
        journal.unlink()
    elif how == "empty":
        journal.write_bytes(b"")
    elif how == "zeros":
        journal.write_bytes(bytes(journal.stat().st_size))
    else:
        raw = bytearray(journal.read_bytes())
        raw[4096:8192] = bytes(4096)
        journal.write_bytes(raw)


every_damage = pytest.mark.parametrize("how", ["missing", "empty", "zeros", "entry"])


@every_damage
def test_the_tables_are_kept(left, how, restart):
    damage(left, how)
    restart()
    with pytest.warns(StateWarning) as caught:
        optimizer = make(left, resume=True)
    with optimizer:
        assert optimizer.global_step == 1
        assert optimizer.read_rows(ROWS).abs().sum() > 0.0
        optimizer.step({"ball": (ROWS, GRAD)})
    text = " ".join(str(each.message) for each in caught)
    assert "the machine was restarted" in text
    assert "go on if that will do, or import a checkpoint" in text
    with make(left, resume=True) as optimizer:
        assert optimizer.global_step == 2


@every_damage
def test_without_a_restart_it_is_damage(left, how):
    damage(left, how)
    with pytest.raises(StateCorruptError, match="journal"):
        make(left, resume=True)


def test_a_journal_that_is_whole_is_replayed(left, restart):
    restart()
    with pytest.warns(StateWarning, match="the machine was restarted"):
        optimizer = make(left, resume=True)
    with optimizer:
        assert optimizer.global_step == 4


@every_damage
def test_a_change_of_a_whole_table_is_not_guessed(tmp_path, how, restart):
    with make(tmp_path / "run") as optimizer:
        optimizer.step({"ball": (ROWS, GRAD)})
        optimizer._state.mark_change(
            {"kind": "curvature", "table": "ball", "k": 0.5, "map": "clip", "reset": False}
        )
        shutil.copytree(tmp_path / "run", tmp_path / "left")
    damage(tmp_path / "left", how)
    restart()
    with pytest.raises(StateCorruptError, match="journal"), pytest.warns(StateWarning):
        make(tmp_path / "left", resume=True)
