"""Ways out: what `dsa.verify` sees, what opening says, and what `dsa.repair` makes of damaged directories."""

import json
import os
import shutil
import warnings
import zlib
from unittest import mock

import numpy as np
import pytest
from story import ROWS, batch, build, flip, listing

import dsa
from dsa.backends import Zarr
from dsa.cli.program import main
from dsa.errors import (
    CorruptRowError,
    StateCorruptError,
    StateIncompleteError,
    StateLockedError,
    StateMismatchError,
    StateNotFoundError,
)
from dsa.state.journal_format import BODY, read_header
from dsa.state.metadata import METADATA_NAME, Metadata, read_metadata, write_metadata

BACKENDS = {"memmap": "memmap", "zarr": "zarr", "zstd": Zarr(compression="zstd", shard_bytes=4096)}
STEPS = 7


def records_of(path):
    """Every table's records as opening finds them."""
    with dsa.open_state(path) as view:
        return {name: view[name].read(range(ROWS[name])) for name in ROWS}


def left_behind(path, durability="process", backend="memmap", steps=STEPS):
    """A directory as a killed process leaves it, and the records of every step up to its last."""
    optimizer = build(path, durability=durability, backend=BACKENDS[backend])
    history = []
    for step in range(steps):
        history.append(_now(optimizer))
        optimizer.step(batch(step))
    history.append(_now(optimizer))
    if durability == "none":
        optimizer._state._transactions.drain()
    optimizer._state.abandon()
    return history


def _now(optimizer):
    from dsa.state.table import read_records

    tables = optimizer._state.tables
    return {name: read_records(tables[name], np.arange(rows)) for name, rows in ROWS.items()}


def edit(path, **values):
    """Change entries of the description, and keep its checksum right."""
    document = json.loads((path / METADATA_NAME).read_text())
    document["content"].update(values)
    document["crc32"] = f"{zlib.crc32(json.dumps(document['content'], sort_keys=True).encode()):08x}"
    (path / METADATA_NAME).write_text(json.dumps(document))


def copied(path):
    """Make the directory a copy of itself."""
    shutil.copytree(path, path.with_name("copy"))
    shutil.rmtree(path)
    path.with_name("copy").rename(path)


def journal(path):
    return path / read_metadata(path).journal_name


def damage_entry(path, number=None):
    """Flip a bit of the records of the journal's last entry, or of its header."""
    file = journal(path)
    slot = read_header(file.read_bytes(), read_metadata(path).journal_identity)
    flip(file, BODY + slot.head + 700)


def damage_row(path, row=7):
    """Flip a bit of a row of the table 'entity'."""
    file = next(path.glob("entity-*.dsa"))
    stride = read_metadata(path).tables[0]["backend"]["stride"]
    flip(file, 4096 + row * stride + 5)


def hole(path, row=7):
    """Lose a row of the table 'relation', which has no rule: the disk has zeros in its place."""
    file = next(path.glob("relation-*.dsa"))
    stride = read_metadata(path).tables[1]["backend"]["stride"]
    with open(file, "r+b") as stream:
        stream.seek(4096 + row * stride)
        stream.write(bytes(stride))


def damage_head(path):
    """Flip a bit of what the journal's last entry says of itself."""
    file = journal(path)
    slot = read_header(file.read_bytes(), read_metadata(path).journal_identity)
    flip(file, BODY + slot.head + 20)


def nothing(path):
    """No damage."""


def leave(path):
    """Files that nothing names."""
    shutil.copy(next(path.glob("entity-*.dsa")), path / "entity-0123456789abcdef.9.dsa")
    (path / "dsa.journal.99").write_bytes(b"x")


