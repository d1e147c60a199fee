"""Steps: what every optimizer does with its batches once they are rows and gradients."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

from dsa.kernels.layout import Floats
from dsa.kernels.report import StepReport
from dsa.kernels.threads import thread_limit
from dsa.kernels.visiting import Gradients
from dsa.optimizers.prefetch import Prefetcher
from dsa.optimizers.statistics import Counters, statistics
from dsa.optimizers.update import explain, update_in_place, update_records
from dsa.optimizers.watch import ClampWatch
from dsa.rules.conventions import Convention
from dsa.schema import Records, Rows
from dsa.state.coalesce import average
from dsa.state.state_directory import StateDirectory
from dsa.state.table import Table, stamp_of
from dsa.state.transactions import Effect, Images

__all__ = ["Batch", "Stepping", "in_dialect"]


class Batch(NamedTuple):
    """A table's part in a step.

    Args:
        table: The table.
        rows: ``(U,)`` int64, strictly increasing, inside the table.
        gradients: Of these rows.
        options: The options of this step, of the kind that the table's rule takes.
        weights: ``(U, D)`` float32, updated in place, of a table whose weights are in memory.
        effects: What puts them back.
    """

    table: Table
    rows: Rows
    gradients: Gradients
    options: object
    weights: Floats | None = None
    effects: Sequence[Effect] = ()


def in_dialect(batches: Sequence[Batch], convention: Convention) -> list[Batch]:
    """Return the batches of a step as a dialect has them: duplicates averaged, empty ones left out."""
    taken = [batch for batch in batches if len(batch.rows) or convention.empty_batch == "counts"]
    if convention.duplicates == "mean":
        return [batch._replace(gradients=average(batch.gradients)) for batch in taken]
    return taken


@final
class Stepping:
    """Takes the steps of an optimizer, and keeps count of them.

    The state is an argument of each call: an optimizer may find its state later than it is made.
    """

    def __init__(self) -> None:
        self.prefetcher = Prefetcher()
        self._counters = Counters()
        self._watch = ClampWatch()

    @contextlib.contextmanager
    def ready(self, state: StateDirectory, threads: int) -> Iterator[StateDirectory]:
        """Hold an open state with nothing pending, allowing so many threads; other callers wait."""
        with state.exclusive, thread_limit(threads):
            state.make_ready()
            yield state

    def take(self, state: StateDirectory, batches: Sequence[Batch]) -> None:
        """Take one step of all tables named, or none.

        Args:
            state: Ready, see `ready`.
            batches: Of different tables.

        Raises:
            CorruptRowError: a stored row is implausible; nothing has changed.
            GradientError: a gradient is not finite, or an update overflows; nothing has changed.
            DiskSpaceError: there is no room; nothing has changed.
        """
        try:
            reports = _transact(state, batches)
        except BaseException as error:
            state.undo()
            # Whoever keeps the error must not keep the journal's memory mapped, which those frames refer to.
            traceback.clear_frames(error.__traceback__)
            raise
        for batch, report in zip(batches, reports, strict=True):
            self.prefetcher.note_use(batch.table, batch.rows)
            self._counters.note(report)
        curved = [
            (len(batch.rows), report.far)
            for batch, report in zip(batches, reports, strict=True)
            if batch.table.k
        ]
        self._watch.note(sum(rows for rows, _ in curved), sum(far for _, far in curved))

    def statistics(self, state: StateDirectory) -> dict[str, int | float | str]:
        """Return the counts, see `dsa.optimizers.statistics`."""
        return statistics(state, self._counters, self.prefetcher)


def _transact(state: StateDirectory, batches: Sequence[Batch]) -> list[StepReport]:
    tables = [batch.table for batch in batches]
    growth = {state.index(batch.table): batch.table.rule.decay_of(batch.options) for batch in batches}
    progress = state.progress().after_step(growth)
    parts = [(batch.table, batch.rows) for batch in batches]
    stamp = stamp_of(progress.global_step)
    prepare = state.prepare_in_place if state.can_be_in_place(tables) else state.prepare
    memory: Sequence[Images | Records] = prepare(progress, parts)
    reports = []
    for batch, room in zip(batches, memory, strict=True):
        reports.append(_update(batch, room, stamp))
        if reports[-1].bad >= 0:
            state.undo()
            raise explain(batch.table, batch.rows, batch.gradients, reports[-1].bad)
    state.commit([effect for batch in batches for effect in batch.effects])
    return reports


def _update(batch: Batch, memory: Images | Records, stamp: int) -> StepReport:
    table, rows, gradients, options, weights, _ = batch
    if isinstance(memory, Images):
        return update_in_place(table, rows, gradients, options, memory, stamp, weights)
    return update_records(table, rows, gradients, options, memory, stamp, weights)
