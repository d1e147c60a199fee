"""Looking at a directory in which another process trains, has been stopped, or was killed."""

import os
import select
import shutil
import signal
import time
from contextlib import contextmanager

import numpy as np
import pytest
from nursery import run, start
from small_states import TABLES, as_left, batch, build, content, journal, train

from dsa import DiskSparseRiemannianAdam, init, verify
from dsa.backends import MemmapBackend, Zarr
from dsa.errors import StateClosedError
from dsa.inspection import open_state, state_view, summarize
from dsa.schema import TORN
from dsa.state.metadata import METADATA_NAME

TRAINER = """
import sys
import numpy as np
from dsa import DiskSparseRiemannianAdam, init

from dsa.backends import Memmap, Zarr

path, durability, kind = sys.argv[1:]
backend = {"zarr": Zarr(), "zstd": Zarr(compression="zstd", shard_bytes=8192, overlay_bytes=1 << 18)}
tables = {"left": init.Zeros(3000, 16), "right": init.Normal(64, 4, seed=1)}
rows = np.arange(0, 3000, 50)
with DiskSparseRiemannianAdam(tables, lr=0.1, k=0.0, disk_dir=path, durability=durability,
                              async_writes=kind == "queue", backend=backend.get(kind, Memmap())) as optimizer:
    optimizer.step({"left": (rows, np.ones((len(rows), 16), np.float32))})
    print("ready", flush=True)
    while True:
        for each in range(200):
            # A gradient of noise that all of these rows share: they stay equal, in whole steps.
            grad = np.full((len(rows), 16), np.sin(optimizer.global_step), np.float32)
            optimizer.step({"left": (rows, grad), "right": ([each % 64], np.ones((1, 4), np.float32))})
"""
ROWS = np.arange(0, 3000, 50)


@contextmanager
def trainer(path, durability="process", kind="memmap"):
    """A process that trains until the end of the block, then is killed."""
    with start(TRAINER, path, durability, kind) as child:
        try:
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()
            child.wait()


@pytest.mark.parametrize(
    ("durability", "kind"),
    [
        ("process", "memmap"),
        ("process", "queue"),
        ("power", "memmap"),
        ("process", "zarr"),
        ("process", "zstd"),
    ],
)
def test_reads_beside_a_running_process_are_of_whole_steps(tmp_path, durability, kind):
    with trainer(tmp_path, durability, kind), open_state(tmp_path) as state:
        start, seen = time.monotonic(), [0]
        while time.monotonic() < start + 0.7 or seen[-1] < seen[1] + 20:
            assert time.monotonic() < start + 120.0, "the process does not go on"
            before = state.global_step
            records = state["left"].read(ROWS)
            after = state.global_step
            assert len(set(records["t"].tolist())) == 1, "rows of several steps"
            assert (records["w"] == records["w"][0, 0]).all(), "a torn row"
            assert before <= records["t"][0] <= after
            seen.append(after)
        assert seen == sorted(seen)
        assert state.status == "open"
        summary = summarize(state)
        assert summary.tables[0].touched_rows == len(ROWS)
        assert summary.tables[0].implausible_rows == 0


def test_reading_changes_no_file_of_a_running_process(tmp_path):
    with trainer(tmp_path) as child:
        child.send_signal(signal.SIGSTOP)  # so that whatever changes was changed by the reader
        before = content(tmp_path)
        with open_state(tmp_path) as state:
            repr(state)
            state._repr_html_()
            state["left"].weights(ROWS)
            summarize(state)
            for table in state.content().tables:
                list(table.blocks())
        assert content(tmp_path) == before
        child.send_signal(signal.SIGCONT)
        with open_state(tmp_path) as state:
            step = state.global_step
            deadline = time.monotonic() + 30.0
            while state.global_step == step:
                assert time.monotonic() < deadline, "the process does not go on"


