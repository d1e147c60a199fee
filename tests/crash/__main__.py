"""The full counts: ``python -m tests.crash --kills 5000 --seed 1``, from the root of the repository.

``configurations`` are drawn runs that are killed; ``steps``, ``changes`` and ``replacements`` kill fixed ones
at chosen places; ``power`` loses power where that is promised to be survived, ``outages`` where it is not;
``places`` interrupts between two instructions, ``interrupts`` by real signals; ``ids`` kills a stream of ids
that come and go about every fifty steps. ``--backend`` puts the tables
of all but the drawn runs into another backend than memmap: ``zarr``, or ``zstd`` for compressed shards.
Prints one line for each kind of fault and ends with status 1 if any state was torn, lost or refused.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from campaign import (
    CHANGES,
    every_place,
    interrupt,
    kill_changes,
    kill_replacements,
    kill_steps,
    lose_power_everywhere,
    refuse,
)
from harness import Figures
from ids import kill_streams
from interrupts import interrupt_for_real
from outages import lose_power_unpromised
from passes import BACKENDS as PASS_BACKENDS
from passes import kill_at_lines, kill_passes
from references import workspace
from scenarios import CHANGING, ENDURING, STEPPING, Scenario, over
from tables import BACKENDS
from wild import kill_configurations

# What syncs many files at once would hardly ever get through otherwise.
_FAILING = {"memmap": 0.05, "zarr": 0.03, "zstd": 0.01}
_KINDS = (
    "configurations",
    "steps",
    "passes",
    "changes",
    "replacements",
    "power",
    "failing-syncs",
    "outages",
    "errors",
    "places",
    "interrupts",
    "ids",
    "lines",
)


def main() -> int:
    """Run what is asked for and print the figures."""
    options = _parser().parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ResourceWarning)
    bad = 0
    for kind in options.only or _KINDS[: None if options.lines else -1]:
        started = time.monotonic()
        with workspace() as space:
            figures = _run(kind, space, options)
        bad += _show(kind, figures, time.monotonic() - started, options.verbose)
    return 1 if bad else 0


def _run(kind: str, space: Path, options: argparse.Namespace) -> Figures:
    seed, backend = options.seed, options.backend
    stepping, changing, enduring = (over(backend, each) for each in (STEPPING, CHANGING, ENDURING))
    runs: dict[str, Callable[[], Figures]] = {
        "configurations": lambda: kill_configurations(space, seed, options.kills),
        "steps": lambda: kill_steps(space, seed, options.steps, scenarios=stepping),
        "passes": lambda: _kill_passes(space, options),
        "changes": lambda: kill_changes(space, seed, options.changes, scenarios=changing),
        "replacements": lambda: kill_replacements(space, seed, options.changes, backend),
        "power": lambda: lose_power_everywhere(space, seed, options.losses, options.draws, 0.0, backend),
        "failing-syncs": lambda: lose_power_everywhere(
            space, seed, options.losses, options.draws, _FAILING[backend], backend
        ),
        "errors": lambda: refuse(space, seed, options.errors, scenarios=enduring),
        "outages": lambda: lose_power_unpromised(space, seed, options.images, backend),
        "places": lambda: interrupt(space, seed, options.places, scenarios=enduring),
        "interrupts": lambda: _interrupt(space, options),
        "ids": lambda: kill_streams(space, seed, options.stream, backend),
        "lines": lambda: _every_line(space, stepping, changing),
    }
    return runs[kind]()


def _kill_passes(space: Path, options: argparse.Namespace) -> Figures:
    figures = Figures()
    with tempfile.TemporaryDirectory(prefix="dsa-crash-", dir=options.disk) as disk:
        for threads in (1, 2, options.threads):
            kills = options.passes // (3 * len(PASS_BACKENDS))
            for layout in PASS_BACKENDS.values():
                figures.add(kill_passes(space, Path(disk), options.seed + threads, kills, threads, layout))
    if options.lines:
        for layout in PASS_BACKENDS.values():
            kill_at_lines(space, figures, layout)
    return figures


def _interrupt(space: Path, options: argparse.Namespace) -> Figures:
    with tempfile.TemporaryDirectory(prefix="dsa-crash-", dir=options.disk) as disk:
        return interrupt_for_real(space, Path(disk), options.seed, options.interrupts, options.threads)


def _every_line(space: Path, stepping: Sequence[Scenario], changing: Sequence[Scenario]) -> Figures:
    figures = Figures()
    for scenario in stepping:
        figures.add(every_place(space, scenario))
    for scenario in changing:
        figures.add(every_place(space, scenario, CHANGES))
    return figures


def _show(kind: str, figures: Figures, seconds: float, verbose: bool) -> int:
    bad = sum(figures.failures.values())
    named = {name: figures.failures[name] for name in ("torn", "lost", "refused", "silent")}
    runs = f"{figures.runs} runs, " if figures.runs else ""
    print(
        f"{kind:14} {runs}{figures.total} faults, {figures.reopened} reopened "
        f"({figures.in_progress} with the call in progress), {figures.told} told of what is not whole, "
        f"{figures.finished} to the end alike, "
        + "".join(f"{name} {number}, " for name, number in named.items())
        + f"otherwise wrong {bad - sum(named.values())}  [{seconds:.0f} s]",
        flush=True,
    )
    if verbose:
        print("   by place:", dict(figures.kills.most_common()))
        print("   while:   ", dict(figures.phases.most_common()))
    for detail in figures.details[: 1000 if verbose else 5]:
        print("   ", detail.replace("\n", "\n    "))
    return bad


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000, help="of configurations that are drawn")
    parser.add_argument("--steps", type=int, default=1000, help="kills inside fixed runs")
    parser.add_argument("--passes", type=int, default=300, help="kills while large batches are changed")
    parser.add_argument(
        "--changes",
        type=int,
        default=100,
        help="kills inside set_curvature and reproject_all, and as many inside resume=False",
    )
    parser.add_argument(
        "--losses", type=int, default=100, help="moments at which power is lost, in each scenario"
    )
    parser.add_argument("--draws", type=int, default=6, help="what may be left of each")
    parser.add_argument(
        "--errors", type=int, default=0, help="runs with failing file operations; 0: every operation"
    )
    parser.add_argument(
        "--places",
        type=int,
        default=300,
        help="runs with Ctrl-C, in each scenario; 0: every place",
    )
    parser.add_argument("--interrupts", type=int, default=100, help="steps that a real SIGINT interrupts")
    parser.add_argument("--stream", type=int, default=5000, help="steps of ids that come and go")
    parser.add_argument("--threads", type=int, default=4, help="of each of these steps")
    parser.add_argument("--disk", help="where their tables lie: a directory on a disk")
    parser.add_argument("--images", type=int, default=300, help="of each kind of outage")
    parser.add_argument(
        "--lines", action="store_true", help="also kill at every line of the package that is run"
    )
    parser.add_argument("--only", action="append", choices=_KINDS, help="only this kind; may be repeated")
    parser.add_argument("--backend", choices=BACKENDS, default="memmap")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verbose", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
