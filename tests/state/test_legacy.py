"""Directories of releases 0.1.0, 0.2.0 and 0.3.0: read back exactly or refused, never changed."""

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dsa.errors import (
    DSAError,
    StateCorruptError,
    StateIncompleteError,
    StateMismatchError,
    StateNotFoundError,
)
from dsa.rules.adam import ADAM
from dsa.schema import adam_schema
from dsa.state.legacy import find_legacy, read_legacy

GOLDEN = Path(__file__).parents[1] / "golden"
LEGACY = GOLDEN / "legacy"


def load_generator():
    spec = importlib.util.spec_from_file_location("make_legacy", GOLDEN / "make_legacy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = load_generator()
SHAPES, STEP, CURVATURE = make.TABLES, make.STEP, make.CURVATURE
KEPT = ["0.3.0", "0.3.0-checkpoint"]
RESET = ["0.1.0", "0.2.0"]
STATES = ["0.1.0", "0.2.0", "0.3.0"]
READABLE = [*RESET, *KEPT]


def copy(kind, tmp_path):
    place = tmp_path / "state"
    shutil.rmtree(place, ignore_errors=True)
    return Path(shutil.copytree(LEGACY / kind, place))


def read(kind, place, **options):
    """Read with what the release did not record."""
    if kind == "0.1.0":
        options.setdefault("shapes", SHAPES)
    if kind in RESET:
        options.setdefault("k", CURVATURE)
    return read_legacy(place, **options)


def records(table):
    """All records of a table, once it is sure that the blocks follow one another."""
    blocks, end = [], 0
    for first, block in table.blocks():
        assert first == end
        assert block.dtype == table.schema.dtype
        end += len(block)
        blocks.append(block)
    assert end == table.rows
    return np.concatenate(blocks)


def read_all(kind, place, **options):
    content = read(kind, place, **options)
    return {table.name: records(table) for table in content.tables}


def edit(path, change):
    values = json.loads(path.read_bytes())
    path.write_text(json.dumps(change(values)))


def snapshot(place):
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_mode)
        for path in sorted(place.iterdir())
    }


# Reading back.


def test_the_script_makes_these_very_files(tmp_path):
    make.main(tmp_path)
    for kind in make.MAKERS:
        made, kept = (
            {path.name: path.read_bytes() for path in (root / kind).iterdir()} for root in (tmp_path, LEGACY)
        )
        assert made == kept, kind


@pytest.mark.parametrize("kind", make.MAKERS)
def test_the_release_is_told(kind):
    assert find_legacy(LEGACY / kind) == kind.replace("-", " ")
    assert find_legacy(str(LEGACY / kind)) == kind.replace("-", " ")


@pytest.mark.parametrize("kind", READABLE)
def test_everything_is_read_back(kind, tmp_path):
    place = copy(kind, tmp_path)
    before = snapshot(place)
    content = read(kind, place)
    kept = kind in KEPT
    assert content.global_step == (STEP if kept else 0)
    assert content.exports == {}
    assert {table.name for table in content.tables} == set(SHAPES)
    for table in content.tables:
        rows, dim = SHAPES[table.name]
        assert (table.rows, table.schema) == (rows, adam_schema(dim))
        assert (table.k, table.rule, table.facts.init_max_norm_fraction) == (CURVATURE, ADAM, 0.5)
        assert table.facts.steps == (STEP if kept else 0)
        assert table.facts.initializer is None
        assert table.stored is None
        found = records(table)
        for field in "wmvt":
            raw = make.array(table.name, field, SHAPES[table.name])
            expected = raw if kept or field == "w" else np.zeros_like(raw)
            np.testing.assert_array_equal(found[field], expected)
        assert (found["s"] == 1).all()
        np.testing.assert_array_equal(records(table), found)  # a second pass
    assert snapshot(place) == before


def test_a_number_that_was_written_down():
    """The generator and the reader could drift together; this value can't."""
    assert read_all("0.3.0", LEGACY / "0.3.0")["rel.b_w"]["t"].tolist() == [0, 5, 10, 2, 7]
    row = read_all("0.3.0", LEGACY / "0.3.0")["a b"][0]
    assert [float(row[field][0]) for field in "wmv"] == [
        -0.16997963190078735,
        0.008346281945705414,
        6.179275806061924e-05,
    ]


@pytest.mark.parametrize("kind", READABLE)
def test_a_directory_that_may_only_be_read(kind, tmp_path):
    place = copy(kind, tmp_path)
    for path in place.iterdir():
        path.chmod(0o444)
    place.chmod(0o555)
    try:
        assert read_all(kind, place).keys() == SHAPES.keys()
    finally:
        place.chmod(0o755)


@pytest.mark.parametrize("kind", READABLE)
def test_the_order_is_the_callers(kind):
    order = ["rel.b_w", "a b", "entity_emb"]
    content = read(kind, LEGACY / kind, shapes={name: SHAPES[name] for name in order})
    assert [table.name for table in content.tables] == order


@pytest.mark.parametrize("kind", ["0.2.0", *KEPT])
def test_without_shapes_the_order_is_by_name(kind):
    assert [table.name for table in read(kind, LEGACY / kind).tables] == sorted(SHAPES)


def test_several_blocks_and_short_reads(tmp_path):
    rows, dim = 50_001, 33
    values = np.random.default_rng(0).random((rows, dim), np.float32)
    for field in "wmv":
        values.tofile(tmp_path / f"big_{field}.dat")
    table = read_legacy(tmp_path, {"big": (rows, dim)}, k=0.0).tables[0]
    assert len(list(table.blocks())) > 2
    np.testing.assert_array_equal(records(table)["w"], values)
    passage = table.blocks()
    next(passage)
    os.truncate(tmp_path / "big_w.dat", 4 * 33 * 9_000)
    with pytest.raises(StateCorruptError, match=r"big_w.dat' was truncated while it was read: let nothing"):
        list(passage)


NAMES = [
    "enc.emb",
    "a b",
    "_w",
    "x_w",
    "x",
    "x_w_m",
    "m",
    "w.dat",
    "ünï",
    "dsa",
    "reinit",
    "checkpoint",
    "x_meta",
]


