"""A machine that went down under ``durability="process"``: what the disk kept is opened, and said to be that.

Both the tables and the journal are then whatever the disk happens to hold: each may be older than the other.
"""

import re

import numpy as np
import pytest
from current_files import journal_file, table_file

from dsa import DiskSparseRiemannianAdam, init
from dsa.errors import CorruptRowError, StateCorruptError, StateWarning

ROWS = np.arange(10)
GRAD = np.ones((10, 3), np.float32)
TABLE = 50


def make(path, **options):
    tables = {"ball": init.Uniform(TABLE, 3, low=-0.01, high=0.01, seed=1)}
    return DiskSparseRiemannianAdam(tables, disk_dir=path, lr=0.1, **options)


def read(optimizer):
    return optimizer._state.tables["ball"].backend.read(np.arange(TABLE))


def step(optimizer, first=0):
    optimizer.step({"ball": (ROWS + first, GRAD)})


def kept(path):
    """What the disk may hold at a moment: the bytes of the table and of the journal."""
    return table_file(path, "ball").read_bytes(), journal_file(path).read_bytes()


@pytest.fixture
def left(tmp_path):
    """A directory as a process left it that died three steps after a flush."""
    path = tmp_path / "run"
    optimizer = make(path)
    step(optimizer)
    optimizer.flush()
    for _ in range(3):
        step(optimizer)
    optimizer._state.abandon()
    return path


@pytest.fixture
def restart(monkeypatch):
    return lambda: monkeypatch.setattr(
        "dsa.backends.system.boot_identity", lambda: "another run of the system"
    )


def reopened(path, **options):
    """Open after a loss of power; return the optimizer and the numbers in the warning."""
    with pytest.warns(StateWarning, match="the machine was restarted") as caught:
        optimizer = make(path, resume=True, **options)
    (text,) = [str(each.message) for each in caught]
    assert "may have lost or torn steps" in text
    assert "import a checkpoint if that will not do, and see durability='power'" in text
    found = re.search(
        r"whole up to step (\d+); of the steps up to (\d+) ([\d,]+) rows .*; ([\d,]+) rows are torn", text
    )
    assert (f"`dsa repair {path}` lists and resets them" in text) == (found[4] != "0")
    return optimizer, [int(each.replace(",", "")) for each in found.groups()], text


def damage(path, how):
    journal = journal_file(path)
    if how == "missing":
        journal.unlink()
    elif how == "empty":
        journal.write_bytes(b"")
    elif how == "zeros":
        journal.write_bytes(bytes(journal.stat().st_size))
    else:
        raw = bytearray(journal.read_bytes())
        raw[4096:8192] = bytes(4096)
        journal.write_bytes(raw)


every_damage = pytest.mark.parametrize("how", ["missing", "empty", "zeros", "entry"])


@every_damage
def test_without_the_journal_the_tables_are_kept(left, how, restart):
    """The rows tell their steps: nothing that is there is lost, and the count goes on behind the newest."""
    damage(left, how)
    restart()
    optimizer, numbers, text = reopened(left)
    with optimizer:
        assert numbers == [1, 4, len(ROWS), 0]
        assert "the journal" in text
        assert optimizer.global_step == 4
        assert (read(optimizer)["t"][ROWS] == 4).all()
        step(optimizer)
    with make(left, resume=True) as optimizer:
        assert optimizer.global_step == 5


@every_damage
def test_without_a_restart_it_is_damage(left, how):
    damage(left, how)
    with pytest.raises(StateCorruptError, match=r"journal .* or run `dsa repair"):
        make(left, resume=True)


