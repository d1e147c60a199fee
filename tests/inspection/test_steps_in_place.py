"""What is read beside a step that changes records where they are, at moments that gates hold open."""

import sys
import threading
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
from small_states import TABLES, as_left, batch, build, journal, train

import dsa.optimizers.stepping
import dsa.state.journal
import dsa.state.transactions
from dsa import open_state, verify
from dsa.backends import MemmapBackend, Zarr, ZarrBackend
from dsa.errors import GradientError
from dsa.state.journal_format import SLOTS_AT, read_slot
from dsa.state.state_directory import StateDirectory

ROWS = np.arange(300)
READ = {MemmapBackend: MemmapBackend.read, ZarrBackend: ZarrBackend.read}
KINDS = {"memmap": (MemmapBackend, {}), "zarr": (ZarrBackend, {"backend": Zarr(shard_bytes=1024)})}
DEADLINE = 20


@pytest.fixture(params=KINDS)
def kind(request):
    """A class of backends, and the options that tables in it are made with."""
    return KINDS[request.param]


def refused():
    """All rows of all tables; the last one of the last table can't be used: the others are undone."""
    updates = {
        name: (np.arange(source.rows), np.ones((source.rows, source.dim), np.float32))
        for name, source in TABLES.items()
    }
    updates["flat"][1][-1] = np.nan
    return updates


def as_recovered(path, target, **options):
    """Return the records of every table after recovery, from a copy."""
    with build(as_left(path, target), resume=True, **options) as optimizer:
        return {
            name: table.backend.read(np.arange(len(table))) for name, table in optimizer._state.tables.items()
        }


