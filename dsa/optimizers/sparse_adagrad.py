"""`DiskSparseAdagrad`: `torch.optim.Adagrad` for sparse gradients, with its state on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any, Final, final

import torch

from dsa.backends.base import Layout
from dsa.backends.mapping import Allocate
from dsa.optimizers import portable
from dsa.optimizers import sparse_methods as methods
from dsa.optimizers.arguments import DEFAULT_BACKEND, ParamGroups, StateDtype, storage_choice
from dsa.optimizers.flattening import moments_by_rows
from dsa.optimizers.foreign import TORCH_ADAGRAD, import_state
from dsa.optimizers.options import as_number, plain_options
from dsa.optimizers.registration import Registry
from dsa.optimizers.sparse_tables import SparseTables, checked_groups
from dsa.rules.adagrad import ADAGRAD, ROW_WISE_ADAGRAD, AdagradOptions
from dsa.state.state_directory import StateDirectory
from dsa.state.storage import Durability
from dsa.state.table import Table

__all__ = ["DiskSparseAdagrad"]

_INITIAL: Final = "initial_accumulator_value"


@final
class DiskSparseAdagrad(torch.optim.Optimizer):
    """Adagrad for sparse gradients with its sums of squares on disk.

    `torch.optim.Adagrad` over sparse gradients, with a directory; what it shares with `DiskSparseAdam`, which
    is all but the update rule and its options, is described there.

    A sum starts with `initial_accumulator_value` although nothing is written for it: records hold the squares
    of the gradients, field ``h``, and the value is added where a sum is used. As any option of a step it may
    be another one after a resume.

    Args:
        params: As for `DiskSparseAdam`.
        lr: Learning rate, > 0.
        lr_decay: Step n of a table is taken with ``lr / (1 + (n - 1) * lr_decay)``, >= 0.
        weight_decay: Times the weight, added to the gradient of the rows of a batch, >= 0; torch's Adagrad
            refuses it with sparse gradients.
        initial_accumulator_value: What the sums of squares start with, >= 0.
        eps: What is added to the root of a sum, > 0.
        maximize: Ascend instead of descend.
        row_wise: One sum for each row, of the mean squares of its gradients, as PyTorch-BigGraph, DGL-KE and
            FBGEMM have it: 4 bytes of state a row. With `DiskEmbedding` it goes with its
            ``state="rowwise_adagrad"``.
        state_dir: The state directory. Needed only when there are ordinary parameters.
        resume: See `DiskSparseAdam`.
        backend: See `DiskSparseAdam`.
        allocate: ``"reserve"`` or ``"sparse"``.
        durability: ``"process"``, ``"power"`` or ``"none"``.
        async_writes: Write in a thread.
        state_dtype: How the optimizer's numbers are stored: ``"bfloat16"`` halves them, rounded at random so
            that their means are right; a dict, such as ``{"v": "bfloat16"}``, chooses for each. None is
            float32, or what the tables of modules were made with.

    Raises:
        ValueError: an option is out of range, or a parameter is dense by its shape.
        StateError: the directory can't be used, or holds the state of another rule; see `dsa.errors`.

    Example:
        >>> import tempfile
        >>> embedding = torch.nn.Embedding(1000, 2, sparse=True)
        >>> optimizer = DiskSparseAdagrad(embedding.parameters(), lr=0.1, state_dir=tempfile.mkdtemp())
        >>> embedding(torch.tensor([3, 5])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.global_step
        1
        >>> optimizer.close()
    """

    def __init__(
        self,
        params: ParamGroups,
        lr: float | torch.Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        row_wise: bool = False,
        state_dir: str | os.PathLike[str] | None = None,
        resume: bool | None = None,
        backend: str | Layout = DEFAULT_BACKEND,
        allocate: Allocate | None = None,
        durability: Durability | None = None,
        async_writes: bool = False,
        state_dtype: StateDtype | None = None,
    ) -> None:
        choice = storage_choice(backend, allocate, durability, async_writes)
        rule = ROW_WISE_ADAGRAD if row_wise else ADAGRAD
        self._sparse = SparseTables(
            Registry(state_dir, resume, choice, rule, state_dtype),
            partial(plain_options, AdagradOptions),
            _import_sums,
        )
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
            "maximize": maximize,
        }
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


def _import_sums(
    state: StateDirectory, tables: Mapping[torch.Tensor, Table], state_dict: Mapping[str, Any]
) -> None:
    """Take over the state of a `torch.optim.Adagrad`, whose sums contain what they started with."""
    foreign = moments_by_rows(state_dict.get("state"), list(tables))
    least = [
        as_number(_INITIAL, group.get(_INITIAL, 0.0))
        for group in state_dict["param_groups"]
        for _ in group["params"]
    ]
    import_state(state, list(tables.values()), foreign, TORCH_ADAGRAD, least)
