"""Is it whole? `dsa.verify` on sound and on damaged states and checkpoints."""

import json
import os
import shutil
import signal
import textwrap
from pathlib import Path
from unittest import mock

import numpy as np
import nursery
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from story import DIM, ROWS, STEPS, batch, build, flip, listing, tell

import dsa
from dsa.errors import CheckpointMismatchError, CheckpointNotFoundError, StateMismatchError
from dsa.state.journal_format import BODY, read_header
from dsa.state.metadata import read_metadata

BACKENDS = ["memmap", "zarr", dsa.backends.Zarr(compression="zstd")]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("story")
    tell(folder)
    return folder


@pytest.fixture
def folder(told, tmp_path):
    shutil.copytree(told, tmp_path / "here")
    return tmp_path / "here"


def write(path, table, row, **values):
    """Write rows past every check, with the right checksums."""
    with build(path, resume=True) as optimizer:
        backend = optimizer._state.tables[table].backend
        rows = np.atleast_1d(np.arange(len(backend))[row])
        records = backend.read(rows)
        for field, value in values.items():
            records[field] = value
        backend.write(rows, records)


@pytest.mark.parametrize("second_moment", ["coordinate", "frame", "row"])
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_sound_states(tmp_path, backend, second_moment):
    options = {"backend": backend, "second_moment": second_moment}
    with build(tmp_path / "run", **options) as optimizer:
        for step in range(5):
            optimizer.step(batch(step))
        assert dsa.verify(tmp_path / "run").ok  # beside training
    before = listing(tmp_path)
    found = dsa.verify(tmp_path / "run")
    assert (found.ok, found.problems, found.remarks) == (True, (), ())
    assert (found.kind, found.global_step, found.tables) == ("state", 5, 2)
    assert found.url == str(tmp_path / "run")
    assert listing(tmp_path) == before
    json.dumps(found.to_json(), allow_nan=False)


def test_sound_checkpoints(folder):
    before = listing(folder)
    seen = []
    for name, kind, step in (("step-20", "full", 20), ("step-30-changes", "delta", 30)):
        found = dsa.verify(folder / "checkpoints" / name, progress=lambda *at: seen.append(at))
        assert (found.ok, found.kind, found.global_step, found.tables) == (True, kind, step, 2)
        assert seen[-1][0] == pytest.approx(seen[-1][1], abs=100)
        assert found.nbytes == seen[-1][0]
    dsa.export_weights(folder / "run", folder / "w")
    assert dsa.verify(folder / "w").kind == "weights"
    shutil.rmtree(folder / "w")
    after = listing(folder)
    del before["run/dsa.json"], after["run/dsa.json"], before["run/dsa.lock"], after["run/dsa.lock"]
    assert {name: raw for name, (raw, _) in after.items()} == {name: raw for name, (raw, _) in before.items()}


@settings(max_examples=30)
@given(data=st.data())
def test_any_flipped_bit_of_a_checkpoint_is_found(told, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("flip")
    shutil.copytree(told / "checkpoints", folder / "checkpoints")
    files = sorted(each for each in (folder / "checkpoints/step-20").rglob("*") if each.is_file())
    file = data.draw(st.sampled_from(files))
    size = file.stat().st_size
    flip(file, data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7)))
    try:
        found = dsa.verify(folder / "checkpoints/step-20")
    except CheckpointMismatchError:
        assert file.name == "zarr.json"  # its format or version says something else now
        return
    if file.name == "zarr.json" and found.ok:
        # Consolidated copies of documents and versions of libraries don't describe the content.
        assert dsa.diff(told / "checkpoints/step-20", folder / "checkpoints/step-20").same
        return
    if found.ok:
        # The index of a shard, in a byte that readers don't need.
        assert dsa.diff(told / "checkpoints/step-20", folder / "checkpoints/step-20").same
        return
    assert found.problems
    if file.name != "zarr.json":
        table, field = file.relative_to(folder / "checkpoints/step-20").parts[:2]
        assert f"field '{field}' of the table '{table}'" in found.problems[0]


@pytest.mark.parametrize("missing", ["relation/w/c/0/0", "relation/w/zarr.json", "relation/zarr.json"])
def test_missing_files_of_a_checkpoint(folder, missing):
    (folder / "checkpoints/step-20" / missing).unlink()
    found = dsa.verify(folder / "checkpoints/step-20")
    assert not found.ok
    assert "relation" in found.problems[0]


def test_a_delta_and_its_base(folder, tmp_path):
    delta, base = folder / "checkpoints/step-30-changes", folder / "checkpoints/step-20"
    shutil.move(base, tmp_path / "elsewhere")
    with pytest.raises(CheckpointNotFoundError, match="'step-20', is not beside it"):
        dsa.verify(delta)
    assert dsa.verify(delta, base=tmp_path / "elsewhere").ok
    flip(tmp_path / "elsewhere/entity/t/c/0", 9)
    found = dsa.verify(delta, base=tmp_path / "elsewhere")
    assert found.problems[0].startswith("together with its base: block 0 of field 't' of the table 'entity'")
    flip(delta / "entity/t/c/0", 9)
    found = dsa.verify(delta, base=tmp_path / "elsewhere")
    assert found.problems[0].startswith("block 0 of field 't' of the table 'entity'")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"w": np.nan}, "field 'w' holds a number that is not finite"),
        ({"m": np.inf}, "field 'm' holds a number that is not finite"),
        ({"v": -1.0}, "field 'v' holds -1.0, a negative second moment"),
        ({"t": -3}, "field 't' holds -3, a negative count"),
        ({"s": 500}, "was written in step 499, and the state is at step 40"),
        ({"w": 0.7, "s": 3}, "its norm 1.4 is outside the ball of radius 1"),
    ],
)
def test_implausible_records(folder, values, words):
    write(folder / "run", "entity", 7, **values)
    found = dsa.verify(folder / "run")
    (problem,) = found.problems
    assert problem.startswith("row 7 of table 'entity' ")
    assert words in problem


