"""Drawing configurations: what a run is made of, and its calls."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from configurations import Call, Configuration, Shape

__all__ = ["draw_configuration"]

_TABLE_CALLS = {
    "plain": 10,
    "prefetched": 2,
    "curving": 1,
    "curve": 2,
    "reproject": 1,
    "flush": 1,
    "reopen": 1,
    "export": 1,
    "difference": 1,
    "beside": 1,
    "import": 2,
    "fork": 1,
    "add": 1,
}
_MODULE_CALLS = {
    "plain": 10,
    "prefetched": 2,
    "load": 1,
    "moments": 1,
    "flush": 1,
    "reopen": 1,
    "export": 1,
    "difference": 1,
    "beside": 1,
    "import": 2,
    "fork": 1,
}


@dataclass
class _Drawing:
    rng: random.Random
    exported: list[int] = field(default_factory=list)

    def calls(self, weights: dict[str, int], count: int) -> Iterator[Call]:
        for number in range(count):
            (kind,) = self.rng.choices(list(weights), list(weights.values()))
            if kind in ("import", "difference") and not self.exported:
                kind = "export"
            refers = self.rng.choice(self.exported) if kind in ("import", "difference") else -1
            if kind == "add":
                # Checkpoints of other tables don't fit any more.
                self.exported.clear()
            if kind == "export":
                self.exported.append(number)
            yield Call(kind, number, refers)


def draw_configuration(seed: int, durability: str | None = None) -> Configuration:
    """Draw a configuration.

    Args:
        seed: Everything follows from it.
        durability: One that is wanted.
    """
    rng = random.Random(f"configuration {seed}")
    modules = rng.random() < 0.45
    curved = not modules and rng.random() < 0.6
    kinds = ["ram-a", "disk-b", "bag-c", "ram-d"] if modules else ["rule-a", "array-b", "rule-c", "array-d"]
    chosen = rng.sample(kinds, rng.randint(2 if modules else 1, 4))
    if modules and all(name.startswith("ram") for name in chosen):
        chosen = [*chosen[:1], "disk-b"]
    large = rng.random() < 0.5
    shapes = tuple(
        Shape(
            name,
            rng.randint(1500, 3500) if large and number == 0 else rng.randint(40, 500),
            rng.choice([1, 3, 4, 8]),
            rng.choice([0.5, 1.0]) if curved and rng.random() < 0.7 else 0.0,
            rng.choice([None, 0.3]) if modules and not name.startswith("ram") else None,
        )
        for number, name in enumerate(chosen)
    )
    drawn = Configuration(
        seed,
        modules,
        rng.choice(["memmap", "memmap", "zarr", "zstd"]),
        durability or rng.choice(["process"] * 5 + ["power"] * 3 + ["none"]),
        rng.random() < 0.4,
        rng.randint(1, 4),
        rng.choice([2048, 1 << 14, 1 << 17]),
        "coordinate" if modules else rng.choice(["coordinate", "frame", "row"]),
        shapes,
        tuple(_Drawing(rng).calls(_MODULE_CALLS if modules else _TABLE_CALLS, rng.randint(8, 18))),
    )
    if rng.random() > 0.3:
        return drawn
    # Two of a bfloat16 are a word.
    even = tuple(shape._replace(dim=shape.dim + shape.dim % 2) for shape in shapes)
    return replace(drawn, shapes=even, state_dtype="bfloat16")
