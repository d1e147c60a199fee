"""`DiskSparseAdam`: `torch.optim.SparseAdam` with its state on disk, and the optimizer of `DiskEmbedding`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache, partial
from typing import Any, Final, final

import torch

from dsa.backends.base import Layout
from dsa.backends.mapping import Allocate
from dsa.optimizers import portable
from dsa.optimizers import sparse_methods as methods
from dsa.optimizers.arguments import (
    DEFAULT_BACKEND,
    DEFAULT_DECAY,
    DEFAULT_MOMENT,
    ParamGroups,
    StateDtype,
    dialect_of,
    named_groups,
    options_in,
    storage_choice,
)
from dsa.optimizers.disk_parameter import DiskParameter
from dsa.optimizers.flattening import moments_by_rows
from dsa.optimizers.foreign import TORCH_SPARSE_ADAM, import_state
from dsa.optimizers.options import as_number, group_options
from dsa.optimizers.registration import Registry, require_ball, require_countable, settled_rule
from dsa.optimizers.sparse_tables import SparseTables, checked_groups
from dsa.optimizers.stepping import in_dialect
from dsa.rules.adam import ADAM, AdamRule, adam_rule
from dsa.rules.conventions import (
    AdamOptions,
    BiasCorrection,
    Convention,
    SecondMoment,
    VTransport,
    WeightDecayMode,
)
from dsa.state.state_directory import StateDirectory
from dsa.state.storage import Durability
from dsa.state.table import Table

__all__ = ["DiskSparseAdam"]


@final
class DiskSparseAdam(torch.optim.Optimizer):
    """Adam for sparse gradients with moments and counters on disk.

    A drop-in for `torch.optim.SparseAdam`: the same loop, with a directory. The weights of ordinary
    parameters stay where they are (any device, float32, float16 or bfloat16, whatever the moments are stored
    as); those of `DiskEmbedding` modules are on disk as well. Both may be mixed.

    By default each row counts its own updates for the bias correction, so that a row first seen late takes a
    normal first step; ``bias_correction="parameter"`` gives torch's numbers.

    Args:
        params: As for any torch optimizer: parameters, named parameters, or groups; also a list of iterables
            of parameters. The first dimension of one is that of its rows, in which gradients are sparse. A
            name identifies a parameter's table from run to run; without names the order does.
        lr: Learning rate, > 0.
        betas: Decays of the moments, each in [0, 1).
        eps: Floor of the denominator, > 0; added to the uncorrected root, as torch's SparseAdam does.
        weight_decay: Decay, >= 0, of the rows of a batch; of all rows with `weight_decay_catch_up`.
        state_dir: The state directory. Needed only when there are ordinary parameters.
        weight_decay_mode: ``"l2"``, ``"decoupled"`` or another of `Convention`; left out, the convention's.
        weight_decay_catch_up: Whether rows decay in steps that don't touch them, too, as in dense AdamW: what
            a row has missed is made up for when it is next touched, read or exported. It takes a number more
            for each row. In flat space, with ``weight_decay_mode="decoupled"`` or ``"unscaled"``. With
            `DiskEmbedding`, it goes with its ``state="catch_up_adam"``.
        maximize: Ascend instead of descend.
        bias_correction: ``"row"``, ``"parameter"`` or ``"global"``; None takes the convention's.
        second_moment: ``"coordinate"``, ``"frame"`` or ``"row"``; left out, the convention's where one is
            passed, else what a table on a ball was trained with, or ``"frame"`` there. With
            `DiskEmbedding`, ``"row"`` goes with its ``state="rowwise_adam"``.
        v_transport: ``"tensor"`` or ``"sqrt"``, for tables on a ball.
        max_step: Longest step on a ball in hyperbolic units, or None.
        resume: None refuses to guess when there is state in `state_dir`; True continues it; False replaces
            it, with a warning.
        backend: ``"memmap"``, ``"zarr"``, `dsa.backends.Memmap`, `dsa.backends.Zarr` or another layout, see
            `DiskSparseRiemannianAdam`.
        allocate: ``"reserve"`` or ``"sparse"``.
        durability: ``"process"``, ``"power"`` or ``"none"``.
        async_writes: Write in a thread.
        state_dtype: How the optimizer's numbers are stored: ``"bfloat16"`` halves them, rounded at random so
            that their means are right; a dict, such as ``{"v": "bfloat16"}``, chooses for each. None is
            float32, or what the tables of modules were made with.
        convention: The dialect of Adam, one of `dsa.conventions`; None is SparseAdam's epsilon with counters
            per row and decay as ``"l2"``. What is passed beside it takes the place of its own; the dialect in
            force is in ``repr(optimizer)`` and in `convention`.

    Raises:
        ValueError: an option is out of range or contradicts another, or a parameter is dense by its shape.
        StateError: the directory can't be used; see `dsa.errors`.

    Example:
        >>> import tempfile
        >>> embedding = torch.nn.Embedding(1000, 2, sparse=True)
        >>> optimizer = DiskSparseAdam(embedding.parameters(), lr=0.1, state_dir=tempfile.mkdtemp())
        >>> embedding(torch.tensor([3, 5])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.global_step
        1
        >>> optimizer.close()
    """

    def __init__(
        self,
        params: ParamGroups,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        state_dir: str | os.PathLike[str] | None = None,
        weight_decay_mode: WeightDecayMode = DEFAULT_DECAY,
        weight_decay_catch_up: bool = False,
        maximize: bool = False,
        bias_correction: BiasCorrection | None = None,
        second_moment: SecondMoment = DEFAULT_MOMENT,
        v_transport: VTransport = "tensor",
        max_step: float | None = None,
        resume: bool | None = None,
        backend: str | Layout = DEFAULT_BACKEND,
        allocate: Allocate | None = None,
        durability: Durability | None = None,
        async_writes: bool = False,
        state_dtype: StateDtype | None = None,
        convention: Convention | None = None,
    ) -> None:
        self._convention = dialect_of(
            convention,
            Convention("uncorrected", "row"),
            bias_correction=bias_correction,
            second_moment=second_moment,
            weight_decay_mode=weight_decay_mode,
        )
        fixed = options_in(
            self._convention,
            lr=as_number("lr", lr),
            v_transport=v_transport,
            max_step=None if max_step is None else as_number("max_step", max_step),
        )
        choice = storage_choice(backend, allocate, durability, async_writes)
        rule = adam_rule(self._convention.second_moment, weight_decay_catch_up)
        given = convention is not None or second_moment is not DEFAULT_MOMENT or rule is not ADAM
        groups = named_groups(params)
        if not given:
            self._convention = _on_balls(self._convention, groups)
        self._sparse = SparseTables(
            Registry(state_dir, resume, choice, rule, state_dtype, given),
            partial(_options_of, fixed=fixed, convention=self._convention, rule=rule),
            _import_moments,
            partial(in_dialect, convention=self._convention),
        )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "weight_decay_mode": self._convention.weight_decay_mode,
            "maximize": maximize,
            **_told(self._convention, fixed, rule),
        }
        groups = checked_groups(groups, defaults, self._sparse)
        require_ball(max_step, groups)
        super().__init__(groups, defaults)
        self._sparse.register(self.param_groups, self)

    @property
    def global_step(self) -> int:
        """The number of steps that the state has taken."""
        return self._sparse.state.global_step

    @property
    def convention(self) -> Convention:
        """The dialect of Adam in force; a group may have another ``weight_decay_mode``."""
        return self._convention

    @property
    def param_names(self) -> list[str]:
        """The tables' names, in the order of the parameters."""
        return self._sparse.names

    def __repr__(self) -> str:
        return f"{super().__repr__()}\n{self._convention}"

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


def _on_balls(convention: Convention, groups: Sequence[dict[str, Any]]) -> Convention:
    """Return a convention with the second moment of tables on a ball, if there are any."""
    members = [each[1] if isinstance(each, tuple) else each for group in groups for each in group["params"]]
    tables = [each.table for each in members if isinstance(each, DiskParameter)]
    rules = [settled_rule(table, ADAM) for table in tables if table.k > 0.0]
    moments = [rule.second_moment for rule in rules if isinstance(rule, AdamRule)]
    return replace(convention, second_moment=moments[0]) if moments else convention


def _options_of(
    group: dict[str, Any], fixed: AdamOptions, convention: Convention, rule: AdamRule
) -> AdamOptions:
    require_countable(convention, [group])
    for name, value in _told(convention, fixed, rule).items():
        if group.get(name, value) != value:
            raise ValueError(
                f"{name}={group[name]!r} of a parameter group is not the optimizer's, which is {value!r}: "
                "build an optimizer with it"
            )
    options = group_options(group, fixed)
    rule.decay_of(options)  # which refuses what can't be made up for
    return options


@lru_cache(maxsize=64)
def _told(convention: Convention, fixed: AdamOptions, rule: AdamRule) -> Mapping[str, Any]:
    """Return the options that all groups share, and have for whoever builds the optimizer again from one.

    Points of a dialect that no argument of the constructor has are among them where they are not the
    default's: they are then an error and not lost.
    """
    default = Convention("uncorrected", "row")
    points = {field.name: getattr(convention, field.name) for field in fields(convention)}
    return {
        "bias_correction": convention.bias_correction,
        "second_moment": convention.second_moment,
        "weight_decay_catch_up": rule.catches_up,
        "v_transport": fixed.v_transport,
        "max_step": fixed.max_step,
        **{name: points[name] for name in _DIALECT if points[name] != getattr(default, name)},
    }


_DIALECT: Final = ("eps_placement", "duplicates", "empty_batch", "beta_powers")


def _import_moments(
    state: StateDirectory, tables: Mapping[torch.Tensor, Table], state_dict: Mapping[str, Any]
) -> None:
    """Take over the state of a `torch.optim.SparseAdam`."""
    foreign = moments_by_rows(state_dict.get("state"), list(tables))
    import_state(state, list(tables.values()), foreign, TORCH_SPARSE_ADAM)