@pytest.mark.parametrize("kind", STATES)
def test_names_of_every_kind(kind, tmp_path):
    for name in NAMES:
        for field in "wmvt" if kind != "0.1.0" else "wmv":
            array = np.full((2, 3), 0.25, "<f4") if field != "t" else np.ones(2, "<i4")
            (tmp_path / f"{name}_{field}.dat").write_bytes(array.tobytes())
        if kind != "0.1.0":
            version = 1 if kind == "0.2.0" else 2
            make.write_json(tmp_path / f"{name}_meta.json", {"format_version": version, "shape": [2, 3]})
    if kind == "0.3.0":
        make.write_json(tmp_path / "dsa_global_meta.json", {"global_step": 3, "curvature": 0.0})
    assert find_legacy(tmp_path) == kind
    found = read_all(kind, tmp_path, shapes=dict.fromkeys(NAMES, (2, 3)))
    assert list(found) == NAMES
    assert all((block["w"] == 0.25).all() for block in found.values())


def test_a_table_called_like_the_global_description(tmp_path):
    second = copy("0.2.0", tmp_path)
    for path in list(second.glob("entity_emb_*")):
        path.rename(second / path.name.replace("entity_emb", "dsa_global"))
    assert find_legacy(second) == "0.2.0"
    assert set(read_all("0.2.0", second)) == {"dsa_global", "rel.b_w", "a b"}
    third = copy("0.3.0", tmp_path)
    for field in "wmvt":
        (third / f"entity_emb_{field}.dat").rename(third / f"dsa_global_{field}.dat")
    (third / "entity_emb_meta.json").unlink()
    with pytest.raises(StateIncompleteError, match="called 'dsa_global' took its place"):
        read_legacy(third)


def test_links_to_regular_files_are_fine_in_a_state(tmp_path):
    place = copy("0.3.0", tmp_path)
    for path in list(place.iterdir()):
        target = tmp_path / f"elsewhere-{path.name}"
        path.rename(target)
        path.symlink_to(target)
    assert read_all("0.3.0", place).keys() == SHAPES.keys()


# What was not recorded.


def test_the_first_release_needs_shapes():
    with pytest.raises(
        StateMismatchError,
        match=r"shape of table 'a b' .* was not recorded .*\{'a b': \(rows, dim\)\} with rows \* dim = 1$",
    ):
        read_legacy(LEGACY / "0.1.0", k=0.0)


@pytest.mark.parametrize("kind", RESET)
def test_the_curvature_may_be_needed(kind):
    with pytest.raises(
        StateMismatchError, match=r"curvature of table .* say the k of that training, 0\.0 if"
    ):
        read(kind, LEGACY / kind, k=None)
    by_name = dict(zip(SHAPES, [0.0, 1.0, 2.0], strict=True))
    content = read(kind, LEGACY / kind, k=by_name)
    assert {table.name: table.k for table in content.tables} == by_name
    with pytest.raises(StateMismatchError, match="curvature of table 'a b'"):
        read(kind, LEGACY / kind, k={"entity_emb": 0.0, "rel.b_w": 0.0})
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(StateMismatchError, match="is no curvature of table"):
            read(kind, LEGACY / kind, k=wrong)


@pytest.mark.parametrize("key", ["curvature", "k"])
def test_a_recorded_curvature_is_kept(key, tmp_path):
    place = copy("0.2.0", tmp_path)
    for name in SHAPES:
        edit(place / f"{name}_meta.json", lambda values: {**values, key: 2})
    assert {table.k for table in read_legacy(place).tables} == {2.0}
    assert {table.k for table in read_legacy(place, k=1.0).tables} == {2.0}


def test_a_global_description_beside_tables_of_the_second_release(tmp_path):
    place = copy("0.2.0", tmp_path)
    make.write_json(place / "dsa_global_meta.json", {"curvature": 0.25, "global_step": 9})
    content = read_legacy(place)
    assert (content.global_step, {table.k for table in content.tables}) == (0, {0.25})


def test_the_second_release_without_counters(tmp_path):
    place = copy("0.2.0", tmp_path)
    for path in place.glob("*_t.dat"):
        path.unlink()
    assert read_all("0.2.0", place).keys() == SHAPES.keys()


@pytest.mark.parametrize("kind", READABLE)
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({**SHAPES, "entity_emb": (8, 3)}, r"entity_emb"),
        ({**SHAPES, "entity_emb": (7, 4)}, r"entity_emb"),
        ({**SHAPES, "entity_emb": (7, 3, 1)}, r"not that of a table"),
        ({**SHAPES, "entity_emb": (0, 3)}, r"not that of a table"),
        ({**SHAPES, "entity_emb": (-7, -3)}, r"not that of a table"),
        ({**SHAPES, "entity_emb": (2**62, 2**62)}, r"entity_emb"),
        ({**SHAPES, "other": (1, 1)}, r"holds the tables .* but shapes are given for .*'other'"),
        ({"a b": (1, 1)}, r"holds the tables .* but shapes are given for \['a b'\]: give the shape of each"),
        ({}, r"but shapes are given for \[\]"),
    ],
)
def test_shapes_that_do_not_fit(kind, shapes, message):
    with pytest.raises((StateMismatchError, StateCorruptError), match=message):
        read(kind, LEGACY / kind, shapes=shapes)


@pytest.mark.parametrize("kind", ["0.2.0", *KEPT])
def test_a_shape_of_as_many_numbers_is_another(kind):
    with pytest.raises(
        StateMismatchError, match=r"stored with the shape \(7, 3\) and not \(3, 7\): pass the"
    ):
        read(kind, LEGACY / kind, shapes={**SHAPES, "entity_emb": (3, 7)})


# Synonyms.


@pytest.mark.parametrize(
    "change",
    [
        lambda values: {**values, "version": values["format_version"], "format_version": None},
        lambda values: {**values, "version": "0.3.0"},
        lambda values: {key: value for key, value in values.items() if key != "dtype"},
        lambda values: {**values, "dtype": "torch.float32"},
        lambda values: {**values, "shape": None, "num_rows": 7, "dim": 3},
        lambda values: {**values, "shape": None, "rows": 7, "embedding_dim": 3},
        lambda values: {**values, "curvature": None, "k": CURVATURE},
        lambda values: {**values, "curvature": None},
        lambda values: {**values, "algorithm": {"name": "another"}, "something": [1]},
    ],
)
def test_spellings_of_a_description(change, tmp_path):
    place = copy("0.3.0", tmp_path)
    edit(place / "entity_emb_meta.json", change)
    assert read_all("0.3.0", place).keys() == SHAPES.keys()


