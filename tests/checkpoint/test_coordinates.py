"""Messages about damage name what the reader can act on: table, rows, checkpoint, file, and both sizes."""

import os
import re
import shutil

import numpy as np
import pytest
import zarr
from checkpoint_samples import assert_same, export, sample_content, sample_table

from dsa import DiskSparseRiemannianAdam, init
from dsa.checkpoint import copy_checkpoint, flatten_checkpoint, open_checkpoint
from dsa.checkpoint.places import find_place
from dsa.errors import CheckpointCorruptError, CheckpointError, GradientError
from dsa.state.coalesce import as_gradient, coalesce, require_finite
from dsa.state.content import StateContent

pytestmark = pytest.mark.usefixtures("small_blocks")

CONTENT = sample_content()
SHARD = "entity/w/c/1/0"  # rows 128 to 255 of 301, 8 elements each


def flip(path):
    data = bytearray(path.read_bytes())
    data[9] ^= 1
    path.write_bytes(data)


def reasons(path):
    """What opening and verifying say."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path).verify()
    return str(caught.value)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_changed_byte(tmp_path, compression):
    export(CONTENT, tmp_path / "k", compression=compression)
    flip(tmp_path / "k" / SHARD)
    said = reasons(tmp_path / "k")
    assert f"'{tmp_path}/k/{SHARD}'" in said
    assert "block 1 of field 'w' of the table 'entity'" in said
    assert "rows 128 to 255" in said


@pytest.mark.parametrize("size", [0, 1, 1000, -1])
def test_a_truncated_shard_is_named_with_both_sizes(tmp_path, size):
    export(CONTENT, tmp_path / "k")
    path = tmp_path / "k" / SHARD
    whole = path.stat().st_size
    now = size % whole
    os.truncate(path, now)
    said = reasons(tmp_path / "k")
    assert f"'{path}' ({now:,} bytes, {whole:,} when it was exported)" in said


def test_a_shard_that_shrinks_while_it_is_read(tmp_path):
    export(CONTENT, tmp_path / "k")
    found = open_checkpoint(tmp_path / "k")
    whole = (tmp_path / "k" / SHARD).stat().st_size
    found.source.sizes[SHARD] = whole  # as it was looked at
    readers = [table for table in found.stored if table.entry.name == "entity"]
    assert readers
    from dsa.checkpoint import plain

    def plausible(*_):
        os.truncate(tmp_path / "k" / SHARD, 1000)
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dsa.checkpoint.blocks.are_plain", plausible)
        with pytest.raises(CheckpointCorruptError, match=rf"it ends after 1,000 of {whole:,} bytes"):
            found.verify()
    assert plain.plain_size("entity/w", readers[0].arrays["w"].plain, SHARD) == whole


def test_a_missing_shard(tmp_path):
    export(CONTENT, tmp_path / "k")
    (tmp_path / "k" / SHARD).unlink()
    assert (
        f"block 1 of field 'w' of the table 'entity' is missing, rows 128 to 255 in '{tmp_path}/k/{SHARD}'"
        in (reasons(tmp_path / "k"))
    )


def test_a_block_in_many_files_names_the_first(tmp_path):
    export(CONTENT, tmp_path / "k")
    group = zarr.open_group(tmp_path / "k", mode="r+", use_consolidated=False)
    old = group["entity/w"]
    values, attributes = old[:], dict(old.attrs)
    del group["entity/w"]
    new = group["entity"].create_array("w", shape=values.shape, chunks=(16, 3), dtype="<f4", fill_value=0)
    new[:] = values
    new.attrs.update(attributes)
    assert_same(open_checkpoint(tmp_path / "k").content(), CONTENT)
    for stray in ("c/1/3", "c/1/99", "c/99/0", "c/0/0.0", "c/x", "1.0", "c/01/0"):
        path = tmp_path / "k/entity/w" / stray
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    assert_same(open_checkpoint(tmp_path / "k").content(), CONTENT)
    flip(tmp_path / "k/entity/w/c/8/0")
    said = reasons(tmp_path / "k")
    assert f"'{tmp_path}/k/entity/w/c/8/0'" in said
    assert "more files" in said


STRAYS = [
    "entity/w/c/0/1", "entity/w/c/1/7", "entity/w/c/0/00", "entity/w/c/0/._0", "entity/w/c/99/0",
    "entity/w/c/a", "entity/w/c/.DS_Store", "entity/w/0.0", "entity/t/c/7", "entity/t/c/0.1",
    "entity/w/c/0/0.tmp",
]  # fmt: skip


@pytest.mark.parametrize("stray", STRAYS)
def test_a_stray_file_beside_the_chunks_is_nothing(tmp_path, stray):
    export(CONTENT, tmp_path / "k")
    path = tmp_path / "k" / stray
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"junk")
    found = open_checkpoint(tmp_path / "k")
    found.verify()
    assert_same(found.content(), CONTENT)


def test_base_and_delta_are_told_apart(tmp_path):
    with DiskSparseRiemannianAdam({"emb": init.Zeros(4_000, 8)}, disk_dir=tmp_path / "state") as optimizer:
        optimizer.step({"emb": (np.arange(4_000), np.ones((4_000, 8), np.float32))})
        optimizer.export_checkpoint(tmp_path / "base")
        optimizer.step({"emb": (np.arange(900), np.ones((900, 8), np.float32))})
        optimizer.export_checkpoint(tmp_path / "delta", base=tmp_path / "base")
    for name in ("base", "delta"):
        shutil.copytree(tmp_path / name, tmp_path / "whole" / name)
    for name in ("base", "delta"):
        file = next((tmp_path / name / "emb/m/c").rglob("0"))
        file = file if file.is_file() else next(path for path in file.rglob("*") if path.is_file())
        flip(file)
        with pytest.raises(CheckpointCorruptError, match=re.escape(f"'{file}'")):
            flatten_checkpoint(tmp_path / "delta", tmp_path / "flat")
        flip(file)
    flatten_checkpoint(tmp_path / "delta", tmp_path / "flat")


def test_a_spoilt_source_of_a_copy_is_named_and_not_the_copy(tmp_path):
    export(CONTENT, tmp_path / "k")
    flip(tmp_path / "k" / SHARD)
    with pytest.raises(CheckpointCorruptError, match=re.escape(f"'{tmp_path}/k/{SHARD}'")):
        copy_checkpoint(tmp_path / "k", tmp_path / "copy")


def test_an_array_that_can_not_be_opened_is_named(tmp_path, monkeypatch):
    export(CONTENT, tmp_path / "k")
    found = open_checkpoint(tmp_path / "k")

    def fail(*_, **__):
        raise ValueError("no such codec")

    monkeypatch.setattr(zarr, "open_array", fail)
    with pytest.raises(CheckpointCorruptError, match=re.escape(f"'{tmp_path}/k/entity/")):
        found.verify()


# ---------------------------------------------------------------- addresses with several parts


def test_a_hint_about_an_archive_is_an_address_that_works(tmp_path):
    export(CONTENT, tmp_path / "ck")
    shutil.copytree(tmp_path / "ck", tmp_path / "deep/er/ck")
    one = shutil.make_archive(str(tmp_path / "a"), "zip", tmp_path, "ck")
    two = shutil.make_archive(str(tmp_path / "b"), "zip", tmp_path / "deep", "er")
    tar = shutil.make_archive(str(tmp_path / "c"), "tar", tmp_path, "ck")
    for address in (f"zip://::{one}", f"zip::{one}", f"zip://er::{two}", f"zip://er/::{two}", f"tar://::{tar}",
                    f"zip://::file://{one}"):  # fmt: skip
        with pytest.raises(CheckpointError, match="there is one inside, open") as caught:
            open_checkpoint(address)
        hinted = re.search(r"open '([^']+)'", str(caught.value))[1]
        assert_same(open_checkpoint(hinted).content(), CONTENT)
    with pytest.raises(CheckpointError, match=re.escape(f"open 'zip://ck::{one}'")):
        open_checkpoint(f"zip://::{one}")
    with pytest.raises(CheckpointError, match=re.escape(f"open '{tmp_path}/deep/er/ck'")):
        open_checkpoint(tmp_path / "deep/er")


def test_a_delta_finds_its_base_beside_it_in_an_archive(tmp_path):
    with DiskSparseRiemannianAdam({"emb": init.Zeros(100, 4)}, disk_dir=tmp_path / "state") as optimizer:
        optimizer.export_checkpoint(tmp_path / "in/base")
        optimizer.step({"emb": ([7], np.ones((1, 4), np.float32))})
        optimizer.export_checkpoint(tmp_path / "in/delta", base=tmp_path / "in/base")
    archive = shutil.make_archive(str(tmp_path / "a"), "zip", tmp_path / "in")
    flatten_checkpoint(f"zip://delta::{archive}", tmp_path / "flat")
    flatten_checkpoint(tmp_path / "in/delta", tmp_path / "other")
    assert open_checkpoint(tmp_path / "flat").content_root == open_checkpoint(tmp_path / "other").content_root


@pytest.mark.parametrize(
    ("url", "name", "below", "beside"),
    [
        ("memory://a/b", "b", "memory://a/b/x/y", "memory://a/z"),
        ("memory://", "", "memory://x/y", "memory://z"),
        ("simplecache::memory://a/b", "b", "simplecache::memory://a/b/x/y", "simplecache::memory://a/z"),
        ("/a/b", "b", "/a/b/x/y", "/a/z"),
    ],
)
def test_addresses_near_an_address(url, name, below, beside):
    place = find_place(url)
    assert (place.name, place.below("x/y"), place.beside("z")) == (name, below, beside)


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e39])
def test_a_gradient_that_is_not_finite_names_the_row_of_the_table(bad):
    grad = np.ones((4, 3))
    grad[2, 1] = bad
    given = np.array([7, 8, 900, 9])
    rows, gradients = coalesce(given, as_gradient(grad, given, 3, "entity"))
    with pytest.raises(GradientError, match=r"in row 2 of the batch, which is row 900 of the table"):
        require_finite(gradients, rows, "entity")


def test_a_step_names_the_row_of_the_table(tmp_path):
    gradient = np.array([[1.0, 1], [1, 1], [1, np.nan]])
    with (
        DiskSparseRiemannianAdam({"entity": init.Zeros(1000, 2)}, disk_dir=tmp_path / "s") as optimizer,
        pytest.raises(GradientError, match=r"row 2 of the batch, which is row 900 of the table"),
    ):
        optimizer.step({"entity": ([3, 4, 900], gradient)})


def test_a_table_without_files_yet(tmp_path):
    content = StateContent((sample_table(rows=3_000, touched=0.0),), 3)
    export(content, tmp_path / "k")
    assert_same(open_checkpoint(tmp_path / "k").content(), content)
