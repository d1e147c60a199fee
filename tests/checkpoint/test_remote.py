"""Stores that fsspec addresses: the root comes last, copies are verified, half a copy is refused."""

import shutil
import uuid

import fsspec
import pytest
from checkpoint_samples import (
    assert_same,
    export,
    files_of,
    read_all,
    sample_content,
    sample_table,
    verify_with_zarr,
)
from fsspec.generic import rsync
from fsspec.implementations.memory import MemoryFileSystem

from dsa.checkpoint import copy_checkpoint, open_checkpoint, write_checkpoint
from dsa.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointIncompleteError,
    CheckpointNotFoundError,
    CheckpointWriteError,
)
from dsa.rules.adam import ADAM
from dsa.state.content import StateContent, TableContent
from dsa.state.facts import TableFacts

pytestmark = pytest.mark.usefixtures("small_blocks")

OLD = StateContent((sample_table("entity", seed=1), sample_table("word", seed=2)), 5)
NEW = StateContent((sample_table("entity", seed=3),), 6)


@pytest.fixture
def memory():
    """The address of nothing yet, in memory."""
    yield f"memory://{uuid.uuid4().hex}"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def bucket(s3):
    """A new bucket: its URL and the options for it."""
    name = f"b-{uuid.uuid4().hex}"
    fsspec.filesystem("s3", **s3).mkdir(name)
    return f"s3://{name}", s3


@pytest.fixture(params=["memory", "s3"])
def store(request):
    """A place for checkpoints: its URL and the options for it."""
    return (
        (request.getfixturevalue("memory"), {})
        if request.param == "memory"
        else request.getfixturevalue("bucket")
    )


def keys(url, options):
    files, root = fsspec.url_to_fs(url, **options)
    files.invalidate_cache()
    return sorted(path.removeprefix(f"{root}/") for path in files.find(root))


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_round_trip(store, compression):
    url, options = store
    content = sample_content()
    target = f"{url}/run/step-12"
    assert export(content, target, storage_options=options, compression=compression) == target
    found = open_checkpoint(f"{target}/", storage_options=options)
    found.verify()
    assert_same(found.content(), content)
    assert_same(found.content(verify=False), content)


def test_it_is_the_same_checkpoint_everywhere(store, tmp_path):
    url, options = store
    export(OLD, tmp_path / "k")
    export(OLD, f"{url}/k", storage_options=options)
    files, root = fsspec.url_to_fs(f"{url}/k", **options)
    for name, data in files_of(tmp_path / "k").items():
        if name != "zarr.json":
            assert files.cat_file(f"{root}/{name}") == data
    roots = {
        open_checkpoint(tmp_path / "k").content_root,
        open_checkpoint(f"{url}/k", storage_options=options).content_root,
    }
    assert len(roots) == 1


