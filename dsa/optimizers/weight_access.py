"""A table's weight as a tensor: rows are looked up in it, the rest is refused with advice."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, cast

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dsa.kernels.rows import add_rows
from dsa.optimizers.lookup import look_up
from dsa.optimizers.tensors import to_array
from dsa.schema import Rows

if TYPE_CHECKING:
    from dsa.optimizers.disk_parameter import DiskParameter

__all__ = ["MAX_SLICE_BYTES", "bag_rows", "look_up_function", "refuse", "require_bags", "rows_at"]

MAX_SLICE_BYTES: Final = 256 << 20
"""The weights that one slice may read; ids can be of any number."""

# What to use instead.
_WRITE: Final = "the layer's set_rows(ids, weights) for some rows, load_state_dict for all of them"
_DRAW: Final = "init= of the layer, which says how its first weights are drawn"
_READ: Final = "weight[ids] to read rows, dsa.materialize_ or the layer's export_weights for all of them"
_PENALISE: Final = (
    "the rows that the module's forward returns, or weight[ids], and penalise or tie those instead of the "
    "whole table"
)
_OPTIMIZE: Final = "dsa.DiskSparseAdam or another of dsa's optimizers, which find the table"
_COMPILE: Final = "the module itself in compiled code, which leaves the graph for the lookup"
_DISTRIBUTE: Final = (
    "weight[ids] to read rows; where it was DistributedDataParallel, pass the parameter's name to its "
    "_set_params_and_buffers_to_ignore_for_model, and train the table in one process"
)

# What was called, and what to do instead; whatever is not named here computes with the values.
_ADVICE: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            "bernoulli_", "cauchy_", "constant_", "exponential_", "eye", "fill_", "geometric_",
            "kaiming_uniform_", "log_normal_", "new", "new_empty", "new_tensor", "normal_", "random_",
            "uniform_", "zero_",
        ),
        _DRAW,
    ),
    **dict.fromkeys(("__setitem__", "copy_", "data", "index_copy_", "masked_fill_", "set_"), _WRITE),
    **dict.fromkeys(
        (
            "__array__", "__iter__", "clone", "contiguous", "cpu", "cuda", "double", "flatten", "float",
            "half", "item", "numpy", "reshape", "storage", "to", "tolist", "unbind", "untyped_storage",
            "view",
        ),
        _READ,
    ),
    **dict.fromkeys(("empty_like", "full_like", "new_zeros", "ones_like", "zeros_like"), _OPTIMIZE),
    **dict.fromkeys(("add_", "addcdiv_", "addcmul_", "index_add_", "lerp_", "mul_", "sub_"), _OPTIMIZE),
    "_is_view": _COMPILE,
    "detach": _DISTRIBUTE,
}  # fmt: skip


def refuse(asked: str, *, writing: bool = False) -> NoReturn:
    """Refuse a function that would need the values of the whole table.

    Args:
        asked: Its name.
        writing: Whether it would set them.

    Raises:
        RuntimeError: always.
    """
    advice = _WRITE if writing else _ADVICE.get(asked, _PENALISE)
    raise RuntimeError(
        f"{asked!r} was called on the weight of a table on disk, which has no values in memory: use {advice}"
    )


def look_up_function(func: Callable[..., Any]) -> Callable[..., torch.Tensor] | None:
    """Return what stands for a function of torch that reads rows of a weight, or None."""
    return _LOOKUPS.get(func)


def rows_at(weight: DiskParameter, index: object) -> torch.Tensor:
    """Return ``weight[index]``, with a gradient where the weight requires one.

    Args:
        weight: The table's parameter.
        index: An integer; integers of any shape, as a tensor, an array or a list; a slice of at most
            `MAX_SLICE_BYTES`; or a tuple of one of these and of what the result is indexed with along its
            last dimension. Negative ones count from the end, unless rows belong to ids.

    Returns:
        ``(*, D)``, without the first dimension for an integer.

    Raises:
        TypeError: the index is of another kind.
        ValueError: a slice is too long.
        RowIndexError, RowTypeError: the rows can't be used.
    """
    if isinstance(index, tuple):
        if len(index) != 2 or not any(isinstance(each, slice | int) for each in index):
            raise TypeError(
                f"{index!r} does not index rows of table {weight.table.name!r}: pass rows first, and an "
                "integer or a slice for the elements"
            )
        return rows_at(weight, index[0])[..., index[1]]
    if isinstance(index, slice):
        return _look_up(weight, _range_of(weight, index))
    if index is None or index is Ellipsis or isinstance(index, bool):
        raise TypeError(f"{index!r} selects the whole table {weight.table.name!r}: pass ids, or a slice")
    ids = index if isinstance(index, torch.Tensor) else torch.as_tensor(to_array(index))
    if ids.dtype in (torch.bool, torch.uint8):
        raise TypeError(
            f"an index of {ids.dtype} is a mask, as long as table {weight.table.name!r}: pass "
            "mask.nonzero()[:, 0]"
        )
    if weight.table.keys is None and not ids.is_floating_point() and not ids.is_complex():
        ids = torch.where(ids < 0, ids + len(weight.table), ids)
    return _look_up(weight, ids)


def bag_rows(
    values: torch.Tensor,
    inverse: torch.Tensor,
    offsets: torch.Tensor | None,
    mode: Literal["sum", "mean", "max"],
    per_sample_weights: torch.Tensor | None,
    include_last_offset: bool,
    padding: int | None,
) -> torch.Tensor:
    """Return one reduced row per bag, as `torch.nn.functional.embedding_bag` does.

    Args:
        values: ``(U, D)``.
        inverse: Positions in it: 1-D with `offsets`, or 2-D with one bag per row.
        offsets: Where each bag starts in a 1-D `inverse`.
        mode: How a bag is reduced.
        per_sample_weights: A factor for each position, or None.
        include_last_offset: Whether the last offset is the number of positions.
        padding: The position of the row that is left out, or None.

    Raises:
        ValueError: the offsets are no bags of the ids.
    """
    if not require_bags(inverse, offsets, include_last_offset):
        return values[:0]  # torch reads memory that is not there
    plain = mode == "sum" and per_sample_weights is None and padding is None
    if plain and values.dtype == torch.float32 and values.device.type == "cpu":
        bags = _bag_of_each(inverse, offsets, include_last_offset)
        if bags is not None:
            sums: torch.Tensor = _Sums.apply(values, inverse, *bags)  # type: ignore[no-untyped-call]
            return sums
    return functional.embedding_bag(
        inverse,
        values,
        offsets,
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding,
    )


def _bag_of_each(
    inverse: torch.Tensor, offsets: torch.Tensor | None, include_last_offset: bool
) -> tuple[Rows, int] | None:
    """Return which bag each position is in, and how many bags there are; None where torch is to judge."""
    if offsets is None:
        if inverse.dim() != 2:
            return None
        return np.repeat(np.arange(len(inverse)), inverse.shape[1]), len(inverse)
    starts = to_array(offsets)
    if inverse.dim() != 1 or starts[0] != 0 or starts[-1] > len(inverse):
        return None
    lengths = np.diff(starts if include_last_offset else np.append(starts, len(inverse)))
    return np.repeat(np.arange(len(lengths)), lengths), len(lengths)


class _Sums(torch.autograd.Function):
    """Sums of bags of rows; they and their gradients are added up in the order of the ids, as a step does.

    One thread does it sooner than torch wakes its own, which then keep the cores busy. The order of torch's
    gradients is that of an unstable sort.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context
        values: torch.Tensor,
        inverse: torch.Tensor,
        bags: Rows,
        count: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.bags, ctx.shape = bags, values.shape
        return _added(values, bags, to_array(inverse).reshape(-1), (count, values.shape[1]), gather=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # noqa: ANN401
        (inverse,) = ctx.saved_tensors
        sums = _added(grad, ctx.bags, to_array(inverse).reshape(-1), tuple(ctx.shape), gather=False)
        return sums, None, None, None


def _added(
    values: torch.Tensor, bags: Rows, positions: Rows, shape: tuple[int, int], *, gather: bool
) -> torch.Tensor:
    """Return sums of rows by bag, or by position of what is given by bag."""
    if len(bags) == 0:
        return torch.zeros(shape)  # torch enlarges a gradient without rows, which it can't do to numpy's
    sums = np.zeros(shape, np.float32)  # torch's zeros wake its threads
    positions = positions[: len(bags)]
    sources, targets = (positions, bags) if gather else (bags, positions)
    add_rows(to_array(values.contiguous()), sources, targets, sums)
    return torch.from_numpy(sums)


def require_bags(ids: torch.Tensor, offsets: torch.Tensor | None, include_last_offset: bool) -> bool:
    """Check offsets for what torch would read foreign memory by, and tell whether there is a bag at all.

    Torch itself looks at the first of them and at the last one, where there is a bag.

    Raises:
        ValueError: they are no numbers, or fall.
    """
    if offsets is None or ids.dim() != 1:
        return True  # torch says what is wrong with the shapes
    starts = to_array(offsets)
    if starts.ndim != 1 or starts.dtype.kind not in "iu":
        raise ValueError(
            f"offsets of shape {starts.shape} and {offsets.dtype} are none: pass a 1-D tensor of integers"
        )
    bags = len(starts) - include_last_offset
    if bags < 0:
        raise ValueError("offsets=[] lacks the last offset of include_last_offset: pass at least [0]")
    if (starts[1:] < starts[:-1]).any() or (not bags and starts.any()):
        raise ValueError(
            f"the offsets {_some(starts)} are no starts of bags of {len(ids)} ids: pass 0 first, then "
            f"numbers that don't fall, up to {len(ids)}"
        )
    return bags > 0


def _some(numbers: np.ndarray[Any, Any]) -> str:
    shown = ", ".join(map(str, numbers[:6].tolist()))
    return f"[{shown}, ...]" if len(numbers) > 6 else f"[{shown}]"


def _range_of(weight: DiskParameter, index: slice) -> torch.Tensor:
    if weight.table.keys is not None:
        raise TypeError(f"{index!r} names no ids of table {weight.table.name!r}: pass the ids themselves")
    chosen = range(len(weight.table))[index]
    row_bytes = weight.table.dim * weight.element_size()
    if len(chosen) * row_bytes > MAX_SLICE_BYTES:
        raise ValueError(
            f"a slice of {len(chosen)} rows of table {weight.table.name!r} takes {len(chosen) * row_bytes:,} "
            f"bytes of memory: take slices of at most {MAX_SLICE_BYTES // row_bytes} rows, or "
            "dsa.materialize_ for the whole"
        )
    return torch.arange(chosen.start, chosen.stop, chosen.step)


def _look_up(
    weight: DiskParameter,
    ids: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
) -> torch.Tensor:
    found = look_up(weight, ids, padding_idx, max_norm, norm_type, training=True)
    return functional.embedding(found.inverse, found.values)


def _embedding(
    input: torch.Tensor,
    weight: DiskParameter,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Stand for `torch.nn.functional.embedding`; the gradient is sparse whatever `sparse` says."""
    _refuse_scaling(scale_grad_by_freq)
    return _look_up(weight, input, _row(weight, padding_idx), max_norm, norm_type)


def _embedding_bag(
    input: torch.Tensor,
    weight: DiskParameter,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    """Stand for `torch.nn.functional.embedding_bag`, likewise."""
    _refuse_scaling(scale_grad_by_freq)
    if mode not in ("sum", "mean", "max"):
        raise ValueError(f"mode={mode!r} is not known: use 'sum', 'mean' or 'max'")
    if weight.table.k > 0.0:
        raise ValueError(
            f"a {mode!r} of points of the ball is not one of its points: use a DiskEmbeddingBag, whose mean "
            "is that of the ball"
        )
    found = look_up(weight, input, _row(weight, padding_idx), max_norm, norm_type, training=True)
    how = cast("Literal['sum', 'mean', 'max']", mode)
    return bag_rows(
        found.values, found.inverse, offsets, how, per_sample_weights, include_last_offset, found.padding
    )


def _index_select(weight: DiskParameter, dim: int, index: torch.Tensor) -> torch.Tensor:
    if dim not in (0, -2):
        refuse("index_select")
    return _look_up(weight, index)


def _refuse_scaling(scale_grad_by_freq: bool) -> None:
    if scale_grad_by_freq:
        raise ValueError(
            "scale_grad_by_freq=True does not exist for sparse gradients: leave it out, or scale the loss"
        )


def _row(weight: DiskParameter, padding_idx: int | None) -> int | None:
    if padding_idx is None:
        return None
    row = operator.index(padding_idx)
    return row if weight.table.keys is not None else row % len(weight.table)


_LOOKUPS: Final[dict[Callable[..., Any], Callable[..., torch.Tensor]]] = {
    torch.Tensor.__getitem__: rows_at,
    torch.Tensor.index_select: _index_select,
    torch.index_select: _index_select,
    functional.embedding: _embedding,
    functional.embedding_bag: _embedding_bag,
}
