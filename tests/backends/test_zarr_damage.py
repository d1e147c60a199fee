"""Damage to live Zarr tables: told apart when the table is opened, or when a compressed chunk is read."""

import json
import shutil

import numpy as np
import pytest
from zarr_tables import HOOKS, files_of, make, open_files, refusal

from dsa.backends.shards.encoding import index_bytes
from dsa.backends.zarr_group import LABEL_BYTES, array_layouts
from dsa.errors import StateCorruptError
from dsa.schema import TORN, Field, Schema, adam_schema
from dsa.testing import assert_records_equal

SCHEMA = adam_schema(3)
ROWS = 2_000

by_kind = pytest.mark.parametrize("kind", HOOKS)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "table"


@pytest.fixture
def table(kind, path):
    """A table of several shards: its hooks, description and records."""
    description, records = make(HOOKS[kind], path, ROWS, SCHEMA)
    assert array_layouts(description)[0].shards > 2
    return HOOKS[kind], description, records


SHARD_DAMAGE = {
    "missing": None,
    "empty": lambda content: b"",
    "one byte": lambda content: content[:1],
    "half": lambda content: content[: len(content) // 2],
    "a byte short": lambda content: content[:-1],
    "a byte long": lambda content: content + b"\0",
    "a page long": lambda content: content + bytes(4096),
    "index only": lambda content: content[-36:],
    "front missing": lambda content: content[10:],
    "zeros": lambda content: bytes(len(content)),
    "garbage": lambda content: np.random.default_rng(1).bytes(len(content)),
    "last byte": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
}


@by_kind
@pytest.mark.parametrize("shard", ["w/c/0/0", "v/c/1/0", "t/c/0"])
@pytest.mark.parametrize("damage", SHARD_DAMAGE.values(), ids=SHARD_DAMAGE)
def test_a_damaged_shard_is_refused(table, path, shard, damage):
    hooks, description, _ = table
    file = path / shard
    size = file.stat().st_size
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(file.read_bytes()))
    for writable in (True, False):
        text = refusal(hooks, path, description, writable)
        assert f"field {shard[0]!r}" in text
        if damage is not None and file.stat().st_size != size:
            assert f"{file.stat().st_size:,} bytes" in text
            assert file.name in text
            assert f"{size:,}" in text or hooks is HOOKS["compressed"]
        assert "shard" in text
        assert text.endswith("restore it from a copy, or start over")
    assert not any(str(path) in name for name in open_files())


@by_kind
def test_every_byte_of_label_and_index_counts(table, path):
    hooks, description, records = table
    layout = array_layouts(description)[1]
    file = path / "m" / layout.shard_key(1)
    content = file.read_bytes()
    for offset in range(LABEL_BYTES + index_bytes(layout.chunks_per_shard)):
        at = len(content) - 1 - offset
        file.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        refusal(hooks, path, description)
    file.write_bytes(content)
    with_all(hooks, path, description, records)


def with_all(hooks, path, description, records):
    """Open a table and compare all that it holds."""
    backend = hooks.reopen(path, description)
    try:
        assert_records_equal(backend.read(np.arange(len(records))), records)
    finally:
        backend.close()


def swap(one, other):
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


SWAPS = {
    "two shards": ("w/c/0/0", "w/c/1/0"),
    "shards of two fields": ("m/c/1/0", "v/c/1/0"),
    "counters and stamps": ("t/c/0", "s/c/0"),
    "data of two fields": ("m/c", "v/c"),
    "two fields": ("w", "m"),
    "documents of two fields": ("w/zarr.json", "m/zarr.json"),
    "documents of group and field": ("zarr.json", "m/zarr.json"),
}


@by_kind
@pytest.mark.parametrize(("one", "other"), SWAPS.values(), ids=SWAPS)
def test_swapped_parts_are_refused(table, path, one, other):
    hooks, description, records = table
    swap(path / one, path / other)
    refusal(hooks, path, description)
    swap(path / one, path / other)
    with_all(hooks, path, description, records)


@by_kind
@pytest.mark.parametrize("part", ["", "w", "w/c", "w/c/1/0", "t/c/0", "zarr.json", "w/zarr.json"])
def test_parts_of_another_table_of_the_same_shape_are_refused(table, path, part):
    hooks, description, _ = table
    other = path.with_name("other")
    make(hooks, other, ROWS, SCHEMA)
    swap(path / part, other / part)
    refusal(hooks, path, description)