def test_an_existing_one_is_kept_unless_overwrite_is_said(store):
    url, options = store
    export(OLD, f"{url}/k", storage_options=options)
    with pytest.raises(CheckpointExistsError, match=r"already holds a checkpoint: .*overwrite=True"):
        export(NEW, f"{url}/k", storage_options=options)
    assert_same(open_checkpoint(f"{url}/k", storage_options=options).content(), OLD)
    export(NEW, f"{url}/k", storage_options=options, overwrite=True)
    assert_same(open_checkpoint(f"{url}/k", storage_options=options).content(), NEW)
    assert {key.split("/")[0] for key in keys(f"{url}/k", options)} == {"entity", "zarr.json"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_checkpoint_is_never_replaced(memory, overwrite):
    files = fsspec.filesystem("memory")
    files.pipe({f"{memory}/k/thesis.txt": b"x", f"{memory}/state/dsa.json": b"{}"})
    export(OLD, f"{memory}/ours")
    files.pipe(f"{memory}/ours/notes.txt", b"x")
    for place, message in {
        "k": "no checkpoint of dsa",
        "state": "is the state directory",
        "state/k": "lies inside the state directory",
        "ours/k": "lies inside the checkpoint",
        "ours": "already holds a checkpoint" if not overwrite else r"'notes\.txt', which is not part",
    }.items():
        with pytest.raises(CheckpointExistsError, match=message):
            export(NEW, f"{memory}/{place}", overwrite=overwrite)
    assert files.cat(f"{memory}/k/thesis.txt") == b"x"


# ---------------------------------------------------------------- interrupted


class Broken(Exception):
    pass


def breaking(content, after):
    """Content that ends in an error."""

    def blocks(table):
        for number, each in enumerate(table.blocks()):
            if number == after:
                raise Broken
            yield each

    tables = (TableContent(t.facts, lambda t=t: blocks(t)) for t in content.tables)
    return StateContent(tuple(tables), content.global_step)


def test_a_failed_export_leaves_nothing(store):
    url, options = store
    with pytest.raises(Broken):
        export(breaking(NEW, 3), f"{url}/k", storage_options=options)
    assert keys(f"{url}/k", options) == []


def test_replacing_is_never_a_mixture(store):
    url, options = store
    export(OLD, f"{url}/k", storage_options=options)
    with pytest.raises(Broken):
        export(breaking(NEW, 2), f"{url}/k", storage_options=options, overwrite=True)
    with pytest.raises(CheckpointNotFoundError):
        open_checkpoint(f"{url}/k", storage_options=options)


def test_an_interrupted_upload_is_refused_and_can_be_replaced(store, tmp_path):
    """As `fsspec.put` leaves it when it is stopped: everything but the root, or half of it."""
    url, options = store
    export(NEW, tmp_path / "k")
    files, root = fsspec.url_to_fs(f"{url}/k", **options)
    every = {f"{root}/{name}": data for name, data in files_of(tmp_path / "k").items() if name != "zarr.json"}
    half = dict(list(every.items())[:9])
    for uploaded in (half, every):
        files.pipe(uploaded)
        with pytest.raises(CheckpointIncompleteError, match="was interrupted"):
            open_checkpoint(f"{url}/k", storage_options=options)
        with pytest.raises(CheckpointExistsError, match=r"an incomplete checkpoint: .*overwrite=True"):
            export(OLD, f"{url}/k", storage_options=options)
    export(OLD, f"{url}/k", storage_options=options, overwrite=True)
    assert_same(open_checkpoint(f"{url}/k", storage_options=options).content(), OLD)


def test_an_upload_without_some_shards_is_refused(store, tmp_path):
    url, options = store
    export(NEW, tmp_path / "k")
    (tmp_path / "k/entity/v/c/1/0").unlink()
    files, root = fsspec.url_to_fs(f"{url}/k", **options)
    files.put(f"{tmp_path}/k/", f"{root}/", recursive=True)
    with pytest.raises(CheckpointCorruptError, match="block 1 of field 'v' of the table 'entity' is missing"):
        open_checkpoint(f"{url}/k", storage_options=options)


def test_an_export_that_meets_another_does_not_complete(memory, monkeypatch):
    files = fsspec.filesystem("memory")

    def blocks():
        yield from NEW.tables[0].blocks()
        files.pipe(f"{memory}/k/zarr.json", b"{}")

    content = StateContent((TableContent(TableFacts("entity", 300, NEW.tables[0].schema, ADAM), blocks),))
    with pytest.raises(CheckpointExistsError, match="somebody else has completed"):
        export(content, f"{memory}/k")
    assert files.cat(f"{memory}/k/zarr.json") == b"{}"


@pytest.mark.parametrize("change", ["lost", "short", "more"])
def test_a_store_that_lost_something_is_noticed_before_the_root_is_put(memory, change):
    files = fsspec.filesystem("memory")

    def blocks():
        path = f"{memory}/k/entity/w/c/0/0"  # of the table before
        if change == "lost":
            files.rm(path)
        elif change == "short":
            files.pipe(path, files.cat(path)[:-1])
        else:
            files.pipe(f"{memory}/k/entity/w/c/99/0", b"x")
        yield from OLD.tables[1].blocks()

    content = StateContent(
        (OLD.tables[0], TableContent(TableFacts("word", 300, OLD.tables[1].schema, ADAM), blocks))
    )
    with pytest.raises(CheckpointWriteError, match=r"has .* bytes after it was written with"):
        export(content, f"{memory}/k")
    assert not files.exists(f"{memory}/k/zarr.json")


# ---------------------------------------------------------------- copies


def test_from_a_directory_through_stores_and_back(tmp_path, memory, bucket):
    """As in section 9 of the notes on Zarr: file, memory, S3, file."""
    url, options = bucket
    content = sample_content()
    export(content, tmp_path / "k", compression="zstd")
    assert copy_checkpoint(tmp_path / "k", f"{memory}/k") == f"{memory}/k"
    copy_checkpoint(f"{memory}/k", f"{url}/k", target_storage_options=options)
    copy_checkpoint(f"{url}/k", tmp_path / "back", storage_options=options)
    assert files_of(tmp_path / "back") == files_of(tmp_path / "k")
    assert_same(open_checkpoint(tmp_path / "back").content(), content)


def test_fsspec_may_copy_it_too(tmp_path, store):
    url, options = store
    export(OLD, tmp_path / "k")
    files, root = fsspec.url_to_fs(f"{url}/k", **options)
    files.put(f"{tmp_path}/k/", f"{root}/", recursive=True)
    assert_same(open_checkpoint(f"{url}/k", storage_options=options).content(), OLD)
    files.get(f"{root}/", f"{tmp_path}/back/", recursive=True)
    assert_same(open_checkpoint(tmp_path / "back").content(), OLD)


def test_put_twice_without_slashes_is_found(tmp_path, store):
    """The second put goes inside the first."""
    url, options = store
    export(OLD, tmp_path / "k")
    files, root = fsspec.url_to_fs(f"{url}/k", **options)
    files.put(f"{tmp_path}/k", root, recursive=True)
    assert_same(open_checkpoint(f"{url}/k", storage_options=options).content(), OLD)
    shutil.rmtree(tmp_path / "k")
    export(NEW, tmp_path / "k")
    files.put(f"{tmp_path}/k", root, recursive=True)
    with pytest.raises(CheckpointCorruptError, match=r"another checkpoint inside, 'k': .* without slashes"):
        open_checkpoint(f"{url}/k", storage_options=options)


def test_rsync_of_a_changed_checkpoint_is_found(tmp_path, memory):
    """`fsspec.generic.rsync` compares sizes: it copies the longer root and leaves equally large shards."""
    export(StateContent((sample_table("entity", seed=1),), 5), tmp_path / "k")
    target = f"{memory}/k"
    rsync((tmp_path / "k").as_uri(), target)
    open_checkpoint(target).verify()
    export(StateContent((sample_table("entity", seed=2),), 1234), tmp_path / "k", overwrite=True)
    rsync((tmp_path / "k").as_uri(), target)
    before, after = fsspec.filesystem("memory").cat(f"{target}/entity/w/c/0/0"), files_of(tmp_path / "k")
    assert before != after["entity/w/c/0/0"], "rsync has become better than its documentation says"
    with pytest.raises(CheckpointCorruptError):
        open_checkpoint(target).verify()


def test_an_archive_can_be_read_but_not_written(tmp_path):
    content = sample_content()
    export(content, tmp_path / "k")
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "k")
    found = open_checkpoint(f"zip://::{archive}")
    found.verify()
    assert_same(found.content(), content)
    copy_checkpoint(f"zip://::{archive}", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(tmp_path / "k")
    inner = shutil.make_archive(str(tmp_path / "inner"), "zip", tmp_path, "k")
    assert_same(open_checkpoint(f"zip://k::{inner}").content(), content)
    with pytest.raises(CheckpointNotFoundError, match="there is nothing at"):
        open_checkpoint(f"zip://::{tmp_path}/new.zip")
    for target in (f"zip://::{archive}", f"zip://::{tmp_path}/new.zip"):
        with pytest.raises(ValueError, match="can be read but not written"):
            export(content, target)
        with pytest.raises(ValueError, match="can be read but not written"):
            copy_checkpoint(tmp_path / "k", target)


def test_a_spoilt_source_is_not_copied(tmp_path):
    export(OLD, tmp_path / "k")
    shard = tmp_path / "k/entity/w/c/1/0"
    data = bytearray(shard.read_bytes())
    data[5] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointCorruptError, match="block 1 of field 'w'"):
        copy_checkpoint(tmp_path / "k", tmp_path / "copy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k"]
    copy_checkpoint(tmp_path / "k", tmp_path / "copy", verify=False)
    assert files_of(tmp_path / "copy") == files_of(tmp_path / "k")


