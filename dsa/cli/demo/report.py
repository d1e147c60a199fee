"""The result of a run, as a table for people and as JSON for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, final

__all__ = ["Report", "format_report"]


@final
@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the demo prints.

    Args:
        nodes: N.
        edges: E.
        dim: Numbers per node.
        k: The ball has curvature -k.
        second_moment: The mode of Adam's v.
        epochs: Passes over the edges.
        steps: Steps over all calls.
        loss: Mean loss of the last epoch.
        mean_average_precision: Of the reconstruction.
        mean_rank: Of the reconstruction.
        evaluated_nodes: Nodes that these were taken over.
        evaluable_nodes: Nodes that have an ancestor.
        training_seconds: Of this call.
        evaluation_seconds: Of this call.
        rows_on_clamp: Rows on the edge that the ball is clamped to.
        disk_apparent: Bytes of the state by length of its files.
        disk_occupied: Bytes of the state by blocks.
        memory_peak: Largest resident size in bytes, None if unknown.
        memory_growth: Bytes of anonymous memory gained between the first and the last step, None if unknown.
    """

    nodes: int
    edges: int
    dim: int
    k: float
    second_moment: str
    epochs: int
    steps: int
    loss: float | None
    mean_average_precision: float
    mean_rank: float
    evaluated_nodes: int
    evaluable_nodes: int
    training_seconds: float
    evaluation_seconds: float
    rows_on_clamp: int
    disk_apparent: int
    disk_occupied: int
    memory_peak: int | None
    memory_growth: int | None

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def format_report(report: Report) -> str:
    """Return the lines to print, names aligned."""
    lines = [
        ("nodes, edges", f"{report.nodes:,}, {report.edges:,}"),
        ("table", f"dim {report.dim}, k {report.k:g}, second moment per {report.second_moment}"),
        ("epochs, steps", f"{report.epochs:,}, {report.steps:,}"),
        ("loss", "unknown" if report.loss is None else f"{report.loss:.4f}"),
        ("MAP", f"{report.mean_average_precision:.4f}{_sampled(report)}"),
        ("mean rank", f"{report.mean_rank:.3f}{_sampled(report)}"),
        ("time", f"{report.training_seconds:.1f} s training, {report.evaluation_seconds:.1f} s evaluation"),
        ("on disk", f"{_size(report.disk_occupied)} ({_size(report.disk_apparent)} by file length)"),
        ("memory", f"{_size(report.memory_peak)} at most, {_size(report.memory_growth)} gained in training"),
        ("on the clamp", f"{report.rows_on_clamp:,} of {report.nodes:,} rows"),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def _sampled(report: Report) -> str:
    if report.evaluated_nodes == report.evaluable_nodes:
        return ""
    return f"  (over a sample of {report.evaluated_nodes:,} of {report.evaluable_nodes:,} nodes)"


def _size(count: int | None) -> str:
    if count is None:
        return "unknown"
    value = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if abs(value) < 1024.0:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024.0
    return f"{value:.2f} GiB"
