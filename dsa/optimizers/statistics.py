"""What an optimizer has done since it was opened, for people who watch their disk and their training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from dsa.kernels.report import StepReport
from dsa.optimizers.prefetch import Prefetcher
from dsa.schema import Schema
from dsa.state.state_directory import StateDirectory

__all__ = ["Counters", "statistics"]


@final
@dataclass(slots=True)
class Counters:
    """Counts of the update path.

    Args:
        rows_clamped: Row updates that ended on the clamp at the edge of the ball.
        rows_clamped_far: Of these, by a step longer than one hyperbolic unit.
        longest_step: The longest step on a ball, in hyperbolic units.
    """

    rows_clamped: int = 0
    rows_clamped_far: int = 0
    longest_step: float = 0.0

    def note(self, report: StepReport) -> None:
        """Take in the report of one table's step."""
        self.rows_clamped += report.clamped
        self.rows_clamped_far += report.far
        self.longest_step = max(self.longest_step, report.longest)


def logical_bytes(schema: Schema) -> int:
    """Return the bytes of a row's weight, moments and counter: the record without stamp and padding."""
    return sum(schema.field_bytes(field) for field in schema.fields if field.name != "s")


def statistics(
    state: StateDirectory, counters: Counters, prefetcher: Prefetcher
) -> dict[str, int | float | str]:
    """Return the counts as a plain dictionary; `DiskSparseRiemannianAdam.stats` says what they mean."""
    tables = list(state.tables.values())
    writers = [table.writer for table in tables if table.writer is not None]
    return {
        "steps": state.steps_taken,
        "rows_read": sum(table.rows_read for table in tables),
        "rows_written": sum(table.rows_written for table in tables),
        "logical_bytes_read": sum(table.rows_read * logical_bytes(table.backend.schema) for table in tables),
        "logical_bytes_written": sum(
            table.rows_written * logical_bytes(table.backend.schema) for table in tables
        ),
        "record_bytes_written": sum(
            table.rows_written * table.backend.schema.dtype.itemsize for table in tables
        ),
        "journal_bytes_written": state.journal_bytes,
        "overlay_rows": sum(writer.overlay_rows for writer in writers),
        "queue_depth": sum(writer.queued for writer in writers),
        "queue_stalls": sum(writer.stalls for writer in writers),
        "sync_fallbacks": sum(writer.sync_fallbacks for writer in writers),
        "writer_status": _worst([writer.status for writer in writers]),
        "prefetch_rows": prefetcher.announced_rows,
        "prefetch_dropped_rows": prefetcher.dropped_rows,
        "prefetch_hits": prefetcher.hit_rows,
        "rows_clamped": counters.rows_clamped,
        "rows_clamped_far": counters.rows_clamped_far,
        "longest_step": counters.longest_step,
    }


def _worst(statuses: Sequence[str]) -> str:
    for status in ("failed", "draining", "running", "stopped"):
        if status in statuses:
            return status
    return "none"