@pytest.mark.parametrize("key", ["curvature", "k"])
def test_spellings_of_the_global_description(key, tmp_path):
    place = copy("0.3.0", tmp_path)
    make.write_json(place / "dsa_global_meta.json", {"step": 4, key: CURVATURE})
    assert read_legacy(place).global_step == 4


def listed(values):
    files = [{"name": name, **entry} for name, entry in values.pop("files").items()]
    return {**values, "files": files}


def nested(values):
    files = values.pop("files")
    for name, param in values["params"].items():
        param["files"] = {
            field: {"path": f"{name}_{field}.dat", "bytes": entry["size"], "sha256": entry["sha256"].upper()}
            for field in "wmvt"
            for entry in [files[f"{name}_{field}.dat"]]
        }
    return values


def flat(values):
    values.pop("params")
    values.pop("format_version")
    return values


@pytest.mark.parametrize(
    "change",
    [
        listed,
        nested,
        lambda values: {**values, "tables": values.pop("params")},
        lambda values: {**values, "parameters": values.pop("params")},
        lambda values: {**values, "step": values.pop("global_step"), "k": values.pop("curvature")},
        lambda values: {**values, "source": "/home/somebody/run", "created": "today"},
    ],
)
def test_layouts_of_a_manifest(change, tmp_path):
    place = copy("0.3.0-checkpoint", tmp_path)
    edit(place / "checkpoint.json", change)
    found = read_all("0.3.0-checkpoint", place)
    np.testing.assert_array_equal(found["rel.b_w"]["v"], make.array("rel.b_w", "v", SHAPES["rel.b_w"]))


