"""What a state holds, in numbers: one pass over each table, block by block."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from dsa.inspection.sketch import Sketch, Spread, count_scale, norm_scale
from dsa.inspection.state_view import StateView, open_state
from dsa.inspection.table_view import TableView
from dsa.kernels.decay import caught_up
from dsa.rules.manifolds import BALL_EPS
from dsa.schema import Records, floating_fields, is_keyed, read_numbers
from dsa.state.content import StateContent, TableContent
from dsa.state.keys import owned_rows

__all__ = ["StateSummary", "TableSummary", "summarize", "summarize_table"]

_BINS: Final = 40
# A row on the clamp was rounded to float32, and a later projection may have moved it a little inward.
_CLAMP_ROOM: Final = 1.01

Progress = Callable[[str, int, int], None]


@final
@dataclass(frozen=True, slots=True)
class TableSummary:
    """What a table holds.

    Distributions are over rows that are plausible; None where there are none, or where the table lacks the
    field.

    Args:
        name: The user's name for it.
        rows: N.
        dim: D.
        fields: Name, dtype and whether it is stored per element or per row, of each field.
        k: Curvature magnitude.
        rule: The name of the update rule.
        steps: Optimizer steps in which the table took part.
        initializer: The rule of the first weights as JSON, or None.
        touched_rows: Rows that were ever written: those with a stamp.
        stepped_rows: Rows that were ever updated by a step; where a rule keeps no count of a row's updates,
            those whose last write was after the first step began.
        implausible_rows: Rows with a number that no training produces: one that is not finite, or a negative
            second moment, counter or stamp.
        first_implausible: The first of these, or None.
        rows_at_clamp: Touched rows on the edge that a ball is clamped to; None in flat space.
        updates: Updates per row, over rows with any.
        weight_norms: Euclidean norm of the weight, over touched rows.
        distances: Hyperbolic distance of the weight from the centre of the ball, over touched rows.
        first_moments: Root mean square of ``m`` over a row, over stepped rows.
        second_moments: Root of the mean of ``v`` over a row, over stepped rows.
        logical_bytes: Weights, moments and counters, without stamps and padding.
        file_bytes: Length of the table's files; None for what is not a state directory.
        disk_bytes: What they occupy on disk; likewise.
        live_rows: Rows that belong to an id: these alone count as touched, and distributions are over them.
            None where rows belong to none.
        freed_rows: Rows that did, and wait for another one; likewise.
    """

    name: str
    rows: int
    dim: int
    fields: tuple[dict[str, str], ...]
    k: float
    rule: str
    steps: int
    initializer: dict[str, Any] | None
    touched_rows: int
    stepped_rows: int
    implausible_rows: int
    first_implausible: int | None
    rows_at_clamp: int | None
    updates: Spread | None
    weight_norms: Spread | None
    distances: Spread | None
    first_moments: Spread | None
    second_moments: Spread | None
    logical_bytes: int
    file_bytes: int | None = None
    disk_bytes: int | None = None
    live_rows: int | None = None
    freed_rows: int | None = None


@final
@dataclass(frozen=True, slots=True)
class StateSummary:
    """What a state holds.

    Args:
        global_step: Steps that the state has taken.
        tables: In the state's order.
        path: The directory; None for what is not one.
        status: ``"closed"`` or ``"open"``, see `StateView.status`; likewise.
        journal_bytes: What the journal occupies on disk; None for what is not a directory.
    """

    global_step: int
    tables: tuple[TableSummary, ...]
    path: str | None = None
    status: str | None = None
    journal_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return everything by name, as what `json.dumps` takes."""
        return asdict(self)


def summarize(
    source: str | os.PathLike[str] | StateView | StateContent, *, progress: Progress | None = None
) -> StateSummary:
    """Describe a state by numbers: what was touched and how often, norms, moments, damage, disk.

    Every row is read once, in blocks of a few megabytes; memory does not grow with the tables. Beside a
    process that trains, the blocks are of different steps.

    Args:
        source: A state directory, an open view of one, or the content of a checkpoint.
        progress: Called after each block with the table's name, the rows read and the rows in all.

    Raises:
        StateError: the directory can't be read, see `open_state`.

    Example:
        >>> from dsa.rules.adam import ADAM
        >>> from dsa.state.facts import TableFacts
        >>> schema = ADAM.schema(dim=2)
        >>> records = np.zeros(3, schema.dtype)
        >>> records[1] = ([3.0, 4.0], 0.1, 0.1, 5, 6)
        >>> table = TableContent(TableFacts("entity", 3, schema, ADAM), lambda: iter([(0, records)]))
        >>> (entity,) = summarize(StateContent((table,), global_step=9)).tables
        >>> entity.touched_rows, entity.updates.median, entity.weight_norms.maximum
        (1, 5.0, 5.0)
    """
    if isinstance(source, StateContent):
        tables = tuple(_summarize_content(table, progress) for table in source.tables)
        return StateSummary(source.global_step, tables)
    if not isinstance(source, StateView):
        with open_state(source) as view:
            return summarize(view, progress=progress)
    return StateSummary(
        source.global_step,
        tuple(summarize_table(table, progress=progress) for table in source.tables.values()),
        str(source.path),
        source.status,
        source.journal_bytes()[1],
    )


def summarize_table(table: TableView, *, progress: Progress | None = None) -> TableSummary:
    """Describe one table by numbers; see `summarize`.

    Args:
        table: Of an open view.
        progress: See `summarize`.
    """
    # First weights of untouched rows count for nothing here: they need not be made.
    stored = replace(table.content(), blocks=table.scan)
    summary = _summarize_content(stored, progress)
    return replace(summary, file_bytes=table.file_bytes, disk_bytes=table.disk_bytes)