def test_a_copy_replaces_only_what_it_may(tmp_path, memory):
    export(OLD, tmp_path / "k")
    export(NEW, tmp_path / "new")
    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        copy_checkpoint(tmp_path / "new", tmp_path / "k")
    copy_checkpoint(tmp_path / "new", tmp_path / "k", overwrite=True)
    assert_same(open_checkpoint(tmp_path / "k").content(), NEW)
    with pytest.raises(CheckpointExistsError, match="lies inside the checkpoint"):
        copy_checkpoint(tmp_path / "k", tmp_path / "k/copy")
    export(NEW, f"{memory}/k")
    with pytest.raises(CheckpointExistsError, match="is the source itself"):
        copy_checkpoint(f"{memory}/k", f"{memory}/k/", overwrite=True)
    assert_same(open_checkpoint(f"{memory}/k").content(), NEW)
    copy_checkpoint(tmp_path / "k", tmp_path / "k", overwrite=True)
    assert_same(open_checkpoint(tmp_path / "k").content(), NEW)


@pytest.mark.disk
def test_a_copy_keeps_holes_and_leaves_foreign_files(tmp_path, monkeypatch):
    monkeypatch.setattr("dsa.backends.shards.layout.SHARD_BYTES", 8 << 20)
    table = sample_table(rows=100_000, dim=16, touched=0.0, block=50_000)
    records = read_all(table)
    records["m"][0] = 1
    export(StateContent((sample_table(records=records, schema=table.schema),)), tmp_path / "k")
    (tmp_path / "k/notes.txt").write_text("mine")
    copy_checkpoint(tmp_path / "k", tmp_path / "copy")
    (shard,) = (tmp_path / "copy/entity/m/c").glob("*/*")
    assert shard.stat().st_size > 6_000_000 > 3_000_000 > shard.stat().st_blocks * 512
    assert not (tmp_path / "copy/notes.txt").exists()


