"""The state directory: what may be opened, what is refused and why, and that a refusal changes nothing."""

import gc
import json
import os
import shutil
import signal
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import nursery
import pytest
import torch
from current_files import table_file

from dsa import DiskSparseRiemannianAdam, init
from dsa.backends import Memmap
from dsa.errors import (
    DSAError,
    StateCorruptError,
    StateError,
    StateExistsError,
    StateIncompleteError,
    StateLockedError,
    StateMismatchError,
    StateNotFoundError,
    StateWarning,
)
from dsa.state.metadata import FORMAT_VERSION, METADATA_NAME, read_metadata, table_file_name, write_metadata

LOCK = "dsa.lock"
TABLES = {"left": init.Normal(20, 3, seed=1), "right": init.Zeros(7, 2)}
BATCH = {
    "left": (
        np.array([3, 19, 3]),
        np.array([[0.1, 0.2, -0.3], [1.0, -1.0, 2.0], [0.5, 0.0, 0.0]], np.float32),
    ),
    "right": (np.array([6, 0]), np.array([[1.0, -1.0], [0.25, 4.0]], np.float32)),
}


def build(path, tables=TABLES, **options):
    return DiskSparseRiemannianAdam(tables, lr=0.1, disk_dir=path, **options)


def content(path):
    """Every file and folder below a path with its bytes, but for the lock, whose content is a hint."""
    return {
        str(entry.relative_to(path)): entry.read_bytes() if entry.is_file() else None
        for entry in sorted(Path(path).rglob("*"))
        if entry.name != LOCK
    }


def records(path, name):
    """The raw records of a closed table as bytes, without the header, which differs between directories."""
    return table_file(path, name).read_bytes()[4096:]


def descriptors():
    """Open ones, counted without a collection of garbage: what a refusal opens it has to close itself."""
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


@pytest.fixture
def path(tmp_path):
    """A directory that was trained for two steps and closed."""
    with build(tmp_path / "state") as optimizer:
        optimizer.step(BATCH)
        optimizer.step(BATCH)
    return tmp_path / "state"


def refuse(path, error, match, *, resume=True, tables=TABLES, **options):
    """Try to open: the right error with the right words, no byte changed, no descriptor kept."""
    before = content(path)
    held = descriptors()
    with pytest.raises(error, match=match) as caught:
        build(path, tables, resume=resume, **options)
    assert isinstance(caught.value, DSAError)
    assert str(path) in str(caught.value)
    del caught
    assert content(path) == before
    assert descriptors() == held


# ---------------------------------------------------------------- opening and going on


def test_a_missing_directory_is_made(tmp_path):
    with build(tmp_path / "a" / "b" / "c") as optimizer:
        assert optimizer.global_step == 0
    assert (tmp_path / "a" / "b" / "c" / METADATA_NAME).is_file()


@pytest.mark.parametrize("resume", [None, False])
def test_an_empty_directory_is_as_good_as_none(tmp_path, resume):
    with build(tmp_path, resume=resume) as optimizer:
        optimizer.step(BATCH)
    assert read_metadata(tmp_path).status == "closed"


@pytest.mark.parametrize("resume", [None, False])
def test_files_of_others_are_left_alone(tmp_path, resume):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "weights.dsa").write_text("mine too: not a name that dsa makes")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / table_file_name("left")).write_bytes(b"elsewhere")
    others = content(tmp_path)
    with build(tmp_path, resume=resume) as optimizer:
        optimizer.step(BATCH)
    with pytest.warns(StateWarning, match="resume=False"):
        build(tmp_path, resume=False).close()
    assert others.items() <= content(tmp_path).items()


def test_a_directory_left_by_a_closed_lock_alone_is_empty(tmp_path):
    (tmp_path / LOCK).write_text("12345\n")
    build(tmp_path).close()


def test_resume_goes_on_where_it_stopped(tmp_path):
    with build(tmp_path / "one") as optimizer:
        for _ in range(6):
            optimizer.step(BATCH)
    with build(tmp_path / "two") as optimizer:
        for _ in range(3):
            optimizer.step(BATCH)
    with build(tmp_path / "two", resume=True) as optimizer:
        assert optimizer.global_step == 3
        for _ in range(3):
            optimizer.step(BATCH)
        assert optimizer.global_step == 6
    for name in TABLES:
        assert records(tmp_path / "one", name) == records(tmp_path / "two", name)


