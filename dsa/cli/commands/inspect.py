"""``dsa inspect``."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dsa.cli.commands.options import add_base, add_layout, add_work, named_layout, storage_options
from dsa.cli.commands.output import KINDS, print_json
from dsa.cli.commands.progress import shown_progress

if TYPE_CHECKING:
    from dsa.checkpoint import Checkpoint
    from dsa.checkpoint.meter import Progress
    from dsa.inspection import StateSummary
    from dsa.inspection.subjects import Subject

__all__ = ["DETAILS", "add_arguments", "run"]

DETAILS = """\
Tables, shapes, steps, rows that were touched, how often, norms, moments, rows at the edge of the ball,
implausible rows, and the disk that is really used. Everything is read once; nothing is changed, and a
process may be training there.

JSON: kind, checkpoint, global_step, tables, path, status, journal_bytes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("url", metavar="PATH|URL", help="a state directory, or a checkpoint")
    add_base(parser)
    add_layout(parser)
    add_work(parser)


def run(arguments: argparse.Namespace) -> int:
    """Summarise, and print the numbers.

    Raises:
        DSAError, ValueError, OSError: the message says why.
    """
    from dsa.inspection.render import print_summary
    from dsa.inspection.subjects import open_subject

    store, layout = storage_options(arguments), named_layout(arguments.backend)
    with (
        shown_progress(arguments) as progress,
        open_subject(arguments.url, base=arguments.base, storage_options=store, backend=layout) as subject,
    ):
        summary = _summarize(subject, progress)
        about = None if subject.checkpoint is None else _about(subject.checkpoint)
    if arguments.json:
        print_json({"kind": subject.kind, "checkpoint": about, **summary.to_json()})
        return 0
    print_summary(summary)
    if about is not None:
        print()
        print("\n".join(f"{name}: {value}" for name, value in _shown(about)))
    return 0


def _summarize(subject: Subject, progress: Progress) -> StateSummary:
    from dsa.checkpoint.meter import metered
    from dsa.inspection import summarize

    sizes = {table.name: table.schema.dtype.itemsize for table in subject.content.tables}
    done: dict[str, int] = {}
    with metered(progress, sum(t.rows * sizes[t.name] for t in subject.content.tables), "inspect") as advance:

        def report(name: str, rows: int, _: int) -> None:
            advance((rows - done.get(name, 0)) * sizes[name])
            done[name] = rows

        if subject.view is not None:
            return summarize(subject.view, progress=report)
        summary = summarize(subject.content, progress=report)
    assert subject.checkpoint is not None, "what is not a state is a checkpoint"
    return _with_sizes(summary, subject.checkpoint)


def _with_sizes(summary: StateSummary, checkpoint: Checkpoint) -> StateSummary:
    """Return a summary that says where the checkpoint is, and what its files occupy."""
    groups = {table.name: f"{table.group}/" for table in checkpoint.tables}
    tables = []
    for table in summary.tables:
        keys = [key for key in checkpoint.source.sizes if key.startswith(groups[table.name])]
        sizes = [_sizes(checkpoint, key) for key in keys]
        tables.append(
            replace(
                table, file_bytes=sum(size for size, _ in sizes), disk_bytes=sum(disk for _, disk in sizes)
            )
        )
    return replace(summary, tables=tuple(tables), path=checkpoint.url, status=KINDS[checkpoint.kind])


def _sizes(checkpoint: Checkpoint, key: str) -> tuple[int, int]:
    """Return a file's length and the bytes that it occupies: of what is not on a disk here, its length."""
    from dsa.inspection.directory import file_sizes

    path = checkpoint.source.path(key)
    size = checkpoint.source.sizes[key]
    return (size, size) if path is None else file_sizes(path)


def _about(checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "content_root": manifest.content_root,
        "created": manifest.created,
        "versions": dict(manifest.versions),
        "attributes": dict(manifest.attributes),
        "base": None if manifest.base is None else dict(manifest.base),
        "stored_rows": {table.name: table.rows for table in checkpoint.tables},
    }


def _shown(about: dict[str, Any]) -> list[tuple[str, str]]:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines = [
        ("content root", about["content_root"]),
        ("made", f"{about['created']} by {versions}" if versions else about["created"]),
    ]
    if about["attributes"]:
        lines.append(
            ("attributes", ", ".join(f"{key}={value!r}" for key, value in about["attributes"].items()))
        )
    base = about["base"]
    if base is not None:
        rows = ", ".join(f"{rows:,} of {name!r}" for name, rows in about["stored_rows"].items())
        lines.append(("differs from", f"{base.get('name')!r}, step {base.get('step')}, in the rows {rows}"))
    return lines
