"""``dsa estimate``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dsa.cli.commands.options import add_json, named_layout
from dsa.cli.commands.output import print_json
from dsa.state.directories import directory_argument

if TYPE_CHECKING:
    from dsa.cli.bench.forecast import Forecast
    from dsa.state.estimation import Estimate

__all__ = ["DETAILS", "add_arguments", "run"]

DETAILS = """\
Bytes of each field, of a row, of the table's file and of the journal, and the disk that one checkpoint
beside the table needs. The disk is measured for about two seconds with a scratch file of 64 MiB, which is
removed again: what a step takes whose rows all come from there. Rows in memory are faster by orders of
magnitude; dsa bench measures them.

JSON: rows, dim, second_moment, rule, state_dtype, backend, batch, ids, fields, record, file, journal,
index, logical, while_exporting, directory, available_bytes, available_memory, fits, measured."""

_MEANINGS: Final = {
    "id": "whose row it is",
    "live": "whether it is anybody's",
    "w": "weight",
    "m": "first moment",
    "v": "second moment",
    "h": "sum of squares",
    "t": "updates of the row",
    "s": "step of the last write",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "rows", metavar="ROWS", type=_count, help="rows of the table, such as 10_000_000 or 1e7"
    )
    parser.add_argument("dim", metavar="DIM", type=_count, help="elements of a row")
    parser.add_argument(
        "--second-moment",
        choices=("coordinate", "frame", "row"),
        default="coordinate",
        help="row: one number of v per row, nearly half the state (coordinate)",
    )
    parser.add_argument(
        "--rule", metavar="RULE", help="another update rule than Adam: adagrad, row_wise_adagrad, sgd, lion"
    )
    parser.add_argument(
        "--state-dtype",
        metavar="DTYPE",
        type=_dtypes,
        help="bfloat16, or for some fields m=bfloat16,v=bfloat16,w=bfloat16 (float32)",
    )
    parser.add_argument(
        "--backend", metavar="BACKEND", default="memmap", help="memmap, zarr, or MODULE:NAME (memmap)"
    )
    parser.add_argument(
        "--batch",
        metavar="B",
        type=_count,
        default=16_384,
        help="distinct rows of the largest step, which the journal has to hold (16,384)",
    )
    parser.add_argument("--ids", action="store_true", help="rows belong to ids")
    parser.add_argument(
        "--dir",
        type=directory_argument,
        default=Path(),
        metavar="DIR",
        help="where the table will be (the current directory)",
    )
    parser.add_argument(
        "--no-measure", dest="measure", action="store_false", help="don't measure the disk: sizes only"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Estimate, and print the sizes and times.

    Raises:
        ValueError, OSError: the message says why.
    """
    from dsa.backends.system import available_bytes
    from dsa.cli.bench.forecast import forecast
    from dsa.cli.bench.machine import available_memory
    from dsa.state.estimation import estimate

    if not arguments.dir.is_dir():
        raise ValueError(f"--dir {arguments.dir} is no directory: make it first, or pass another")
    layout = named_layout(arguments.backend)
    chosen = {
        "second_moment": arguments.second_moment,
        "rule": arguments.rule,
        "state_dtype": arguments.state_dtype,
        "backend": layout,
    }
    sizes = estimate(arguments.rows, arguments.dim, **chosen, batch=arguments.batch, ids=arguments.ids)
    times = None
    if arguments.measure:
        batches = sorted({64, 2_048, arguments.batch})
        times = forecast(
            arguments.rows,
            arguments.dim,
            arguments.dir,
            **chosen,
            batches=batches,
        )
    free, memory = available_bytes(arguments.dir), available_memory()
    if arguments.json:
        print_json(_json(arguments, sizes, times, free, memory))
    else:
        print("\n".join(_lines(arguments, sizes, times, free, memory)))
    return 0


def _count(text: str) -> int:
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        number = 0.0
    if not (number >= 1.0 and number.is_integer() and number < 2.0**53):
        raise argparse.ArgumentTypeError(f"{text!r} is no count: write a whole number of at least 1")
    return int(number)


def _dtypes(text: str) -> str | dict[str, str]:
    """Return a dtype for all fields, or one for each that is named."""
    if "=" not in text:
        return text
    pairs = [part.partition("=") for part in text.split(",")]
    return {name: dtype for name, _, dtype in pairs}


