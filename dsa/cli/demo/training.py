"""Training of one table of node positions, from disk, one batch's rows at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsa.cli.demo.directory import Run, save_run, state_path
from dsa.cli.demo.graph import Graph
from dsa.cli.demo.loss import softmax_loss
from dsa.cli.demo.sampling import Batch, Sampler
from dsa.optimizers.sparse_riemannian_adam import DiskSparseRiemannianAdam
from dsa.rules.init import Uniform

__all__ = ["Outcome", "open_table", "read_positions", "train"]

_INITIAL = 1e-3
_BLOCK_ROWS = 65_536
_SECONDS_BETWEEN_FLUSHES = 5.0


class Outcome(NamedTuple):
    """Where a call of `train` ended.

    steps: the run's steps so far, those of earlier calls included.
    finished: all epochs are done.
    loss: mean loss of the last epoch that was finished, None before that.
    """

    steps: int
    finished: bool
    loss: float | None


def open_table(graph: Graph, run: Run, directory: Path, resume: bool | None) -> DiskSparseRiemannianAdam:
    """Open the optimizer over a table with a row for each node.

    The rows start within 1e-3 of the origin in the ball of curvature -1; other curvatures scale the picture.

    Args:
        graph: The nodes.
        run: The settings.
        directory: The demo's directory.
        resume: As in `DiskSparseRiemannianAdam`.
    """
    settings = run.settings
    bound = _INITIAL / math.sqrt(settings.k)
    table = Uniform(len(graph), settings.dim, -bound, bound, seed=settings.seed)
    return DiskSparseRiemannianAdam(
        {"nodes": table},
        lr=settings.lr,
        eps=settings.eps,
        k=settings.k,
        disk_dir=state_path(directory),
        resume=resume,
        second_moment=settings.second_moment,
    )


def train(
    graph: Graph,
    run: Run,
    directory: Path,
    optimizer: DiskSparseRiemannianAdam,
    *,
    on_step: Callable[[int, float], None] = lambda epoch, loss: None,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Take the steps that the optimizer's state has still to take.

    The state's own step count says where to go on, so a step is neither skipped nor repeated, and a run that
    was interrupted ends with the same bits as one that wasn't.

    Args:
        graph: The edges.
        run: The settings, and the loss so far.
        directory: The demo's directory, whose description is renewed as epochs end.
        optimizer: From `open_table`; stays open.
        on_step: Called after each step with the epoch and the batch's loss.
        stop: Asked after each step; True ends the call there.
    """
    sampler = Sampler(graph, run.settings)
    per_epoch = run.settings.steps_per_epoch(graph.edges)
    last = run.settings.epochs * per_epoch
    loss, stopped, saved = run.loss, False, time.monotonic()
    while optimizer.global_step < last and not stopped:
        epoch, start = divmod(optimizer.global_step, per_epoch)
        losses: list[float] = []
        for batch in sampler.batches(epoch, start):
            optimizer.param_groups[0]["lr"] = run.settings.lr_at(optimizer.global_step, per_epoch)
            losses.append(_step(optimizer, batch, run.settings.k))
            on_step(epoch, losses[-1])
            stopped = stop()
            if stopped:
                break
        if optimizer.global_step == (epoch + 1) * per_epoch:
            loss = float(np.mean(losses))
        if time.monotonic() - saved > _SECONDS_BETWEEN_FLUSHES:
            saved = _save(directory, run, loss, optimizer)
    _save(directory, run, loss, optimizer)
    return Outcome(optimizer.global_step, optimizer.global_step == last, loss)


def _step(optimizer: DiskSparseRiemannianAdam, batch: Batch, k: float) -> float:
    points = optimizer.read_rows(batch.rows).numpy().astype(np.float64)
    loss, gradient = softmax_loss(points, k, batch.children, batch.candidates)
    optimizer.step({"nodes": (batch.rows, gradient.astype(np.float32))})
    return loss


def _save(directory: Path, run: Run, loss: float | None, optimizer: DiskSparseRiemannianAdam) -> float:
    optimizer.flush()
    save_run(directory, Run(run.settings, run.fingerprint, loss))
    return time.monotonic()


def read_positions(optimizer: DiskSparseRiemannianAdam, nodes: int) -> NDArray[np.float32]:
    """Return the positions of all nodes, `(N, D)` float32, read block by block; not for use in training."""
    blocks = [
        optimizer.read_rows(np.arange(first, min(first + _BLOCK_ROWS, nodes))).numpy()
        for first in range(0, nodes, _BLOCK_ROWS)
    ]
    return np.concatenate(blocks)
