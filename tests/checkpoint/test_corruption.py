"""Damage is found and named; nothing that a directory may hold brings the process down. C40."""

import contextlib
import copy
import json
import random
import shutil

import pytest
from checkpoint_samples import (
    assert_same,
    described,
    export,
    files_of,
    read_all,
    sample_table,
)

from dsa.checkpoint import open_checkpoint
from dsa.checkpoint.digests import content_root
from dsa.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointIncompleteError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)
from dsa.state.content import StateContent

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.fixture
def checkpoint(tmp_path):
    """A directory with two tables of several blocks; its first one has blocks that are zero."""
    entity = sample_table(rows=400, dim=8, touched=0.5, steps=3)
    records = read_all(entity)
    for name in "mvts":
        records[name][:128] = 0
    tables = (
        sample_table(records=records, schema=entity.schema, steps=3),
        sample_table("word", rows=70, dim=2),
    )
    export(StateContent(tables, 5), tmp_path / "k")
    return tmp_path / "k"


def read(path, verify=True):
    found = open_checkpoint(path)
    return (
        described(found.content()),
        [read_all(t).tobytes() for t in found.content(verify).tables],
        found.attributes,
    )


# ---------------------------------------------------------------- flipped bits


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path, compression):
    content = StateContent((sample_table(rows=200, dim=4, touched=0.5, k=1.0),), 5)
    path = tmp_path / "k"
    export(content, path, compression=compression, attributes={"lr": 0.5})
    expected = read(path)
    rng = random.Random(compression)
    refused = equal = 0
    for name, data in files_of(path).items():
        for place in rng.sample(range(8 * len(data)), 30):
            spoilt = bytearray(data)
            spoilt[place // 8] ^= 1 << place % 8
            (path / name).write_bytes(spoilt)
            try:
                found = read(path)
            except CheckpointError:
                refused += 1
            else:
                assert found == expected, (name, place)
                equal += 1
            (path / name).write_bytes(data)
    assert refused + equal >= 350
    assert refused > equal > 0
    assert read(path) == expected


def test_without_verification_a_flipped_bit_may_pass_but_never_as_a_crash(checkpoint):
    rng = random.Random(3)
    for name, data in files_of(checkpoint).items():
        for place in rng.sample(range(8 * len(data)), 5):
            spoilt = bytearray(data)
            spoilt[place // 8] ^= 1 << place % 8
            (checkpoint / name).write_bytes(spoilt)
            with contextlib.suppress(CheckpointError):
                read(checkpoint, verify=False)
            (checkpoint / name).write_bytes(data)


def test_a_changed_number_in_the_description_is_noticed(checkpoint):
    expected = read(checkpoint)
    for change in (
        {"k": 2.0}, {"steps": 4}, {"rule": {"name": "frame_adam"}}, {"touched_rows": 1}, {"kind": "poincare"},
        {"init_max_norm_fraction": 0.75}, {"initializer": {"kind": "zeros", "rows": 400, "dim": 8}},
    ):  # fmt: skip
        with edited(checkpoint / "entity/zarr.json") as document:
            document["attributes"].update(change)
        with pytest.raises(CheckpointCorruptError, match=r"checksum|kind is"):
            open_checkpoint(checkpoint)
        restore(checkpoint / "entity/zarr.json")
    for change in (
        {"global_step": 6},
        {"attributes": {"lr": 1}},
        {"created": "yesterday"},
        {"identity": "x"},
    ):
        with edited(checkpoint / "zarr.json") as document:
            document["attributes"]["dsa"].update(change)
        with pytest.raises(CheckpointCorruptError, match="checksum"):
            open_checkpoint(checkpoint)
        restore(checkpoint / "zarr.json")
    assert read(checkpoint) == expected


def test_what_users_add_is_their_own(checkpoint):
    expected = read(checkpoint)
    for name in ("zarr.json", "entity/zarr.json", "entity/w/zarr.json"):
        with edited(checkpoint / name) as document:
            document["attributes"]["note"] = "mine"
    assert read(checkpoint) == expected


class edited:
    """Changes a document, and keeps the original beside the checkpoint."""

    def __init__(self, path):
        self.path = path
        self.document = json.loads(path.read_bytes())

    def __enter__(self):
        self.kept = self.path.read_bytes()
        ORIGINALS[self.path] = ORIGINALS.get(self.path, self.kept)
        return self.document

    def __exit__(self, *exc):
        self.path.write_text(json.dumps(self.document))


ORIGINALS = {}


def restore(path):
    path.write_bytes(ORIGINALS.pop(path))


# ---------------------------------------------------------------- files that are missing, short or elsewhere


def damaged(checkpoint, name, damage):
    other = {"entity/m/c/2/0": "entity/m/c/3/0", "entity/t/c/0": "entity/s/c/0"}[name]
    path = checkpoint / name
    if damage == "missing":
        path.unlink()
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-700])
    elif damage == "without its index":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "longer":
        path.write_bytes(path.read_bytes() + b"more")
    elif damage == "a directory":
        path.unlink()
        path.mkdir()
    elif damage == "swapped":
        data, swapped = path.read_bytes(), (checkpoint / other).read_bytes()
        path.write_bytes(swapped)
        (checkpoint / other).write_bytes(data)


