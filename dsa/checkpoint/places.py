"""Where a checkpoint is: a directory, or anything that fsspec can address."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

import fsspec
from fsspec.implementations.local import LocalFileSystem

from dsa.errors import CheckpointExistsError, CheckpointNotFoundError
from dsa.state.directories import local_directory

__all__ = ["Place", "StorageOptions", "check_apart", "find_place", "find_target"]

StorageOptions = Mapping[str, Any]

_ARCHIVES: Final = re.compile("(?:zip|tar|libarchive)::?")
_ARCHIVE_NAMES: Final = ("zip", "tar", "libarchive")
_SHORTENED: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(?:://|::)")

_PACKAGES: Final = {
    "s3": "s3fs",
    "s3a": "s3fs",
    **{each: f"fsspec[{each}]" for each in ("abfs", "gcs", "gs", "hdfs", "http", "sftp", "smb", "ssh")},
    "https": "fsspec[http]",
}


@final
@dataclass(frozen=True, slots=True)
class Place:
    """An address, taken apart.

    Args:
        url: As it was given, for messages and for return values; of a directory, its path.
        directory: The path, when it is a directory of this machine; None otherwise.
        files: fsspec's file system, when it is not.
        root: The path in it, without a slash at its end.
    """

    url: str
    directory: Path | None
    files: Any = field(default=None, repr=False)
    root: str = ""

    @property
    def name(self) -> str:
        """The last part of its path."""
        return _path_in(self.url)[1].rstrip("/").rpartition("/")[2]

    def below(self, key: str) -> str:
        """Return the address of something below this place.

        Example:
            >>> find_place("memory://run/step-100").below("entity")
            'memory://run/step-100/entity'
            >>> Place("zip://::/tmp/a.zip", None).below("step-100")
            'zip://step-100::/tmp/a.zip'
        """
        before, path, after = _path_in(self.url)
        return f"{before}{path}{'/' if path and not path.endswith('/') else ''}{key}{after}"

    def beside(self, name: str) -> str:
        """Return the address of something in the same directory."""
        if self.directory is not None:
            return str(self.directory.parent / name)
        before, path, after = _path_in(self.url)
        folder, slash, _ = path.rstrip("/").rpartition("/")
        return f"{before}{folder}{slash}{name}{after}"

    def remote_path(self, key: str) -> str:
        """Return the path of something below this place, as fsspec wants it."""
        return f"{self.root}/{key}" if self.root else key

    def key_of(self, path: str) -> str | None:
        """Return the key of a path of fsspec's, or None when it isn't below this place."""
        if not self.root:
            return path.lstrip("/")
        return path.removeprefix(f"{self.root}/") if path.startswith(f"{self.root}/") else None


def check_apart(source: Place, target: Place) -> None:
    """Refuse to write a checkpoint over one that it is made of.

    Raises:
        CheckpointExistsError: they are the same place.
    """
    if source.directory is not None and target.directory is not None:
        same = os.path.realpath(source.directory) == os.path.realpath(target.directory)
    else:
        same = source.url == target.url or (
            source.directory is target.directory
            and source.files is target.files
            and source.root == target.root
        )
    if same:
        raise CheckpointExistsError(f"{target.url!r} is the source itself: choose another address")


def find_place(url: str | os.PathLike[str], storage_options: StorageOptions | None = None) -> Place:
    """Take an address apart.

    Args:
        url: A path, or an fsspec URL such as ``s3://bucket/run/step-100`` or ``memory://checkpoint``.
        storage_options: What fsspec's file system is to be made with, such as ``endpoint_url``.

    Raises:
        ValueError: it is empty, or of a protocol that isn't known.
        ImportError: the package for the protocol isn't installed.
        CheckpointNotFoundError: it is in an archive that isn't there.

    Example:
        >>> find_place("memory://run/step-100").root
        '/run/step-100'
    """
    text: Any = os.fspath(url)
    if not text:
        raise ValueError("the address of the checkpoint is empty: pass a directory or a URL")
    if isinstance(text, str) and _SHORTENED.match(text):
        raise ValueError(
            f"{text!r} is a URL of which pathlib has taken away a slash: pass URLs as str, with both slashes"
        )
    if not isinstance(text, str) or not _URL.match(text):
        return _of_directory(local_directory(url, "url"))
    try:
        files, root = fsspec.url_to_fs(text, **(storage_options or {}))
    except FileNotFoundError as error:  # an archive that isn't there
        raise CheckpointNotFoundError(f"there is nothing at {text!r}: check the path") from error
    except ImportError as error:
        raise ImportError(
            f"{text!r} needs a package that is not installed ({error}): install it{_package(text)}"
        ) from error
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{text!r} can't be addressed ({error}): check the protocol and the storage_options"
        ) from error
    if isinstance(files, LocalFileSystem):
        return _of_directory(root)
    return Place(text if text.endswith("://") else text.rstrip("/"), None, files, root.rstrip("/"))


def _package(url: str) -> str:
    """Return how to install what an address needs, as the end of a sentence."""
    protocols = re.findall(r"([A-Za-z][A-Za-z0-9+.-]+)(?=://|::)", url)
    for protocol in protocols:
        if protocol in _PACKAGES:
            return f", with pip install '{_PACKAGES[protocol]}'"
    return ""


def find_target(url: str | os.PathLike[str], storage_options: StorageOptions | None = None) -> Place:
    """Take the address of something that is to be written apart.

    Args:
        url: As for `find_place`.
        storage_options: As there.

    Raises:
        ValueError: it is in an archive, or as for `find_place`.
    """
    if _ARCHIVES.match(os.fspath(url)):
        raise ValueError(
            f"{os.fspath(url)!r} is in an archive, which can be read but not written: export to a directory "
            "and pack that, for example with shutil.make_archive"
        )
    return find_place(url, storage_options)


def _path_in(url: str) -> tuple[str, str, str]:
    """Return what is before the path in the outermost file system of an address, the path, and what follows.

    Example:
        >>> _path_in("simplecache::zip://run/k::s3://bucket/a.zip")
        ('simplecache::zip://', 'run/k', '::s3://bucket/a.zip')
    """
    segments = url.split("::")
    for number, segment in enumerate(segments):
        protocol, sign, path = segment.partition("://")
        if sign or protocol in _ARCHIVE_NAMES:
            before = "".join(f"{each}::" for each in segments[:number])
            after = "".join(f"::{each}" for each in segments[number + 1 :])
            return f"{before}{protocol}://", path, after
    return "", url, ""


def _of_directory(path: str) -> Place:
    absolute = Path(path).absolute()
    return Place(str(absolute), absolute)