CLOSED = {
    "whole": (nothing, "ok", "silent", "whole"),
    "a bit of a row": (damage_row, "checksum", "silent", "reset"),
    "a hole": (hole, "as if it had never been written", "silent", "reset"),
    "left-over files": (leave, "no description names", "silent", "whole"),
}
OPEN = {
    "whole": (nothing, "not closed", "silent", "whole"),
    "a copy": (copied, "is a copy", StateCorruptError, "lost"),
    "no journal": (lambda path: journal(path).unlink(), "journal is missing", StateCorruptError, "lost"),
    "an empty journal": (
        lambda path: journal(path).write_bytes(b""),
        "its journal was not written by dsa",
        StateCorruptError,
        "lost",
    ),
    "a foreign journal": (
        lambda path: journal(path).write_bytes(journal(path).read_bytes().replace(b" ", b"x", 1)[::-1]),
        "its journal",
        StateCorruptError,
        "lost",
    ),
    "an entry": (damage_head, "damaged in entry", StateCorruptError, "lost"),
    "an image of what is stored": (damage_entry, "which is whole", "silent", "whole"),
    "a bit of a row": (lambda path: damage_row(path, 201), "checksum", "silent", "reset"),
    "another boot": (lambda path: edit(path, boot="another"), "restarted", "restarted", "lost"),
    "another boot, no journal": (
        lambda path: (edit(path, boot="another"), journal(path).unlink()),
        "journal is missing",
        "the journal is missing",
        "lost",
    ),
    "another boot, a torn row": (
        lambda path: (edit(path, boot="another"), damage_row(path, 201)),
        "checksum",
        "1 rows are torn",
        "reset",
    ),
    "a failed sync": (lambda path: edit(path, failed="I/O error"), "refused to keep", "refused", "lost"),
    "a truncated table": (
        lambda path: os.truncate(next(path.glob("entity-*.dsa")), 9_000),
        "is truncated: 9,000 bytes",
        StateCorruptError,
        StateCorruptError,
    ),
    "no description": (
        lambda path: (path / METADATA_NAME).unlink(),
        "no dsa.json",
        StateCorruptError,
        StateCorruptError,
    ),
    "a damaged description": (
        lambda path: flip(path / METADATA_NAME, 300),
        "dsa.json",
        StateCorruptError,
        StateCorruptError,
    ),
}
CASES = [(False, name, *case) for name, case in CLOSED.items()] + [
    (True, name, *case) for name, case in OPEN.items()
]