def test_progress_of_a_copy(tmp_path):
    export(OLD, tmp_path / "k")
    calls = []
    copy_checkpoint(
        tmp_path / "k", tmp_path / "copy", progress=lambda done, total: calls.append((done, total))
    )
    assert calls[-1][0] == calls[-1][1]
    assert verify_with_zarr(tmp_path / "copy") == open_checkpoint(tmp_path / "k").content_root


def test_a_missing_bucket_is_not_hidden(s3):
    with pytest.raises(CheckpointWriteError, match=r"no-such-bucket-1.*check the bucket, the endpoint"):
        write_checkpoint(NEW, "s3://no-such-bucket-1/k", storage_options=s3)


@pytest.mark.parametrize("address", ["s4://bucket/k", "s3://bucket/k"])
def test_what_cannot_be_addressed(address):
    with pytest.raises((ValueError, CheckpointWriteError), match=r"check the .* and the storage_options"):
        write_checkpoint(NEW, address, storage_options={"endpoint": "http://localhost:1"})


def test_a_copy_takes_the_options_of_its_source(bucket, memory):
    url, options = bucket
    export(OLD, memory)
    copy_checkpoint(memory, f"{url}/k", storage_options=options)
    assert_same(open_checkpoint(f"{url}/k", storage_options=options).content(), OLD)


def test_credentials_for_a_prefix_only(memory, monkeypatch):
    """What lies above the place may not be looked at; that is no reason to refuse."""
    exists = MemoryFileSystem.exists
    place = f"{memory}/mine/run/k"

    def guarded(self, path, **options):
        if "mine/run" not in path:
            raise PermissionError(path)
        return exists(self, path, **options)

    monkeypatch.setattr(MemoryFileSystem, "exists", guarded)
    export(OLD, place)
    assert_same(open_checkpoint(place).content(), OLD)


def test_somebody_elses_arrays_are_not_what_an_upload_of_ours_left(memory):
    import zarr

    for name in ("train", "test"):
        group = zarr.open_group(f"{memory}/data/{name}", mode="w")
        group.create_array("x", shape=(4,), dtype="f4")[:] = 1.0
    before = sorted(MemoryFileSystem.store)
    with pytest.raises(CheckpointExistsError, match="is no checkpoint of dsa"):
        export(OLD, f"{memory}/data", overwrite=True)
    assert sorted(MemoryFileSystem.store) == before