def test_shapes_of_a_checkpoint_from_elsewhere(tmp_path):
    place = copy("0.3.0-checkpoint", tmp_path)
    edit(place / "checkpoint.json", flat)
    with pytest.raises(StateMismatchError, match="shape of table 'a b'"):
        read_legacy(place)
    assert len(read_legacy(place, SHAPES).tables) == 3
    files = json.loads((place / "checkpoint.json").read_text())["files"]
    for path in (LEGACY / "0.3.0").glob("*_meta.json"):
        shutil.copy(path, place)
        files[path.name] = {
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
    with pytest.raises(StateMismatchError, match=r"dsa_global_meta.json' is not listed"):
        read_legacy(place)
    edit(place / "checkpoint.json", lambda values: {**values, "files": files})
    assert read_all("0.3.0-checkpoint", place).keys() == SHAPES.keys()


# Nothing there.


def test_places_without_older_state(tmp_path):
    (tmp_path / "empty").mkdir()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for name in ("notes_t.dat", "run_meta.json", "checkpoint.json", "dsa.json", "data.dat", "w.dat"):
        (foreign / name).write_text("{}")
    other = tmp_path / "other.json"
    other.write_text('{"disk_dir": "here"}')
    listing = tmp_path / "listing.txt"
    listing.write_text('{"files": ["/run/emb_w.dat"]}')
    for place in (
        listing,
        tmp_path / "missing",
        tmp_path / "empty",
        foreign,
        other,
        tmp_path / "nul\0",
        foreign / "w.dat",
    ):
        assert find_legacy(place) is None
        with pytest.raises(StateNotFoundError, match="no state or checkpoint of an older release in"):
            read_legacy(place)


@pytest.mark.parametrize("content", ["nonsense", "[]", '{"files": {}}'])
def test_a_foreign_checkpoint_file(content, tmp_path):
    (tmp_path / "checkpoint.json").write_text(content)
    assert find_legacy(tmp_path) is None


def test_a_manifest_without_data(tmp_path):
    manifest = {"global_step": 1, "curvature": 0.0, "params": {"emb": {"shape": [1, 1]}}}
    make.write_json(tmp_path / "checkpoint.json", manifest)
    assert find_legacy(tmp_path) == "0.3.0 checkpoint"
    with pytest.raises(StateCorruptError, match=r"lists no data file .* export anew"):
        read_legacy(tmp_path)


# Damage of data files.


def data_files(kinds):
    return [
        pytest.param(kind, path.name, id=f"{kind}-{path.name}")
        for kind in kinds
        for path in sorted((LEGACY / kind).glob("*.dat"))
    ]


@pytest.mark.parametrize(("kind", "name"), data_files(READABLE))
def test_a_data_file_of_another_size(kind, name, tmp_path):
    for size in (0, -1, 1, 4):
        place = copy(kind, tmp_path)
        before = (place / name).stat().st_size
        os.truncate(place / name, 0 if size == 0 else before + size)
        with pytest.raises(StateCorruptError, match=name):
            read(kind, place)
        if kind == "0.3.0-checkpoint":
            with pytest.raises(StateCorruptError, match=name):
                read(kind, place, verify=False)


@pytest.mark.parametrize(("kind", "name"), data_files(READABLE))
def test_a_data_file_that_is_missing(kind, name, tmp_path):
    place = copy(kind, tmp_path)
    (place / name).unlink()
    if kind == "0.2.0" and name.endswith("_t.dat"):
        assert read_all(kind, place).keys() == SHAPES.keys()
        return
    with pytest.raises(StateCorruptError, match=f"{name}' is missing: restore it from a copy"):
        read(kind, place)


@pytest.mark.parametrize("kind", READABLE)
@pytest.mark.parametrize("what", ["directory", "pipe", "dangling", "loop"])
def test_a_data_file_that_is_none(kind, what, tmp_path):
    place = copy(kind, tmp_path)
    file = place / "entity_emb_m.dat"
    file.unlink()
    {
        "directory": file.mkdir,
        "pipe": lambda: os.mkfifo(file),
        "dangling": lambda: file.symlink_to(tmp_path / "nothing"),
        "loop": lambda: file.symlink_to(file),
    }[what]()
    with pytest.raises(StateCorruptError, match=r"entity_emb_m.dat' (is|can't)"):
        read(kind, place)


@pytest.mark.parametrize("kind", STATES)
def test_a_table_without_weights(kind, tmp_path):
    place = copy(kind, tmp_path)
    for path in list(place.glob("rel.b_w_[wv].dat")):
        path.unlink()
    with pytest.raises(StateCorruptError, match=r"rel\.b_w_[wv]\.dat' is missing"):
        read(kind, place)


def poison(place, name, field, row, value):
    file = place / f"{name}_{field}.dat"
    array = np.fromfile(file, "<i4" if field == "t" else "<f4").reshape(SHAPES[name][0], -1)
    array[row, -1] = value
    array.tofile(file)


@pytest.mark.parametrize("row", [0, 3, 4])
@pytest.mark.parametrize(
    ("kind", "field", "value", "message"),
    [
        *((kind, "w", value, "'w' holds a number") for kind in STATES for value in (np.nan, np.inf, -np.inf)),
        ("0.3.0", "m", np.nan, "'m' holds a number"),
        ("0.3.0", "v", np.inf, "'v' holds a number"),
        ("0.3.0", "v", -1e-9, "a negative second moment"),
        ("0.3.0", "t", -1, "a negative count"),
    ],
)
def test_implausible_values(kind, field, value, message, row, tmp_path):
    place = copy(kind, tmp_path)
    poison(place, "rel.b_w", field, row, value)
    content = read(kind, place)
    for table in content.tables:
        if table.name == "rel.b_w":
            with pytest.raises(
                StateCorruptError, match=rf"row {row} of table 'rel\.b_w' in .*{message}.*restore"
            ):
                list(table.blocks())
        else:
            records(table)


@pytest.mark.parametrize("kind", RESET)
def test_moments_that_are_not_kept_are_not_judged(kind, tmp_path):
    place = copy(kind, tmp_path)
    poison(place, "rel.b_w", "v", 3, np.nan)
    assert (read_all(kind, place)["rel.b_w"]["v"] == 0).all()


def test_implausible_values_in_a_later_block(tmp_path):
    rows, dim = 20_000, 64
    for field in "wmv":
        with open(tmp_path / f"big_{field}.dat", "wb") as file:
            file.truncate(rows * dim * 4)
    with open(tmp_path / "big_w.dat", "r+b") as file:
        file.seek(4 * (19_998 * dim + 5))
        file.write(np.float32(np.nan).tobytes())
    with pytest.raises(StateCorruptError, match="row 19998 of table 'big'"):
        list(read_legacy(tmp_path, {"big": (rows, dim)}, k=0.0).tables[0].blocks())


# States that are not whole, or not one.


def test_a_marker_of_a_replacement(tmp_path):
    for kind in STATES:
        for marker in ("dsa_reinit_in_progress", ".reinitializing", "entity_emb.REINIT"):
            place = copy(kind, tmp_path)
            (place / marker).touch()
            with pytest.raises(
                StateIncompleteError, match=rf"{marker}' says .* being replaced .* resume=False"
            ):
                read(kind, place)
    for name in ("dsa_global_meta.json", "entity_emb_meta.json"):
        place = copy("0.3.0", tmp_path)
        edit(place / name, lambda values: {**values, "reinitializing": True})
        with pytest.raises(StateIncompleteError, match=f"{name}' says 'reinitializing'"):
            read_legacy(place)
        edit(place / name, lambda values: {**values, "reinitializing": False})
        read_legacy(place)


@pytest.mark.parametrize("kind", ["0.2.0", "0.3.0"])
def test_a_description_that_is_missing(kind, tmp_path):
    place = copy(kind, tmp_path)
    (place / "entity_emb_meta.json").unlink()
    with pytest.raises(StateCorruptError, match=r"entity_emb_meta.json' is missing"):
        read(kind, place)


def test_all_descriptions_missing(tmp_path):
    place = copy("0.2.0", tmp_path)
    for path in place.glob("*_meta.json"):
        path.unlink()
    assert find_legacy(place) == "0.1.0"
    with pytest.raises(
        StateCorruptError, match=r"_emb_t.dat' is of release 0\.2\.0 or later but 'entity_emb_meta.json'"
    ):
        read_legacy(place, SHAPES, k=0.0)


def test_the_global_description_is_missing(tmp_path):
    place = copy("0.3.0", tmp_path)
    (place / "dsa_global_meta.json").unlink()
    assert find_legacy(place) == "0.3.0"
    with pytest.raises(StateIncompleteError, match=r"dsa_global_meta.json' is missing.*write it anew"):
        read_legacy(place)


@pytest.mark.parametrize("kind", STATES)
def test_a_description_without_data(kind, tmp_path):
    place = copy(kind, tmp_path)
    shutil.copy(LEGACY / "0.2.0" / "a b_meta.json", place / "lost_meta.json")
    with pytest.raises(
        StateCorruptError, match=r"lost_meta.json' describes a table whose data files are missing"
    ):
        read(kind, place)


def test_a_manifest_of_the_second_release_saved_in_its_own_state(tmp_path):
    place = copy("0.2.0", tmp_path)
    shutil.copy(LEGACY / "0.2.0-checkpoint" / "checkpoint.json", place)
    assert find_legacy(place) == "0.2.0"
    assert read_all("0.2.0", place).keys() == SHAPES.keys()


def test_a_global_description_without_data(tmp_path):
    shutil.copy(LEGACY / "0.3.0" / "dsa_global_meta.json", tmp_path)
    assert find_legacy(tmp_path) == "0.3.0"
    with pytest.raises(StateCorruptError, match="holds no data file of a table"):
        read_legacy(tmp_path)


def test_two_releases_in_one_directory(tmp_path):
    place = copy("0.3.0", tmp_path)
    shutil.copy(LEGACY / "0.2.0" / "a b_meta.json", place)
    assert find_legacy(place) == "0.3.0"
    with pytest.raises(StateIncompleteError, match=r"are of several releases .* interrupted migration"):
        read_legacy(place)


def test_a_checkpoint_and_a_state_in_one_directory(tmp_path):
    place = copy("0.3.0-checkpoint", tmp_path)
    shutil.copy(LEGACY / "0.3.0" / "dsa_global_meta.json", place)
    with pytest.raises(StateMismatchError, match=r"dsa_global_meta.json' is not listed in 'checkpoint.json'"):
        read_legacy(place)
    place = copy("0.3.0-checkpoint", tmp_path)
    shutil.copy(place / "a b_w.dat", place / "more_w.dat")
    with pytest.raises(StateMismatchError, match=r"more_w.dat' is not listed in 'checkpoint.json'"):
        read_legacy(place)


def test_a_table_without_a_name(tmp_path):
    for field in "wmv":
        (tmp_path / f"_{field}.dat").write_bytes(bytes(4))
    with pytest.raises(StateMismatchError, match="a table whose name is empty"):
        read_legacy(tmp_path, {"": (1, 1)}, k=0.0)


# Descriptions with wrong content.

WRONG_DESCRIPTIONS = [
    ("shape", None, "lacks 'shape'"),
    ("shape", [7, 4], "entity_emb_[wmvt].dat' is truncated for a table of 7 x 4"),
    ("shape", [6, 3], "entity_emb_[wmvt].dat' is too long for a table of 6 x 3"),
    ("shape", [21], "a list of rows and dim is expected"),
    ("shape", [7, None], "a list of rows and dim is expected"),
    ("shape", [7, "3"], "'dim' where an integer from 1"),
    ("shape", [7, 3.0], "'dim' where an integer from 1"),
    ("shape", [True, 3], "'rows' where an integer from 1|'num_rows' where an integer from 1"),
    ("shape", [0, 3], "where an integer from 1"),
    ("shape", [-7, -3], "where an integer from 1"),
    ("shape", [2**62, 2**62], "is truncated for a table"),
    ("shape", [10**300, 3], "where an integer from 1"),
    ("shape", "7x3", "a list of rows and dim is expected"),
    ("shape", "73", "a list of rows and dim is expected"),
    ("shape", {"rows": 7, "dim": 3}, "a list of rows and dim is expected"),
    ("shape", {"rows": 7}, "a list of rows and dim is expected"),
    ("dtype", "float64", "states the dtype 'float64' where older releases stored 'float32'"),
    ("dtype", ["float32"], "states the dtype"),
    ("format_version", "2", "'format_version' where an integer"),
    ("format_version", True, "'format_version' where an integer"),
]


@pytest.mark.parametrize("kind", ["0.2.0", "0.3.0"])
@pytest.mark.parametrize(("key", "value", "message"), WRONG_DESCRIPTIONS)
def test_a_description_with_wrong_content(kind, key, value, message, tmp_path):
    place = copy(kind, tmp_path)
    edit(place / "entity_emb_meta.json", lambda values: {**values, key: value})
    with pytest.raises((StateCorruptError, StateMismatchError), match=message) as caught:
        read(kind, place)
    assert "entity_emb" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "version", "message"),
    [
        ("0.2.0", None, "format version None where 1 is expected"),
        ("0.3.0", None, "format version None where 2 is expected"),
        ("0.3.0", 7, "format version 7 where 2 is expected: open it with the release that wrote it"),
        ("0.2.0", 0, "format version 0 where 2 is expected"),
    ],
)
def test_an_unknown_format_version(kind, version, message, tmp_path):
    place = copy(kind, tmp_path)
    for path in place.glob("*_meta.json"):
        edit(path, lambda values: {**values, "format_version": version})
    if kind == "0.2.0" and version == 0:
        make.write_json(place / "dsa_global_meta.json", {"global_step": 1, "curvature": 0.0})
    with pytest.raises(StateMismatchError, match=message):
        read(kind, place)


