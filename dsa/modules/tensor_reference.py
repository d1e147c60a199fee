"""The reference of a state dict as a tensor: savers such as safetensors take nothing else."""

from __future__ import annotations

import json
from typing import Any

import torch

__all__ = ["from_tensor", "to_tensor"]


def to_tensor(reference: dict[str, Any]) -> torch.Tensor:
    """Return plain values as the bytes of their JSON, uint8 ``(n,)``.

    Example:
        >>> from_tensor(to_tensor({"global_step": 3}))
        {'global_step': 3}
    """
    return torch.tensor(list(json.dumps(reference).encode()), dtype=torch.uint8)


def from_tensor(tensor: object) -> dict[str, Any]:
    """Return what `to_tensor` was given.

    Raises:
        ValueError: it is something else.
    """
    try:
        return dict(json.loads(bytes(torch.as_tensor(tensor).tolist())))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"the saved reference to a table on disk can't be read ({error}): pass what state_dict() returned"
        ) from error
