"""One step of one table, up to the point where it would be stored."""

from __future__ import annotations

from dsa.conventions import AdamOptions
from dsa.errors import CorruptRowError, GradientError
from dsa.kernels.adam import adam_step
from dsa.kernels.checks import describe_fault
from dsa.kernels.layout import Floats
from dsa.kernels.poincare import riemannian_adam_step
from dsa.kernels.report import StepReport
from dsa.schema import Records, Rows
from dsa.table import Table, corrupt_row, read_records

__all__ = ["updated_records"]


def updated_records(
    table: Table, rows: Rows, grad: Floats, options: AdamOptions, *, stamp: int, threads: int
) -> tuple[Records, StepReport]:
    """Return the records that one step makes of a coalesced batch. Nothing is stored.

    Args:
        table: The table.
        rows: ``(B,)`` int64, strictly increasing, inside the table.
        grad: ``(B, D)`` float32, finite.
        options: The options of this step.
        stamp: The stamp of the new records.
        threads: Upper bound on the threads of the pass; the result does not depend on it.

    Raises:
        CorruptRowError: a stored row of the batch holds implausible values.
        GradientError: an update overflows float32.
    """
    records = read_records(table, rows)
    if table.k == 0.0:
        report = adam_step(records, grad, options, stamp=stamp, step=table.steps + 1, threads=threads)
    else:
        report = riemannian_adam_step(
            records, grad, options, k=table.k, stamp=stamp, step=table.steps + 1, threads=threads
        )
    if report.bad >= 0:
        raise _explain(table, rows, grad, report.bad)
    return records, report


def _explain(table: Table, rows: Rows, grad: Floats, position: int) -> CorruptRowError | GradientError:
    stored = read_records(table, rows[position : position + 1])
    if describe_fault(stored, 0):
        return corrupt_row(table, rows[position : position + 1], stored, 0)
    largest = float(abs(grad[position]).max())
    return GradientError(
        f"the update of row {int(rows[position])} of table {table.name!r} overflows float32 (its largest "
        f"gradient element is {largest:.3g}): nothing was "
        "changed; clip the gradient, scale the loss down or lower the learning rate"
    )
