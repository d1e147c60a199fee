"""Directories that are not what they should be: the right error with the right words, and no byte changed."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from small_states import as_left, build, content, edit, journal, train

from dsa.errors import (
    StateCorruptError,
    StateIncompleteError,
    StateMismatchError,
    StateNotFoundError,
)
from dsa.inspection import open_state
from dsa.state.metadata import METADATA_NAME, Metadata, table_file_name, write_metadata

GOLDEN = Path(__file__).parents[1] / "golden" / "legacy"


def refuse(path, error, match):
    before = content(path) if path.is_dir() else None
    with pytest.raises(error, match=match):
        open_state(path)
    assert (content(path) if path.is_dir() else None) == before


def test_no_state(tmp_path):
    match = (
        "there is no state in .*: pass the directory that an optimizer was given as its disk_dir or state_dir"
    )
    refuse(tmp_path, StateNotFoundError, match)
    refuse(tmp_path / "missing", StateNotFoundError, match)
    assert not (tmp_path / "missing").exists()
    (tmp_path / "file").write_text("x")
    refuse(tmp_path / "file", StateNotFoundError, match)
    with pytest.raises(FileNotFoundError):
        open_state(str(tmp_path))


@pytest.mark.parametrize("release", ["0.1.0", "0.2.0", "0.3.0"])
def test_an_older_release(tmp_path, release):
    shutil.copytree(GOLDEN / release, tmp_path / "old")
    refuse(tmp_path / "old", StateMismatchError, rf"holds state of release {release}, .*: migrate it first")


def test_a_checkpoint(tmp_path):
    with build(tmp_path / "state") as optimizer:
        train(optimizer, 1)
        optimizer.export_checkpoint(tmp_path / "checkpoint")
    refuse(tmp_path / "checkpoint", StateMismatchError, "is a Zarr group, such as a checkpoint, not a state")


def test_no_description(path):
    (path / METADATA_NAME).unlink()
    refuse(path, StateCorruptError, r"holds the table file 'entity-.*\.dsa' but no dsa\.json: restore")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "can't be read"),
        ("{}", "can't be read"),
        ('{"content": {"format": "zip"}, "crc32": "0"}', "was not written by dsa"),
        ('{"content": {"format": "dsa-state", "version": 99}, "crc32": "0"}', "format version 99"),
        ('{"content": {"format": "dsa-state", "version": 5}, "crc32": "0"}', "does not match its checksum"),
    ],
)
def test_a_damaged_description(path, text, match):
    (path / METADATA_NAME).write_text(text)
    refuse(path, StateCorruptError, match)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda c: c["tables"][0].update(init={"kind": "dice"}), "initialiser .* of the unknown kind 'dice'"),
        (lambda c: c["tables"][0].update(init="dice"), "initialiser 'dice' is of the unknown kind None"),
        (lambda c: c["tables"][0].pop("init"), "description of table 'entity' .* can't be read .*'init'"),
        (lambda c: c["tables"][0].update(k=-1), "curvature -1 is not a finite number"),
        (lambda c: c["tables"][0]["backend"].update(kind=["tape"]), "lacks entries that every state has"),
        (lambda c: c["tables"][0]["backend"].update(kind="../tape"), "lacks entries that every state has"),
        (
            lambda c: c["tables"][0]["backend"].update(rows=299),
            "table file .* is damaged or another",
        ),
        (
            lambda c: c["tables"][0]["backend"].update(schema={"dim": 4}),
            "record description .* can't be read",
        ),
        (lambda c: c["tables"][0].update(name="other"), "the table file .* is missing: restore it"),
    ],
)
def test_a_description_that_says_something_else(path, change, match):
    edit(path, change)
    refuse(path, StateCorruptError, match)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda file: file.unlink(), "is missing: restore it from a copy"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), r"is truncated: [0-9,]+ bytes instead of"),
        (lambda file: file.write_bytes(file.read_bytes() + b"x"), "is longer than it was made"),
        (lambda file: file.write_bytes(b"x" + file.read_bytes()[1:]), "damaged or not one of dsa's"),
    ],
)
def test_a_damaged_table(path, damage, match):
    damage(path / table_file_name("entity"))
    refuse(path, StateCorruptError, match)


def test_swapped_tables(path):
    first, second = (path / table_file_name(name) for name in ("entity", "flat"))
    moved = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(moved)
    refuse(path, StateCorruptError, "damaged or another table's")


def test_a_creation_that_did_not_end(path):
    write_metadata(path, Metadata("creating", "", note="making a new state"))
    refuse(path, StateIncompleteError, r"its creation was interrupted \(making a new state\)")


@pytest.fixture
def killed(tmp_path):
    """A directory as a killed process leaves it: four steps, the journal with the last one."""
    with build(tmp_path / "state") as optimizer:
        train(optimizer, 4)
        return as_left(tmp_path / "state", tmp_path / "killed")


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda file: file.unlink(), r"dsa.journal.1' is missing, so that the last step can't be told whole"),
        (lambda file: file.write_bytes(b""), "was not written by dsa"),
        (lambda file: file.write_bytes(bytes(9000)), "was not written by dsa"),
        (lambda file: file.write_bytes(file.read_bytes()[:512] + bytes(9000)), "has a damaged header"),
        (lambda file: file.write_bytes(file.read_bytes()[:4096]), "is damaged in entry 4 of 4"),
        (lambda file: file.write_bytes(file.read_bytes()[:5000]), "is damaged in entry 4 of 4"),
    ],
)
def test_a_damaged_journal(killed, damage, match, monkeypatch):
    monkeypatch.setattr("dsa.inspection.directory._PAUSE", 0.0)
    damage(journal(killed))
    refuse(killed, StateCorruptError, match)


@pytest.mark.parametrize("damage", ["missing", "header", "entry"])
def test_after_a_restart_of_the_machine_a_damaged_journal_is_done_without(killed, damage):
    """As recovery does: what can't be told any more is lost, and the tables are what they are."""
    edit(killed, lambda c: c.update(boot="another"))
    file = journal(killed)
    raw = file.read_bytes()
    file.write_bytes({"missing": b"", "header": bytes(9000), "entry": raw[:5000]}[damage])
    if damage == "missing":
        file.unlink()
    with open_state(killed) as state:
        assert state.global_step == 0  # of the last flush
        assert state["entity"].weights(range(300)).shape == (300, 4)
        assert np.count_nonzero(state["entity"]["t"]) > 0
    file.write_bytes(raw)
    with open_state(killed) as state:
        assert state.global_step == 4


