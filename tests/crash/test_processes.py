"""Ends of scripts, forks, second processes and threads: C15 and C45 to C48."""

import copy
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import Child, messages

import dsa
from dsa import DiskSparseRiemannianAdam, init
from dsa.backends import system
from dsa.errors import StateClosedError, StateLockedError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")

TABLES = {"left": init.Normal(60, 4, std=0.1, seed=1), "right": init.Zeros(9, 2)}
BATCH = {
    "left": (np.array([3, 19, 3]), np.full((3, 4), 0.5, np.float32)),
    "right": (np.array([6, 0]), np.full((2, 2), -1.0, np.float32)),
}


def build(path, **options):
    return DiskSparseRiemannianAdam(TABLES, lr=0.1, k={"left": 0.0, "right": 1.0}, disk_dir=path, **options)


def content(path):
    """Every file's bytes and time of change, but for the lock, which holds a hint for people."""
    return {
        entry.name: (entry.read_bytes(), entry.stat().st_mtime_ns)
        for entry in Path(path).iterdir()
        if entry.name != "dsa.lock"
    }


# ---------------------------------------------------------------- C45: ends of scripts

# One interpreter that has imported everything forks a child for each ending; the child then ends by itself,
# with all that an interpreter does at its end.
SCRIPT = """
import os, signal, sys
import numpy as np
import torch
from dsa import DiskSparseRiemannianAdam, init

torch.set_num_threads(1)
root, *endings = sys.argv[1:]

def train(name, queue):
    optimizer = DiskSparseRiemannianAdam(
        {"left": init.Zeros(500, 4)}, lr=0.1, k=0.0, disk_dir=os.path.join(root, name), async_writes=queue
    )
    rng = np.random.default_rng(0)
    for step in range(20):
        rows = rng.integers(0, 500, 100)
        optimizer.step({"left": (rows, rng.normal(size=(100, 4)).astype(np.float32))})
    return optimizer

for queue in (False, True):
    train(f"kernels are loaded once: {queue}", queue).close()
for ending in endings:
    pid = os.fork()
    if pid == 0:
        break
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(ending, status, flush=True)
else:
    sys.exit(0)

how, queue = ending.split(":")
optimizer = train(ending, queue == "queue")
if how == "exit":
    sys.exit(3)
elif how == "exception":
    raise ValueError("on purpose")
elif how == "interrupt":
    signal.raise_signal(signal.SIGINT)
elif how == "forked":
    # The child ends as any interpreter does; the parent goes on afterwards.
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
    optimizer.step({"left": (np.arange(100), np.ones((100, 4), np.float32))})
"""

ENDINGS = {
    "end:direct": 0,
    "end:queue": 0,
    "exit:queue": 3,
    "exception:direct": 1,
    "interrupt:queue": -signal.SIGINT,
    "forked:queue": 0,
}


def test_c45_a_script_that_ends_without_close(tmp_path):
    """It ends with its own status and soon, all 20 steps are there, and the next open goes on."""
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), *ENDINGS],
        env=os.environ | {"PYTHONPATH": str(Path(dsa.__file__).parents[1])},
        capture_output=True,
        timeout=120,
        text=True,
        check=False,
    )
    told = dict(line.split() for line in process.stdout.splitlines())
    assert told == {ending: str(status) for ending, status in ENDINGS.items()}, process.stderr
    assert process.stderr.count("Traceback") == 2  # those on purpose
    found = {}
    for ending in ENDINGS:
        tables = {"left": init.Zeros(500, 4)}
        with DiskSparseRiemannianAdam(tables, k=0.0, disk_dir=tmp_path / ending, resume=True) as optimizer:
            steps = 21 if ending.startswith("forked") else 20
            assert optimizer.global_step == steps
            found.setdefault(steps, []).append(optimizer.read_rows(range(500)))
    assert all(torch.equal(rows, same[0]) for same in found.values() for rows in same)


# ---------------------------------------------------------------- C46: forks


