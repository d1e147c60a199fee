"""One parameter's rows: their backend, the rule for untouched ones, and the space they live in."""

from __future__ import annotations

import contextlib
import math
import weakref
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from dsa.backends.base import GROWING, Growing, InPlace, StateBackend
from dsa.backends.writer import WriteBehind
from dsa.errors import CorruptRowError
from dsa.kernels.decay import catch_up, rounded
from dsa.kernels.judging import FRESH, UNUSABLE, USABLE, copy_weights
from dsa.kernels.layout import Words, record_layout
from dsa.kernels.plausible import describe_fault, first_implausible
from dsa.kernels.threads import run_slices
from dsa.rules.init import Initializer
from dsa.rules.manifolds import Manifold, manifold_of
from dsa.rules.updates import AnyRule
from dsa.schema import (
    DECAY,
    TORN,
    Records,
    Rows,
    catches_up,
    is_bfloat16,
    is_keyed,
    read_numbers,
    store_numbers,
)
from dsa.state.content import TableContent
from dsa.state.facts import TableFacts, describe_facts, first_decays
from dsa.state.keys import Keys

__all__ = [
    "HeldWeights",
    "Table",
    "blank_records",
    "clip_norms",
    "clip_to_ball",
    "content_of",
    "corrupt_row",
    "describe_table",
    "fill_untouched",
    "first_records",
    "implausible_rows",
    "lost_rows",
    "outside_rows",
    "read_records",
    "read_weights",
    "require_plausible",
    "set_weights",
    "stamp_of",
    "unwritten_rows",
]

Weights = NDArray[np.float32]


class HeldWeights(Protocol):
    """Weights of a table that are in memory: a module's parameter."""

    def take(self, rows: Rows) -> Weights:
        """Return copies of some rows, ``(B, D)`` float32."""
        ...

    def put(self, rows: Rows, weights: Weights) -> None:
        """Replace some rows."""
        ...

    def require_writable(self) -> None:
        """Raise `ValueError` when they can't be replaced."""
        ...

    def fingerprint(self) -> str:
        """Return what tells these weights from others; an empty string when they are gone."""
        ...


@final
@dataclass(slots=True, eq=False)
class Table:
    """A table that is open.

    Args:
        facts: What it is; replaced as a whole when something of it changes.
        backend: Where its records are.
        writer: The write queue when `backend` is one, else None.
        rows_read: Rows read since the table was opened.
        rows_written: Rows handed to the backend since then.
        generation: How often the file was replaced as a whole, see `dsa.state.metadata.table_file_name`.
        held: The weights, where they are in memory and not in the records.
        awaited: The fingerprint of the weights in memory that go with the moments, until it is seen that they
            do: an empty string when it is not known, None when nothing is to be seen to.
        stepper: The optimizer that was built over it last.
        keys: Whose the rows are, where they belong to ids.
        mapped: The backend, when a step may change its records where they are.
    """

    facts: TableFacts
    backend: StateBackend
    writer: WriteBehind | None = None
    rows_read: int = 0
    rows_written: int = 0
    generation: int = 0
    held: HeldWeights | None = None
    awaited: str | None = None
    stepper: weakref.ref[object] | None = None
    keys: Keys | None = None
    mapped: InPlace | None = field(init=False)

    def __post_init__(self) -> None:
        self.mapped = _mapped(self.backend)

    def __len__(self) -> int:
        return self.facts.rows

    @property
    def name(self) -> str:
        """The user's name for it."""
        return self.facts.name

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return self.facts.schema.dim

    @property
    def rule(self) -> AnyRule:
        """The update rule whose fields the records hold."""
        return self.facts.rule

    @property
    def k(self) -> float:
        """Curvature magnitude; the space has curvature -k."""
        return self.facts.k

    @property
    def seed(self) -> int:
        """What its random roundings depend on, see `TableFacts`."""
        return self.facts.seed

    @property
    def initializer(self) -> Initializer | None:
        """The rule for rows that were never written, see `TableFacts`."""
        return self.facts.initializer

    @property
    def steps(self) -> int:
        """Optimizer steps in which the table took part."""
        return self.facts.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        if steps != self.facts.steps:
            self.facts = replace(self.facts, steps=steps)

    @property
    def decay(self) -> float:
        """What the weight of a row has decayed by that was there from the beginning, see `TableFacts`."""
        return self.facts.decay

    @decay.setter
    def decay(self, decay: float) -> None:
        if decay != self.facts.decay:
            self.facts = replace(self.facts, decay=decay)

    def take_over(self, other: Table) -> None:
        """Become another table of this name, but for the weights in memory; counts of use are added up."""
        self.facts, self.backend, self.keys = other.facts, other.backend, other.keys
        self.writer, self.generation, self.mapped = other.writer, other.generation, other.mapped
        self.rows_written += other.rows_written

    def wrap(self, backend: StateBackend, writer: WriteBehind | None = None) -> None:
        """Put a wrapper around the backend, past which nothing goes from here on.

        Args:
            backend: The wrapper.
            writer: The same, when it is a write queue.
        """
        self.backend, self.writer, self.mapped = backend, writer, _mapped(backend)

    def close(self, moment: str | None = None) -> None:
        """Flush and close the files of the table, each of them whatever befalls the others.

        Args:
            moment: What tells this moment from others, for an index that is as good as the records; None
                leaves it as a kill would.
        """
        with contextlib.ExitStack() as stack:
            if self.keys is not None:
                stack.callback(self.keys.close, moment)
            stack.callback(self.backend.close)

    def abandon(self) -> None:
        """Let the files go as a kill would, and what is queued for them."""
        if self.keys is not None:
            self.keys.close(None)
        if self.writer is not None:
            self.writer.abandon()
        else:
            self.backend.close()

    @property
    def space(self) -> Manifold:
        """The manifold of curvature -k."""
        return manifold_of(self.k)


