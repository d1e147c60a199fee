"""`DiskSparseOptimizer`: any update rule for flat space, by its name, with its state on disk."""

from __future__ import annotations

import os
from dataclasses import MISSING, fields
from functools import partial
from typing import Any, final

import torch

from dsa.backends.base import Layout
from dsa.backends.mapping import Allocate
from dsa.optimizers import portable
from dsa.optimizers import sparse_methods as methods
from dsa.optimizers.arguments import DEFAULT_BACKEND, ParamGroups, StateDtype, storage_choice
from dsa.optimizers.options import plain_options
from dsa.optimizers.registration import Registry
from dsa.optimizers.sparse_tables import SparseTables, checked_groups, refuse_foreign
from dsa.rules.flat import FlatRule
from dsa.rules.known import RULES
from dsa.state.storage import Durability

__all__ = ["DiskSparseOptimizer"]


@final
class DiskSparseOptimizer(torch.optim.Optimizer):
    """An update rule of your choice for sparse gradients, its state on disk.

    What it shares with `DiskSparseAdam`, which is all but the rule and its options, is described there. Rows
    that are not in a batch are not touched: nothing of them decays, and no momentum carries them on.

    Args:
        params: As for `DiskSparseAdam`.
        rule: The name of a rule for flat space, of which one that is not known gets a list. A `DiskEmbedding`
            has room for what it keeps if it is made with the same name as its ``state=``.
        state_dir: The state directory. Needed only when there are ordinary parameters.
        resume: See `DiskSparseAdam`.
        backend: See `DiskSparseAdam`.
        allocate: ``"reserve"`` or ``"sparse"``.
        durability: ``"process"``, ``"power"`` or ``"none"``.
        async_writes: Write in a thread.
        state_dtype: How the optimizer's numbers are stored: ``"bfloat16"`` halves them, rounded at random so
            that their means are right; a dict, such as ``{"v": "bfloat16"}``, chooses for each. None is
            float32, or what the tables of modules were made with.
        options: Those of a step, by name, see `FlatRule.kind`, such as ``lr``; a parameter group may have its
            own.

    Raises:
        TypeError: the rule has no such option, or needs one that is missing.
        ValueError: the rule is not known, an option is out of range, or a parameter is dense by its shape.
        StateError: the directory can't be used, or holds the state of another rule; see `dsa.errors`.

    Example:
        >>> import tempfile
        >>> embedding = torch.nn.Embedding(1000, 2, sparse=True)
        >>> optimizer = DiskSparseOptimizer(
        ...     embedding.parameters(), "adagrad", lr=0.1, state_dir=tempfile.mkdtemp()
        ... )
        >>> embedding(torch.tensor([3, 5])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.global_step
        1
        >>> optimizer.close()
    """

    def __init__(
        self,
        params: ParamGroups,
        rule: str,
        *,
        state_dir: str | os.PathLike[str] | None = None,
        resume: bool | None = None,
        backend: str | Layout = DEFAULT_BACKEND,
        allocate: Allocate | None = None,
        durability: Durability | None = None,
        async_writes: bool = False,
        state_dtype: StateDtype | None = None,
        **options: Any,  # noqa: ANN401 - those of the rule
    ) -> None:
        choice = storage_choice(backend, allocate, durability, async_writes)
        chosen = _rule(rule)
        self._sparse = SparseTables(
            Registry(state_dir, resume, choice, chosen, state_dtype),
            partial(plain_options, chosen.kind),
            refuse_foreign,
        )
        defaults = _defaults(chosen, options)
        super().__init__(checked_groups(params, defaults, self._sparse), defaults)
        self._sparse.register(self.param_groups, self)

    @property
    def global_step(self) -> int:
        """The number of steps that the state has taken."""
        return self._sparse.state.global_step

    @property
    def param_names(self) -> list[str]:
        """The tables' names, in the order of the parameters."""
        return self._sparse.names

    add_param_group = methods.add_param_group
    step = methods.step
    prefetch = methods.prefetch
    grow = methods.grow
    stats = methods.stats
    state_dict = methods.state_dict
    load_state_dict = methods.load_state_dict
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


def _rule(name: object) -> FlatRule[Any]:
    flat = {rule.name: rule for rule in RULES if isinstance(rule, FlatRule)}
    if not isinstance(name, str) or name not in flat:
        raise ValueError(
            f"rule={name!r} is not known: use one of {sorted(flat)}; Adam has optimizers of its own"
        )
    return flat[name]


def _defaults(rule: FlatRule[Any], options: dict[str, Any]) -> dict[str, Any]:
    defaults = {each.name: each.default for each in fields(rule.kind)}
    unknown = sorted(set(options) - set(defaults))
    if unknown:
        raise TypeError(f"the update rule {rule.name!r} has no option {unknown[0]!r}: use {sorted(defaults)}")
    defaults |= options
    missing = [name for name, value in defaults.items() if value is MISSING]
    if missing:
        raise TypeError(f"the update rule {rule.name!r} needs {missing[0]!r}: pass it by name")
    return defaults
