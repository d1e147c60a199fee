"""What is written is an ordinary Zarr group that other programs read and verify."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
import zarr
from checkpoint_samples import (
    assert_same,
    export,
    files_of,
    read_all,
    sample_content,
    sample_records,
    sample_table,
    verify_with_zarr,
)

from dsa.backends.shards.layout import ArraySpec, plan_layout
from dsa.checkpoint import open_checkpoint
from dsa.checkpoint.manifest import array_specs
from dsa.schema import Field, Schema, adam_schema
from dsa.state.content import StateContent

pytestmark = pytest.mark.usefixtures("small_blocks")

COMPRESSIONS = (None, "zstd", "auto")


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_plain_zarr_reads_it(tmp_path, compression):
    content = sample_content()
    path = export(content, tmp_path / "k", compression=compression)
    assert path == str(tmp_path / "k")
    root = zarr.open_group(path, mode="r")
    groups = {each["name"]: each["group"] for each in root.attrs["dsa"]["tables"]}
    for table in content.tables:
        records = read_all(table)
        for name in table.schema.names:
            array = root[groups[table.name]][name]
            assert array[:].tobytes() == records[name].tobytes()
            assert array.metadata.dimension_names == ("row", "dim")[: array.ndim]
            assert array.fill_value == 0


def test_attributes_tell_what_it_is(tmp_path):
    root = zarr.open_group(export(sample_content(), tmp_path / "k", attributes={"lr": 0.1}), mode="r")
    told = root.attrs["dsa"]
    assert (told["format"], told["version"], told["complete"], told["kind"]) == (
        "dsa-checkpoint",
        5,
        True,
        "full",
    )
    assert (told["global_step"], told["attributes"]) == (12, {"lr": 0.1})
    assert {"dsa", "numpy", "python", "zarr"} <= told["versions"].keys()
    assert told["created"].endswith("+00:00")
    entity = dict(root["entity"].attrs)
    touched = int((read_all(sample_content().tables[0])["s"] > 0).sum())
    assert 0 < touched < 301
    expected = {
        "name": "entity", "kind": "poincare", "k": 1.5, "rows": 301, "dim": 8, "touched_rows": touched,
        "steps": 11,
        "rule": {"name": "frame_adam"}, "init_max_norm_fraction": 0.25,
    }  # fmt: skip
    assert {key: entity[key] for key in expected} == expected
    assert entity["initializer"]["kind"] == "normal"
    assert entity["schema"]["dim"] == 8
    assert entity["stored_schema"] is None


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_zarr_and_hashlib_alone_verify_it(tmp_path, compression):
    path = export(sample_content(), tmp_path / "k", compression=compression)
    assert verify_with_zarr(path) == open_checkpoint(path).content_root


def test_nothing_in_it_warns(tmp_path):
    xarray = pytest.importorskip("xarray")
    content = sample_content()
    path = export(content, tmp_path / "k")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        root = zarr.open_group(path, mode="r")
        assert len(root.members(max_depth=None)) == 12
        tree = xarray.open_datatree(path, engine="zarr")
        with xarray.open_zarr(path, group="entity") as table:
            records = read_all(content.tables[0])
            assert (table.w.values == records["w"]).all()
            assert (table.m.where(table.t > 0).isnull().any("dim").values == (records["t"] == 0)).all()
        assert tree["entity"].sizes == {"row": 301, "dim": 8}
        tree.close()


def test_consolidated_metadata_are_those_of_the_arrays(tmp_path):
    path = tmp_path / "k"
    export(sample_content(), path)
    root = json.loads((path / "zarr.json").read_text())
    metadata = root["consolidated_metadata"]["metadata"]
    files = [name for name in files_of(path) if name.endswith("/zarr.json")]
    assert {f"{name}/zarr.json" for name in metadata} == set(files)
    for name, document in metadata.items():
        assert document == json.loads((path / name / "zarr.json").read_text())
    assert zarr.open_group(path, mode="r").metadata.consolidated_metadata is not None


def test_nothing_but_documents_and_shards_is_there(tmp_path):
    export(sample_content(), tmp_path / "k")
    assert [path.name for path in tmp_path.iterdir()] == ["k"]
    for name in files_of(tmp_path / "k"):
        assert name.endswith("zarr.json") or "/c/" in name


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize(("rows", "dim"), [(1, 1), (1, 5), (2, 1), (127, 1), (129, 33), (1024, 1), (4097, 2)])
def test_round_trip_of_odd_shapes(tmp_path, rows, dim, compression):
    content = StateContent((sample_table(rows=rows, dim=dim, touched=0.5, block=max(1, rows // 3)),))
    path = export(content, tmp_path / "k", compression=compression)
    assert_same(open_checkpoint(path).content(), content)
    assert verify_with_zarr(path) == open_checkpoint(path).content_root


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize(("rows", "dim", "per"), [(5000, 3, "row"), (3001, 7, "element"), (700, 40, "row")])
@pytest.mark.parametrize("sizes", [(300, 700), (700, 300), (1, 1)])
def test_reading_in_small_pieces(tmp_path, monkeypatch, rows, dim, per, compression, sizes):
    content = StateContent((sample_table(rows=rows, dim=dim, touched=0.5, per=per, block=1000),))
    path = export(content, tmp_path / "k", compression=compression)
    monkeypatch.setattr("dsa.checkpoint.blocks._PIECE_BYTES", sizes[0])
    monkeypatch.setattr("dsa.checkpoint.streams._RECORD_BYTES", sizes[1])
    assert_same(open_checkpoint(path).content(), content)
    open_checkpoint(path).verify()


def test_a_negative_zero_is_content(tmp_path):
    schema, records = sample_records(600, 4, touched=0.0)
    records["m"][300, 2] = -0.0
    path = export(StateContent((sample_table(records=records, schema=schema),)), tmp_path / "k")
    found = read_all(open_checkpoint(path).content().tables[0])
    assert found["m"].tobytes() == records["m"].tobytes()
    assert np.signbit(found["m"][300, 2])
    assert zarr.open_group(path, mode="r")["entity/m"].attrs["dsa_zero_rows"] == [[0, 256], [512, 600]]


def test_rows_of_zeros_have_no_files_and_are_declared(tmp_path):
    schema, records = sample_records(1000, 4)
    for name in "mvts":
        records[name][256:800] = 0
    path = tmp_path / "k"
    for compression in COMPRESSIONS:
        content = StateContent((sample_table(records=records, schema=schema),))
        export(content, path, compression=compression, overwrite=True)
        shards = sorted(name for name in files_of(path) if name.startswith("entity/m/c/"))
        assert shards == ["entity/m/c/0/0", "entity/m/c/3/0"]
        assert zarr.open_group(path, mode="r")["entity/m"].attrs["dsa_zero_rows"] == [[256, 768]]
        assert_same(open_checkpoint(path).content(), content)
        assert_same(open_checkpoint(path).content(verify=False), content)


@pytest.mark.disk
def test_zeros_inside_a_shard_are_holes(tmp_path, monkeypatch):
    monkeypatch.setattr("dsa.backends.shards.layout.SHARD_BYTES", 16 << 20)
    schema, records = sample_records(200_000, 16, touched=0.0)
    records["m"][150_000] = 1.0
    path = tmp_path / "k"
    export(StateContent((sample_table(records=records, schema=schema, block=9000),)), path)
    (shard,) = (path / "entity/m/c").glob("*/*")
    assert shard.stat().st_size > 12_000_000
    assert shard.stat().st_blocks * 512 < 2_000_000


def test_auto_compresses_what_is_mostly_untouched(tmp_path):
    tables = (sample_table("few", touched=0.1), sample_table("many", touched=0.9))
    path = export(StateContent(tables), tmp_path / "k", compression="auto")
    root = zarr.open_group(path, mode="r")
    inner = {
        name: [type(codec).__name__ for codec in array.metadata.codecs[0].codecs]
        for name, array in root.members(max_depth=None)
        if isinstance(array, zarr.Array)
    }
    compressed = {name for name, codecs in inner.items() if "ZstdCodec" in codecs}
    assert compressed == {"few/m", "few/v", "few/t", "few/s"}
    assert root["few/m"].metadata.codecs[0].codecs[1].checksum is True


def test_blake2b_can_be_chosen(tmp_path):
    content = sample_content()
    path = export(content, tmp_path / "k", algorithm="blake2b-rows-v1")
    checkpoint = open_checkpoint(path)
    checkpoint.verify()
    assert_same(checkpoint.content(), content)
    assert zarr.open_group(path, mode="r")["entity/w"].attrs["dsa_checksum"]["algorithm"] == "blake2b-rows-v1"
    with pytest.raises(ValueError, match="'md5' is unknown: use one of"):
        export(content, tmp_path / "other", algorithm="md5")


def test_any_schema_can_be_kept(tmp_path):
    fields = (
        Field("w", "bfloat16", "element"),
        Field("half", "float16", "row"),
        Field("sum", "float64", "element"),
        Field("count", "int64", "row"),
    )
    schema = Schema(3, fields)
    records = np.zeros(200, schema.dtype)
    records.view(np.uint8)[:] = np.random.default_rng(0).integers(0, 255, records.nbytes, np.uint8)
    content = StateContent((sample_table(records=records, schema=schema),))
    path = export(content, tmp_path / "k")
    assert_same(open_checkpoint(path).content(), content)
    assert open_checkpoint(path).tables[0].touched_rows is None


NAMES = [
    "entity", "enc.emb", "enc_emb", "ENC.emb", "../evil", "..", ".", "a/b", "x" * 300, "ä", "\ud800",
    "zarr.json", "CON", " ", "a b", "tail.", ".hidden", "c", "with\nline", "\U0001f600",
]  # fmt: skip


def test_tables_of_any_name(tmp_path):
    content = StateContent(tuple(sample_table(name, rows=20, dim=2, seed=i) for i, name in enumerate(NAMES)))
    path = tmp_path / "deep" / "k"
    export(content, path)
    assert [each.name for each in tmp_path.iterdir()] == ["deep"]
    assert [each.name for each in path.parent.iterdir()] == ["k"]
    assert_same(open_checkpoint(path).content(), content)
    groups = [table.group for table in open_checkpoint(path).tables]
    assert groups[:3] == ["entity", "enc.emb", "enc_emb"]
    assert len({group.lower() for group in groups}) == len(NAMES)
    assert sorted(p.name for p in path.iterdir()) == sorted([*groups, "zarr.json"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(zarr.open_group(path, mode="r").members()) == len(NAMES)


def test_c42_chunks_of_very_large_and_very_small_tables(monkeypatch):
    monkeypatch.undo()  # of small_blocks
    large = [plan_layout(spec) for spec in array_specs(adam_schema(128), 50_000_000)]
    assert sum(layout.shards for layout in large) < 10_000
    for layout in large:
        assert 1 <= layout.chunk_rows <= layout.spec.rows
        assert layout.shard_bytes < 2**31
    tiny = plan_layout(ArraySpec("w", "<f4", 10, 4))
    assert (tiny.shards, tiny.chunks_per_shard) == (1, 1)
    wide = plan_layout(ArraySpec("w", "<f4", 10_000, 1 << 22))
    assert wide.chunk_bytes < 2**31


def test_what_the_caller_adds_must_be_json(tmp_path):
    for attributes in ({"x": float("nan")}, {"x": object()}, {"x": (1, 2)}, {1: 2}):
        with pytest.raises(ValueError, match="attributes"):
            export(sample_content(), tmp_path / "k", attributes=attributes)
    assert not list(tmp_path.iterdir())


def test_blocks_that_do_not_fit_are_refused(tmp_path):
    schema, records = sample_records(50, 4)

    def table(pairs):
        return replace(sample_table(records=records, schema=schema), blocks=lambda: iter(pairs))

    other = adam_schema(5).dtype
    for pairs, message in [
        ([(0, records[:20])], "yields 20 of its 50 rows"),
        ([(0, records[:20]), (21, records[21:])], "yields rows 21 to 50 after row 20"),
        ([(0, records), (50, records[:1])], "yields rows 50 to 51"),
        ([(0, np.zeros(50, other))], "not of its schema"),
    ]:
        with pytest.raises(ValueError, match=message):
            export(StateContent((table(pairs),)), tmp_path / "k")
        assert not list(tmp_path.iterdir())


def test_progress_is_told_of_every_byte(tmp_path, capsys):
    calls = []
    content = sample_content()
    path = export(content, tmp_path / "k", progress=lambda done, total: calls.append((done, total)))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1][0] == calls[-1][1] == open_checkpoint(path).nbytes
    calls.clear()
    open_checkpoint(path).verify(progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1]
    open_checkpoint(path).verify(progress=True)
    assert "verify" in capsys.readouterr().err
