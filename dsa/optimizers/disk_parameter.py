"""The parameter of a table on disk: it has the table's shape and no storage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import torch

from dsa.optimizers.resident import take_data
from dsa.optimizers.sparse_gradient import clippable
from dsa.optimizers.weight_access import look_up_function, refuse
from dsa.optimizers.weight_data import WeightData
from dsa.state.id_policy import IdPolicy
from dsa.state.state_directory import StateDirectory
from dsa.state.table import Table

__all__ = ["MOST_ROWS", "DiskParameter", "usable_seed"]

MOST_ROWS: Final = 1 << 40
"""What stands for the number of rows that a table comes to have where they belong to ids."""

# What optimizers, scalers, trainers and printing ask of a parameter. Everything else would compute with
# weights that are not there.
_HARMLESS: Final = frozenset(
    {
        "__delete__", "__format__", "__get__", "__hash__", "__len__", "__repr__", "__set__", "backward",
        "dim", "element_size", "get_device", "grad", "has_names", "is_complex",
        "is_conj", "is_contiguous", "is_floating_point", "is_neg", "ndimension", "nelement", "numel",
        "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad",
        "size", "stride",
    }
)  # fmt: skip

# Attributes that are the weights, or views of them.
_VALUES: Final = frozenset({"H", "T", "data", "imag", "mH", "mT", "real"})


def usable_seed(device: torch.device | str | None, dtype: torch.dtype | None) -> torch.Tensor:
    """Return the number that stands for all elements of a table.

    Raises:
        ValueError: rows can't be handed out like that.
    """
    seed = torch.zeros((), device=device, dtype=dtype)
    if not seed.is_floating_point() or seed.is_meta:
        raise ValueError(
            f"rows of a table on disk can't be handed out with dtype={seed.dtype} on {str(seed.device)!r}: "
            "pass a floating dtype, and a device that holds numbers"
        )
    return seed


def _shape_of(table: Table) -> tuple[int, int]:
    return len(table) if table.keys is None else MOST_ROWS, table.dim


class DiskParameter(torch.nn.Parameter):
    """What stands for a table in ``model.parameters()``.

    Its shape is ``(N, D)``, its storage one number, its gradients are sparse. Where rows belong to ids, N is
    `MOST_ROWS`, however many there are, and the indices of a gradient are ids.

    `DiskSparseAdam` recognises it and updates the table. ``weight[ids]``, `torch.nn.functional.embedding` and
    `embedding_bag` read rows of it, with sparse gradients. Computing with the whole is refused: there is
    nothing to compute with.

    Args:
        state: The open directory of the table.
        table: The table.
        device: Where gathered rows and gradients are.
        dtype: dtype of gathered rows and gradients, whatever the table stores.
        requires_grad: Whether gathered rows require a gradient.
        policy: How ids are treated, where rows belong to ids.
    """

    state: StateDirectory
    table: Table
    policy: IdPolicy

    def __new__(
        cls,
        state: StateDirectory,
        table: Table,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = True,
        policy: IdPolicy | None = None,
    ) -> DiskParameter:
        """Make the parameter of an open table."""
        seed = usable_seed(device, dtype)
        parameter = torch.Tensor._make_subclass(cls, seed.expand(_shape_of(table)), requires_grad)
        parameter.state, parameter.table = state, table
        parameter.policy = IdPolicy() if policy is None else policy
        return parameter

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Look rows up, let harmless questions through, and refuse computations with the whole table."""
        if (lookup := look_up_function(func)) is not None:
            return lookup(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if attribute == "data" and name == "__get__":
            return WeightData(args[0])
        if attribute in _VALUES:
            refuse(attribute, writing=name == "__set__")
        if name not in _HARMLESS:
            refuse(name)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return clippable(result) if attribute == "grad" and name == "__get__" else result

    def move(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply what `torch.nn.Module.to` would do, without making the table's size of memory."""
        with torch._C.DisableTorchFunctionSubclass():
            seed = convert(torch.zeros((), device=self.device, dtype=self.dtype))
            if seed.is_meta:
                raise RuntimeError(
                    "'meta' is no device for a table on disk: its rows are handed out as numbers; keep the "
                    "layer where it is"
                )
            self.data = seed.expand(_shape_of(self.table))
            if self.grad is not None:
                self.grad = convert(self.grad)

    def follow(self) -> None:
        """Take on the table's shape, if it has grown; nearly free when repeated.

        A gradient that is there goes on, and so does a backward pass of a forward that was before.
        """
        with torch._C.DisableTorchFunctionSubclass():
            shape, grad = _shape_of(self.table), self.grad
            if self.shape != shape or (grad is not None and grad.shape != shape):
                take_data(self, torch.zeros((), device=self.device, dtype=self.dtype).expand(shape))

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes the text to print
        keys, dim = self.table.keys, self.table.dim
        rows = len(self.table if keys is None else keys)
        return f"DiskParameter({self.table.name!r}: {rows} x {dim} in {str(self.state.path)!r})"

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(_COPYING)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(_COPYING)


_COPYING: Final = (
    "the weight of a table on disk can't be copied or pickled: two owners would write to one directory; "
    "save the module's state_dict(), which refers to the directory, or copy the directory when it is closed"
)