@pytest.mark.parametrize(
    "damage", ["missing", "empty", "truncated", "without its index", "longer", "a directory", "swapped"]
)
@pytest.mark.parametrize(("name", "field", "block"), [("entity/m/c/2/0", "m", 2), ("entity/t/c/0", "t", 0)])
def test_a_damaged_shard_is_named(checkpoint, name, field, block, damage):
    damaged(checkpoint, name, damage)
    with pytest.raises(
        CheckpointCorruptError, match=rf"block {block} of field '{field}' of the table 'entity'"
    ):
        open_checkpoint(checkpoint).verify()
    with pytest.raises(
        CheckpointCorruptError, match=rf"block {block} of field '{field}' of the table 'entity'"
    ):
        read(checkpoint)


def test_c40_a_missing_chunk_is_not_zeros(tmp_path):
    content = StateContent((sample_table(rows=1000, dim=8),))
    export(content, tmp_path / "k")
    (tmp_path / "k/entity/v/c/4/0").unlink()
    for verify in (True, False):
        with pytest.raises(
            CheckpointCorruptError, match="block 4 of field 'v' of the table 'entity' is missing"
        ):
            open_checkpoint(tmp_path / "k").content(verify)


def test_c40_rows_that_were_never_touched_are_zeros(tmp_path):
    records = read_all(sample_table(rows=1000, dim=8))
    for name in "mvts":
        records[name][500:] = 0
    content = StateContent((sample_table(records=records, schema=sample_table(dim=8).schema),))
    export(content, tmp_path / "k")
    assert not (tmp_path / "k/entity/v/c/5/0").exists()
    assert_same(open_checkpoint(tmp_path / "k").content(), content)


def test_rows_before_the_damage_are_good_and_no_row_of_the_block_is_given(checkpoint):
    damaged(checkpoint, "entity/m/c/2/0", "swapped")
    blocks = open_checkpoint(checkpoint).content().tables[0].blocks()
    rows = sum(len(next(blocks)[1]) for _ in range(2))
    assert rows == 256
    with pytest.raises(CheckpointCorruptError, match="doesn't match its checksum"):
        next(blocks)


def test_documents_that_are_missing(checkpoint):
    for name, error in {
        "zarr.json": CheckpointIncompleteError,
        "entity/zarr.json": CheckpointCorruptError,
        "word/t/zarr.json": CheckpointCorruptError,
    }.items():
        data = (checkpoint / name).read_bytes()
        (checkpoint / name).unlink()
        with pytest.raises(error, match="missing"):
            open_checkpoint(checkpoint)
        (checkpoint / name).write_bytes(data)
    shutil.rmtree(checkpoint / "word")
    with pytest.raises(CheckpointCorruptError, match="the table 'word' can't be used: it is missing"):
        open_checkpoint(checkpoint)


def test_a_table_of_another_checkpoint_is_noticed(checkpoint, tmp_path):
    export(StateContent((sample_table("word", rows=70, dim=2, seed=9),), 5), tmp_path / "other")
    shutil.rmtree(checkpoint / "word")
    shutil.copytree(tmp_path / "other/word", checkpoint / "word")
    with pytest.raises(CheckpointCorruptError, match="doesn't match its checksum"):
        open_checkpoint(checkpoint)


