import json
from dataclasses import replace

import pytest

from dsa.cli.demo.directory import Run, forget_run, load_run, require_fresh, save_run, state_path
from dsa.cli.demo.settings import default_settings
from dsa.errors import StateCorruptError, StateExistsError, StateMismatchError, StateNotFoundError


@pytest.fixture
def run(tree):
    return Run(default_settings(tree.edges, {"dim": 3}), tree.fingerprint(), loss=0.25)


def test_a_run_is_read_as_it_was_written(tmp_path, tree, run):
    save_run(tmp_path, run)
    assert load_run(tmp_path, tree, {}) == run
    assert load_run(tmp_path, tree, {"dim": 3, "k": None, "second_moment": "row"}) == run


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dim": 4}, "has dim=3 but 4 is asked for: leave the option out"),
        ({"k": 2.0}, r"has k=1\.0 but 2\.0 is asked for"),
        ({"second_moment": "frame"}, "has second_moment='row' but 'frame' is asked for"),
        ({"epochs": 7}, "has epochs=300 but 7 is asked for"),
    ],
)
def test_another_setting_is_refused(tmp_path, tree, run, given, message):
    save_run(tmp_path, run)
    with pytest.raises(StateMismatchError, match=message):
        load_run(tmp_path, tree, given)


def test_more_epochs_are_taken(tmp_path, tree, run):
    save_run(tmp_path, run)
    more = load_run(tmp_path, tree, {"epochs": 400})
    assert more == replace(run, settings=replace(run.settings, epochs=400))


def test_another_graph_is_refused(tmp_path, tree, run):
    save_run(tmp_path, Run(run.settings, "0" * 64))
    with pytest.raises(StateMismatchError, match="trained on another graph: pass the same --edges"):
        load_run(tmp_path, tree, {})


def test_nothing_to_resume(tmp_path, tree, run):
    with pytest.raises(StateNotFoundError, match=r"no demo run to resume in .*: leave --resume out"):
        load_run(tmp_path, tree, {})
    save_run(tmp_path, run)
    forget_run(tmp_path)
    forget_run(tmp_path)
    with pytest.raises(StateNotFoundError, match="no demo run"):
        load_run(tmp_path, tree, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: "{", "can't be read"),
        (lambda data: "[]", "doesn't describe a demo run"),
        (lambda data: json.dumps({**data, "format": 2}), "format 2 is not 1"),
        (lambda data: json.dumps({**data, "loss": "low"}), "doesn't describe a demo run"),
        (lambda data: json.dumps({**data, "settings": {}}), "the settings {} can't be read"),
    ],
)
def test_a_damaged_description_is_refused(tmp_path, tree, run, change, message):
    save_run(tmp_path, run)
    path = tmp_path / "demo.json"
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(StateCorruptError, match=message):
        load_run(tmp_path, tree, {})


def test_a_directory_with_a_run_or_a_state_is_not_fresh(tmp_path, run):
    require_fresh(tmp_path / "absent")
    (tmp_path / "notes.txt").write_text("mine")
    require_fresh(tmp_path)
    save_run(tmp_path, run)
    with pytest.raises(StateExistsError, match="pass --resume to continue it, --fresh to start over"):
        require_fresh(tmp_path)
    forget_run(tmp_path)
    state_path(tmp_path).mkdir()
    with pytest.raises(StateExistsError, match="already holds a demo run"):
        require_fresh(tmp_path)
