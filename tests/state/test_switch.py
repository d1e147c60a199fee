"""Changes of the whole: killed at any instant, they have happened wholly or not at all."""

import errno
import os
import shutil
import warnings

import numpy as np
import pytest
import torch
from current_files import table_file
from deaths import deaths, die, in_child

import dsa
from dsa import DiskEmbedding, DiskSparseAdam, DiskSparseRiemannianAdam, init
from dsa.backends import Zarr, system
from dsa.errors import (
    DiskSpaceError,
    StateClosedError,
    StateExistsError,
    StateIncompleteError,
    StateNotFoundError,
    StateWarning,
)

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork"),
    pytest.mark.filterwarnings("ignore::dsa.errors.StateWarning"),
]

ROWS = {"left": 20, "right": 7, "third": 5}
DIM = 3
OTHERS = ["dsa.json", "dsa.lock"]


def tables(seed=1):
    return {name: init.Normal(rows, DIM, 0.1, seed=seed) for name, rows in ROWS.items()}


def build(path, seed=1, **options):
    options = {"lr": 0.1, "k": 1.0, "disk_dir": path, **options}
    return DiskSparseRiemannianAdam(tables(seed), **options)


def batch(seed):
    rng = np.random.default_rng(seed)
    return {
        name: (rng.integers(0, rows, 9), rng.standard_normal((9, DIM)).astype(np.float32))
        for name, rows in ROWS.items()
    }


def told(state):
    """Everything that a state is: its step, and of each table curvature, count and records."""
    return state.global_step, {
        name: (table.k, table.steps, table.backend.read(np.arange(len(table))).tobytes())
        for name, table in state.tables.items()
    }


def found(path, **options):
    """What an opening finds, and that nothing is left over in the directory."""
    with build(path, resume=True, **options) as optimizer:
        content = told(optimizer._state)
        files = sorted(entry.name for entry in path.iterdir())
        wanted = [table_file(path, name).name for name in content[1]]
        journals = [name for name in files if name.startswith("dsa.journal")]
        assert len(journals) == (options.get("durability") != "none")
        assert files == sorted([*OTHERS, *journals, *wanted])
    return content


def make_checkpoint(path, folder):
    with build(folder / "donor", seed=5) as optimizer:
        for number in range(4):
            optimizer.step(batch(100 + number))
        optimizer.export_checkpoint(folder / "checkpoint")


CHANGES = {
    "another curvature of all tables": lambda optimizer, folder: optimizer.set_curvature(4.0),
    "curvatures of their own": lambda optimizer, folder: optimizer.set_curvature({"left": 2.0, "third": 0.5}),
    "moments reset": lambda optimizer, folder: optimizer.set_curvature(1.0, reset_moments=True),
    "an import": lambda optimizer, folder: optimizer.import_checkpoint(folder / "checkpoint"),
}
KINDS = {
    "process": {},
    "power": {"durability": "power"},
    "no journal": {"durability": "none"},
    "queued": {"async_writes": True},
    "zarr": {"backend": Zarr()},
    "compressed": {"backend": Zarr(compression="zstd", overlay_bytes=1 << 16)},
}


def begun(path, options):
    """An optimizer in the middle of its run: the last steps are in the journal, or in a queue."""
    optimizer = build(path, resume=True, **options)
    for number in range(2, 4):
        optimizer.step(batch(number))
    if options.get("durability") == "none":
        optimizer.flush()  # its steps count from here on only
    return optimizer


def ends(start, folder, options, change):
    """What the state is before and after a change that nobody interrupts."""
    results = []
    for changed in (False, True):
        shutil.copytree(start, folder / "whole")
        with begun(folder / "whole", options) as optimizer:
            if changed:
                change(optimizer, folder)
            results.append(told(optimizer._state))
        assert found(folder / "whole") == results[-1]
        shutil.rmtree(folder / "whole")
    assert results[0] != results[1]
    return results


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "process") for name in CHANGES),
        *(("another curvature of all tables", kind) for kind in KINDS if kind != "process"),
        *(("an import", kind) for kind in ("queued", "compressed")),
    ],
)
def test_killed_anywhere_in_a_change(tmp_path, name, kind):
    options, change = KINDS[kind], CHANGES[name]
    start, path = tmp_path / "start", tmp_path / "state"
    with build(start, **options) as optimizer:
        for number in range(2):
            optimizer.step(batch(number))
    make_checkpoint(start, tmp_path)
    old, new = ends(start, tmp_path, options, change)

    def prepare():
        return begun(path, options)

    def operate(optimizer):
        change(optimizer, tmp_path)

    def restore():
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(start, path)

    seen = []
    every_call = (name, kind) == (next(iter(CHANGES)), "process")
    for number in deaths(prepare, operate, restore, 0 if every_call else 16):
        after = found(path)
        assert after in (old, new), f"killed before call {number}"
        seen.append(after == new)
    assert seen == sorted(seen), "a change that has happened stays"
    assert set(seen) == {False, True}


