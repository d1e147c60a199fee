"""The conformance suite finds the faults it is there to find, and passes a backend without any."""

import inspect
import threading

import numpy as np
import pytest

from dsa.schema import TORN, adam_schema
from dsa.testing import BackendConformance, Case

ROWS = 4_099
SCHEMA = adam_schema(3)


class Faulty:
    """A backend that keeps its records in a dict of files, so to say, and has one fault in each subclass."""

    files: dict = {}  # noqa: RUF012 - one process, as one disk

    def __init__(self, path, rows, schema, records=None):
        self.path, self.rows, self.schema = path, rows, schema
        self.records = np.zeros(rows, schema.dtype) if records is None else records
        self.keep()

    def keep(self):
        self.files[self.path] = self.records

    def __len__(self):
        return self.rows

    def read(self, rows):
        return self.records[rows]

    def write(self, rows, records):
        self.records[rows] = records

    def scan(self, start, stop):
        for first in range(start, stop, 1000):
            yield first, self.records[first : min(first + 1000, stop)].copy()

    def hint(self, rows):
        pass

    def reserve(self, rows):
        """Memory is not a disk."""

    @classmethod
    def damage(cls, path, row):
        """Stands for a checksum that finds a changed bit: the record is marked."""
        cls.files[path]["s"][row] = TORN

    def flush(self):
        pass

    def close(self):
        pass

    def describe(self):
        return {"rows": self.rows, "schema": self.schema.to_json()}

    def make_room(self, rows):
        return True

    def adopt_rows(self, rows):
        grown = np.zeros(rows, self.schema.dtype)
        grown[: min(rows, self.rows)] = self.records[: min(rows, self.rows)]
        self.rows, self.records = rows, grown
        self.keep()


class FreshIsNotZero(Faulty):
    def __init__(self, path, rows, schema, records=None):
        super().__init__(path, rows, schema, records)
        if records is None:
            self.records["s"] = -1


class CountsOneMore(Faulty):
    def __len__(self):
        return self.rows + 1


class DropsTheLastRow(Faulty):
    def write(self, rows, records):
        super().write(rows[rows < self.rows - 1], records[rows < self.rows - 1])


class WritesTheNextRowToo(Faulty):
    def write(self, rows, records):
        super().write(rows, records)
        if len(rows) == 1:
            self.records[(rows + 1) % self.rows] = records


class QuietsNaNs(Faulty):
    def write(self, rows, records):
        super().write(rows, records)
        self.records["m"] = np.nan_to_num(self.records["m"])


class RefusesEmptyBatches(Faulty):
    def read(self, rows):
        assert rows[0] >= 0
        return super().read(rows)


class ReturnsViews(Faulty):
    def read(self, rows):
        whole = len(rows) == self.rows
        return self.records if whole else super().read(rows)


class SharesOneBuffer(Faulty):
    def read(self, rows):
        if not hasattr(self, "buffer"):
            self.buffer = np.zeros(self.rows, self.schema.dtype)
        return np.take(self.records, rows, out=self.buffer[: len(rows)], mode="clip")


class ReturnsReadOnly(Faulty):
    def read(self, rows):
        records = super().read(rows)
        records.flags.writeable = False
        return records


class ScansOneRowShort(Faulty):
    def scan(self, start, stop):
        return super().scan(start, stop - 1)


class ScansAtLeastOneRow(Faulty):
    def scan(self, start, stop):
        return super().scan(start, max(stop, start + 1))


class ScansUntilExhausted(Faulty):
    """What an exported pointer does to a mapping."""

    scans = 0

    def scan(self, start, stop):
        self.scans += 1
        yield from super().scan(start, stop)
        self.scans -= 1

    def close(self):
        if self.scans:
            raise BufferError("a scan is under way")


class ScansABlockTwice(Faulty):
    def scan(self, start, stop):
        for first, records in super().scan(start, stop):
            yield first, records
            yield first, records


class ScansViews(Faulty):
    def scan(self, start, stop):
        yield start, self.records[start:stop]


class ScansASnapshot(Faulty):
    def scan(self, start, stop):
        return iter(list(super().scan(start, stop)))


