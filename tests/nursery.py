"""Programs that start at once: forks of a process that has imported everything and loaded the kernels.

A new interpreter spends seconds of work on torch, numba and the compiled kernels before it does anything for
a test. `start` and `run` stand for `subprocess.Popen` and `subprocess.run` of ``python -c CODE ARGUMENTS``
where a test is about what the program does; one that is about how an interpreter starts or ends, or what it
has imported, needs a new one. Where there is no fork, or its end can't be waited for, they start one.

The process that is forked has never had a queue or another thread of Python's. It ends with the one that
started it, whose end closes its pipe.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO

__all__ = ["DSA", "Life", "run", "start"]

ROOT = Path(__file__).parents[1]
TIMEOUT = 300.0
DSA = "import runpy, sys\nsys.argv[0] = 'dsa'\nrunpy.run_module('dsa', run_name='__main__', alter_sys=True)\n"
"""The program of ``python -m dsa ARGUMENTS``."""


class Life:
    """A program that runs. It has the attributes of `subprocess.Popen` that tests use.

    Args:
        link: Tells its number when it runs, and its status when it has ended.
        stdin: A pipe to it.
        stdout: A pipe from it.
        stderr: A file that it writes to.
    """

    def __init__(self, link: socket.socket, stdin: IO[str], stdout: IO[str], stderr: IO[str]) -> None:
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self.returncode: int | None = None
        self._link = link
        self.pid = self._told(TIMEOUT)

    def __enter__(self) -> Life:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.wait(TIMEOUT)
        self.stderr.close()

    def _told(self, timeout: float | None) -> int:
        self._link.settimeout(timeout)
        return int(self._link.recv(100))

    def wait(self, timeout: float | None = TIMEOUT) -> int:
        """Return its exit status once it has ended; negative for a signal."""
        if self.returncode is None:
            try:
                self.returncode = self._told(timeout)
            except TimeoutError as error:
                raise subprocess.TimeoutExpired("a program", timeout or 0.0) from error
            self._link.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return its exit status, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired, BlockingIOError):
            self.wait(0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = TIMEOUT) -> tuple[str, str]:
        """Return the rest of what it writes, once it has ended; kill it where that takes too long."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        killing = threading.Timer(timeout, self.kill)
        killing.start()
        try:
            output = self.stdout.read()
            self.wait(timeout)
        finally:
            killing.cancel()
        self.stderr.seek(0)
        errors = self.stderr.read()
        self.__exit__()
        return output, errors


def start(
    code: str,
    *arguments: object,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    encoding: str = "utf-8",
) -> Life | subprocess.Popen[str]:
    """Start a program, with pipes to it and from it.

    Args:
        code: What ``python -c`` would run.
        *arguments: Its ``sys.argv[1:]``.
        cwd: Where it runs; by default here.
        env: Its environment; by default this one's. What is read when modules are imported comes too late.
        encoding: Of what is read and written here.
    """
    words = [str(each) for each in arguments]
    environment = dict(os.environ if env is None else env)
    nursery = _nursery(os.getpid())
    if nursery is None:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, "-c", code, *words]
        return subprocess.Popen(command, cwd=cwd, env=environment, encoding=encoding, **pipes)
    ours, theirs = socket.socketpair()
    (read_in, write_in), (read_out, write_out) = os.pipe(), os.pipe()
    errors = os.fdopen(os.memfd_create("errors"), "w+", encoding=encoding)
    request = {"code": code, "words": words, "cwd": str(cwd or Path.cwd()), "environment": environment}
    data = json.dumps(request).encode()
    given = [theirs.fileno(), read_in, write_out, errors.fileno()]
    socket.send_fds(nursery, [len(data).to_bytes(8, "little")], given)
    nursery.sendall(data)
    for descriptor in (read_in, write_out):
        os.close(descriptor)
    theirs.close()
    stdin, stdout = os.fdopen(write_in, "w", encoding=encoding), os.fdopen(read_out, encoding=encoding)
    try:
        return Life(ours, stdin, stdout, errors)
    except ValueError:  # the nursery has died, perhaps for want of memory: another one begins the program
        for each in (stdin, stdout, errors, ours):
            each.close()
        _nursery.cache_clear()
        return start(code, *arguments, cwd=cwd, env=env, encoding=encoding)