def test_only_the_first_rows_of_a_table_are_named(folder):
    write(folder / "run", "entity", slice(100, 200), w=np.nan)
    write(folder / "run", "relation", 3, v=-1.0)
    found = dsa.verify(folder / "run")
    assert [problem.split(" ")[1] for problem in found.problems] == ["100", "101", "102", "103", "104", "3"]


def test_files_of_a_state(folder):
    def damage(change):
        shutil.rmtree(folder / "copy", ignore_errors=True)
        shutil.copytree(folder / "run", folder / "copy")
        change(folder / "copy")
        found = dsa.verify(folder / "copy")
        assert not found.ok
        assert found.kind == "state"
        return found.problems[0]

    def table(path):
        return sorted(path.glob("*.dsa"))[0]

    assert "truncated" in damage(lambda path: os.truncate(table(path), 5_000))
    assert "longer than it was made" in damage(lambda path: os.truncate(table(path), 50_000))
    assert "header" in damage(lambda path: flip(table(path), 20))
    assert "missing" in damage(lambda path: table(path).unlink())
    assert "checksum" in damage(
        lambda path: (path / "dsa.json").write_text((path / "dsa.json").read_text().replace("40", "41", 1))
    )
    assert "can't be read" in damage(lambda path: (path / "dsa.json").write_text("{"))
    assert "no dsa.json" in damage(lambda path: (path / "dsa.json").unlink())

    def exchange(path):
        one, other = sorted(path.glob("*.dsa"))
        shutil.copy(one, other)

    assert "header" in damage(exchange)


def test_a_table_file_that_nothing_names(folder):
    (one, _) = sorted((folder / "run").glob("*.dsa"))
    shutil.copy(one, one.with_name(one.stem + ".7.dsa"))
    found = dsa.verify(folder / "run")
    assert found.ok
    (remark,) = found.remarks
    assert "table files that no description names" in remark
    assert ".7.dsa" in remark


KILLED = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    from story import batch, build
    optimizer = build({path!r}, durability={durability!r})
    for step in range(7):
        optimizer.step(batch(step))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def kill(path, durability):
    code = textwrap.dedent(KILLED).format(
        tests=str(Path(__file__).parents[1]), path=str(path), durability=durability
    )
    assert nursery.run(code).returncode == -signal.SIGKILL


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_killed_process_left_a_whole_journal(tmp_path):
    kill(tmp_path / "run", "process")
    before = listing(tmp_path)
    found = dsa.verify(tmp_path / "run")
    assert (found.ok, found.global_step) == (True, 7)
    (remark,) = found.remarks
    assert "its journal, which is whole" in " ".join(remark.split())
    assert listing(tmp_path) == before
    with mock.patch("dsa.backends.system.boot_identity", return_value="another"):
        assert "the machine was restarted" in dsa.verify(tmp_path / "run").remarks[1]
    stored = read_metadata(tmp_path / "run")
    journal = tmp_path / "run" / stored.journal_name
    head = BODY + read_header(journal.read_bytes(), stored.journal_identity).head
    flip(journal, head + 700)  # a record, which the tables hold
    assert dsa.verify(tmp_path / "run").ok
    assert dsa.verify(tmp_path / "run").remarks == (remark,)  # what it was before a step is needed no more
    flip(journal, head + 20)
    found = dsa.verify(tmp_path / "run")
    assert not found.ok
    assert "its journal is damaged in entry 7 of 7" in found.problems[0]
    assert (found.global_step, found.tables) == (0, 2)
    journal.unlink()
    assert "its journal is missing" in dsa.verify(tmp_path / "run").problems[0]
    flip(next((tmp_path / "run").glob("entity-*.dsa")), 4096 + 5)
    problems = dsa.verify(tmp_path / "run").problems
    assert len(problems) == 2
    assert "row 0 of table 'entity' can't be used: the checksum" in problems[1]


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_killed_process_without_a_journal(tmp_path):
    kill(tmp_path / "run", "none")
    found = dsa.verify(tmp_path / "run")
    assert found.ok
    (remark,) = found.remarks
    assert "has no journal" in remark


def test_what_can_not_be_told(folder, tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="neither a state nor a checkpoint"):
        dsa.verify(tmp_path / "nowhere")
    with pytest.raises(StateMismatchError, match=r"0\.3\.0"):
        dsa.verify(folder / "old-run")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointMismatchError, match="is a file"):
        dsa.verify(tmp_path / "file")


def test_urls(folder):
    url = dsa.copy_checkpoint(folder / "checkpoints/step-20", "memory://verification/step-20")
    assert dsa.verify(url).ok
    assert dsa.verify(f"file://{folder}/run").kind == "state"
    assert dsa.verify(f"file://{folder}/checkpoints/step-20").ok


def test_sizes(folder):
    found = dsa.verify(folder / "run")
    assert found.nbytes == sum(ROWS.values()) * (3 * DIM + 2) * 4
    assert found.global_step == STEPS["end"]
