"""From a trained table to the report."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from dsa.cli.bench.machine import peak_bytes
from dsa.cli.demo.graph import Graph
from dsa.cli.demo.metrics import reconstruction, sample_nodes
from dsa.cli.demo.report import Report
from dsa.cli.demo.settings import Settings
from dsa.kernels.geodesic import BALL_EPS

__all__ = ["Training", "evaluate", "rows_on_clamp"]

# A float32 row stored on the clamp differs from it by up to 6e-8, so that the count needs some room.
_CLAMP_ROOM = 1.01


@final
@dataclass(frozen=True, slots=True)
class Training:
    """What a call of the command has measured when its training ends.

    Args:
        positions: `(N, D)` float32.
        steps: Over all calls.
        loss: Mean loss of the last epoch.
        seconds: Of this call.
        disk: Bytes of the state, by the lengths of its files and by their blocks.
        memory_growth: Bytes of anonymous memory between the first and the last step, None if unknown.
    """

    positions: NDArray[np.float32]
    steps: int
    loss: float | None
    seconds: float
    disk: tuple[int, int]
    memory_growth: int | None


def evaluate(graph: Graph, settings: Settings, training: Training, nodes: int) -> Report:
    """Rank the ancestors of at most `nodes` nodes and put everything together."""
    started = time.monotonic()
    chosen = sample_nodes(graph, nodes, settings.seed)
    result = reconstruction(graph, training.positions, settings.k, chosen, torch.get_num_threads())
    return Report(
        nodes=len(graph),
        edges=graph.edges,
        dim=settings.dim,
        k=settings.k,
        second_moment=settings.second_moment,
        epochs=settings.epochs,
        steps=training.steps,
        loss=training.loss,
        mean_average_precision=result.mean_average_precision,
        mean_rank=result.mean_rank,
        evaluated_nodes=result.nodes,
        evaluable_nodes=int(np.count_nonzero(np.diff(graph.offsets))),
        training_seconds=training.seconds,
        evaluation_seconds=time.monotonic() - started,
        rows_on_clamp=rows_on_clamp(training.positions, settings.k),
        disk_apparent=training.disk[0],
        disk_occupied=training.disk[1],
        memory_peak=peak_bytes(),
        memory_growth=training.memory_growth,
    )


def rows_on_clamp(positions: NDArray[np.float32], k: float) -> int:
    """Count the rows on the edge that steps are clamped to, `dsa.kernels.geodesic.BALL_EPS` inside the ball.

    Example:
        >>> rows_on_clamp(np.array([[0.99999, 0.0], [0.9999, 0.0]], np.float32), k=1.0)
        1
    """
    radius = math.sqrt(k) * np.linalg.norm(positions.astype(np.float64), axis=1)
    return int(np.count_nonzero(radius > 1.0 - _CLAMP_ROOM * BALL_EPS))