def test_resume_does_not_change_what_it_opens(path):
    """Beside the mark that it is open, which close takes back, and the count of its lives."""
    before, life = content(path), read_metadata(path).life
    build(path, resume=True).close()
    after = content(path)
    del before[METADATA_NAME], after[METADATA_NAME]
    assert after == before
    metadata = read_metadata(path)
    assert (metadata.status, metadata.life, metadata.global_step) == ("closed", life + 1, 2)


def test_tables_may_be_given_in_another_order(path):
    with build(path, dict(reversed(TABLES.items())), resume=True) as optimizer:
        optimizer.step(BATCH)
        assert optimizer.global_step == 3


def test_the_stored_rule_wins(path):
    """A script that is run again passes its first weights again; they are not wanted any more."""
    with build(path, resume=True) as optimizer:
        expected = optimizer.read_rows(range(20), "left")
    sources = {"left": torch.full((20, 3), 9.0), "right": init.Uniform(7, 2, seed=3)}
    with build(path, sources, resume=True) as optimizer:
        assert torch.equal(optimizer.read_rows(range(20), "left"), expected)


def test_a_table_that_came_from_an_array_may_be_named_by_a_rule(tmp_path):
    weights = torch.linspace(-0.1, 0.1, 60).reshape(20, 3)
    build(tmp_path, {"left": weights}).close()
    with build(tmp_path, {"left": init.Zeros(20, 3)}, resume=True) as optimizer:
        assert torch.equal(optimizer.read_rows(range(20)), weights)


def test_moving_a_closed_directory(path, tmp_path):
    shutil.move(path, tmp_path / "moved")
    with build(tmp_path / "moved", resume=True) as optimizer:
        assert optimizer.global_step == 2


def test_the_working_directory_may_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with build("state") as optimizer:
        optimizer.step(BATCH)
        monkeypatch.chdir(tmp_path / "elsewhere")
        optimizer.step(BATCH)
        optimizer.flush()
    assert not any((tmp_path / "elsewhere").iterdir())
    with build(tmp_path / "state", resume=True) as again:
        assert again.global_step == 2


def test_the_default_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    DiskSparseRiemannianAdam({"left": init.Zeros(3, 2)}).close()
    assert (tmp_path / "disk_cache" / METADATA_NAME).is_file()


# ---------------------------------------------------------------- the policy


def test_state_is_not_overwritten_by_default(path):
    refuse(
        path,
        StateExistsError,
        r"step 2, with the tables 'left' \(20 x 3\), 'right' \(7 x 2\): pass resume=True .* or resume=False",
        resume=None,
    )
    with pytest.raises(FileExistsError):
        build(path)


def test_there_must_be_something_to_resume(tmp_path):
    refuse(tmp_path, StateNotFoundError, "no state to resume in .*: pass resume=None .* or correct the path")
    with pytest.raises(FileNotFoundError):
        build(tmp_path, resume=True)


def test_resuming_at_a_mistyped_path_makes_nothing(tmp_path):
    with pytest.raises(StateNotFoundError, match="no state to resume"):
        build(tmp_path / "sate" / "run", resume=True)
    assert not any(tmp_path.iterdir())


def test_starting_over_warns_and_forgets(path):
    other = {"left": init.Zeros(5, 2)}
    with pytest.warns(StateWarning, match="resume=False replaces the state in .*: what it held") as caught:
        optimizer = build(path, other, resume=False)
    with optimizer:
        assert optimizer.global_step == 0
        assert not optimizer.read_rows(range(5)).any()
    assert [warning.filename for warning in caught] == [__file__]
    assert {name for name in content(path) if name.endswith(".dsa")} == {table_file(path, "left").name}


def test_starting_over_gives_what_a_new_directory_gives(path, tmp_path):
    for directory, resume in ((path, False), (tmp_path / "new", None)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StateWarning)
            optimizer = build(directory, resume=resume)
        optimizer.step(BATCH)
        optimizer.close()
    for name in TABLES:
        assert records(path, name) == records(tmp_path / "new", name)


