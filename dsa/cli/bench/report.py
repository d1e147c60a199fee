"""The results as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from dsa.cli.bench.results import Footprint, Group, Line, Results
from dsa.cli.bench.text import number, size
from dsa.inspection.text import aligned

__all__ = ["render"]

# Groups in which dsa is meant not to trap, and how often a row it may all the same.
_STEADY: Final = ("warm", "loop", "small", "gpu", "hyperbolic")
_FEW_TRAPS: Final = 0.05


def render(results: Results) -> str:
    """Return the whole report, ending with what dsa lost."""
    parts = [_machine(results.machine), *results.notes, ""]
    if results.first_step_seconds:
        first = ", ".join(f"{seconds:.2f} s {space}" for space, seconds in results.first_step_seconds.items())
        parts += [f"first step of a process, kernels compiled or loaded from numba's cache: {first}"]
    if results.device is not None:
        parts += [_device(results.device)]
    for group in results.groups:
        parts += ["", *_group(group)]
    if results.goals:
        parts += ["", "the figures that dsa is meant to reach"]
        rows = [
            [
                g["what"],
                number(g["measured"]),
                _optional(g["by_cpu_time"]),
                f"{g['bound']} {g['goal']:g}",
                g["met"],
            ]
            for g in results.goals
        ]
        parts += _ruled(["", "median", "by CPU time", "goal", "met"], rows)
    losses = results.losses or ["no comparison of this run was lost"]
    return "\n".join([*parts, "", "where it loses", *(f"- {loss}" for loss in losses), ""])


def _machine(machine: dict[str, Any]) -> str:
    memory = machine["memory_bytes"]
    ahead = machine["read_ahead_kib"]
    load = machine["load_average"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return "\n".join(
        [
            f"{machine['cpu']}, {machine['usable_cores']} of {machine['cores']} cores usable, "
            f"{machine['torch_threads']} torch threads, "
            f"{'memory unknown' if memory is None else size(memory) + ' memory'}, "
            f"{machine['gpu'] or 'no GPU'}",
            f"{machine['system']} {machine['kernel']}, file system {machine['file_system'] or 'unknown'}, "
            f"read-ahead {'unknown' if ahead is None else f'{ahead} KiB'}, "
            f"load average at the start {'unknown' if load is None else f'{load[0]:.1f}'}",
            versions,
        ]
    )


def _device(device: dict[str, Any]) -> str:
    text = (
        f"disk, random 4 KiB: {device['reads_per_second']:,.0f} reads/s (queue depth {device['read_depth']}) "
        f"and {device['writes_per_second']:,.0f} writes/s (queue depth {device['write_depth']})"
    )
    if not device["direct"]:
        text += "; through the page cache, since O_DIRECT is not to be had here: more than the disk gives"
    return text


def _group(group: Group) -> list[str]:
    counted = any("pages_per_row" in line.details for line in group.lines)
    names = {line.baseline for line in group.lines} - {""}
    ratio = f"x {_baseline(names)}"
    header = [group.title, "ms/step", "quartiles", "CPU ms", "steps", "rows/s", ratio, "by CPU time"]
    header += [*(["pages/row"] * counted), "memory"]
    rows = [_cells(line, counted) for line in group.lines]
    return [*_ruled(header, rows), *_remarks(group)]


def _baseline(names: set[str]) -> str:
    if not names:
        return "baseline"
    if all(name.startswith("geoopt") for name in names):
        return "geoopt"
    return "SparseAdam" if all(name.startswith("sparse_adam") for name in names) else "naive"


def _cells(line: Line, counted: bool) -> list[str]:
    low, high = line.quartiles
    cells = [
        line.what,
        number(line.milliseconds),
        f"{number(low)} - {number(high)}",
        number(line.cpu_milliseconds),
        str(line.steps),
        f"{line.rows_per_second:,.0f}",
        _optional(line.ratio),
        _optional(line.cpu_ratio),
    ]
    if counted:
        pages = line.details.get("pages_per_row")
        cells.append("" if pages is None else f"{pages:.2f}")
    return [*cells, _memory(line.footprint)]


def _optional(value: float | None) -> str:
    return "" if value is None else number(value)


def _remarks(group: Group) -> list[str]:
    remarks = [f"  {note}" for note in group.notes]
    for line in group.lines:
        steady = group.kind in _STEADY and line.key.startswith("dsa") and line.key != "dsa_power"
        if steady and line.traps_per_row > _FEW_TRAPS:
            remarks.append(
                f"  {line.what}: {line.traps_per_row:.2f} accesses for a row met a page that the system had "
                "written back meanwhile; that is not the steady state"
            )
        share = line.details.get("share_of_device_limit")
        if share is not None:
            limit = line.details["device_limit_rows_per_second"]
            remarks.append(
                f"  {line.what}: {share:.0%} of the {limit:,.0f} rows/s at which the disk is saturated; "
                f"{line.details['step_milliseconds']:.1f} ms a step before the flush"
            )
    return remarks


def _memory(footprint: Footprint) -> str:
    parts = [
        (footprint.anonymous, "RAM"),
        (footprint.file, "file"),
        (footprint.vram, "VRAM"),
    ]
    return " + ".join(f"{size(count)} {what}" for count, what in parts if count)


def _ruled(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [line.removeprefix("  ").rstrip() for line in aligned(header, rows)]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]
