"""The tests that every `StateBackend` passes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from dsa.backends.base import StateBackend
from dsa.backends.memory import MemoryBackend
from dsa.schema import Records, Rows, adam_schema, has_stamp
from dsa.testing.growth import GrowthTests
from dsa.testing.hooks import through_json
from dsa.testing.records import CASES, Case, assert_records_equal, random_records, selections

__all__ = ["BackendConformance"]

_ROUNDS = 40


class BackendConformance(GrowthTests):
    """Subclass this in a test file, with a name that starts with ``Test``, and override the hooks.

    Every test takes the fixture `backend`, a new backend of one of `CASES` at `path`; override the fixture
    `case` to choose other sizes.

    Example:
        >>> from dsa.backends.memory import MemoryBackend
        >>> class TestMemoryBackend(BackendConformance):
        ...     def create(self, path, rows, schema):
        ...         return MemoryBackend(rows, schema)
        >>> suite = TestMemoryBackend()
        >>> suite.test_fresh_records_are_zero(suite.create(None, 5, adam_schema(dim=3)))
    """

    @pytest.fixture(params=list(CASES.values()), ids=list(CASES))
    def case(self, request: pytest.FixtureRequest) -> Case:
        """The size of the table."""
        case: Case = request.param
        return case

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        """Where the backend is made."""
        return tmp_path / "table"

    @pytest.fixture
    def backend(self, path: Path, case: Case) -> Iterator[StateBackend]:
        """A new backend, closed after the test."""
        with closing(self.create(path, case.rows, case.schema)) as backend:
            yield backend

    def test_knows_its_size(self, backend: StateBackend, case: Case) -> None:
        """The length and the schema are those it was made with."""
        assert len(backend) == case.rows
        assert backend.schema == case.schema

    def test_fresh_records_are_zero(self, backend: StateBackend) -> None:
        """A record that was never written has zero bytes in every field."""
        assert_records_equal(_everything(backend), np.zeros(len(backend), backend.schema.dtype))

    def test_read_after_write(self, backend: StateBackend) -> None:
        """What was written is read, bit for bit: one row, first, last, some, all."""
        for seed, (name, rows) in enumerate(selections(len(backend)).items()):
            records = random_records(backend.schema, len(rows), seed)
            backend.write(rows, records.copy())
            assert_records_equal(backend.read(rows), records, name)

    def test_other_rows_are_untouched(self, backend: StateBackend) -> None:
        """A write changes the rows it names and no other."""
        model = _fill(backend)
        for seed, (name, rows) in enumerate(selections(len(backend)).items(), start=1):
            _write_both(backend, model, rows, seed)
            assert_records_equal(_everything(backend), _everything(model), f"all rows after writing {name}")

    def test_batches_overlap(self, backend: StateBackend) -> None:
        """A read that names written and unwritten rows returns each row's last value."""
        model = MemoryBackend(len(backend), backend.schema)
        for seed, rows in enumerate(selections(len(backend)).values()):
            _write_both(backend, model, rows, seed)
            for name, others in selections(len(backend)).items():
                assert_records_equal(backend.read(others), model.read(others), name)

    def test_empty_batch(self, backend: StateBackend) -> None:
        """No rows are a batch like any other."""
        model = _fill(backend)
        nothing = np.empty(0, np.int64)
        backend.hint(nothing)
        backend.write(nothing, np.zeros(0, backend.schema.dtype))
        assert_records_equal(backend.read(nothing), np.zeros(0, backend.schema.dtype))
        assert_records_equal(_everything(backend), _everything(model))

    def test_read_returns_owned_memory(self, backend: StateBackend) -> None:
        """The caller may change what it was given; neither the store nor another read sees it."""
        model = _fill(backend)
        for name, rows in selections(len(backend)).items():
            first, second = backend.read(rows), backend.read(rows)
            assert first.flags.writeable, name
            assert first.flags.c_contiguous, name
            assert not np.shares_memory(first, second), name
            _scribble(first)
            assert_records_equal(second, model.read(rows), f"an earlier read of {name}")
            assert_records_equal(backend.read(rows), model.read(rows), f"a later read of {name}")

    def test_write_does_not_change_earlier_reads(self, backend: StateBackend) -> None:
        """What was read stays as it was read."""
        before = _everything(backend)
        _fill(backend)
        assert_records_equal(before, np.zeros(len(backend), backend.schema.dtype))

    def test_scan_covers_each_row_once(self, backend: StateBackend) -> None:
        """A range is yielded in order, without gaps or repetitions, and agrees with read."""
        model = _fill(backend)
        count = len(backend)
        edges = sorted({0, 1, count // 3, count - count // 5, count})
        for start, stop in itertools.combinations(edges, 2):
            expected = model.read(np.arange(start, stop))
            assert_records_equal(_scanned(backend, start, stop), expected, f"the range [{start}, {stop})")

    def test_scan_of_an_empty_range(self, backend: StateBackend) -> None:
        """Nothing is yielded, wherever the range lies."""
        for row in {0, len(backend) // 2, len(backend)}:
            assert sum(len(records) for _, records in backend.scan(row, row)) == 0

    def test_scan_returns_owned_memory(self, backend: StateBackend) -> None:
        """Blocks belong to the caller: changing one changes nothing else."""
        model = _fill(backend)
        for _, records in backend.scan(0, len(backend)):
            assert records.flags.writeable
            _scribble(records)
        assert_records_equal(_everything(backend), _everything(model))

    def test_scan_sees_writes_ahead_of_it(self, backend: StateBackend) -> None:
        """Rows written during a scan show in the blocks not yet yielded, and not in those that were."""
        model = _fill(backend)
        count = len(backend)
        scan = backend.scan(0, count)
        _write_both(backend, model, np.arange(count), seed=1)
        yielded: list[tuple[int, Records, Records]] = []
        done = 0
        while done < count:
            first, records = next(scan)
            assert first == done
            done += len(records)
            yielded.append((first, records, model.read(np.arange(first, done))))
            _write_both(backend, model, np.arange(max(0, done - 1), count), seed=done)
        for first, records, expected in yielded:
            assert_records_equal(records, expected, f"the block at row {first}")

    def test_abandoned_scan(self, backend: StateBackend, path: Path) -> None:
        """A scan that is not finished holds nothing that `close` needs."""
        model = _fill(backend)
        scan = backend.scan(0, len(backend))
        _, records = next(scan)
        backend.close()
        assert_records_equal(records, model.read(np.arange(len(records))))

    def test_hint_changes_nothing(self, backend: StateBackend) -> None:
        """Hints of any batch, at any time, repeated or never followed by a read."""
        model = _fill(backend)
        for seed, (name, rows) in enumerate(selections(len(backend)).items(), start=1):
            backend.hint(rows)
            backend.hint(rows)
            _write_both(backend, model, rows, seed)
            backend.hint(rows)
            assert_records_equal(_everything(backend), _everything(model), f"all rows after a hint of {name}")

    def test_reserve_changes_nothing(self, backend: StateBackend) -> None:
        """Rows may be reserved before they are written, afterwards, again, and none at all."""
        model = MemoryBackend(len(backend), backend.schema)
        backend.reserve(np.empty(0, np.int64))
        for seed, (name, rows) in enumerate(selections(len(backend)).items()):
            backend.reserve(rows)
            assert_records_equal(_everything(backend), _everything(model), f"all rows, {name} reserved")
            _write_both(backend, model, rows, seed)
            backend.reserve(rows)
            assert_records_equal(_everything(backend), _everything(model), f"all rows, {name} written")

    def test_damage_is_marked(self, backend: StateBackend, path: Path) -> None:
        """A record that the files no longer hold as it was written has a negative stamp; writing heals it."""
        if not has_stamp(backend.schema):
            pytest.skip("the records have no stamp")
        count = len(backend)
        rows, expected = np.arange(count), random_records(backend.schema, count, seed=1)
        expected["s"] &= 0x7FFFFFFF
        backend.write(rows, expected.copy())
        backend.close()
        description = through_json(backend.describe())
        if not self.damage(path, description, count // 2):
            pytest.skip("the backend can't tell, or the suite was given no damage")
        with closing(self._reopened(backend, path)) as again:
            for found in (again.read(rows), _scanned(again, 0, count)):
                marked = found["s"] < 0
                assert marked[count // 2]
                assert_records_equal(found[~marked], expected[~marked], "the rows that are not marked")
            torn = np.flatnonzero(marked)
            again.write(torn, expected[torn])
            assert_records_equal(_everything(again), expected, "all rows, written again")

    def test_flush_changes_nothing(self, backend: StateBackend) -> None:
        """Flushing fresh, written and unchanged records leaves them as they are."""
        backend.flush()
        model = _fill(backend)
        backend.flush()
        backend.flush()
        assert_records_equal(_everything(backend), _everything(model))

    def test_close_twice(self, backend: StateBackend) -> None:
        """The second close is silent, and arrays read before the first stay usable."""
        model = _fill(backend)
        records = _everything(backend)
        backend.close()
        backend.close()
        assert_records_equal(records, _everything(model))

    def test_describe_is_json(self, backend: StateBackend) -> None:
        """The description survives a passage through JSON and does not depend on the content."""
        description = backend.describe()
        assert through_json(description) == description
        _fill(backend)
        backend.flush()
        assert backend.describe() == description

    def test_reopen(self, backend: StateBackend, path: Path) -> None:
        """Close keeps everything: records, length, schema and description."""
        model = _fill(backend)
        description = backend.describe()
        with closing(self._reopened(backend, path)) as again:
            assert len(again) == len(backend)
            assert again.schema == backend.schema
            assert again.describe() == description
            assert_records_equal(_everything(again), _everything(model))

    def test_reopened_backend_is_whole(self, backend: StateBackend, path: Path) -> None:
        """After reopening, rows never written are still zero and all can be written, twice over."""
        model = MemoryBackend(len(backend), backend.schema)
        for seed, rows in enumerate(selections(len(backend)).values()):
            backend = self._reopened(backend, path)
            with closing(backend):
                assert_records_equal(_everything(backend), _everything(model))
                _write_both(backend, model, rows, seed)
                assert_records_equal(_everything(backend), _everything(model))

    def test_raw_bytes(self, backend: StateBackend, path: Path) -> None:
        """The files hold the records after a flush, and after a close without one."""
        model = MemoryBackend(len(backend), backend.schema)
        backend.flush()
        assert_records_equal(self._raw(backend, path), _everything(model), "the files of a fresh table")
        for seed, (name, rows) in enumerate(selections(len(backend)).items()):
            _write_both(backend, model, rows, seed)
            backend.flush()
            assert_records_equal(self._raw(backend, path), _everything(model), f"the files with {name}")
        _write_both(backend, model, np.arange(len(backend)), seed=99)
        backend.close()
        assert_records_equal(self._raw(backend, path), _everything(model), "the files after close")

    def test_reads_beside_a_write(self, path: Path) -> None:
        """Rows that a write does not name can be read while it runs, though they share its pages."""
        with closing(self.create(path, 1_009, adam_schema(5))) as backend:
            model = _fill(backend)
            written, still = np.arange(0, 1_009, 2), np.arange(1, 1_009, 2)
            batches = [random_records(backend.schema, len(written), seed) for seed in range(_ROUNDS)]
            expected = model.read(still)
            gate = threading.Barrier(4, timeout=60)
            with ThreadPoolExecutor(4) as pool:
                jobs = [pool.submit(_read_often, backend, still, expected, gate) for _ in range(3)]
                jobs.append(pool.submit(_write_often, backend, written, batches, gate))
                for job in jobs:
                    job.result()
            model.write(written, random_records(backend.schema, len(written), _ROUNDS - 1))
            assert_records_equal(_everything(backend), _everything(model))

    def _reopened(self, backend: StateBackend, path: Path) -> StateBackend:
        description = through_json(backend.describe())
        backend.close()
        again = self.reopen(path, description)
        if again is None:
            pytest.skip("the backend keeps nothing after close")
        return again

    def _raw(self, backend: StateBackend, path: Path) -> Records:
        records = self.read_raw(path, through_json(backend.describe()))
        if records is None:
            pytest.skip("the suite was given no read_raw")
        return records


def _everything(backend: StateBackend) -> Records:
    return backend.read(np.arange(len(backend)))


def _scanned(backend: StateBackend, start: int, stop: int) -> Records:
    """Return the records of a scan, having checked that its blocks are consecutive."""
    everything = np.zeros(stop - start, backend.schema.dtype)
    done = start
    for first, records in backend.scan(start, stop):
        assert first == done
        assert records.dtype == backend.schema.dtype
        done += len(records)
        everything[first - start : done - start] = records
    assert done == stop
    return everything


def _write_both(backend: StateBackend, model: StateBackend, rows: Rows, seed: int) -> None:
    records = random_records(backend.schema, len(rows), seed)
    model.write(rows, records)
    backend.write(rows, records)


def _fill(backend: StateBackend) -> MemoryBackend:
    """Write every row and return a model that holds the same."""
    model = MemoryBackend(len(backend), backend.schema)
    _write_both(backend, model, np.arange(len(backend)), seed=12_345)
    return model


def _scribble(records: Records) -> None:
    records.view(np.uint8)[...] ^= 0xFF


def _read_often(backend: StateBackend, rows: Rows, expected: Records, gate: threading.Barrier) -> None:
    gate.wait()
    for _ in range(_ROUNDS):
        assert_records_equal(backend.read(rows), expected, "rows that no write names")


def _write_often(backend: StateBackend, rows: Rows, batches: list[Records], gate: threading.Barrier) -> None:
    gate.wait()
    for records in batches:
        backend.write(rows, records)