@pytest.mark.parametrize("kind", ["memmap", "queue", "zarr", "zstd"])
def test_a_killed_process_left_what_recovery_will_find(tmp_path, kind):
    with trainer(tmp_path / "state", kind=kind):
        time.sleep(0.3)
    with open_state(tmp_path / "state") as state:
        step, status = state.global_step, state.status
        left, right = state["left"].weights(range(3000)), state["right"].weights(range(64))
        steps = state["left"].steps
    assert status == "open"
    tables = {"left": init.Zeros(3000, 16), "right": init.Normal(64, 4, seed=1)}
    with DiskSparseRiemannianAdam(
        tables, lr=0.1, k=0.0, disk_dir=tmp_path / "state", resume=True
    ) as optimizer:
        assert optimizer.global_step == step == steps
        np.testing.assert_array_equal(optimizer.read_rows(range(3000), "left"), left)
        np.testing.assert_array_equal(optimizer.read_rows(range(64), "right"), right)


@pytest.mark.parametrize("options", [{"durability": "power"}, {"async_writes": True}], ids=str)
@pytest.mark.parametrize("steps", [1, 4])
def test_steps_that_only_the_journal_has(tmp_path, steps, options):
    """Table files as they were before the last steps, beside the journal with them."""
    with build(tmp_path / "state", **options) as optimizer:
        train(optimizer, 2)
        optimizer.flush()
        as_left(tmp_path / "state", tmp_path / "copy")
        train(optimizer, steps, first=2)
        expected = {name: optimizer.read_rows(range(s.rows), name).numpy() for name, s in TABLES.items()}
        shutil.copy(journal(tmp_path / "state"), tmp_path / "copy")
    shutil.copytree(tmp_path / "copy", tmp_path / "other")
    with open_state(tmp_path / "copy") as state:
        assert state.global_step == 2 + steps
        changed = np.unique(np.concatenate([batch(2 + n)["entity"][0] for n in range(steps)]))
        entity = state["entity"]
        assert (entity["w"][changed] != entity.read(changed)["w"]).any()
        assert entity.read(changed)["s"].min() >= 4 - 1
        for name, weights in expected.items():
            np.testing.assert_array_equal(state[name].weights(range(len(weights))), weights)
            blocks = [records for _, records in state[name].content().blocks()]
            np.testing.assert_array_equal(
                np.concatenate(blocks)["s"], state[name].read(range(len(weights)))["s"]
            )
    with build(tmp_path / "other", resume=True) as optimizer:
        for name, weights in expected.items():
            np.testing.assert_array_equal(optimizer.read_rows(range(len(weights)), name), weights)


def test_a_torn_last_entry_does_not_count(tmp_path):
    with build(tmp_path / "state") as optimizer:
        train(optimizer, 3)
        as_left(tmp_path / "state", tmp_path / "copy")
        # An entry begun and not committed is bytes behind the last one that nobody counts.
        optimizer._state.prepare(
            optimizer._state.progress(), [(optimizer._state.tables["flat"], np.arange(5))]
        )
        shutil.copy(journal(tmp_path / "state"), tmp_path / "copy")
    with open_state(tmp_path / "copy") as state:
        assert state.global_step == 3


def test_a_view_notices_that_the_state_was_replaced(tmp_path):
    with build(tmp_path) as optimizer:
        train(optimizer, 2)
    state = open_state(tmp_path)
    weights = state["entity"]["w"]
    expected = weights.copy()
    with pytest.warns(match="resume=False replaces"), build(tmp_path, resume=False) as optimizer:
        train(optimizer, 1)
    for use in (lambda: state.global_step, lambda: state["entity"].weights([0]), lambda: state.status):
        with pytest.raises(StateClosedError, match="replaced or removed since this view"):
            use()
    np.testing.assert_array_equal(weights, expected)
    assert "was replaced" in repr(state)
    state.close()
    with open_state(tmp_path) as state:
        assert state.global_step == 1
        shutil.rmtree(tmp_path)
        with pytest.raises(StateClosedError, match="replaced or removed"):
            state["entity"].weights([0])


def test_a_table_added_later_does_not_disturb(tmp_path):
    import torch

    from dsa import DiskEmbedding, DiskSparseAdam

    first = DiskEmbedding(20, 3, state_dir=tmp_path, name="first")
    with open_state(tmp_path) as state:
        second = DiskEmbedding(30, 3, state_dir=tmp_path, name="second")
        optimizer = DiskSparseAdam([*first.parameters(), *second.parameters()], lr=0.1)
        (first(torch.tensor([1])).sum() + second(torch.tensor([2])).sum()).backward()
        optimizer.step()
        assert state.global_step == 1
        assert list(state) == ["first"]
        np.testing.assert_array_equal(state["first"].weights([1]), first(torch.tensor([1])).detach())
        with open_state(tmp_path) as later:
            assert list(later) == ["first", "second"]
        optimizer.close()