@contextmanager
def reading_once(monkeypatch, backend, function):
    """Let the next read of a view return what a function does, which is given how to read."""

    def read(self, rows, out=None):
        monkeypatch.setattr(backend, "read", READ[backend])
        records = function(lambda: READ[backend](self, rows))
        if out is None:
            return records
        out[:] = records
        return out

    monkeypatch.setattr(backend, "read", read)
    yield
    assert backend.read is READ[backend], "nothing was read"


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_step_that_ends_while_its_rows_are_read(tmp_path, monkeypatch, kind, before):
    """The first step of a life, and later ones: what was read in the middle of it is read again."""
    with build(tmp_path / "state", **kind[1]) as optimizer:
        train(optimizer, before)
        commit, seen = StateDirectory.commit, []

        def step(read):
            def at_the_end(state, effects=()):
                seen.append(read())
                commit(state, effects)

            monkeypatch.setattr(StateDirectory, "commit", at_the_end)
            # A part of the batch alone, or a mixture would be the new state.
            optimizer.step(batch(before))
            seen[0]["w"][: len(ROWS) // 2] = old["w"][: len(ROWS) // 2]
            return seen[0]

        with open_state(tmp_path / "state") as state:
            old = state["entity"].read(ROWS)
            with reading_once(monkeypatch, kind[0], step):
                found = state["entity"].read(ROWS)
            assert found.tobytes() == state["entity"].read(ROWS).tobytes()
            assert found.tobytes() != old.tobytes()
            assert found.tobytes() != seen[0].tobytes()


@pytest.mark.parametrize("moment", ["restored", "told", "over"])
def test_a_step_that_is_undone_while_its_rows_are_read(tmp_path, monkeypatch, kind, moment):
    """They are read half-way through it; the reader looks at the journal at some moment of the undoing."""
    reached, go_on = threading.Event(), threading.Event()
    half_way, seen = threading.Event(), threading.Event()
    update, forget = dsa.optimizers.stepping.update_in_place, dsa.state.journal.Journal._forget_head
    write_slot = dsa.state.journal.write_slot

    def update_and_wait(table, *arguments):
        report = update(table, *arguments)
        if report.bad >= 0:
            half_way.set()
            assert seen.wait(DEADLINE)
        return report

    def wait_at(name, function):
        def waiting(*arguments):
            if moment == name and seen.is_set():
                reached.set()
                assert go_on.wait(DEADLINE)
            return function(*arguments)

        return waiting

    with build(tmp_path / "state", **kind[1]) as optimizer:
        train(optimizer, 3)
        monkeypatch.setattr(dsa.optimizers.stepping, "update_in_place", update_and_wait)
        monkeypatch.setattr(dsa.state.journal, "write_slot", wait_at("restored", write_slot))
        monkeypatch.setattr(dsa.state.journal.Journal, "_forget_head", wait_at("told", forget))
        errors = []

        def take():
            try:
                optimizer.step(refused())
            except GradientError as error:
                errors.append(error)

        thread = threading.Thread(target=take)

        def read_half_way(read):
            thread.start()
            assert half_way.wait(DEADLINE)
            records = read()
            seen.set()
            if moment == "over":
                thread.join(DEADLINE)
            else:
                assert reached.wait(DEADLINE)
            return records

        with open_state(tmp_path / "state") as state:
            old = state["entity"].read(ROWS)
            with reading_once(monkeypatch, kind[0], read_half_way):
                found = state["entity"].read(ROWS)
            go_on.set()
            thread.join(DEADLINE)
            assert len(errors) == 1
            assert found.tobytes() == old.tobytes()
            assert state["entity"].read(ROWS).tobytes() == old.tobytes()
            assert state.global_step == 3


@pytest.mark.parametrize("before", [0, 3])
def test_what_a_killed_process_has_left_half_way(tmp_path, monkeypatch, kind, before):
    """Read as recovery will read it: the step that was under way has not happened."""
    with build(tmp_path / "state", **kind[1]) as optimizer:
        train(optimizer, before)
        stored = {
            name: READ[kind[0]](table.backend, np.arange(len(table)))
            for name, table in optimizer._state.tables.items()
        }
        with open_state(tmp_path / "state") as state:
            whole = {name: state[name].read(np.arange(source.rows)) for name, source in TABLES.items()}
        take_back = StateDirectory.undo

        def copy_first(state):
            if not (tmp_path / "left").exists():
                as_left(tmp_path / "state", tmp_path / "left")
            take_back(state)

        monkeypatch.setattr(StateDirectory, "undo", copy_first)
        with pytest.raises(GradientError, match="float32 can't represent"):
            optimizer.step(refused())
        monkeypatch.undo()
    with open_state(tmp_path / "left") as state:
        assert state.global_step == before
        for name, records in whole.items():
            rows = np.arange(len(records))
            assert state[name].read(rows).tobytes() == records.tobytes()
            assert state[name].read(rows[5:9]).tobytes() == records[5:9].tobytes()
            blocks = [block for _, block in state[name].content().blocks()]
            assert np.concatenate(blocks).tobytes() == records.tobytes()
            raw = np.asarray(state[name]["t"])
            assert (raw != records["t"]).any(), "the files themselves hold a part of the step"
    assert verify(tmp_path / "left").ok
    for name, records in as_recovered(tmp_path / "left", tmp_path / "again", **kind[1]).items():
        assert records.tobytes() == stored[name].tobytes()


class _CopyAtLines:
    """Copies a state at every line of some modules that is run for the first time."""

    def __init__(self, source, target):
        self.source, self.target, self.copies = source, target, {}

    def __enter__(self):
        sys.settrace(self._enter)
        return self.copies

    def __exit__(self, *error):
        sys.settrace(None)

    def _enter(self, frame, event, argument):
        return self._line if frame.f_code.co_filename in LOOKED_INTO else None

    def _line(self, frame, event, argument):
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        if event == "line" and place not in self.copies:
            sys.settrace(None)
            self.copies[place] = as_left(self.source, self.target / str(len(self.copies)))
            sys.settrace(self._enter)
        return self._line


LOOKED_INTO = {module.__file__ for module in (dsa.state.journal, dsa.state.transactions)}


@pytest.mark.parametrize("refusing", [False, True])
@pytest.mark.parametrize("before", [0, 3])
def test_a_view_of_what_a_process_has_left_at_any_line(tmp_path, kind, before, refusing):
    """It stands where recovery will make the state stand, before the step or after it."""
    with build(tmp_path / "state", **kind[1]) as optimizer:
        train(optimizer, before)
        told = pytest.raises(GradientError, match="float32") if refusing else nullcontext()
        with told, _CopyAtLines(tmp_path / "state", tmp_path / "left") as copies:
            optimizer.step(refused() if refusing else batch(before))
    steps = set()
    for place, path in copies.items():
        with open_state(path) as state:
            steps.add(state.global_step)
            seen = {name: state[name].read(np.arange(source.rows)) for name, source in TABLES.items()}
            seen_step = state.global_step
        with build(path, resume=True, **kind[1]) as again, open_state(path) as state:
            assert again.global_step == seen_step, place
            for name, records in seen.items():
                recovered = state[name].read(np.arange(len(records)))
                assert records.tobytes() == recovered.tobytes(), f"{place}: table {name}"
    assert len(copies) > 40
    assert steps == ({before} if refusing else {before, before + 1})


def test_a_view_after_damage_to_the_header(tmp_path):
    """The older half of the header knows of no step that was committed in place; its commit record does."""
    with build(tmp_path / "state") as optimizer:
        train(optimizer, 4)
        as_left(tmp_path / "state", tmp_path / "left")
        with open_state(tmp_path / "state") as state:
            whole = state["entity"].read(ROWS)
    file = journal(tmp_path / "left")
    data = bytearray(file.read_bytes())
    newest = max(SLOTS_AT, key=lambda at: read_slot(data, at))
    data[newest + 20] ^= 1
    file.write_bytes(data)
    with open_state(tmp_path / "left") as state:
        assert state.global_step == 4
        assert state["entity"].read(ROWS).tobytes() == whole.tobytes()
    with build(tmp_path / "left", resume=True) as optimizer, open_state(tmp_path / "left") as state:
        assert optimizer.global_step == 4
        assert state["entity"].read(ROWS).tobytes() == whole.tobytes()


def test_the_gates_are_those_of_a_step_in_place(tmp_path, kind):
    """Were steps staged again, the tests above would hold nothing open."""
    with build(tmp_path, **kind[1]) as optimizer:
        assert optimizer._state.can_be_in_place(list(optimizer._state.tables.values()))
