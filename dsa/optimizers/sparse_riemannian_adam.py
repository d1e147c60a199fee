"""`DiskSparseRiemannianAdam`: the optimizer that is handed rows and gradients and keeps the rest on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self, final

import torch

from dsa.backends.base import Layout
from dsa.backends.mapping import Allocate
from dsa.optimizers import portable
from dsa.optimizers.arguments import (
    DEFAULT_BACKEND,
    DEFAULT_DECAY,
    DEFAULT_FRACTION,
    DEFAULT_MOMENT,
    Params,
    StateDtype,
    checked_updates,
    curvatures_of,
    dialect_of,
    growth_of,
    held_tensor,
    layout_of_backend,
    named_sources,
    named_table,
    options_in,
    policies_of,
    wanted_curvatures,
    with_moment_of,
)
from dsa.optimizers.explicit import (
    batch_of,
    refuse_loading,
    refuse_pickling,
    refuse_state_dict,
    rows_of,
    specs_of,
)
from dsa.optimizers.id_rows import all_ids, delete_rows, known_rows
from dsa.optimizers.options import as_number, group_options
from dsa.optimizers.stepping import Stepping, in_dialect
from dsa.optimizers.tensors import ArrayLike, to_array
from dsa.rules.adam import ADAM, adam_rule
from dsa.rules.conventions import (
    AdamOptions,
    BiasCorrection,
    Convention,
    SecondMoment,
    VTransport,
    WeightDecayMode,
)
from dsa.rules.curvature import CurvatureMap
from dsa.rules.init import FromArray, Initializer, MatrixLike
from dsa.state import maintenance
from dsa.state.growth import grow_tables
from dsa.state.id_policy import IdPolicy
from dsa.state.opening import open_directory
from dsa.state.replacement import change_curvature
from dsa.state.state_directory import StateDirectory
from dsa.state.storage import Durability, Queue, StorageChoice

__all__ = ["DiskSparseRiemannianAdam"]


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
        weight_decay: Decay, >= 0, of the rows of a batch; of all rows with `weight_decay_catch_up`.
        weight_decay_mode: ``"l2"``, ``"decoupled"`` or another of `Convention`; left out, the convention's.
        k: Curvature magnitude, the curvature being -k: 0 is flat, > 0 a ball of radius ``1 / sqrt(k)``. A
            dict gives one for each table. When state is resumed, the stored curvature wins, with a warning.
        disk_dir: The state directory.
        max_queue_size: With `async_writes`, the batches that may wait to be written.
        resume: What to do with state that is there: None refuses to guess, True continues it, False replaces
            it with a warning.
        put_timeout: With `async_writes`, the seconds that a step waits for room before it writes itself.
        retain_params: Keep the source tensors in ``param_groups[0]["params"]``; otherwise empty placeholders
            stand there and the tensors can be freed.
        init_max_norm_fraction: Fresh rows on the ball start within this fraction of its radius, in (0, 1].
            Left out, an array whose rows are all inside the ball is taken as it is.
        backend: Where the rows live. ``"memmap"`` is the fastest; `dsa.backends.Memmap` gives it a layout of
            your own. ``"zarr"`` is a Zarr group that other programs can read while training runs;
            `dsa.backends.Zarr` with ``compression="zstd"`` saves disk, at ten to hundreds of times the cost
            of a step. A storage of your own is an object with the members of `dsa.backends.Layout`. Left out
            where there is state, the backend is the state's, which can't be changed; a storage of your own is
            passed whenever its state is opened.
        allocate: ``"reserve"`` takes the whole disk space now; ``"sparse"`` takes it as rows are first
            written, as compressed shards do, and a step that finds none is an error and changes nothing.
        durability: ``"process"``: a step that has returned survives the death of the process (kill -9, out of
            memory). ``"power"``: it also survives a loss of power, at the cost of waiting for the disk in
            every step. ``"none"``: no journal; a step that is under way when the process dies may be torn.
        async_writes: Write in a thread. It pays when the disk is slower than training: for the memmap backend
            only if its file is far larger than memory.
        second_moment: ``"coordinate"``, ``"frame"`` or ``"row"``, see `AdamOptions`; the last two are better
            on the ball. Left out, the state's, the convention's or, on the ball, ``"frame"``.
        v_transport: ``"tensor"`` or ``"sqrt"``, on the ball.
        max_step: Longest step on the ball in hyperbolic units, or None.
        bias_correction: ``"row"``, ``"parameter"`` or ``"global"``; None takes the convention's.
        convention: The dialect of Adam, one of `dsa.conventions`; `dsa.conventions.DSA_ADAM` when None. What
            is passed beside it takes the place of its own; the dialect in force is in ``repr(optimizer)``.
        state_dtype: How the tables are stored, see `DiskEmbedding`; float32 when None.
        ids: How ids are treated in tables whose rows belong to ids, those made of a rule without a number of
            rows, such as ``init.Normal(None, 16)``; a dict gives one for each table.
        weight_decay_catch_up: See `DiskSparseAdam`; tables have to be flat.

    Raises:
        ValueError: an option is out of range, or options contradict each other.
        StateError: the directory can't be used; see `dsa.errors` for the kinds.
        DiskSpaceError: the tables don't fit on the disk.

    Example:
        >>> import tempfile
        >>> from dsa import init
        >>> tables = {"entity": init.Zeros(1000, 2)}
        >>> optimizer = DiskSparseRiemannianAdam(tables, lr=0.1, k=0.0, disk_dir=tempfile.mkdtemp())
        >>> optimizer.step({"entity": (torch.tensor([7]), torch.tensor([[1.0, -1.0]]))})
        >>> optimizer.read_rows([7, 8])
        tensor([[-0.1000,  0.1000],
                [ 0.0000,  0.0000]])
        >>> optimizer.close()
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        weight_decay_mode: WeightDecayMode = DEFAULT_DECAY,
        k: float | Mapping[str, float] = 1.0,
        disk_dir: str | os.PathLike[str] = "./disk_cache",
        max_queue_size: int = 150,
        resume: bool | None = None,
        put_timeout: float = 5.0,
        retain_params: bool = False,
        init_max_norm_fraction: float = DEFAULT_FRACTION,
        *,
        backend: str | Layout = DEFAULT_BACKEND,
        allocate: Allocate = "reserve",
        durability: Durability = "process",
        async_writes: bool = False,
        second_moment: SecondMoment = DEFAULT_MOMENT,
        v_transport: VTransport = "tensor",
        max_step: float | None = None,
        bias_correction: BiasCorrection | None = None,
        convention: Convention | None = None,
        state_dtype: StateDtype | None = None,
        ids: IdPolicy | Mapping[str, IdPolicy] | None = None,
        weight_decay_catch_up: bool = False,
    ) -> None:
        sources = named_sources(params)
        self._convention = dialect_of(
            convention,
            bias_correction=bias_correction,
            second_moment=second_moment,
            weight_decay_mode=weight_decay_mode,
        )
        options = options_in(
            self._convention,
            lr=as_number("lr", lr),
            beta1=as_number("beta1", beta1),
            beta2=as_number("beta2", beta2),
            eps=as_number("eps", eps),
            weight_decay=as_number("weight_decay", weight_decay),
            v_transport=v_transport,
            max_step=None if max_step is None else as_number("max_step", max_step),
        )
        curvatures = curvatures_of(k, sources)
        if max_step is not None and not any(curvatures.values()):
            raise ValueError(
                f"max_step={max_step!r} is a length on the ball, but every table has k=0: leave it out, or "
                "pass k > 0"
            )
        rule = adam_rule(options.second_moment, weight_decay_catch_up)
        rule.decay_of(options)  # which refuses what can't be made up for
        chosen = None if convention is None and second_moment is DEFAULT_MOMENT and rule is ADAM else rule
        specs = specs_of(sources, chosen, curvatures, init_max_norm_fraction, state_dtype)
        self._fixed, self._ids = options, policies_of(ids, sources)
        self._stepping = Stepping()
        held = [held_tensor(source, retain_params) for source in sources.values()]
        queue = Queue(max_queue_size, put_timeout)
        waiting = queue if async_writes else None
        storage = StorageChoice(allocate, layout_of_backend(backend), durability, waiting).complete()
        self._state = open_directory(disk_dir, specs, resume, storage)
        self._convention = with_moment_of(self._convention, self._state.tables.values())
        defaults = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
        super().__init__([{"params": held, "names": list(sources)}], defaults)

    @property
    def convention(self) -> Convention:
        """The dialect of Adam in force."""
        return self._convention

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
                are summed, or averaged where the convention says so. A table that is left out, or has B = 0,
                does not change; the empty batch counts as a step of the table, as in torch, unless the
                convention skips it.
            current_k: A new curvature for the tables that are on a ball, as by `set_curvature`, before the
                step: a change of its own, which stays if the step is then refused.

        Raises:
            KeyError: a name is not a table's.
            RowIndexError, RowTypeError, GradientError: a batch can't be used; nothing has changed.
            CorruptRowError: a stored row is implausible; nothing has changed.
        """
        with self._ready() as state:
            options = self._options()
            given = checked_updates(updates)
            batches = [
                batch_of(state, named_table(state.tables, name), rows, grad, options, self._ids.get(name))
                for name, (rows, grad) in given
            ]
            if current_k is not None:
                change_curvature(
                    state, wanted_curvatures(state.tables, current_k, name=None), "clip", reset_moments=False
                )
            self._stepping.take(state, in_dialect(batches, self._convention))

    def ids(self, name: str | None = None) -> torch.Tensor:
        """Return the ids of a table that have a row, in no order that means anything: ``(n,)`` int64.

        Raises:
            KeyError: the name is not a table's, or is missing where there are several.
            TypeError: its rows belong to no ids.
        """
        with self._ready():
            return torch.from_numpy(all_ids(named_table(self._state.tables, name)))

    def delete(self, ids: ArrayLike | Sequence[int], name: str | None = None) -> int:
        """Take their rows from ids of a table, which may have none, and return how many had one.

        Raises:
            KeyError: the name is not a table's, or is missing where there are several.
            TypeError: its rows belong to no ids.
        """
        with self._ready() as state:
            return delete_rows(state, named_table(state.tables, name), to_array(ids))

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
        with self._ready():
            table = named_table(self._state.tables, name)
            return rows_of(self._state, table, indices, self._ids.get(table.name))

    def prefetch(self, indices: ArrayLike | Sequence[int], name: str | None = None) -> None:
        """Announce rows that a coming step or `read_rows` will need.

        Returns at once and never changes a result. See `dsa.lookahead` for a loader that does this for every
        batch.

        Args:
            indices: ``(B,)`` of an integer dtype, in any order, duplicates allowed.
            name: The table; may be left out when there is only one.

        Raises:
            KeyError: the name is not a table's, or is missing where there are several.
            RowIndexError, RowTypeError: the indices can't be used.
        """
        self._state.require_open()
        table = named_table(self._state.tables, name)
        self._stepping.prefetcher.announce(table, known_rows(table, to_array(indices)))

    def stats(self) -> dict[str, int | float | str]:
        """Return counts since the optimizer was built.

        ``rows_*`` count rows of tables; ``logical_bytes_*`` the bytes of their weights, moments and counters,
        and ``record_bytes_written`` what was handed to the backend for them. The disk moves whole pages of 4
        KiB: rows at random cost it several times that. ``overlay_rows``, ``queue_*``, ``sync_fallbacks`` and
        ``writer_status`` are about `async_writes`; ``prefetch_hits`` are rows of steps that a hint had named.
        ``rows_clamped`` ended at the edge of the ball, ``rows_clamped_far`` by a step of over one hyperbolic
        unit; ``longest_step`` is in that unit.
        """
        return self._stepping.statistics(self._state)

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
                they average, see `dsa.rules.curvature`.
            name: The table. Without it, a number applies to the only table, or to every table that is on a
                ball.
            map: ``"clip"`` keeps coordinates, clipped to the new ball; ``"log0"`` keeps each row's distance
                to the origin.

        Raises:
            KeyError: a name is not a table's.
            ValueError: a curvature is out of range, or the call names no table.
        """
        if map not in ("clip", "log0"):
            raise ValueError(f"map={map!r} is not known: use 'clip' or 'log0'")
        with self._ready() as state:
            change_curvature(state, wanted_curvatures(state.tables, k, name), map, reset_moments)

    def reproject_all(self, name: str | None = None) -> int:
        """Scan whole tables: bring rows back into the ball and reset rows that hold implausible values. O(N).

        Args:
            name: The table; all of them when left out.

        Returns:
            The number of rows that were projected. Rows that had to be reset are told of in a warning.
        """
        with self._state.use():
            self._state.settle()
            tables = (
                list(self._state.tables.values()) if name is None else [named_table(self._state.tables, name)]
            )
            return sum(maintenance.reproject(self._state, table) for table in tables)

    def grow(self, name: str, rows: int, init: Initializer | FromArray | MatrixLike | None = None) -> None:
        """Let a table have more rows, as `dsa.DiskEmbedding.grow` does.

        Args:
            name: The table.
            rows: Rows N from now on, at least as many as there are.
            init: The first weights of the new rows, if not those of the table's own rule.

        Raises:
            KeyError: the name is not a table's.
            ValueError: the table would shrink, or `init` is missing or doesn't fit; nothing has changed.
            DiskSpaceError: there is not enough room; nothing has changed.
        """
        with self._ready() as state:
            grow_tables(state, [growth_of(named_table(state.tables, name), rows, init)])

    def flush(self) -> None:
        """Return once everything is durable on disk."""
        with self._state.use():
            self._state.flush()

    def close(self) -> None:
        """Flush and release the directory; closing twice is silent.

        Afterwards only questions are answered: ``stats()``, ``global_step``, ``param_groups``, ``repr``.
        """
        self._stepping.prefetcher.close()
        if self._state.is_open:
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
        tables = ", ".join(
            f"{table.name}: {len(table)} x {table.dim}, k={table.k:g}"
            for table in self._state.tables.values()
        )
        head = f"{type(self).__name__}({tables}; {str(self._state.path)!r}, step {self.global_step}; "
        return f"{head}{self._convention})"

    state_dict = refuse_state_dict
    load_state_dict = refuse_loading

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse new tables once the optimizer is built."""
        if getattr(self, "param_groups", None):
            raise ValueError(
                "the tables of a state directory are fixed when it is made: build the optimizer with all of "
                "them"
            )
        super().add_param_group(param_group)

    __getstate__ = refuse_pickling
    __reduce_ex__ = refuse_pickling

    def _portable_state(self) -> StateDirectory:
        return self._state

    export_checkpoint = portable.export_checkpoint
    export_weights = portable.export_weights
    import_checkpoint = portable.import_checkpoint
    save_checkpoint = portable.save_checkpoint
    load_checkpoint = portable.load_checkpoint

    def _ready(self) -> AbstractContextManager[StateDirectory]:
        return self._stepping.ready(self._state, torch.get_num_threads())

    def _options(self) -> AdamOptions:
        self._fixed = group_options(self.param_groups[0], self._fixed)
        return self._fixed
