"""What ``weight.data`` is for a table on disk: its description and its rows, but no tensor.

No tensor, because code in C++ (a broadcast, say) would take one that stands for a table for its values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

import torch

from dsa.optimizers.weight_access import refuse, rows_at

if TYPE_CHECKING:
    from dsa.optimizers.disk_parameter import DiskParameter

__all__ = ["WeightData"]

_DESCRIPTION: Final = frozenset(
    {
        "device", "dim", "dtype", "element_size", "get_device", "is_complex", "is_contiguous", "is_cuda",
        "is_floating_point", "is_meta", "is_sparse", "itemsize", "layout", "nbytes", "ndim", "ndimension",
        "nelement", "numel", "shape", "size", "stride",
    }
)  # fmt: skip
_OPERATORS: Final = ("add", "floordiv", "matmul", "mod", "mul", "pow", "sub", "truediv")


@final
class WeightData:
    """The description and the rows of a table, without gradients.

    Args:
        weight: The table's parameter.
    """

    def __init__(self, weight: DiskParameter) -> None:
        self._weight = weight

    def __getitem__(self, index: object) -> torch.Tensor:
        with torch.no_grad():
            return rows_at(self._weight, index)

    def __setitem__(self, index: object, values: object) -> NoReturn:
        refuse("__setitem__")

    def __iter__(self) -> NoReturn:
        refuse("__iter__")

    def __len__(self) -> int:
        return len(self._weight)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the parameter says
        if name in _DESCRIPTION:
            return getattr(self._weight, name)
        if name.startswith("__") and name != "__array__":
            raise AttributeError(f"the values of a table on disk have no {name!r}: use weight[ids]")
        refuse(name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        """Refuse computations with the whole table."""
        refuse(getattr(func, "__name__", "a function"))

    def __repr__(self) -> str:
        return f"<the values of {self._weight!r}>"


def _refused(name: str) -> Callable[..., NoReturn]:
    def operator(self: WeightData, other: object) -> NoReturn:
        refuse(name)

    return operator


for _name in _OPERATORS:
    for _form in ("", "r", "i"):
        setattr(WeightData, f"__{_form}{_name}__", _refused(f"__{_form}{_name}__"))
