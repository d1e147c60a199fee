"""Options that several commands have, and what they mean."""

from __future__ import annotations

import argparse
import importlib
import json
from typing import TYPE_CHECKING, Any

from dsa.cli.commands.progress import add_progress

if TYPE_CHECKING:
    from dsa.backends import Layout
    from dsa.checkpoint.export import ExportOptions
    from dsa.checkpoint.meter import Progress
    from dsa.state.storage import StorageChoice

__all__ = [
    "add_base",
    "add_compression",
    "add_json",
    "add_layout",
    "add_overwrite",
    "add_storage",
    "add_storage_option",
    "add_work",
    "export_options",
    "key_value",
    "named_layout",
    "storage_choice",
    "storage_options",
]


def add_work(parser: argparse.ArgumentParser, store: str | None = "the URL") -> None:
    """Add what every command has that takes a while: fsspec's options, a bar, and JSON.

    Args:
        parser: The command's.
        store: What fsspec's options are for; None adds none.
    """
    if store is not None:
        add_storage_option(parser, what=store)
    add_progress(parser)
    add_json(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """Add ``--overwrite``."""
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace a checkpoint that is there; nothing else is replaced",
    )


def add_base(
    parser: argparse.ArgumentParser,
    what: str = "the full checkpoint of a differential one, if it isn't beside it",
) -> None:
    """Add ``--base``.

    Args:
        parser: The command's.
        what: What it names.
    """
    parser.add_argument("--base", metavar="URL", help=what)


def add_compression(parser: argparse.ArgumentParser) -> None:
    """Add ``--compression``."""
    parser.add_argument(
        "--compression",
        choices=("none", "zstd", "auto"),
        default="none",
        help="auto: all but weights of which less than half were ever written (none)",
    )


def export_options(arguments: argparse.Namespace, progress: Progress) -> ExportOptions:
    """Return what `add_overwrite`'s, `add_compression`'s and `add_work`'s options say."""
    return {
        "overwrite": arguments.overwrite,
        "compression": None if arguments.compression == "none" else arguments.compression,
        "progress": progress,
        "storage_options": storage_options(arguments),
    }


def add_storage_option(
    parser: argparse.ArgumentParser, flag: str = "--storage-option", what: str = "the URL"
) -> None:
    """Add an option that may be repeated, for fsspec.

    Args:
        parser: The command's.
        flag: The option's name.
        what: What it is for.
    """
    parser.add_argument(
        flag,
        type=key_value,
        action="append",
        metavar="KEY=VALUE",
        help=f"option of fsspec for {what}, such as endpoint_url=http://localhost:9000; may be repeated; "
        "VALUE is JSON where it can be read as such",
    )


def storage_options(arguments: argparse.Namespace, name: str = "storage_option") -> dict[str, Any] | None:
    """Return what `add_storage_option`'s option says as often as it is given, or None when it isn't."""
    return dict(getattr(arguments, name) or ()) or None


def key_value(text: str) -> tuple[str, Any]:
    """Return a key and a value, which is JSON or else text.

    Raises:
        argparse.ArgumentTypeError: there is no key.

    Example:
        >>> key_value("anon=true"), key_value("key=A1B2"), key_value('id="007"')
        (('anon', True), ('key', 'A1B2'), ('id', '007'))
    """
    key, sign, value = text.partition("=")
    if not key or not sign:
        raise argparse.ArgumentTypeError(f"{text!r} has no key: write KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Add ``--backend`` for state directories that are there."""
    parser.add_argument(
        "--backend",
        metavar="MODULE:NAME",
        help="of a state in a storage of your own: its layout, or what makes it if called without arguments",
    )


def named_layout(text: str | None) -> Layout | None:
    """Return the layout that a ``--backend`` option names; None when it is left out.

    Args:
        text: A kind of the package's, or a module and the name of a layout, or of what makes it, in there.

    Raises:
        ValueError: there is none of that name.

    Example:
        >>> named_layout("zarr").kind, named_layout("dsa.backends:Memmap").kind
        ('zarr', 'memmap')
    """
    from dsa.state.storage import as_layout

    if text is None:
        return None
    module, sign, name = text.partition(":")
    if not sign:
        return as_layout(text)
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--backend {text} can't be had ({error}): write MODULE:NAME, and set PYTHONPATH to where the "
            "module is"
        ) from error
    return as_layout(found() if callable(found) else found)


def add_storage(parser: argparse.ArgumentParser) -> None:
    """Add how a new state directory is stored."""
    parser.add_argument(
        "--backend",
        metavar="BACKEND",
        help="memmap: one file per table; zarr: a Zarr group that any Zarr reader can open in training; "
        "MODULE:NAME: a layout of your own (memmap)",
    )
    parser.add_argument(
        "--zarr-compression",
        choices=("zstd",),
        help="with --backend zarr: less disk where few rows are trained, for many times the work",
    )
    parser.add_argument(
        "--allocate",
        choices=("reserve", "sparse"),
        help="take all disk space now, or as rows are touched (reserve)",
    )
    parser.add_argument(
        "--durability",
        choices=("process", "power", "none"),
        help="what a step that returned is to survive (process)",
    )


def storage_choice(arguments: argparse.Namespace) -> StorageChoice:
    """Return what `add_storage`'s options say.

    Raises:
        ValueError: compression without the backend that has it, or a backend that is not known.
    """
    from dsa.backends import Zarr
    from dsa.state.storage import StorageChoice

    compression = arguments.zarr_compression
    if compression is not None and arguments.backend != "zarr":
        raise ValueError(f"--zarr-compression {compression} is for another backend: add --backend zarr")
    backend = named_layout(arguments.backend) if compression is None else Zarr(compression=compression)
    return StorageChoice(arguments.allocate, backend, arguments.durability)
