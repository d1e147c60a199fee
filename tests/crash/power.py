"""A model of the device: what is left of a directory when the power goes.

What a file held when it was last synced is on the device. Of what was written since, each sector is there or
not, as chance will have it; so is the file's length, and so is every name made, replaced or removed since its
directory was synced; directories below the first one are names like others. `Device` follows the syncs of a
directory and what lies in it; `Device.image` is what it holds at one moment, and `Image.draw` one way in
which that may come out. A sync that fails (see `Device.fail_syncs`) leaves the pages it had to write *clean*:
a later sync passes them over unless they were written again, as Linux has it.

A description knows files by the numbers that the file system gives them, and after a loss of power the device
has the same files under the same numbers. What is drawn has new ones: `after_outage` stands for the device,
and for the operating system, which runs anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import random
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import dsa.backends.memmap
import dsa.backends.system
import dsa.backends.zarr
import dsa.backends.zarr_compressed
import dsa.state.holding
import dsa.state.journal
import dsa.state.recovery
import dsa.state.state_directory
from dsa.backends.mapped_array import MappedArray
from dsa.backends.memmap import MemmapBackend
from dsa.backends.system import PAGE
from dsa.state.metadata import METADATA_NAME
from dsa.state.state_directory import StateDirectory

__all__ = ["Device", "Image", "after_outage", "die_in_place"]

SECTOR = 512

Content = bytes
Names = dict[str, int]

_RUNS = itertools.count()
_NUMBERS: dict[int, int] = {}
_INODE = (1 << 64) - 1
"""Which file of a device a drawn one stands for."""


@dataclass(frozen=True)
class Image:
    """What may be on the device. Files and directories have keys.

    Args:
        root: The key of the first directory.
        old_names: By directory, what each name stood for when the directory was last synced.
        new_names: By directory, what it stands for now.
        synced: What each file held when it was last synced.
        current: What it holds now.
    """

    root: int
    old_names: dict[int, Names]
    new_names: dict[int, Names]
    synced: dict[int, Content]
    current: dict[int, Content]

    def draw(self, rng: random.Random, directory: Path) -> None:
        """Write one outcome into a new directory."""
        share, grain = rng.choice([0.0, 1.0, 0.1, 0.5, 0.9]), rng.choice([SECTOR, PAGE])
        chosen: dict[int, Content] = {}
        waiting = [(self.root, directory)]
        while waiting:
            place, path = waiting.pop()
            path.mkdir()
            _stands_for(path, place)
            old, new = self.old_names.get(place, {}), self.new_names.get(place, {})
            for name in sorted({*old, *new}):
                key = (new if rng.random() < share else old).get(name)
                if key is None:
                    continue
                if key in self.new_names or key in self.old_names:
                    waiting.append((key, path / name))
                    continue
                if key not in chosen:
                    chosen[key] = _mixed(self.synced.get(key, b""), self.current.get(key), rng, share, grain)
                (path / name).write_bytes(chosen[key])
                _stands_for(path / name, key)


def die_in_place(state: StateDirectory) -> None:
    """Leave a state as the death of its process does: what is not synced stays so."""
    names = ("sync_file", "sync_mapping", "sync_mapped", "sync_directory")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(dsa.backends.system, name))
        stack.enter_context(mock.patch.object(dsa.backends.zarr, "sync_tree"))
        stack.enter_context(mock.patch.object(dsa.backends.zarr_compressed, "sync_tree"))
        state.abandon()


def _stands_for(path: Path, key: int) -> None:
    _NUMBERS[path.stat().st_ino] = _NUMBERS.get(key, key)


@contextlib.contextmanager
def after_outage() -> Iterator[None]:
    """Let drawn files have the numbers of those they stand for, in another run of the operating system."""

    def numbers(directory: Path, names: Iterable[str]) -> dict[str, int]:
        found = dsa.state.holding.file_numbers(directory, names)
        # When the one it stands for was made is not known: such a number is compared without it.
        return {name: _NUMBERS.get(number & _INODE, number) for name, number in found.items()}

    boot = f"run {next(_RUNS)} of the system"
    with (
        mock.patch.object(dsa.state.recovery, "file_numbers", numbers),
        mock.patch.object(dsa.state.state_directory, "file_numbers", numbers),
        mock.patch.object(dsa.backends.system, "boot_identity", return_value=boot),
    ):
        yield


def _mixed(old: Content, new: Content | None, rng: random.Random, share: float, grain: int) -> Content:
    if new is None or new == old:
        return old
    size = len(new) if rng.random() < share else len(old)
    before = old[:size].ljust(size, b"\0")
    after = new[:size].ljust(size, b"\0")
    pieces = [(after if rng.random() < share else before)[at : at + grain] for at in range(0, size, grain)]
    return b"".join(pieces)


class Device:
    """Follows the syncs of the files of one directory.

    Args:
        directory: It exists; what it holds is on the device.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self._place = directory, directory.resolve()
        self.fail_syncs: Callable[[], bool] = lambda: False
        # No sync ends while an image is taken: what follows from it would be in the image and it would not.
        self._still = threading.RLock()
        self._refused = False
        self._held: dict[int, int] = {}
        self._synced: dict[int, Content] = {}
        self._passed_over: dict[int, set[int]] = {}
        self._names, files = self._list()
        for key, path in files.items():
            self._synced[key] = path.read_bytes()

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Follow the process's syncs."""
        patch = mock.patch.object
        with (
            patch(os, "fsync", self._syncing(os.fsync)),
            patch(os, "fdatasync", self._syncing(os.fdatasync)),
            patch(dsa.backends.memmap, "sync_range", self._syncing_range(dsa.backends.memmap.sync_range)),
            patch(dsa.state.journal, "mmap", _NotingMmap(self)),
            patch(dsa.state.journal, "view", self._viewing(dsa.state.journal.view)),
            patch(MemmapBackend, "write", self._writing(MemmapBackend.write)),
            patch(MappedArray, "scatter", self._scattering(MappedArray.scatter)),
        ):
            yield

    def image(self) -> Image:
        """Return what may be on the device now."""
        with self._still:
            names, files = self._list()
            # By what is held: a thread may have renamed a file since it was listed.
            current = {key: self._content(key) for key in files}
            root = self.directory.stat().st_ino
            old = {place: dict(each) for place, each in self._names.items()}
            return Image(root, old, names, dict(self._synced), current)

    def close(self) -> None:
        """Let go of the files."""
        for descriptor in self._held.values():
            os.close(descriptor)

    def note_write(self, descriptor: int, start: int, stop: int) -> None:
        """Take in that a range of a file was written: a later sync reaches it whatever failed before."""
        self._note(os.fstat(descriptor).st_ino, start, stop)

    def _note(self, key: int, start: int, stop: int) -> None:
        if key in self._passed_over:
            self._passed_over[key] -= set(range(start // PAGE, -(-stop // PAGE)))

    def _list(self) -> tuple[dict[int, Names], dict[int, Path]]:
        """Return what the names of each directory stand for, and where the files are."""
        names: dict[int, Names] = {}
        files: dict[int, Path] = {}
        for path, _, found in os.walk(self.directory):
            here = names.setdefault(os.stat(path).st_ino, {})
            here.update(self._names_in(path))
            files.update({here[name]: Path(path, name) for name in found if name in here})
        return names, files

    def _names_in(self, path: str) -> Names:
        """Return what the names in one directory stand for."""
        names: Names = {}
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.inode() in self._held:
                    names[entry.name] = entry.inode()
                    continue
                try:
                    descriptor = os.open(entry.path, os.O_RDONLY)
                except FileNotFoundError:  # a thread has just renamed or removed it
                    continue
                names[entry.name] = self._hold(descriptor)
                os.close(descriptor)
        return names

    def _hold(self, descriptor: int) -> int:
        # Held open, so that the number of a removed file is not given to another.
        key = os.fstat(descriptor).st_ino
        if key not in self._held:
            self._held[key] = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        return key

    def _content(self, key: int) -> Content:
        return os.pread(self._held[key], os.fstat(self._held[key]).st_size, 0)

    def _syncing(self, sync: Callable[[int], None]) -> Callable[[int], None]:
        def wrapper(descriptor: int) -> None:
            with self._still:
                status = os.fstat(descriptor)
                if not stat.S_ISDIR(status.st_mode):
                    self._sync_data(descriptor, failing=self._fails(descriptor))
                else:
                    path = os.readlink(f"/proc/self/fd/{descriptor}")
                    if Path(path).is_relative_to(self._place):
                        self._names[status.st_ino] = self._names_in(path)
                sync(descriptor)

        return wrapper

    def _syncing_range(self, sync: Callable[..., None]) -> Callable[..., None]:
        # As the kernel has it: `msync` of a range asks the file system for what `fdatasync` does, of a range.
        def wrapper(mapping: mmap.mmap, path: Path, start: int, stop: int) -> None:
            with self._still, open(path, "rb") as file:
                key, former = self._hold(file.fileno()), self._synced.get(os.fstat(file.fileno()).st_ino, b"")
                self._sync_data(file.fileno(), failing=self._fails(file.fileno()))
                whole, start = self._synced[key], start - start % PAGE
                rest = former[stop:] if len(former) > stop else b""
                self._synced[key] = former[:start].ljust(start, b"\0") + whole[start:stop] + rest
                self._synced[key] = self._synced[key].ljust(len(whole), b"\0")
                sync(mapping, path, start, stop)

        return wrapper

    def _fails(self, descriptor: int) -> bool:
        # What says that the device has refused gets through: nobody could know otherwise.
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        self._refused = self.fail_syncs() and not (self._refused and name.endswith(f"{METADATA_NAME}.tmp"))
        return self._refused

    def _sync_data(self, descriptor: int, failing: bool) -> None:
        key = self._hold(descriptor)
        content = self._content(key)
        old = self._synced.get(key, b"")
        if failing:
            changed = {
                at // PAGE
                for at in range(0, len(content), PAGE)
                if content[at : at + PAGE] != old[at : at + PAGE]
            }
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY:
                self._passed_over.setdefault(key, set()).update(changed)
            # A file opened for writing only is one that is written anew each time.
            raise OSError(5, "injected: the device refused to sync")
        pages = [content[at : at + PAGE] for at in range(0, len(content), PAGE)]
        for page in self._passed_over.get(key, ()):
            if page < len(pages):
                pages[page] = old[page * PAGE : (page + 1) * PAGE].ljust(len(pages[page]), b"\0")
        self._synced[key] = b"".join(pages)

    def _viewing(self, view: Callable[..., Any]) -> Callable[..., Any]:
        # The journal takes a view to write into it.
        def wrapper(memory: Any, at: int, dtype: Any, count: int) -> Any:
            self.note_write(memory.descriptor, at, at + count * np.dtype(dtype).itemsize)
            return view(memory, at, dtype, count)

        return wrapper

    def _writing(self, write: Callable[..., None]) -> Callable[..., None]:
        def wrapper(backend: MemmapBackend, rows: np.ndarray, records: np.ndarray) -> None:
            write(backend, rows, records)
            if self._passed_over:
                stride, key = backend.describe()["stride"], os.stat(backend._path).st_ino
                for row in rows.tolist():
                    self._note(key, PAGE + row * stride, PAGE + (row + 1) * stride)

        return wrapper

    def _scattering(self, scatter: Callable[..., None]) -> Callable[..., None]:
        def wrapper(array: MappedArray, rows: np.ndarray, records: np.ndarray, *sums: np.ndarray) -> None:
            scatter(array, rows, records, *sums)
            if self._passed_over:
                size = array._layout.spec.row_bytes
                for shard, start, stop in array._parts(rows):
                    key = os.stat(array._files[shard]).st_ino
                    for row in (rows[start:stop] - array._bounds[shard]).tolist():
                        self._note(key, row * size, (row + 1) * size)

        return wrapper


class _NotingMmap:
    """Stands for the module `mmap`: its maps tell the device where slices are assigned."""

    def __init__(self, device: Device) -> None:
        class Map(mmap.mmap):
            def __new__(cls, descriptor: int, *arguments: object, **options: object) -> mmap.mmap:
                self = super().__new__(cls, descriptor, *arguments, **options)
                self.descriptor = descriptor
                return self

            def __setitem__(self, where: slice, data: bytes) -> None:
                super().__setitem__(where, data)
                device.note_write(self.descriptor, where.start or 0, where.stop)

        self.mmap = Map

    def __getattr__(self, name: str) -> object:
        return getattr(mmap, name)
