"""Losses of power at random moments of a run, and what opens afterwards."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from endurance import Endurance
from faults import end_trace, trace_lines, watch
from harness import Figures
from lives import count_passages
from power import Device, Image, after_outage
from references import Reference, WrongState, locate

__all__ = ["Loss", "Losses", "lose_power"]


class Loss(NamedTuple):
    """A moment: what may be on the device, how many operations have returned and how many were begun."""

    place: str
    image: Image
    done: int
    started: int


@dataclass
class Losses:
    """Takes images of a run at chosen passages.

    Args:
        device: The run's.
        chosen: Pairs of a place and the number of its passage.
    """

    device: Device
    chosen: set[tuple[str, int]]
    taken: list[Loss] = field(default_factory=list)
    done: int = 0
    started: int = 0
    _seen: dict[str, int] = field(default_factory=dict)

    def passing(self, place: str) -> None:
        """Count, and take an image where one is wanted."""
        self._seen[place] = count = self._seen.get(place, 0) + 1
        if (place, count) in self.chosen:
            done = self.done  # before the image: another thread may go on meanwhile
            image = self.device.image()
            self.taken.append(Loss(place, image, done, self.started))

    def report(self, message: tuple[Any, ...]) -> None:
        """Follow how far the run is."""
        if message[0] == "begin":
            self.started = message[1] + 1
        elif message[0] == "done":
            self.done = message[1]


def lose_power(
    reference: Reference,
    directory: Path,
    rng: random.Random,
    losses: int,
    draws: int,
    failing: float = 0.0,
    figures: Figures | None = None,
) -> Figures:
    """Run a scenario, lose power at random moments, and open what may be left each time.

    Args:
        reference: The scenario, of durability ``"power"``.
        directory: Where to work.
        rng: Draws everything.
        losses: How many moments.
        draws: Outcomes of each.
        failing: The share of syncs that fail.
        figures: Where to count.
    """
    figures = figures or Figures()
    taken = _run(reference, directory / "run", rng, losses, failing, figures)
    for number, loss in enumerate(taken):
        for outcome in range(draws):
            _reopen(
                reference, directory / f"image-{number}-{outcome}", loss, rng, figures, deeper=outcome == 0
            )
    return figures


def _run(
    reference: Reference, path: Path, rng: random.Random, losses: int, failing: float, figures: Figures
) -> list[Loss]:
    pause = rng.randint(4, 15)

    def plain() -> None:
        Endurance(reference, reference.copy(path), pause=pause).run()

    chosen = _choose(plain, rng, losses)
    device = Device(reference.copy(path))
    follower = Losses(device, chosen)
    device.fail_syncs = lambda: rng.random() < failing
    run = Endurance(reference, path, follower.report, pause)
    try:
        _followed(device, follower, run.run)
        figures.finished += 1
    except Exception as error:
        kind = getattr(error, "kind", "refused")
        figures.fail(kind, f"{reference.scenario.name}, running on after {run.errors}: {error!r}")
    return follower.taken


def _choose(run: Callable[[], None], rng: random.Random, losses: int) -> set[tuple[str, int]]:
    counts = count_passages(run, lines=False)
    # Half of the moments at named points, where more is at stake than between two lines.
    lines = count_passages(run, lines=True)
    chosen = set()
    for number in range(losses):
        source = counts if number % 2 else lines
        place = rng.choice(sorted(source))
        chosen.add((place, rng.randint(1, source[place])))
    return chosen


def _followed(device: Device, follower: Losses, run: Callable[[], object]) -> None:
    watch.every = follower.passing
    try:
        with device.following():
            trace_lines(follower.passing)
            run()
    finally:
        end_trace()
        watch.reset()
        device.close()


def _reopen(
    reference: Reference, path: Path, loss: Loss, rng: random.Random, figures: Figures, deeper: bool
) -> None:
    loss.image.draw(rng, path)
    figures.kills[loss.place] += 1
    try:
        if deeper and (again := _recover(reference, path, loss, rng)) is not None:
            shutil.rmtree(path)
            again.image.draw(rng, path)
        with after_outage(), reference.scenario.build(path, resume=True) as optimizer:
            found = locate(reference, optimizer, path, loss.done, loss.started)
        figures.reopened += 1
        figures.in_progress += found > loss.done
    except Exception as error:
        kind = error.kind if isinstance(error, WrongState) else "refused"
        where = f"{reference.scenario.name}, lost at {loss.place}, {loss.done} done, {loss.started} begun"
        figures.fail(kind, f"{where}, deeper={deeper}: {error!r}")
    shutil.rmtree(path)


def _recover(reference: Reference, path: Path, loss: Loss, rng: random.Random) -> Loss | None:
    """Open an image and lose power again while that is under way."""

    def opening() -> None:
        with after_outage():
            reference.scenario.build(path, resume=True).close()

    # What was drawn, once more: to count what an opening passes, and to lose power in one.
    again = random.Random(rng.random())
    same = again.getstate()
    shutil.rmtree(path)
    loss.image.draw(again, path)
    chosen = _choose(opening, rng, 2)
    shutil.rmtree(path)
    again.setstate(same)
    loss.image.draw(again, path)
    device = Device(path)
    follower = Losses(device, chosen, done=loss.done, started=loss.started)
    _followed(device, follower, opening)
    return rng.choice(follower.taken) if follower.taken else None
