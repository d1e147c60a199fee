"""What goes wrong in a step in place is undone: no byte has changed, and the next step is as if nothing was.

The step goes over two tables; whatever is wrong in the second one undoes the first as well.
"""

import contextlib
import sys

import numpy as np
import pytest
import torch
from current_files import table_file

import dsa.optimizers.stepping
from dsa import DiskSparseRiemannianAdam, init
from dsa.backends import MemmapBackend, Zarr, system
from dsa.errors import CorruptRowError, DiskSpaceError, GradientError
from dsa.kernels.threads import _LIMIT
from dsa.state.journal import Journal
from dsa.state.write_back import WriteBack

ROWS, DIM = 1_500, 3
CURVATURES = {"left": 0.0, "right": 1.0}
TABLES = {"left": init.Normal(ROWS, DIM, std=0.01, seed=1), "right": init.Uniform(ROWS, DIM, -0.01, 0.01)}
LAST = ROWS - 1

WAYS = {
    "process": {"durability": "process"},
    "none": {"durability": "none"},
    "zarr": {"durability": "process", "backend": Zarr(shard_bytes=8192)},
    "zarr, none": {"durability": "none", "backend": Zarr(shard_bytes=8192)},
}

pytestmark = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def no_limit_is_left():
    """An exception at any line leaves this thread's limit of threads as it was inside a step."""
    yield
    _LIMIT.set(1)


def build(path, way, second_moment="coordinate"):
    optimizer = DiskSparseRiemannianAdam(
        TABLES, lr=0.05, k=CURVATURES, disk_dir=path, second_moment=second_moment, **WAYS[way]
    )
    assert optimizer._state.can_be_in_place(list(optimizer._state.tables.values()))
    return optimizer


def batch(number, count=1_100):
    """Rows of both tables, some twice, the last row never."""
    rng = np.random.default_rng(number)
    return {
        name: (rng.integers(0, LAST, count), rng.normal(size=(count, DIM)).astype(np.float32))
        for name in TABLES
    }


def everything():
    """All rows of both tables, once."""
    return {name: (np.arange(ROWS), np.ones((ROWS, DIM), np.float32)) for name in TABLES}


def content(path, optimizer):
    """The bytes of all records, the counts, and whether the journal is as after a whole step."""
    state = optimizer._state
    journal = state._transactions.journal
    counts = [state.global_step, state.is_settled, *(table.steps for table in state.tables.values())]
    if journal is not None:
        journal.sync()
        counts += [journal.open_entry() is None, journal._draft is None, journal._slot.last]
    return [_bytes(path, name, state.tables[name].backend) for name in TABLES], counts


def _bytes(path, name, backend):
    if isinstance(backend, MemmapBackend):
        return table_file(path, name).read_bytes()[system.PAGE :]
    return b"".join(shard.tobytes() for array in backend._all_arrays() for shard in array.shards)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def pair(tmp_path, way, threads):
    """Two optimizers that have taken the same steps; one is to meet a fault."""
    with build(tmp_path / "state", way) as optimizer, build(tmp_path / "plain", way) as plain:
        for each in (optimizer, plain):
            for number in range(3):
                each.step(batch(number))
        yield optimizer, plain


def require_undone(tmp_path, pair, updates, error, match):
    """A step fails twice, changes nothing, and the steps after it are those of the other optimizer."""
    optimizer, plain = pair
    before = content(tmp_path / "state", optimizer)
    for _ in range(2):
        with pytest.raises(error, match=match):
            optimizer.step(updates)
        assert content(tmp_path / "state", optimizer) == before
    for number in range(3, 6):
        optimizer.step(batch(number))
        plain.step(batch(number))
        assert content(tmp_path / "state", optimizer)[0] == content(tmp_path / "plain", plain)[0]
    assert optimizer.global_step == plain.global_step == 6


NOT_FINITE = "holds a value that float32 can't represent in row {} of the batch, which is row {} of the table"


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("position", [0, 700, LAST])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_gradient_that_is_not_finite(tmp_path, pair, name, position, value):
    updates = everything()
    rows = updates[name][0][::-1].copy()
    updates[name] = rows, updates[name][1]
    updates[name][1][position, DIM - 1] = value
    match = NOT_FINITE.format(position, rows[position])
    require_undone(tmp_path, pair, updates, GradientError, f"{name!r} {match}: nothing was changed")


