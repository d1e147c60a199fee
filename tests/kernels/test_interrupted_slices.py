"""Whatever is raised in the thread that asked for slices, none of them runs when it goes on."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import weakref

import pytest

from dsa.kernels import latch
from dsa.kernels import threads as kernel_threads
from dsa.kernels.threads import run_slices, thread_limit

ROWS = 4_096
PATIENCE = 0.03  # seconds that a caller gets to go on too early


class Slices:
    """Slices but the first wait at a gate; it is opened once the caller went on, or had the time to.

    The first one ends when the others have begun, so that the caller takes none of them over.
    """

    def __init__(self, number, first=lambda: None):
        self.number = number
        self.first = first
        self.gate, self.gone_on = threading.Event(), threading.Event()
        self.started, self.begun = threading.Semaphore(0), threading.Semaphore(0)
        self.running, self.ran, self.late = set(), [], []

    def __call__(self, start, stop):
        if start == 0:
            for _ in range(self.number - 1):
                self.begun.acquire()
            return self.first()
        self.running.add(start)
        self.started.release()
        self.begun.release()
        self.gate.wait()
        if self.gone_on.is_set():
            self.late.append(start)
        self.ran.append(start)
        self.running.discard(start)
        return start

    def wait_for_start(self):
        for _ in range(self.number - 1):
            self.started.acquire()

    def open_when_gone_on(self):
        self.gone_on.wait(PATIENCE)
        self.gate.set()

    def call(self):
        """Run the slices; return what was raised."""
        raised = None
        try:
            with thread_limit(self.number):
                run_slices(self, ROWS)
        except BaseException as error:
            raised = error
        self.gone_on.set()
        left = set(self.running)
        self.gate.set()
        with thread_limit(self.number):  # whatever still waits for a thread comes before this
            assert run_slices(lambda start, stop: stop - start, ROWS) == [ROWS // self.number] * self.number
        assert not left
        assert not self.late
        assert len(self.ran) <= self.number - 1
        return raised


def beside(action):
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("signals", [1, 3, 20])
def test_signals_while_the_slices_of_others_are_waited_for(number, signals):
    waiting = threading.Event()
    slices = Slices(number, first=waiting.set)

    def send():
        slices.wait_for_start()
        waiting.wait()
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGINT)
        slices.open_when_gone_on()

    sender = beside(send)
    assert isinstance(slices.call(), KeyboardInterrupt)
    sender.join()
    assert len(slices.ran) == number - 1


@pytest.mark.parametrize("number", [2, 4])
def test_a_signal_while_the_first_slice_runs(number):
    slices = Slices(number, first=lambda: os.kill(os.getpid(), signal.SIGINT))
    opener = beside(slices.open_when_gone_on)
    assert isinstance(slices.call(), KeyboardInterrupt)
    opener.join()


def test_a_handler_that_ends_the_program():
    slices = Slices(2, first=lambda: None)

    def leave(number, frame):
        raise SystemExit(3)

    def send():
        slices.wait_for_start()
        os.kill(os.getpid(), signal.SIGTERM)
        slices.open_when_gone_on()

    before = signal.signal(signal.SIGTERM, leave)
    try:
        sender = beside(send)
        assert isinstance(slices.call(), SystemExit)
        sender.join()
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", [2, 4])
def test_exceptions_thrown_into_a_thread(number):
    """As notebooks and test runners do that stop a thread."""
    slices, outcome = Slices(number), []
    caller = beside(lambda: outcome.append(slices.call()))
    slices.wait_for_start()
    for _ in range(5):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(caller.ident), ctypes.py_object(KeyboardInterrupt)
        )
    slices.open_when_gone_on()
    caller.join()
    assert isinstance(outcome[0], KeyboardInterrupt)


_TRACED = [kernel_threads.__file__, latch.__file__]


class Injection:
    """Raises at the n-th event of a trace."""

    def __init__(self, position, opcodes, function):
        self.position, self.opcodes, self.function = position, opcodes, function
        self.events, self.struck = 0, False

    def __call__(self, frame, event, argument):
        if frame.f_code.co_filename not in _TRACED:
            return None
        frame.f_trace_opcodes = self.opcodes
        if event == ("opcode" if self.opcodes else "line"):
            self.events += 1
            if self.events == self.position:
                self.struck = True
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    def call(self, rows):
        before = sys.gettrace()
        sys.settrace(self)
        try:
            return run_slices(self.function, rows)
        finally:
            sys.settrace(before)


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("opcodes", [False, True], ids=["lines", "opcodes"])
def test_an_exception_on_any_line(number, opcodes, monkeypatch):
    position, struck = 0, True
    while struck:
        position += 1
        slices = Slices(number)
        injection = Injection(position, opcodes, slices)
        opener = beside(slices.open_when_gone_on)
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules[__name__], "run_slices", _once(injection))
            raised = slices.call()
        opener.join()
        struck = injection.struck
        assert isinstance(raised, KeyboardInterrupt) == struck
    assert position > (100 if opcodes else 20)


def _once(injection):
    """Run the first call with the injection, and what follows without."""
    calls = iter([lambda function, rows: injection.call(rows)])
    return lambda function, rows: next(calls, run_slices_itself)(function, rows)


run_slices_itself = run_slices


def test_the_first_error_in_the_order_of_slices_is_raised():
    def fail(start, stop):
        raise ValueError(str(start))

    def fail_later(start, stop):
        if start:
            raise ValueError(str(start))

    with thread_limit(4):
        with pytest.raises(ValueError, match=r"^0$"):
            run_slices(fail, ROWS)
        with pytest.raises(ValueError, match=r"^1024$"):
            run_slices(fail_later, ROWS)
        assert run_slices(lambda start, stop: start, ROWS) == [0, 1024, 2048, 3072]


@contextlib.contextmanager
def busy_crew(number):
    """Threads that are busy with the slices of another caller."""
    begun, gate = threading.Semaphore(0), threading.Event()

    def wait(start, stop):
        begun.release()
        gate.wait()

    def call():
        with thread_limit(number):
            run_slices(wait, ROWS)

    caller = beside(call)
    for _ in range(number):
        begun.acquire()
    try:
        yield
    finally:
        gate.set()
        caller.join()


@pytest.mark.parametrize("number", [2, 4])
def test_slices_that_no_thread_begins_are_the_callers(number):
    def work(start, stop):
        threads.add(threading.get_ident())
        return start, stop

    threads = set()
    gone = weakref.ref(work)
    with busy_crew(number):
        for _ in range(3):
            with thread_limit(number):
                made = run_slices(work, ROWS)
            assert made == [(ROWS * i // number, ROWS * (i + 1) // number) for i in range(number)]
        assert threads == {threading.get_ident()}
        del work
        assert gone() is None  # jobs that wait for a thread keep nothing alive
    with thread_limit(number):  # the threads pass over them
        assert run_slices(lambda start, stop: stop - start, ROWS) == [ROWS // number] * number


def test_the_first_error_of_slices_that_the_caller_took_over_is_raised():
    def fail_later(start, stop):
        if start:
            raise ValueError(str(start))

    with busy_crew(4), thread_limit(4), pytest.raises(ValueError, match=r"^1024$"):
        run_slices(fail_later, ROWS)


def test_a_signal_in_a_slice_that_the_caller_took_over():
    begun = []

    def work(start, stop):
        begun.append(start)
        if start:
            os.kill(os.getpid(), signal.SIGINT)

    with busy_crew(4), thread_limit(4), pytest.raises(KeyboardInterrupt):
        run_slices(work, ROWS)
    assert begun == [0, 3072]  # nothing is begun after it


def test_slices_of_many_callers_at_many_speeds():
    """A latch is used again and again: each caller waits for its own slices, however late it comes."""
    wrong = []

    def work(number):
        with thread_limit(number):
            for _ in range(300):
                made = run_slices(lambda start, stop: (start, stop), ROWS)
                if [start for start, _ in made] != [ROWS * i // number for i in range(number)]:
                    wrong.append(made)

    callers = [beside(lambda number=number: work(number)) for number in (2, 3, 4, 5, 2, 3)]
    for caller in callers:
        caller.join()
    assert wrong == []


def test_no_thread_to_be_had(monkeypatch):
    """A limit on the user's threads makes steps slower and nothing else."""

    class Refused(threading.Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(kernel_threads, "Thread", Refused)
    kernel_threads._crew.cache_clear()
    try:
        with thread_limit(3):
            assert run_slices(lambda start, stop: (start, stop), ROWS) == [(0, ROWS)]
    finally:
        kernel_threads._crew.cache_clear()


def test_threads_end_with_their_crew():
    crew = kernel_threads._Crew(os.getpid())
    crew.grow(3)
    members = list(crew._members)
    assert [member.is_alive() for member in members] == [True] * 3
    del crew
    for member in members:
        member.join()


def test_slices_after_the_interpreter_has_begun_to_end():
    """An object that is closed by the garbage collector of a program that ends must not wait for ever."""
    program = (
        "import atexit\n"
        "from dsa.kernels.threads import run_slices, thread_limit\n"
        "def slices():\n"
        "    with thread_limit(3):\n"
        "        print(sum(run_slices(lambda start, stop: stop - start, 4096)))\n"
        "class Last:\n"
        "    def __del__(self, slices=slices):\n"
        "        slices()\n"
        "slices()\n"
        "atexit.register(slices)\n"
        "last = Last()\n"
        "last.itself = last\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["4096"] * 3, done.stderr
