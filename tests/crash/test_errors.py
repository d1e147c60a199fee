"""Operations that fail, full disks, Ctrl-C: the step counts or does not, and the optimizer stays usable.

A sample; ``python -m tests.crash --only errors --only places`` runs all of them.
"""

import contextlib
import errno
import itertools
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from campaign import interrupt, prepared, refuse
from endurance import is_injected
from harness import complain
from references import counts_of, records_of
from refusals import FileLayer
from scenarios import ENDURING, STEPPING

import dsa.backends.memmap
import dsa.state.journal
from dsa import DiskSparseRiemannianAdam, init
from dsa.errors import DiskSpaceError, StateClosedError, StateFailedError
from dsa.state.metadata import METADATA_NAME

# An interrupt between `open` and the `with` that closes the file leaves that to the collector.
files_left_to_the_collector = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
by_name = pytest.mark.parametrize("scenario", ENDURING, ids=[one.name for one in ENDURING])


@by_name
def test_file_operations_that_fail(space, scenario):
    """Repeated calls get through, and in the end the tables are those of an undisturbed run."""
    figures = refuse(space, seed=1, trials=30, scenarios=[scenario])
    complain(figures)
    assert figures.total >= 30


@files_left_to_the_collector
@by_name
def test_interrupts_anywhere_in_a_call(space, scenario):
    """KeyboardInterrupt leaves a whole number of steps, `flush` tells which, and going on works."""
    figures = interrupt(space, seed=1, trials=16, scenarios=[scenario])
    complain(figures)
    assert figures.finished >= 16
    assert figures.total >= 16


@files_left_to_the_collector
@by_name
def test_interrupts_while_closing(space, scenario):
    figures = interrupt(space, seed=1, trials=8, phases=frozenset({"close"}), scenarios=[scenario])
    complain(figures)
    assert figures.finished >= 8
    assert figures.total >= 8


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("resume", [None, False])
def test_a_creation_that_fails_anywhere(tmp_path, code, resume):
    """At each operation once: nothing is left behind, or what says how to go on; and then it works."""
    tables = {"left": init.Normal(20, 3, seed=1), "right": np.zeros((7, 2), np.float32)}

    def build(resume):
        return DiskSparseRiemannianAdam(
            tables, disk_dir=tmp_path / "state", k=0.0, resume=resume, durability="power"
        )

    layer = FileLayer()
    with layer.installed():
        build(None).close()
    for number in range(layer.count):
        shutil.rmtree(tmp_path / "state")
        failing = FileLayer(frozenset({number}), code)
        held = os.listdir("/proc/self/fd") if sys.platform == "linux" else []
        optimizer = None
        with failing.installed():
            try:
                optimizer = build(resume)
                optimizer.close()
            except OSError as error:
                if not is_injected(error):
                    raise
        if optimizer is not None:
            optimizer.close()
        if sys.platform == "linux":
            assert len(os.listdir("/proc/self/fd")) <= len(held), f"operation {number} leaves a file open"
        left = sorted(entry.name for entry in (tmp_path / "state").glob("*"))
        with pytest.warns(match="resume=False") if METADATA_NAME in left else contextlib.nullcontext():
            build(False).close()


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("durability", ["process", "power", "none"])
@pytest.mark.parametrize("queued", [False, True])
def test_a_sync_that_fails_is_the_last_word(space, durability, queued, persistent):
    """Everything says so, closing lets go, and the next opening has the last whole step."""
    scenario = replace(STEPPING[0], durability=durability, async_writes=queued)
    with prepared(space / "failing", scenario) as (reference, directory):
        optimizer = scenario.build(reference.copy(directory / "run"), resume=True)
        for number in range(3):
            optimizer.step(scenario.batch(number))
        with failing_syncs(1_000 if persistent else 1):
            with pytest.raises(OSError, match="injected: sync"):
                optimizer.flush()
            for call in (
                lambda: optimizer.step(scenario.batch(3)),
                lambda: optimizer.read_rows([0], "left"),
                lambda: optimizer.set_curvature(1.0, name="left"),
                lambda: optimizer.export_checkpoint(directory / "checkpoint"),
                optimizer.flush,
                optimizer.close,
            ):
                with pytest.raises(StateFailedError, match=r"refused to keep.*injected: sync.*resume=True"):
                    call()
            optimizer.close()
        with scenario.build(directory / "run", resume=True) as again:
            # Without a journal, and with a description that the device refuses as well, the rows tell.
            assert counts_of(again) == reference.states[3].counts
            assert records_of(directory / "run") == reference.states[3].records
            again.step(scenario.batch(3))
        assert records_of(directory / "run") == reference.states[4].records


def test_a_step_whose_entry_the_device_refuses(space):
    """It counts or it does not; nobody can go on before that is settled by the next opening."""
    scenario = STEPPING[4]
    with prepared(space / "failing", scenario) as (reference, directory):
        optimizer = scenario.build(reference.copy(directory / "run"), resume=True)
        with failing_syncs(1), pytest.raises(OSError, match="injected: sync"):
            optimizer.step(scenario.batch(0))
        for _ in range(2):
            with pytest.raises(StateFailedError, match="injected: sync"):
                optimizer.step(scenario.batch(0))
        with pytest.raises(StateFailedError, match="injected: sync"):
            optimizer.close()
        with scenario.build(directory / "run", resume=True) as again:
            assert counts_of(again) in [state.counts for state in reference.states[:2]]
            assert records_of(directory / "run") == reference.states[again.global_step].records


