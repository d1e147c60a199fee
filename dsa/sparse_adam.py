"""`DiskSparseAdam`: `torch.optim.SparseAdam` with its state on disk, and the optimizer of `DiskEmbedding`."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, NamedTuple, NoReturn, Self, final, overload

import torch

from dsa import maintenance
from dsa.arguments import (
    ParamGroups,
    dialect_of,
    layout_of_backend,
    named_groups,
    named_table,
    require_second_moment,
)
from dsa.backends.memmap import Allocate, Memmap
from dsa.coalesce import as_gradient, as_rows, coalesce
from dsa.conventions import AdamOptions, BiasCorrection, Convention, SecondMoment, VTransport, WeightDecayMode
from dsa.creation import Durability, Queue, StorageChoice, TableSpec
from dsa.disk_parameter import DiskParameter
from dsa.errors import TrainingWarning
from dsa.foreign import import_sparse_adam
from dsa.holders import is_abandoned
from dsa.init import Zeros
from dsa.kernels.layout import Floats
from dsa.kernels.threads import thread_limit
from dsa.prefetch import Prefetcher
from dsa.reference import check_reference, merged_groups, reference_to
from dsa.resident import put_rows, take_rows
from dsa.schema import Rows, adam_schema
from dsa.sharing import join_table
from dsa.state import StateDirectory
from dsa.statistics import Counters, statistics
from dsa.table import Table
from dsa.tensors import to_array
from dsa.update import compute_update
from dsa.watch import ClampWatch

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


class _Part(NamedTuple):
    parameter: torch.Tensor
    table: Table
    rows: Rows
    grad: Floats
    options: AdamOptions
    weights: Floats | None


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
            of parameters. A name identifies a parameter's table from run to run; without names the order
            does.
        lr: Learning rate, > 0.
        betas: Decays of the moments, each in [0, 1).
        eps: Floor of the denominator, > 0; added to the uncorrected root, as torch's SparseAdam does.
        weight_decay: Decay of the rows of a batch, >= 0.
        state_dir: The state directory. Needed only when there are ordinary parameters.
        weight_decay_mode: ``"l2"`` or ``"decoupled"``.
        maximize: Ascend instead of descend.
        bias_correction: ``"row"`` or ``"parameter"``; None takes the convention's.
        second_moment: ``"coordinate"``, ``"frame"`` or ``"row"``. With `DiskEmbedding`, ``"row"`` goes with
            its ``state="rowwise_adam"``.
        v_transport: ``"tensor"`` or ``"sqrt"``, for tables on a ball.
        max_step: Longest step on a ball in hyperbolic units, or None.
        resume: None refuses to guess when there is state in `state_dir`; True continues it; False replaces
            it, with a warning.
        backend: ``"memmap"`` or `dsa.backends.Memmap`.
        allocate: ``"reserve"`` or ``"sparse"``.
        durability: ``"process"``, ``"power"`` or ``"none"``.
        async_writes: Write in a thread.
        convention: The dialect of Adam; None is SparseAdam's epsilon with counters per row.

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
        weight_decay_mode: WeightDecayMode = "l2",
        maximize: bool = False,
        bias_correction: BiasCorrection | None = None,
        second_moment: SecondMoment = "coordinate",
        v_transport: VTransport = "tensor",
        max_step: float | None = None,
        resume: bool | None = None,
        backend: str | Memmap = "memmap",
        allocate: Allocate | None = None,
        durability: Durability | None = None,
        async_writes: bool = False,
        convention: Convention | None = None,
    ) -> None:
        if not float(lr) > 0.0:
            raise ValueError(f"lr={lr!r} is out of range: pass a number > 0 (a scheduler may set 0 later)")
        dialect = dialect_of(convention, bias_correction, Convention("uncorrected", "row"))
        self._fixed = AdamOptions(
            lr=float(lr),
            eps_placement=dialect.eps_placement,
            bias_correction=dialect.bias_correction,
            second_moment=second_moment,
            v_transport=v_transport,
            max_step=max_step,
        )
        self._directory = state_dir
        self._resume = resume
        self._choice = StorageChoice(
            allocate, layout_of_backend(backend).stride, durability, Queue() if async_writes else None
        )
        self._state: StateDirectory | None = None
        self._tables: dict[torch.Tensor, Table] = {}
        self._watch, self._counters, self._prefetcher = ClampWatch(), Counters(), Prefetcher()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "weight_decay_mode": weight_decay_mode,
            "maximize": maximize,
        }
        _group_options(defaults, self._fixed)
        super().__init__(named_groups(params), defaults)

    @property
    def global_step(self) -> int:
        """The number of steps that the state has taken."""
        return self._require_state().global_step

    @property
    def param_names(self) -> list[str]:
        """The tables' names, in the order of the parameters."""
        return [table.name for table in self._tables.values()]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own; their tables are made, or found in the directory.

        Raises:
            ValueError: a parameter is here already or can't be a table, or an option is out of range.
        """
        (group,) = named_groups([param_group])
        _group_options({**self.defaults, **group}, self._fixed)
        super().add_param_group(group)
        added = self.param_groups[-1]
        try:
            self._register(added["params"], added.get("param_names"))
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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            grads = self._gradients()
            if grads:
                self._update(grads)
            else:
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
        self._prefetcher.announce(table, as_rows(to_array(indices).reshape(-1), len(table), table.name))

    def stats(self) -> dict[str, int | float | str]:
        """Return counts since the directory was opened, as `DiskSparseRiemannianAdam.stats` explains them."""
        return statistics(self._require_state(), self._counters, self._prefetcher)

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
        merged = merged_groups(state_dict.get("param_groups"), self.param_groups)
        with self._ready() as state:
            if "dsa" in state_dict:
                check_reference(state, self.param_names, state_dict["dsa"])
            else:
                import_sparse_adam(state, list(self._tables.values()), state_dict.get("state"))
        super().load_state_dict({"state": {}, "param_groups": merged})

    def flush(self) -> None:
        """Return once everything is durable on disk."""
        state = self._require_state()
        with state.exclusive:
            state.flush()

    def close(self) -> None:
        """Close the state directory, for the modules that share it too; closing twice is silent."""
        self._prefetcher.close()
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

    def __getstate__(self) -> NoReturn:
        raise TypeError(_PICKLING)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(_PICKLING)

    def _register(self, parameters: list[torch.Tensor], names: list[str] | None) -> None:
        for parameter in parameters:
            if isinstance(parameter, DiskParameter):
                self._adopt(parameter)
        for index, parameter in enumerate(parameters):
            if parameter not in self._tables:
                name = f"param_{len(self._tables)}" if names is None else names[index]
                self._tables[parameter] = self._join(parameter, name)

    def _adopt(self, parameter: DiskParameter) -> None:
        if self._state is not None and parameter.state is not self._state:
            raise ValueError(
                f"{parameter!r} lies in another directory than {str(self._state.path)!r}: make all modules "
                "of one optimizer with the same state_dir, so that a step is one transaction"
            )
        require_second_moment(parameter.state, parameter.table, self._fixed.second_moment)
        self._state = parameter.state
        self._tables[parameter] = parameter.table

    def _join(self, parameter: torch.Tensor, name: str) -> Table:
        directory = self._directory
        if self._state is not None:
            if directory is not None and os.path.realpath(directory) != os.path.realpath(self._state.path):
                raise ValueError(
                    f"state_dir={str(directory)!r} is not {str(self._state.path)!r}, where the disk "
                    "embeddings are: pass the same directory"
                )
            directory = self._state.path
        if directory is None:
            raise ValueError(
                f"the parameter {name!r} is an ordinary one, whose state needs a place: pass state_dir="
            )
        second = self._fixed.second_moment
        schema = adam_schema(
            parameter.shape[1], second_moment_per="row" if second == "row" else "element", weights=False
        )
        spec = TableSpec(name, schema, Zeros(parameter.shape[0], parameter.shape[1]), 0.0, second, 1.0)
        self._state, table = join_table(directory, spec, self._resume, self._choice)
        return table

    def _gradients(self) -> list[tuple[torch.Tensor, torch.Tensor, AdamOptions]]:
        grads = []
        for group in self.param_groups:
            options = _group_options(group, self._fixed)
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
            parts = [self._part(*each) for each in grads]
            progress = state.progress().after_step([state.index(part.table) for part in parts])
            memory = state.begin(progress, [(part.table, part.rows) for part in parts])
            reports = [
                compute_update(
                    part.table,
                    part.rows,
                    part.grad,
                    part.options,
                    records,
                    progress.global_step + 1,
                    part.weights,
                )
                for part, records in zip(parts, memory, strict=True)
            ]
            state.commit()
            for part, report in zip(parts, reports, strict=True):
                if part.weights is not None:
                    put_rows(part.parameter, part.rows, part.weights)
                self._prefetcher.note_use(part.table, part.rows)
                self._counters.note(report)
            curved = [
                (len(part.rows), report.far)
                for part, report in zip(parts, reports, strict=True)
                if part.table.k
            ]
            self._watch.note(sum(rows for rows, _ in curved), sum(far for _, far in curved))

    def _part(self, parameter: torch.Tensor, grad: torch.Tensor, options: AdamOptions) -> _Part:
        table = self._tables[parameter]
        rows = as_rows(to_array(grad._indices()[0]), len(table), table.name)
        values = as_gradient(to_array(grad._values()), len(rows), table.dim, table.name)
        rows, values = coalesce(rows, values, table.name)
        weights = None if isinstance(parameter, DiskParameter) else take_rows(parameter, rows)
        return _Part(parameter, table, rows, values, options, weights)

    @contextlib.contextmanager
    def _ready(self) -> Iterator[StateDirectory]:
        """Hold the state with nothing pending; other threads wait."""
        state = self._require_state()
        state.require_open()
        with state.exclusive, thread_limit(torch.get_num_threads()):
            state.settle()
            maintenance.finish_change(state)
            yield state

    def _require_state(self) -> StateDirectory:
        assert self._state is not None, "every parameter has a table"
        return self._state

    def _warn_if_replaced(self) -> None:
        for parameter, table in self._tables.items():
            if parameter.requires_grad and is_abandoned(parameter):
                warnings.warn(
                    f"the parameter {table.name!r} gets no gradients and nobody but the optimizer holds it: "
                    "the module's weight was probably replaced or resized after the optimizer was built; "
                    "build a new optimizer",
                    TrainingWarning,
                    stacklevel=4,
                )


def _group_options(group: dict[str, Any], fixed: AdamOptions) -> AdamOptions:
    """Return the options of one group.

    Raises:
        ValueError: one is out of range.
    """
    beta1, beta2 = group["betas"]
    return replace(
        fixed,
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        weight_decay_mode=group["weight_decay_mode"],
        maximize=bool(group["maximize"]),
    )