def test_an_unknown_version_of_the_global_description(tmp_path):
    place = copy("0.3.0", tmp_path)
    edit(place / "dsa_global_meta.json", lambda values: {**values, "format_version": 3})
    with pytest.raises(StateMismatchError, match=r"dsa_global_meta.json' has format version 3 where 2"):
        read_legacy(place)


@pytest.mark.parametrize("half", [{"rows": 7}, {"num_rows": 7}, {"dim": 3}, {"embedding_dim": 3}])
def test_half_a_shape(half, tmp_path):
    place = copy("0.3.0", tmp_path)
    edit(place / "entity_emb_meta.json", lambda values: {**values, "shape": None, **half})
    with pytest.raises(StateCorruptError, match=r"entity_emb_meta.json' lacks 'shape'"):
        read_legacy(place)


def test_the_largest_global_step(tmp_path):
    place = copy("0.3.0", tmp_path)
    edit(place / "dsa_global_meta.json", lambda values: {**values, "global_step": 2**63 - 1})
    assert read_legacy(place).global_step == 2**63 - 1


CURVATURES = [-1.0, -1, "1", True, [1.0], 10**400, float("nan"), float("inf")]


@pytest.mark.parametrize("value", CURVATURES)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("0.2.0", "entity_emb_meta.json"),
        ("0.3.0", "entity_emb_meta.json"),
        ("0.3.0", "dsa_global_meta.json"),
        ("0.3.0-checkpoint", "checkpoint.json"),
    ],
)
def test_a_curvature_that_is_none(kind, name, value, tmp_path):
    place = copy(kind, tmp_path)
    edit(place / name, lambda values: {**values, "curvature": value})
    with pytest.raises(StateCorruptError, match=rf"{name}' states .* for 'curvature' where a finite number"):
        read(kind, place)


STEPS = [
    (-1, "integer from 0"),
    (1.5, "integer from 0"),
    ("3", "integer"),
    (True, "integer"),
    (2**63, "integer"),
]


@pytest.mark.parametrize(("value", "message"), [*STEPS, (None, "lacks 'global_step' or 'step': restore")])
@pytest.mark.parametrize(
    ("kind", "name"), [("0.3.0", "dsa_global_meta.json"), ("0.3.0-checkpoint", "checkpoint.json")]
)
def test_a_global_step_that_is_none(kind, name, value, message, tmp_path):
    place = copy(kind, tmp_path)
    edit(place / name, lambda values: {**values, "global_step": value})
    with pytest.raises(StateCorruptError, match=f"{name}' .*{message}"):
        read_legacy(place)


