"""`DiskSparseRiemannianAdam`: the optimizer that is handed rows and gradients and keeps the rest on disk."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NoReturn, Self, final

import numpy as np
import torch

from dsa import maintenance
from dsa.backends.memmap import Allocate, Memmap
from dsa.coalesce import as_gradient, as_rows, coalesce
from dsa.conventions import (
    DSA_ADAM,
    AdamOptions,
    BiasCorrection,
    Convention,
    SecondMoment,
    VTransport,
    WeightDecayMode,
)
from dsa.curvature import CurvatureMap
from dsa.errors import StateWarning
from dsa.init import FromArray, Initializer, MatrixLike, as_initializer
from dsa.manifolds import manifold_of
from dsa.schema import adam_schema
from dsa.state import Change, Storage, TableSpec, open_state
from dsa.table import Table, read_weights
from dsa.tensors import ArrayLike, to_array
from dsa.update import updated_records
from dsa.watch import ClampWatch

__all__ = ["DiskSparseRiemannianAdam"]

Source = Initializer | FromArray | MatrixLike
Params = Mapping[str, Source] | Sequence[Source]

_PICKLING: Final = (
    "an optimizer whose state lives on disk can't be copied or pickled, because two of them would write to "
    "one directory: copy the closed directory, "
    "or build a second optimizer on a directory of its own"
)


@final
class DiskSparseRiemannianAdam(torch.optim.Optimizer):
    """Adam over tables on disk, flat or on the Poincaré ball, driven by explicit rows and gradients.

    Each row's weight, moments and counter are one record of a file; a step reads and writes the records of
    its batch only. The step itself is described in `dsa.kernels.adam` and `dsa.kernels.poincare`. It is a
    `torch.optim.Optimizer` as far as learning-rate schedulers need: ``lr``, ``betas``, ``eps`` and
    ``weight_decay`` are read from ``param_groups[0]`` at every step.

    Args:
        params: The tables: ``{name: source}``, or a list, whose tables are then named ``param_0``,
            ``param_1``, ... A source is a 2-D array (tensor, numpy, memmap, Zarr; read block by block) or a
            rule of `dsa.init`, which costs nothing until a row is touched.
        lr: Learning rate.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        eps: Floor of the denominator, > 0. On the ball it is compared with ``|g| / lambda^2``, in frame and
            row mode with ``|g| / lambda``.
        weight_decay: Decay of the rows of a batch, >= 0.
        weight_decay_mode: ``"l2"`` or ``"decoupled"``; another value is refused.
        k: Curvature magnitude, the curvature being -k: 0 is flat, > 0 a ball of radius ``1 / sqrt(k)``. A
            dict gives one for each table. When state is resumed, the stored curvature wins, with a warning.
        disk_dir: The state directory.
        resume: What to do with state that is there: None refuses to guess, True continues it, False replaces
            it with a warning.
        retain_params: Keep the source tensors in ``param_groups[0]["params"]``; otherwise empty placeholders
            stand there and the tensors can be freed.
        init_max_norm_fraction: Fresh rows on the ball start within this fraction of its radius, in (0, 1].
        backend: ``"memmap"``, or `dsa.backends.Memmap` with a layout of your own.
        allocate: ``"reserve"`` takes the whole disk space now; ``"sparse"`` takes it as rows are first
            written, and a full disk then kills the process.
        second_moment: ``"coordinate"``, ``"frame"`` or ``"row"``, see `AdamOptions`; the last two are better
            on the ball.
        v_transport: ``"tensor"`` or ``"sqrt"``, on the ball.
        max_step: Longest step on the ball in hyperbolic units, or None.
        bias_correction: ``"row"`` or ``"parameter"``; None takes the convention's.
        convention: The dialect of Adam, `dsa.conventions.DSA_ADAM` when None.

    Raises:
        ValueError: an option is out of range, or options contradict each other.
        StateError: the directory can't be used; see `dsa.errors` for the kinds.
        DiskSpaceError: the tables don't fit on the disk.

    Example:
        >>> import tempfile
        >>> from dsa import init
        >>> with DiskSparseRiemannianAdam({"entity": init.Zeros(1000, 2)}, lr=0.1, k=0.0,
        disk_dir=tempfile.mkdtemp()) as optimizer: ...     optimizer.step({"entity": (torch.tensor([7]),
        torch.tensor([[1.0, -1.0]]))}) ...     optimizer.read_rows([7, 8])
        tensor([[-0.1000,  0.1000],
                [ 0.0000,  0.0000]])
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        weight_decay_mode: WeightDecayMode = "l2",
        k: float | Mapping[str, float] = 1.0,
        disk_dir: str | os.PathLike[str] = "./disk_cache",
        resume: bool | None = None,
        retain_params: bool = False,
        init_max_norm_fraction: float = 0.5,
        *,
        backend: str | Memmap = "memmap",
        allocate: Allocate = "reserve",
        second_moment: SecondMoment = "coordinate",
        v_transport: VTransport = "tensor",
        max_step: float | None = None,
        bias_correction: BiasCorrection | None = None,
        convention: Convention | None = None,
    ) -> None:
        sources = _named(params)
        dialect = _dialect(convention, bias_correction)
        options = AdamOptions(
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            weight_decay_mode=weight_decay_mode,
            eps_placement=dialect.eps_placement,
            bias_correction=dialect.bias_correction,
            second_moment=second_moment,
            v_transport=v_transport,
            max_step=max_step,
        )
        curvatures = _curvatures(k, sources)
        if max_step is not None and not any(curvatures.values()):
            raise ValueError(
                f"max_step={max_step!r} is a length on the ball, but every table has k=0: leave it out, or "
                "pass k > 0"
            )
        if not 0.0 < init_max_norm_fraction <= 1.0:
            raise ValueError(
                f"init_max_norm_fraction={init_max_norm_fraction!r} is out of range: pass a number in (0, 1]"
            )
        specs = [
            _spec(name, source, curvatures[name], second_moment, init_max_norm_fraction)
            for name, source in sources.items()
        ]
        self._fixed = options
        self._watch = ClampWatch()
        self._state = open_state(disk_dir, specs, resume, Storage(allocate, _layout(backend).stride))
        held = [_held(source, retain_params) for source in sources.values()]
        defaults = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
        super().__init__([{"params": held, "names": list(sources)}], defaults)

    @property
    def global_step(self) -> int:
        """The number of steps that the state has taken."""
        return self._state.global_step

    def step(  # type: ignore[override]
        self,
        updates: Mapping[str, tuple[ArrayLike | Sequence[int], ArrayLike]],
        current_k: float | torch.Tensor | None = None,
    ) -> None:
        """Take one step.

        Every table's part is checked and computed before any is stored.

        Args:
            updates: ``{name: (indices, gradients)}``: indices ``(B,)`` of an integer dtype, in any order, and
                Euclidean gradients ``(B, D)`` of a floating dtype, on any device. Gradients of equal indices
                are summed. A table that is left out, or has B = 0, does not change.
            current_k: A new curvature for the tables that are on a ball, as by `set_curvature`, before the
                step.

        Raises:
            KeyError: a name is not a table's.
            RowIndexError, RowTypeError, GradientError: a batch can't be used; nothing has changed.
            CorruptRowError: a stored row is implausible; nothing has changed.
        """
        self._state.require_open()
        options = self._options()
        batches = [self._batch(name, *update) for name, update in updates.items()]
        if current_k is not None:
            self._change_curvature(float(current_k))
        stamp = self._state.global_step + 2  # the step this one will be, plus one
        threads = torch.get_num_threads()
        changes: list[Change] = []
        for table, rows, grad in batches:
            if len(rows):
                records, report = updated_records(table, rows, grad, options, stamp=stamp, threads=threads)
                changes.append(Change(table, rows, records))
                self._watch.note(len(rows), report)
        self._state.commit(changes)

    def read_rows(self, indices: ArrayLike | Sequence[int], name: str | None = None) -> torch.Tensor:
        """Return the current weights of some rows.

        Args:
            indices: ``(B,)`` of an integer dtype, in any order, duplicates allowed.
            name: The table; may be left out when there is only one.

        Returns:
            ``(B, D)`` float32 on the CPU, inside the ball where there is one.

        Raises:
            KeyError: the name is not a table's, or is missing where there are several.
            RowIndexError, RowTypeError: the indices can't be used.
            CorruptRowError: a stored row is implausible.
        """
        self._state.require_open()
        table = self._table(name)
        rows = as_rows(to_array(indices), len(table), table.name)
        unique, inverse = np.unique(rows, return_inverse=True)
        return torch.from_numpy(read_weights(table, unique)[inverse])

    def set_curvature(
        self,
        k: float | torch.Tensor | Mapping[str, float],
        reset_moments: bool = False,
        *,
        name: str | None = None,
        map: CurvatureMap = "clip",
    ) -> None:
        """Change the curvature of tables and carry every row over. O(N).

        Args:
            k: The new curvature magnitude, >= 0, or ``{name: k}``.
            reset_moments: Zero moments and counters; otherwise the moments are rescaled as the covectors that
                they average, see `dsa.curvature`.
            name: The table. Without it, a number applies to the only table, or to every table that is on a
                ball.
            map: ``"clip"`` keeps coordinates, clipped to the new ball; ``"log0"`` keeps each row's distance
                to the origin.

        Raises:
            KeyError: a name is not a table's.
            ValueError: a curvature is out of range, or the call names no table.
        """
        self._state.require_open()
        if map not in ("clip", "log0"):
            raise ValueError(f"map={map!r} is not known: use 'clip' or 'log0'")
        if isinstance(k, Mapping):
            if name is not None:
                raise ValueError(f"both name={name!r} and a dict of curvatures are given: pass one of them")
            wanted = {self._table(key): float(value) for key, value in k.items()}
        elif name is not None:
            wanted = {self._table(name): float(k)}
        else:
            wanted = dict.fromkeys(self._curved_tables(), float(k))
        for value in wanted.values():
            manifold_of(value)
        for table, value in wanted.items():
            maintenance.change_curvature(self._state, table, value, map, reset_moments)

    def reproject_all(self, name: str | None = None) -> int:
        """Scan whole tables: bring rows back into the ball and reset rows that hold implausible values. O(N).

        Args:
            name: The table; all of them when left out.

        Returns:
            The number of rows that were projected. Rows that had to be reset are told of in a warning.
        """
        self._state.require_open()
        tables = self._state.tables.values() if name is None else [self._table(name)]
        return sum(maintenance.reproject(self._state, table) for table in tables)

    def flush(self) -> None:
        """Return once everything is durable on disk."""
        self._state.flush()

    def close(self) -> None:
        """Flush and release the directory; closing twice is silent. Nothing else works afterwards."""
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
        tables = ", ".join(
            f"{table.name}: {len(table)} x {table.dim}, k={table.k:g}"
            for table in self._state.tables.values()
        )
        return f"{type(self).__name__}({tables}; {str(self._state.path)!r}, step {self.global_step})"

    def state_dict(self) -> NoReturn:
        """Refuse: the state is on disk and is not a dictionary."""
        raise NotImplementedError(
            f"the state lives in {str(self._state.path)!r} and is too large for a dictionary: call close() "
            "and build the optimizer again with resume=True"
        )

    def load_state_dict(self, state_dict: object) -> NoReturn:
        """Refuse: the state is on disk and is not a dictionary."""
        raise NotImplementedError(
            "the state lives on disk and can't be loaded from a dictionary: build the optimizer on the state "
            "directory with resume=True"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse new tables once the optimizer is built."""
        if getattr(self, "param_groups", None):
            raise ValueError(
                "the tables of a state directory are fixed when it is made: build the optimizer with all of "
                "them"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> NoReturn:
        raise TypeError(_PICKLING)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(_PICKLING)

    def _options(self) -> AdamOptions:
        group = self.param_groups[0]
        beta1, beta2 = group["betas"]
        fixed = self._fixed
        current = (
            float(group["lr"]),
            float(beta1),
            float(beta2),
            float(group["eps"]),
            float(group["weight_decay"]),
        )
        if current != (fixed.lr, fixed.beta1, fixed.beta2, fixed.eps, fixed.weight_decay):
            self._fixed = AdamOptions(
                *current,
                fixed.weight_decay_mode,
                fixed.eps_placement,
                fixed.bias_correction,
                fixed.second_moment,
                fixed.v_transport,
                fixed.max_step,
            )
        return self._fixed

    def _table(self, name: str | None) -> Table:
        tables = self._state.tables
        if name is None and len(tables) == 1:
            return next(iter(tables.values()))
        if name not in tables:
            what = "a table has to be named" if name is None else f"there is no table {name!r}"
            raise KeyError(f"{what}: the tables are {sorted(tables)}")
        return tables[name]

    def _batch(self, name: str, indices: object, grad: object) -> tuple[Table, Any, Any]:
        table = self._table(name)
        rows = as_rows(to_array(indices), len(table), name)
        gradient = as_gradient(to_array(grad), len(rows), table.dim, name)
        return table, *coalesce(rows, gradient, name)

    def _curved_tables(self) -> Iterator[Table]:
        tables = list(self._state.tables.values())
        chosen = tables if len(tables) == 1 else [table for table in tables if table.k > 0.0]
        if not chosen:
            raise ValueError(
                "every table is flat, so that the one meant is unclear: pass name=, or a dict of curvatures"
            )
        return iter(chosen)

    def _change_curvature(self, k: float) -> None:
        manifold_of(k)
        for table in self._curved_tables():
            maintenance.change_curvature(self._state, table, k, "clip", reset_moments=False)


def _named(params: Params) -> dict[str, Initializer | FromArray]:
    if isinstance(params, Mapping):
        items: dict[str, Source] = dict(params)
    elif isinstance(params, list | tuple):
        items = {f"param_{i}": source for i, source in enumerate(params)}
    else:
        raise TypeError(
            f"params is a {type(params).__name__}: pass a dict of names and tables, or a list of tables"
        )
    if not items:
        raise ValueError("params holds no table: pass at least one")
    for name in items:
        if not isinstance(name, str) or not name:
            raise ValueError(f"{name!r} is not a table's name: pass a string that is not empty")
    return {name: as_initializer(source) for name, source in items.items()}


def _dialect(convention: Convention | None, bias_correction: BiasCorrection | None) -> Convention:
    base = DSA_ADAM if convention is None else convention
    if bias_correction is None or bias_correction == base.bias_correction:
        return base
    if convention is not None:
        raise ValueError(f"bias_correction={bias_correction!r} contradicts {convention}: pass one of them")
    return Convention(base.eps_placement, bias_correction)


def _curvatures(k: float | Mapping[str, float], names: Mapping[str, object]) -> dict[str, float]:
    if isinstance(k, Mapping):
        if set(k) != set(names):
            raise ValueError(
                f"k names the tables {sorted(k)} but the tables are {sorted(names)}: give a curvature for "
                "each"
            )
        curvatures = {name: float(k[name]) for name in names}
    else:
        curvatures = dict.fromkeys(names, float(k))
    for value in curvatures.values():
        manifold_of(value)
    return curvatures


def _spec(
    name: str, source: Initializer | FromArray, k: float, second_moment: SecondMoment, fraction: float
) -> TableSpec:
    schema = adam_schema(source.dim, second_moment_per="row" if second_moment == "row" else "element")
    return TableSpec(name, schema, source, k, second_moment, fraction)


def _layout(backend: str | Memmap) -> Memmap:
    if isinstance(backend, Memmap):
        return backend
    if backend != "memmap":
        raise ValueError(f"backend={backend!r} is not known: pass 'memmap' or dsa.backends.Memmap(...)")
    return Memmap()


def _held(source: Initializer | FromArray, retain: bool) -> torch.Tensor:
    if not retain:
        return torch.empty(0)
    if isinstance(source, FromArray) and isinstance(source.array, torch.Tensor):
        return source.array.detach()
    warnings.warn(
        "retain_params=True keeps nothing here: the table does not come from a tensor",
        StateWarning,
        stacklevel=4,
    )
    return torch.empty(0)
