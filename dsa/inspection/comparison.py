"""Where two states differ: two directories, two checkpoints, or one of each; block by block."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from typing import Any, Final, cast, final

import numpy as np
from numpy.typing import NDArray

from dsa.backends.base import Layout
from dsa.checkpoint.by_id import RecordsById
from dsa.checkpoint.meter import Advance, Progress, metered
from dsa.checkpoint.places import StorageOptions
from dsa.inspection.subjects import Kind, Subject, open_subject
from dsa.schema import Records, is_keyed, read_numbers
from dsa.state.content import TableContent
from dsa.state.keys import owned_rows

__all__ = ["Comparison", "FieldComparison", "Side", "TableComparison", "diff"]

_FIRST_ROWS: Final = 5


@final
@dataclass(frozen=True, slots=True)
class Side:
    """One of the two.

    Args:
        url: Where it is.
        kind: ``"state"``, or the kind of the checkpoint: ``"full"``, ``"delta"`` or ``"weights"``.
        global_step: Steps that the state has taken.
    """

    url: str
    kind: Kind
    global_step: int


@final
@dataclass(frozen=True, slots=True)
class FieldComparison:
    """One field of a table that both have.

    Args:
        name: ``w``, ``m``, ``v``, ``t`` or ``s``.
        rows: How many rows differ, bit by bit.
        largest: The largest absolute difference of two numbers; not a number where one of them is none.
        largest_row: The first row in which it is, or None when no row differs. Where rows belong to ids, the
            id; likewise in what follows.
        first_rows: The first rows that differ.
    """

    name: str
    rows: int
    largest: float
    largest_row: int | None
    first_rows: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class TableComparison:
    """One table that both have.

    Args:
        name: The user's name for it.
        facts: What differs of rows, dim, k, steps, rule and fields, by name: what the first says and
            what the second says; of fields, those that the other lacks.
        compared: Rows that were compared; 0 where the shapes differ. Rows that belong to ids are compared
            with those of the same ids, wherever they are, and `facts` tells how many ids the other lacks.
        rows: How many of them differ in any field.
        fields: Of the fields that both have in the same form.
    """

    name: str
    facts: dict[str, tuple[Any, Any]]
    compared: int
    rows: int
    fields: tuple[FieldComparison, ...]

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.facts and self.rows == 0


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """Where two states differ.

    Args:
        a: The first.
        b: The second.
        only_in_a: Tables of the first that the second lacks.
        only_in_b: Tables of the second that the first lacks.
        tables: Those of both, in the first one's order.
    """

    a: Side
    b: Side
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    tables: tuple[TableComparison, ...]

    @property
    def same(self) -> bool:
        """Whether nothing differs: training would go on alike."""
        alone = self.only_in_a or self.only_in_b
        return (
            not alone and self.a.global_step == self.b.global_step and all(each.same for each in self.tables)
        )

    def to_json(self) -> dict[str, Any]:
        """Return everything by name, as what `json.dumps` takes; what is not a number becomes None."""
        data = {"same": self.same, **asdict(self)}
        for table in data["tables"]:
            for each in table["fields"]:
                each["largest"] = each["largest"] if math.isfinite(each["largest"]) else None
        return data


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    progress: Progress = False,
    storage_options: StorageOptions | None = None,
    backend: Layout | None = None,
) -> Comparison:
    """Compare two state directories, two checkpoints, or one of each; neither is changed.

    Both are read once, in blocks of a few megabytes. Rows that were never written count with their first
    weights. How something is stored doesn't count: layout, compression, checkpoints made of it.

    Args:
        a: A state directory, or a checkpoint at a path or an fsspec URL.
        b: Another one.
        base: The full checkpoint that a differential one is relative to, if it isn't beside it.
        progress: True for a bar, or a function of the bytes done and their total.
        storage_options: For fsspec, for both.
        backend: The layout of tables in either whose kind is not one of the package's.

    Raises:
        StateError, CheckpointError: one of them can't be read, or is damaged.

    Example:
        >>> import tempfile
        >>> from dsa import DiskSparseRiemannianAdam, init
        >>> path = tempfile.mkdtemp()
        >>> tables = {"entity": init.Zeros(9, 2)}
        >>> with DiskSparseRiemannianAdam(tables, k=0.0, disk_dir=f"{path}/a") as optimizer:
        ...     _ = optimizer.export_checkpoint(f"{path}/b")
        ...     _ = optimizer.step({"entity": ([7], [[1.0, -1.0]])})
        >>> [(each.name, each.first_rows) for each in diff(f"{path}/a", f"{path}/b").tables[0].fields][:2]
        [('w', (7,)), ('m', (7,))]
    """
    with ExitStack() as stack:
        left, right = (
            stack.enter_context(
                open_subject(url, base=base, storage_options=storage_options, backend=backend)
            )
            for url in (a, b)
        )
        advance = stack.enter_context(metered(progress, left.nbytes + right.nbytes, "diff"))
        ours = {table.name: table for table in left.content.tables}
        theirs = {table.name: table for table in right.content.tables}
        return Comparison(
            _side(left),
            _side(right),
            tuple(name for name in ours if name not in theirs),
            tuple(name for name in theirs if name not in ours),
            tuple(_compare(table, theirs[name], advance) for name, table in ours.items() if name in theirs),
        )


def _side(subject: Subject) -> Side:
    return Side(subject.url, subject.kind, subject.content.global_step)


def _compare(a: TableContent, b: TableContent, advance: Advance) -> TableComparison:
    facts = {name: both for name, both in _facts(a, b).items() if both[0] != both[1]}
    shared = [each.name for each in a.schema.fields if each in b.schema.fields]
    if is_keyed(a.schema) and is_keyed(b.schema) and a.schema.dim == b.schema.dim:
        facts.pop("rows", None)  # how many are free is nobody's concern
        return _compare_ids(a, b, facts, [name for name in shared if name not in ("id", "live")], advance)
    if a.rows != b.rows or a.schema.dim != b.schema.dim or not shared:
        return TableComparison(a.name, facts, 0, 0, ())
    counters = [_Counter(name) for name in shared]
    different = 0
    for first, one, other in _pairs(a, b):
        if not _is_equal(one, other):
            rows = np.zeros(len(one), np.bool_)
            numbers = np.arange(first, first + len(one))
            for counter in counters:
                rows |= counter.take(numbers, one, other)
            different += int(np.count_nonzero(rows))
        advance(one.nbytes + other.nbytes)
    return TableComparison(a.name, facts, a.rows, different, tuple(counter.result() for counter in counters))


def _compare_ids(
    a: TableContent,
    b: TableContent,
    facts: dict[str, tuple[Any, Any]],
    shared: Sequence[str],
    advance: Advance,
) -> TableComparison:
    """Compare the rows of equal ids, wherever they are; `b` is copied aside for it."""
    counters = [_Counter(name) for name in shared]
    different = ours = both = 0
    with RecordsById(b) as others:
        advance(b.rows * b.schema.dtype.itemsize)
        for _, records in a.blocks():
            owned = records[owned_rows(records)]
            ids = np.ascontiguousarray(owned["id"])
            places = others.find(ids)
            there = places >= 0
            one, other = owned[there], others.read(places[there])
            rows = np.zeros(len(one), np.bool_)
            for counter in counters:
                rows |= counter.take(ids[there], one, other)
            ours, both = ours + len(owned), both + len(one)
            different += int(np.count_nonzero(rows))
            advance(records.nbytes)
        theirs = len(others)
    alone = ours - both, theirs - both
    if any(alone):
        facts = {**facts, "ids that the other lacks": alone}
    different += sum(alone)
    results = tuple(counter.result() for counter in counters)
    return TableComparison(a.name, facts, ours + theirs - both, different, results)


def _facts(a: TableContent, b: TableContent) -> dict[str, tuple[Any, Any]]:
    return {
        "rows": (a.rows, b.rows),
        "dim": (a.schema.dim, b.schema.dim),
        "k": (a.k, b.k),
        "steps": (a.facts.steps, b.facts.steps),
        "decay": (a.facts.decay, b.facts.decay),
        "rule": (_rule_of(a), _rule_of(b)),
        "fields": (_lacking(b, a), _lacking(a, b)),
    }


def _rule_of(table: TableContent) -> str:
    """Return the name of a table's rule, and those of its options that fix what is stored."""
    return " ".join([table.rule.name, *(f"{name}={value}" for name, value in table.rule.options.items())])


