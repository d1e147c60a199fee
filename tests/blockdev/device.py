"""A block device with a volatile cache, as a loop device on a file that a process of its own serves.

`BlockDevice` starts that process and talks to it. It outlives whoever started it by as long as it takes to
unmount what lies in its directory, and a directory that even it has left behind (both were killed) is cleared
away by the next `BlockDevice`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fuse_file import FILE, mount, serve
from volatile_cache import Held, Outcome, VolatileCache, outcome

__all__ = ["BlockDevice", "attached", "command", "mounts_in", "remove_abandoned"]

_PREFIX = "dsa-blockdev-"
_LOCK = "lock"
_PATIENCE = 10.0


def command(*words: str | os.PathLike[str], good: Sequence[int] = (0,)) -> str:
    """Run a program of the system, which ends with one of some statuses, and return what it prints.

    Raises:
        OSError: it failed; with what it said.
    """
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    done = subprocess.run(
        [shutil.which(words[0], path=path) or words[0], *words[1:]],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": path, "LC_ALL": "C"},
    )
    if done.returncode not in good:
        raise OSError(f"{' '.join(map(str, words))}: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()


@contextlib.contextmanager
def attached(file: Path) -> Iterator[str]:
    """Yield a loop device on a file."""
    node = _insist(lambda: command("losetup", "--show", "--find", file))
    try:
        yield node
    finally:
        _insist(lambda: command("losetup", "--detach", node))


def _insist(call: Any, patience: float = _PATIENCE) -> Any:
    """Call again while the system is busy; another process may have taken the same device first."""
    limit = time.monotonic() + patience
    while True:
        try:
            return call()
        except OSError:
            if time.monotonic() > limit:
                raise
        time.sleep(0.01)


def mounts_in(directory: Path) -> list[Path]:
    """Return the mount points inside a directory, the latest first."""
    with open("/proc/self/mountinfo", encoding="utf-8") as lines:
        points = [Path(line.split()[4].encode().decode("unicode_escape")) for line in lines]
    return [point for point in reversed(points) if directory in point.parents]


def _loops_in(directory: Path) -> list[str]:
    nodes = []
    for entry in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if entry.read_text().startswith(f"{directory}/"):
                nodes.append(f"/dev/{entry.parts[3]}")
    return nodes


def _tear_down(directory: Path) -> None:
    """Unmount and detach what is in a directory, the served file last, and remove it."""
    served = directory / "served"
    for point in mounts_in(directory):
        if point != served:
            with contextlib.suppress(OSError):
                _unmount(point)
    for node in _loops_in(directory):
        with contextlib.suppress(OSError):
            command("losetup", "--detach", node)
    with contextlib.suppress(OSError):
        command("umount", "--lazy", served)
    if not mounts_in(directory):
        shutil.rmtree(directory, ignore_errors=True)


def _unmount(point: Path) -> None:
    try:
        _insist(lambda: command("umount", point), patience=1.0)
    except OSError:
        command("umount", "--lazy", point)


def remove_abandoned(root: Path) -> None:
    """Clear away the directories of devices whose processes are gone."""
    for directory in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), open(directory / _LOCK, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _tear_down(directory)


class BlockDevice:
    """A disk of its own process, whose file is to be attached as a loop device.

    Args:
        size: Bytes.

    Raises:
        OSError: FUSE can't be mounted here.
    """

    def __init__(self, size: int) -> None:
        memory = Path("/dev/shm")
        root = memory if memory.is_dir() else Path(tempfile.gettempdir())
        remove_abandoned(root)
        self.directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        self.file = self.directory / "served" / FILE
        self._server, self._control = _start(self.directory, size)
        try:
            self._receive()
        except BaseException:
            self.close()
            raise

    def image(self, rng: random.Random, path: Path, chosen: Outcome | None = None) -> Outcome:
        """Write what a loss of power at this instant may leave into a file, and return how it came out."""
        self.hold()
        return self.draw(rng, path, chosen)

    def hold(self) -> None:
        """Remember the disk as it is at this instant, for `draw`."""
        self._ask("hold")

    def draw(self, rng: random.Random, path: Path, chosen: Outcome | None = None) -> Outcome:
        """Write an image of the instant that was remembered."""
        chosen = chosen or outcome(rng)
        self._ask("draw", tuple(chosen), str(path))
        return chosen

    def fail(self, ranges: Sequence[tuple[int, int]], times: int = 1 << 60) -> None:
        """Let so many of the next writes into ranges of bytes fail with EIO; none for no ranges."""
        self._ask("fail", list(ranges), times)

    def fail_flushes(self, times: int) -> None:
        """Let so many of the next flushes fail with EIO."""
        self._ask("fail_flushes", times)

    def figures(self) -> dict[str, int]:
        """Return the counts of writes, flushes and failures; see `VolatileCache.figures`."""
        return self._ask("figures")

    def clear(self) -> None:
        """Become a new disk that fails nothing. Nothing may be attached to it."""
        self._ask("clear")

    def load(self, image: Path) -> None:
        """Become a disk that holds an image. Nothing may be attached to it."""
        self._ask("load", str(image))

    def close(self) -> None:
        """Unmount what is in the directory and end the process."""
        self._control.close()
        try:
            self._server.wait(3 * _PATIENCE)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        if self.directory.exists():
            _tear_down(self.directory)

    def _ask(self, *request: Any) -> Any:
        self._control.send(request)
        return self._receive()

    def _receive(self) -> Any:
        try:
            answer = self._control.recv()
        except EOFError:
            raise OSError(f"the process of the block device in {str(self.directory)!r} has ended") from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _start(directory: Path, size: int) -> tuple[subprocess.Popen[bytes], Connection]:
    # Locked before it has its name, and held by that process alone: who can lock it knows that it is gone.
    unnamed = directory / "lock.new"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unnamed.rename(directory / _LOCK)
    ours, theirs = socket.socketpair()
    server = subprocess.Popen(
        [sys.executable, "-S", __file__, str(theirs.fileno()), str(directory), str(size)],
        pass_fds=(lock, theirs.fileno()),
        start_new_session=True,  # Ctrl-C is not for it: it ends when the other side does
    )
    os.close(lock)
    theirs.close()
    return server, Connection(ours.detach())


def _main(control: Connection, directory: Path, size: int) -> None:
    disk = VolatileCache(size)
    (directory / "served").mkdir()
    try:
        descriptor = mount(str(directory / "served"))
        threading.Thread(target=serve, args=(descriptor, disk), daemon=True).start()
        control.send(None)
        _obey(control, disk)
    except (EOFError, ConnectionError):
        pass
    except OSError as error:
        control.send(error)
    finally:
        _tear_down(directory)


def _obey(control: Connection, disk: VolatileCache) -> None:
    held: Held | None = None
    while True:
        name, *arguments = control.recv()
        try:
            if name == "hold":
                answer, held = None, disk.hold()
            elif name == "draw":
                assert held is not None, "nothing was held"
                answer = held.draw(Outcome(*arguments[0]), arguments[1])
            else:
                answer = getattr(disk, name)(*arguments)
        except Exception as error:
            answer = error
        control.send(answer)


if __name__ == "__main__":
    _main(Connection(int(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3]))
