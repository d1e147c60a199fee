"""An optimizer over another one that takes a step with the gradients of several micro-batches."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, Self, overload

import torch

from dsa.optimizers.sparse_adagrad import DiskSparseAdagrad
from dsa.optimizers.sparse_adam import DiskSparseAdam

__all__ = ["Accumulating"]


class Accumulating(torch.optim.Optimizer):
    """What RecIS's sparse optimizers share: gradients add up over several calls of `step`, the last updates.

    Gradients stay where autograd leaves them and sums them, so that rows that micro-batches share get the sum
    of their gradients; divide the loss where a mean is meant. The learning rate is read in the call that
    updates.

    Args:
        optimizer: The optimizer that updates. Its groups are shared with this one, so that schedulers work.
        several: Whether several micro-batches may make one update.

    Example:
        >>> import tempfile
        >>> from dsa import DiskEmbedding, init
        >>> embedding = DiskEmbedding(9, 1, init=init.Zeros(9, 1), state_dir=tempfile.mkdtemp())
        >>> optimizer = Accumulating(DiskSparseAdam(embedding.parameters(), lr=0.1))
        >>> optimizer.set_grad_accum_steps(2)
        >>> for ids in ([7, 3], [9 - 1, 3]):
        ...     optimizer.zero_grad()
        ...     embedding(torch.tensor(ids)).sum().backward()
        ...     optimizer.step()
        >>> optimizer.global_step
        1
        >>> optimizer.close()
    """

    def __init__(self, optimizer: DiskSparseAdam | DiskSparseAdagrad, *, several: bool = True) -> None:
        self._disk = optimizer
        self._several = several
        self._calls = 0
        self._accum_steps = 1
        super().__init__(optimizer.param_groups, optimizer.defaults)

    @property
    def disk(self) -> DiskSparseAdam | DiskSparseAdagrad:
        """The optimizer that updates, which has checkpoints, counts and announcements of rows."""
        return self._disk

    @property
    def global_step(self) -> int:
        """The number of updates that the state has had."""
        return self._disk.global_step

    def set_grad_accum_steps(self, steps: int) -> None:
        """Set how many calls of `step` make one update.

        An update happens where the count of calls since the optimizer was made is a multiple of it.

        Args:
            steps: Micro-batches of a batch, >= 1.

        Raises:
            ValueError: it is no such number.
        """
        try:
            count = operator.index(steps)
        except TypeError:
            count = 0
        if count < 1:
            raise ValueError(f"steps={steps!r} can't be counted up to: pass an integer >= 1")
        if count > 1 and not self._several:
            raise ValueError(
                f"steps={steps!r} would need the squares of each micro-batch, and autograd keeps their "
                f"sum alone: use the optimizer whose name has no Sum instead of {type(self).__name__}"
            )
        self._accum_steps = count

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Count a micro-batch, and update with the gradients at hand if it was the last of a batch.

        Args:
            closure: Computes the loss and adds its gradients to those that are there.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: a gradient is dense; nothing has changed.
            GradientError: a gradient is not finite; nothing has changed.
            CorruptRowError: a stored row is implausible; nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._calls += 1
        if self._is_between_batches():
            self._disk.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless some of a batch have been counted and it isn't complete.

        Args:
            set_to_none: As in torch.
        """
        if self._is_between_batches():
            self._disk.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return what the `state_dict` of `disk` does.

        Gradients are no part of it: save between batches.
        """
        return self._disk.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do what the `load_state_dict` of `disk` does.

        Raises:
            StateMismatchError: the dict belongs to another state, or to another step of this one.
            ValueError: the dict does not fit the parameters.
        """
        self._disk.load_state_dict(state_dict)
        self.param_groups = self._disk.param_groups

    def flush(self) -> None:
        """Return once everything is durable on disk."""
        self._disk.flush()

    def close(self) -> None:
        """Close the state directory, for the modules that share it too; closing twice is silent."""
        self._disk.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self._accum_steps} micro-batches: {self._disk!r}"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} keeps its state on disk and can't be copied or pickled, because two of "
            "them would write to one directory: use state_dict()"
        )

    def _is_between_batches(self) -> bool:
        return self._calls % self._accum_steps == 0
