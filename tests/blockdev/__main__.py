"""Lost power and failing disks on real file systems: ``python -m tests.blockdev --images 1000 --eio 200``.

From the root of the repository, as root: it mounts file systems. Prints what was found for each policy and
ends with status 1 if anything was that must not be.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "crash"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from device import BlockDevice
from filesystems import FILESYSTEMS, SIZE, unavailable
from harness import Figures
from power_losses import lose_power
from training_runs import POLICIES
from write_failures import fail_writes


def main() -> int:
    """Run what is asked for and print the figures."""
    options = _parser().parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ResourceWarning)
    bad = 0
    for filesystem in options.filesystem or FILESYSTEMS:
        if reason := unavailable(filesystem):
            print(f"{filesystem}: left out, for {reason}", flush=True)
            bad += filesystem in (options.filesystem or ())
            continue
        with BlockDevice(SIZE) as device:
            bad += _run(device, filesystem, options)
    return 1 if bad else 0


def _run(device: BlockDevice, filesystem: str, options: argparse.Namespace) -> int:
    bad = 0
    policies = options.policy or POLICIES
    for what, call, number in (("images", lose_power, options.images), ("EIO", fail_writes, options.eio)):
        if what == "EIO" and filesystem == "btrfs":
            continue  # it writes everything to a new place, which can't be known before
        for policy in policies:
            figures, started = Figures(), time.monotonic()
            rng = random.Random(f"{options.seed} {filesystem} {what} {policy}")
            call(device, filesystem, rng, policy, number // len(policies), figures)
            bad += _show(f"{filesystem}, {what}, {policy}", figures, time.monotonic() - started, options)
    return bad


def _show(title: str, figures: Figures, seconds: float, options: argparse.Namespace) -> int:
    bad = sum(figures.failures.values())
    print(f"{title}: {figures.total}, {figures.reopened} opened, {bad} wrong  [{seconds:.0f} s]")
    for kind, count in sorted(figures.phases.items()):
        print(f"    {count:6} {kind}")
    if options.verbose:
        print("    by fault:", dict(figures.kills.most_common()))
    for detail in figures.details[: 1000 if options.verbose else options.details]:
        print("   -", detail.replace("\n", "\n     "))
    sys.stdout.flush()
    return bad


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.blockdev", description=__doc__)
    parser.add_argument("--images", type=int, default=1000, help="losses of power, over all policies")
    parser.add_argument(
        "--eio", type=int, default=200, help="runs on a disk that fails for a while, likewise"
    )
    parser.add_argument("--policy", action="append", choices=POLICIES, help="may be repeated; all by default")
    parser.add_argument(
        "--filesystem",
        action="append",
        choices=FILESYSTEMS,
        help="may be repeated; those there are by default",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--details", type=int, default=3, help="failures to show, of each kind of run")
    parser.add_argument("--verbose", action="store_true", help="show all of them")
    return parser


if __name__ == "__main__":
    sys.exit(main())