def test_a_table_that_the_journal_does_not_know_yet(tmp_path):
    """A table that was added after the last entry of the journal."""
    import torch

    from dsa import DiskEmbedding

    first = DiskEmbedding(10, 2, padding_idx=0, state_dir=tmp_path, name="first")  # writes its padding row
    second = DiskEmbedding(10, 2, state_dir=tmp_path, name="second")
    with open_state(tmp_path) as state:
        view = state["second"]
        assert view.read([1])["s"].tolist() == [0]
        assert (view.k, view.steps, state["first"].steps, state.global_step) == (0.0, 0, 0, 0)
        assert "second" in repr(state)
        assert "10 x 2" in repr(view)
        assert [table.steps for table in summarize(state).tables] == [0, 0]
        expected = second(torch.tensor([3, 4])).detach().numpy()
        np.testing.assert_array_equal(view.weights([3, 4]), expected)
    assert verify(tmp_path).ok
    first.close()


@pytest.mark.parametrize("backend", ["memmap", "zarr", Zarr(compression="zstd", shard_bytes=4096)], ids=str)
@pytest.mark.parametrize("change", ["curvature", "import", "moments"])
def test_a_view_of_tables_that_are_replaced(tmp_path, change, backend):
    with build(tmp_path / "state", backend=backend) as optimizer:
        train(optimizer, 2)
        optimizer.export_checkpoint(tmp_path / "checkpoint")
        train(optimizer, 1, first=2)
        state = open_state(tmp_path / "state")
        blocks = state["entity"].scan()
        next(blocks)
        if change == "curvature":
            optimizer.set_curvature(4.0, name="entity")
        elif change == "import":
            optimizer.import_checkpoint(tmp_path / "checkpoint")
        else:
            optimizer.set_curvature(1.0, name="entity", reset_moments=True)
        for use in (
            lambda: state["entity"].read([0, 299]), lambda: state["entity"].weights([0]),
            lambda: list(state["entity"].scan()), lambda: summarize(state), lambda: state.global_step,
            lambda: state["flat"].read([0]),
        ):  # fmt: skip
            with pytest.raises(StateClosedError, match="open it again"):
                use()
        state.close()
        with open_state(tmp_path / "state") as state:
            np.testing.assert_array_equal(
                state["entity"].weights(range(300)), optimizer.read_rows(range(300), "entity")
            )


def test_opening_beside_tables_that_are_replaced(tmp_path, monkeypatch):
    """The description is read, then its files are replaced and removed, then they are opened."""
    with build(tmp_path) as optimizer:
        train(optimizer, 1)
        original, ks = state_view.open_source, [2.0, 3.0]

        def open_late(path, stored, given):
            if ks:
                optimizer.set_curvature(ks.pop(), name="entity")
            return original(path, stored, given)

        monkeypatch.setattr(state_view, "open_source", open_late)
        with open_state(tmp_path) as state:
            assert state["entity"].k == 2.0
            np.testing.assert_array_equal(
                state["entity"].weights(range(300)), optimizer.read_rows(range(300), "entity")
            )


@pytest.mark.parametrize("stays", [False, True])
def test_a_row_that_looks_torn_is_read_again(tmp_path, monkeypatch, stays):
    with build(tmp_path) as optimizer:
        train(optimizer, 2)
        rows = np.flatnonzero(optimizer._state.tables["entity"].backend.read(np.arange(300))["s"])[:4]
        optimizer.close()
        with open_state(tmp_path) as state:
            expected = state["entity"].read(rows)
            original, calls = MemmapBackend.read, []

            def read(self, some, out=None):
                records = original(self, some, out)
                calls.append(len(some))
                if stays or len(calls) == 1:
                    records["s"][np.isin(some, rows[1:3])] = TORN
                return records

            monkeypatch.setattr(MemmapBackend, "read", read)
            found = state["entity"].read(rows)
            assert calls == [4, 2]
            assert ((found["s"] < 0) == [False, stays, stays, False]).all()
            np.testing.assert_array_equal(found["w"], expected["w"])


