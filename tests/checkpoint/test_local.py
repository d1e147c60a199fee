"""A checkpoint in a directory appears as a whole, replaces only what it may, and leaves nothing behind."""

import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import nursery
import pytest
from checkpoint_samples import assert_same, export, files_of, read_all, sample_content, sample_table

from dsa.checkpoint import exchange, local, open_checkpoint, write_checkpoint
from dsa.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointWriteError,
    DiskSpaceError,
    StateWarning,
)
from dsa.rules.adam import ADAM
from dsa.state.content import StateContent, TableContent
from dsa.state.facts import TableFacts

pytestmark = pytest.mark.usefixtures("small_blocks")

OLD = StateContent((sample_table("entity", seed=1), sample_table("word", seed=2)), 5)
NEW = StateContent((sample_table("entity", seed=3),), 6)


def names(path):
    return sorted(each.name for each in Path(path).iterdir())


@pytest.fixture(params=["exchange", "two renames"])
def way(request, monkeypatch):
    """How a directory is replaced: as Linux can, and as all systems can."""
    if request.param == "two renames":
        monkeypatch.setattr(exchange, "exchange_directories", lambda first, second: False)
    elif not sys.platform.startswith("linux"):
        pytest.skip("only Linux exchanges directories")
    return request.param


# ---------------------------------------------------------------- C51: onto what is there


def test_c51_an_existing_checkpoint_is_kept_unless_overwrite_is_said(tmp_path, way):
    path = tmp_path / "k"
    export(OLD, path)
    before = files_of(path)
    with pytest.raises(
        CheckpointExistsError, match=r"already holds the checkpoint of step 5: .* overwrite=True"
    ):
        export(NEW, path)
    assert files_of(path) == before
    assert export(NEW, path, overwrite=True) == str(path)
    assert_same(open_checkpoint(path).content(), NEW)
    assert names(path) == ["entity", "zarr.json"]
    assert names(tmp_path) == ["k"]


def test_a_failed_replacement_keeps_the_old_one(tmp_path, way):
    path = tmp_path / "k"
    export(OLD, path)
    before = files_of(path)
    facts = TableFacts("entity", 300, NEW.tables[0].schema, ADAM)
    broken = TableContent(facts, lambda: iter([(0, read_all(NEW.tables[0])[:9])]))
    with pytest.raises(ValueError, match="yields 9 of its 300 rows"):
        export(StateContent((broken,)), path, overwrite=True)
    assert files_of(path) == before
    assert names(tmp_path) == ["k"]


@pytest.mark.parametrize("inside", ["", "/inside", "/a/b/c"])
def test_c51_a_state_directory_is_never_a_target(tmp_path, inside):
    (tmp_path / "dsa.json").write_text("{}")
    for overwrite in (False, True):
        with pytest.raises(CheckpointExistsError, match=r"state directory.*: export to a directory outside"):
            export(NEW, f"{tmp_path}{inside}", overwrite=overwrite)
    assert names(tmp_path) == ["dsa.json"]


