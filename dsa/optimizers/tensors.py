"""Between torch and numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["ArrayLike", "to_array"]

ArrayLike = torch.Tensor | NDArray[Any]


def to_array(value: object) -> NDArray[Any]:
    """Return a tensor of any device, or anything numpy takes, as a numpy array, copying only when it must.

    bfloat16, which numpy lacks, becomes float32.

    Example:
        >>> to_array(torch.tensor([1, 2]))
        array([1, 2])
    """
    if isinstance(value, torch.Tensor):
        detached = value.detach()
        if detached.dtype == torch.bfloat16:
            detached = detached.float()
        return np.asarray(detached.cpu().numpy())
    array = np.asarray(value)
    # numpy takes an empty list for floating-point numbers.
    return array.astype(np.int64) if array.size == 0 and isinstance(value, list | tuple) else array