def opens(path):
    """Return what opening says, as words or as the class of its error."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            build(path, resume=True)._state.abandon()
        except StateCorruptError as error:
            return type(error), str(error)
    words = " ".join(str(each.message) for each in said)
    return words or "silent", words


def made(path, killed, damage):
    """Make a directory and damage it; return the records after each step."""
    history = left_behind(path)
    if not killed:
        build(path, resume=True).close()
    damage(path)
    return history


def bytes_of(path):
    """Every file with its bytes, but for the lock, whose content is a hint."""
    return {name: raw for name, (raw, _) in listing(path).items() if name != "dsa.lock"}


@pytest.mark.parametrize(
    ("killed", "name", "damage", "verified", "opened", "repaired"),
    CASES,
    ids=[f"{'killed' if case[0] else 'closed'}-{case[1]}" for case in CASES],
)
def test_verify_open_and_repair_agree(tmp_path, killed, name, damage, verified, opened, repaired):
    path = tmp_path / "state"
    history = made(path, killed, damage)
    before = bytes_of(path)
    found = dsa.verify(path)
    assert bytes_of(path) == before
    told = [*found.problems, *found.remarks]
    assert any(verified in each for each in told) if verified != "ok" else not told, told

    made(tmp_path / "twin", killed, damage)
    said, words = opens(tmp_path / "twin")
    if isinstance(opened, type):
        assert said is opened
        assert not found.ok
    else:
        assert opened in words or said == opened
        assert told or said == "silent"

    if isinstance(repaired, type):
        for dry_run in (True, False):
            with pytest.raises(repaired):
                dsa.repair(path, dry_run=dry_run)
        assert bytes_of(path) == before
        return
    dry = dsa.repair(path, dry_run=True)
    assert bytes_of(path) == before
    done = dsa.repair(path)
    assert dry.to_json() | {"dry_run": False, "report": done.report} == done.to_json()
    assert done.whole == (repaired == "whole")
    assert bool(done.reset_rows) == (repaired == "reset")
    assert found.ok or not done.whole
    assert (done.global_step, done.newest_step) == (STEPS, STEPS)
    check_rows(path, history, done)
    after = dsa.verify(path)
    assert after.ok, after
    assert not [each for each in after.remarks if "no description names" not in each and ".99" not in each]
    again = dsa.repair(path)
    assert (again.whole, again.changed, again.report) == (True, False, None)
    assert opens(path)[0] == "silent"


def check_rows(path, history, done):
    """Each row is as it was after some step, or was reset."""
    now = records_of(path)
    for table in done.tables:
        for row in range(ROWS[table.name]):
            record = now[table.name][row]
            if row in table.reset:
                assert record["s"] == done.global_step + 1
                assert not record["m"].any()
                assert not record["v"].any()
                first = history[0][table.name]["w"][row]
                rule = table.name == "entity"
                np.testing.assert_array_equal(record["w"], first if rule else np.zeros_like(first))
            else:
                assert any(record.tobytes() == step[table.name][row].tobytes() for step in history[-2:])


@pytest.mark.parametrize("durability", ["process", "power", "none"])
@pytest.mark.parametrize("backend", list(BACKENDS))
def test_a_copy_of_a_directory_in_use(tmp_path, backend, durability):
    with build(tmp_path / "run", durability=durability, backend=BACKENDS[backend]) as optimizer:
        history = []
        for step in range(STEPS):
            history.append(_now(optimizer))
            optimizer.step(batch(step))
            if step == 3:
                optimizer.flush()
                optimizer.export_checkpoint(tmp_path / "checkpoint")
        history.append(_now(optimizer))
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        with pytest.raises(StateLockedError):
            dsa.repair(tmp_path / "run")
    with pytest.raises(StateCorruptError, match=r"is a copy .* `dsa repair "):
        build(tmp_path / "copy", resume=True)
    with pytest.warns(match="is a copy that was made") as said, dsa.open_state(tmp_path / "copy") as view:
        view["entity"].read(range(10))
    assert len(said) == 1
    done = dsa.repair(tmp_path / "copy")
    assert not done.whole
    assert "is a copy" in done.problems[0]
    assert done.durable_step == 4
    assert done.exports_forgotten == 1
    collected = durability == "none" and backend == "zstd"  # what memory alone has, no copy has
    assert done.global_step == (4 if collected else STEPS)
    assert done.reset_rows == 0
    assert done.later_rows == (0 if collected else sum(
        int((history[-1][name]["s"] > 5).sum()) for name in ROWS
    ))  # fmt: skip
    expected = history[4 if collected else STEPS]
    for name, records in records_of(tmp_path / "copy").items():
        assert records.tobytes() == expected[name].tobytes()
    with build(tmp_path / "copy", resume=True) as optimizer:
        assert optimizer.global_step == done.global_step
        assert optimizer._state.exports == {}
        optimizer.step(batch(99))


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_rows_are_reset_by_their_rule_and_all_are_listed(tmp_path, backend):
    path = tmp_path / "state"
    with build(path, backend=BACKENDS[backend], k={"entity": 1.0, "relation": 0.0}) as optimizer:
        optimizer.step(batch(0))
        tables = optimizer._state.tables
        first = {name: _now(optimizer)[name]["w"] for name in ROWS}
        torn = {"entity": [3, 4, 250], "relation": list(range(9))}
        for name, rows in torn.items():
            records = tables[name].backend.read(np.array(rows))
            records["v"] = -1.0
            tables[name].backend.write(np.array(rows), records)
        outside = tables["entity"].backend.read(np.array([100]))
        outside["w"], outside["s"] = 0.7, 2
        tables["entity"].backend.write(np.array([100]), outside)
    with dsa.open_state(path) as view, pytest.raises(CorruptRowError):
        view["entity"].weights([3])
    done = dsa.repair(path)
    torn["entity"] = [3, 4, 100, 250]
    assert {table.name: list(table.reset) for table in done.tables} == torn
    report = json.loads((path / "dsa-repair-1.json").read_text())
    assert report == json.loads(json.dumps(done.to_json()))
    now = records_of(path)
    for name, rows in torn.items():
        assert (now[name]["s"][rows] == 2).all()
        assert not now[name]["m"][rows].any()
        others = np.setdiff1d(np.arange(ROWS[name]), rows)
        np.testing.assert_array_equal(now[name]["w"][others], first[name][others])
    assert not now["relation"]["w"][torn["relation"]].any()
    with build(path, resume=True, backend=BACKENDS[backend]) as optimizer:
        fresh = dsa.init.Normal(ROWS["entity"], 4, 0.1, seed=1)
        rule = np.empty((4, 4), np.float32)
        fresh.fill(np.array(torn["entity"]), rule, np.arange(4))
        np.testing.assert_allclose(now["entity"]["w"][torn["entity"]], rule)


def test_any_bit_of_a_journal(tmp_path):
    """Whatever single bit is lost, repair loses no row that any file holds whole."""
    history = left_behind(tmp_path / "made", durability="power")
    raw = journal(tmp_path / "made").read_bytes()
    random = np.random.default_rng(5)
    end = int(np.flatnonzero(np.frombuffer(raw, np.uint8)).max())
    places = [*range(0, 100, 9), *range(512, 560, 5), *random.integers(BODY, end, 40).tolist()]
    wholes = 0
    for number, place in enumerate(places):
        path = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "made", path)
        edit(path, files={})  # as if it were the directory itself
        flip(journal(path), place, int(random.integers(8)))
        found = dsa.verify(path)
        done = dsa.repair(path)
        assert done.whole == found.ok
        wholes += done.whole
        assert done.global_step == STEPS
        for name, records in records_of(path).items():
            assert records.tobytes() == history[-1][name].tobytes()
        shutil.rmtree(path)
    assert 0 < wholes < len(places)


@pytest.mark.parametrize("moment", ["report", "reset", "flush", "description"])
def test_killed_in_the_middle(tmp_path, moment):
    path = tmp_path / "state"
    left_behind(path)
    edit(path, boot="another")
    damage_row(path, 201)

    class Killed(BaseException):
        pass

    targets = {
        "report": "dsa.inspection.repairs.system.write_atomically",
        "reset": "dsa.inspection.repairs._reset",
        "flush": "dsa.inspection.repairs.system.sync_directory",
        "description": "dsa.inspection.repairs.write_metadata",
    }
    with mock.patch(targets[moment], side_effect=Killed), pytest.raises(Killed):
        dsa.repair(path)
    assert read_metadata(path).status == "open"
    done = dsa.repair(path)
    assert done.global_step == STEPS
    assert not done.whole
    reports = [json.loads(file.read_text()) for file in sorted(path.glob("dsa-repair-*.json"))]
    assert any(201 in table["reset"] for report in reports for table in report["tables"])
    assert dsa.verify(path).ok
    assert opens(path)[0] == "silent"


def test_a_device_that_refused_has_its_files_made_anew(tmp_path):
    left_behind(tmp_path)
    edit(tmp_path, failed="I/O error")
    before = {file.name: file.stat().st_ino for file in tmp_path.glob("*.dsa")}
    done = dsa.repair(tmp_path)
    assert "refused to keep" in done.problems[0]
    after = {file.name: file.stat().st_ino for file in tmp_path.glob("*.dsa")}
    assert not set(before) & set(after)
    assert len(after) == 2
    assert not list(tmp_path.glob("dsa.journal*"))


def test_what_can_not_be_repaired(tmp_path):
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(StateNotFoundError, match="there is no state"):
            dsa.repair(path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "begun").mkdir()
    write_metadata(tmp_path / "begun", Metadata("creating", "", note="making a new state"))
    with pytest.raises(StateIncompleteError, match="nothing in it to repair"):
        dsa.repair(tmp_path / "begun")
    with build(tmp_path / "run") as optimizer:
        optimizer.step(batch(0))
        optimizer.export_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(StateMismatchError, match="such as a checkpoint"):
        dsa.repair(tmp_path / "checkpoint")
    (tmp_path / "run" / METADATA_NAME).unlink()
    with pytest.raises(StateCorruptError, match=r"no dsa\.json: restore the description from a copy"):
        dsa.repair(tmp_path / "run")


def test_the_command(tmp_path, capsys):
    path = tmp_path / "state"
    with build(path) as optimizer:
        optimizer.step(batch(0))
    assert main(["repair", str(path)]) == 0
    assert "whole, step 1" in capsys.readouterr().out
    damage_row(path, 3)
    assert main(["repair", str(path), "--dry-run"]) == 1
    assert "table 'entity': 1 of 300 rows would be reset: 3" in capsys.readouterr().out
    assert main(["repair", str(path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["tables"][0]["reset"] == [3]
    assert told["report"].endswith("dsa-repair-1.json")
    assert main(["repair", str(path)]) == 0
    assert main(["repair", str(tmp_path / "nowhere")]) == 2
    assert "dsa repair: there is no state" in capsys.readouterr().err
    left_behind(tmp_path / "killed")
    assert main(["repair", str(tmp_path / "killed")]) == 0
    assert "marked as closed" in capsys.readouterr().out