@by_kind
@pytest.mark.parametrize(
    "change",
    [
        {"rows": ROWS - 1},
        {"rows": ROWS + 1},
        {"schema": adam_schema(4).to_json()},
        {"schema": adam_schema(3, second_moment_per="row").to_json()},
        {"kind": "memmap"},
        {"compression": "none"},
        {"id": "0123456789abcdef"},
        *({"rows": value} for value in (None, "100", 0, -1, 2.5, float(ROWS), 10**30, [100])),
        *({"cuts": value} for value in (None, {}, {"w": [1, 1]}, 3)),
        *({"schema": value} for value in (None, {}, "adam", [], {"dim": 3, "fields": []})),
    ],
    ids=lambda change: "-".join(f"{key}={str(value)[:12]}" for key, value in change.items()),
)
def test_another_description_is_refused(table, path, change):
    hooks, description, _ = table
    refusal(hooks, path, description | change)


@by_kind
@pytest.mark.parametrize("missing", ["kind", "rows", "schema", "compression", "cuts", "id"])
def test_an_incomplete_description_is_refused(table, path, missing):
    hooks, description, _ = table
    del description[missing]
    refusal(hooks, path, description)


@by_kind
def test_equal_byte_counts_do_not_make_equal_tables(kind, path):
    """100 x 8 float32 is as large as 50 x 16, and as 100 x 4 float64."""
    single = Field("w", "float32", "element")
    hooks = HOOKS[kind]
    description, _ = make(hooks, path, 100, Schema(8, (single,)))
    wide = description | {"rows": 50, "schema": Schema(16, (single,)).to_json()}
    double = description | {"schema": Schema(4, (Field("w", "float64", "element"),)).to_json()}
    refusal(hooks, path, wide)
    refusal(hooks, path, double)


DOCUMENT_DAMAGE = {
    "missing": None,
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "zeros": lambda content: bytes(len(content)),
    "a list": lambda content: b"[]",
    "an empty object": lambda content: b"{}",
    "deep": lambda content: b"[" * 100_000,
    "not text": lambda content: b"\xff" + content[1:],
}


@by_kind
@pytest.mark.parametrize("document", ["zarr.json", "v/zarr.json", "s/zarr.json"])
@pytest.mark.parametrize("damage", DOCUMENT_DAMAGE.values(), ids=DOCUMENT_DAMAGE)
def test_a_damaged_document_is_refused(table, path, document, damage):
    hooks, description, _ = table
    file = path / document
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(file.read_bytes()))
    assert "zarr.json" in refusal(hooks, path, description)


@by_kind
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shape", [ROWS, 4]),
        ("shape", [ROWS]),
        ("data_type", "int32"),
        ("fill_value", 1.0),
        ("chunk_grid", {"name": "regular", "configuration": {"chunk_shape": [7, 3]}}),
        ("codecs", [{"name": "bytes", "configuration": {"endian": "big"}}]),
        ("chunk_key_encoding", {"name": "v2"}),
        ("node_type", "group"),
        ("zarr_format", 2),
        ("attributes", None),
        ("attributes", {}),
    ],
)
def test_a_document_that_says_something_else_is_refused(table, path, key, value):
    hooks, description, _ = table
    file = path / "m" / "zarr.json"
    document = json.loads(file.read_bytes())
    file.write_text(json.dumps(document | {key: value}))
    refusal(hooks, path, description)


@by_kind
def test_bits_of_the_documents_count_or_do_not_matter(table, path):
    """Whatever is accepted holds the records that were written."""
    hooks, description, records = table
    rng = np.random.default_rng(3)
    for document in ("zarr.json", "w/zarr.json"):
        file = path / document
        content = file.read_bytes()
        for at in rng.permutation(len(content))[:200]:
            changed = bytearray(content)
            changed[at] ^= 1 << rng.integers(8)
            file.write_bytes(changed)
            try:
                backend = hooks.reopen(path, description, writable=False)
            except StateCorruptError:
                continue
            assert_records_equal(backend.read(np.arange(ROWS)), records)
            backend.close()
        file.write_bytes(content)


@by_kind
def test_attributes_and_metadata_of_others_do_no_harm(table, path):
    import zarr

    hooks, description, records = table
    group = zarr.open_group(path, mode="r+")
    group.attrs["note"] = "mine"
    group["w"].attrs["unit"] = "none"
    with pytest.warns(UserWarning, match="Consolidated"):
        zarr.consolidate_metadata(path)
    with_all(hooks, path, description, records)


@by_kind
def test_a_missing_table(table, path):
    hooks, description, _ = table
    shutil.rmtree(path)
    assert "zarr.json" in refusal(hooks, path, description)
    path.write_bytes(b"a file")
    assert "zarr.json" in refusal(hooks, path, description)


@pytest.fixture
def compressed(path):
    description, records = make(HOOKS["compressed"], path, ROWS, SCHEMA)
    return description, records