def test_curvatures_that_differ_or_are_missing(tmp_path):
    place = copy("0.3.0", tmp_path)
    edit(place / "entity_emb_meta.json", lambda values: {**values, "curvature": 1.0})
    with pytest.raises(
        StateMismatchError, match=r"states the curvature 1\.0 and 'dsa_global_meta.json' 0\.5"
    ):
        read_legacy(place)
    for path in place.glob("*_meta.json"):
        edit(path, lambda values: {**values, "curvature": None})
    with pytest.raises(StateCorruptError, match=r"dsa_global_meta.json' lacks 'curvature' or 'k'"):
        read_legacy(place)
    place = copy("0.3.0-checkpoint", tmp_path)
    edit(place / "checkpoint.json", lambda values: {**values, "curvature": None})
    with pytest.raises(StateCorruptError, match=r"checkpoint.json' lacks 'curvature' or 'k'"):
        read_legacy(place)


BOMBS = {
    "empty": b"",
    "not JSON": b"{",
    "a list": b"[1, 2]",
    "a number": b"17",
    "null": b"null",
    "not UTF-8": b'{"format_version": 2, "x": "\xff\xfe"}',
    "UTF-16": '{"format_version": 2}'.encode("utf-16"),
    "a mark of the byte order": b"\xef\xbb\xbf{}",
    "deep lists": b'{"shape": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep objects": b'{"a": ' * 100_000 + b"1" + b"}" * 100_000,
    "many digits": b'{"global_step": ' + b"9" * 100_000 + b"}",
    "too long": b'{"x": "' + b"a" * (1 << 21) + b'"}',
    "zeros": bytes(4096),
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("0.2.0", "entity_emb_meta.json"),
        ("0.3.0", "entity_emb_meta.json"),
        ("0.3.0", "dsa_global_meta.json"),
        ("0.3.0-checkpoint", "checkpoint.json"),
    ],
)
def test_json_that_can_not_be_read(kind, name, bomb, tmp_path):
    place = copy(kind, tmp_path)
    (place / name).write_bytes(BOMBS[bomb])
    assert find_legacy(place) is not None
    with pytest.raises(StateCorruptError, match=name) as caught:
        read(kind, place)
    assert len(str(caught.value)) < 2_000


def test_a_description_of_some_length(tmp_path):
    place = copy("0.3.0", tmp_path)
    file = place / "entity_emb_meta.json"
    good = file.read_bytes()
    file.write_bytes(good.ljust(1 << 20))
    assert read_all("0.3.0", place).keys() == SHAPES.keys()
    file.write_bytes(good.ljust((1 << 20) + 1))
    with pytest.raises(
        StateCorruptError, match=r"meta.json' has 1,048,577 bytes where older releases wrote less"
    ):
        read_legacy(place)


@pytest.mark.parametrize("depth", [10, 100, 300, 900])
def test_nested_values_do_not_end_the_process(depth, tmp_path):
    deep = "[" * depth + "]" * depth
    place = copy("0.3.0", tmp_path)
    (place / "entity_emb_meta.json").write_text(f'{{"format_version": 2, "shape": {deep}}}')
    with pytest.raises(StateCorruptError, match=r"entity_emb_meta.json"):
        read_legacy(place)
    place = copy("0.3.0-checkpoint", tmp_path)
    text = (place / "checkpoint.json").read_text()
    (place / "checkpoint.json").write_text(f'{{"deep": {deep}, "sha256": {deep}, {text[1:]}')
    with pytest.raises(StateCorruptError, match=r"checkpoint.json"):
        read_legacy(place)


@pytest.mark.parametrize("name", ["entity_emb_meta.json", "dsa_global_meta.json"])
def test_a_description_that_is_no_file(name, tmp_path):
    for replace in (os.mkdir, os.mkfifo):
        place = copy("0.3.0", tmp_path)
        (place / name).unlink()
        replace(place / name)
        with pytest.raises(StateCorruptError, match=f"{name}' is not a regular file"):
            read_legacy(place)


def test_a_huge_shape_that_a_sparse_file_has(tmp_path):
    """A record larger than the limit is refused, and nothing of its size is allocated."""
    dim = 1 << 29
    for field in "wmv":
        with open(tmp_path / f"wide_{field}.dat", "wb") as file:
            file.truncate(4 * dim)
    tracemalloc.start()
    try:
        with pytest.raises(StateCorruptError, match=r"table 'wide' has the shape .* is too large"):
            read_legacy(tmp_path, {"wide": (1, dim)}, k=0.0)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# Checkpoints.