class ScansBackwards(Faulty):
    def scan(self, start, stop):
        return reversed(list(super().scan(start, stop)))


class HintsZero(Faulty):
    def hint(self, rows):
        self.records["t"][rows] = 0


class ReservesZeros(Faulty):
    def reserve(self, rows):
        self.records[rows] = np.zeros(1, self.schema.dtype)


class HidesDamage(Faulty):
    @classmethod
    def damage(cls, path, row):
        cls.files[path]["w"][row] += 1


class MarksOneAndHarmsAnother(Faulty):
    @classmethod
    def damage(cls, path, row):
        super().damage(path, row)
        cls.files[path]["w"][row - 1] += 1


class FlushForgets(Faulty):
    def flush(self):
        self.records["v"] = 0


class ClosesOnce(Faulty):
    def close(self):
        del self.files[self.path]


class DescribesInNumpy(Faulty):
    def describe(self):
        return super().describe() | {"rows": np.int64(self.rows)}


class DescribesItsContent(Faulty):
    def describe(self):
        return super().describe() | {"used": int(np.count_nonzero(self.records["s"]))}


class DescribesItsIdentity(Faulty):
    def describe(self):
        return super().describe() | {"id": id(self)}


class KeepsNothing(Faulty):
    def keep(self):
        self.files[self.path] = self.records.copy()


class ReopensReadOnly(Faulty):
    def __init__(self, path, rows, schema, records=None):
        super().__init__(path, rows, schema, records)
        self.writable = records is None

    def write(self, rows, records):
        if self.writable:
            super().write(rows, records)


class SwapsFieldsBothWays(Faulty):
    def write(self, rows, records):
        super().write(rows, self.swapped(records))

    def read(self, rows):
        return self.swapped(super().read(rows))

    def scan(self, start, stop):
        return ((first, self.swapped(records)) for first, records in super().scan(start, stop))

    def swapped(self, records):
        changed = records.copy()
        changed["m"], changed["v"] = records["v"], records["m"]
        return changed


class GrowsByCopies(Faulty):
    def adopt_rows(self, rows):
        former = self.records
        super().adopt_rows(rows)
        self.records[len(former) :] = np.resize(former, rows)[len(former) :]


class ShowsItsRoom(Faulty):
    def make_room(self, rows):
        self.adopt_rows(max(rows, self.rows))
        return True


class KeepsWhatWasTakenBack(Faulty):
    left = None

    def adopt_rows(self, rows):
        former = self.records
        super().adopt_rows(rows)
        if rows < len(former):
            self.left = former[rows:]
        elif self.left is not None:
            self.records[-len(self.left) :] = self.left


class ScansNewRowsToo(Faulty):
    def scan(self, start, stop):
        first = start
        while first < max(stop, self.rows):
            yield first, self.records[first : first + 1000].copy()
            first += 1000


class DescribesFormerRows(Faulty):
    former = None

    def adopt_rows(self, rows):
        self.former = self.former or self.rows
        super().adopt_rows(rows)

    def describe(self):
        return {**super().describe(), "rows": self.former or self.rows}


class FindsWhatIsNobodys(Faulty):
    def adopt_rows(self, rows):
        super().adopt_rows(rows)
        self.records[ROWS:]["s"] = 7


class RewritesEverything(Faulty):
    """Replaces all records for a few, and is seen doing it: the first such write waits for a read."""

    seen = None

    def read(self, rows):
        records = super().read(rows)
        if self.seen is not None:
            self.seen.set()
        return records

    def write(self, rows, records):
        if len(rows) == self.rows or self.seen is not None:
            super().write(rows, records)
            return
        everything = self.records.copy()
        everything[rows] = records
        self.records[:] = 0
        self.seen = threading.Event()
        assert self.seen.wait(timeout=60)
        self.records[:] = everything


class Suite(BackendConformance):
    """The suite over one of the classes above; not collected, its tests are called below."""

    def __init__(self, faulty):
        self.faulty = faulty

    def create(self, path, rows, schema):
        return self.faulty(path, rows, schema)

    def reopen(self, path, description):
        rows = description["rows"]
        return self.faulty(path, rows, SCHEMA, self.faulty.files[path][:rows].copy())

    def read_raw(self, path, description):
        return self.faulty.files[path]

    def damage(self, path, description, row):
        self.faulty.damage(path, row)
        return True