def test_bytes_of_a_compressed_shard_count_or_do_not_matter(compressed, path):
    """A flipped bit is an error when the table is opened, marks the rows of a chunk, or changes nothing."""
    description, records = compressed
    hooks = HOOKS["compressed"]
    layout = array_layouts(description)[2]
    file = path / "v" / layout.shard_key(1)
    content = file.read_bytes()
    rows = np.arange(layout.shard_rows, 2 * layout.shard_rows)
    harmless, marked, messages = 0, 0, set()
    for at in range(0, len(content), 3):
        file.write_bytes(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
        try:
            backend = hooks.reopen(path, description, writable=False)
        except StateCorruptError as error:
            messages.add(str(error))
            continue
        found = backend.read(rows)
        torn = found["s"] == TORN
        assert np.count_nonzero(torn) in (0, layout.chunk_rows)
        assert_records_equal(found[~torn], records[rows[~torn]])
        harmless, marked = harmless + (not torn.any()), marked + torn.any()
    assert all("field 'v'" in message for message in messages)
    assert harmless <= 2 * layout.chunks_per_shard
    assert marked > len(content) // 6


@pytest.mark.parametrize("field", ["w", "v", "s"])
def test_the_rows_of_a_damaged_chunk_are_marked_and_the_others_can_be_read(path, field):
    hooks = HOOKS["compressed"]
    description, records = make(hooks, path, ROWS, SCHEMA, stamps=7)
    layout = array_layouts(description)[0]
    file = path / field / ("c/1" if field == "s" else "c/1/0")
    content = bytearray(file.read_bytes())
    content[20] ^= 1
    file.write_bytes(content)
    backend = hooks.reopen(path, description)
    first = layout.shard_rows
    damaged = np.arange(first, first + layout.chunk_rows)
    expected = records.copy()
    expected[damaged] = np.zeros(1, SCHEMA.dtype)
    expected["s"][damaged] = TORN
    before = files_of(path)
    for rows in (damaged[:1], np.arange(ROWS)):
        assert_records_equal(backend.read(rows), expected[rows])
    for start, block in backend.scan(0, ROWS):
        assert_records_equal(block, expected[start : start + len(block)])
    assert files_of(path) == before
    # Rows beside it are written, and the others of the chunk keep the mark, in the files too.
    backend.write(damaged[1:3], records[damaged[1:3]])
    expected[damaged[1:3]] = records[damaged[1:3]]
    for _ in range(2):
        found = backend.read(np.arange(ROWS))
        torn = np.setdiff1d(damaged, damaged[1:3])
        assert (found["s"][torn] == TORN).all()
        whole = np.setdiff1d(np.arange(ROWS), torn)
        assert_records_equal(found[whole], expected[whole])
        backend.close()
        backend = hooks.reopen(path, description)
    backend.write(damaged, records[damaged])
    assert_records_equal(backend.read(np.arange(ROWS)), records)
    backend.close()


def test_a_damaged_chunk_of_records_without_a_stamp_is_named(path):
    hooks, schema = HOOKS["compressed"], Schema(3, (Field("w", "float32", "element"),))
    description, records = make(hooks, path, ROWS, schema)
    layout = array_layouts(description)[0]
    file = path / "w" / layout.shard_key(1)
    content = bytearray(file.read_bytes())
    content[20] ^= 1
    file.write_bytes(content)
    backend = hooks.reopen(path, description)
    first = layout.shard_rows
    last = first + layout.chunk_rows - 1
    pattern = f"chunk {layout.chunks_per_shard} of its field 'w', with the rows from {first} to {last}, does"
    before = files_of(path)
    with pytest.raises(StateCorruptError, match=pattern):
        backend.read(np.array([first]))
    with pytest.raises(StateCorruptError, match=pattern):
        backend.write(np.array([first]), records[:1])
    assert files_of(path) == before
    backend.close()


@pytest.mark.parametrize("left", [0, 1, 40])
def test_a_shard_that_is_cut_while_the_table_is_open(compressed, path, left):
    """Neither zeros nor a torn copy of it: an error, for reads and for writes of other rows."""
    description, records = compressed
    backend = HOOKS["compressed"].reopen(path, description)
    layout = array_layouts(description)[0]
    file = path / "w" / layout.shard_key(0)
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(StateCorruptError, match="field 'w'"):
        backend.read(np.arange(layout.shard_rows))
    with pytest.raises(StateCorruptError, match="field 'w'"):
        backend.write(np.array([3]), records[3:4])
    assert file.stat().st_size == left
    backend.close()


def test_a_shard_that_is_gone_while_the_table_is_open(compressed, path):
    description, records = compressed
    backend = HOOKS["compressed"].reopen(path, description)
    (path / "t" / "c" / "1").unlink()
    rows = np.array([array_layouts(description)[3].shard_rows])
    for use in (lambda: backend.read(rows), lambda: backend.write(rows, records[:1])):
        with pytest.raises(StateCorruptError, match="lacks shard 1 of its field 't'"):
            use()
    with pytest.raises(FileNotFoundError):
        backend.close()