def _mapped(backend: StateBackend) -> InPlace | None:
    return backend if isinstance(backend, InPlace) and backend.image_words else None


def read_records(table: Table, rows: Rows, out: Records | None = None) -> Records:
    """Return the records of `rows`; one that was never written has its initial weight and stamp 0.

    The stored values are not judged here: the update does that in its own pass, `read_weights` for everyone
        else.

    Args:
        table: The table.
        rows: ``(B,)`` int64, strictly increasing, inside the table.
        out: ``(B,)`` records to fill and return; new ones when None.
    """
    records = table.backend.read(rows, out)
    count = len(rows)
    table.rows_read += count  # several threads do this; no call stands between reading and storing the count
    return fill_untouched(table, rows, records)


def fill_untouched(table: Table, rows: Rows, records: Records) -> Records:
    """Give the records that were never written their initial weights, in place.

    Without a rule every row was written once: one that says otherwise was lost, and is marked as `TORN`. A
    row that belongs to no id has no weights: it stays as it is.
    """
    if is_keyed(table.backend.schema):
        return records
    if table.initializer is None:
        if "w" in table.backend.schema.names:
            records["s"][records["s"] == 0] = TORN
        return records
    untouched = np.flatnonzero(records["s"] == 0)
    if len(untouched):
        if catches_up(records.dtype):
            records[DECAY][untouched] = first_decays(table.facts, rows[untouched])
        if is_bfloat16(records.dtype["w"]):
            first, weights = records[untouched], np.empty((len(untouched), table.dim), np.float32)
            table.initializer.fill(rows[untouched], weights)
            store_numbers(first, "w", weights)
            records[untouched] = first
        else:
            table.initializer.fill(rows[untouched], records["w"], untouched)
        if table.k > 0.0:  # then the weights are float32
            records["w"][untouched] = clip_to_ball(table, records["w"][untouched])
    return records


def clip_to_ball(table: Table, weights: Weights) -> Weights:
    """Scale first weights that would start too near the boundary of a table's ball down, if it has one."""
    if table.k == 0.0:
        return weights
    return clip_norms(weights, table.facts.init_max_norm_fraction / math.sqrt(table.k))


