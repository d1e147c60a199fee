"""Deaths at every instant: a forked child is killed before its n-th call that may change a file."""

import gc
import os
import signal
import warnings

CALLS = (
    "open",
    "write",
    "pwrite",
    "replace",
    "rename",
    "unlink",
    "rmdir",
    "mkdir",
    "fsync",
    "fdatasync",
    "ftruncate",
    "truncate",
    "posix_fallocate",
)


def in_child(body):
    """Run a function in a fork and return its exit status; negative for a signal. An exception is status 1."""
    gc.freeze()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: the process may have threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            warnings.simplefilter("ignore")
            body()
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    gc.unfreeze()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die():
    """End this process as kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(number):
    """Let this process die before the n-th call from now on."""
    left = number

    def counting(real):
        def call(*arguments, **options):
            nonlocal left
            left -= 1
            if left == 0:
                die()
            return real(*arguments, **options)

        return call

    for name in CALLS:
        if hasattr(os, name):
            setattr(os, name, counting(getattr(os, name)))


def deaths(prepare, operation, every=1):
    """Kill an operation before each call that may change a file; yield the number each time.

    Args:
        prepare: Called in the child first; its result is passed to `operation`.
        operation: What is killed.
        every: 2 kills before every second call, and so on.
    """
    number = 1
    while True:

        def body(number=number):
            prepared = prepare()
            arm(number)
            operation(prepared)

        status = in_child(body)
        assert status in (0, -signal.SIGKILL), "the child failed by itself"
        if status == 0:
            return
        yield number
        number += every
