"""Where two states differ, by `dsa.diff`."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from story import DIM, ROWS, batch, build

import dsa
from dsa import DiskSparseRiemannianAdam, init
from dsa.errors import CheckpointCorruptError, CheckpointNotFoundError, StateCorruptError
from dsa.rules.adam import ADAM
from dsa.schema import adam_schema
from dsa.state.content import StateContent, TableContent
from dsa.state.facts import TableFacts


def trained(path, steps, **options):
    with build(path, **options) as optimizer:
        for step in range(steps):
            optimizer.step(batch(step))
    return path


def change(path, table, row, field, value):
    """Write a number into a table's file, past everything."""
    with build(path, resume=True) as optimizer:
        records = optimizer._state.tables[table].backend.records
        records[field][row] = value


def fields(found, table=0):
    return {each.name: each for each in found.tables[table].fields}


@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_layout_and_bookkeeping_do_not_count(tmp_path, backend):
    trained(tmp_path / "a", 5)
    trained(tmp_path / "b", 5, backend=backend, allocate="reserve", durability="none")
    dsa.export_checkpoint(tmp_path / "a", tmp_path / "c", compression="zstd")
    for one, other in (("a", "b"), ("a", "c"), ("b", "c"), ("c", "a")):
        found = dsa.diff(tmp_path / one, tmp_path / other)
        assert found.same
        assert [table.compared for table in found.tables] == list(ROWS.values())
        assert json.loads(json.dumps(found.to_json(), allow_nan=False))["same"] is True


@settings(max_examples=15)
@given(
    table=st.sampled_from(["entity", "relation"]),
    changes=st.dictionaries(st.integers(0, 39), st.sampled_from(["w", "m", "v", "t", "s"]), min_size=1),
)
def test_each_row_that_was_changed_is_found(tmp_path_factory, table, changes):
    folder = tmp_path_factory.mktemp("diff")
    trained(folder / "a", 3)
    trained(folder / "b", 3)
    for row, field in changes.items():
        with build(folder / "b", resume=True) as optimizer:
            records = optimizer._state.tables[table].backend.records
            records["s"][row] = max(records["s"][row], 1)  # a row that was never written stands for its rule
            records[field][row] += 1
    found = dsa.diff(folder / "a", folder / "b")
    (compared,) = (each for each in found.tables if each.name == table)
    (other,) = (each for each in found.tables if each.name != table)
    assert other.same
    assert not found.same
    assert compared.rows == len(changes)
    counted = {each.name: each for each in compared.fields}
    for field in ("m", "v", "t"):
        rows = sorted(row for row, name in changes.items() if name == field)
        assert counted[field].rows == len(rows)
        assert counted[field].first_rows == tuple(rows[:5])
        if rows:
            assert counted[field].largest == pytest.approx(1.0, rel=1e-5)
            assert counted[field].largest_row in rows


def test_rows_are_compared_bit_by_bit(tmp_path):
    trained(tmp_path / "a", 3)
    trained(tmp_path / "b", 3)
    change(tmp_path / "a", "relation", 3, "m", 0.0)
    change(tmp_path / "b", "relation", 3, "m", -0.0)
    compared = fields(dsa.diff(tmp_path / "a", tmp_path / "b"), 1)["m"]
    assert (compared.rows, compared.largest, compared.largest_row) == (1, 0.0, 3)


def test_what_is_no_number(tmp_path):
    for name in "ab":
        trained(tmp_path / name, 3)
        change(tmp_path / name, "relation", 5, "m", np.nan)
    assert dsa.diff(tmp_path / "a", tmp_path / "b").same
    change(tmp_path / "b", "relation", 3, "m", 1e30)
    change(tmp_path / "b", "relation", 9, "m", np.nan)
    change(tmp_path / "b", "relation", 11, "m", np.inf)
    found = dsa.diff(tmp_path / "a", tmp_path / "b")
    compared = fields(found, 1)["m"]
    assert (compared.rows, compared.first_rows, compared.largest_row) == (3, (3, 9, 11), 9)
    assert math.isnan(compared.largest)
    assert found.to_json()["tables"][1]["fields"][1]["largest"] is None