def clip_norms(weights: Weights, limit: float) -> Weights:
    """Scale each row whose norm exceeds `limit` down to it."""
    wide = weights.astype(np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    clipped = wide * np.minimum(1.0, limit / np.maximum(norms, np.finfo(np.float64).tiny))
    return np.asarray(clipped, dtype=np.float32)


def read_weights(table: Table, rows: Rows) -> Weights:
    """Return the weights ``(B, D)`` of `rows`, brought into the ball, after whatever decay they have missed.

    Raises:
        CorruptRowError: a stored row holds implausible values.
    """
    weights = np.empty((len(rows), table.dim), np.float32)
    since = np.empty(len(rows) if catches_up(table.facts.schema.dtype) else 0, np.float32)
    if table.mapped is not None:
        _copy_weights(table, table.mapped, rows, weights, since)
    else:
        _extract_weights(table, rows, weights, since)
    if len(since):
        catch_up(weights, since, table.decay)
    if table.k == 0.0:
        return weights
    return table.space.project(weights.astype(np.float64))[0].astype(np.float32)


def _copy_weights(table: Table, mapped: InPlace, rows: Rows, weights: Weights, since: Weights) -> None:
    """Fill in the weights of `rows`, and what they store of decay, straight from where their records are."""
    layout = record_layout(table.backend.schema.dtype, tuple(table.rule.non_negative))
    fresh, unwritten = np.empty(len(rows), np.int64), unwritten_rows(table)
    table.rows_read += len(rows)

    def copy(records: Words, factors: Words, places: Rows, start: int, stop: int) -> int:
        words, marks = weights.view(np.int32), since.view(np.int32)
        bad, left_out = copy_weights(
            records, places, layout, factors, unwritten, words, marks, fresh, start, stop
        )
        if left_out:
            positions = fresh[start : start + left_out]
            first = first_records(table, rows[positions])
            weights[positions] = read_numbers(first, "w")
            if len(since):
                since[positions] = first[DECAY]
        return bad

    bad = [each for each in mapped.look(rows, copy) if each >= 0]
    if bad:
        row = rows[bad[0] : bad[0] + 1]
        raise corrupt_row(table, row, read_records(table, row), 0)


def _extract_weights(table: Table, rows: Rows, weights: Weights, since: Weights) -> None:
    """Fill in the weights of `rows`, and what they store of decay, from copies of their records."""

    def read(start: int, stop: int) -> None:
        records = read_records(table, rows[start:stop])
        position = first_implausible(records, table.rule.non_negative)
        if position >= 0:
            raise corrupt_row(table, rows[start:stop], records, position)
        weights[start:stop] = read_numbers(records, "w")
        if len(since):
            since[start:stop] = records[DECAY]

    run_slices(read, len(rows))


def first_records(table: Table, rows: Rows) -> Records:
    """Return the records of rows that were never written: what their rule gives."""
    return fill_untouched(table, rows, np.zeros(len(rows), table.backend.schema.dtype))


def unwritten_rows(table: Table) -> int:
    """Return what a record that was never written is to a pass, see `dsa.kernels.visiting.Visit`."""
    if table.initializer is not None and not is_keyed(table.backend.schema):
        return FRESH
    # Without a rule every row was written once, unless its weights are elsewhere.
    return UNUSABLE if "w" in table.backend.schema.names else USABLE


def corrupt_row(table: Table, rows: Rows, records: Records, position: int) -> CorruptRowError:
    """Return the error that explains an implausible record."""
    return CorruptRowError(
        f"row {int(rows[position])} of table {table.name!r} can't be used: "
        f"{describe_fault(records, position, table.rule.non_negative)}; restore the table from a "
        f"checkpoint or copy, or call reproject_all({table.name!r}), which resets such rows"
    )


def implausible_rows(records: Records, rule: AnyRule) -> NDArray[np.bool_]:
    """Tell which records of an update rule hold implausible values, ``(B,)`` bool."""
    broken = np.zeros(len(records), dtype=np.bool_)
    start = 0
    while (position := first_implausible(records[start:], rule.non_negative)) >= 0:
        start += position + 1
        broken[start - 1] = True
    return broken


def outside_rows(records: Records, k: float) -> NDArray[np.bool_]:
    """Tell which records have a weight outside the ball of curvature -k, ``(B,)`` bool."""
    if k == 0.0 or "w" not in (records.dtype.names or ()):
        return np.zeros(len(records), np.bool_)
    squares = np.einsum("ij,ij->i", records["w"], records["w"], dtype=np.float64)
    return np.asarray(k * squares > 1.0)


def lost_rows(records: Records, ruled: bool) -> NDArray[np.bool_]:
    """Tell which records say that they were never written in a table whose rows all were, ``(B,)`` bool.

    Args:
        records: The records.
        ruled: Whether the table has a rule for first weights, so that a row need not be written.
    """
    if ruled or "w" not in (records.dtype.names or ()):
        return np.zeros(len(records), np.bool_)
    return np.asarray(records["s"] == 0)


def require_plausible(table: Table, first: int, records: Records) -> None:
    """Raise `CorruptRowError` when one of the records of the rows from `first` on is implausible."""
    position = first_implausible(records, table.rule.non_negative)
    if position >= 0:
        raise corrupt_row(table, np.arange(first, first + len(records)), records, position)


def stamp_of(step: int) -> int:
    """Return the stamp of a record written in a step: one more, as far as an int32 goes."""
    return min(step + 1, 2**31 - 1)


def set_weights(table: Table, records: Records, weights: NDArray[np.floating[Any]], stamp: int) -> None:
    """Give records other weights, in place, from which they are to decay from now on.

    Args:
        table: The table.
        records: ``(B,)``, those of rows of it.
        weights: ``(B, D)``, inside the table's space.
        stamp: What their ``s`` becomes.
    """
    store_numbers(records, "w", weights)
    if catches_up(records.dtype):
        records[DECAY] = rounded(table.decay)
    records["s"] = stamp


def blank_records(table: Table, rows: int, stamp: int) -> Records:
    """Return records with zero weights, moments and counters, stamped as written."""
    records = np.zeros(rows, table.backend.schema.dtype)
    records["s"] = stamp
    return records


def describe_table(table: Table, *, closing: bool = False) -> dict[str, Any]:
    """Return the part of the metadata that belongs to a table.

    Args:
        table: The table.
        closing: Whether nothing more will happen to it: weights in memory are then told by a fingerprint.
    """
    held = table.awaited if table.awaited is not None else ""
    if closing and table.held is not None and table.awaited is None:
        held = table.held.fingerprint()
    # As long as it is open, a growth may be under way.
    growing = {GROWING: True} if isinstance(table.backend, Growing) and not closing else {}
    return {
        **({} if "w" in table.backend.schema.names else {"weights": held}),
        **describe_facts(table.facts),
        "generation": table.generation,
        "backend": {**table.backend.describe(), **growing},
    }


def content_of(table: Table) -> TableContent:
    """Return a table as what is copied from one place to another, with the records as they are stored."""
    backend, rows = table.backend, len(table)
    return TableContent(table.facts, lambda: backend.scan(0, rows))