def run(
    code: str,
    *arguments: object,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    encoding: str = "utf-8",
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return its status and outputs; the arguments are those of `start`."""
    life = start(code, *arguments, cwd=cwd, env=env, encoding=encoding)
    output, errors = life.communicate(timeout=TIMEOUT)
    return subprocess.CompletedProcess(["python", "-c"], life.returncode, output, errors)


@functools.cache
def _nursery(owner: int) -> socket.socket | None:
    """Return the pipe to this process's nursery; None where there can't be one."""
    del owner  # a fork of this process has another
    if not hasattr(os, "fork") or not hasattr(os, "pidfd_open"):
        return None
    ours, theirs = socket.socketpair()
    command = [sys.executable, __file__, str(theirs.fileno())]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait(TIMEOUT)

    atexit.register(end)
    return ours


# ---------------------------------------------------------------- in the nursery


def _serve(requests: socket.socket) -> dict[str, object] | None:
    """Fork for each request and tell who asked; return in a fork, with its request, and at the end."""
    with selectors.DefaultSelector() as waiting:
        waiting.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.fileobj is not requests:
                    _tell_end(waiting, key)
                    continue
                received = _receive(requests)
                if received is None:
                    return None
                request, link, descriptors = received
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: numpy has threads
                    child = os.fork()
                if child == 0:
                    for each in list(waiting.get_map().values()):
                        if each.fileobj is not requests:
                            os.close(each.fd)
                            each.data[1].close()
                    link.close()
                    _take_over(descriptors)
                    return request
                for each in descriptors:
                    os.close(each)
                waiting.register(os.pidfd_open(child), selectors.EVENT_READ, (child, link))
                link.send(str(child).encode())


def _tell_end(waiting: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    child, link = key.data
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    waiting.unregister(key.fileobj)
    os.close(key.fd)
    with contextlib.suppress(BrokenPipeError), link:
        link.send(str(status).encode())


def _receive(requests: socket.socket) -> tuple[dict[str, object], socket.socket, list[int]] | None:
    size, descriptors, _, _ = socket.recv_fds(requests, 8, 4)
    if not size:
        return None
    data = b""
    while len(data) < int.from_bytes(size, "little"):
        data += requests.recv(int.from_bytes(size, "little") - len(data))
    return json.loads(data), socket.socket(fileno=descriptors[0]), descriptors[1:]


def _take_over(descriptors: list[int]) -> None:
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _become(request: dict[str, object], threads: int) -> None:
    """Be the program that was asked for, and end as it does."""
    import torch

    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    torch.set_num_threads(threads)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = ["", *(path for path in paths if path)]
    sys.argv[:] = ["-c", *request["words"]]
    _open_console(os.environ.get("PYTHONIOENCODING", "utf-8"))
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    status: object = 0
    try:
        exec(compile(request["code"], "<string>", "exec"), main.__dict__)
    except SystemExit as end:
        status = end.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error.with_traceback(error.__traceback__.tb_next), error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    _end(main, status if isinstance(status, int) else 1)


def _open_console(encoding: str) -> None:
    sys.stdin = os.fdopen(0, "r", encoding=encoding, closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding=encoding, closefd=False)
    sys.stdout.reconfigure(line_buffering="PYTHONUNBUFFERED" in os.environ)
    sys.stderr = os.fdopen(2, "w", 1, encoding, "backslashreplace", closefd=False)


def _end(main: types.ModuleType, status: int) -> None:
    """Do what an interpreter does at its end, but for taking apart all modules, which takes seconds."""
    threading._shutdown()
    atexit._run_exitfuncs()
    main.__dict__.clear()
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def _load() -> int:
    """Import what programs use and load the kernels; return the threads that torch would have."""
    import numpy as np
    import torch

    import dsa
    import dsa.inspection

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in dsa.__all__:
        getattr(dsa, name)
    batch = {"a": (np.arange(9), np.ones((9, 4), np.float32))}
    with tempfile.TemporaryDirectory() as folder:
        for k, backend in ((0.0, "memmap"), (1.0, "memmap"), (0.0, "zarr")):
            path = Path(folder, f"{k} {backend}")
            table = {"a": dsa.init.Normal(50, 4, seed=1)}
            with dsa.DiskSparseRiemannianAdam(table, k=k, disk_dir=path, backend=backend) as optimizer:
                optimizer.step(batch)
            dsa.verify(path)
    assert threading.active_count() == 1, threading.enumerate()
    return threads


def _main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = _load()
    gc.collect()
    gc.freeze()  # or a collector copies every page that holds an object
    request = _serve(requests)
    requests.close()
    if request is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _become(request, threads)


if __name__ == "__main__":
    _main()
