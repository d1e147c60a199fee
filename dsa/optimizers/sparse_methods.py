"""What every optimizer of sparse gradients does: methods that its classes take over, whatever their rule."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, NoReturn, Protocol, TypeVar, cast, overload

import torch

from dsa.optimizers.arguments import named_groups
from dsa.optimizers.reference import merged_groups
from dsa.optimizers.sparse_tables import SparseTables
from dsa.rules.init import FromArray, Initializer, MatrixLike
from dsa.state.state_directory import StateDirectory

__all__ = [
    "SparseOptimizer",
    "add_param_group",
    "close",
    "enter",
    "flush",
    "grow",
    "leave",
    "load_state_dict",
    "portable_state",
    "prefetch",
    "refuse_copying",
    "refuse_pickling",
    "shutdown",
    "state_dict",
    "stats",
    "step",
]

_PICKLING: Final = (
    "an optimizer whose state lives on disk can't be copied or pickled, because two of them would write to "
    "one directory: use state_dict(), or build a second optimizer on a directory of its own"
)


class SparseOptimizer(Protocol):
    """A `torch.optim.Optimizer` whose parameters have tables."""

    defaults: dict[str, Any]
    param_groups: list[dict[str, Any]]
    _sparse: SparseTables


Who = TypeVar("Who", bound=SparseOptimizer)


def add_param_group(self: SparseOptimizer, param_group: dict[str, Any]) -> None:
    """Add parameters with options of their own; their tables are made, or found in the directory.

    Raises:
        ValueError: a parameter is here already or can't be a table, or an option is out of range.
    """
    own = self._sparse
    if own.registered:
        own.state.require_open()
    (group,) = named_groups([param_group])
    own.options_of({**self.defaults, **group})
    torch.optim.Optimizer.add_param_group(_torchs(self), group)
    if not own.registered:
        return  # the constructor adds its groups one by one, and registers them together
    try:
        own.register(self.param_groups, self)
    except BaseException:
        self.param_groups.pop()
        raise


@overload
def step(self: SparseOptimizer, closure: None = None) -> None: ...


@overload
def step(self: SparseOptimizer, closure: Callable[[], float]) -> float: ...


def step(self: SparseOptimizer, closure: Callable[[], float] | None = None) -> float | None:  # noqa: D417
    """Take one step with the gradients at hand.

    Everything is checked and computed before anything is stored.

    Args:
        closure: Computes the loss and its gradients anew.

    Returns:
        The closure's loss, or None.

    Raises:
        RuntimeError: a gradient is dense; nothing has changed.
        GradientError: a gradient is not finite; nothing has changed.
        CorruptRowError: a stored row is implausible; nothing has changed.
    """
    loss = None
    if closure is not None:
        self._sparse.state.require_open()  # before it takes its time
        with torch.enable_grad():
            loss = closure()
    with torch.no_grad():
        self._sparse.step(self.param_groups)
    return loss


def prefetch(  # noqa: D417
    self: SparseOptimizer,
    indices: Any,  # noqa: ANN401 - a tensor, an array or a list
    name: str | None = None,
) -> None:
    """Announce rows that a coming batch will need; see `dsa.lookahead`.

    Args:
        indices: ``(B,)`` of an integer dtype, in any order.
        name: The table's name, or None when there is only one.

    Raises:
        KeyError: the name is not a table's, or is missing where there are several.
        RowIndexError, RowTypeError: the indices can't be used.
    """
    self._sparse.state.require_open()
    self._sparse.announce(indices, name)


def grow(  # noqa: D417
    self: SparseOptimizer,
    name: str,
    rows: int,
    init: Initializer | FromArray | MatrixLike | None = None,
) -> None:
    """Let the table of a parameter have more rows; old ones keep weights and moments, new ones have none yet.

    The parameter gets the new shape and stays the same object. A parameter in memory is given new memory, so
    that what a module says of its size (``num_embeddings``) is for you to bring up to date.

    Args:
        name: The table's, one of `param_names`.
        rows: Rows N from now on, at least as many as there are.
        init: The first weights of the new rows: an array of those rows, or a rule of `dsa.init` for N rows.
            They may be left out for a `dsa.DiskEmbedding` whose table has a rule.

    Raises:
        KeyError: the name is not a table's.
        ValueError: the table would shrink, or `init` is missing or doesn't fit; nothing has changed.
        DiskSpaceError: there is not enough room; nothing has changed.
    """
    self._sparse.grow(name, rows, init)


def stats(self: SparseOptimizer) -> dict[str, int | float | str]:
    """Return counts since the directory was opened, as `DiskSparseRiemannianAdam.stats` explains them."""
    return self._sparse.statistics()


def state_dict(self: SparseOptimizer) -> dict[str, Any]:
    """Return the options and a reference to the state on disk.

    It is small and can be loaded with ``weights_only=True``. The reference names the directory, the
    state's identity and its step; `load_state_dict` refuses another.
    """
    reference = self._sparse.reference()
    return {**torch.optim.Optimizer.state_dict(_torchs(self)), "dsa": reference}


def load_state_dict(self: SparseOptimizer, state_dict: dict[str, Any]) -> None:
    """Restore the options of `state_dict`, having checked that it belongs to the state on disk.

    As in torch, the saved options win over the constructor's. `DiskSparseAdam` also takes the state dict of
    a `torch.optim.SparseAdam` over the same parameters, and `DiskSparseAdagrad` that of a
    `torch.optim.Adagrad`: moments or sums are written to the tables, and every counter becomes its step.

    Raises:
        StateMismatchError: the dict belongs to another state, or to another step of this one.
        ValueError: the dict does not fit the parameters, or is of an optimizer whose state can't be taken
            over.
    """
    if not isinstance(state_dict, dict):
        raise TypeError(f"{type(state_dict).__name__} is no state dict: pass what state_dict() returned")
    merged = merged_groups(state_dict.get("param_groups"), self.param_groups)
    for group in merged:
        self._sparse.options_of(group)
    self._sparse.load(state_dict)
    torch.optim.Optimizer.load_state_dict(_torchs(self), {"state": {}, "param_groups": merged})


def flush(self: SparseOptimizer) -> None:
    """Return once everything is durable on disk."""
    state = self._sparse.state
    with state.use():
        state.flush()


def close(self: SparseOptimizer) -> None:
    """Close the state directory, for the modules that share it too; closing twice is silent.

    Afterwards only questions are answered: ``state_dict()``, ``stats()``, ``repr``, and properties.
    """
    self._sparse.close()


def shutdown(self: SparseOptimizer) -> None:
    """Do what `close` does."""
    close(self)


def enter(self: Who) -> Who:
    """Return the optimizer, to be closed at the end of a with statement."""
    return self


def leave(
    self: SparseOptimizer,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """Close the optimizer at the end of a with statement."""
    close(self)


def refuse_pickling(self: SparseOptimizer) -> NoReturn:
    """Refuse to say what there is to be pickled.

    Raises:
        TypeError: always.
    """
    raise TypeError(_PICKLING)


def refuse_copying(self: SparseOptimizer, protocol: object) -> NoReturn:
    """Refuse to be copied or pickled.

    Raises:
        TypeError: always.
    """
    raise TypeError(_PICKLING)


def portable_state(self: SparseOptimizer) -> StateDirectory:
    """Return the state, see `dsa.optimizers.portable.HasState`."""
    return self._sparse.state


def _torchs(optimizer: SparseOptimizer) -> torch.optim.Optimizer:
    return cast("torch.optim.Optimizer", optimizer)