def test_a_warning_turned_into_an_error_comes_before_the_loss(path):
    before = content(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(StateWarning):
            build(path, resume=False)
    assert content(path) == before


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"allocate": "revserve"}, ValueError),
        ({"backend": Memmap(stride=6), "allocate": "sparse"}, ValueError),
        ({"backend": Memmap(stride="wide"), "allocate": "sparse"}, ValueError),
        ({"tables": {"left": np.array([[0.1, 0.2], [np.nan, 0.1]])}}, ValueError),
        (
            {"tables": {"left": torch.ones(3, 2), "right": torch.tensor([[1e39]], dtype=torch.float64)}},
            ValueError,
        ),
        ({"tables": {"left": init.Zeros(2**50, 2)}}, OSError),
        ({"tables": {"left": init.Zeros(2**50, 2)}, "allocate": "sparse"}, OSError),
    ],
)
@pytest.mark.filterwarnings("ignore::dsa.errors.StateWarning")
def test_starting_over_with_a_mistake_loses_nothing(path, change, error):
    before = content(path)
    options = dict(change)
    with pytest.raises(error):
        build(path, options.pop("tables", TABLES), resume=False, **options)
    assert content(path) == before
    with build(path, resume=True) as optimizer:
        assert optimizer.global_step == 2


@pytest.mark.parametrize("resume", [0, 1, "no", "True", np.False_, []])
def test_resume_is_one_of_three(path, resume):
    before = content(path)
    with pytest.raises((TypeError, ValueError), match="resume"):
        build(path, resume=resume)
    assert content(path) == before


@pytest.mark.parametrize("allocate", ["reserve", "sparse"])
@pytest.mark.parametrize("source", [np.array([[0.1], [np.inf]]), init.Zeros(2**50, 2)])
def test_a_failed_creation_leaves_nothing(tmp_path, source, allocate):
    held = descriptors()
    with pytest.raises((ValueError, OSError)):
        build(tmp_path, {"good": init.Zeros(10, 2), "bad": source}, allocate=allocate)
    assert content(tmp_path) == {}
    del source
    assert descriptors() == held
    build(tmp_path).close()


# ---------------------------------------------------------------- mismatches


@pytest.mark.parametrize(
    ("tables", "match"),
    [
        (
            {"left": init.Zeros(21, 3), "right": init.Zeros(7, 2)},
            "'left' is stored as 20 x 3 but 21 x 3 is asked",
        ),
        ({"left": init.Zeros(19, 3), "right": init.Zeros(7, 2)}, "20 x 3 but 19 x 3"),
        ({"left": init.Zeros(20, 4), "right": init.Zeros(7, 2)}, "20 x 3 but 20 x 4"),
        ({"left": init.Zeros(20, 3), "right": torch.zeros(2, 7)}, "'right' is stored as 7 x 2 but 2 x 7"),
        ({"left": init.Zeros(20, 3)}, r"\['left', 'right'\] but \['left'\] are asked for"),
        ({**TABLES, "more": init.Zeros(1, 1)}, r"\['left', 'more', 'right'\] are asked for"),
        ({"left": init.Zeros(20, 3), "Right": init.Zeros(7, 2)}, r"\['Right', 'left'\] are asked for"),
        ([init.Zeros(20, 3), init.Zeros(7, 2)], r"\['param_0', 'param_1'\] are asked for"),
        ({"left": init.Zeros(7, 2), "right": init.Zeros(20, 3)}, "20 x 3 but 7 x 2"),
    ],
)
def test_other_tables(path, tables, match):
    refuse(path, StateMismatchError, match, tables=tables)
    with pytest.raises(ValueError, match=match):
        build(path, tables, resume=True)


@pytest.mark.parametrize(("asked", "name"), [("coordinate", "adam"), ("row", "row_wise_adam")])
def test_another_second_moment(path, asked, name):
    match = f"stored with the update rule 'frame_adam' .* but '{name}' .second_moment='{asked}'. with "
    refuse(path, StateMismatchError, match, second_moment=asked)


