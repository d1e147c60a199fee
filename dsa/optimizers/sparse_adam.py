"""`DiskSparseAdam`: `torch.optim.SparseAdam` with its state on disk, and the optimizer of `DiskEmbedding`."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Final, NoReturn, Self, final, overload

import torch

from dsa.backends.base import Layout
from dsa.backends.mapping import Allocate
from dsa.errors import StateMismatchError, TrainingWarning, notify
from dsa.optimizers import portable
from dsa.optimizers.arguments import (
    DEFAULT_BACKEND,
    ParamGroups,
    dialect_of,
    layout_of_backend,
    named_groups,
    named_table,
    options_in,
)
from dsa.optimizers.fingerprints import require_belonging, vouch
from dsa.optimizers.flattening import gradient_rows, moments_by_rows
from dsa.optimizers.foreign import import_sparse_adam
from dsa.optimizers.holders import abandoned
from dsa.optimizers.options import as_number, group_options
from dsa.optimizers.reference import check_reference, merged_groups, reference_to
from dsa.optimizers.registration import Registry, require_ball, require_countable
from dsa.optimizers.resident import ParameterWeights, put_rows, row_elements
from dsa.optimizers.stepping import Batch, Stepping, in_dialect
from dsa.optimizers.tensors import to_array
from dsa.rules.adam import adam_rule
from dsa.rules.conventions import (
    AdamOptions,
    BiasCorrection,
    Convention,
    SecondMoment,
    VTransport,
    WeightDecayMode,
)
from dsa.state.coalesce import as_rows
from dsa.state.state_directory import StateDirectory
from dsa.state.storage import Durability, Queue, StorageChoice
from dsa.state.table import Table

__all__ = ["DiskSparseAdam"]

_DENSE_ADVICE: Final = (
    "build the layer with sparse=True, use dsa.DiskEmbedding, or hand dense parameters to another optimizer "
    "(dsa.split_parameters(model) gives both lists). A sparse table also gets a dense gradient when its "
    "weight is tied to another layer or penalised as a whole: penalise the rows looked up instead"
)
_PICKLING: Final = (
    "an optimizer whose state lives on disk can't be copied or pickled, because two of them would write to "
    "one directory: use state_dict(), or build a second optimizer on a directory of its own"
)


@final
class DiskSparseAdam(torch.optim.Optimizer):
    """Adam for sparse gradients with moments and counters on disk.

    A drop-in for `torch.optim.SparseAdam`: the same loop, with a directory. The weights of ordinary
    parameters stay where they are (any device, float32, float16 or bfloat16; the moments are float32 always);
    those of `DiskEmbedding` modules are on disk as well. Both may be mixed.

    By default each row counts its own updates for the bias correction, so that a row first seen late takes a
    normal first step; ``bias_correction="parameter"`` gives torch's numbers.

    Args:
        params: As for any torch optimizer: parameters, named parameters, or groups; also a list of iterables
            of parameters. The first dimension of one is that of its rows, in which gradients are sparse. A
            name identifies a parameter's table from run to run; without names the order does.
        lr: Learning rate, > 0.
        betas: Decays of the moments, each in [0, 1).
        eps: Floor of the denominator, > 0; added to the uncorrected root, as torch's SparseAdam does.
        weight_decay: Decay of the rows of a batch, >= 0.
        state_dir: The state directory. Needed only when there are ordinary parameters.
        weight_decay_mode: ``"l2"``, ``"decoupled"`` or another of `Convention`; None takes the convention's.
        maximize: Ascend instead of descend.
        bias_correction: ``"row"``, ``"parameter"`` or ``"global"``; None takes the convention's.
        second_moment: ``"coordinate"``, ``"frame"`` or ``"row"``; None takes the convention's. With
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
        weight_decay_mode: WeightDecayMode | None = None,
        maximize: bool = False,
        bias_correction: BiasCorrection | None = None,
        second_moment: SecondMoment | None = None,
        v_transport: VTransport = "tensor",
        max_step: float | None = None,
        resume: bool | None = None,
        backend: str | Layout = DEFAULT_BACKEND,
        allocate: Allocate | None = None,
        durability: Durability | None = None,
        async_writes: bool = False,
        convention: Convention | None = None,
    ) -> None:
        if not as_number("lr", lr) > 0.0:
            raise ValueError(f"lr={lr!r} is out of range: pass a number > 0 (a scheduler may set 0 later)")
        self._convention = dialect_of(
            convention,
            Convention("uncorrected", "row"),
            bias_correction=bias_correction,
            second_moment=second_moment,
            weight_decay_mode=weight_decay_mode,
        )
        self._fixed = options_in(
            self._convention,
            lr=float(lr),
            v_transport=v_transport,
            max_step=None if max_step is None else as_number("max_step", max_step),
        )
        queue = Queue() if async_writes else None
        choice = StorageChoice(allocate, layout_of_backend(backend), durability, queue)
        self._registry = Registry(state_dir, resume, choice, adam_rule(self._convention.second_moment))
        self._state: StateDirectory | None = None
        self._tables: dict[torch.Tensor, Table] = {}
        self._told: set[torch.Tensor] = set()
        self._stepping = Stepping()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "weight_decay_mode": self._convention.weight_decay_mode,
            "maximize": maximize,
        }
        groups = named_groups(params)
        for group in groups:
            group_options({**defaults, **group}, self._fixed)
        require_ball(max_step, groups)
        super().__init__(groups, defaults)
        self._register()

    @property
    def global_step(self) -> int:
        """The number of steps that the state has taken."""
        return self._require_state().global_step

    @property
    def convention(self) -> Convention:
        """The dialect of Adam in force; a group may have another ``weight_decay_mode``."""
        return self._convention

    @property
    def param_names(self) -> list[str]:
        """The tables' names, in the order of the parameters."""
        return [table.name for table in self._tables.values()]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own; their tables are made, or found in the directory.

        Raises:
            ValueError: a parameter is here already or can't be a table, or an option is out of range.
        """
        if self._state is not None:
            self._state.require_open()
        (group,) = named_groups([param_group])
        group_options({**self.defaults, **group}, self._fixed)
        super().add_param_group(group)
        if self._state is None:
            return  # the constructor adds its groups one by one, and registers them together
        try:
            self._register()
        except BaseException:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
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
        self._require_state().require_open()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            grads = self._gradients()
            if grads:
                self._update(grads)
            self._warn_if_replaced()
        return loss

    def prefetch(self, indices: Any, name: str | None = None) -> None:  # noqa: ANN401 - a tensor, an array or a list
        """Announce rows that a coming batch will need; see `dsa.lookahead`.

        Args:
            indices: ``(B,)`` of an integer dtype, in any order.
            name: The table's name, or None when there is only one.

        Raises:
            KeyError: the name is not a table's, or is missing where there are several.
            RowIndexError, RowTypeError: the indices can't be used.
        """
        self._require_state().require_open()
        table = named_table({table.name: table for table in self._tables.values()}, name)
        rows = as_rows(to_array(indices).reshape(-1), len(table), table.name)
        self._stepping.prefetcher.announce(table, rows)

    def stats(self) -> dict[str, int | float | str]:
        """Return counts since the directory was opened, as `DiskSparseRiemannianAdam.stats` explains them."""
        return self._stepping.statistics(self._require_state())

    def state_dict(self) -> dict[str, Any]:
        """Return the options and a reference to the state on disk.

        It is small and can be loaded with ``weights_only=True``. The reference names the directory, the
        state's identity and its step; `load_state_dict` refuses another.
        """
        reference = reference_to(self._require_state(), self.param_names)
        return {**super().state_dict(), "dsa": reference}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the options of `state_dict`, having checked that it belongs to the state on disk.

        As in torch, the saved options win over the constructor's. The state dict of a
        `torch.optim.SparseAdam` over the same parameters is imported: its moments are written to the tables,
        and every row's counter becomes its step.

        Raises:
            StateMismatchError: the dict belongs to another state, or to another step of this one.
            ValueError: the dict does not fit the parameters.
        """
        if not isinstance(state_dict, dict):
            raise TypeError(f"{type(state_dict).__name__} is no state dict: pass what state_dict() returned")
        merged = merged_groups(state_dict.get("param_groups"), self.param_groups)
        for group in merged:
            group_options(group, self._fixed)
        with self._ready() as state:
            if "dsa" in state_dict:
                check_reference(state, self.param_names, state_dict["dsa"])
            else:
                import_sparse_adam(
                    state,
                    list(self._tables.values()),
                    moments_by_rows(state_dict.get("state"), list(self._tables)),
                )
            vouch(list(self._tables.values()))
        super().load_state_dict({"state": {}, "param_groups": merged})

    def flush(self) -> None:
        """Return once everything is durable on disk."""
        state = self._require_state()
        with state.use():
            state.flush()

    def close(self) -> None:
        """Close the state directory, for the modules that share it too; closing twice is silent.

        Afterwards only questions are answered: ``state_dict()``, ``stats()``, ``repr``, and properties.
        """
        self._stepping.prefetcher.close()
        if self._state is not None:
            with self._state.exclusive:
                self._state.close()

    def shutdown(self) -> None:
        """Do what `close` does."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{super().__repr__()}\n{self._convention}"

    def __getstate__(self) -> NoReturn:
        raise TypeError(_PICKLING)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(_PICKLING)

    def _register(self) -> None:
        """Find or make the tables of the parameters that have none yet."""
        require_countable(self._convention, self.param_groups)
        self._state, self._tables = self._registry.tables(self.param_groups, self._tables, self)

    def _gradients(self) -> list[tuple[torch.Tensor, torch.Tensor, AdamOptions]]:
        grads = []
        for group in self.param_groups:
            options = group_options(group, self._fixed)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not parameter.grad.is_sparse:
                    table = self._tables[parameter]
                    raise RuntimeError(
                        f"the parameter {table.name!r} of shape {tuple(parameter.shape)} got a dense "
                        f"gradient, and this optimizer only takes sparse ones: {_DENSE_ADVICE}"
                    )
                grads.append((parameter, parameter.grad, options))
        return grads

    def _update(self, grads: list[tuple[torch.Tensor, torch.Tensor, AdamOptions]]) -> None:
        with self._ready() as state:
            require_belonging(state, list(self._tables.values()), self._registry.positional)
            batches = [self._batch(*each) for each in grads]
            self._stepping.take(state, in_dialect(batches, self._convention))

    def _batch(self, parameter: torch.Tensor, grad: torch.Tensor, options: AdamOptions) -> Batch:
        table = self._tables[parameter]
        if (len(parameter), row_elements(parameter.shape)) != (len(table), table.dim):
            raise StateMismatchError(
                f"the parameter {table.name!r} is {tuple(parameter.shape)} now but its table is {len(table)} "
                f"x {table.dim}: build a new optimizer after changing a parameter's shape"
            )
        rows, values = gradient_rows(grad, table)
        if not isinstance(table.held, ParameterWeights):
            return Batch(table, rows, values, options)
        weights = table.held.lend(rows)
        # With a copy of the rows, which may be the gradient's memory: the step may be completed later.
        return Batch(
            table, rows, values, options, weights, [partial(put_rows, parameter, rows.copy(), weights)]
        )

    def _ready(self) -> AbstractContextManager[StateDirectory]:
        return self._stepping.ready(self._require_state(), torch.get_num_threads())

    def _portable_state(self) -> StateDirectory:
        return self._require_state()

    export_checkpoint = portable.export_checkpoint
    export_weights = portable.export_weights
    import_checkpoint = portable.import_checkpoint
    save_checkpoint = portable.save_checkpoint
    load_checkpoint = portable.load_checkpoint

    def _require_state(self) -> StateDirectory:
        assert self._state is not None, "every parameter has a table"
        return self._state

    def _warn_if_replaced(self) -> None:
        if all(parameter.grad is not None for parameter in self._tables):
            return
        for parameter in abandoned(self._tables):
            if parameter.grad is None and parameter.requires_grad and parameter not in self._told:
                self._told.add(parameter)
                notify(
                    f"the parameter {self._tables[parameter].name!r} gets no gradients and nobody but the "
                    "optimizer holds it: the module's weight was probably replaced or resized after the "
                    "optimizer was built; build a new optimizer",
                    TrainingWarning,
                )