def _json(
    arguments: argparse.Namespace, sizes: Estimate, times: Forecast | None, free: int, memory: int | None
) -> dict[str, Any]:
    from dsa.rules.known import rule_of

    measured = None
    if times is not None:
        measured = {
            "reads_per_second": times.device.reads_per_second,
            "writes_per_second": times.device.writes_per_second,
            "direct": times.device.direct,
            "pages_per_row": times.pages_per_row,
            "step_milliseconds": {str(batch): value for batch, value in times.milliseconds.items()},
        }
    return {
        "rows": arguments.rows,
        "dim": arguments.dim,
        "second_moment": arguments.second_moment if arguments.rule is None else None,
        "rule": rule_of(arguments.second_moment, arguments.rule).name,
        "state_dtype": arguments.state_dtype,
        "backend": arguments.backend,
        "batch": arguments.batch,
        "ids": arguments.ids,
        "fields": sizes.fields,
        "record": sizes.record,
        "file": sizes.file,
        "journal": sizes.journal,
        "index": sizes.index,
        "logical": sizes.logical,
        "while_exporting": sizes.while_exporting + sizes.journal,
        "directory": str(arguments.dir.absolute()),
        "available_bytes": free,
        "available_memory": memory,
        "fits": sizes.file + sizes.journal + sizes.index <= free,
        "measured": measured,
    }


def _lines(
    arguments: argparse.Namespace, sizes: Estimate, times: Forecast | None, free: int, memory: int | None
) -> Iterator[str]:
    from dsa.inspection.text import aligned, size

    state = f"one second moment per {arguments.second_moment}" if arguments.rule is None else arguments.rule
    if (dtypes := arguments.state_dtype) is not None:
        named = (
            [f"{name} {dtype}" for name, dtype in dtypes.items()] if isinstance(dtypes, dict) else [dtypes]
        )
        state = ", ".join([state, *named])
    yield f"{arguments.rows:,} rows x {arguments.dim:,}, {state}, {arguments.backend}"
    yield ""
    bytes_of = {f"{name}  {_MEANINGS[name]}": count for name, count in sizes.fields.items()}
    bytes_of |= {
        "a row": sizes.record,
        "the table on disk": sizes.file,
        f"journal, steps of {min(arguments.batch, arguments.rows):,} rows": sizes.journal,
        **({"index of the ids, at most": sizes.index} if arguments.ids else {}),
        "with an uncompressed checkpoint": sizes.while_exporting + sizes.journal,
    }
    yield from aligned(["", "bytes", ""], [[name, f"{n:,}", size(n)] for name, n in bytes_of.items()])[1:]
    yield ""
    needed = sizes.file + sizes.journal + sizes.index
    verdict = "it fits" if needed <= free else f"{size(needed - free)} too little"
    if needed <= free < sizes.while_exporting + sizes.journal:
        verdict = "it fits, a checkpoint has to go elsewhere"
    yield f"free in {str(arguments.dir.absolute())!r}: {size(free)}, {verdict}"
    if memory is not None:
        cached = min(1.0, memory / sizes.file)
        whole = "all of the table" if cached == 1.0 else f"{cached:.0%} of the table"
        yield f"free memory: {size(memory)}, which can hold {whole}"
    if arguments.measure:
        yield from _times(times)


def _times(times: Forecast | None) -> Iterator[str]:
    from dsa.inspection.text import aligned

    if times is None:
        yield "the disk can't be measured on this system"
        return
    device = times.device
    how = "past the page cache" if device.direct else "through the page cache, so perhaps too good"
    yield (
        f"random pages of 4 KiB, measured for a moment {how}: {device.reads_per_second:,.0f} reads/s, "
        f"{device.writes_per_second:,.0f} writes/s"
    )
    yield ""
    yield "a step whose rows all come from the disk"
    rows = [[f"{batch:,} rows", _milliseconds(value)] for batch, value in times.milliseconds.items()]
    yield from aligned(["", ""], rows)[1:]


def _milliseconds(value: float) -> str:
    return (
        f"{value / 1000.0:,.1f} s"
        if value >= 10_000.0
        else f"{value:,.1f} ms"
        if value < 100.0
        else f"{value:,.0f} ms"
    )
