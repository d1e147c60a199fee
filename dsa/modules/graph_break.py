"""A method that compiled graphs leave: reading rows from a disk is no part of a graph."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["outside_graphs"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def outside_graphs(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return a method that `torch.compile` calls and doesn't look into.

    As `torch.compiler.disable` does, which takes a second to import the compiler; it is not waited for where
    nobody has imported it.
    """
    disabled: Callable[_P, _T] | None = None

    @functools.wraps(method)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return method(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(method)
        return disabled(*args, **kwargs)

    return called
