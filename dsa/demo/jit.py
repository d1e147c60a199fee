"""The one way in which this package compiles a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from numba import njit

__all__ = ["jit"]

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def jit(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Compile a function with numba, keeping its type.

    Without numpy's error model every division is checked, which stops vectorisation.
    """
    return cast("Callable[_Args, _Result]", njit(nogil=True, cache=True, error_model="numpy")(function))