def _lacking(table: TableContent, other: TableContent) -> list[str]:
    """Return the fields of another table that a table lacks, or has in another form."""
    fields = [each for each in other.schema.fields if each not in table.schema.fields]
    return [f"{each.name} {each.dtype} per {each.per}" for each in fields]


def _pairs(a: TableContent, b: TableContent) -> Iterator[tuple[int, Records, Records]]:
    """Yield the same rows of both, in pieces as small as the smaller blocks."""
    with closing(_stream(a)) as ours, closing(_stream(b)) as theirs:
        rest = np.empty(0, b.schema.dtype)
        for first, records in ours:
            done = 0
            while done < len(records):
                if not len(rest):
                    _, rest = next(theirs)
                count = min(len(records) - done, len(rest))
                yield first + done, records[done : done + count], rest[:count]
                rest, done = rest[count:], done + count


def _stream(table: TableContent) -> Any:  # noqa: ANN401 - blocks are started as generators, which can be closed
    yield from table.blocks()


def _is_equal(a: Records, b: Records) -> bool:
    """Tell quickly whether every byte is the same; where records have gaps, False says nothing."""
    return a.dtype == b.dtype and np.array_equal(a.view(np.uint8), b.view(np.uint8))


@final
class _Counter:
    """Counts in which rows a field differs.

    Args:
        name: The field.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._rows = 0
        self._largest = 0.0
        self._largest_row: int | None = None
        self._first: list[int] = []

    def take(self, numbers: NDArray[np.int64], a: Records, b: Records) -> NDArray[np.bool_]:
        """Take in the next rows, and return which of them differ.

        Args:
            numbers: ``(B,)`` what tells the rows: their numbers, or the ids that they belong to.
            a: ``(B,)`` records.
            b: ``(B,)`` records.
        """
        one, other = a[self._name], b[self._name]
        differs = _patterns(one) != _patterns(other)
        rows = differs.any(axis=1) if differs.ndim == 2 else differs
        places = np.flatnonzero(rows)
        if len(places):
            self._rows += len(places)
            self._first += numbers[places[: _FIRST_ROWS - len(self._first)]].tolist()
            name = self._name
            self._measure(numbers[places], read_numbers(a[places], name), read_numbers(b[places], name))
        return cast("NDArray[np.bool_]", rows)

    def _measure(self, numbers: NDArray[np.int64], one: NDArray[Any], other: NDArray[Any]) -> None:
        with np.errstate(invalid="ignore", over="ignore"):
            sizes = np.abs(one.astype(np.float64) - other.astype(np.float64)).reshape(len(numbers), -1)
        each = sizes.max(axis=1)  # not a number if one of a row's is none
        worst = int(np.argmax(each))  # the first that is not a number, if one is
        known = math.isnan(self._largest)
        if self._largest_row is None or (not known and not each[worst] <= self._largest):
            self._largest, self._largest_row = float(each[worst]), int(numbers[worst])

    def result(self) -> FieldComparison:
        """Return what was counted."""
        return FieldComparison(self._name, self._rows, self._largest, self._largest_row, tuple(self._first))


def _patterns(values: NDArray[Any]) -> NDArray[Any]:
    """Return numbers as their bit patterns."""
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")
