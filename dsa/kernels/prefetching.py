"""Asking the processor for memory ahead of its use, inside compiled code."""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = ["AHEAD", "LINE_WORDS", "prefetch", "prefetch_word"]

AHEAD: Final = 8
"""How many records ahead a pass over random rows should ask. Measured: 4, 8 and 16 are alike, 2 is worse."""

LINE_WORDS: Final = 16
"""32-bit words in a cache line of 64 bytes."""


@intrinsic
def prefetch_word(typing_context: Any, array: Any, row: Any, column: Any) -> Any:  # noqa: ANN401 - numba's types
    """Ask for the cache line of ``array[row, column]``; nothing is read, no bound is checked."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        table = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = builder.ptrtoint(table.data, ir.IntType(64))
        for position, axis in zip(arguments[1:], (0, 1), strict=True):
            distance = builder.mul(position, builder.extract_value(table.strides, axis))
            address = builder.add(address, distance)
        return _ask(context, builder, address)

    return types.void(array, types.int64, types.int64), generate


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:  # noqa: ANN401 - numba's types
    """Ask for the cache line at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        return _ask(context, builder, arguments[0])

    return types.void(types.int64), generate


def _ask(context: Any, builder: Any, address: Any) -> Any:  # noqa: ANN401 - numba's
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
    read, keep, data = (ir.Constant(word, value) for value in (0, 3, 1))
    builder.call(function, [builder.inttoptr(address, byte), read, keep, data])
    return context.get_dummy_value()
