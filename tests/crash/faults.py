"""Where a run can be stopped: named points inside what one call does, and every line of the package.

`points` wraps functions of the package so that each tells when it begins and has ended, and stands still
halfway where it matters: in the middle of a gather, with an entry whose commit record is half written, with
half of a row scattered, or changed where it is. `Stop` names one such passage, or a line of the package, and
what happens there.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np

import dsa.backends.mapped_pieces
import dsa.backends.memmap
import dsa.optimizers.update
import dsa.state.creation
import dsa.state.journal
import dsa.state.metadata
import dsa.state.recovery
import dsa.state.replacement
from dsa.backends.memmap import MemmapBackend
from dsa.backends.writer import WriteBehind
from dsa.backends.zarr import ZarrBackend
from dsa.backends.zarr_compressed import CompressedZarrBackend
from dsa.kernels.pieces import scatter_pieces
from dsa.state.journal import Journal
from dsa.state.journal_format import layout_of
from dsa.state.state_directory import StateDirectory
from dsa.state.transactions import Transactions

_BACKENDS = (MemmapBackend, ZarrBackend, CompressedZarrBackend)

PACKAGE = str(Path(dsa.__file__).parent) + os.sep

POINTS = frozenset(
    f"{what} {where}"
    for what, wheres in {
        "gather": ("begins", "half", "ends"),
        "kernel": ("begins", "half", "torn", "ends"),
        "restore": ("begins", "half", "torn", "ends"),
        "pieces": ("begin", "half", "torn", "end"),
        "scatter": ("begins", "half", "torn", "ends"),
        "entry": ("begins", "header", "note", "half committed", "ends"),
        "open entry": ("begins", "header", "note", "ends"),
        "close entry": ("begins", "half", "ends"),
        "slot": ("begins", "half", "ends"),
        "description": ("begins", "half", "ends"),
        "replay": ("begins", "ends"),
        "table made": ("begins", "ends"),
        "life": ("begins", "ends"),
        "takeover": ("begins", "ends"),
        "journal create": ("begins", "ends"),
        "journal open": ("begins", "ends"),
        "journal begin": ("begins", "ends"),
        "journal begin in place": ("begins", "ends"),
        "journal undone": ("begins", "ends"),
        "journal commit": ("begins", "ends"),
        "journal release": ("begins", "ends"),
        "journal grow": ("begins", "ends"),
        "journal close": ("begins", "ends"),
        "table flush": ("begins", "ends"),
        "table close": ("begins", "ends"),
        "settle": ("begins", "ends"),
        "close": ("begins", "ends"),
        "queue write": ("begins", "ends"),
        "reserve": ("begins", "ends"),
        "extend": ("begins", "ends"),
        "sync": ("begins", "ends"),
        "rename": ("begins", "ends"),
        "unlink": ("begins", "ends"),
    }.items()
    for where in wheres
)


class Stop(NamedTuple):
    """The n-th passage (from 1) of a point or of a line such as ``journal.py:97``, while one of `phases` is
    under way; an empty set means any time.
    """

    place: str
    passage: int
    phases: frozenset[str] = frozenset()

    @property
    def is_line(self) -> bool:
        return ".py:" in self.place


class Watch:
    """Counts passages and acts at one of them. One for each process; `arm` sets it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.phase = ""
        self.stop: Stop | None = None
        self.action: Callable[[str], None] = lambda place: None
        self.counts: Counter[str] | None = None
        self.every: Callable[[str], None] | None = None
        self._seen = 0

    def passing(self, place: str) -> None:
        if self.counts is not None:
            self.counts[place] += 1
        if self.every is not None:
            self.every(place)
        stop = self.stop
        if stop is None or stop.place != place or (stop.phases and self.phase not in stop.phases):
            return
        self._seen += 1
        if self._seen == stop.passage:
            self.action(place)

    def arm(self, stop: Stop, action: Callable[[str], None]) -> None:
        """Act at one passage."""
        self.stop, self.action, self._seen = stop, action, 0
        if stop.is_line:
            trace_lines(self.passing, only=stop.place)


watch = Watch()
passing = watch.passing