@pytest.mark.parametrize("left_open", [False, True])
@pytest.mark.parametrize("kind", ["process", "power", "zarr"])
def test_killed_anywhere_in_starting_over(tmp_path, kind, left_open):
    """The old state is there, whole, until the new one is."""
    options = KINDS[kind]
    start, path = tmp_path / "start", tmp_path / "state"
    with build(start, **options) as optimizer:
        optimizer.step(batch(0))
    with build(tmp_path / "fresh", seed=9, **options) as optimizer:
        new = told(optimizer._state)

    def restore():
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(start, path)
        if left_open:
            in_child(lambda: (begun(path, options), die()))

    restore()
    old = found(path)
    seen = []
    for number in deaths(lambda: None, lambda _: build(path, seed=9, resume=False, **options), restore):
        after = found(path)
        assert after in (old, new), f"killed before call {number}"
        seen.append(after == new)
    assert seen == sorted(seen)
    assert set(seen) == {False, True}


@pytest.mark.parametrize("kind", ["process", "power", "zarr", "compressed"])
def test_killed_anywhere_in_a_first_creation(tmp_path, kind):
    """Nothing is in a state before it is there: it is made again, unless it is asked to be continued."""
    options, path = KINDS[kind], tmp_path / "state"
    with build(tmp_path / "whole", **options) as optimizer:
        whole = told(optimizer._state)
    outcomes = []

    def restore():
        shutil.rmtree(path, ignore_errors=True)

    for number in deaths(lambda: None, lambda _: build(path, **options), restore):
        try:
            with build(path, resume=True, **options) as optimizer:
                assert told(optimizer._state) == whole
            outcomes.append("whole")
            with pytest.raises(StateExistsError, match="already holds state"):
                build(path, **options)
        except (StateIncompleteError, StateNotFoundError) as error:
            outcomes.append("incomplete" if isinstance(error, StateIncompleteError) else "nothing")
            resume = (None, False)[number % 2]
            with build(path, resume=resume, **options) as optimizer:
                assert told(optimizer._state) == whole
                assert len([each for each in path.iterdir() if each.suffix in (".dsa", ".zarr")]) == 3
    assert outcomes == sorted(outcomes, key=["nothing", "incomplete", "whole"].index)
    assert set(outcomes) == {"nothing", "incomplete", "whole"}


def layer(path, resume=None):
    return DiskEmbedding(60, DIM, state_dir=path, resume=resume, init=init.Zeros(60, DIM))


def stepped(path):
    embedding = layer(path)
    optimizer = DiskSparseAdam(embedding.parameters(), lr=0.1)
    embedding(torch.arange(10)).sum().backward()
    optimizer.step()
    return embedding, optimizer


def load_weights(pair):
    pair[0].load_state_dict({"weight": torch.full((60, DIM), 7.0)})


def load_moments(pair):
    optimizer = pair[1]
    groups = [{key: value for key, value in optimizer.param_groups[0].items() if key != "params"}]
    moments = {"step": 5, "exp_avg": torch.ones(60, DIM), "exp_avg_sq": torch.ones(60, DIM)}
    optimizer.load_state_dict({"state": {0: moments}, "param_groups": [{**groups[0], "params": [0]}]})


@pytest.mark.parametrize("load", [load_weights, load_moments])
def test_killed_anywhere_in_a_load(tmp_path, load):
    """``load_state_dict`` of weights, and of the moments of torch's optimizer."""
    path = tmp_path / "state"

    def reopened():
        embedding = layer(path, resume=True)
        try:
            return told(embedding.weight.state)
        finally:
            embedding.close()

    pair = stepped(path)
    old = told(pair[0].weight.state)
    load(pair)
    new = told(pair[0].weight.state)
    pair[0].close()
    assert reopened() == new
    assert old != new
    seen = []
    for number in deaths(lambda: stepped(path), load, lambda: shutil.rmtree(path, ignore_errors=True)):
        after = reopened()
        assert after in (old, new), f"killed before call {number}"
        seen.append(after == new)
    assert seen == sorted(seen)
    assert set(seen) == {False, True}


