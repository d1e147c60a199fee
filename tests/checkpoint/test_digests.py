"""Checksums depend on content alone."""

import hashlib
import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import zarr
from checkpoint_samples import assert_same, export, read_all, sample_content, sample_table, verify_with_zarr
from hypothesis import given
from hypothesis import strategies as st

from dsa.backends.shards.layout import ArraySpec, block_rows
from dsa.checkpoint import open_checkpoint
from dsa.checkpoint.digests import ALGORITHMS, RowHasher, content_root, root_digest, zeros_digest
from dsa.checkpoint.names import group_names, is_group_name, name_from_json, name_to_json
from dsa.state.content import StateContent

REWRITES = {
    "one chunk": {"chunks": (301,)},
    "raw chunks": {"chunks": (50,), "compressors": None},
    "columns": {"chunks": (64, 3)},
    "zstd": {"chunks": (100,), "compressors": zarr.codecs.ZstdCodec(level=3)},
    "gzip": {"chunks": (100,), "compressors": zarr.codecs.GzipCodec()},
    "crc32c": {"chunks": (7,), "compressors": zarr.codecs.Crc32cCodec()},
    "shards": {"chunks": (10,), "shards": (40,)},
    "index first": {"chunks": (10,), "shards": {"shape": (40,), "index_location": "start"}},
    "keys": {"chunks": (64,), "chunk_key_encoding": {"name": "v2", "separator": "."}},
}


def rewrite(path, group="entity", **options):
    """Store the arrays of a group in another way, as any user of Zarr might."""
    root = zarr.open_group(path, mode="r+", use_consolidated=False)
    for name, old in list(root[group].arrays()):
        values, attributes = old[:], dict(old.attrs)
        layout = {key: options[key] for key in options if key in ("chunks", "shards")}
        for key, value in layout.items():
            shape = value["shape"] if isinstance(value, dict) else value
            full = (*shape, *values.shape[len(shape) :])[: values.ndim]
            layout[key] = {**value, "shape": full} if isinstance(value, dict) else full
        new = root[group].create_array(
            name, shape=values.shape, dtype=values.dtype, fill_value=0, attributes=attributes, overwrite=True,
            **{**options, **layout},
        )  # fmt: skip
        new[:] = values
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # consolidated metadata are no part of Zarr 3 yet
        zarr.consolidate_metadata(path)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("how", REWRITES)
def test_rewritten_by_plain_zarr_it_is_the_same(tmp_path, how):
    content = sample_content()
    before = open_checkpoint(export(content, tmp_path / "k"))
    rewrite(tmp_path / "k", **REWRITES[how])
    after = open_checkpoint(tmp_path / "k")
    after.verify()
    assert after.content_root == before.content_root == verify_with_zarr(tmp_path / "k")
    assert_same(after.content(), content)
    assert_same(after.content(verify=False), content)


@pytest.mark.usefixtures("small_blocks")
def test_every_way_of_writing_gives_the_same_root(tmp_path):
    content = sample_content()
    roots = {
        open_checkpoint(export(content, tmp_path / str(compression), compression=compression)).content_root
        for compression in (None, "zstd", "auto")
    }
    assert len(roots) == 1


@pytest.mark.usefixtures("small_blocks")
def test_a_rewritten_array_may_lack_chunks_of_zeros_that_were_not_declared(tmp_path):
    table = sample_table(rows=600, dim=4, touched=0.02, seed=3)
    content = StateContent((table,))
    export(content, tmp_path / "k")
    rewrite(tmp_path / "k", chunks=(8,), compressors=None)
    shards = list((tmp_path / "k/entity/m/c").glob("*/*"))
    assert len(shards) < 30, "the sample has no chunk of zeros inside a block that isn't"
    assert_same(open_checkpoint(tmp_path / "k").content(verify=False), content)
    lost = next(path for path in shards if np.frombuffer(path.read_bytes(), "<f4").any())
    lost.unlink()
    with pytest.raises(
        ValueError, match=r"block \d of field 'm' of the table 'entity' (doesn't match|is missing)"
    ):
        read_all(open_checkpoint(tmp_path / "k").content(verify=False).tables[0])