@pytest.mark.parametrize("name", TABLES)
def test_a_sum_of_gradients_that_overflows(tmp_path, pair, name):
    rows, grad = everything()[name]
    grad[LAST] = 3e38
    updates = everything()
    updates[name] = np.append(rows, LAST), np.append(grad, grad[-1:], axis=0)
    match = f"summed gradient of row {LAST} of table {name!r} overflows float32: nothing was changed"
    require_undone(tmp_path, pair, updates, GradientError, match)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("row", [0, 800, LAST])
def test_an_update_that_overflows(tmp_path, pair, name, row):
    updates = everything()
    updates[name][1][row] = 3e38
    match = f"update of row {row} of table {name!r} overflows float32.*: nothing was changed"
    require_undone(tmp_path, pair, updates, GradientError, match)


@pytest.mark.parametrize(
    "damage", ["negative counter", "negative moment", "no number", "checksum", "torn stamp"]
)
@pytest.mark.parametrize("name", TABLES)
def test_a_record_that_is_damaged(tmp_path, pair, way, name, damage):
    """It lies behind all others, so that these have changed by then."""
    rows = np.array([LAST])
    for optimizer in pair:
        backend = optimizer._state.tables[name].backend
        records = backend.read(rows)
        records["w"], records["s"], records["t"] = 0.001, 2, 1
        if damage == "negative counter":
            records["t"] = -1
        elif damage == "negative moment":
            records["v"][0, 1] = -0.5
        elif damage == "no number":
            records["m"][0, 2] = np.nan
        elif damage == "torn stamp":
            records["s"] = -1
        backend.write(rows, records)
        if damage == "checksum":
            words = backend._open_table() if way in ("process", "none") else backend._arrays[0].shards[-1]
            words[LAST % len(words), 0] ^= 1 << 20
    require_undone(tmp_path, pair, everything(), CorruptRowError, f"row {LAST} of table {name!r}")