def test_a_place_inside_a_checkpoint_is_refused(tmp_path):
    export(OLD, tmp_path / "k")
    for inside in ("k/next", "k/entity", "k/entity/w/next"):
        with pytest.raises(CheckpointExistsError, match="lies inside the checkpoint"):
            export(NEW, tmp_path / inside, overwrite=True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_checkpoint_is_never_replaced(tmp_path, overwrite):
    import zarr

    folder, file, group = tmp_path / "folder", tmp_path / "file", tmp_path / "group"
    folder.mkdir()
    (folder / "thesis.txt").write_text("x")
    file.write_text("x")
    zarr.open_group(group, mode="w").create_array("w", shape=(3,), dtype="f4")[:] = 1
    for path in (folder, file, group):
        with pytest.raises(CheckpointExistsError, match=r"no checkpoint of dsa: .* not even overwrite=True"):
            export(NEW, path, overwrite=overwrite)
    assert names(tmp_path) == ["file", "folder", "group"]
    assert (folder / "thesis.txt").read_text() == "x"


def test_a_checkpoint_with_something_of_the_users_is_not_replaced(tmp_path):
    export(OLD, tmp_path / "k")
    (tmp_path / "k/notes.txt").write_text("x")
    with pytest.raises(CheckpointExistsError, match=r"'notes\.txt', which is not part of the checkpoint"):
        export(NEW, tmp_path / "k", overwrite=True)
    (tmp_path / "k/notes.txt").rename(tmp_path / "k/.DS_Store")
    export(NEW, tmp_path / "k", overwrite=True)


def test_an_empty_directory_and_missing_parents_are_fine(tmp_path):
    (tmp_path / "k").mkdir()
    export(NEW, tmp_path / "k")
    export(NEW, tmp_path / "a/b/c")
    assert_same(open_checkpoint(tmp_path / "a/b/c").content(), NEW)


def test_a_link_is_followed(tmp_path):
    export(OLD, tmp_path / "steps/5")
    (tmp_path / "latest").symlink_to(tmp_path / "steps/5")
    export(NEW, tmp_path / "latest", overwrite=True)
    assert (tmp_path / "latest").is_symlink()
    assert names(tmp_path / "steps") == ["5"]
    assert_same(open_checkpoint(tmp_path / "latest").content(), NEW)


def test_relative_paths_urls_and_long_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert export(NEW, "k") == str(tmp_path / "k")
    assert export(NEW, (tmp_path / "u").as_uri()) == str(tmp_path / "u")
    long = "n" * 250
    export(NEW, long)
    export(OLD, long, overwrite=True)
    assert_same(open_checkpoint(long).content(), OLD)
    assert names(tmp_path) == sorted(["k", "u", long])


def test_durable_and_not_are_the_same_files(tmp_path, monkeypatch):
    synced = []
    for name in ("sync_file", "sync_directory"):
        original = getattr(local, name)
        monkeypatch.setattr(
            local, name, lambda what, original=original: synced.append(what) or original(what)
        )
    export(OLD, tmp_path / "quick")
    assert synced == []
    write_checkpoint(OLD, tmp_path / "durable")
    files = files_of(tmp_path / "durable")
    assert files.keys() == files_of(tmp_path / "quick").keys()
    folders = [path for path in (tmp_path / "durable").rglob("*") if path.is_dir()]
    assert len([each for each in synced if isinstance(each, int)]) == len(files)
    assert len([each for each in synced if not isinstance(each, int)]) == len(folders) + 2
    assert synced[-1] == tmp_path


# ---------------------------------------------------------------- interruptions


class Interrupting:
    """Raises Ctrl-C from one of the calls that the main thread makes."""

    def __init__(self, content, after):
        self.left = after

        def blocks(table):
            for each in table.blocks():
                self.left -= 1
                if self.left == 0:
                    raise KeyboardInterrupt
                yield each

        self.content = StateContent(
            tuple(
                TableContent(t.facts, lambda t=t: blocks(t)) for t in content.tables
            ),
            content.global_step,
        )  # fmt: skip


@pytest.mark.parametrize("after", [1, 2, 4, 6, 8])
def test_ctrl_c_leaves_the_old_one_and_nothing_else(tmp_path, after):
    path = tmp_path / "k"
    export(NEW, path)
    before = files_of(path)
    with pytest.raises(KeyboardInterrupt):
        export(Interrupting(OLD, after).content, path, overwrite=True)
    assert files_of(path) == before
    assert names(tmp_path) == ["k"]


@pytest.mark.parametrize("place", ["replace_directory", "_remove", "sync_directory", "_sync_path"])
def test_ctrl_c_while_committing_leaves_one_of_the_two(tmp_path, way, monkeypatch, place):
    path = tmp_path / "k"
    export(OLD, path)
    original = getattr(local, place)

    def interrupted(*args):
        monkeypatch.setattr(local, place, original)
        if place != "_sync_path":
            original(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(local, place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(NEW, path, overwrite=True)
    found = open_checkpoint(path).content()
    assert_same(found, OLD if found.global_step == 5 else NEW)
    export(NEW, path, overwrite=True)
    assert names(tmp_path) == ["k"]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:.*of no use any more")
def test_ctrl_c_at_random_moments(tmp_path):
    path, rng = tmp_path / "k", random.Random(1)
    contents = [StateContent(OLD.tables, 0), StateContent(NEW.tables, 1)]
    export(contents[0], path)
    interrupted = 0
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(25):
            try:
                # Again and again: what strikes while Python cleans up behind itself is only printed.
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.001, 0.1), 0.5)
                while True:
                    export(contents[rng.randrange(2)], path, overwrite=True)
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
                interrupted += 1
            found = open_checkpoint(path).content()
            assert_same(found, contents[found.global_step])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert interrupted == 25
    assert len(names(tmp_path)) < 10, "interrupted while cleaning, and no more"


def test_an_error_of_the_pipeline_arrives_once(tmp_path):
    """Raised in a thread, seen by the caller."""
    schema = sample_table().schema
    records = read_all(sample_table())

    def blocks():
        yield 0, records[:100]
        yield 100, records[100:].reshape(2, 100)  # no records of one dimension

    with pytest.raises(ValueError, match="yields 102 of its 300"):
        export(StateContent((TableContent(TableFacts("entity", 300, schema, ADAM), blocks),)), tmp_path / "k")
    assert names(tmp_path) == []


# ---------------------------------------------------------------- left by killed processes


def leave(tmp_path, kind, host=None, age=0.0, content=OLD):
    """Make what a killed export would have left beside ``k``."""
    path = local._free_name(tmp_path / "k", kind)
    if host is not None:
        path = path.with_name(path.name.replace(local._host(), host))
    export(content, path)
    for each in [*path.rglob("*"), path]:
        os.utime(each, (time.time() - age, time.time() - age))
    return path


def test_what_killed_exports_left_is_removed(tmp_path):
    ours, foreign, old = (
        leave(tmp_path, "tmp"),
        leave(tmp_path, "tmp", "0" * 8),
        leave(tmp_path, "tmp", "1" * 8, 7200),
    )
    others = tmp_path / ".k.tmp-notes"
    others.mkdir()
    export(NEW, tmp_path / "k")
    assert not ours.exists()
    assert foreign.exists(), "another machine may still be writing it"
    assert not old.exists()
    assert others.exists()


def test_a_temporary_directory_in_use_is_kept(tmp_path):
    busy = leave(tmp_path, "tmp", age=7200)
    lock = local._lock(busy)
    export(NEW, tmp_path / "k")
    assert busy.exists()
    os.close(lock)
    export(NEW, tmp_path / "k", overwrite=True)
    assert not busy.exists()


def test_two_exports_at_once_do_not_disturb_each_other(tmp_path):
    def blocks():
        export(OLD, tmp_path / "k")
        yield from NEW.tables[0].blocks()

    slow = StateContent((TableContent(TableFacts("entity", 300, NEW.tables[0].schema, ADAM), blocks),), 6)
    with pytest.raises(CheckpointExistsError, match="already holds the checkpoint of step 5"):
        export(slow, tmp_path / "k")
    assert_same(open_checkpoint(tmp_path / "k").content(), OLD)
    assert names(tmp_path) == ["k"]


def test_a_kill_between_two_renames_loses_nothing(tmp_path):
    aside = leave(tmp_path, "old")
    leave(tmp_path, "tmp", content=NEW)
    with pytest.warns(
        StateWarning, match=r"was being replaced when its writer was killed: the old .* is read"
    ):
        found = open_checkpoint(tmp_path / "k")
    assert_same(found.content(), OLD)
    assert aside.exists(), "reading changes nothing"
    with pytest.raises(CheckpointExistsError, match="already holds the checkpoint of step 5"):
        export(NEW, tmp_path / "k")
    assert_same(open_checkpoint(tmp_path / "k").content(), OLD)
    assert not aside.exists()
    export(NEW, tmp_path / "k", overwrite=True)
    assert names(tmp_path) == ["k"]


def test_without_locks_age_decides(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "_lock", lambda directory: None)
    young, old = leave(tmp_path, "tmp"), leave(tmp_path, "tmp", age=7200)
    export(NEW, tmp_path / "k")
    assert young.exists()
    assert not old.exists()


def test_what_cannot_be_deleted_is_reported(tmp_path, monkeypatch):
    export(OLD, tmp_path / "k")
    monkeypatch.setattr(local.shutil, "rmtree", lambda *args, **kwargs: None)
    with pytest.warns(StateWarning, match="of no use any more but can't be deleted"):
        export(NEW, tmp_path / "k", overwrite=True)
    assert_same(open_checkpoint(tmp_path / "k").content(), NEW)


# ---------------------------------------------------------------- C33: disks that are full


def test_c33_too_little_room_is_said_before_a_byte_is_written(tmp_path, monkeypatch):
    export(OLD, tmp_path / "k")
    before = files_of(tmp_path / "k")
    monkeypatch.setattr("dsa.checkpoint.export.available_bytes", lambda directory: 1000)
    with pytest.raises(
        DiskSpaceError, match=r"bytes are needed in .* only 1,000 are available: .*compression"
    ) as caught:
        export(NEW, tmp_path / "k", overwrite=True)
    assert caught.value.errno == errno.ENOSPC
    assert files_of(tmp_path / "k") == before
    assert names(tmp_path) == ["k"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
@pytest.mark.parametrize("call", [0, 1, 7, 25])
def test_c33_the_disk_refuses_in_the_middle(tmp_path, monkeypatch, code, call):
    path = tmp_path / "k"
    export(OLD, path)
    before = files_of(path)
    original, left = os.write, [call]

    def write(descriptor, data):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(code, os.strerror(code))
        return original(descriptor, data)

    descriptors = os.listdir("/dev/fd")
    with monkeypatch.context() as patch:
        patch.setattr(local.os, "write", write)
        with pytest.raises(
            CheckpointWriteError, match=r"can't be written: .* or choose another directory"
        ) as caught:
            export(NEW, path, overwrite=True)
    assert caught.value.errno == code
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, OSError)
    assert os.listdir("/dev/fd") == descriptors
    assert files_of(path) == before
    assert names(tmp_path) == ["k"]
    export(NEW, path, overwrite=True)


def run(script, *args):
    prelude = "import sys\nsys.path.insert(0, sys.argv[1])\n"
    return nursery.run(prelude + textwrap.dedent(script), Path(__file__).parent, *args)


@pytest.mark.skipif(os.name == "nt", reason="there are no such limits")
def test_c33_a_limit_on_the_size_of_files(tmp_path):
    export(OLD, tmp_path / "k")
    before = files_of(tmp_path / "k")
    script = """
        import errno, resource
        from checkpoint_samples import export, sample_table
        from dsa.state.content import StateContent
        content = StateContent((sample_table(rows=40_000, dim=8),))
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        try:
            export(content, sys.argv[2], overwrite=True)
        except OSError as error:
            assert error.errno == errno.EFBIG, error
            print(error)
    """
    done = run(script, tmp_path / "k")
    assert "ulimit -f" in done.stdout, done.stderr
    assert files_of(tmp_path / "k") == before
    assert names(tmp_path) == ["k"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "dsa-test", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting is not permitted")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_c33_a_disk_that_is_really_full(small_disk):
    export(NEW, small_disk / "k")
    large = StateContent((sample_table(rows=40_000, dim=16),))
    for compression, error in ((None, DiskSpaceError), ("zstd", CheckpointWriteError)):
        with pytest.raises(error) as caught:
            export(large, small_disk / "k", overwrite=True, compression=compression)
        assert caught.value.errno == errno.ENOSPC
        assert names(small_disk) == ["k"]
        assert_same(open_checkpoint(small_disk / "k").content(), NEW)


def test_every_error_of_a_checkpoint_is_one(tmp_path):
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="compression is 'lz4': use None, 'zstd' or 'auto'"):
        export(sample_content(), tmp_path / "k", compression="lz4")
    assert names(tmp_path) == []