@pytest.mark.parametrize(("kind", "name"), data_files(["0.3.0-checkpoint"]))
def test_every_flipped_bit_is_noticed(kind, name, tmp_path):
    place = copy(kind, tmp_path)
    good = (place / name).read_bytes()
    for place_of_bit in range(0, 8 * len(good), max(1, len(good) // 4)):
        bad = bytearray(good)
        bad[place_of_bit // 8] ^= 1 << place_of_bit % 8
        (place / name).write_bytes(bad)
        with pytest.raises(StateCorruptError, match=f"{name}' does not match its SHA-256 sum"):
            read_legacy(place)
        with contextlib.suppress(StateCorruptError):  # implausible numbers
            read_all(kind, place, verify=False)
    (place / name).write_bytes(good)
    read_legacy(place)


UNSAFE = [
    "../entity_emb_w.dat",
    "..",
    ".",
    "sub/entity_emb_w.dat",
    "sub\\entity_emb_w.dat",
    "/etc/passwd",
    "C:\\x",
    "nul\0_w.dat",
    "\ud800_w.dat",
]


@pytest.mark.parametrize("name", UNSAFE)
@pytest.mark.parametrize("layout", ["key", "value"])
def test_file_names_that_lead_elsewhere(name, layout, tmp_path):
    place = copy("0.3.0-checkpoint", tmp_path)
    (tmp_path / "entity_emb_w.dat").write_bytes((place / "entity_emb_w.dat").read_bytes())

    def change(values):
        entry = values["files"].pop("entity_emb_w.dat")
        values["files"][name if layout == "key" else "x"] = (
            entry if layout == "key" else {**entry, "file": name}
        )
        return values

    edit(place / "checkpoint.json", change)
    with pytest.raises(StateCorruptError, match="is not a plain name inside the directory"):
        read_legacy(place)


@pytest.mark.parametrize("name", [7, ["a"], {"sha256": "x"}])
def test_file_names_that_are_none(name, tmp_path):
    place = copy("0.3.0-checkpoint", tmp_path)
    edit(
        place / "checkpoint.json",
        lambda values: {**values, "more": [{"file": name, "sha256": "0" * 64, "size": 1}]},
    )
    with pytest.raises(StateCorruptError, match=r"is not a plain name|lacks|states"):
        read_legacy(place)


def test_a_long_file_name(tmp_path):
    place = copy("0.3.0-checkpoint", tmp_path)
    entry = {"a" * 5_000: {"sha256": "0" * 64, "size": 1}}
    edit(place / "checkpoint.json", lambda values: {**values, "files": {**values["files"], **entry}})
    with pytest.raises(StateCorruptError, match="can't be read"):
        read_legacy(place)


def test_links_out_of_a_checkpoint(tmp_path):
    place = copy("0.3.0-checkpoint", tmp_path)
    file = place / "entity_emb_w.dat"
    file.rename(tmp_path / "outside")
    file.symlink_to(tmp_path / "outside")
    with pytest.raises(StateCorruptError, match=r"entity_emb_w.dat' leads out of the checkpoint"):
        read_legacy(place)
    file.unlink()
    (tmp_path / "outside").rename(place / "inside")
    file.symlink_to("inside")
    assert read_all("0.3.0-checkpoint", place).keys() == SHAPES.keys()
    (tmp_path / "link").symlink_to(place, target_is_directory=True)
    assert read_all("0.3.0-checkpoint", tmp_path / "link").keys() == SHAPES.keys()


WRONG_ENTRIES = [
    ({"size": None}, "lacks 'size' or 'bytes'"),
    ({"size": 83}, "has 84 bytes instead of 83"),
    ({"size": "84"}, "'size' where an integer"),
    ({"sha256": "0" * 64}, "does not match its SHA-256 sum"),
    ({"sha256": "0" * 63}, "'sha256' where a sum of 64 hexadecimal digits"),
    ({"sha256": None}, "'sha256' where a sum of 64 hexadecimal digits"),
    ({"sha256": 5}, "'sha256' where a sum of 64 hexadecimal digits"),
]


@pytest.mark.parametrize(("entry", "message"), WRONG_ENTRIES)
def test_entries_with_wrong_content(entry, message, tmp_path):
    place = copy("0.3.0-checkpoint", tmp_path)

    def change(values):
        values["files"]["entity_emb_w.dat"] |= entry
        return values

    edit(place / "checkpoint.json", change)
    with pytest.raises(StateCorruptError, match=message) as caught:
        read_legacy(place)
    assert "entity_emb_w.dat" in str(caught.value)


def without_sum(values):
    del values["files"]["entity_emb_w.dat"]["sha256"]
    return values


def without_file(values):
    del values["files"]["entity_emb_t.dat"]
    return values


def twice(values):
    entry = {**values["files"]["entity_emb_w.dat"], "file": "entity_emb_w.dat", "size": 3}
    return {**values, "again": entry}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            without_sum,
            StateMismatchError,
            "entity_emb_w.dat' is not listed in 'checkpoint.json' with a 'sha256'",
        ),
        (without_file, StateMismatchError, "entity_emb_t.dat' is not listed"),
        (twice, StateCorruptError, "'entity_emb_w.dat' where .* as elsewhere in it, is expected"),
        (lambda values: {**values, "files": {}}, StateMismatchError, "is not listed"),
        (lambda values: {**values, "params": {}}, StateCorruptError, r"describes the tables \[\] but lists"),
        (lambda values: {**values, "params": [1]}, StateCorruptError, "'params' where an object is expected"),
        (
            lambda values: {**values, "params": dict.fromkeys(SHAPES, 3)},
            StateCorruptError,
            "states 3 for .* where an object",
        ),
        (lambda values: {**values, "format_version": 1}, StateMismatchError, "format version 1 where 2"),
        (lambda values: {**values, "format_version": 3}, StateMismatchError, "format version 3 where 2"),
    ],
)
def test_manifests_with_wrong_content(change, error, message, tmp_path):
    place = copy("0.3.0-checkpoint", tmp_path)
    edit(place / "checkpoint.json", change)
    with pytest.raises(error, match=message):
        read_legacy(place)


def test_a_manifest_whose_files_are_all_missing(tmp_path):
    values = json.loads((LEGACY / "0.3.0-checkpoint" / "checkpoint.json").read_bytes())
    del values["params"]
    make.write_json(tmp_path / "checkpoint.json", values)
    assert find_legacy(tmp_path) == "0.3.0 checkpoint"
    with pytest.raises(StateCorruptError, match=r"a b_m.dat' is missing"):
        read_legacy(tmp_path)


def test_a_file_that_is_neither_there_nor_listed(tmp_path):
    place = copy("0.3.0-checkpoint", tmp_path)
    edit(place / "checkpoint.json", without_file)
    (place / "entity_emb_t.dat").unlink()
    with pytest.raises(StateCorruptError, match=r"lacks 'entity_emb_t.dat'"):
        read_legacy(place)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"shape": [3, 7]}, r"states \(3, 7\) for 'shape' where \(7, 3\)"),
        ({"curvature": 3.0}, r"states 3.0 for 'curvature' where 0.5, that of the checkpoint, is"),
        ({"format_version": 1}, "format version 1 where 2 is expected"),
        ({"dtype": "float16"}, "states the dtype 'float16'"),
    ],
)
def test_a_description_that_differs_from_the_manifest(own, message, tmp_path):
    place = copy("0.3.0-checkpoint", tmp_path)
    content = json.dumps({**make.describe("entity_emb", 2), **own}).encode()
    (place / "entity_emb_meta.json").write_bytes(content)
    entry = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    files = {"entity_emb_meta.json": entry}
    edit(place / "checkpoint.json", lambda values: {**values, "files": {**values["files"], **files}})
    with pytest.raises((StateCorruptError, StateMismatchError), match=message):
        read_legacy(place)


def test_sums_are_compared_only_when_asked(tmp_path):
    place = copy("0.3.0-checkpoint", tmp_path)
    poison(place, "rel.b_w", "w", 3, 0.125)
    with pytest.raises(StateCorruptError, match=r"rel.b_w_w.dat' does not match its SHA-256 sum"):
        read_legacy(place)
    assert read_all("0.3.0-checkpoint", place, verify=False)["rel.b_w"]["w"][3, -1] == 0.125


