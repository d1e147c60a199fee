"""What a run is told, and the defaults that follow the size of the graph."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, final

from dsa.errors import StateCorruptError

__all__ = ["SecondMoment", "Settings", "default_settings"]

SecondMoment = Literal["coordinate", "frame", "row"]
Sampling = Literal["degree", "uniform"]

# Learning rate, and eps as a multiple of 1/B, for each second moment. One edge contributes at most 1/B to a
# row's gradient where eps meets it (|g|/lambda, or |g|/lambda^2 per coordinate), so a fixed ratio keeps a
# leaf's training the same at every batch size: mammals at B = 64 and 1,024 agree within .005 in MAP.
# Chosen on the mammals closure with D = 10, where half to twice this eps gives the same, and on a
# random tree's closure of 200,000 edges, where twice this eps is slower.
_TUNED: dict[SecondMoment, tuple[float, float]] = {
    "row": (0.5, 0.64),
    "frame": (0.25, 0.32),
    "coordinate": (0.025, 0.032),
}
# In two dimensions leaves reach the clamp before the order is settled unless they go slower.
_LR_IN_THE_DISK = 0.4
# Epochs and burn-in that suit mammals, and how both shrink on larger graphs, whose epochs have more steps.
_EDGES, _EPOCHS, _BURN_IN = 6_542, 300, 80


@final
@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that determines a run besides its graph.

    Args:
        dim: Numbers per node.
        k: The ball has curvature -k.
        second_moment: How Adam's v is kept.
        epochs: Passes over the edges.
        lr: Learning rate after the burn-in; it falls linearly to zero.
        eps: Adam's eps.
        seed: Of the initial positions and of all sampling.
        batch_size: Edges per step, B.
        negatives: Negatives per edge after the burn-in, drawn uniformly.
        pool: Negatives of one batch, shared by its edges.
        burn_in: Epochs at a tenth of `lr`.
        burn_in_negatives: Negatives per edge in the burn-in.
        burn_in_sampling: ``"degree"`` draws them in proportion to the number of descendants plus one.
    """

    dim: int
    k: float
    second_moment: SecondMoment
    epochs: int
    lr: float
    eps: float
    seed: int
    batch_size: int
    negatives: int
    pool: int
    burn_in: int
    burn_in_negatives: int
    burn_in_sampling: Sampling

    def __post_init__(self) -> None:
        for name in ("dim", "epochs", "batch_size", "negatives", "pool", "burn_in_negatives"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}: use 1 or more")
        for name in ("k", "lr", "eps"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)!r}: use a positive number")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed!r}: use 0 to 2**64 - 1")
        if not 0 <= self.burn_in <= self.epochs:
            raise ValueError(f"burn_in is {self.burn_in!r} of {self.epochs} epochs: use 0 to {self.epochs}")
        if self.second_moment not in _TUNED:
            raise ValueError(f"second_moment is {self.second_moment!r}: use one of {sorted(_TUNED)}")
        if self.burn_in_sampling not in ("degree", "uniform"):
            raise ValueError(f"burn_in_sampling is {self.burn_in_sampling!r}: use 'degree' or 'uniform'")

    def to_json(self) -> dict[str, Any]:
        """Return a plain description; `from_json` is its inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Settings:  # noqa: ANN401 - JSON is untyped until it has been checked here
        """Rebuild settings from `to_json`'s description.

        Raises:
            StateCorruptError: the description is not one.
        """
        try:
            return cls(**{field.name: data[field.name] for field in fields(cls)})
        except (KeyError, TypeError, ValueError) as error:
            raise StateCorruptError(
                f"the settings {data!r} can't be read ({error}): restore the file that holds them from a copy"
            ) from error

    def steps_per_epoch(self, edges: int) -> int:
        """Return the batches in an epoch of that many edges; the last may be smaller."""
        return -(-edges // self.batch_size)

    def lr_at(self, step: int, steps_per_epoch: int) -> float:
        """Return the learning rate of a step, counted from 0: a tenth in the burn-in, then linear to zero."""
        burn_in = self.burn_in * steps_per_epoch
        if step < burn_in:
            return self.lr / 10.0
        return self.lr * (1.0 - (step - burn_in) / (self.epochs * steps_per_epoch - burn_in))


def default_settings(edges: int, given: dict[str, Any] | None = None) -> Settings:
    """Return settings for a graph of that many edges, what the caller gave taking precedence.

    The batch grows with the graph up to 1,024 edges; beyond mammals' size epochs go with ``E^(-1/4)`` and
    the burn-in with ``E^(-1/2)``, so that a million edges take some 80,000 steps. eps is a multiple of 1/B
    and lr of 1/sqrt(k), the length of the ball's unit.

    Args:
        edges: Number of edges E.
        given: Fields of `Settings` by name; a value of None counts as not given.

    Raises:
        ValueError: a given value is out of range.

    Example:
        >>> settings = default_settings(6542)
        >>> settings.batch_size, settings.epochs, settings.burn_in, settings.lr, settings.eps
        (64, 300, 80, 0.5, 0.01)
        >>> settings = default_settings(1_000_000, {"dim": 5, "second_moment": "frame"})
        >>> settings.batch_size, settings.epochs, settings.burn_in, settings.lr
        (1024, 85, 6, 0.25)
    """
    chosen = {name: value for name, value in (given or {}).items() if value is not None}
    mode: SecondMoment = chosen.get("second_moment", "row")
    lr, eps_of_edge = _TUNED.get(mode, _TUNED["row"])
    batch_size = max(1, chosen.get("batch_size", _batch_size(edges)))
    growth = max(1.0, edges / _EDGES)
    default_epochs = round(_EPOCHS * growth**-0.25)
    epochs = chosen.get("epochs", default_epochs)
    disk = _LR_IN_THE_DISK if chosen.get("dim", 10) <= 2 else 1.0
    defaults: dict[str, Any] = {
        "dim": 10,
        "k": 1.0,
        "second_moment": mode,
        "epochs": epochs,
        "lr": disk * lr / math.sqrt(max(chosen.get("k", 1.0), 1e-12)),
        "eps": eps_of_edge / batch_size,
        "seed": 0,
        "batch_size": batch_size,
        "negatives": 50,
        "pool": max(200, batch_size),
        "burn_in": round(_BURN_IN * growth**-0.5 * epochs / default_epochs),
        "burn_in_negatives": 5,
        "burn_in_sampling": "degree",
    }
    return Settings(**{**defaults, **chosen})


def _batch_size(edges: int) -> int:
    return int(2 ** min(10, max(6, round(math.log2(max(1, edges) / 100)))))
