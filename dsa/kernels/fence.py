"""Keeping the compiler from moving stores across a point of compiled code."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from dsa.kernels.compiled import inlined

__all__ = ["fence", "thread_fence"]


@inlined
def fence() -> None:
    """Let no load and no store move across this point; costs no instruction.

    What has to be ordered is what a *killed process* leaves behind. A kill happens between two instructions,
    and the system waits for the stores of those before: the order of the program is then the order of memory,
    on every processor. The compiler alone may change it, and a fence of single-thread scope forbids it that.
    """
    _fence()  # type: ignore[call-arg]  # numba passes the first one


@inlined
def thread_fence() -> None:
    """Let loads and stores before this point be seen by other processors before those behind it.

    Costs no instruction on processors that keep that order anyway, as x86 does; it orders what a killed
    process leaves behind, too.
    """
    _thread_fence()  # type: ignore[call-arg]


@intrinsic
def _fence(typing_context: Any) -> Any:  # noqa: ANN401 - numba's types
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        builder.fence("seq_cst", targetscope="singlethread")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _thread_fence(typing_context: Any) -> Any:  # noqa: ANN401 - numba's types
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        builder.fence("acq_rel")
        return context.get_dummy_value()

    return types.void(), generate