FAULTS = [
    (CountsOneMore, "test_knows_its_size"),
    (FreshIsNotZero, "test_fresh_records_are_zero"),
    (DropsTheLastRow, "test_read_after_write"),
    (WritesTheNextRowToo, "test_other_rows_are_untouched"),
    (QuietsNaNs, "test_batches_overlap"),
    (RefusesEmptyBatches, "test_empty_batch"),
    (ReturnsViews, "test_read_returns_owned_memory"),
    (SharesOneBuffer, "test_read_returns_owned_memory"),
    (ReturnsReadOnly, "test_read_returns_owned_memory"),
    (ReturnsViews, "test_write_does_not_change_earlier_reads"),
    (ScansOneRowShort, "test_scan_covers_each_row_once"),
    (ScansAtLeastOneRow, "test_scan_of_an_empty_range"),
    (ScansUntilExhausted, "test_abandoned_scan"),
    (ScansABlockTwice, "test_scan_covers_each_row_once"),
    (ScansBackwards, "test_scan_covers_each_row_once"),
    (ScansViews, "test_scan_returns_owned_memory"),
    (ScansASnapshot, "test_scan_sees_writes_ahead_of_it"),
    (ScansViews, "test_scan_sees_writes_ahead_of_it"),
    (HintsZero, "test_hint_changes_nothing"),
    (ReservesZeros, "test_reserve_changes_nothing"),
    (HidesDamage, "test_damage_is_marked"),
    (MarksOneAndHarmsAnother, "test_damage_is_marked"),
    (FlushForgets, "test_flush_changes_nothing"),
    (ClosesOnce, "test_close_twice"),
    (DescribesInNumpy, "test_describe_is_json"),
    (DescribesItsContent, "test_describe_is_json"),
    (DescribesItsIdentity, "test_reopen"),
    (KeepsNothing, "test_reopen"),
    (ReopensReadOnly, "test_reopened_backend_is_whole"),
    (SwapsFieldsBothWays, "test_raw_bytes"),
    (GrowsByCopies, "test_new_rows_are_fresh"),
    (ShowsItsRoom, "test_room_changes_nothing"),
    (KeepsWhatWasTakenBack, "test_growth_is_taken_back"),
    (ScansNewRowsToo, "test_reads_and_scans_go_on_beside_a_growth"),
    (DescribesFormerRows, "test_a_grown_table_is_opened_again"),
    (FindsWhatIsNobodys, "test_what_an_interrupted_growth_has_left_is_nobodys"),
]


def call(faulty, name, path):
    """Call one test of the suite as pytest would, with the fixtures that it names."""
    suite = Suite(faulty)
    test = getattr(suite, name)
    wanted = inspect.signature(test).parameters
    fixtures = {"path": path, "case": Case(ROWS, SCHEMA)}
    if "backend" in wanted:
        fixtures["backend"] = suite.create(path, ROWS, SCHEMA)
    test(**{name: fixtures[name] for name in wanted})


@pytest.mark.parametrize(("faulty", "name"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_the_suite_finds_a_fault(faulty, name, tmp_path):
    with pytest.raises((AssertionError, BufferError, IndexError, KeyError, StopIteration, TypeError)):
        call(faulty, name, tmp_path / "table")


@pytest.mark.parametrize("name", sorted({name for _, name in FAULTS}))
def test_the_suite_passes_what_has_no_fault(name, tmp_path):
    call(Faulty, name, tmp_path / "table")


def test_the_suite_finds_a_write_that_is_not_confined(tmp_path):
    with pytest.raises(AssertionError, match="rows that no write names"):
        call(RewritesEverything, "test_reads_beside_a_write", tmp_path / "table")


def test_each_check_of_the_suite_has_a_fault_that_it_finds():
    checks = {name for name in dir(BackendConformance) if name.startswith("test_")}
    assert checks == {name for _, name in FAULTS} | {"test_reads_beside_a_write"}
