"""One step of one table: in place, or up to the point where it would be stored."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from dsa.errors import CorruptRowError, GradientError
from dsa.kernels.judging import USABLE
from dsa.kernels.layout import Floats, Words, as_words, record_layout
from dsa.kernels.plausible import describe_fault
from dsa.kernels.report import StepReport, merge_reports
from dsa.kernels.threads import run_slices
from dsa.kernels.visiting import Gradients, Pass, Visit, make_scratch
from dsa.schema import Records, Rows, floating_fields, read_numbers
from dsa.state.coalesce import merge, require_finite
from dsa.state.table import Table, corrupt_row, first_records, read_records, unwritten_rows
from dsa.state.transactions import Images

__all__ = ["explain", "update_in_place", "update_records"]

_NONE: Final = np.empty(0, np.int64)
_NO_FACTORS: Final = np.empty(0, np.int32)


def update_in_place(
    table: Table,
    rows: Rows,
    gradients: Gradients,
    options: object,
    images: Images,
    stamp: int,
    weights: Floats | None = None,
) -> StepReport:
    """Update the rows of a batch where they are.

    Args:
        table: The table, whose backend is an `InPlace`.
        rows: ``(U,)`` int64, strictly increasing, inside the table.
        gradients: Of these rows.
        options: The options of this step.
        images: Where the records are copied before they change.
        stamp: The stamp of the new records.
        weights: ``(U, D)`` float32, updated: the weights of records that hold none.

    Returns:
        The report. When ``report.bad >= 0`` what was changed has to be undone.
    """
    assert table.mapped is not None, "see `Transactions.can_be_in_place`"
    update, constants = _pass_of(table, options, stamp)
    count, dim = len(rows), table.dim
    visit = Visit(
        table=images.words,  # another one in each stretch
        weights=np.empty((0, dim), np.float32) if weights is None else weights,
        layout=record_layout(table.backend.schema.dtype, tuple(table.rule.non_negative)),
        places=rows,  # likewise
        rows=rows,
        positions=np.arange(count),
        images=images.words,
        given=False,
        noted=images.noted,
        fresh=np.empty(count, np.int64),
        unwritten=unwritten_rows(table),
        factors=_NO_FACTORS,
        seed=table.seed,
    )

    def run(records: Words, factors: Words, places: Rows, start: int, stop: int) -> StepReport:
        scratch = make_scratch(dim, visit.layout)
        mine = visit._replace(table=records, factors=factors, places=places)
        bad, left_out = update(mine, gradients, constants, scratch, start, stop)
        if left_out and bad < 0:
            given = _first_records(table, mine, mine.fresh[start : start + left_out].copy())
            bad, _ = update(given, gradients, constants, scratch, 0, left_out)
        return StepReport.of(bad, scratch.told)

    table.rows_read += count
    return merge_reports(table.mapped.visit(rows, run))


def _first_records(table: Table, visit: Visit, positions: Rows) -> Visit:
    """Return the visit of rows that were never written: what their rule gives stands for their records."""
    words = as_words(first_records(table, visit.rows[positions]))[0]
    images = np.zeros((len(positions), visit.images.shape[1]), np.int32)
    images[:, : words.shape[1]] = words
    return visit._replace(positions=positions, images=images, given=True)


def update_records(
    table: Table,
    rows: Rows,
    gradients: Gradients,
    options: object,
    records: Records,
    stamp: int,
    weights: Floats | None = None,
) -> StepReport:
    """Compute the records that one step makes of a batch. Nothing is stored.

    Rows are read and updated in slices, on as many threads as `dsa.kernels.threads.thread_limit` allows.

    Args:
        table: The table.
        rows: ``(U,)`` int64, strictly increasing, inside the table.
        gradients: Of these rows.
        options: The options of this step.
        records: ``(U,)`` records, the memory for the result.
        stamp: The stamp of the new records.
        weights: ``(U, D)`` float32, updated: the weights of records that hold none.

    Returns:
        The report. When ``report.bad >= 0`` the records must be thrown away.
    """
    update, constants = _pass_of(table, options, stamp)
    words, dim, places = as_words(records)[0], table.dim, np.arange(len(rows))
    visit = Visit(
        table=words,
        weights=np.empty((0, dim), np.float32) if weights is None else weights,
        layout=record_layout(records.dtype, tuple(table.rule.non_negative)),
        places=places,
        rows=rows,
        positions=places,
        images=words,  # another one in each slice
        given=False,
        noted=_NONE,
        fresh=_NONE,
        unwritten=USABLE,
        factors=_NO_FACTORS,
        seed=table.seed,
    )

    def run(start: int, stop: int) -> StepReport:
        read_records(table, rows[start:stop], records[start:stop])
        scratch = make_scratch(dim, visit.layout)
        mine = visit._replace(images=np.empty((1, words.shape[1]), np.int32))
        bad, _ = update(mine, gradients, constants, scratch, start, stop)
        return StepReport.of(bad, scratch.told)

    return merge_reports(run_slices(run, len(rows)))


def _pass_of(table: Table, options: object, stamp: int) -> tuple[Pass, Any]:
    return table.rule.pass_for(options, k=table.k, stamp=stamp, step=table.steps + 1, decay=table.decay)


def explain(table: Table, rows: Rows, gradients: Gradients, bad: int) -> CorruptRowError | GradientError:
    """Return the error that tells why a row could not be updated. Nothing may have changed.

    Args:
        table: The table.
        rows: ``(U,)``, those of the batch.
        gradients: Of these rows.
        bad: Which of them.
    """
    try:
        require_finite(gradients, rows, table.name)
    except GradientError as error:
        return error
    row = rows[bad : bad + 1]
    stored = read_records(table, row)
    if describe_fault(stored, 0, table.rule.non_negative):
        return corrupt_row(table, row, stored, 0)
    grad = merge(gradients)[bad]
    sizes = [f"gradient {float(abs(grad).max()):.3g}"]
    sizes += [
        f"stored {name!r} {float(abs(read_numbers(stored, name)).max()):.3g}"
        for name in floating_fields(stored.dtype)
    ]
    return GradientError(
        f"the update of row {int(rows[bad])} of table {table.name!r} overflows float32 (the largest "
        f"elements are: {', '.join(sizes)}): nothing was changed; clip the gradient, scale the loss down or "
        "lower the learning rate"
    )