def _summarize_content(table: TableContent, progress: Progress | None) -> TableSummary:
    pass_ = _Pass(table)
    for first, records in table.blocks():
        pass_.take(first, records)
        if progress is not None:
            progress(table.name, first + len(records), table.rows)
    schema = table.schema
    initializer = table.facts.initializer
    ball = table.k > 0.0 and "w" in schema.names
    return TableSummary(
        name=table.name,
        rows=table.rows,
        dim=schema.dim,
        fields=tuple({"name": f.name, "dtype": f.dtype, "per": f.per} for f in schema.fields),
        k=table.k,
        rule=table.rule.name,
        steps=table.facts.steps,
        initializer=None if initializer is None else initializer.to_json(),
        touched_rows=pass_.touched,
        stepped_rows=pass_.stepped,
        implausible_rows=pass_.implausible,
        first_implausible=pass_.first_implausible,
        rows_at_clamp=pass_.at_clamp if ball else None,
        updates=pass_.updates.spread(_BINS, count_scale(pass_.updates)),
        weight_norms=pass_.norms.spread(_BINS, norm_scale(pass_.norms)),
        distances=pass_.distances.spread(_BINS, "linear"),
        first_moments=pass_.first.spread(_BINS, "log"),
        second_moments=pass_.second.spread(_BINS, "log"),
        logical_bytes=table.rows * sum(schema.field_bytes(f) for f in schema.fields if f.name != "s"),
        live_rows=pass_.live if pass_.keyed else None,
        freed_rows=pass_.freed if pass_.keyed else None,
    )


@final
class _Pass:
    """Takes in the blocks of a table."""

    def __init__(self, table: TableContent) -> None:
        self.touched = self.stepped = self.implausible = self.at_clamp = 0
        self.first_implausible: int | None = None
        self.updates = Sketch(integers=True)
        self.norms, self.distances, self.first, self.second = Sketch(), Sketch(), Sketch(), Sketch()
        self.live = self.freed = 0
        self.keyed = is_keyed(table.schema)
        self._names = table.schema.names
        self._floating = floating_fields(table.schema.dtype)
        self._non_negative = [name for name in table.rule.non_negative if name in self._names]
        self._root = math.sqrt(table.k)
        self._decay = table.facts.decay

    def take(self, first: int, records: Records) -> None:
        """Take in one block.

        Args:
            first: Its first row.
            records: ``(B,)``.
        """
        written = np.flatnonzero(records["s"]) if "s" in self._names else np.arange(len(records))
        if self.keyed:
            self.live += int(np.count_nonzero(owned_rows(records)))
            deleted = (records["live"][written] == 0) & (records["s"][written] > 0)
            self.freed += int(np.count_nonzero(deleted))
            written = written[~deleted]
        if not len(written):
            return
        if len(written) < len(records):
            records = records[written]
        numbers = {name: read_numbers(records, name) for name in self._floating}
        if "w" in numbers:
            numbers["w"] = read_numbers(caught_up(records, self._decay), "w")
        squares = {name: _squares(numbers[name]) for name in ("w", "m") if name in numbers}
        means = {name: _mean(values) for name, values in numbers.items() if name not in squares}
        good = self._plausible(records, numbers, [*squares.values(), *means.values()])
        if not good.all():
            self.implausible += int(np.count_nonzero(~good))
            if self.first_implausible is None:
                self.first_implausible = first + int(written[np.argmin(good)])
        self.touched += len(written)
        if "w" in squares:
            self._take_weights(np.sqrt(squares["w"][good]))
        stepped = self._stepped(records)
        self.stepped += int(np.count_nonzero(stepped))
        moving = good & stepped
        if "t" in self._names:
            self.updates.add(records["t"][moving])
        if "m" in squares:
            self.first.add(np.sqrt(squares["m"][moving] / numbers["m"].shape[1]))
        if "v" in means:
            self.second.add(np.sqrt(means["v"][moving]))

    def _stepped(self, records: Records) -> NDArray[np.bool_]:
        """Tell which rows were updated by a step."""
        if "t" in self._names:
            return np.asarray(records["t"] > 0)
        return np.asarray(records["s"] > 1) if "s" in self._names else np.zeros(len(records), np.bool_)

    def _take_weights(self, norms: NDArray[np.float64]) -> None:
        self.norms.add(norms)
        if self._root > 0.0:
            radius = self._root * norms
            self.at_clamp += int(np.count_nonzero(radius > 1.0 - _CLAMP_ROOM * BALL_EPS))
            inside = np.minimum(radius, 1.0 - BALL_EPS)
            self.distances.add((2.0 / self._root) * np.arctanh(inside))

    def _plausible(
        self, records: Records, numbers: dict[str, NDArray[Any]], sums: list[NDArray[np.float64]]
    ) -> NDArray[np.bool_]:
        """Tell which rows training can have produced, by sums over each row that are finite if it is."""
        good = np.ones(len(records), np.bool_)
        for each in sums:
            good &= np.isfinite(each)
        for name in self._names:
            if name not in numbers and not (self.keyed and name == "id"):
                good &= records[name] >= 0
        for name in self._non_negative:
            signs = np.signbit(numbers[name])
            good &= ~(signs.any(axis=1) if signs.ndim == 2 else signs)
        return good


def _squares(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the sum of squares of each row; finite unless the row is not, for float64 holds any square."""
    return np.asarray(np.einsum("ij,ij->i", values, values, dtype=np.float64))


def _mean(values: NDArray[Any]) -> NDArray[np.float64]:
    wide = values[:, None] if values.ndim == 1 else values
    with np.errstate(invalid="ignore"):  # of infinities with both signs, which count as implausible
        return np.asarray(wide.mean(axis=1, dtype=np.float64))
