"""Steps on the Poincaré ball: dsa with every second moment, its kernel alone, and the step through geoopt."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Final

from dsa.cli.bench.ball_contenders import Geoopt, KernelAlone, load_geoopt, start_in_ball
from dsa.cli.bench.entry import Tournament, enter, with_one_thread
from dsa.cli.bench.ours import Ours
from dsa.cli.bench.results import Footprint, Group
from dsa.cli.bench.settings import Settings
from dsa.cli.bench.timing import Contender, Entry
from dsa.rules.conventions import SecondMoment, VTransport

__all__ = ["ball_groups"]

# Name, second moment, transport of v, and the variant of the step through geoopt that comes closest.
_Variant = tuple[str, SecondMoment, VTransport, str]
_VARIANTS: Final[tuple[_Variant, ...]] = (
    ("row", "row", "tensor", "row"),
    ("coordinate", "coordinate", "tensor", "coordinate"),
    ("coordinate_sqrt", "coordinate", "sqrt", "coordinate"),
    ("frame", "frame", "tensor", "coordinate"),
)


def ball_groups(settings: Settings, directory: Path, seconds: float) -> list[Group]:
    """Compare whole steps on the ball at every batch size.

    Args:
        settings: The sizes.
        directory: For files.
        seconds: In all.
    """
    rows, dim = settings.hyperbolic_rows, settings.dim
    groups = [
        Group("hyperbolic", f"on the ball, warm, {rows:,} x {dim} float32, B = {batch:,}", rows, dim, batch)
        for batch in settings.hyperbolic_batches
    ]
    geoopt = load_geoopt()
    if geoopt is None:
        for group in groups:
            group.notes.append("geoopt is not installed: there is nothing to compare with here")
    for moment in ("coordinate", "row"):
        variants = [variant for variant in _VARIANTS if variant[3] == moment]
        with ExitStack() as stack:
            baselines: list[Entry] = []
            if geoopt is not None:
                baselines = with_one_thread(enter(stack, _geoopt(geoopt, rows, dim, moment), rows, dim))
            tournament = Tournament(groups, baselines, settings.seed)
            for variant in variants:
                _race(tournament, variant, rows, dim, directory, seconds / len(_VARIANTS))
            tournament.finish()
    return groups


def _race(
    tournament: Tournament, variant: _Variant, rows: int, dim: int, directory: Path, seconds: float
) -> None:
    """Race dsa's whole step and its kernel alone."""
    name, second_moment, v_transport, _ = variant
    with ExitStack() as stack:
        ours = enter(stack, _ours(directory, rows, dim, name, second_moment, v_transport), rows, dim)
        what = f"dsa's kernel alone, {_words(name)}"
        kernel = KernelAlone(f"kernel_{name}", what, dim, second_moment, v_transport)
        stack.callback(kernel.close)
        tournament.race([ours, Entry(kernel, Footprint())], seconds)


def _geoopt(geoopt: ModuleType, rows: int, dim: int, second_moment: str) -> Callable[[], Contender]:
    return lambda: Geoopt(geoopt, rows, dim, second_moment)


def _ours(
    directory: Path, rows: int, dim: int, name: str, second_moment: SecondMoment, v_transport: VTransport
) -> Callable[[], Contender]:
    return lambda: Ours(
        directory / name,
        start_in_ball(rows, dim),
        k=1.0,
        second_moment=second_moment,
        v_transport=v_transport,
        key=f"dsa_{name}",
        what=f"dsa, {_words(name)}",
    )


def _words(name: str) -> str:
    return {
        "row": "v per row",
        "coordinate": "v per coordinate",
        "coordinate_sqrt": "v per coordinate, its root transported",
        "frame": "v per frame component",
    }[name]
