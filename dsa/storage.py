"""How a state is to be stored, and the tables it is to hold: what callers ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from dsa.backends.memmap import Allocate, Stride
from dsa.init import FromArray, Initializer
from dsa.metadata import DURABILITIES
from dsa.schema import Schema

__all__ = ["Durability", "Queue", "Storage", "StorageChoice", "TableSpec"]

Durability = Literal["process", "power", "none"]


@final
@dataclass(frozen=True, slots=True)
class TableSpec:
    """A table as the caller asks for it.

    Args:
        name: Any non-empty string.
        schema: Layout of a record.
        source: The rule or the array that gives the first weights.
        k: Curvature magnitude.
        second_moment: The meaning of ``v``.
        init_max_norm_fraction: See `dsa.table.Table`.
    """

    name: str
    schema: Schema
    source: Initializer | FromArray
    k: float
    second_moment: str
    init_max_norm_fraction: float


@final
@dataclass(frozen=True, slots=True)
class Queue:
    """Write-behind, see `dsa.writer.WriteBehind`.

    Args:
        max_size: Batches that may wait.
        put_timeout: Seconds to wait for room.
    """

    max_size: int = 150
    put_timeout: float = 5.0

    def __post_init__(self) -> None:
        if self.max_size < 1:
            raise ValueError(f"max_queue_size={self.max_size!r} is out of range: pass at least 1")
        if not self.put_timeout >= 0.0:
            raise ValueError(
                f"put_timeout={self.put_timeout!r} is out of range: pass a number of seconds >= 0"
            )


@final
@dataclass(frozen=True, slots=True)
class Storage:
    """How a state is stored.

    Args:
        allocate: ``"reserve"`` or ``"sparse"``, see `MemmapBackend.create`.
        stride: None for the rule, ``"packed"``, ``"page"``, or bytes.
        queue: How writes are queued for a thread; None writes them in the step.
        durability: ``"process"``: a step that has returned survives the process. ``"power"``: it survives a
            loss of power. ``"none"``: no journal; a killed process may leave a torn step behind.
    """

    allocate: Allocate = "reserve"
    stride: Stride = None
    durability: Durability = "process"
    queue: Queue | None = None


@final
@dataclass(frozen=True, slots=True)
class StorageChoice:
    """Storage options of which some are left to the default, or to whoever opens the directory first.

    Args:
        allocate: See `Storage`; likewise the others.
        stride: See `Storage`.
        durability: See `Storage`.
        queue: See `Storage`.
    """

    allocate: Allocate | None = None
    stride: Stride = None
    durability: Durability | None = None
    queue: Queue | None = None

    def complete(self) -> Storage:
        """Return the options with the defaults filled in.

        Raises:
            ValueError: an option is not known.
        """
        if self.durability is not None and self.durability not in DURABILITIES:
            raise ValueError(f"durability={self.durability!r} is not known: use one of {DURABILITIES}")
        if self.allocate not in (None, "reserve", "sparse"):
            raise ValueError(f"allocate={self.allocate!r} is not known: use 'reserve' or 'sparse'")
        return Storage(self.allocate or "reserve", self.stride, self.durability or "process", self.queue)
