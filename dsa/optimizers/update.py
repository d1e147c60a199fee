"""One step of one table, up to the point where it would be stored."""

from __future__ import annotations

from dsa.errors import CorruptRowError, GradientError
from dsa.kernels.adam import adam_step
from dsa.kernels.checks import describe_fault
from dsa.kernels.layout import Floats
from dsa.kernels.poincare import riemannian_adam_step
from dsa.kernels.report import StepReport, merge_reports
from dsa.kernels.threads import run_slices
from dsa.rules.conventions import AdamOptions
from dsa.schema import Records, Rows
from dsa.state.table import Table, corrupt_row, read_records

__all__ = ["compute_update"]


def compute_update(
    table: Table,
    rows: Rows,
    grad: Floats,
    options: AdamOptions,
    records: Records,
    stamp: int,
    weights: Floats | None = None,
) -> StepReport:
    """Compute the records that one step makes of a coalesced batch. Nothing is stored.

    Rows are read and updated in slices, on as many threads as `dsa.kernels.threads.thread_limit` allows.
    Going through a slice in blocks that fit the second cache was measured to gain nothing.

    Args:
        table: The table.
        rows: ``(B,)`` int64, strictly increasing, inside the table.
        grad: ``(B, D)`` float32, finite.
        options: The options of this step.
        records: ``(B,)`` records, the memory for the result.
        stamp: The stamp of the new records.
        weights: ``(B, D)`` float32, updated in place: the weights of records that hold none.

    Raises:
        CorruptRowError: a stored row of the batch holds implausible values.
        GradientError: an update overflows float32.
    """

    def run(start: int, stop: int) -> tuple[int, StepReport]:
        part = slice(start, stop)
        read_records(table, rows[part], records[part])
        held = None if weights is None else weights[part]
        return start, _step(table, records[part], grad[part], options, stamp, held)

    report = merge_reports(run_slices(run, len(rows)))
    if report.bad >= 0:
        raise _explain(table, rows, grad, report.bad)
    return report


def _step(
    table: Table, records: Records, grad: Floats, options: AdamOptions, stamp: int, weights: Floats | None
) -> StepReport:
    if table.k == 0.0:
        return adam_step(records, grad, options, stamp=stamp, step=table.steps + 1, weights=weights)
    return riemannian_adam_step(records, grad, options, k=table.k, stamp=stamp, step=table.steps + 1)


def _explain(table: Table, rows: Rows, grad: Floats, position: int) -> CorruptRowError | GradientError:
    stored = read_records(table, rows[position : position + 1])
    if describe_fault(stored, 0):
        return corrupt_row(table, rows[position : position + 1], stored, 0)
    largest, moment = float(abs(grad[position]).max()), float(abs(stored["m"]).max())
    return GradientError(
        f"the update of row {int(rows[position])} of table {table.name!r} overflows float32 (the largest "
        f"element of its gradient is {largest:.3g}, of its stored first moment {moment:.3g}): nothing was "
        "changed; clip the gradient, scale the loss down or lower the learning rate"
    )