class Ids(torch.utils.data.Dataset):
    """What every worker holds: a dataset that refers to the optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __len__(self):
        return 40

    def __getitem__(self, number):
        return number, torch.full((4,), 0.25)


@pytest.mark.parametrize("queued", [False, True])
def test_c46_workers_of_a_data_loader(tmp_path, queued):
    with build(tmp_path / "plain") as plain, build(tmp_path / "state", async_writes=queued) as optimizer:
        for chosen, workers in ((plain, 0), (optimizer, 2)):
            options = {"multiprocessing_context": "fork", "timeout": 60} if workers else {}
            loader = torch.utils.data.DataLoader(Ids(chosen), batch_size=8, num_workers=workers, **options)
            for _ in range(2):
                for ids, grad in loader:
                    chosen.step({"left": (ids, grad)})
            assert chosen.global_step == 10
        assert torch.equal(plain.read_rows(range(60), "left"), optimizer.read_rows(range(60), "left"))
    with build(tmp_path / "state", resume=True) as optimizer:
        assert optimizer.global_step == 10


@pytest.mark.parametrize("durability", ["process", "power", "none"])
@pytest.mark.parametrize("queued", [False, True])
def test_c46_the_child_of_a_fork(tmp_path, durability, queued):
    """Its close does nothing, everything else is refused, and the parent goes on."""
    with build(tmp_path / "state", durability=durability, async_writes=queued) as optimizer:
        optimizer.step(BATCH)
        optimizer.flush()
        before = content(tmp_path / "state")

        def in_child(report):
            for call in (
                lambda: optimizer.step(BATCH),
                lambda: optimizer.read_rows([0], "left"),
                lambda: optimizer.set_curvature(2.0),
                optimizer.reproject_all,
                optimizer.flush,
            ):
                try:
                    call()
                    report(("worked", str(call)))
                except StateClosedError as error:
                    report(("refused", str(error)))
            optimizer.close()
            optimizer.close()
            report(("closed", ""))
            try:
                build(tmp_path / "state", resume=True)
            except StateLockedError as error:
                report(("locked", str(error)))

        child = Child(in_child)
        told = list(messages(child))
        assert child.wait() == 0
        assert [kind for kind, _ in told] == ["refused"] * 5 + ["closed", "locked"], told
        assert all(
            f"process {os.getpid()}" in text and "fork" in text for kind, text in told if kind == "refused"
        )
        assert content(tmp_path / "state") == before
        optimizer.step(BATCH)
        assert optimizer.global_step == 2
    with build(tmp_path / "state", resume=True) as again:
        assert again.global_step == 2


# ---------------------------------------------------------------- C47: a second process


def test_c47_a_directory_that_another_process_holds(tmp_path):
    """(a) It is refused at once and nothing changes; (b) after its death the state opens."""
    build(tmp_path / "state").close()

    def hold(report):
        optimizer = build(tmp_path / "state", resume=True)
        optimizer.step(BATCH)
        report(("holding",))
        signal.pause()

    child = Child(hold)
    assert child.next() == ("holding",)
    before = content(tmp_path / "state")
    for resume in (None, True, False):
        started = time.monotonic()
        with pytest.raises(StateLockedError, match=f"in use by process {child.pid}"):
            build(tmp_path / "state", resume=resume)
        assert time.monotonic() - started < 1.0
    assert content(tmp_path / "state") == before
    child.kill()
    assert child.wait() == -signal.SIGKILL
    with build(tmp_path / "state", resume=True) as optimizer:
        assert optimizer.global_step == 1


def test_c47_a_lock_file_that_names_a_living_process(tmp_path):
    """(c) Numbers of processes are used again; only the system's lock counts."""
    build(tmp_path / "state").close()
    (tmp_path / "state" / "dsa.lock").write_text(f"{os.getppid()}\n")
    build(tmp_path / "state", resume=True).close()


