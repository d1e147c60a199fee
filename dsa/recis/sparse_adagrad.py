"""RecIS's four sparse Adagrads: its defaults, and what each of them refuses."""

from __future__ import annotations

import os
from typing import final

from dsa.optimizers.sparse_adagrad import DiskSparseAdagrad
from dsa.recis.accumulation import Accumulating
from dsa.recis.tables import Tables, named_weights, refuse

__all__ = ["SparseAdagrad", "SparseAdagradSum", "SparseRowWiseAdagrad", "SparseRowWiseAdagradSum"]


@final
class SparseAdagrad(Accumulating):
    """RecIS's ``SparseAdagrad``: torch's, with decay inside the gradient.

    Args:
        param_dict: Tables by name, see `SparseAdam`; a `DiskEmbedding` has ``state="adagrad"``.
        lr: Learning rate, > 0.
        lr_decay: Step n of a table is taken with ``lr / (1 + (n - 1) * lr_decay)``, >= 0.
        initial_accumulator_value: What the sums of squares start with, >= 0.
        eps: Added to the root of a sum, > 0.
        weight_decay: Times the weight, added to the gradient of the rows of a batch, >= 0.
        save_update_info_interval: Refused unless it is 0: what a step changes is not collected.
        state_dir: See `SparseAdam`.
        resume: See `SparseAdam`.

    Raises:
        ValueError: an option is out of range, or not computed.
        StateError: the directory can't be used; see `dsa.errors`.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from dsa import DiskEmbedding
        >>> items = DiskEmbedding(1000, 2, state_dir=tempfile.mkdtemp(), state="adagrad")
        >>> with SparseAdagrad({"items": items}) as optimizer:
        ...     items(torch.tensor([3, 5])).sum().backward()
        ...     optimizer.step()
        ...     optimizer.global_step
        1
    """

    def __init__(
        self,
        param_dict: Tables,
        lr: float = 1e-3,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        save_update_info_interval: int = 0,
        *,
        state_dir: str | os.PathLike[str] | None = None,
        resume: bool | None = None,
    ) -> None:
        refuse("save_update_info_interval", save_update_info_interval)
        numbers = (lr, lr_decay, weight_decay, initial_accumulator_value, eps)
        disk = DiskSparseAdagrad(
            named_weights(param_dict),
            *numbers,
            state_dir=state_dir,
            resume=resume,
        )
        super().__init__(disk)


@final
class SparseAdagradSum(Accumulating):
    """RecIS's ``SparseAdagradSum``: `SparseAdagrad` without decay, for gradients summed over workers.

    There the squares of the workers' gradients are summed, not the gradients before they are squared. Here
    one process has the whole gradient of a batch, so that there is one square, and a batch is one
    micro-batch.

    Args:
        param_dict: Tables by name, see `SparseAdam`; a `DiskEmbedding` has ``state="adagrad"``.
        lr: Learning rate, > 0.
        lr_decay: Step n of a table is taken with ``lr / (1 + (n - 1) * lr_decay)``, >= 0.
        initial_accumulator_value: What the sums of squares start with, >= 0.
        eps: Added to the root of a sum, > 0.
        weight_decay: Refused unless it is 0, as there.
        save_update_info_interval: Refused unless it is 0: what a step changes is not collected.
        state_dir: See `SparseAdam`.
        resume: See `SparseAdam`.

    Raises:
        ValueError: an option is out of range, or not computed.
        StateError: the directory can't be used; see `dsa.errors`.
    """

    def __init__(
        self,
        param_dict: Tables,
        lr: float = 1e-3,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        save_update_info_interval: int = 0,
        *,
        state_dir: str | os.PathLike[str] | None = None,
        resume: bool | None = None,
    ) -> None:
        refuse("save_update_info_interval", save_update_info_interval)
        refuse("weight_decay", weight_decay)
        numbers = (lr, lr_decay, weight_decay, initial_accumulator_value, eps)
        disk = DiskSparseAdagrad(
            named_weights(param_dict),
            *numbers,
            state_dir=state_dir,
            resume=resume,
        )
        super().__init__(disk, several=False)


@final
class SparseRowWiseAdagrad(Accumulating):
    """RecIS's ``SparseRowWiseAdagrad``: one sum for each row, of the mean squares of its gradients.

    Args:
        param_dict: Tables by name, see `SparseAdam`; a `DiskEmbedding` has ``state="rowwise_adagrad"``.
        lr: Learning rate, > 0.
        lr_decay: Step n of a table is taken with ``lr / (1 + (n - 1) * lr_decay)``, >= 0.
        initial_accumulator_value: What the sums of squares start with, >= 0.
        eps: Added to the root of a sum, > 0.
        weight_decay: Times the weight, added to the gradient of the rows of a batch, >= 0.
        maximize: Ascend instead of descend.
        state_dir: See `SparseAdam`.
        resume: See `SparseAdam`.

    Raises:
        ValueError: an option is out of range, or not computed.
        StateError: the directory can't be used; see `dsa.errors`.
    """

    def __init__(
        self,
        param_dict: Tables,
        lr: float = 1e-3,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state_dir: str | os.PathLike[str] | None = None,
        resume: bool | None = None,
    ) -> None:
        numbers = (lr, lr_decay, weight_decay, initial_accumulator_value, eps)
        disk = DiskSparseAdagrad(
            named_weights(param_dict),
            *numbers,
            maximize=maximize,
            row_wise=True,
            state_dir=state_dir,
            resume=resume,
        )
        super().__init__(disk)


@final
class SparseRowWiseAdagradSum(Accumulating):
    """RecIS's ``SparseRowWiseAdagradSum``: `SparseRowWiseAdagrad` without decay, for sums over workers.

    There the squares of the workers' gradients are summed, not the gradients before they are squared. Here
    one process has the whole gradient of a batch, so that there is one square, and a batch is one
    micro-batch.

    Args:
        param_dict: Tables by name, see `SparseAdam`; a `DiskEmbedding` has ``state="rowwise_adagrad"``.
        lr: Learning rate, > 0.
        lr_decay: Step n of a table is taken with ``lr / (1 + (n - 1) * lr_decay)``, >= 0.
        initial_accumulator_value: What the sums of squares start with, >= 0.
        eps: Added to the root of a sum, > 0.
        weight_decay: Refused unless it is 0, as there.
        maximize: Ascend instead of descend.
        state_dir: See `SparseAdam`.
        resume: See `SparseAdam`.

    Raises:
        ValueError: an option is out of range, or not computed.
        StateError: the directory can't be used; see `dsa.errors`.
    """

    def __init__(
        self,
        param_dict: Tables,
        lr: float = 1e-3,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state_dir: str | os.PathLike[str] | None = None,
        resume: bool | None = None,
    ) -> None:
        refuse("weight_decay", weight_decay)
        numbers = (lr, lr_decay, weight_decay, initial_accumulator_value, eps)
        disk = DiskSparseAdagrad(
            named_weights(param_dict),
            *numbers,
            maximize=maximize,
            row_wise=True,
            state_dir=state_dir,
            resume=resume,
        )
        super().__init__(disk, several=False)
