"""Passes between records and the places where each of their fields lies in an array of its own.

The arrays are cut into shards, each of which is mapped somewhere in memory. Nobody counts references here:
whoever calls keeps the shards mapped. Rows are in order, so that one shard after another is met.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, NamedTuple

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from dsa.kernels.compiled import compiled, inlined
from dsa.kernels.fence import fence
from dsa.kernels.layout import Words
from dsa.kernels.prefetching import AHEAD, LINE_WORDS, prefetch
from dsa.schema import Rows

__all__ = ["Pieces", "gather_pieces", "scatter_pieces"]

_NOWHERE: Final = -1
_NARROW_AHEAD: Final = 64
"""How far ahead a field of one word is asked for: a row of it takes no time, see `dsa.kernels.columns`."""


class Pieces(NamedTuple):
    """Where the words of records lie.

    Args:
        addresses: ``(S,)`` int64, where in memory each shard of each array begins, one array after another.
        shard_rows: ``(F,)`` int64, the rows of a shard of each array.
        first: ``(F,)`` int64, which of the addresses is that of the first shard of each array.
        columns: ``(F + 1,)`` int64, at which word of a record each field begins, and where the last ends.
        changed: ``(S,)`` bool, becomes True when something was written to a shard.
    """

    addresses: Rows
    shard_rows: Rows
    first: Rows
    columns: Rows
    changed: NDArray[Any]


@compiled(_nrt=False)
def gather_pieces(pieces: Pieces, rows: Rows, records: Words) -> None:
    """Copy all pieces of each row to ``records[p]``, of ``(B, W)`` words."""
    for f in range(pieces.first.shape[0]):
        begin, end = pieces.columns[f], pieces.columns[f + 1]
        ahead = max(AHEAD, _NARROW_AHEAD // (end - begin))
        here, there = _NOWHERE, _NOWHERE
        for p in range(rows.shape[0]):
            if p + ahead < rows.shape[0]:
                there = _follow(pieces, f, rows[p + ahead], there)
                _ask(_address(pieces, f, rows[p + ahead], there), end - begin)
            here = _follow(pieces, f, rows[p], here)
            _get(records[p, begin:end], _address(pieces, f, rows[p], here))


@compiled(_nrt=False)
def scatter_pieces(pieces: Pieces, rows: Rows, records: Words) -> None:
    """Copy ``records[p]``, of ``(B, W)`` words, to all pieces of each row, and note which shards changed."""
    for f in range(pieces.first.shape[0]):
        begin, end = pieces.columns[f], pieces.columns[f + 1]
        here = _NOWHERE
        for p in range(rows.shape[0]):
            here = _follow(pieces, f, rows[p], here)
            _put(records[p, begin:end], _address(pieces, f, rows[p], here))
            fence()  # noted afterwards: a flush that began before must not count for it
            pieces.changed[pieces.first[f] + here] = True


@inlined
def _follow(pieces: Pieces, f: int, row: int, shard: int) -> int:
    """Return the shard of a row, given that of another one: of rows in order it is mostly the same."""
    low = shard * pieces.shard_rows[f]
    if low <= row < low + pieces.shard_rows[f]:
        return shard
    return int(row // pieces.shard_rows[f])


@inlined
def _address(pieces: Pieces, f: int, row: int, shard: int) -> int:
    """Return where in memory a field of a row is that lies in a shard."""
    place = row - shard * pieces.shard_rows[f]
    width = pieces.columns[f + 1] - pieces.columns[f]
    address: int = pieces.addresses[pieces.first[f] + shard] + 4 * width * place
    return address


@inlined
def _ask(address: int, width: int) -> None:
    for word in range(0, width, LINE_WORDS):
        prefetch(address + 4 * word)  # type: ignore[call-arg]  # numba passes the first one


@inlined
def _get(words: Words, address: int) -> None:
    _load(words, address)  # type: ignore[call-arg]  # likewise


@inlined
def _put(words: Words, address: int) -> None:
    _store(words, address)  # type: ignore[call-arg]  # likewise


@intrinsic
def _load(typing_context: Any, words: Any, address: Any) -> Any:  # noqa: ANN401 - numba's types
    """Copy words from an address."""
    return types.void(words, types.int64), partial(_copy, loading=True)


@intrinsic
def _store(typing_context: Any, words: Any, address: Any) -> Any:  # noqa: ANN401 - numba's types
    """Copy words to an address."""
    return types.void(words, types.int64), partial(_copy, loading=False)


def _copy(context: Any, builder: Any, signature: Any, arguments: Any, *, loading: bool) -> Any:  # noqa: ANN401
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    words, there = array.data, builder.inttoptr(arguments[1], array.data.type)
    target, source = (words, there) if loading else (there, words)
    cgutils.raw_memcpy(builder, target, source, array.nitems, array.itemsize)  # type: ignore[no-untyped-call]
    return context.get_dummy_value()