def test_an_error_while_opening_leaves_no_lock(tmp_path, monkeypatch):
    """The error's traceback may be kept, as notebooks do."""
    build(tmp_path / "state").close()
    kept = []
    for function in ("ftruncate", "write", "replace", "fsync"):
        with monkeypatch.context() as patch:

            def fail(*arguments, name=function, **options):
                raise OSError(28, f"injected: {name}")

            patch.setattr(os, function, fail)
            try:
                build(tmp_path / "state", resume=True).close()
            except OSError as error:
                kept.append(error)
        build(tmp_path / "state", resume=True).close()
    assert kept


def test_an_error_while_opening_closes_no_file_of_others(tmp_path, monkeypatch):
    """The number of the lock's descriptor is soon another file's."""
    build(tmp_path / "state").close()
    kept = []
    with monkeypatch.context() as patch:

        def fail(*arguments, **options):
            raise OSError(28, "injected")

        patch.setattr(os, "replace", fail)
        try:
            build(tmp_path / "state", resume=True)
        except OSError as error:
            kept.append(error)
    others = [os.open(tmp_path / f"other-{number}", os.O_RDWR | os.O_CREAT) for number in range(20)]
    kept.clear()
    for descriptor in others:
        os.fstat(descriptor)
        os.close(descriptor)


def test_the_journal_goes_before_the_lock(tmp_path, monkeypatch):
    """Whoever opens the directory next makes a journal of that name."""
    unlink = Path.unlink
    removed = []

    def watched(path, missing_ok=False):
        with open(tmp_path / "state" / "dsa.lock") as file:
            removed.append((path.name, system.lock_file(file.fileno())))
        unlink(path, missing_ok)

    optimizer = build(tmp_path / "state")
    optimizer.step(BATCH)
    monkeypatch.setattr(Path, "unlink", watched)
    optimizer.close()
    assert removed == [("dsa.journal.1", False)]


# ---------------------------------------------------------------- C48: reading and threads


def test_c48_reading_writes_nothing(tmp_path):
    with build(tmp_path / "state") as optimizer:
        optimizer.step(BATCH)
        optimizer.flush()
        before = content(tmp_path / "state")
        for _ in range(100):
            optimizer.read_rows(np.arange(60), "left")
            optimizer.read_rows([5, 5, 0], "right")
        assert content(tmp_path / "state") == before


@pytest.mark.parametrize("queued", [False, True])
def test_c48_four_threads(tmp_path, queued):
    """Each takes 50 steps on rows of its own: the result is that of taking them in turn."""
    threads, steps = 4, 50

    def update(thread, step):
        rows = np.arange(thread, 60, threads)
        grad = np.random.default_rng([thread, step]).normal(size=(len(rows), 4)).astype(np.float32)
        return {"left": (rows, grad)}

    with build(tmp_path / "serial") as optimizer:
        for step in range(steps):
            for thread in range(threads):
                optimizer.step(update(thread, step))
    errors = []
    with build(tmp_path / "state", async_writes=queued, max_queue_size=3) as optimizer:
        start = threading.Barrier(threads)

        def work(thread):
            try:
                start.wait(timeout=60)
                for step in range(steps):
                    optimizer.step(update(thread, step))
            except BaseException as error:
                errors.append(error)

        workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(timeout=120)
            assert not worker.is_alive()
        assert errors == []
        assert optimizer.global_step == threads * steps
    found = []
    for name in ("serial", "state"):
        with build(tmp_path / name, resume=True) as optimizer:
            found.append(optimizer._state.tables["left"].backend.read(np.arange(60)))
    serial, parallel = found
    assert (parallel["t"] == steps).all()
    for field in ("w", "m", "v", "t"):
        assert np.array_equal(serial[field], parallel[field])


# ---------------------------------------------------------------- C15: copies


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_c15_an_optimizer_is_not_copied(tmp_path, make):
    with build(tmp_path / "state") as optimizer:
        optimizer.step(BATCH)
        with pytest.raises(
            TypeError, match=r"can't be copied or pickled, because .*: copy the closed directory"
        ):
            make(optimizer)
        optimizer.step(BATCH)
        assert optimizer.global_step == 2
    assert re.fullmatch(r"[0-9]+\n", (tmp_path / "state" / "dsa.lock").read_text())
