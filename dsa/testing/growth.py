"""The tests that every backend passes which can grow, see `dsa.backends.Growing`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from dsa.backends.base import GROWING, Growing, StateBackend
from dsa.schema import Records
from dsa.testing.hooks import BackendHooks, through_json
from dsa.testing.records import assert_records_equal, random_records

__all__ = ["GrowthTests"]


class GrowthTests(BackendHooks):
    """Tests of `BackendConformance`, skipped for a backend that is no `Growing`, or can't be so large."""

    def test_new_rows_are_fresh(self, backend: StateBackend) -> None:
        """Grown again and again, old rows are as they were, and new ones zero until they are written."""
        expected = _filled(backend)
        for more in (1, 2 + len(backend) // 3):
            self._grow(backend, len(backend) + more)
            fresh = np.zeros(more, backend.schema.dtype)
            expected = _joined(expected, fresh)
            assert len(backend) == len(expected)
            assert_records_equal(_everything(backend), expected, f"{more} rows more")
            rows = np.arange(len(backend) - more, len(backend), 2)
            expected[rows] = random_records(backend.schema, len(rows), more)
            backend.reserve(rows)
            backend.write(rows, expected[rows].copy())
            assert_records_equal(_everything(backend), expected, f"{more} rows more, some written")

    def test_room_changes_nothing(self, backend: StateBackend) -> None:
        """Room that is made ahead is not to be seen, and may be made again or for fewer rows."""
        expected, count, description = _filled(backend), len(backend), backend.describe()
        for rows in (2 * count, 2 * count, count + 1, count):
            self._make_room(backend, rows)
            assert len(backend) == count
            assert backend.describe() == description
            assert_records_equal(_everything(backend), expected)
        assert sum(len(records) for _, records in backend.scan(0, count)) == count

    def test_growth_is_taken_back(self, backend: StateBackend) -> None:
        """Rows that were adopted may go again, written or not, and are fresh when they come back."""
        expected, count, description = _filled(backend), len(backend), backend.describe()
        rows, fresh = np.arange(count, count + 5), np.zeros(5, backend.schema.dtype)
        for written in (False, True):
            self._grow(backend, count + 5)
            assert_records_equal(_everything(backend), _joined(expected, fresh))
            if written:
                backend.reserve(rows)
                backend.write(rows, random_records(backend.schema, 5, seed=3))
                backend.flush()
            assert isinstance(backend, Growing)
            backend.adopt_rows(count)
            assert len(backend) == count
            assert backend.describe() == description
            assert_records_equal(_everything(backend), expected)
        self._grow(backend, count + 5)
        assert_records_equal(_everything(backend), _joined(expected, fresh))

    def test_reads_and_scans_go_on_beside_a_growth(self, backend: StateBackend) -> None:
        """What was read stays, and a scan of the rows that there were ends where it was to."""
        expected, count = _filled(backend), len(backend)
        before, scan = _everything(backend), backend.scan(0, count)
        blocks = [next(scan)[1]]
        self._grow(backend, 2 * count)
        blocks += [records for _, records in scan]
        assert_records_equal(before, expected, "read before")
        assert_records_equal(_joined(*blocks), expected, "scanned before and after")

    def test_a_grown_table_is_opened_again(self, backend: StateBackend, path: Path) -> None:
        """The description names the rows of now."""
        self._grow(backend, 2 * len(backend))
        expected = _filled(backend)
        description = through_json(backend.describe())
        backend.close()
        assert description["rows"] == len(expected)
        again = self.reopen(path, description)
        if again is None:
            pytest.skip("the backend keeps nothing after close")
        with closing(again):
            assert again.describe() == description
            assert_records_equal(_everything(again), expected)
            self._grow(again, len(expected) + 1)
            fresh = np.zeros(1, again.schema.dtype)
            assert_records_equal(_everything(again), _joined(expected, fresh))

    def test_what_an_interrupted_growth_has_left_is_nobodys(self, backend: StateBackend, path: Path) -> None:
        """Rows that the description does not name are fresh when the table grows again."""
        expected, older, count = _filled(backend), through_json(backend.describe()), len(backend)
        self._grow(backend, 2 * count)
        backend.write(np.arange(2 * count), random_records(backend.schema, 2 * count, 7))
        backend.write(np.arange(count), expected.copy())
        backend.close()
        again = self.reopen(path, {**older, GROWING: True})
        if again is None:
            pytest.skip("the backend keeps nothing after close")
        with closing(again):
            assert_records_equal(_everything(again), expected, "opened by the older description")
            for rows in (count + 1, 2 * count + 1):
                self._grow(again, rows)
                fresh = np.zeros(rows - count, again.schema.dtype)
                assert_records_equal(_everything(again), _joined(expected, fresh), f"{rows} rows")

    def _make_room(self, backend: StateBackend, rows: int) -> None:
        if not isinstance(backend, Growing):
            pytest.skip("the backend can't grow")
        if not backend.make_room(rows):
            pytest.skip("the backend can't be so large as it is made")

    def _grow(self, backend: StateBackend, rows: int) -> None:
        self._make_room(backend, rows)
        assert isinstance(backend, Growing)
        backend.adopt_rows(rows)


def _everything(backend: StateBackend) -> Records:
    return backend.read(np.arange(len(backend)))


def _filled(backend: StateBackend) -> Records:
    records = random_records(backend.schema, len(backend), seed=1)
    rows = np.arange(len(backend))
    backend.reserve(rows)
    backend.write(rows, records.copy())
    return records


def _joined(*parts: Records) -> Records:
    dtype = parts[0].dtype
    return np.frombuffer(bytearray(b"".join(part.tobytes() for part in parts)), dtype)