def test_another_second_moment_of_a_table_with_one_element(tmp_path):
    """With D = 1 the records of two modes have the same size; their meaning differs."""
    build(tmp_path, {"left": init.Zeros(3, 1)}, second_moment="row").close()
    for asked in ("coordinate", "frame"):
        refuse(
            tmp_path,
            StateMismatchError,
            "second_moment",
            tables={"left": init.Zeros(3, 1)},
            second_moment=asked,
        )


@pytest.mark.parametrize("stride", ["page", 64, "packed"])
def test_another_layout_is_not_ignored(tmp_path, stride):
    """An argument that has no effect is refused; the stored stride is 52 bytes, and None asks for nothing."""
    build(tmp_path, {"left": init.Zeros(20, 3)}, backend=Memmap(stride=52)).close()
    refuse(
        tmp_path,
        StateMismatchError,
        "stride",
        tables={"left": init.Zeros(20, 3)},
        backend=Memmap(stride=stride),
    )
    build(tmp_path, {"left": init.Zeros(20, 3)}, resume=True).close()
    build(tmp_path, {"left": init.Zeros(20, 3)}, resume=True, backend=Memmap(stride=52)).close()


def test_the_stored_curvature_wins(tmp_path):
    build(tmp_path, {"left": init.Zeros(20, 3)}, k=1.0).close()
    with pytest.warns(
        StateWarning, match=r"k=1\.0, which is kept; the k=4\.0 .* call set_curvature\(4\.0"
    ) as caught:
        optimizer = build(tmp_path, {"left": init.Zeros(20, 3)}, k=4.0, resume=True)
    assert [warning.filename for warning in caught] == [__file__]
    assert "k=1" in repr(optimizer)
    optimizer.close()
    build(tmp_path, {"left": init.Zeros(20, 3)}, k=1.0, resume=True).close()


def test_refusing_by_a_warning_keeps_no_descriptor(tmp_path):
    build(tmp_path, {"left": init.Zeros(20, 3)}, k=1.0).close()
    before, held = content(tmp_path), descriptors()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(StateWarning):
            build(tmp_path, {"left": init.Zeros(20, 3)}, k=4.0, resume=True)
    assert content(tmp_path) == before
    assert descriptors() == held