def test_tables_and_shapes(tmp_path):
    def make(name, tables, **options):
        options = {"k": 0.0, "disk_dir": tmp_path / name, "allocate": "sparse", **options}
        DiskSparseRiemannianAdam(tables, **options).close()

    make("a", {"x": init.Zeros(10, 2), "y": init.Zeros(10, 2), "z": init.Zeros(4, 2)})
    make("b", {"y": init.Zeros(11, 2), "w": init.Zeros(1, 1), "z": init.Zeros(4, 3)})
    found = dsa.diff(tmp_path / "a", tmp_path / "b")
    assert (found.only_in_a, found.only_in_b) == (("x",), ("w",))
    assert [(t.name, t.facts, t.compared) for t in found.tables] == [
        ("y", {"rows": (10, 11)}, 0),
        ("z", {"dim": (2, 3)}, 0),
    ]
    make("row", {"y": init.Zeros(11, 2)}, second_moment="row", k=1.0)
    make("coordinate", {"y": init.Zeros(11, 2)})
    (table,) = dsa.diff(tmp_path / "row", tmp_path / "coordinate").tables
    assert table.facts == {
        "k": (1.0, 0.0),
        "rule": ("row_wise_adam", "adam"),
        "fields": (["v float32 per row"], ["v float32 per element"]),
    }
    assert (table.compared, table.rows, table.same) == (11, 0, False)
    assert [each.name for each in table.fields] == ["w", "m", "t", "s"]


def test_blocks_need_not_agree(tmp_path, monkeypatch):
    """The rows of two passes meet, wherever each is cut."""
    schema = adam_schema(3)
    records = np.zeros(101, schema.dtype)
    records["w"] = np.arange(303).reshape(101, 3)
    records["s"] = 1
    other = records.copy()
    other["m"][77] = 5.0

    def content(values, cut):
        def blocks():
            for start in range(0, 101, cut):
                yield start, values[start : start + cut]

        return StateContent((TableContent(TableFacts("x", 101, schema, ADAM), blocks),))

    from dsa.checkpoint import write_checkpoint

    for cut in (1, 7, 64, 101):
        write_checkpoint(content(records, cut), tmp_path / f"a{cut}")
        write_checkpoint(content(other, 13), tmp_path / f"b{cut}")
        (table,) = dsa.diff(tmp_path / f"a{cut}", tmp_path / f"b{cut}").tables
        assert (table.rows, fields(dsa.diff(tmp_path / f"a{cut}", tmp_path / f"b{cut}"))["m"].first_rows) == (
            1,
            (77,),
        )
    from dsa.inspection.comparison import _pairs

    for one in (1, 7, 64, 101):
        for two in (1, 3, 50, 101):
            seen = list(_pairs(content(records, one).tables[0], content(other, two).tables[0]))
            assert np.array_equal(np.concatenate([a for _, a, _ in seen]), records)
            assert np.array_equal(np.concatenate([b for _, _, b in seen]), other)
            assert [first for first, _, _ in seen] == np.cumsum([0, *(len(a) for _, a, _ in seen)])[
                :-1
            ].tolist()


def test_the_progress_reaches_its_total(tmp_path):
    trained(tmp_path / "a", 3)
    dsa.export_checkpoint(tmp_path / "a", tmp_path / "c")
    seen = []
    dsa.diff(tmp_path / "a", tmp_path / "c", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == 2 * sum(ROWS.values()) * (3 * DIM + 2) * 4


def test_trouble(tmp_path):
    trained(tmp_path / "a", 3)
    trained(tmp_path / "b", 3)
    with pytest.raises(CheckpointNotFoundError, match="neither a state nor a checkpoint"):
        dsa.diff(tmp_path / "a", tmp_path / "nowhere")
    dsa.export_checkpoint(tmp_path / "a", tmp_path / "c")
    shard = tmp_path / "c/relation/w/c/0/0"
    raw = bytearray(shard.read_bytes())
    raw[3] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(CheckpointCorruptError, match="block 0 of field 'w' of the table 'relation'"):
        dsa.diff(tmp_path / "a", tmp_path / "c")
    (table, _) = sorted((tmp_path / "b").glob("*.dsa"))
    table.write_bytes(table.read_bytes()[:-4])
    with pytest.raises(StateCorruptError, match="truncated"):
        dsa.diff(tmp_path / "a", tmp_path / "b")
