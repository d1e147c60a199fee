"""What is shown while a run trains: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self, final

from tqdm import tqdm

__all__ = ["Progress"]

_LINES = 10


@final
class Progress:
    """Shows epoch and loss, the mean over the epoch so far.

    Args:
        epochs: Epochs of the run.
        steps_per_epoch: Steps in each.
        done: Steps taken earlier.
    """

    def __init__(self, epochs: int, steps_per_epoch: int, done: int) -> None:
        self._epochs = epochs
        self._per_epoch = steps_per_epoch
        self._steps = done
        self._terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=epochs * steps_per_epoch, initial=done, unit="step", disable=not self._terminal, leave=False
        )
        self._epoch = -1
        self._sum = 0.0
        self._count = 0

    def step(self, epoch: int, loss: float) -> None:
        """Take in a step's loss."""
        if epoch != self._epoch:
            self._epoch, self._sum, self._count = epoch, 0.0, 0
        self._sum += loss
        self._count += 1
        self._steps += 1
        if self._terminal:
            self._bar.set_description(f"epoch {epoch + 1}/{self._epochs}", refresh=False)
            self._bar.set_postfix_str(f"loss {self._sum / self._count:.3f}", refresh=False)
            self._bar.update()
        elif self._steps % self._per_epoch == 0 and self._due(epoch):
            print(f"epoch {epoch + 1} of {self._epochs}: loss {self._sum / self._count:.4f}", flush=True)

    def _due(self, epoch: int) -> bool:
        every = max(1, self._epochs // _LINES)
        return (epoch + 1) % every == 0 or epoch + 1 == self._epochs

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