STRESS = """
import sys
import numpy as np
from dsa import DiskSparseRiemannianAdam, init
from dsa.backends import Zarr

backends = {"zstd": Zarr(compression="zstd", shard_bytes=1 << 13, overlay_bytes=1 << 14), "zarr": "zarr"}
rows = np.arange(600)
for line in sys.stdin:
    path, durability, kind = line.split()
    options = {"lr": 0.1, "k": 0.0, "disk_dir": path, "durability": durability, "allocate": "sparse"}
    options |= {"async_writes": kind == "queue", "backend": backends.get(kind, "memmap")}
    with DiskSparseRiemannianAdam({"left": init.Zeros(600, 8)}, **options) as optimizer:
        optimizer.step({"left": (rows, np.ones((600, 8), np.float32))})
        print("ready", flush=True)
        for _ in range(60):
            grad = np.full((600, 8), np.sin(optimizer.global_step), np.float32)
            optimizer.step({"left": (rows, grad)})
        print(optimizer.global_step, flush=True)
        sys.stdin.readline()
    print("closed", flush=True)
"""


@pytest.fixture(scope="module")
def stress():
    """A process that trains where it is told to: many rows, which stay equal, in every step."""
    with start(STRESS) as child:
        yield child
        child.kill()


@pytest.mark.parametrize("kind", ["memmap", "queue", "zarr", "zstd"])
@pytest.mark.parametrize("durability", ["process", "power", "none"])
def test_every_block_is_of_a_whole_step(tmp_path, stress, kind, durability):
    """Read while steps are taken; without a journal each row is whole, of whatever step."""

    def tell(line):
        stress.stdin.write(f"{line}\n")
        stress.stdin.flush()

    tell(f"{tmp_path} {durability} {kind}")
    assert stress.stdout.readline() == "ready\n"
    blocks = 0
    while blocks == 0 or not select.select([stress.stdout], [], [], 0)[0]:
        with open_state(tmp_path) as state:
            for _ in range(3):
                records = state["left"].read(np.arange(600))
                blocks += 1
                assert (records["s"] >= 0).all()
                assert (records["w"] == records["w"][:, :1]).all(), "a torn row"
                if durability != "none":
                    assert len(set(records["t"].tolist())) == 1, "rows of several steps"
                    assert len(np.unique(records["w"])) == 1
    assert stress.stdout.readline() == "61\n"
    if durability != "none":
        with open_state(tmp_path) as state:
            assert set(state["left"].read(np.arange(600))["t"].tolist()) == {61}
    assert verify(tmp_path).ok
    tell("")
    assert stress.stdout.readline() == "closed\n"
    assert verify(tmp_path).remarks == ()


READER = """
import os, sys
import numpy as np

opened = []
def watch(event, arguments):
    if event == "open" and str(arguments[0]).startswith(sys.argv[1]):
        opened.append((str(arguments[0]), arguments[2]))
    if event in ("os.mkdir", "os.remove", "os.rename", "os.truncate", "os.chmod", "os.utime", "fcntl.flock",
                 "fcntl.lockf", "tempfile.mkstemp"):
        if any(str(each).startswith(sys.argv[1]) for each in arguments) or event.startswith("fcntl"):
            print("FORBIDDEN", event, arguments)
sys.addaudithook(watch)
from dsa.inspection import open_state, summarize
with open_state(sys.argv[1]) as state:
    repr(state), state._repr_html_(), summarize(state)
    for table in state.tables.values():
        table.weights(np.arange(table.rows))
assert opened
for path, flags in opened:
    if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
        print("FORBIDDEN", path, flags)
"""


def test_only_reading_is_asked_of_the_system(path):
    """No lock, no file opened for writing: a read-only medium will do."""
    for file in path.iterdir():
        file.chmod(0o444)
    path.chmod(0o555)
    try:
        done = run(READER, path)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        if os.geteuid() != 0:
            assert not os.access(path / METADATA_NAME, os.W_OK)
    finally:
        path.chmod(0o755)
