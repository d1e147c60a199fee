"""State of older releases becomes state of this one: on resume=True, by command, whole or not at all."""

import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import dsa
from dsa import DiskSparseRiemannianAdam
from dsa.checkpoint.transfer import make_state
from dsa.errors import (
    StateCorruptError,
    StateExistsError,
    StateMismatchError,
    StateNotFoundError,
    StateWarning,
)
from dsa.state.legacy import legacy_files, read_legacy
from dsa.state.migration import SET_ASIDE

GOLDEN = Path(__file__).parents[1] / "golden" / "legacy"
RELEASES = ["0.1.0", "0.2.0", "0.3.0"]
SHAPES = {table.name: (table.rows, table.schema.dim) for table in read_legacy(GOLDEN / "0.3.0").tables}


def whole(content):
    return {
        table.name: np.concatenate([records for _, records in table.blocks()]) for table in content.tables
    }


def given(release):
    """What a release did not record: shapes, in the first one only, and curvatures."""
    return {"shapes": SHAPES if release == "0.1.0" else None, "k": 0.0 if release != "0.3.0" else None}


def expected(release):
    return whole(read_legacy(GOLDEN / release, **given(release)))


def optimizer(path, resume):
    rows = {table.name: table.rows for table in read_legacy(GOLDEN / "0.3.0").tables}
    tables = {name: np.zeros((rows[name], shape[1]), np.float32) for name, shape in SHAPES.items()}
    k = {table.name: table.k for table in read_legacy(GOLDEN / "0.3.0").tables}
    return DiskSparseRiemannianAdam(tables, disk_dir=path, k=k, resume=resume)


def records(opened):
    return {n: t.backend.read(np.arange(len(t))) for n, t in opened._state.tables.items()}


def same(found, wanted):
    return found.keys() == wanted.keys() and all(
        np.array_equal(found[name][field], wanted[name][field]) for name in wanted for field in "wmvt"
    )


@pytest.fixture
def old(tmp_path, request):
    release = request.param
    shutil.copytree(GOLDEN / release, tmp_path / "state")
    return release, tmp_path / "state"


every_release = pytest.mark.parametrize("old", RELEASES, indirect=True)


@every_release
@pytest.mark.filterwarnings("ignore::dsa.errors.StateWarning")
def test_resuming_migrates(old):
    release, path = old
    before = {file.name: file.read_bytes() for file in legacy_files(path)}
    with optimizer(path, resume=True) as opened:
        found = records(opened)
        assert opened.global_step == read_legacy(GOLDEN / release, **given(release)).global_step
        name, (_, dim) = next(iter(SHAPES.items()))
        opened.step({name: ([0], np.full((1, dim), 1e-3, np.float32))})
    assert same(found, expected(release))
    assert {file.name: file.read_bytes() for file in (path / SET_ASIDE).iterdir()} == before
    assert not legacy_files(path)
    with optimizer(path, resume=True) as again:
        assert again.global_step == opened.global_step


@every_release
def test_the_warnings_say_what_is_kept_and_where_the_old_files_are(old):
    release, path = old
    with pytest.warns(StateWarning) as caught:
        optimizer(path, resume=True).close()
    text = " ".join(str(each.message) for each in caught)
    assert f"migrated from release {release}" in text
    assert ("start anew" in text) == (release != "0.3.0")
    assert SET_ASIDE in text


@every_release
def test_nothing_is_guessed(old):
    release, path = old
    with pytest.raises(StateExistsError, match=rf"state of release {release}: pass resume=True to migrate"):
        optimizer(path, resume=None)


@every_release
@pytest.mark.filterwarnings("ignore::dsa.errors.StateWarning")
def test_starting_over_sets_old_files_aside(old):
    _, path = old
    with optimizer(path, resume=False) as opened:
        assert opened.global_step == 0
        assert not any(found["w"].any() for found in records(opened).values())
    assert len(list((path / SET_ASIDE).iterdir())) > 0


@every_release
@pytest.mark.filterwarnings("ignore::dsa.errors.StateWarning")
def test_by_command_in_place_and_to_a_new_directory(old, tmp_path):
    release, path = old
    dsa.migrate(path, tmp_path / "new", **given(release))
    assert legacy_files(path)
    dsa.migrate(path, **given(release))
    for place in (path, tmp_path / "new"):
        with optimizer(place, resume=True) as opened:
            assert same(records(opened), expected(release))
    with pytest.raises(StateNotFoundError, match="no state of an older release"):
        dsa.migrate(path)


