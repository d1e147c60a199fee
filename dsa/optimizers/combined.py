"""`CombinedOptimizer`: one optimizer over tables and dense layers, for trainers that know only one."""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast, overload

import torch

from dsa.errors import StateWarning, TrainingWarning, notify
from dsa.optimizers import portable
from dsa.optimizers import sparse_methods as methods
from dsa.optimizers.arguments import ParamGroups
from dsa.optimizers.disk_parameter import DiskParameter
from dsa.optimizers.gradients import clip_grad_norm_, split_parameters
from dsa.optimizers.keeping import CheckpointKeeper
from dsa.optimizers.options import as_number
from dsa.optimizers.reference import merged_groups
from dsa.optimizers.sparse_adam import DiskSparseAdam
from dsa.optimizers.sparse_tables import SparseTables

__all__ = ["CombinedOptimizer"]

Group = dict[str, Any]


class SparseHalf(Protocol):
    """An optimizer of this package whose parameters have tables."""

    param_groups: list[Group]
    _sparse: SparseTables

    def add_param_group(self, param_group: Group) -> None: ...

    def step(self) -> None: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class CombinedOptimizer(torch.optim.Optimizer):
    """An optimizer of tables and an optimizer of dense layers, as one.

    The parameter groups are those of both, so that schedulers and trainers see and change either. A step
    takes the tables' first: where a gradient or a stored row is refused, nothing has changed in either half.

    A kill loses nothing of the tables, and what dense layers have learned since they were last saved. With
    `checkpoints` each state dict goes with a checkpoint of the tables at its step, and loading it, or the
    model's, brings the tables back to that step.

    Trainers that build the optimizer themselves get a subclass whose constructor has the parameters alone.

    Args:
        params: A model; or parameters, or groups of them, of which those of disk modules are the tables. In a
            model, weights of ``torch.nn.Embedding(..., sparse=True)`` are tables too.
        dense: Makes the optimizer of the dense parameters from their list, or groups. Needed if there are
            any.
        sparse: Makes the optimizer of the tables from their parameters, or groups.
        max_grad_norm: Scale the gradients of all parameters down to this total norm in each step, see
            `dsa.clip_grad_norm_`: torch's own clipping, which trainers call, does not know sparse gradients.
        checkpoints: A directory in which to make a checkpoint of the tables, ``step-N``, whenever a state
            dict of them or of the model is asked for, unless there is one of this step.
        keep: How many of them to keep, at least 2; None keeps all.

    Raises:
        ValueError: there is no table, or dense parameters have no optimizer, or one that needs a closure.
        StateError: the directory can't be used; see `dsa.errors`.

    Example:
        >>> import tempfile
        >>> import dsa
        >>> table = dsa.DiskEmbedding(1000, 2, state_dir=tempfile.mkdtemp())
        >>> model = torch.nn.Sequential(table, torch.nn.Linear(2, 1))
        >>> optimizer = CombinedOptimizer(
        ...     model,
        ...     dense=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        ...     sparse=lambda parameters: dsa.DiskSparseAdam(parameters, lr=0.05),
        ... )
        >>> model(torch.tensor([3, 5])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.global_step, [group["lr"] for group in optimizer.param_groups]
        (1, [0.05, 0.01])
        >>> optimizer.close()
    """

    def __init__(
        self,
        params: torch.nn.Module | ParamGroups,
        dense: Callable[[list[Any]], torch.optim.Optimizer] | None = None,
        sparse: Callable[[list[Any]], torch.optim.Optimizer] = DiskSparseAdam,
        *,
        max_grad_norm: float | None = None,
        checkpoints: str | os.PathLike[str] | None = None,
        keep: int | None = None,
    ) -> None:
        if max_grad_norm is not None and not as_number("max_grad_norm", max_grad_norm) > 0.0:
            raise ValueError(f"max_grad_norm={max_grad_norm!r} is out of range: pass a number > 0, or None")
        keeper = _keeper(checkpoints, keep)
        tables, others = _halves(params)
        if not tables:
            raise ValueError(
                f"none of the {len(others)} parameters is a table: make one with dsa.DiskEmbedding or, in a "
                "model, torch.nn.Embedding(..., sparse=True), or use a dense optimizer alone"
            )
        if others and dense is None:
            raise ValueError(
                f"dense={dense!r} is no optimizer for the {len(others)} dense parameters: pass, say, "
                "dense=lambda parameters: torch.optim.AdamW(parameters, lr=0.001)"
            )
        self.max_grad_norm = max_grad_norm
        self.dense = _dense_half(dense(others)) if others and dense is not None else None
        made = sparse(tables)
        self.sparse = made
        self._sparse = cast("SparseHalf", made)._sparse
        self._owners: list[torch.optim.Optimizer] = []
        self._apart: int | None = None
        shared = {} if self.dense is None else self.dense.defaults
        own = made.defaults
        super().__init__(made.param_groups[:1], {key: own[key] for key in own if key in shared or not shared})
        self._share([made] * len(made.param_groups) + self._dense_groups())
        if keeper is not None:
            keeper.serve(self._sparse.state)

    @property
    def global_step(self) -> int:
        """The number of steps that the state has taken."""
        return self._sparse.state.global_step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step of the tables, then one of the dense layers.

        Args:
            closure: Computes the loss and its gradients anew.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: a table's gradient is dense; nothing has changed in either half.
            GradientError, CorruptRowError, DiskSpaceError: likewise. What the dense optimizer raises is
                raised with a note that the tables have taken the step.
        """
        self._sparse.state.require_open()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._warn_of_strangers()
        if self.max_grad_norm is not None:
            clip_grad_norm_(self._parameters(), self.max_grad_norm)
        self.sparse.step()
        if self.dense is not None:
            self._step_dense(self.dense)
        return loss

    def _step_dense(self, dense: torch.optim.Optimizer) -> None:
        try:
            dense.step()
        except BaseException as error:
            self._apart = self.global_step
            error.add_note(
                f"the tables are at step {self._apart} already, and the dense layers have not taken it, or "
                "not as a whole: load what was saved last"
            )
            raise

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters with options of their own, tables or dense ones or both.

        Raises:
            ValueError: a parameter is here already, or there is no optimizer of dense ones.
        """
        if not hasattr(self, "param_groups") or not self._owners:
            super().add_param_group(param_group)  # the constructor's
            return
        tables, others = _halves([param_group])
        if others and self.dense is None:
            raise ValueError(
                f"the group {sorted(param_group)} has dense parameters, of which there were none: build the "
                "optimizer again over all of them, with dense="
            )
        for groups, half in ((tables, self.sparse), (others, self.dense)):
            for group in groups:
                assert half is not None, "looked at above"
                half.add_param_group(group)
                self._share([*self._owners, half])

    def state_dict(self) -> dict[str, Any]:
        """Return the options, the state of the dense optimizer, and a reference to the tables' on disk.

        With `checkpoints`, a checkpoint of the tables is made first if there is none of this step. Weights of
        dense layers are in the model's state dict.
        """
        if self._apart is not None:
            notify(
                f"a step of the dense layers failed when the tables had taken theirs, to step {self._apart}: "
                "what is saved now is of no one step; load what was saved before",
                TrainingWarning,
            )
        reference = self._sparse.reference()
        return {**torch.optim.Optimizer.state_dict(self), "dsa": reference}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both halves at the step that a state dict is of.

        Tables that are at another step go to it by the checkpoint that the state dict names.

        Raises:
            StateMismatchError: the dict belongs to another state, or to another step and names no checkpoint,
                or to another step than the state dict that the model was given.
            ValueError: the dict does not fit the parameters.
        """
        if not isinstance(state_dict, dict) or "dsa" not in state_dict:
            raise ValueError(
                f"{_shown(state_dict)} refers to no tables: pass what state_dict() of a CombinedOptimizer "
                "returned"
            )
        merged_groups(state_dict.get("param_groups"), self.param_groups)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        saved = list(zip(self._owners, state_dict["param_groups"], strict=True))
        groups = {half: [group for owner, group in saved if owner is half] for half in self._halves()}
        self.sparse.load_state_dict(
            {"state": {}, "param_groups": groups[self.sparse], "dsa": state_dict["dsa"]}
        )
        if self.dense is not None:
            self.dense.load_state_dict({"state": state_dict["state"], "param_groups": groups[self.dense]})
        self._share(self._owners)
        self._apart = None
        self._meet()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _halves(self) -> list[torch.optim.Optimizer]:
        return [self.sparse] if self.dense is None else [self.sparse, self.dense]

    def _dense_groups(self) -> list[torch.optim.Optimizer]:
        return [] if self.dense is None else [self.dense] * len(self.dense.param_groups)

    def _share(self, owners: list[torch.optim.Optimizer]) -> None:
        """Take the groups of both halves, in the order in which they came, and the dense one's state."""
        left = {half: iter(half.param_groups) for half in self._halves()}
        self._owners = list(owners)
        self.param_groups = [next(left[owner]) for owner in owners]
        if self.dense is not None:
            self.state = self.dense.state

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _warn_of_strangers(self) -> None:
        """Tell once of tables that go on beside dense layers of which nobody knows the step."""
        state = self._sparse.state
        if self.dense is None:
            return
        first = self.dense.param_groups[0]["params"][:1]
        known = None if state.companion is None else state.companion()
        if first and known is not first[0]:
            if state.global_step:
                notify(
                    f"the tables in {str(state.path)!r} are at step {state.global_step} and nobody has said "
                    "of which step the dense layers are: load the state dicts of model and optimizer of that "
                    "step if there are any",
                    StateWarning,
                )
            self._meet()

    def _meet(self) -> None:
        if self.dense is not None and self.dense.param_groups[0]["params"]:
            self._sparse.state.companion = weakref.ref(self.dense.param_groups[0]["params"][0])

    prefetch = methods.prefetch
    grow = methods.grow
    stats = methods.stats
    flush = methods.flush
    close = methods.close
    shutdown = methods.shutdown
    __enter__ = methods.enter
    __exit__ = methods.leave
    __getstate__ = methods.refuse_pickling
    __reduce_ex__ = methods.refuse_copying
    _portable_state = methods.portable_state
    export_checkpoint = portable.export_checkpoint
    export_weights = portable.export_weights
    import_checkpoint = portable.import_checkpoint
    save_checkpoint = portable.save_checkpoint
    load_checkpoint = portable.load_checkpoint


