"""Deaths at every instant: a forked child is killed before its n-th call that may change a file."""

import gc
import os
import signal
import warnings

import dsa.state.write_back

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
    """Run a function in a fork and return its exit status: negative for a signal, 1 for an exception."""
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
    """Let this process die before the n-th call from now on; return a list with how many are left."""
    left = [number]
    # It looks at files by the clock, so that the calls would be other ones from run to run.
    dsa.state.write_back.WriteBack.glance = lambda *given: None

    def counting(real):
        def call(*arguments, **options):
            left[0] -= 1
            if left[0] == 0:
                die()
            return real(*arguments, **options)

        return call

    for name in CALLS:
        if hasattr(os, name):
            setattr(os, name, counting(getattr(os, name)))
    return left


def deaths(prepare, operation, restore, most=20):
    """Kill an operation before calls that may change a file; yield the number of the call each time.

    Args:
        prepare: Called in the child first; its result is passed to `operation`.
        operation: What is killed.
        restore: Called here before each child: it undoes what the one before has done.
        most: So many calls are chosen, evenly; 0 chooses every call.
    """
    reading, writing = os.pipe()

    def count():
        prepared = prepare()
        left = arm(1 << 40)
        operation(prepared)
        os.write(writing, f"{(1 << 40) - left[0]}".encode())

    restore()
    assert in_child(count) == 0, "it fails without being killed"
    os.close(writing)
    calls = int(os.read(reading, 100))
    os.close(reading)
    chosen = min(most, calls) or calls
    for number in sorted({1 + round(place * (calls - 1) / max(1, chosen - 1)) for place in range(chosen)}):

        def body(number=number):
            prepared = prepare()
            arm(number)
            operation(prepared)

        restore()
        status = in_child(body)
        # A thread of the operation's may make a call more or less.
        assert status in (0, -signal.SIGKILL), "it fails without being killed"
        yield number