@pytest.mark.parametrize(
    "own", [{}, {"shape": None}, {"curvature": None, "dtype": None, "format_version": None}]
)
def test_a_description_that_agrees_with_the_manifest(own, tmp_path):
    place = copy("0.3.0-checkpoint", tmp_path)
    content = json.dumps({**make.describe("entity_emb", 2), **own}).encode()
    (place / "entity_emb_meta.json").write_bytes(content)
    files = {"entity_emb_meta.json": {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
    edit(place / "checkpoint.json", lambda values: {**values, "files": {**values["files"], **files}})
    assert read_all("0.3.0-checkpoint", place).keys() == SHAPES.keys()


def test_a_description_that_is_not_listed_is_not_read(tmp_path):
    place = copy("0.3.0-checkpoint", tmp_path)
    (place / "entity_emb_meta.json").write_text("nonsense")
    assert read_all("0.3.0-checkpoint", place).keys() == SHAPES.keys()


def test_checkpoints_of_the_second_release(tmp_path):
    message = r"is a checkpoint of release 0\.2\.0, .* absolute paths .* resume=True in its place, or export"
    with pytest.raises(StateMismatchError, match=message):
        read_legacy(LEGACY / "0.2.0-checkpoint")
    single = tmp_path / "run.json"
    single.write_text('{"files": ["/run/emb_w.dat"]}')
    assert find_legacy(single) == "0.2.0 checkpoint"
    single.write_text('{"params": {"emb": {"w": "C:\\\\run\\\\emb_w.dat"}}}')
    assert find_legacy(single) == "0.2.0 checkpoint"
    with pytest.raises(StateMismatchError, match=message):
        read_legacy(single)
    place = copy("0.3.0-checkpoint", tmp_path)

    def absolute(values):
        values["files"] = {f"{place}/{name}": entry for name, entry in values["files"].items()}
        return values

    edit(place / "checkpoint.json", absolute)
    assert find_legacy(place) == "0.2.0 checkpoint"
    with pytest.raises(StateMismatchError, match=message):
        read_legacy(place)


# Random documents: an error of ours or a content, never anything else.

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(0, 8), st.floats(), st.text(max_size=8),
    st.sampled_from(["float32", "entity_emb", "entity_emb_w.dat", "/a/b_w.dat", "..", "w", "0" * 64]),
)  # fmt: skip
KEYS = st.one_of(
    st.sampled_from(
        [
            "format_version", "version", "shape", "num_rows", "rows", "dim", "dtype", "curvature", "k",
            "step", "global_step", "params", "tables", "files", "file", "path", "name", "size", "bytes",
            "sha256", "entity_emb", "a b", "rel.b_w", "entity_emb_w.dat", "entity_emb_meta.json", "reinit",
        ]
    ),
    st.text(max_size=6),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=5)),
    max_leaves=12,
)
DOCUMENTS = [
    ("0.2.0", "entity_emb_meta.json"),
    ("0.3.0", "entity_emb_meta.json"),
    ("0.3.0", "dsa_global_meta.json"),
    ("0.3.0-checkpoint", "checkpoint.json"),
]


def attempt(kind, place):
    find_legacy(place)
    with contextlib.suppress(DSAError):
        for verify in (True, False):
            read_all(kind, place, verify=verify)
    with contextlib.suppress(DSAError):
        read_all(kind, place, shapes=SHAPES, k=1.0)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return {
        kind: Path(shutil.copytree(LEGACY / kind, tmp_path_factory.mktemp("s") / "s")) for kind in READABLE
    }


@pytest.mark.parametrize(("kind", "name"), DOCUMENTS)
@given(changes=st.dictionaries(KEYS, VALUES, min_size=1, max_size=4), keep=st.booleans())
@example(changes={"k": 10**400}, keep=True)
@example(changes={"shape": [7, 3], "num_rows": float("nan")}, keep=True)
def test_random_keys_of_documents(kind, name, changes, keep, places):
    values = json.loads((LEGACY / kind / name).read_bytes()) if keep else {}
    (places[kind] / name).write_text(json.dumps({**values, **changes}))
    attempt(kind, places[kind])


@pytest.mark.parametrize(("kind", "name"), DOCUMENTS)
@given(data=st.data())
def test_random_values_inside_documents(kind, name, data, places):
    values = json.loads((LEGACY / kind / name).read_bytes())
    inside = values
    while True:
        key = data.draw(st.sampled_from(sorted(inside)))
        if not isinstance(inside[key], dict) or data.draw(st.integers(0, 3)) == 0:
            break
        inside = inside[key]
    if data.draw(st.booleans()):
        inside[key] = data.draw(VALUES)
    else:
        inside[data.draw(KEYS)] = inside.pop(key)
    (places[kind] / name).write_text(json.dumps(values))
    attempt(kind, places[kind])


@pytest.mark.parametrize(("kind", "name"), DOCUMENTS)
@given(
    raw=st.one_of(st.binary(max_size=60), st.text(max_size=60).map(lambda text: text.encode())),
    at=st.integers(0, 400),
)
def test_random_bytes_in_documents(kind, name, raw, at, places):
    good = (LEGACY / kind / name).read_bytes()
    at %= len(good)
    (places[kind] / name).write_bytes(good[:at] + raw + good[at + len(raw) :])
    attempt(kind, places[kind])


# Memory.


def test_memory_does_not_grow_with_the_table(tmp_path):
    rows, dim = 400_000, 64  # 307 MB in sparse files
    for field in "wmvt":
        with open(tmp_path / f"big_{field}.dat", "wb") as file:
            file.truncate(4 * rows * (1 if field == "t" else dim))
    make.write_json(tmp_path / "big_meta.json", {"format_version": 2, "shape": [rows, dim]})
    make.write_json(tmp_path / "dsa_global_meta.json", {"global_step": 1, "curvature": 0.0})
    records_of_few = read_all("0.3.0", LEGACY / "0.3.0")  # compiles the check
    assert records_of_few
    tracemalloc.start()
    try:
        seen = sum(len(block) for _, block in read_legacy(tmp_path).tables[0].blocks())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seen == rows
    assert peak < 16 << 20, f"{peak:,} bytes"
