"""The conformance suite for layouts finds the faults it is there to find, and passes a layout without any."""

import inspect

import numpy as np
import pytest

from dsa.backends import Memmap, MemoryBackend, Sizes, Source
from dsa.backends.writer import WriteBehind
from dsa.errors import StateCorruptError
from dsa.schema import adam_schema
from dsa.testing import Case, LayoutConformance

CASE = Case(8_191, adam_schema(13))


class Sound:
    """A layout without a fault; each subclass has one."""

    kind = "memmap"
    collect_bytes = 0
    known: dict = {}  # noqa: RUF012 - what faulty ones remember between two of them

    def __eq__(self, other):
        return type(self) is type(other)

    __hash__ = None

    def sizes(self, rows, schema):
        return Memmap().sizes(rows, schema)

    def create(self, path, rows, schema, allocate):
        return Memmap().create(path, rows, schema, allocate)

    def open(self, path, description):
        return Memmap().open(path, description)

    def look(self, path, description):
        return Memmap().look(path, description)

    def like(self, description):
        return self

    def refusal(self, description):
        return Memmap().refusal(description)


class HasAnOddKind(Sound):
    kind = "Mem map"


class IsNoValue(Sound):
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class LacksAMember(Sound):
    look = None

    def __getattribute__(self, name):
        if name == "look":
            raise AttributeError(name)
        return super().__getattribute__(name)


class IsDescribedAsAnother(Sound):
    kind = "other"


class LeavesSomethingBeside(Sound):
    def create(self, path, rows, schema, allocate):
        path.with_name("log").touch()
        return super().create(path, rows, schema, allocate)


class OpensAnEmptyOne(Sound):
    def open(self, path, description):
        return MemoryBackend(CASE.rows, CASE.schema)


class LooksAtAnEmptyOne(Sound):
    def look(self, path, description):
        return Source.over(MemoryBackend(CASE.rows, CASE.schema))


class KnowsPlaces(Sound):
    def create(self, path, rows, schema, allocate):
        self.known[path] = rows
        return super().create(path, rows, schema, allocate)

    def open(self, path, description):
        if path not in self.known:
            raise StateCorruptError("another place")
        return super().open(path, description)


class IgnoresTheDescription(Sound):
    def create(self, path, rows, schema, allocate):
        backend = super().create(path, rows, schema, allocate)
        self.known[path] = backend.describe()
        return backend

    def open(self, path, description):
        return super().open(path, self.known.get(path, description))


class MakesWhatIsMissing(Sound):
    def open(self, path, description):
        if not path.exists():
            return self.create(path, CASE.rows, CASE.schema, "sparse")
        return super().open(path, description)


class RemembersWhatWasRemoved(Sound):
    def create(self, path, rows, schema, allocate):
        backend = super().create(path, rows, schema, allocate)
        if (path, "made") in self.known:
            backend.write(np.array([1]), np.ones(1, schema.dtype))
        self.known[path, "made"] = True
        return backend


class TakesMoreThanItSays(Sound):
    def sizes(self, rows, schema):
        return Sizes(0, rows, rows, ((schema.dtype.itemsize, schema.dtype.itemsize),))


class HasNoPlaceForARow(Sound):
    def sizes(self, rows, schema):
        return super().sizes(rows, schema)._replace(pieces=((4, 4),))


class LooksAtASnapshot(Sound):
    def look(self, path, description):
        there, copy = super().look(path, description).backend, MemoryBackend(CASE.rows, CASE.schema)
        rows = np.arange(CASE.rows)
        copy.write(rows, there.read(rows))
        return Source.over(copy)


class LocksWhatItLooksAt(Sound):
    def look(self, path, description):
        path.with_name("lock").touch()
        return super().look(path, description)


class ShowsOtherNumbers(Sound):
    def look(self, path, description):
        source = super().look(path, description)
        return Source(source.backend, lambda name: source.field(name).view(np.int32))


class ShowsAnotherRow(Sound):
    def look(self, path, description):
        source = super().look(path, description)
        return Source(source.backend, lambda name: source.field(name)[::-1])


class ForgetsItsOptions(Sound):
    def like(self, description):
        return Memmap(stride="page")


class RefusesItsOwn(Sound):
    def refusal(self, description):
        return "is not liked: leave it out"


class RefusesNothing(Sound):
    def refusal(self, description):
        return ""


class KeepsWritesInMemory(Sound):
    def create(self, path, rows, schema, allocate):
        return WriteBehind(
            super().create(path, rows, schema, allocate), collect_bytes=1 << 30, threaded=False
        )


class Suite(LayoutConformance):
    def __init__(self, faulty):
        self.faulty = faulty

    def layout(self):
        return self.faulty()

    def differing(self):
        return RefusesNothing() if self.faulty is RefusesNothing else Memmap(stride=1 << 14)


FAULTS = [
    (HasAnOddKind, "test_is_a_layout"),
    (IsNoValue, "test_is_a_layout"),
    (LacksAMember, "test_is_a_layout"),
    (IsDescribedAsAnother, "test_a_new_table_is_described"),
    (LeavesSomethingBeside, "test_everything_is_at_one_path"),
    (OpensAnEmptyOne, "test_what_is_closed_opens_again"),
    (LooksAtAnEmptyOne, "test_what_is_closed_opens_again"),
    (KnowsPlaces, "test_a_copy_opens_elsewhere"),
    (IgnoresTheDescription, "test_another_tables_files_are_refused"),
    (LooksAtAnEmptyOne, "test_another_tables_files_are_refused"),
    (MakesWhatIsMissing, "test_a_missing_table_is_not_made"),
    (RemembersWhatWasRemoved, "test_what_is_removed_can_be_made_anew"),
    (TakesMoreThanItSays, "test_sizes_are_kept"),
    (HasNoPlaceForARow, "test_sizes_are_kept"),
    (LooksAtASnapshot, "test_looking_beside_a_writer"),
    (LocksWhatItLooksAt, "test_looking_changes_nothing"),
    (ShowsOtherNumbers, "test_fields_are_arrays"),
    (ShowsAnotherRow, "test_fields_are_arrays"),
    (ForgetsItsOptions, "test_what_is_like_a_table_makes_such_tables"),
    (RefusesItsOwn, "test_what_is_like_a_table_makes_such_tables"),
    (RefusesNothing, "test_another_way_is_refused"),
    (KeepsWritesInMemory, "test_a_write_survives_a_kill"),
    (IsDescribedAsAnother, "test_a_state_lives_on_it"),
]


def call(faulty, name, path):
    """Call one test of the suite as pytest would, with the fixtures that it names."""
    test = getattr(Suite(faulty), name)
    fixtures = {"tmp_path": path, "case": CASE, "allocate": "reserve"}
    test(**{each: fixtures[each] for each in inspect.signature(test).parameters})


@pytest.mark.parametrize(("faulty", "name"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_the_suite_finds_a_fault(faulty, name, tmp_path):
    with pytest.raises((AssertionError, pytest.fail.Exception, StateCorruptError, ValueError)):
        call(faulty, name, tmp_path)


@pytest.mark.parametrize("name", sorted({name for _, name in FAULTS}))
def test_the_suite_passes_what_has_no_fault(name, tmp_path):
    call(Sound, name, tmp_path)


def test_each_check_of_the_suite_has_a_fault_that_it_finds():
    checks = {name for name in dir(LayoutConformance) if name.startswith("test_")}
    assert checks == {name for _, name in FAULTS}
