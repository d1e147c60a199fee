"""Fields of tables as xarray's labelled arrays, without reading them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from dsa.schema import is_bfloat16

if TYPE_CHECKING:
    from types import ModuleType

    from xarray import Dataset, DataTree
else:
    Dataset = DataTree = ModuleType = Any

__all__ = ["dataset", "tree"]

_DESCRIPTIONS: Final = {
    "w": "weight; 0 in rows that were never written, whose s is 0",
    "m": "first moment",
    "v": "second moment",
    "h": "sum of squared gradients",
    "t": "updates of the row",
    "s": "stamp: one more than the step of the row's last write, 0 where it was never written",
}


def dataset(fields: Mapping[str, NDArray[Any]], attributes: Mapping[str, Any]) -> Dataset:
    """Return fields as a Dataset with the dimensions ``row`` and ``dim``.

    Args:
        fields: By name, ``(N, D)`` or ``(N,)``: numpy arrays, which are not copied, or objects whose slices
            are numpy arrays, which are read when they are used.
        attributes: Of the Dataset.

    Raises:
        ImportError: xarray is not installed.
    """
    xarray = _xarray()
    variables = {
        name: xarray.Variable(
            ("row", "dim")[: len(array.shape)],
            array if isinstance(array, np.ndarray) else _lazily(array),
            _attributes(name, array.dtype),
        )
        for name, array in fields.items()
    }
    result: Dataset = xarray.Dataset(variables, attrs=dict(attributes))
    return result


def _attributes(name: str, dtype: np.dtype[Any]) -> dict[str, str]:
    described = {"long_name": _DESCRIPTIONS[name]} if name in _DESCRIPTIONS else {}
    return {**described, **({"dsa_dtype": "bfloat16"} if is_bfloat16(dtype) else {})}


def tree(datasets: Mapping[str, Dataset], attributes: Mapping[str, Any]) -> DataTree:
    """Return Datasets as the nodes of a DataTree; a name with slashes is a path of nodes."""
    xarray = _xarray()
    root = xarray.Dataset(attrs=dict(attributes))
    result: DataTree = xarray.DataTree.from_dict({"/": root, **datasets})
    return result


def _xarray() -> ModuleType:
    try:
        import xarray
    except ImportError as error:
        raise ImportError(
            f"to_xarray needs xarray, which can't be imported ({error}): pip install xarray"
        ) from error
    return xarray


def _lazily(array: Any) -> Any:  # noqa: ANN401 - an array of another library, and one of xarray's own
    from xarray.backends import BackendArray
    from xarray.core import indexing

    class _Lazy(BackendArray):
        shape = tuple(array.shape)
        dtype = np.dtype(array.dtype)

        def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:  # noqa: ANN401 - what xarray takes
            return indexing.explicit_indexing_adapter(
                key, self.shape, indexing.IndexingSupport.BASIC, array.__getitem__
            )

    return indexing.LazilyIndexedArray(_Lazy())
