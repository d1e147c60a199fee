"""One visit to each record of a batch: what every update does before and after its own arithmetic.

A pass goes through the distinct rows of a batch in increasing order. It copies each record as it is, the
*before-image*, computes from the copy, and writes the new record where the old one was: random memory is
visited once. The same pass serves tables that can't be changed in place: it then updates records that were
read into memory of their own, and one image is used again and again.

What a killed process leaves behind is told by the order of the stores, which `dsa.kernels.fence` keeps: an
image is whole before its row is noted, and the row is noted before its record changes. Copying back the
images of the rows that are noted therefore undoes a pass that has come anywhere.

Records that hold bfloat16 are visited in the same way: the image is the record as it is stored; the
arithmetic sees a wide copy of it, with a word for each number, and writes another, which is packed into the
record's place, see `dsa.kernels.packing`.

Nothing here makes arrays, so that it is compiled without counts of references: they took as long as the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from dsa.kernels.checks import LAST_COUNT, all_finite, all_packable
from dsa.kernels.checksums import add_word
from dsa.kernels.compiled import compiled, inlined
from dsa.kernels.fence import fence
from dsa.kernels.judging import FRESH, UNUSABLE, USABLE, judge, judge_packed
from dsa.kernels.layout import Floats, PackedLayout, WordLayout, Words, as_words, record_layout, wide_words
from dsa.kernels.packing import fill_dither, pack, unpack
from dsa.kernels.prefetching import AHEAD, LINE_WORDS, prefetch_word
from dsa.kernels.report import StepReport
from dsa.schema import Records, Rows

__all__ = [
    "Gradients",
    "Pass",
    "Scratch",
    "Visit",
    "make_scratch",
    "pass_of",
    "sum_gradients",
    "visit_records",
    "weights_of",
]

_ZERO: Final = np.int32(0)  # typed, or the loop is widened to 64 bits, eight times slower


class Gradients(NamedTuple):
    """The gradients of a batch as they were given, and which of them belong to each distinct row.

    Args:
        values: ``(B, D)`` float32, C-contiguous.
        order: ``(B,)`` int64, positions in `values`: those of the first distinct row, of the second, and so
            on; those of one row in the order of their occurrence.
        starts: ``(U + 1,)`` int64, where those of each distinct row begin in `order`, and where the last end.
    """

    values: Floats
    order: Rows
    starts: Rows


class Visit(NamedTuple):
    """How a pass goes through the distinct rows of a batch.

    Args:
        table: ``(N, ...)`` words: records, each followed by its checksum where there is one. Written.
        weights: ``(U, D)`` float32, the weights of records that have none. Written.
        layout: Where the fields are in a record; to an update always a `WordLayout`.
        places: ``(U,)`` int64, where in the table each distinct row is.
        rows: ``(U,)`` int64, the distinct rows.
        positions: ``(Q,)`` int64, which of the distinct rows are visited, in order.
        images: ``(U, W)`` words, the before-images, each with its checksum; ``(1, W)`` where they are not
            kept; ``(Q, W)`` where they are `given`. Written unless given.
        given: Whether the images hold what is to be computed from, and nothing is read.
        noted: ``(U,)`` int64, becomes the row when its image is whole; ``(0,)`` where nobody has to know.
        fresh: ``(U,)`` int64, output: the distinct rows that a pass has left out, from where it began.
        unwritten: What becomes of a record that was never written: `USABLE`, `UNUSABLE` where every row was
            written once, or `FRESH`, to be left out and updated later from what its rule gives.
        factors: Of the checksum, see `dsa.kernels.checksums`; ``(0,)`` where there is none.
        seed: The table's, in [0, 2^63), of what is rounded at random.
    """

    table: Words
    weights: Floats
    layout: Any
    places: Rows
    rows: Rows
    positions: Rows
    images: Words
    given: bool
    noted: Rows
    fresh: Rows
    unwritten: int
    factors: Words
    seed: int = 0


class Scratch(NamedTuple):
    """Memory of one pass.

    Args:
        gradient: ``(D,)`` float32: the gradient of the row visited.
        weights: ``(D,)`` float32: its weights as they were, of records that have none.
        vectors: ``(4, D)`` float64, for the arithmetic of a row.
        told: ``(3,)`` float64: what a rule tells of the rows it has updated, see `StepReport`.
        wide: ``(2, 1, W)`` words: of a packed record the old and the new one with a word for each number.
        dither: ``(H,)`` words, at random.
        zero: ``(1,)`` int64: where the new wide record is in its table.
    """

    gradient: Floats
    weights: Floats
    vectors: NDArray[np.float64]
    told: NDArray[np.float64]
    wide: Words
    dither: Words
    zero: Rows


Run = Callable[[Visit, Gradients, Any, Scratch, int, int], tuple[int, int]]

RowUpdate = Callable[[Visit, Any, Scratch, int, int], None]
"""The arithmetic of one row: `(visit, constants, scratch, p, slot)`. Reads the record `visit.images[slot]`
and the gradient `scratch.gradient`, writes the floating-point fields of `visit.table[visit.places[p]]`."""


@final
@dataclass(frozen=True, slots=True)
class Pass:
    """The compiled passes of one update of a row.

    Args:
        words: Over records with a word for each number.
        packed: Over records of which some fields hold bfloat16.
    """

    words: Run
    packed: Run

    def __call__(
        self,
        visit: Visit,
        gradients: Gradients,
        constants: Any,  # noqa: ANN401 - those of the rule
        scratch: Scratch,
        start: int,
        stop: int,
    ) -> tuple[int, int]:
        """Update the rows visited from one number to another.

        Returns:
            The first distinct row that must not be stored, or -1, and how many rows were left out as never
            written.
        """
        run = self.words if isinstance(visit.layout, WordLayout) else self.packed
        return run(visit, gradients, constants, scratch, start, stop)


def make_scratch(dim: int, layout: WordLayout | PackedLayout) -> Scratch:
    """Return memory for passes over rows of `dim` elements, for one thread."""
    wide, halves = wide_words(layout)
    return Scratch(
        gradient=np.empty(dim, np.float32),
        weights=np.empty(dim, np.float32),
        vectors=np.empty((4, dim)),
        told=np.zeros(3),
        wide=np.zeros((2, 1, wide), np.int32),
        dither=np.empty(-(-halves // 4) * 4, np.int32),
        zero=np.zeros(1, np.int64),
    )


def pass_of(update: RowUpdate) -> Pass:
    """Return the compiled passes of the update of a row; its constants have a `stamp`."""
    return Pass(_pass_over_words(update), _pass_over_packed(update))


def _pass_over_words(update: RowUpdate) -> Run:
    @compiled(_nrt=False)
    def run(
        visit: Visit,
        gradients: Gradients,
        constants: Any,  # noqa: ANN401 - those of the rule
        scratch: Scratch,
        start: int,
        stop: int,
    ) -> tuple[int, int]:
        left_out = 0
        for q in range(start, stop):
            p = visit.positions[q]
            slot = q if visit.given else (p if visit.images.shape[0] > 1 else 0)
            state = USABLE if visit.given else _meet(visit, q, p, slot)
            if state == FRESH:
                visit.fresh[start + left_out] = p
                left_out += 1
                continue
            if state == UNUSABLE:
                return p, left_out
            _sum_gradients(gradients, p, scratch.gradient)
            update(visit, constants, scratch, p, slot)
            if not _finish(visit, p, slot, constants.stamp):
                return p, left_out
        return -1, left_out

    return run


def _pass_over_packed(update: RowUpdate) -> Run:
    @compiled(_nrt=False)
    def run(
        visit: Visit,
        gradients: Gradients,
        constants: Any,  # noqa: ANN401 - those of the rule
        scratch: Scratch,
        start: int,
        stop: int,
    ) -> tuple[int, int]:
        left_out = 0
        for q in range(start, stop):
            p = visit.positions[q]
            slot = q if visit.given else (p if visit.images.shape[0] > 1 else 0)
            state = USABLE if visit.given else _meet_packed(visit, q, p, slot)
            if state == FRESH:
                visit.fresh[start + left_out] = p
                left_out += 1
                continue
            if state == UNUSABLE:
                return p, left_out
            _sum_gradients(gradients, p, scratch.gradient)
            unpack(visit.images[slot], visit.layout, scratch.wide[0, 0])
            update(_wide_visit(visit, scratch, p), constants, scratch, 0, 0)
            if not _finish_packed(visit, scratch, p, slot, constants.stamp):
                return p, left_out
        return -1, left_out

    return run


@inlined
def _wide_visit(visit: Visit, scratch: Scratch, p: int) -> Visit:
    """Return the visit of one row whose record has a word for each number."""
    return Visit(
        scratch.wide[1],
        visit.weights[p : p + 1],
        visit.layout.wide,
        scratch.zero,
        visit.rows[p : p + 1],
        scratch.zero,
        scratch.wide[0],
        True,
        visit.noted[:0],
        visit.fresh[:0],
        USABLE,
        visit.factors[:0],
        visit.seed,
    )


@inlined
def _meet(visit: Visit, q: int, p: int, slot: int) -> int:
    """Take the image of a record, note its row, and judge it."""
    _take_image(visit, q, p, slot)
    return judge(visit.images[slot], visit.layout, visit.factors, visit.unwritten)


@inlined
def _meet_packed(visit: Visit, q: int, p: int, slot: int) -> int:
    """Do as `_meet` does."""
    _take_image(visit, q, p, slot)
    return judge_packed(visit.images[slot], visit.layout, visit.factors, visit.unwritten)


@inlined
def _take_image(visit: Visit, q: int, p: int, slot: int) -> None:
    _ask_ahead(visit, q)
    record, image = visit.table[visit.places[p]], visit.images[slot]
    for j in range(image.shape[0]):
        image[j] = record[j]
    if visit.noted.shape[0]:
        fence()
        visit.noted[p] = visit.rows[p]
        fence()


@inlined
def _ask_ahead(visit: Visit, q: int) -> None:
    # Records at random rows are latency: asking eight ahead makes a pass 1.6 times faster.
    if q + AHEAD < visit.positions.shape[0]:
        place = visit.places[visit.positions[q + AHEAD]]
        for column in range(0, visit.images.shape[1], LINE_WORDS):
            prefetch_word(visit.table, place, column)  # type: ignore[call-arg]  # numba passes the first one


@inlined
def _sum_gradients(gradients: Gradients, p: int, total: Floats) -> None:
    """Sum the gradients of a distinct row, in the order of their occurrence."""
    start, stop = gradients.starts[p], gradients.starts[p + 1]
    first = gradients.values[gradients.order[start]]
    for j in range(total.shape[0]):
        total[j] = first[j]
    for n in range(start + 1, stop):
        following = gradients.values[gradients.order[n]]
        for j in range(total.shape[0]):
            total[j] += following[j]


@inlined
def weights_of(visit: Visit, scratch: Scratch, p: int, slot: int) -> tuple[Floats, Floats]:
    """Return the weights of a row as they were and the memory of the new ones, wherever they are.

    The two are never one array: an update's loop is vectorised where they don't overlap.
    """
    w, dim = visit.layout.w, visit.layout.dim
    if w >= 0:
        old, new = visit.images[slot].view(np.float32), visit.table[visit.places[p]].view(np.float32)
        return old[w : w + dim], new[w : w + dim]
    kept, weights = scratch.weights, visit.weights[p]
    for j in range(kept.shape[0]):
        kept[j] = weights[j]
    return kept, weights


@inlined
def _finish(visit: Visit, p: int, slot: int, stamp: int) -> bool:
    """Complete a new record by counter, stamp and checksum; return whether its numbers are finite.

    What the rule counts beside the updates of the row is its own to write.
    """
    layout, record = visit.layout, visit.table[visit.places[p]]
    _complete(record, visit.images[slot], layout.t, layout.s, visit.factors, stamp)
    finite = all_finite(record[layout.first : layout.t])  # from 0 on, or the loop is not vectorised
    return finite and (layout.w >= 0 or all_finite(visit.weights[p].view(np.int32)))


@inlined
def _finish_packed(visit: Visit, scratch: Scratch, p: int, slot: int, stamp: int) -> bool:
    """Do as `_finish` does, with a record that is packed first."""
    layout, record = visit.layout, visit.table[visit.places[p]]
    new = scratch.wide[1, 0]
    # Or rounding could make an infinity of a number, and a number of what is none.
    if not all_packable(new[: layout.wide.t]):
        return False
    fill_dither(visit.rows[p], stamp, visit.seed, scratch.dither)
    pack(new, layout, scratch.dither, record)
    _complete(record, visit.images[slot], layout.t, layout.s, visit.factors, stamp)
    return layout.wide.w >= 0 or all_finite(visit.weights[p].view(np.int32))


@inlined
def _complete(record: Words, image: Words, t: int, s: int, factors: Words, stamp: int) -> None:
    if t < s:
        count = image[t]
        record[t] = count + 1 if count < LAST_COUNT else count
    record[s] = stamp
    if factors.shape[0]:
        total = _ZERO
        for j in range(s + 1):
            total = add_word(total, record[j], factors[j])
        record[s + 1] = total


@compiled
def sum_gradients(gradients: Gradients, sums: Floats) -> None:
    """Sum the gradients of each distinct row into ``(U, D)``, as a pass does."""
    for p in range(sums.shape[0]):
        _sum_gradients(gradients, p, sums[p])


def visit_records(
    update: Pass,
    records: Records,
    grad: Floats,
    constants: Any,  # noqa: ANN401 - those of the rule
    weights: Floats | None = None,
    non_negative: tuple[str, ...] = ("v",),
    rows: Rows | None = None,
    seed: int = 0,
) -> StepReport:
    """Update records in memory of their own.

    Args:
        update: The pass.
        records: ``(B,)``, C-contiguous, written in place.
        grad: ``(B, D)`` float32, C-contiguous.
        constants: What the pass needs.
        weights: ``(B, D)`` float32, written in place: the weights of records that have none.
        non_negative: The floating-point fields that are never negative, Adam's unless said otherwise.
        rows: ``(B,)`` int64, of which table rows they are; they count from 0 when None.
        seed: See `Visit`; as the rows it concerns bfloat16 alone.

    Returns:
        The report; when ``report.bad >= 0`` the contents of `records` must be thrown away.
    """
    count, each = len(records), np.arange(len(records) + 1)
    words, layout = as_words(records)[0], record_layout(records.dtype, non_negative)
    dim = grad.shape[1]
    none = np.empty(0, np.int64)
    visit = Visit(
        table=words,
        weights=np.empty((0, dim), np.float32) if weights is None else weights,
        layout=layout,
        places=each[:-1],
        rows=each[:-1] if rows is None else rows,
        positions=each[:-1],
        images=np.empty((1, words.shape[1]), np.int32),
        given=False,
        noted=none,
        fresh=none,
        unwritten=USABLE,
        factors=np.empty(0, np.int32),
        seed=seed,
    )
    scratch = make_scratch(dim, layout)
    bad, _ = update(visit, Gradients(grad, each[:-1], each), constants, scratch, 0, count)
    return StepReport.of(bad, scratch.told)
