"""Passes between records and the places where each of their fields lies in an array of its own.

The arrays are cut into shards, each of which is mapped somewhere in memory. A pass goes through all fields of
a row before it goes to the next one: a processor that waits for one array is then waiting for all of them.
Nobody counts references here: whoever calls keeps the shards mapped.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from dsa.kernels.compiled import compiled
from dsa.kernels.fence import fence
from dsa.kernels.layout import Words
from dsa.kernels.prefetching import AHEAD, LINE_WORDS, prefetch
from dsa.schema import Rows

__all__ = ["Pieces", "gather_pieces", "scatter_pieces"]


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
    for p in range(rows.shape[0]):
        _ask_ahead(pieces, rows, p)
        for f in range(pieces.first.shape[0]):
            _, address = _find(pieces, f, rows[p])
            target = records[p, pieces.columns[f] : pieces.columns[f + 1]]
            _load(target, address)  # type: ignore[call-arg]  # numba passes the first one


@compiled(_nrt=False)
def scatter_pieces(pieces: Pieces, rows: Rows, records: Words) -> None:
    """Copy ``records[p]``, of ``(B, W)`` words, to all pieces of each row, and note which shards changed."""
    for p in range(rows.shape[0]):
        _ask_ahead(pieces, rows, p)
        for f in range(pieces.first.shape[0]):
            shard, address = _find(pieces, f, rows[p])
            _put(records[p, pieces.columns[f] : pieces.columns[f + 1]], address)
            fence()  # noted afterwards: a flush that began before must not count for it
            pieces.changed[shard] = True


@compiled(_nrt=False)
def _put(words: Words, address: int) -> None:
    _store(words, address)  # type: ignore[call-arg]  # numba passes the first one


@compiled(_nrt=False)
def _find(pieces: Pieces, f: int, row: int) -> tuple[int, int]:
    """Return in which shard a field of a row is, and where in memory."""
    width = pieces.columns[f + 1] - pieces.columns[f]
    shard = row // pieces.shard_rows[f]
    place = row - shard * pieces.shard_rows[f]
    return pieces.first[f] + shard, pieces.addresses[pieces.first[f] + shard] + 4 * width * place


@compiled(_nrt=False)
def _ask_ahead(pieces: Pieces, rows: Rows, p: int) -> None:
    if p + AHEAD < rows.shape[0]:
        for f in range(pieces.first.shape[0]):
            _, address = _find(pieces, f, rows[p + AHEAD])
            for word in range(0, pieces.columns[f + 1] - pieces.columns[f], LINE_WORDS):
                prefetch(address + 4 * word)  # type: ignore[call-arg]  # numba passes the first one


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