def test_every_byte_of_the_last_entry_counts(killed):
    """A journal with one byte changed in its last entry is refused, or it was padding and reads the same."""
    raw = bytearray(journal(killed).read_bytes())
    end = max(np.flatnonzero(np.frombuffer(raw, np.uint8)))
    with open_state(killed) as state:
        expected = {name: table.weights(range(table.rows)) for name, table in state.tables.items()}
    random = np.random.default_rng(0)
    outcomes = set()
    for place in random.integers(4096, end, 60):
        changed = raw.copy()
        changed[place] ^= 1 << int(random.integers(8))
        journal(killed).write_bytes(changed)
        try:
            with open_state(killed) as state:
                for name, table in state.tables.items():
                    np.testing.assert_array_equal(table.weights(range(table.rows)), expected[name])
                assert state.global_step == 4
            outcomes.add("read")
        except StateCorruptError:
            outcomes.add("refused")
    assert "refused" in outcomes


def test_the_journal_of_another_state(killed, tmp_path):
    with build(tmp_path / "second") as optimizer:
        train(optimizer, 1)
        shutil.copy(journal(tmp_path / "second"), killed)
    refuse(killed, StateCorruptError, "belongs to another state")


def test_entries_that_do_not_fit_the_tables(killed, tmp_path):
    """A description that names fewer tables than the journal's entries are about."""
    edit(killed, lambda c: c["tables"].pop())
    refuse(killed, StateCorruptError, "does not fit a state of 1 tables")