# ---------------------------------------------------------------- errors instead of deaths


def refuse(*ignored, **also_ignored):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


MOMENTS = {
    "the description": ("dsa.state.creation.write_metadata", refuse),
    "the journal": ("dsa.state.creation.Journal.create", refuse),
    "the second table": ("dsa.state.replacement.make_table", None),
    "the directory": ("dsa.backends.system.sync_directory", refuse),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("kind", ["process", "queued", "zarr"])
def test_a_full_disk_at_a_change(tmp_path, monkeypatch, name, kind, moment):
    """Nothing has changed, nothing is left behind, training goes on, and later the change succeeds."""
    make_checkpoint(tmp_path, tmp_path)
    path, change = tmp_path / "state", CHANGES[name]
    with build(tmp_path / "other", **KINDS[kind]) as other:
        other.step(batch(0))
        other.step(batch(1))
        expected = told(other._state)
    with build(path, **KINDS[kind]) as optimizer:
        optimizer.step(batch(0))
        place, replacement = MOMENTS[moment]
        if replacement is None:
            real, made = dsa.state.replacement.make_table, []

            def replacement(*arguments):
                if made:
                    refuse()
                made.append(real(*arguments))
                return made[-1]

        optimizer.flush()
        before, files = told(optimizer._state), sorted(entry.name for entry in path.iterdir())
        with monkeypatch.context() as patch:
            patch.setattr(place, replacement)
            with pytest.raises(OSError, match="No space left"):
                change(optimizer, tmp_path)
        assert told(optimizer._state) == before
        assert sorted(entry.name for entry in path.iterdir()) == files
        optimizer.step(batch(1))
        assert told(optimizer._state) == expected
        change(optimizer, tmp_path)
        changed = told(optimizer._state)
        assert changed != expected
    assert found(path, **KINDS[kind]) == changed


def test_a_change_needs_room_for_both(tmp_path, monkeypatch):
    with build(tmp_path / "state") as optimizer:
        optimizer.step(batch(0))
        before = told(optimizer._state)
        monkeypatch.setattr(system, "available_bytes", lambda directory: 100)
        with pytest.raises(DiskSpaceError, match="old and new tables lie side by side"):
            optimizer.set_curvature(4.0)
        assert told(optimizer._state) == before


@pytest.mark.parametrize("kind", ["process", "zarr"])
def test_a_description_that_is_there_although_writing_it_failed(tmp_path, monkeypatch, kind):
    """The switch has happened: memory is not what the directory says, so that the state is let go."""
    real = system.write_atomically

    def late(*arguments):
        real(*arguments)
        raise OSError(errno.EIO, "the directory was not synced")

    optimizer = build(tmp_path / "state", **KINDS[kind])
    optimizer.step(batch(0))
    with monkeypatch.context() as patch:
        patch.setattr("dsa.state.metadata.write_atomically", late)
        patch.setattr(optimizer._state, "flush", lambda: None)
        with pytest.raises(OSError, match="not synced"):
            optimizer.set_curvature(4.0)
    with pytest.raises(StateClosedError):
        optimizer.step(batch(1))
    optimizer.close()
    content = found(tmp_path / "state", k=4.0)
    assert {k for k, _, _ in content[1].values()} == {4.0}


def test_starting_over_without_room_keeps_the_old_state(tmp_path, monkeypatch):
    path = tmp_path / "state"
    with build(path) as optimizer:
        optimizer.step(batch(0))
        old = told(optimizer._state)
    for place in (
        "dsa.state.creation.write_metadata",
        "dsa.state.creation.Journal.create",
        "dsa.state.creation.make_table",
    ):
        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore", StateWarning)
            patch.setattr(place, refuse)
            with pytest.raises(OSError, match="No space left"):
                build(path, seed=9, resume=False)
        assert found(path) == old
    with monkeypatch.context() as patch:
        patch.setattr(system, "available_bytes", lambda directory: 100)
        with pytest.raises(DiskSpaceError, match="the old state is there until the new one is whole"):
            build(path, seed=9, resume=False)
    assert found(path) == old