def _shown(state_dict: object) -> str:
    return f"a dict of {sorted(map(str, state_dict))}" if isinstance(state_dict, dict) else repr(state_dict)


def _keeper(checkpoints: str | os.PathLike[str] | None, keep: int | None) -> CheckpointKeeper | None:
    if checkpoints is None:
        if keep is not None:
            raise ValueError(f"keep={keep!r} is about checkpoints that nobody makes: pass checkpoints= too")
        return None
    return CheckpointKeeper(checkpoints, keep)


def _dense_half(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} evaluates a closure several times in a step, which tables can't: "
            "pass dense= another optimizer, such as torch.optim.AdamW"
        )
    return optimizer


def _halves(params: torch.nn.Module | ParamGroups) -> tuple[list[Any], list[Any]]:
    """Return what is for the optimizer of the tables, and what for that of the dense parameters."""
    if isinstance(params, torch.nn.Module):
        names = {id(parameter): name for name, parameter in params.named_parameters()}
        tables, others = split_parameters(params)
        return [(names[id(parameter)], parameter) for parameter in tables], list(others)
    members = [params] if isinstance(params, torch.Tensor) else list(params)
    if not any(isinstance(member, dict) for member in members):
        return _by_kind(members)
    halves: tuple[list[Any], list[Any]] = ([], [])
    for group in members:
        if not isinstance(group, dict) or "params" not in group:
            raise TypeError(
                f"{group!r} is no parameter group: pass groups with 'params', or parameters alone"
            )
        given = group["params"]
        kinds = _by_kind([given] if isinstance(given, torch.Tensor) else list(given))
        for half, chosen in zip(halves, kinds, strict=True):
            if chosen:
                half.append({**group, "params": chosen})
    return halves


def _by_kind(members: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    halves: tuple[list[Any], list[Any]] = ([], [])
    for member in members:
        parameter = member[1] if isinstance(member, tuple) else member
        halves[not isinstance(parameter, DiskParameter)].append(member)
    return halves
