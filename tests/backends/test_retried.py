"""Windows refuses to rename what a virus scanner looks into: for a moment, which is waited for."""

import errno
import os
import shutil
import sys
from pathlib import Path

import pytest

from dsa import DiskSparseRiemannianAdam, init
from dsa.backends import system
from dsa.checkpoint import exchange, open_checkpoint

CALLS = ["replace", "rename"]


class Scanner:
    """Refuses each call in a folder the first times that it is made with some arguments."""

    def __init__(self, monkeypatch, folder, times, code=errno.EACCES):
        self.folder, self.times, self.code = folder, times, code
        self.refused, self.waited = {}, []
        for name in CALLS:
            monkeypatch.setattr(os, name, self.guard(name, getattr(os, name)))
        monkeypatch.setattr(system.time, "sleep", self.waited.append)

    def guard(self, name, usual):
        def call(*arguments, **options):
            key = (name, *map(str, arguments))
            if key[1].startswith(str(self.folder)) and self.refused.setdefault(key, 0) < self.times:
                self.refused[key] += 1
                raise OSError(self.code, os.strerror(self.code), str(arguments[0]))
            return usual(*arguments, **options)

        return call


@pytest.fixture
def windows(monkeypatch):
    exchange._renameat2.cache_clear()
    monkeypatch.setattr(sys, "platform", "win32")
    yield monkeypatch
    exchange._renameat2.cache_clear()


def test_a_file_is_replaced_as_a_whole(tmp_path, windows):
    scanner = Scanner(windows, tmp_path, 2)
    system.write_atomically(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"new"
    assert len(scanner.waited) == 2
    assert not (tmp_path / "x.tmp").exists()


def test_a_checkpoint_is_written_and_replaced(tmp_path, windows):
    with DiskSparseRiemannianAdam({"a": init.Zeros(50, 2)}, disk_dir=tmp_path / "s") as optimizer:
        scanner = Scanner(windows, tmp_path, 2)
        for step in (0, 1):
            optimizer.export_checkpoint(tmp_path / "k", overwrite=True)
            assert open_checkpoint(tmp_path / "k").global_step == step
            optimizer.step({"a": ([1], [[1.0, 1.0]])})
        optimizer.export_weights(tmp_path / "w.safetensors")
    assert scanner.refused
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k", "s", "w.safetensors"]


def test_a_killed_replacement_is_put_back(tmp_path, windows):
    Scanner(windows, tmp_path, 2)
    (tmp_path / "new").mkdir()
    (tmp_path / "old").mkdir()
    exchange.replace_directory(tmp_path / "new", tmp_path / "old", tmp_path / "aside")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["aside", "old"]


def test_a_refusal_for_good_is_raised_within_a_second(tmp_path, windows):
    scanner = Scanner(windows, tmp_path, 1_000)
    with pytest.raises(PermissionError):
        system.write_atomically(tmp_path / "x", b"new")
    assert 0.3 < sum(scanner.waited) < 1
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOENT, errno.EIO])
def test_other_refusals_are_raised_at_once(tmp_path, windows, code):
    scanner = Scanner(windows, tmp_path, 2, code)
    with pytest.raises(OSError, match=os.strerror(code)):
        system.write_atomically(tmp_path / "x", b"new")
    assert scanner.waited == []


def test_elsewhere_nobody_waits(tmp_path, monkeypatch):
    if sys.platform == "win32":
        monkeypatch.setattr(sys, "platform", "linux")
        monkeypatch.setattr(os, "name", "posix")
    scanner = Scanner(monkeypatch, tmp_path, 2)
    with pytest.raises(PermissionError):
        system.write_atomically(tmp_path / "x", b"new")
    assert scanner.waited == []


def test_a_tree_is_removed_in_the_end(tmp_path, windows):
    (tmp_path / "t" / "u").mkdir(parents=True)
    waited, refusals = [], [PermissionError(errno.EACCES, "in use")] * 3
    windows.setattr(system.time, "sleep", waited.append)

    def remove(path):
        if refusals:
            raise refusals.pop()
        shutil.rmtree(path)

    system.retried(remove, tmp_path / "t")
    assert not (tmp_path / "t").exists()
    assert len(waited) == 3
    assert system.retried(Path.unlink, tmp_path / "absent", True) is None
