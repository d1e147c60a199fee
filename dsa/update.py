"""One step of one table, up to the point where it would be stored."""

from __future__ import annotations

from itertools import chain
from typing import Final

from dsa.conventions import AdamOptions
from dsa.errors import CorruptRowError, GradientError
from dsa.kernels.adam import adam_step
from dsa.kernels.checks import describe_fault
from dsa.kernels.layout import Floats
from dsa.kernels.poincare import riemannian_adam_step
from dsa.kernels.report import StepReport, merge_reports
from dsa.kernels.threads import run_slices
from dsa.schema import Records, Rows
from dsa.table import Table, corrupt_row, read_records

__all__ = ["compute_update"]

_BLOCK_BYTES: Final = 800_000
_MIN_BLOCK_ROWS: Final = 64


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

    The batch goes through in blocks whose records stay in the processor's second cache between reading and
    updating, on as many threads as `dsa.kernels.threads.thread_limit` allows.

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
    block = max(_MIN_BLOCK_ROWS, _BLOCK_BYTES // records.dtype.itemsize)

    def run(start: int, stop: int) -> list[tuple[int, StepReport]]:
        reports = []
        for first in range(start, stop, block):
            part = slice(first, min(stop, first + block))
            read_records(table, rows[part], records[part])
            held = None if weights is None else weights[part]
            reports.append((first, _step(table, records[part], grad[part], options, stamp, held)))
        return reports

    report = merge_reports(chain.from_iterable(run_slices(run, len(rows))))
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