# ---------------------------------------------------------------- documents of strangers


def shape(document):
    return document["chunk_grid"]["configuration"], document["codecs"][0]["configuration"]


def of_array(change):
    def apply(checkpoint):
        with edited(checkpoint / "entity/w/zarr.json") as document:
            change(document)

    return apply


def of_group(**change):
    def apply(checkpoint):
        with edited(checkpoint / "entity/zarr.json") as document:
            document["attributes"].update(change)

    return apply


def of_root(change):
    def apply(checkpoint):
        with edited(checkpoint / "zarr.json") as document:
            change(document["attributes"]["dsa"])

    return apply


def codec(name, **configuration):
    return lambda document: shape(document)[1]["codecs"].append(
        {"name": name, "configuration": configuration}
    )


DEEP = json.loads("[" * 500 + "]" * 500)
HUGE = 10**15


def checksum(document):
    return document["attributes"]["dsa_checksum"]


def field(name):
    return {"dim": 8, "fields": [{"name": name, "dtype": "float32", "per": "row"}]}


SCHEMA = {"dim": 1 << 60, "fields": [{"name": "w", "dtype": "float32", "per": "element"}]}
HOSTILE = {
    "a group outside": of_root(lambda root: root["tables"][0].update(group="../../etc")),
    "an absolute group": of_root(lambda root: root["tables"][0].update(group="/etc")),
    "a group inside a group": of_root(lambda root: root["tables"][0].update(group="entity/w")),
    "the same group twice": of_root(lambda root: root["tables"].append(dict(root["tables"][0]))),
    "no tables": of_root(lambda root: root.pop("tables")),
    "tables that are none": of_root(lambda root: root.update(tables=[3])),
    "an unknown kind": of_root(lambda root: root.update(kind="half")),
    "a step that is none": of_root(lambda root: root.update(global_step=-1)),
    "a step that is true": of_root(lambda root: root.update(global_step=True)),
    "a huge step": of_root(lambda root: root.update(global_step=10**400)),
    "deep attributes": of_root(lambda root: root.update(attributes={"x": DEEP})),
    "huge rows": of_group(rows=HUGE),
    "rows that are text": of_group(rows="400"),
    "infinite k": of_group(k=float("inf")),
    "negative k": of_group(k=-1.0),
    "a huge dim": of_group(schema=SCHEMA),
    "a field outside": of_group(schema=field("../w")),
    "an unknown rule": of_group(initializer={"kind": "pickle", "data": "gASV"}),
    "a huge shape": of_array(lambda d: d.update(shape=[HUGE, 8])),
    "a short shape": of_array(lambda d: d.update(shape=[300, 8])),
    "a negative shape": of_array(lambda d: d.update(shape=[-400, 8])),
    "objects": of_array(lambda d: d.update(data_type="object")),
    "text": of_array(lambda d: d.update(data_type={"name": "fixed_length_utf32"})),
    "float64": of_array(lambda d: d.update(data_type="float64")),
    "another fill value": of_array(lambda d: d.update(fill_value=1.0)),
    "a fill value of -0.0": of_array(lambda d: d.update(fill_value=-0.0)),
    "a fill value of NaN": of_array(lambda d: d.update(fill_value="NaN")),
    "a huge chunk": of_array(lambda d: shape(d)[0].update(chunk_shape=[HUGE, 8])),
    "an empty chunk": of_array(lambda d: shape(d)[0].update(chunk_shape=[0, 8])),
    "a chunk of text": of_array(lambda d: shape(d)[0].update(chunk_shape="all")),
    "huge inner chunks": of_array(lambda d: shape(d)[1].update(chunk_shape=[HUGE, 8])),
    "inner chunks that don't divide": of_array(lambda d: shape(d)[1].update(chunk_shape=[7, 8])),
    "blosc": of_array(codec("blosc", cname="lz4", clevel=5, shuffle="noshuffle", typesize=4, blocksize=0)),
    "pickle": of_array(codec("numcodecs.pickle")),
    "transpose": of_array(lambda d: shape(d)[1]["codecs"].insert(0, {"name": "transpose"})),
    "vlen": of_array(lambda d: shape(d)[1].update(codecs=[{"name": "vlen-bytes"}])),
    "shards in shards": of_array(lambda d: shape(d)[1].update(codecs=copy.deepcopy(d["codecs"]))),
    "no codecs": of_array(lambda d: d.update(codecs=[])),
    "codecs that are none": of_array(lambda d: d.update(codecs=[["bytes"]])),
    "big endian": of_array(lambda d: shape(d)[1]["codecs"][0]["configuration"].update(endian="big")),
    "another grid": of_array(lambda d: d.update(chunk_grid={"name": "rectangular"})),
    "other keys": of_array(lambda d: d.update(chunk_key_encoding={"name": "fancy"})),
    "transformers": of_array(lambda d: d.update(storage_transformers=[{"name": "x"}])),
    "a group": of_array(lambda d: d.update(node_type="group")),
    "Zarr 2": of_array(lambda d: d.update(zarr_format=2)),
    "no checksum": of_array(lambda d: d["attributes"].pop("dsa_checksum")),
    "a foreign checksum": of_array(lambda d: checksum(d).update(algorithm="md5")),
    "fewer blocks": of_array(lambda d: checksum(d)["blocks"].pop()),
    "blocks that are none": of_array(lambda d: checksum(d).update(blocks=[1])),
    "blocks that aren't hex": of_array(lambda d: checksum(d).update(blocks=["z" * 64] * 4)),
    "another root": of_array(lambda d: checksum(d).update(root="0" * 64)),
    "zero rows outside": of_array(lambda d: d["attributes"].update(dsa_zero_rows=[[0, HUGE]])),
    "zero rows that are none": of_array(lambda d: d["attributes"].update(dsa_zero_rows=[[1]])),
    "zero rows in disorder": of_array(lambda d: d["attributes"].update(dsa_zero_rows=[[9, 12], [3, 5]])),
    "attributes that are none": of_array(lambda d: d.update(attributes=3)),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_document_is_refused_before_anything_is_allocated(checkpoint, what, monkeypatch):
    HOSTILE[what](checkpoint)
    with pytest.raises(CheckpointError):
        read(checkpoint)
    if what != "big endian":  # which is a legal way to store an array; these bytes are little endian

        def allocate(*args, **kwargs):
            raise AssertionError("something was read")

        monkeypatch.setattr("dsa.checkpoint.blocks.zarr.open_array", allocate)
        with pytest.raises(CheckpointError):
            open_checkpoint(checkpoint)


def test_why_blosc_is_refused_is_said(checkpoint):
    HOSTILE["blosc"](checkpoint)
    with pytest.raises(CheckpointCorruptError, match=r"'blosc' is not accepted \(a damaged chunk .* crash"):
        open_checkpoint(checkpoint)


def test_an_array_of_consistent_but_impossible_size_is_refused(tmp_path, monkeypatch):
    """Every checksum of the description fits, but a terabyte is claimed to be behind a few kilobytes."""
    path = tmp_path / "k"
    export(StateContent((sample_table(rows=400, dim=8),)), path)
    monkeypatch.setattr("dsa.checkpoint.reading._check_sums", lambda *args: None)
    rows = 1 << 35
    with edited(path / "entity/zarr.json") as document:
        document["attributes"].update(rows=rows)
    for name in "wmvts":
        with edited(path / f"entity/{name}/zarr.json") as document:
            shape = [rows, *document["shape"][1:]]
            document.update(shape=shape)
            check = document["attributes"]["dsa_checksum"]
            from dsa.backends.shards.layout import ArraySpec, block_rows
            from dsa.checkpoint.digests import root_digest

            spec = ArraySpec(name, check["dtype"], rows, shape[1] if len(shape) > 1 else None)
            blocks = ["0" * 64] * -(-rows // block_rows(rows, spec.row_bytes))
            check.update(
                shape=shape, block_rows=block_rows(rows, spec.row_bytes), blocks=blocks,
                root=root_digest(check["algorithm"], spec, blocks),
            )  # fmt: skip
    with pytest.raises(CheckpointCorruptError, match=r"larger than the files behind it|is missing"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"3", b'{"attributes": 3}', b"\xff\xfe", b"[" * 100_000, b'{"a": ' * 50_000, b"NaN"],
)
def test_documents_that_are_no_documents(checkpoint, data):
    for name in ("zarr.json", "entity/zarr.json", "entity/w/zarr.json"):
        kept = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(data)
        with pytest.raises((CheckpointCorruptError, CheckpointIncompleteError)):
            open_checkpoint(checkpoint)
        (checkpoint / name).write_bytes(kept)


# ---------------------------------------------------------------- what is no checkpoint


def test_a_root_made_by_opening_is_no_checkpoint(tmp_path):
    import zarr

    zarr.open_group(tmp_path / "k", mode="a")
    with pytest.raises(CheckpointIncompleteError, match="written last"):
        open_checkpoint(tmp_path / "k")


def test_a_stray_root_over_a_half_copy_is_no_checkpoint(checkpoint):
    import zarr

    (checkpoint / "zarr.json").unlink()
    zarr.open_group(checkpoint, mode="a")
    with pytest.raises(CheckpointIncompleteError, match="written last"):
        open_checkpoint(checkpoint)


def test_a_newer_version_is_named(checkpoint):
    for change, message in (
        ({"version": 4}, "version 4; this release reads"),
        ({"format": "x"}, "of format 'x'"),
    ):
        with edited(checkpoint / "zarr.json") as document:
            document["attributes"]["dsa"].update(change)
        with pytest.raises(CheckpointMismatchError, match=message):
            open_checkpoint(checkpoint)
        restore(checkpoint / "zarr.json")


def test_other_things_are_named(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint at"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointMismatchError, match="is a file"):
        open_checkpoint(tmp_path / "file")
    (tmp_path / "state").mkdir()
    with pytest.raises(CheckpointIncompleteError, match=r"root 'zarr\.json' is missing"):
        open_checkpoint(tmp_path / "state")
    (tmp_path / "state/dsa.json").write_text("{}")
    with pytest.raises(CheckpointMismatchError, match="is a state directory"):
        open_checkpoint(tmp_path / "state")
    (tmp_path / "old").mkdir()
    (tmp_path / "old/checkpoint.json").write_text("{}")
    for path in (tmp_path / "old", tmp_path / "old/checkpoint.json"):
        with pytest.raises(CheckpointMismatchError, match=r"older release: convert it with dsa\.migrate"):
            open_checkpoint(path)
    with pytest.raises(ValueError, match="address of the checkpoint is empty"):
        open_checkpoint("")


def test_a_copy_inside_is_found(checkpoint, tmp_path):
    outer = tmp_path / "copies/k"
    shutil.copytree(checkpoint, outer / "k")
    with pytest.raises(CheckpointIncompleteError, match=r"there is one inside, open '.*copies/k/k'"):
        open_checkpoint(outer)
    shutil.copytree(checkpoint, outer, dirs_exist_ok=True)
    with pytest.raises(CheckpointCorruptError, match=r"another checkpoint inside, 'k': .* without slashes"):
        open_checkpoint(outer)


def test_the_state_file_has_the_name_that_it_has():
    from dsa.checkpoint.occupied import STATE_FILE
    from dsa.state.metadata import METADATA_NAME

    assert STATE_FILE == METADATA_NAME


def test_nothing_is_changed_by_reading(checkpoint):
    """As in a folder that is mounted to be read only: C39."""
    for path in [checkpoint, *checkpoint.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)

    def look():
        return {
            path: (path.stat().st_mtime_ns, path.stat().st_ctime_ns, path.stat().st_mode)
            for path in [checkpoint.parent, checkpoint, *checkpoint.rglob("*")]
        }

    before = look()
    read(checkpoint)
    open_checkpoint(checkpoint).verify()
    assert look() == before
    for path in [checkpoint, *checkpoint.rglob("*")]:
        path.chmod(0o755)


def test_root_names_are_independent_of_order():
    assert content_root({"a": "1", "b": "2"}) == content_root({"b": "2", "a": "1"})


def test_a_reader_that_stops_early_leaves_no_thread(checkpoint):
    import threading

    blocks = open_checkpoint(checkpoint).content().tables[0].blocks()
    next(blocks)
    blocks.close()
    for thread in threading.enumerate():
        if thread.name.startswith("dsa-import"):
            thread.join(5)
            assert not thread.is_alive()
