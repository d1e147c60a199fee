"""Reading the rows of a table into autograd, and their gradients back out as sparse ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dsa.errors import RowTypeError
from dsa.kernels.rows import unique_inverse
from dsa.kernels.threads import thread_limit
from dsa.optimizers.id_rows import PADDING, read_ids
from dsa.optimizers.tensors import to_array
from dsa.schema import Rows
from dsa.state.coalesce import as_ids, as_rows
from dsa.state.maintenance import write_weights
from dsa.state.table import read_weights

if TYPE_CHECKING:
    from dsa.optimizers.disk_parameter import DiskParameter

__all__ = ["Lookup", "clip_rows", "distinct_rows", "flat_ids", "handed_out", "look_up"]


class Lookup(NamedTuple):
    """The distinct rows of a batch of ids.

    Args:
        values: ``(U, D)``, the rows' weights; requires a gradient where the parameter does.
        inverse: int64 of the ids' shape: the position of each id among the distinct rows.
        padding: The position of the padding row, or None.
    """

    values: torch.Tensor
    inverse: torch.Tensor
    padding: int | None


def look_up(
    weight: DiskParameter,
    ids: torch.Tensor,
    padding_idx: int | None,
    max_norm: float | None,
    norm_type: float,
    training: bool,
) -> Lookup:
    """Read each distinct row of a batch once.

    Args:
        weight: The table's parameter.
        ids: Integers of any shape, on any device: rows, or the ids that rows belong to.
        padding_idx: The row or id that gets no gradient.
        max_norm: Rows with a larger norm are scaled down to it; while training that is written to the table.
        norm_type: The p of that norm.
        training: Whether the table may be written.

    Raises:
        RowIndexError, RowTypeError: the ids can't be used.
        CorruptRowError: a stored row is implausible.
    """
    table, state = weight.table, weight.state
    tracked = torch.is_grad_enabled() and weight.requires_grad
    if table.keys is None:
        unique, inverse = distinct_rows(ids, len(table), table.name)
        owners = unique
    with state.exclusive, thread_limit(torch.get_num_threads()):
        state.make_ready()
        if table.keys is None:
            weight.follow()
            values = read_weights(table, unique)
        else:
            wanted = as_ids(flat_ids(ids, table.name), table.name)
            learning = training and tracked
            unique, owners, inverse, values = read_ids(
                state, table, weight.policy, wanted, padding_idx, learning
            )
            padding_idx = None if padding_idx is None else PADDING
        if max_norm is not None:
            changed = clip_rows(values, float(max_norm), float(norm_type))
            changed = changed[unique[changed] >= 0]
            if training and torch.is_grad_enabled() and len(changed):
                write_weights(state, table, unique[changed], values[changed])
    shape = ids.shape
    with torch._C.DisableTorchFunctionSubclass():  # the parameter would be asked for what is known
        found = handed_out(values, unique, inverse.reshape(shape), padding_idx, weight.device, weight.dtype)
        if not tracked:
            return found
        trained = None
        if found.padding is not None or (len(unique) and unique[0] < 0):
            trained = np.flatnonzero((np.arange(len(unique)) != found.padding) & (unique >= 0))
            owners = owners[trained]
        gathered = _Gather.apply(weight, found.values, owners, trained)  # type: ignore[no-untyped-call]
        return found._replace(values=gathered)


def distinct_rows(ids: torch.Tensor, rows: int, name: str) -> tuple[Rows, Rows]:
    """Return the distinct ids of a batch, and the position of each id among them, ``(number of ids,)``.

    Args:
        ids: Integers of any shape, on any device.
        rows: Rows of the table.
        name: Its name.

    Raises:
        RowIndexError, RowTypeError: the ids can't be used.
    """
    return unique_inverse(as_rows(flat_ids(ids, name), rows, name))


def flat_ids(ids: torch.Tensor, name: str) -> NDArray[Any]:
    """Return a batch of ids as a 1-D array.

    Args:
        ids: Of any shape, on any device.
        name: The table's name.

    Raises:
        RowTypeError: they are no tensor, or a nested one.
    """
    if not isinstance(ids, torch.Tensor):
        raise RowTypeError(f"the ids for table {name!r} are a {type(ids).__name__}: pass a tensor")
    if ids.is_nested:
        raise RowTypeError(
            f"the ids for table {name!r} are a nested tensor: pass ids.values(), and for bags "
            "ids.offsets()[:-1] as their offsets"
        )
    return to_array(ids).reshape(-1)


def handed_out(
    values: NDArray[np.float32],
    rows: Rows,
    inverse: Rows,
    padding_idx: int | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Lookup:
    """Return rows that were read as a module hands them out, without gradients.

    Args:
        values: ``(U, D)``.
        rows: ``(U,)``, strictly increasing.
        inverse: Of the ids' shape.
        padding_idx: The row that is none, or None.
        device: Where they are wanted.
        dtype: What of.
    """
    gathered = _onto_device(torch.from_numpy(values), device).to(dtype)
    return Lookup(gathered, _onto_device(torch.from_numpy(inverse), device), _position(rows, padding_idx))


class _Gather(torch.autograd.Function):
    """Passes gathered rows on; turns their gradient into a sparse gradient of the whole table.

    Where rows belong to ids, its indices are the ids: by the time of the step a row may be another id's.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context
        weight: DiskParameter,
        gathered: torch.Tensor,
        owners: Rows,
        trained: Rows | None,
    ) -> torch.Tensor:
        ctx.owners, ctx.trained, ctx.size = owners, trained, tuple(weight.shape)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # noqa: ANN401
        owners: Rows = ctx.owners
        if ctx.trained is not None:
            grad = grad[_onto_device(torch.from_numpy(ctx.trained), grad.device)]
        # A copy: torch can't enlarge memory of numpy's, which it does when it adds to an empty gradient.
        indices = torch.tensor(owners, device=grad.device)[None]
        ordered = bool((owners[1:] > owners[:-1]).all())
        sparse = torch.sparse_coo_tensor(
            indices, grad, ctx.size, check_invariants=False, is_coalesced=ordered
        )
        return sparse, None, None, None


def clip_rows(values: NDArray[np.float32], max_norm: float, norm_type: float) -> NDArray[np.int64]:
    """Scale rows beyond `max_norm` down to it in place, as torch does, and return which they were.

    Rounding may leave the scaled row a little beyond. It is scaled on, first by the smallest step that there
    is, so that a row that was clipped and stored is not clipped again: a run that is killed between forward
    and step goes on with the same bits.
    """
    norms = _norms(values, norm_type)
    clipped = np.flatnonzero(norms > max_norm)
    values[clipped] *= (max_norm / (norms[clipped] + 1e-7))[:, None].astype(np.float32)
    beyond = clipped
    for exponent in range(-24, 1):  # the last step leaves nothing
        beyond = beyond[_norms(values[beyond], norm_type) > max_norm]
        if len(beyond) == 0:
            break
        factor = np.float32(1.0 - math.ldexp(0.5, exponent)) if exponent else np.float32(0.0)
        values[beyond] = np.nextafter(values[beyond] * factor, np.float32(0.0))
    return clipped


def _norms(values: NDArray[np.float32], norm_type: float) -> NDArray[np.float64]:
    return np.asarray(np.linalg.norm(values.astype(np.float64), ord=norm_type, axis=1))


def _position(rows: Rows, padding_idx: int | None) -> int | None:
    if padding_idx is None:
        return None
    position = int(np.searchsorted(rows, padding_idx))
    return position if position < len(rows) and rows[position] == padding_idx else None


def _onto_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
