"""The full counts: ``python -m tests.crash --kills 1000 --seed 1``, from the root of the repository.

``--backend`` puts the tables into another backend than memmap: ``zarr``, or ``zstd`` for compressed shards.
Prints one line for each kind of fault and ends with status 1 if any state was torn, lost or refused.
"""

from __future__ import annotations

import argparse
import sys
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
from references import workspace
from scenarios import CHANGING, ENDURING, STEPPING, Scenario, over
from tables import BACKENDS

# What syncs many files at once would hardly ever get through otherwise.
_FAILING = {"memmap": 0.05, "zarr": 0.03, "zstd": 0.01}
_KINDS = ("steps", "changes", "replacements", "power", "failing-syncs", "errors", "interrupts", "lines")


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
        "steps": lambda: kill_steps(space, seed, options.kills, scenarios=stepping),
        "changes": lambda: kill_changes(space, seed, options.changes, scenarios=changing),
        "replacements": lambda: kill_replacements(space, seed, options.changes, backend),
        "power": lambda: lose_power_everywhere(space, seed, options.losses, options.draws, 0.0, backend),
        "failing-syncs": lambda: lose_power_everywhere(
            space, seed, options.losses, options.draws, _FAILING[backend], backend
        ),
        "errors": lambda: refuse(space, seed, options.errors, scenarios=enduring),
        "interrupts": lambda: interrupt(space, seed, options.interrupts, scenarios=enduring),
        "lines": lambda: _every_line(space, stepping, changing),
    }
    return runs[kind]()


def _every_line(space: Path, stepping: Sequence[Scenario], changing: Sequence[Scenario]) -> Figures:
    figures = Figures()
    for scenario in stepping:
        figures.add(every_place(space, scenario))
    for scenario in changing:
        figures.add(every_place(space, scenario, CHANGES))
    return figures


def _show(kind: str, figures: Figures, seconds: float, verbose: bool) -> int:
    bad = sum(figures.failures.values())
    print(
        f"{kind:13} {figures.total:6} faults, {figures.reopened} reopened "
        f"({figures.in_progress} with the call in progress), {figures.finished} runs to the end alike, "
        f"torn {figures.failures['torn']}, lost {figures.failures['lost']}, "
        f"otherwise wrong {bad - figures.failures['torn'] - figures.failures['lost']}  [{seconds:.0f} s]",
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
    parser.add_argument("--kills", type=int, default=1000, help="inside ordinary runs")
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
        "--interrupts", type=int, default=300, help="runs with Ctrl-C, in each scenario; 0: every place"
    )
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