def test_the_digests_of_known_arrays_never_change():
    spec = ArraySpec("w", "<f4", 3, 2)
    hasher = RowHasher(spec)
    hasher.update(np.arange(6, dtype="<f4"), 3)
    digest = hasher.finish()
    block = hashlib.sha256(np.arange(6, dtype="<f4").tobytes())
    assert digest.blocks == (block.hexdigest(),)
    header = b"sha256-rows-v1 <f4 3x2 2097152\n"
    assert digest.root == hashlib.sha256(header + block.digest()).hexdigest()
    assert digest.root == "745d262dc8155bc3d623eafed6828a60843c9412b72ac5a7d04b1712915e35b9"
    assert content_root({"b/w": "22", "a/w": "11"}) == hashlib.sha256(b"a/w 11\nb/w 22\n").hexdigest()


@given(
    rows=st.integers(0, 500),
    columns=st.one_of(st.none(), st.integers(1, 9)),
    cuts=st.lists(st.integers(1, 60)),
    algorithm=st.sampled_from(sorted(ALGORITHMS)),
)
def test_pieces_of_any_size_give_the_same_digests(rows, columns, cuts, algorithm):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dsa.backends.shards.layout.SHARD_BYTES", 512)
        patch.setattr("dsa.backends.shards.layout._MOST_SHARDS", 8)
        spec = ArraySpec("x", "<i4", rows, columns)
        values = np.arange(rows * (columns or 1), dtype="<i4").reshape(spec.shape)
        step = block_rows(rows, spec.row_bytes)
        assert rows <= 8 * step
        hasher, row = RowHasher(spec, algorithm), 0
        for cut in [*cuts, *[60] * 20]:
            count = min(cut, rows - row, hasher.rows_to_boundary)
            hasher.update(values[row : row + count], count)
            row += count
        digest = hasher.finish()
        new = ALGORITHMS[algorithm]
        blocks = [new(values[start : start + step].tobytes()).hexdigest() for start in range(0, rows, step)]
        assert list(digest.blocks) == blocks
        assert digest.root == root_digest(algorithm, spec, blocks)
        assert zeros_digest(algorithm, 4 * rows) == new(bytes(4 * rows)).hexdigest()


def test_a_hash_wants_every_row():
    hasher = RowHasher(ArraySpec("t", "<i4", 3, None))
    hasher.update(bytes(8), 2)
    with pytest.raises(ValueError, match="2 rows of the array 't' were given where it has 3"):
        hasher.finish()


@given(
    st.lists(st.text(min_size=1, max_size=30) | st.text("aA.-_\ud800", min_size=1, max_size=4), unique=True)
)
def test_groups_are_distinct_and_harmless(names):
    groups = group_names(names)
    assert len({group.lower() for group in groups}) == len(names)
    for name, group in zip(names, groups, strict=True):
        assert is_group_name(group)
        assert Path("x", group).name == group
        assert len(group) <= 100
        assert name_from_json(json.loads(json.dumps(name_to_json(name)))) == name


def test_a_table_named_like_the_group_of_another_gets_its_own():
    (hashed,) = group_names(["a/b"])
    assert len(set(group_names([hashed, "a/b"]))) == 2
    assert group_names(["w", "W"])[0] == "w"


@pytest.mark.parametrize(
    "data", ["", None, 3, {}, {"utf-8-hex": 3}, {"utf-8-hex": "zz"}, {"utf-8-hex": "ff"}, []]
)
def test_what_is_no_name_is_refused(data):
    with pytest.raises(ValueError, match=r".+"):
        name_from_json(data)


def test_copies_of_directories_are_checkpoints(tmp_path):
    content = sample_content()
    export(content, tmp_path / "k")
    shutil.copytree(tmp_path / "k", tmp_path / "copy")
    assert_same(open_checkpoint(tmp_path / "copy").content(), content)