def test_a_checkpoint_of_0_3_0(tmp_path):
    checkpoint = GOLDEN / "0.3.0-checkpoint"
    dsa.migrate(checkpoint, tmp_path / "new", shapes=SHAPES)
    with optimizer(tmp_path / "new", resume=True) as opened:
        assert same(records(opened), whole(read_legacy(checkpoint, SHAPES)))
    with pytest.raises(ValueError, match="pass a directory for the state"):
        dsa.migrate(checkpoint)


def test_a_checkpoint_of_0_2_0_is_refused(tmp_path):
    with pytest.raises(StateMismatchError, match="absolute paths"):
        dsa.migrate(GOLDEN / "0.2.0-checkpoint", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("old", ["0.3.0"], indirect=True)
def test_other_tables_are_refused_before_anything_changes(old):
    _, path = old
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(StateMismatchError):
        DiskSparseRiemannianAdam({"other": np.zeros((3, 2), np.float32)}, disk_dir=path, resume=True)
    after = {file.name: file.read_bytes() for file in path.iterdir() if file.name != "dsa.lock"}
    assert after == before


@pytest.mark.parametrize("old", ["0.3.0"], indirect=True)
def test_damage_is_refused_and_nothing_changes(old):
    _, path = old
    next(path.glob("*_v.dat")).write_bytes(b"12")
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(StateCorruptError):
        optimizer(path, resume=True)
    after = {file.name: file.read_bytes() for file in path.iterdir() if file.name != "dsa.lock"}
    assert after == before


class Killed(BaseException):
    """Stands for the end of the process."""


PLACES = [
    "dsa.state.migration.write_content",
    "dsa.state.creation.make_backend",
    "dsa.state.replacement.make_table",
    "dsa.state.replacement.write_metadata",
    "dsa.state.creation.begin_life",
    "dsa.state.creation.sweep",
    "dsa.state.migration.set_aside",
    "dsa.state.migration.sync_directory",
]


@every_release
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.filterwarnings("ignore::dsa.errors.StateWarning", "ignore::ResourceWarning")
def test_interrupted_anywhere_the_next_opening_goes_on(old, place, when):
    release, path = old
    module, _, name = place.rpartition(".")
    real = getattr(__import__("pydoc").locate(module), name)

    def strike(*arguments, **options):
        if when == "after":
            real(*arguments, **options)
        raise Killed

    with mock.patch(place, strike), pytest.raises(Killed):
        optimizer(path, resume=True)
    with optimizer(path, resume=True) as opened:
        assert same(records(opened), expected(release))
    assert not legacy_files(path)
    assert len(list(path.glob("*.dsa"))) == len(SHAPES)


@every_release
@pytest.mark.filterwarnings("ignore::dsa.errors.StateWarning")
def test_old_files_of_which_some_were_moved_when_it_was_killed(old):
    release, path = old
    optimizer(path, resume=True).close()
    moved = sorted((path / SET_ASIDE).iterdir())
    for file in moved[::2]:
        file.rename(path / file.name)
    with optimizer(path, resume=True) as opened:
        assert same(records(opened), expected(release))
    assert sorted((path / SET_ASIDE).iterdir()) == moved


def test_content_of_an_open_directory_is_not_overwritten(tmp_path):
    content = read_legacy(GOLDEN / "0.3.0")
    storage = dsa.checkpoint.transfer.StorageChoice().complete()
    make_state(tmp_path / "s", content, storage)
    with pytest.raises(StateExistsError, match="choose another directory"):
        make_state(tmp_path / "s", content, storage)


@pytest.mark.filterwarnings("ignore::dsa.errors.StateWarning")
def test_a_second_set_of_old_files_is_kept_beside_the_first(tmp_path):
    path = tmp_path / "state"
    shutil.copytree(GOLDEN / "0.3.0", path)
    optimizer(path, resume=True).close()
    first = {file.name: file.read_bytes() for file in (path / SET_ASIDE).iterdir()}
    for file in (GOLDEN / "0.3.0").iterdir():
        (path / file.name).write_bytes(file.read_bytes() + b"changed")
    optimizer(path, resume=True).close()
    assert {file.name: file.read_bytes() for file in (path / SET_ASIDE).iterdir()} == first
    assert len(list((path / f"{SET_ASIDE}-2").iterdir())) == len(first)