@pytest.mark.parametrize("second_moment", ["coordinate", "frame", "row"])
@pytest.mark.parametrize("field", ["w", "m", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_no_rule_takes_what_is_no_number_for_one(tmp_path, way, second_moment, field, value):
    """In either table, in any field: it is not overwritten by something that looks sound."""
    for name in TABLES:
        with build(tmp_path / name, way, second_moment) as optimizer:
            optimizer.step(everything())
            backend = optimizer._state.tables[name].backend
            records = backend.read(np.array([5]))
            records[field].reshape(-1)[-1] = value
            backend.write(np.array([5]), records)
            before = content(tmp_path / name, optimizer)
            with pytest.raises(CorruptRowError, match=f"row 5 of table {name!r}"):
                optimizer.step(everything())
            assert content(tmp_path / name, optimizer) == before


class _Raising:
    """Raises before the n-th line of the package that runs in a block, and again some lines later."""

    def __init__(self, at, again=0):
        self.at, self.again, self.lines = at, again, 0

    def __enter__(self):
        sys.settrace(self._enter)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def _enter(self, frame, event, argument):
        return self._line if "/dsa/" in frame.f_code.co_filename else None

    def _line(self, frame, event, argument):
        if event == "line":
            self.lines += 1
            if self.lines in (self.at, self.at + self.again):
                raise KeyboardInterrupt
        return self._line


@pytest.mark.parametrize("again", [0, 4, 11])
@pytest.mark.parametrize("refused", [False, True], ids=["a step", "a step that is refused"])
def test_interrupts_anywhere_and_in_the_undoing_too(tmp_path, monkeypatch, way, again, refused):
    """The next call finds a whole number of steps; what was interrupted counts or has changed nothing."""
    # It looks at files by the clock: a call would have other lines on a busy machine.
    monkeypatch.setattr(WriteBack, "glance", lambda *given: None)
    small = {name: (rows[:30], grad[:30]) for name, (rows, grad) in batch(1).items()}
    wrong = {name: (rows, grad.copy()) for name, (rows, grad) in small.items()}
    wrong["right"][1][-1] = np.nan
    with build(tmp_path / "state", way) as optimizer, build(tmp_path / "plain", way) as plain:
        for each in (optimizer, plain):
            each.step(small)
        updates = wrong if refused else small
        optimizer.flush()
        with contextlib.suppress(GradientError), _Raising(0) as counted:
            optimizer.step(updates)
        if not refused:
            plain.step(small)
        outcomes = set()
        # Of the many lines that bring shards together fewer than of those around the commit.
        last, stride = counted.lines - 60, 5 if way in ("process", "none") else 17
        for at in [*range(1, last, stride), *range(last, counted.lines + 80, 4)]:
            before = optimizer.global_step
            try:
                with _Raising(at, again):
                    optimizer.step(updates)
            except (KeyboardInterrupt, GradientError) as error:
                outcomes.add(type(error))
            optimizer.flush()
            taken = optimizer.global_step - before
            outcomes.add(taken)
            for _ in range(taken):
                plain.step(small)
            found = content(tmp_path / "state", optimizer)[0]
            assert found == content(tmp_path / "plain", plain)[0], f"interrupted at {at}"
        assert outcomes == ({0, KeyboardInterrupt, GradientError} if refused else {0, 1, KeyboardInterrupt})


def test_an_error_between_the_tables(tmp_path, pair, monkeypatch):
    """Of any kind, with the first table done."""
    update, calls = dsa.optimizers.stepping.update_in_place, []

    def fail_at_the_second(table, *arguments):
        calls.append(table.name)
        if len(calls) % 2 == 0:
            raise MemoryError("for a reason")
        return update(table, *arguments)

    optimizer, _ = pair
    before = content(tmp_path / "state", optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(dsa.optimizers.stepping, "update_in_place", fail_at_the_second)
        with pytest.raises(MemoryError, match="for a reason"):
            optimizer.step(everything())
    assert calls == ["left", "right"]
    assert content(tmp_path / "state", optimizer) == before
    updates = everything() | {"right": ([3], np.full((1, DIM), np.inf, np.float32))}
    require_undone(tmp_path, pair, updates, GradientError, NOT_FINITE.format(0, 3))


def test_an_interrupt_in_the_middle_of_an_undoing(tmp_path, pair, monkeypatch):
    """With one table put back and the other not yet: the next call goes on with it."""
    optimizer, _ = pair
    before = content(tmp_path / "state", optimizer)
    backend = type(optimizer._state.tables["left"].backend)
    restore, calls = backend.restore, []

    def interrupted(self, rows, images):
        calls.append(len(rows))
        if len(calls) % 2 == 0 and len(calls) < 7:
            raise KeyboardInterrupt
        restore(self, rows, images)

    updates = everything()
    updates["right"][1][LAST] = np.nan
    with monkeypatch.context() as patch:
        patch.setattr(backend, "restore", interrupted)
        for call in (lambda: optimizer.step(updates), optimizer.flush):
            with pytest.raises(KeyboardInterrupt):
                call()
        optimizer.read_rows([0], "left")
    assert calls == [ROWS] * 8
    assert content(tmp_path / "state", optimizer) == before


def test_a_journal_that_has_no_room_for_the_images(tmp_path, pair, way, monkeypatch):
    if WAYS[way]["durability"] == "none":
        pytest.skip("there is no journal")
    optimizer, plain = pair
    wide = {name: (np.arange(ROWS), np.ones((ROWS, DIM), np.float32)) for name in TABLES}
    journal = optimizer._state._transactions.journal
    before = content(tmp_path / "state", optimizer)

    def no_room(descriptor, size, directory):
        raise DiskSpaceError(size, 0, directory)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "_find_room", lambda self, length: None if length > 90_000 else 0)
        patch.setattr(system, "extend", no_room)
        for _ in range(2):
            with pytest.raises(DiskSpaceError, match="bytes are needed"):
                optimizer.step(wide)
            assert content(tmp_path / "state", optimizer) == before
    assert journal is optimizer._state._transactions.journal
    for each in (optimizer, plain):
        each.step(wide)
        each.step(batch(7))
    assert content(tmp_path / "state", optimizer)[0] == content(tmp_path / "plain", plain)[0]
