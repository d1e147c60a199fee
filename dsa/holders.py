"""Does anybody but the optimizer still hold a parameter?"""

from __future__ import annotations

import sys

import torch

__all__ = ["is_abandoned"]


def is_abandoned(parameter: torch.Tensor) -> bool:
    """Tell whether a parameter is held only by a list, a dict and the caller, as an optimizer holds it.

    That is what is left when a module's weight was replaced after the optimizer was built. The references are
    counted against those of a probe that is held the same way, so that the answer does not depend on how an
    interpreter counts.
    """
    probe = torch.nn.Parameter(torch.empty(0))
    groups, tables = [probe], {probe: None}
    alone = _references(probe)
    del groups, tables
    return _references(parameter) <= alone


def _references(parameter: torch.Tensor) -> int:
    return sys.getrefcount(parameter)