@contextlib.contextmanager
def failing_syncs(count):
    """Let so many syncs of files fail."""
    left = count

    def fail(sync):
        def wrapper(descriptor):
            nonlocal left
            if left and not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                left -= 1
                raise OSError(errno.EIO, "injected: sync")
            sync(descriptor)

        return wrapper

    with (
        mock.patch.object(os, "fsync", fail(os.fsync)),
        mock.patch.object(os, "fdatasync", fail(os.fdatasync)),
    ):
        yield


@pytest.mark.parametrize(
    "scenario", [STEPPING[0], STEPPING[4], STEPPING[6]], ids=["process", "power", "queue"]
)
def test_a_close_that_fails_loses_nothing(space, scenario):
    """Whatever fails, closing again completes it, and the next open finds every step."""
    with prepared(space / "closing", scenario) as (reference, directory):
        for number in itertools.count():
            optimizer = scenario.build(reference.copy(directory / "run"), resume=True)
            for step in range(3):
                optimizer.step(scenario.batch(step))
            layer = FileLayer(frozenset({number}))
            with layer.installed(), contextlib.suppress(OSError):
                optimizer.close()
            optimizer.close()
            with pytest.raises(StateClosedError):
                optimizer.step(scenario.batch(3))
            with scenario.build(directory / "run", resume=True) as again:
                assert again.global_step == 3
            assert records_of(directory / "run") == reference.states[3].records
            if layer.count <= number:
                break
        assert number > 5


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB, where this process may mount one."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)],
        capture_output=True,
        timeout=60,
        check=False,
    )
    if not mounted or mounted.returncode:
        pytest.skip("mounting needs root")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True, timeout=60)


def start_journals_with(monkeypatch, size):
    create = dsa.state.journal.Journal.create.__func__
    monkeypatch.setattr(
        dsa.state.journal.Journal,
        "create",
        classmethod(lambda cls, path, identity, capacity, *more: create(cls, path, identity, size, *more)),
    )


def test_a_journal_that_has_no_room_to_grow(small_disk, monkeypatch):
    """DiskSpaceError with nothing changed; smaller steps go on, and so does the next process."""
    start_journals_with(monkeypatch, 1 << 16)
    rows, dim = 3_000, 32
    tables = {"left": init.Zeros(rows, dim)}
    everything = np.arange(rows), np.ones((rows, dim), np.float32)
    some = everything[0][:50], everything[1][:50]
    optimizer = DiskSparseRiemannianAdam(tables, lr=0.1, k=0.0, disk_dir=small_disk / "state")
    optimizer.step({"left": some})
    before = optimizer.read_rows(everything[0])
    for _ in range(2):
        with pytest.raises(DiskSpaceError, match=r"bytes are needed in .* but only"):
            optimizer.step({"left": everything})
        assert optimizer.global_step == 1
        assert bool((optimizer.read_rows(everything[0]) == before).all())
    optimizer.step({"left": some})
    assert optimizer.global_step == 2
    optimizer.close()
    with DiskSparseRiemannianAdam(tables, lr=0.1, k=0.0, disk_dir=small_disk / "state", resume=True) as again:
        assert again.global_step == 2


def test_a_journal_that_grows_into_the_room_there_is(small_disk, monkeypatch):
    """What it takes already is not needed again."""
    rows, dim = 1_100, 32
    start_journals_with(monkeypatch, 444 << 10)
    batch = {"left": (np.arange(rows), np.ones((rows, dim), np.float32))}
    with DiskSparseRiemannianAdam({"left": init.Zeros(rows, dim)}, k=0.0, disk_dir=small_disk) as optimizer:
        optimizer.step(batch)
        before = shutil.disk_usage(small_disk).free
        optimizer.step(batch)
        assert 0 < before - shutil.disk_usage(small_disk).free < before
        assert optimizer.global_step == 2


def test_a_disk_that_is_full_to_the_last_byte(small_disk):
    """Opening says that there is no room, takes nothing and leaves no lock; with room it goes on."""
    tables = {"left": init.Zeros(200, 4)}
    state = small_disk / "state"
    with DiskSparseRiemannianAdam(tables, k=0.0, disk_dir=state) as optimizer:
        optimizer.step({"left": ([3], np.ones((1, 4), np.float32))})
    with open(small_disk / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    for _ in range(2):
        with pytest.raises(OSError, match=r"No space|bytes are needed") as caught:
            DiskSparseRiemannianAdam(tables, k=0.0, disk_dir=state, resume=True)
        assert caught.value.errno == errno.ENOSPC
        del caught
    (small_disk / "filler").unlink()
    with DiskSparseRiemannianAdam(tables, k=0.0, disk_dir=state, resume=True) as optimizer:
        assert optimizer.global_step == 1


@pytest.mark.parametrize("code", [errno.ENODEV, errno.EINVAL])
def test_c37_a_file_system_without_shared_mappings(tmp_path, monkeypatch, code):
    """NFS, FUSE and the like: the error names the file, and nothing is left."""

    def refuse_mapping(*arguments, **options):
        raise OSError(code, os.strerror(code))

    for module in (dsa.state.journal, dsa.backends.memmap):
        monkeypatch.setattr(module.mmap, "mmap", refuse_mapping)
    with pytest.raises(OSError, match=f"{tmp_path}.*can't be mapped into memory.*use a local disk") as caught:
        DiskSparseRiemannianAdam({"left": init.Zeros(3, 2)}, disk_dir=tmp_path / "state")
    assert caught.value.errno == code
    assert {entry.name for entry in (tmp_path / "state").iterdir()} <= {"dsa.lock"}
    monkeypatch.undo()
    DiskSparseRiemannianAdam({"left": init.Zeros(3, 2)}, disk_dir=tmp_path / "state").close()
