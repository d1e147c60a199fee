"""What people pass as a state directory, and what they can't have meant."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

__all__ = ["directory_argument", "local_directory"]

# One slash is enough: pathlib takes the second one away. A single letter is a drive.
_ADDRESS: Final = re.compile(
    r"(?:[A-Za-z][A-Za-z0-9+.-]+::)*[A-Za-z][A-Za-z0-9+.-]+:/|(?:zip|tar|libarchive)::"
)


def local_directory(given: str | os.PathLike[str], argument: str = "state_dir") -> str:
    """Return the path of a directory of this machine as it was given, with ``~`` expanded.

    Args:
        given: What was passed.
        argument: The argument's name, for messages.

    Raises:
        TypeError: it is no path.
        ValueError: it is empty, an address of a store, or can't be a path.

    Example:
        >>> local_directory("run")
        'run'
        >>> local_directory("s3://bucket/run", "disk_dir")
        Traceback (most recent call last):
        ValueError: disk_dir='s3://bucket/run' is an address and no directory: pass a directory of this ...
    """
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"{argument}={given!r} is no path: pass a str or a pathlib.Path")
    path = os.fspath(given)
    if not isinstance(path, str):
        raise TypeError(f"{argument}={given!r} is a path in bytes: pass a str, such as os.fsdecode makes")
    if not path.strip():
        raise ValueError(f"{argument}={path!r} names no directory: pass one, or '.' for this one")
    if "\0" in path:
        raise ValueError(f"{argument}={path!r} holds a null character, which no path may: leave it out")
    if path.lower().startswith("file:"):
        inside = unquote(urlsplit(path).path)
        raise ValueError(f"{argument}={path!r} is an address and no directory: pass {inside!r}")
    if _ADDRESS.match(path):
        raise ValueError(
            f"{argument}={path!r} is an address and no directory: pass a directory of this machine; "
            "checkpoints can be exported to stores"
        )
    expanded = os.path.expanduser(path)
    if path.startswith("~") and expanded == path:
        raise ValueError(
            f"{argument}={path!r} begins with a home directory that is not known: pass the whole path, or "
            f"{'./' + path!r} if that is its name"
        )
    return expanded


def directory_argument(text: str) -> Path:
    """Return the path that a command line names, as argparse wants it.

    Raises:
        argparse.ArgumentTypeError: it can't be meant.
    """
    try:
        return Path(local_directory(text, "the directory"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
