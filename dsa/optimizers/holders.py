"""Which parameters does nobody but the optimizer hold any more?"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch

__all__ = ["abandoned"]


def abandoned(tables: Mapping[torch.Tensor, object]) -> list[torch.Tensor]:
    """Return the keys of a dict that are held by it and by one list, as an optimizer holds its parameters.

    That is what is left when a module's weight was replaced after the optimizer was built. The references are
    counted against those of a probe that is held and counted in the same way, so that the answer does not
    depend on how an interpreter counts.
    """
    group = [torch.nn.Parameter(torch.empty(0))]
    alone = _references({group[0]: None})
    return [
        parameter for parameter, count in zip(tables, _references(tables), strict=True) if count <= alone[0]
    ]


def _references(tables: Mapping[torch.Tensor, object]) -> list[int]:
    return [sys.getrefcount(parameter) for parameter in tables]
