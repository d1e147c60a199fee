"""RecIS's three sparse Adams: what each of them calls its dialect, and its defaults."""

from __future__ import annotations

import os
from typing import ClassVar, Final, final

from dsa.errors import TrainingWarning, notify
from dsa.optimizers.options import as_number
from dsa.optimizers.sparse_adam import DiskSparseAdam
from dsa.recis.accumulation import Accumulating
from dsa.recis.tables import Tables, named_weights, refuse
from dsa.rules.conventions import RECIS_SPARSE_ADAM, RECIS_SPARSE_ADAMW, RECIS_SPARSE_ADAMW_TF, Convention

__all__ = ["SparseAdam", "SparseAdamW", "SparseAdamWTF"]

_DECAY: Final = 1e-2


class _SparseAdam(Accumulating):
    """What the three share; each has a dialect."""

    _convention: ClassVar[Convention]

    def __init__(
        self,
        param_dict: Tables,
        lr: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = _DECAY,
        amsgrad: bool = False,
        *,
        state_dir: str | os.PathLike[str] | None = None,
        resume: bool | None = None,
    ) -> None:
        refuse("amsgrad", amsgrad)
        decay = as_number("weight_decay", weight_decay)
        if not 0.0 <= decay < float("inf"):
            raise ValueError(f"weight_decay={weight_decay!r} is out of range: pass a finite number >= 0")
        if self._convention.weight_decay_mode == "none":
            if decay not in (0.0, _DECAY):
                notify(
                    f"weight_decay={weight_decay!r} has no effect in SparseAdam, as in RecIS: use "
                    "SparseAdamW",
                    TrainingWarning,
                )
            decay = 0.0
        super().__init__(
            DiskSparseAdam(
                named_weights(param_dict),
                lr,
                (beta1, beta2),
                eps,
                decay,
                state_dir=state_dir,
                resume=resume,
                convention=self._convention,
            )
        )


@final
class SparseAdam(_SparseAdam):
    """RecIS's ``SparseAdam``: by its mathematics torch's, and without decay.

    Args:
        param_dict: Tables by name: `DiskEmbedding` and `DiskEmbeddingBag`, torch's modules with
            ``sparse=True``, or their weights, as `filter_out_sparse_param` returns them.
        lr: Learning rate, > 0.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        eps: Added to the uncorrected root, > 0.
        weight_decay: Has no effect there, whatever its document says, and none here: any but the default and
            0 is warned of.
        amsgrad: Refused if true.
        state_dir: The state directory; needed only when weights are in memory.
        resume: What to do with state that is in `state_dir`, see `DiskSparseAdam`.

    Raises:
        ValueError: an option is out of range, or amsgrad is asked for.
        StateError: the directory can't be used; see `dsa.errors`.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from dsa import DiskEmbedding
        >>> items = DiskEmbedding(1000, 2, state_dir=tempfile.mkdtemp())
        >>> with SparseAdam({"items": items}) as optimizer:
        ...     items(torch.tensor([3, 5])).sum().backward()
        ...     optimizer.step()
        ...     optimizer.global_step
        1
    """

    _convention = RECIS_SPARSE_ADAM


@final
class SparseAdamW(_SparseAdam):
    """RecIS's ``SparseAdamW``: rows of the batch decay by ``lr * weight_decay``.

    Args:
        param_dict: Tables by name, see `SparseAdam`.
        lr: Learning rate, > 0.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        eps: Added to the uncorrected root, > 0.
        weight_decay: Decay coefficient, >= 0.
        amsgrad: Refused if true.
        state_dir: See `SparseAdam`.
        resume: See `SparseAdam`.

    Raises:
        ValueError: an option is out of range, or amsgrad is asked for.
        StateError: the directory can't be used; see `dsa.errors`.
    """

    _convention = RECIS_SPARSE_ADAMW


@final
class SparseAdamWTF(_SparseAdam):
    """RecIS's ``SparseAdamWTF``: rows of the batch decay by ``weight_decay``, whatever the learning rate.

    With the default a row loses a hundredth in each of its updates: a schedule of the learning rate does not
    reach the decay.

    Args:
        param_dict: Tables by name, see `SparseAdam`.
        lr: Learning rate, > 0.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        eps: Added to the uncorrected root, > 0.
        weight_decay: What of a weight is taken in each update, >= 0.
        use_nesterov: Refused if true.
        state_dir: See `SparseAdam`.
        resume: See `SparseAdam`.

    Raises:
        ValueError: an option is out of range, or Nesterov's momentum is asked for.
        StateError: the directory can't be used; see `dsa.errors`.
    """

    _convention = RECIS_SPARSE_ADAMW_TF

    def __init__(
        self,
        param_dict: Tables,
        lr: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = _DECAY,
        use_nesterov: bool = False,
        *,
        state_dir: str | os.PathLike[str] | None = None,
        resume: bool | None = None,
    ) -> None:
        refuse("use_nesterov", use_nesterov)
        super().__init__(param_dict, lr, beta1, beta2, eps, weight_decay, state_dir=state_dir, resume=resume)