def test_a_journal_that_is_whole_is_replayed(left, restart):
    restart()
    optimizer, numbers, text = reopened(left)
    with optimizer:
        assert numbers == [1, 4, len(ROWS), 0]
        assert "not whole" not in text
        assert optimizer.global_step == 4


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize(
    ("table", "journal"), [(0, 2), (2, 0), (1, 2), (2, 1), (2, 2), (0, 0), (0, 1), (1, 0)]
)
def test_tables_and_journal_of_different_moments(tmp_path, restart, table, journal, queued):
    """Of each row the newest that the disk holds anywhere counts; no row goes back, none is made up."""
    path = tmp_path / "run"
    optimizer = make(path, async_writes=queued)
    step(optimizer)
    optimizer.flush()
    moments, contents = [kept(path)], [read(optimizer)]
    for first in (0, 5):
        step(optimizer, first)
        if queued:
            optimizer._state._transactions.drain()
        moments.append(kept(path))
        contents.append(read(optimizer))
    optimizer._state.abandon()
    table_file(path, "ball").write_bytes(moments[table][0])
    journal_file(path).write_bytes(moments[journal][1])
    restart()
    optimizer, numbers, _ = reopened(path)
    with optimizer:
        newest = 1 + max(table, journal)
        assert optimizer.global_step == newest
        assert numbers[:2] == [1, newest]
        found, older, newer = read(optimizer), contents[table], contents[max(table, journal)]
        for row in range(TABLE):
            assert found[row] in (older[row], newer[row])
            assert found["s"][row] >= older["s"][row]
        if not queued:  # the journal has only what records were before
            np.testing.assert_array_equal(found, older)
        elif table >= journal or journal == table + 1:
            np.testing.assert_array_equal(found, newer)


def test_a_torn_record_is_told_and_not_used(left, restart):
    """Half a record is old: its checksum says so, the rest goes on."""
    file = table_file(left, "ball")
    stride = (file.stat().st_size - 4096) // TABLE
    raw = bytearray(file.read_bytes())
    raw[4096 + 3 * stride : 4096 + 3 * stride + stride // 2] = bytes(stride // 2)
    raw[4096 + 7 * stride] ^= 1
    file.write_bytes(raw)
    damage(left, "zeros")  # or it would put them right
    restart()
    optimizer, numbers, _ = reopened(left)
    with optimizer:
        assert numbers == [1, 4, len(ROWS) - 2, 2]
        for row in (3, 7):
            with pytest.raises(CorruptRowError):
                optimizer.read_rows([row])
            with pytest.raises(CorruptRowError):
                optimizer.step({"ball": ([row], GRAD[:1])})
        optimizer.step({"ball": ([1, 2, 20], GRAD[:3])})
        assert optimizer.global_step == 5


def test_the_journal_of_a_queue_puts_a_torn_record_right(tmp_path, restart):
    left = tmp_path / "run"
    optimizer = make(left, async_writes=True)
    step(optimizer)
    optimizer.flush()
    for _ in range(3):
        step(optimizer)
    optimizer._state._transactions.drain()
    optimizer._state.abandon()
    file = table_file(left, "ball")
    stride = (file.stat().st_size - 4096) // TABLE
    raw = bytearray(file.read_bytes())
    whole = bytes(raw)
    raw[4096 + 3 * stride : 4096 + 3 * stride + stride // 2] = bytes(stride // 2)
    file.write_bytes(raw)
    restart()
    optimizer, numbers, _ = reopened(left)
    optimizer.close()
    assert numbers == [1, 4, len(ROWS), 0]
    assert table_file(left, "ball").read_bytes() == whole


@pytest.mark.parametrize("switched", [False, True])
@every_damage
def test_a_change_of_whole_tables_is_never_guessed(tmp_path, monkeypatch, how, restart, switched):
    """A loss of power in the middle of `set_curvature`: one curvature or the other, of every row."""
    path = tmp_path / "run"
    optimizer = make(path)
    step(optimizer)
    step(optimizer)
    before = read(optimizer)

    class Lost(BaseException):
        pass

    def lose(*ignored):
        optimizer._state.abandon()
        raise Lost

    place = "dsa.state.replacement.StateDirectory.adopt" if switched else "dsa.state.replacement.begin_life"
    with monkeypatch.context() as patch:
        patch.setattr(place, lose)
        patch.setattr("dsa.state.replacement._unmake", lambda *ignored: None)
        with pytest.raises(Lost):
            optimizer.set_curvature(0.5)
    damage(path, how)
    restart()
    optimizer, numbers, _ = reopened(path, k=0.5 if switched else 1.0)
    with optimizer:
        assert numbers[:2] == [2, 2], "a change makes everything durable first"
        assert optimizer._state.tables["ball"].k == (0.5 if switched else 1.0)
        assert np.array_equal(read(optimizer), before) == (not switched)
        assert len(list(path.glob("*.dsa"))) == 1