def test_a_constructor_that_fails_late_releases_the_directory(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(StateWarning, match="retain_params"):
            build(tmp_path, retain_params=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StateWarning)
        build(tmp_path, resume=False).close()


# ---------------------------------------------------------------- damaged, partial and foreign files


def left_file(path):
    return table_file(path, "left")


def replace(file, data):
    file.unlink()
    file.write_bytes(data)


def signed(content):
    """Return the text of a description with a right checksum, as another program might write it."""
    checksum = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    return json.dumps({"content": content, "crc32": f"{checksum:08x}"})


def rewritten(path, **changes):
    """Change entries of the description and give it a fresh checksum."""
    file = path / METADATA_NAME
    file.write_text(signed(json.loads(file.read_text())["content"] | changes))


def nest(depth):
    return (
        b'{"content": {"format": "dsa-state", "version": %d, "tables": ' % FORMAT_VERSION
        + b"[" * depth
        + b"]" * depth
        + b'}, "crc32": ""}'
    )


DAMAGES = {
    "description empty": (lambda path: replace(path / METADATA_NAME, b""), "can't be read"),
    "description truncated": (lambda path: os.truncate(path / METADATA_NAME, 100), "can't be read"),
    "description extended": (
        lambda path: replace(path / METADATA_NAME, (path / METADATA_NAME).read_bytes() + b"}"),
        "can't be read",
    ),
    "description binary": (lambda path: replace(path / METADATA_NAME, bytes(range(256))), "can't be read"),
    "description nested": (lambda path: replace(path / METADATA_NAME, b"[" * 10**5), "can't be read"),
    "description a number": (lambda path: replace(path / METADATA_NAME, b"1" * 10**5), "can't be read"),
    "description a list": (lambda path: replace(path / METADATA_NAME, b"[]"), "can't be read"),
    "description null": (lambda path: replace(path / METADATA_NAME, b"null"), "can't be read"),
    "description foreign": (lambda path: replace(path / METADATA_NAME, b'{"a": 1}'), "can't be read"),
    "description of another program": (
        lambda path: replace(path / METADATA_NAME, b'{"content": {"a": 1}, "crc32": "00000000"}'),
        "was not written by dsa",
    ),
    "description changed by hand": (
        lambda path: replace(
            path / METADATA_NAME, (path / METADATA_NAME).read_bytes().replace(b'"k": 1.0', b'"k": 2.0')
        ),
        "does not match its checksum",
    ),
    "description of a later release": (
        lambda path: rewritten(path, version=FORMAT_VERSION + 1),
        f"format version {FORMAT_VERSION + 1} where this release knows {FORMAT_VERSION}",
    ),
    "description of an earlier release": (lambda path: rewritten(path, version=2), "format version 2"),
    "description without a version": (lambda path: rewritten(path, version=None), "format version None"),
    "description without tables": (lambda path: rewritten(path, tables=None), "lacks entries"),
    "description with an odd status": (lambda path: rewritten(path, status="asleep"), "lacks entries"),
    "description with a negative step": (lambda path: rewritten(path, global_step=-1), "lacks entries"),
    "description a directory": (
        lambda path: [(path / METADATA_NAME).unlink(), (path / METADATA_NAME).mkdir()],
        "is a directory",
    ),
    "description missing": (
        lambda path: (path / METADATA_NAME).unlink(),
        f"table file .* but no {METADATA_NAME}",
    ),
    "table missing": (lambda path: left_file(path).unlink(), "is missing"),
    "table empty": (lambda path: os.truncate(left_file(path), 0), "is truncated: 0 bytes|header"),
    "table without records": (lambda path: os.truncate(left_file(path), 4096), "is truncated"),
    "table one byte short": (
        lambda path: os.truncate(left_file(path), left_file(path).stat().st_size - 1),
        "is truncated",
    ),
    "table one byte long": (
        lambda path: os.truncate(left_file(path), left_file(path).stat().st_size + 1),
        "is longer than it was made",
    ),
    "table header zeroed": (
        lambda path: replace(left_file(path), bytes(4096) + left_file(path).read_bytes()[4096:]),
        "header .* not one of dsa's",
    ),
    "table header damaged": (
        lambda path: replace(
            left_file(path), left_file(path).read_bytes().replace(b'"rows": 20', b'"rows": 21', 1)
        ),
        "header .* is damaged",
    ),
    "table header with a bit of padding set": (
        lambda path: replace(
            left_file(path), left_file(path).read_bytes()[:4095] + b"\1" + left_file(path).read_bytes()[4096:]
        ),
        "header .* is damaged",
    ),
    "table all zero": (
        lambda path: replace(left_file(path), bytes(left_file(path).stat().st_size)),
        "header .* not one of dsa's",
    ),
    "table a directory": (lambda path: [left_file(path).unlink(), left_file(path).mkdir()], "table file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_before_anything_changes(path, damage):
    harm, match = DAMAGES[damage]
    harm(path)
    refuse(path, StateCorruptError, match)
    if damage.startswith("description"):
        refuse(path, StateCorruptError, match, resume=None)
    with pytest.raises(ValueError, match=match):
        build(path, resume=True)


@pytest.mark.parametrize("depth", [100, 300, 900, 960, 980, 990, 1_000, 10_000])
def test_a_nested_description(path, depth):
    """Reading and writing JSON give up at different depths; both ways are ours to explain."""
    replace(path / METADATA_NAME, nest(depth))
    refuse(path, StateCorruptError, "can't be read|does not match|lacks")


def test_tables_of_two_directories_swapped(path, tmp_path):
    """Same name, same shape, another run."""
    build(tmp_path / "other").close()
    shutil.copy(left_file(tmp_path / "other"), left_file(path))
    refuse(path, StateCorruptError, "header .* another table's")


def test_two_tables_of_one_shape_swapped(tmp_path):
    tables = {"a": init.Zeros(4, 2), "b": init.Zeros(4, 2)}
    build(tmp_path, tables).close()
    first, second = (table_file(tmp_path, name) for name in tables)
    first.rename(tmp_path / "third")
    second.rename(first)
    (tmp_path / "third").rename(second)
    refuse(tmp_path, StateCorruptError, "header .* another table's", tables=tables)


def leaves(value, path=()):
    """Every place in a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from leaves(inner, (*path, key))


ODD = ["missing", None, -1, 2**70, 1.5, float("nan"), True, "x", [], {}]


def edited(content, place, odd):
    """Return a description with one entry replaced, or left out."""
    changed = inner = json.loads(json.dumps(content))
    for key in place[:-1]:
        inner = inner[key]
    if odd == "missing":
        del inner[place[-1]]
    else:
        inner[place[-1]] = odd
    return changed


@pytest.mark.parametrize("resume", [None, True])
@pytest.mark.filterwarnings("ignore::dsa.errors.StateWarning")
def test_any_value_anywhere_in_the_description(tmp_path, resume):
    """A description with a right checksum and a wrong entry is explained, whatever the entry."""
    tables = {"left": init.Normal(20, 3, seed=1)}
    build(tmp_path, tables).close()
    file = tmp_path / METADATA_NAME
    good = file.read_text()
    content = json.loads(good)["content"]
    surprises = []
    for place in leaves(content):
        for odd in ODD:
            file.write_text(signed(edited(content, place, odd)))
            text = file.read_text()
            try:
                build(tmp_path, tables, resume=resume).close()
            except StateError:
                if file.read_text() != text:
                    surprises.append((place, odd, "changed by a refused open"))
            except Exception as error:
                surprises.append((place, odd, repr(error)))
    file.write_text(good)
    build(tmp_path, tables, resume=True).close()
    assert surprises == []


# ---------------------------------------------------------------- names


NAMES = [
    "enc.emb", "enc_emb", "enc-emb", "ENC.emb", "Enc.Emb", "../evil", "..", ".", "/etc/passwd", "a/b", "a\\b",
    "a" * 300, "a" * 301, "entité", "entite\N{COMBINING ACUTE ACCENT}", "実体", " ", "\n", "\0", "con", "NUL",
    "\ud800", "*?<>|:\"", "dsa", "0",
]  # fmt: skip


def test_any_name_makes_a_safe_file_of_its_own(tmp_path):
    state = tmp_path / "state"
    tables = {name: init.Zeros(3 + i, 2) for i, name in enumerate(NAMES)}
    with build(state, tables, k=0.0) as optimizer:
        for i, name in enumerate(NAMES):
            optimizer.step({name: ([2 + i], np.full((1, 2), -1.0, np.float32))})
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
    files = [entry.name for entry in state.iterdir() if entry.suffix == ".dsa"]
    assert len({name.lower() for name in files}) == len(NAMES)
    assert all(len(name) < 100 and name.isascii() and name.islower() for name in files)
    with build(state, tables, k=0.0, resume=True) as optimizer:
        for i, name in enumerate(NAMES):
            assert optimizer.read_rows([2 + i], name)[0].tolist() == pytest.approx([0.1, 0.1])


def test_file_names_do_not_change_between_releases():
    assert table_file_name("enc.emb") == "enc_emb-2c202679713f42b7.dsa"
    assert table_file_name("") == "-e3b0c44298fc1c14.dsa"


# ---------------------------------------------------------------- locks, kills, marks


PRELUDE = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
import numpy as np
import dsa.backends.memmap, dsa.state.creation, dsa.state.opening, dsa.state.replacement
from dsa import DiskSparseRiemannianAdam, init
tables = {"left": init.Normal(20, 3, seed=1), "right": init.Zeros(7, 2)}
batch = {"left": (np.array([3, 19]), np.ones((2, 3), np.float32)),
         "right": (np.array([6, 0]), np.ones((2, 2), np.float32))}

def build(**options):
    return DiskSparseRiemannianAdam(tables, lr=0.1, disk_dir=sys.argv[1], **options)

def gate(*ignored, **also_ignored):
    print("at the gate", flush=True)
    sys.stdin.read()
"""


def start(code, path):
    """Run code in a child until it says that it stands at its gate."""
    process = nursery.start(PRELUDE + code, path)
    line = process.stdout.readline()
    if line != "at the gate\n":
        process.kill()
        process.communicate()
        raise AssertionError(f"the child said {line!r}")
    return process


def kill(process):
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


needs_kill = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no SIGKILL")


def test_a_second_optimizer_in_this_process(path):
    with build(path, resume=True) as optimizer:
        for resume in (None, True, False):
            refuse(path, StateLockedError, "in use by this very process: close the optimizer", resume=resume)
        (path.parent / "link").symlink_to(path)
        refuse(path.parent / "link", StateLockedError, "in use")
        with pytest.raises(BlockingIOError):
            build(path, resume=True)
        optimizer.step(BATCH)
    build(path, resume=True).close()


@needs_kill
def test_another_process_and_its_death(path):
    process = start("optimizer = build(resume=True); optimizer.step(batch); gate()", path)
    for resume in (None, True, False):
        refuse(path, StateLockedError, f"in use by process {process.pid}", resume=resume)
    kill(process)
    refuse(path, StateExistsError, "already holds state", resume=None)
    with build(path, resume=True) as optimizer:
        assert optimizer.global_step == 3, "a step that has returned survives"
        optimizer.step(BATCH)
    with build(path, resume=True) as optimizer:
        assert optimizer.global_step == 4


@needs_kill
def test_a_death_without_a_journal_is_told(path):
    process = start("optimizer = build(resume=True, durability='none'); optimizer.step(batch); gate()", path)
    kill(process)
    refuse(path, StateExistsError, "already holds state", resume=None)
    with pytest.warns(
        StateWarning,
        match=r"was not closed and has no journal .* tell of steps up to 3, and those may be there in part",
    ) as caught:
        optimizer = build(path, resume=True)
    assert [warning.filename for warning in caught] == [__file__]
    with optimizer:
        optimizer.step(BATCH)
    build(path, resume=True).close()


def test_a_lock_file_that_names_a_living_process_is_no_lock(path):
    """Process numbers are used again; what counts is the system's lock."""
    (path / LOCK).write_text(f"{os.getppid()}\n")
    build(path, resume=True).close()
    (path / LOCK).write_bytes(b"\xff\xfe\x00nonsense" * 100)
    build(path, resume=True).close()


@needs_kill
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_that_outlives_its_parent_holds_nothing(path):
    """DataLoader workers inherit descriptors; the lock must end with the process that took it."""
    code = """
optimizer = build(resume=True)
if os.fork() == 0:
    print("at the gate", flush=True)
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
"""
    process = start(code, path)
    process.kill()
    process.wait(timeout=60)
    try:
        build(path, resume=True).close()
    finally:
        process.communicate(timeout=60)


GATES = {
    "before the old files go": "dsa.state.opening.remove_table_file = gate",
    "before the description": "dsa.state.creation.write_metadata = gate",
    "between two tables": """
real = dsa.state.creation.make_table
def make(path, content, *options):
    if content.name == "right":
        gate()
    return real(path, content, *options)
dsa.state.creation.make_table = make
""",
    "before the first table": "dsa.backends.memmap.MemmapBackend.create = gate",
}


@needs_kill
@pytest.mark.parametrize("gate", GATES)
def test_killed_while_starting_over(path, gate):
    """The old state is there until the new one is whole; `test_switch` has every other instant."""
    process = start(GATES[gate] + "\nbuild(resume=False)", path)
    refuse(path, StateLockedError, "in use")
    kill(process)
    refuse(path, StateExistsError, "already holds state at step", resume=None)
    steps = 0 if gate == "before the old files go" else 2
    with build(path, resume=True) as optimizer:
        assert optimizer.global_step == steps
        optimizer.step(BATCH)
    assert len(list(path.glob("*.dsa"))) == len(TABLES)
    with pytest.warns(StateWarning, match="resume=False"):
        optimizer = build(path, resume=False)
    with optimizer:
        optimizer.step(BATCH)
        assert optimizer.global_step == 1
    with build(path, resume=True) as optimizer:
        assert optimizer.global_step == 1


@needs_kill
@pytest.mark.parametrize("resume", [None, False])
def test_killed_while_starting(tmp_path, resume):
    """There is nothing to continue, and nothing to lose."""
    kill(start(GATES["between two tables"] + "\nbuild()", tmp_path))
    refuse(
        tmp_path,
        StateIncompleteError,
        r"was interrupted \(making a new state\): .* leave resume out to make it again",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StateWarning)
        optimizer = build(tmp_path, resume=resume)
    with optimizer:
        optimizer.step(BATCH)
    assert len(list(tmp_path.glob("*.dsa"))) == len(TABLES)
    with build(tmp_path, resume=True) as optimizer:
        assert optimizer.global_step == 1


def test_an_interrupted_change_changes_nothing(path, tmp_path, monkeypatch):
    """KeyboardInterrupt in the middle of `set_curvature`, then the end of the `with` block."""
    import dsa.backends.memmap
    import dsa.state.replacement

    calls = []
    real = dsa.state.replacement.recurve

    def once(*arguments):
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return real(*arguments)

    with build(path, resume=True) as optimizer, monkeypatch.context() as patch:
        before = optimizer.read_rows(range(20), "left")
        files = sorted(each.name for each in path.iterdir())
        patch.setattr(dsa.backends.memmap, "_BLOCK_BYTES", 200)  # so that the table has several blocks
        patch.setattr(dsa.state.replacement, "recurve", once)
        with pytest.raises(KeyboardInterrupt):
            optimizer.set_curvature(4.0, name="left")
        assert sorted(each.name for each in path.iterdir()) == files
        assert torch.equal(optimizer.read_rows(range(20), "left"), before)
        optimizer.step(BATCH)
    with build(path, resume=True) as optimizer:
        assert optimizer.global_step == 3
        assert "left: 20 x 3, k=1" in repr(optimizer)


def test_leaving_without_close_is_no_loss(path):
    """A script that falls off its end, with the exit code of its own."""
    process = start("o = build(resume=True); o.step(batch); gate(); sys.exit(3)", path)
    process.communicate(timeout=60)
    assert process.returncode == 3
    with build(path, resume=True) as optimizer:
        assert optimizer.global_step == 3


def drop(held):
    held.clear()
    gc.collect()


def test_a_forgotten_close_is_told_and_the_directory_is_free_again(tmp_path):
    optimizer = build(tmp_path)
    optimizer.step(BATCH)
    held = [optimizer]
    del optimizer
    with pytest.warns(ResourceWarning, match=r"was never closed: call close\(\)"):
        drop(held)
    with build(tmp_path, resume=True) as again:
        assert again.global_step == 1


def test_closing_marks_the_directory(path):
    optimizer = build(path, resume=True)
    assert read_metadata(path).status == "open"
    optimizer.flush()
    assert read_metadata(path).status == "open"
    optimizer.close()
    assert read_metadata(path).status == "closed"
    optimizer.close()
    optimizer.shutdown()


def test_a_directory_that_is_a_file(tmp_path):
    (tmp_path / "state").write_bytes(b"mine")
    with pytest.raises(OSError, match="state"):
        build(tmp_path / "state")
    assert (tmp_path / "state").read_bytes() == b"mine"


@pytest.mark.parametrize("last", [2**31 - 3, 2**31 - 2, 2**31 - 1, 2**31 + 5])
def test_the_stamp_at_the_end_of_its_range(path, last):
    """The stamp of a record is an int32: a step beyond it is refused or stored soundly, never as damage."""
    metadata = read_metadata(path)
    metadata.global_step = last
    write_metadata(path, metadata)
    try:
        with build(path, resume=True) as optimizer:
            optimizer.step(BATCH)
    except (DSAError, OverflowError, ValueError):
        return
    with build(path, resume=True) as optimizer:
        assert torch.isfinite(optimizer.read_rows([3, 19], "left")).all()
        optimizer.step({"right": BATCH["right"]})
        assert torch.isfinite(optimizer.read_rows([6, 0], "right")).all()


@pytest.mark.parametrize("durability", ["none", "process", "power"])
def test_a_step_of_no_table_counts(path, durability):
    with build(path, resume=True, durability=durability) as optimizer:
        before = optimizer.global_step
        optimizer.step({})
        optimizer.step(BATCH)
        assert optimizer.global_step == before + 2