def die(place: str) -> None:
    """End the process as the system does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def trace_lines(passing: Callable[[str], None], only: str | None = None) -> None:
    """Report every line of the package that is about to run, in threads too; `sys.settrace(None)` ends it."""
    name, line = (only or ":").rsplit(":", 1)

    def enter(frame, event, argument):
        path = frame.f_code.co_filename
        if not path.startswith(PACKAGE) or (only and not path.endswith(os.sep + name)):
            return None
        return inside

    def inside(frame, event, argument):
        if event == "line" and (only is None or frame.f_lineno == int(line)):
            passing(f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}")
        return inside

    threading.settrace(enter)
    sys.settrace(enter)


def end_trace() -> None:
    """Stop reporting lines."""
    threading.settrace(None)
    sys.settrace(None)


def _around(name: str, function):
    def wrapper(*arguments, **options):
        passing(f"{name} begins")
        result = function(*arguments, **options)
        passing(f"{name} ends")
        return result

    return wrapper


def _gathering(backend: type):
    read = backend.read

    def gather(self, rows, out=None):
        passing("gather begins")
        half = len(rows) // 2
        if out is None or half == 0:
            result = read(self, rows, out)
        else:
            read(self, rows[:half], out[:half])
            passing("gather half")
            read(self, rows[half:], out[half:])
            result = out
        passing("gather ends")
        return result

    return gather


def _scattering(backend: type):
    write = backend.write

    def scatter(self, rows, records):
        passing("scatter begins")
        half = len(rows) // 2
        if half:
            write(self, rows[:half], records[:half])
            passing("scatter half")
            _tear(self, rows[half : half + 1], np.ascontiguousarray(records[half : half + 1]))
            passing("scatter torn")
        write(self, rows[half:], records[half:])
        passing("scatter ends")

    return scatter


def _tear(backend, rows, records) -> None:
    """Write a part of one record, as a write does that is stopped in the middle of it."""
    if isinstance(backend, MemmapBackend):
        words = records.view(np.int32)
        backend._open_table()[rows[0], : len(words) // 2] = words[: len(words) // 2]
    elif isinstance(backend, ZarrBackend):
        for array in backend._open_arrays()[:2]:
            array.scatter(rows, records)
    else:
        for array in backend._arrays[:2]:
            array.adopt(array.prepare(int(rows[0]) // array.layout.shard_rows, rows, records))


def _passing(pass_of):
    """Let the passes over a batch stand still with half of its rows done, and with half of one row done."""

    def wrapper(table, options, stamp):
        update, constants = pass_of(table, options, stamp)

        def run(visit, gradients, constants, scratch, start, stop):
            def part(first, last, left_out):
                bad, more = update(visit, gradients, constants, scratch, first, last)
                if more:
                    visit.fresh[start + left_out :][:more] = visit.fresh[first : first + more].copy()
                return bad, left_out + more

            passing("kernel begins")
            half = (start + stop) // 2
            bad, left_out = part(start, half, 0)
            passing("kernel half")
            if bad < 0 and half < stop:
                bad, left_out = part(half, half + 1, left_out)
                with _half_done(visit, half):
                    passing("kernel torn")
                if bad < 0:
                    bad, left_out = part(half + 1, stop, left_out)
            passing("kernel ends")
            return bad, left_out

        return run, constants

    return wrapper


@contextlib.contextmanager
def _half_done(visit, q):
    """Have a record of which only the first words are new, where its image is kept."""
    p = visit.positions[q]
    if not len(visit.noted) or visit.given:
        yield
        return
    record, image = visit.table[visit.places[p]], visit.images[p]
    rest = slice(len(image) // 2, len(image))
    new = record[rest].copy()
    record[rest] = image[rest]
    yield
    record[rest] = new


def _scattering_pieces(scatter):
    """Let a block of records be half written, and one of them in some of its fields only."""

    def wrapper(pieces, rows, records):
        passing("pieces begin")
        half = len(rows) // 2
        scatter(pieces, rows[:half], records[:half])
        passing("pieces half")
        some = pieces._replace(first=pieces.first[:2])
        scatter(some, rows[half : half + 1], records[half : half + 1])
        passing("pieces torn")
        scatter(pieces, rows[half:], records[half:])
        passing("pieces end")

    return wrapper


def _restoring(restore):
    def wrapper(self, rows, images):
        passing("restore begins")
        half = len(rows) // 2
        restore(self, rows[:half], images[:half])
        passing("restore half")
        if half:
            record, image = self._open_table()[rows[half]], images[half]
            record[: len(image) // 2] = image[: len(image) // 2]
            passing("restore torn")
        restore(self, rows[half:], images[half:])
        passing("restore ends")

    return wrapper


def _encode(memory, base, sequence, note, parts, *, _encode_entry=dsa.state.journal.encode_entry):
    layout = layout_of(len(note), [(len(part.rows), part.records.dtype.itemsize) for part in parts])
    scratch = bytearray(base + layout.length)
    _encode_entry(scratch, base, sequence, note, parts)
    passing("entry begins")
    note_at = base + layout.note
    _copy(scratch, memory, base, note_at)
    passing("entry header")
    _copy(scratch, memory, note_at, note_at + len(note))
    passing("entry note")
    end = base + layout.length
    _copy(scratch, memory, end - 64, end - 50)
    passing("entry half committed")
    _copy(scratch, memory, end - 50, end)
    passing("entry ends")


def _encode_open(memory, base, sequence, note, sizes, layout, *, _encode=dsa.state.journal.encode_open_entry):
    scratch = bytearray(base + layout.length)
    _encode(scratch, base, sequence, note, sizes, layout)
    passing("open entry begins")
    _copy(scratch, memory, base, base + layout.note)
    passing("open entry header")
    _copy(scratch, memory, base + layout.note, base + layout.note + len(note) // 2)
    passing("open entry note")
    _copy(scratch, memory, base + layout.note, base + layout.note + len(note))
    passing("open entry ends")


def _close(memory, base, sequence, length, *, _close_entry=dsa.state.journal.close_entry):
    scratch = bytearray(base + length)
    _close_entry(scratch, base, sequence, length)
    passing("close entry begins")
    _copy(scratch, memory, base + length - 64, base + length - 50)
    passing("close entry half")
    _copy(scratch, memory, base + length - 50, base + length)
    passing("close entry ends")


def _slot(memory, at, slot, *, _write_slot=dsa.state.journal.write_slot):
    scratch = bytearray(at + 512)
    _write_slot(scratch, at, slot)
    passing("slot begins")
    _copy(scratch, memory, at, at + 18)
    passing("slot half")
    _copy(scratch, memory, at + 18, at + 64)
    passing("slot ends")


def _copy(source: bytearray, memory, start: int, stop: int) -> None:
    memory[start:stop] = bytes(source[start:stop])


def _describe(path, data, held=None, *, _write_atomically=dsa.state.metadata.write_atomically):
    passing("description begins")
    path.with_name(f"{path.name}.tmp").write_bytes(data[: len(data) // 2])
    passing("description half")
    _write_atomically(path, data, held)
    passing("description ends")


@contextlib.contextmanager
def points() -> Iterator[None]:
    """Make the package tell where it is. A name that no longer exists is an error."""
    patch = mock.patch.object
    with contextlib.ExitStack() as stack:
        for owner, attribute, replacement in (
            *((each, "read", _gathering(each)) for each in _BACKENDS),
            *((each, "write", _scattering(each)) for each in _BACKENDS),
            (dsa.state.journal, "encode_entry", _encode),
            (dsa.state.journal, "encode_open_entry", _encode_open),
            (dsa.state.journal, "close_entry", _close),
            (dsa.state.journal, "write_slot", _slot),
            (dsa.state.metadata, "write_atomically", _describe),
            (dsa.optimizers.update, "_pass_of", _passing(dsa.optimizers.update._pass_of)),
            (MemmapBackend, "restore", _restoring(MemmapBackend.restore)),
            (dsa.backends.mapped_pieces, "scatter_pieces", _scattering_pieces(scatter_pieces)),
            (Journal, "create", _around_class(Journal, "create", "journal create")),
            (Journal, "open", _around_class(Journal, "open", "journal open")),
        ):
            stack.enter_context(patch(owner, attribute, replacement))
        for owner, attribute, name in (
            (dsa.state.recovery, "_apply", "replay"),
            *((module, "make_table", "table made") for module in (dsa.state.recovery, dsa.state.replacement)),
            (dsa.state.creation, "make_table", "table made"),
            *((module, "begin_life", "life") for module in (dsa.state.creation, dsa.state.replacement)),
            (StateDirectory, "adopt", "takeover"),
            (Journal, "begin", "journal begin"),
            (Journal, "begin_in_place", "journal begin in place"),
            (Journal, "undone", "journal undone"),
            (Journal, "commit", "journal commit"),
            (Journal, "release", "journal release"),
            (Journal, "_grow", "journal grow"),
            (Journal, "close", "journal close"),
            *((each, "flush", "table flush") for each in _BACKENDS),
            *((each, "close", "table close") for each in _BACKENDS),
            (Transactions, "settle", "settle"),
            (StateDirectory, "close", "close"),
            (WriteBehind, "_write_oldest", "queue write"),
            (dsa.backends.system, "reserve", "reserve"),
            (dsa.backends.system, "extend", "extend"),
            (os, "fsync", "sync"),
            (os, "fdatasync", "sync"),
            (os, "replace", "rename"),
            (pathlib.Path, "unlink", "unlink"),
        ):
            stack.enter_context(patch(owner, attribute, _around(name, getattr(owner, attribute))))
        yield


def _around_class(owner: type, attribute: str, name: str) -> classmethod:
    return classmethod(_around(name, getattr(owner, attribute).__func__))
