"""The order of the stores of a pass, which is all that a killed process leaves to rely on.

Told once by the code that the compiler has made, and once by running it: a process is stopped after every
single instruction of a pass, and the memory that it shares is looked at.
"""

import ctypes
import mmap
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sampling import used_records

import dsa
from dsa.kernels.adam import adam_pass, row_wise_adam_pass
from dsa.kernels.constants import step_constants
from dsa.kernels.judging import USABLE
from dsa.kernels.layout import as_words, record_layout
from dsa.kernels.poincare import ball_constants, ball_pass, row_wise_ball_pass
from dsa.kernels.visiting import Gradients, Visit, make_scratch
from dsa.rules.conventions import AdamOptions
from dsa.schema import adam_schema, copy_field, with_dtypes

SCRIPT = """
import sys
import numpy as np
import dsa.kernels.fence
from dsa.kernels.compiled import compiled

if sys.argv[1] == "without":
    dsa.kernels.fence.fence = compiled(_nrt=False)(lambda: None)

from dsa.kernels import adam, poincare
from dsa.kernels.constants import step_constants
from dsa.kernels.judging import USABLE
from dsa.kernels.layout import as_words, record_layout
from dsa.kernels.visiting import Gradients, Visit, make_scratch
from dsa.rules.conventions import AdamOptions
from dsa.schema import adam_schema, with_dtypes

for name in sys.argv[2:]:
    packed, which = name.startswith("packed"), name.split()[-1]
    row = which.startswith("row")
    update = getattr(poincare if "ball" in which else adam, which)
    options = AdamOptions(lr=0.1, second_moment="row" if row else "coordinate")
    if "ball" in which:
        constants = poincare.ball_constants(options, 1.0, 2, None)
    else:
        constants = step_constants(options, 2, None)
    schema = adam_schema(5, second_moment_per="row" if row else "element")
    dtype = with_dtypes(schema, {"m": "bfloat16", "v": "bfloat16"} if packed else {}).dtype
    records = np.zeros(4, dtype)
    words, each = as_words(records)[0], np.arange(5)
    gradients = Gradients(np.ones((4, 5), np.float32), each[:-1], each)
    visit = Visit(
        words, np.empty((0, 5), np.float32), record_layout(dtype, ("v",)), each[:-1], each[:-1], each[:-1],
        np.zeros_like(words), False, np.full(4, -1), np.empty(4, np.int64), USABLE, np.empty(0, np.int32),
    )
    assert update(visit, gradients, constants, make_scratch(5, visit.layout), 0, 4) == (-1, 0)
    (code,) = (update.packed if packed else update.words).inspect_llvm().values()
    print(code + "\\f")
"""
PASSES = ("adam_pass", "row_wise_adam_pass", "ball_pass", "row_wise_ball_pass", "packed adam_pass")


def compiled_code(directory, fences, *names):
    """Return what LLVM has made of each pass, compiled for this call alone."""
    root = str(Path(dsa.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, fences, *names],
        env=os.environ | {"NUMBA_CACHE_DIR": str(directory), "PYTHONPATH": root},
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    return dict(zip(names, done.stdout.split("\f"), strict=False))


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    return compiled_code(tmp_path_factory.mktemp("cache"), "with", *PASSES)


def fenced_blocks(code):
    """Return the basic blocks that hold fences, as lists of lines."""
    blocks = re.split(r"^\S+:.*$|^\}$", code, flags=re.MULTILINE)
    return [block.splitlines() for block in blocks if "fence syncscope" in block]


@pytest.mark.parametrize("which", PASSES)
def test_the_number_of_a_row_is_stored_between_two_fences(codes, which):
    """Behind its image, and before its record."""
    blocks = fenced_blocks(codes[which])
    assert blocks, "the compiler has dropped the fences"
    for block in blocks:
        fences = [number for number, line in enumerate(block) if "fence syncscope" in line]
        assert len(fences) == 2
        assert all('fence syncscope("singlethread") seq_cst' in block[number] for number in fences)
        between = block[fences[0] + 1 : fences[1]]
        stores = [line for line in between if re.search(r"\bstore\b|\bcall\b|memcpy", line)]
        assert len(stores) == 1
        assert re.search(r"store i64 ", stores[0])


def test_without_fences_the_test_above_would_fail(tmp_path):
    assert not fenced_blocks(compiled_code(tmp_path, "without", "adam_pass")["adam_pass"])


TRACEME, CONTINUE, STEP = 0, 7, 9
MOST_INSTRUCTIONS = 3_000_000
ROWS, DIM = 5, 7


class Shared:
    """Records, their images and the rows that are noted, in memory of two processes."""

    def __init__(self, second_moment, dtypes):
        per = "row" if second_moment == "row" else "element"
        self.dtype = with_dtypes(adam_schema(DIM, second_moment_per=per), dtypes).dtype
        size = self.dtype.itemsize * ROWS
        self.memory = mmap.mmap(-1, 2 * size + 8 * ROWS)
        self.records = np.frombuffer(self.memory, self.dtype, ROWS)
        self.images = np.frombuffer(self.memory, self.dtype, ROWS, size)
        self.noted = np.frombuffer(self.memory, np.int64, ROWS, 2 * size)

    def reset(self, records):
        self.records[:] = records
        self.images[:] = np.zeros(ROWS, self.dtype)
        self.noted[:] = -1

    def visit(self):
        each = np.arange(ROWS)
        return Visit(
            table=as_words(self.records)[0],
            weights=np.empty((0, DIM), np.float32),
            layout=record_layout(self.dtype, ("v",)),
            places=each,
            rows=each + 70,
            positions=each,
            images=as_words(self.images)[0],
            given=False,
            noted=self.noted,
            fresh=np.empty(ROWS, np.int64),
            unwritten=USABLE,
            factors=np.empty(0, np.int32),
        )


def stepped(child, look):
    """Let a stopped child run to its next stop, and look after each instruction; return their number."""
    trace = ctypes.CDLL(None, use_errno=True).ptrace
    for number in range(MOST_INSTRUCTIONS):
        if trace(STEP, child, None, None):
            pytest.skip(f"processes can't be traced here: {os.strerror(ctypes.get_errno())}")
        _, status = os.waitpid(child, 0)
        assert os.WIFSTOPPED(status), "the child has died"
        if os.WSTOPSIG(status) != signal.SIGTRAP:
            return number
        look()
    raise AssertionError("the pass does not end")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are traced as Linux does it")
@pytest.mark.parametrize(
    ("update", "second_moment", "k", "dtypes"),
    [
        (adam_pass, "coordinate", 0.0, {}),
        (row_wise_adam_pass, "row", 0.0, {}),
        (ball_pass, "coordinate", 1.0, {}),
        (ball_pass, "frame", 1.0, {}),
        (row_wise_ball_pass, "row", 1.0, {}),
        (adam_pass, "coordinate", 0.0, {"w": "bfloat16", "m": "bfloat16", "v": "bfloat16"}),
    ],
    ids=["elements", "rows", "ball", "ball by frames", "ball by rows", "packed"],
)
def test_after_every_instruction_of_a_pass_it_can_be_undone(update, second_moment, k, dtypes):
    """A record that is not the old one is noted, and the image of what is noted is whole."""
    rng = np.random.default_rng(3)
    used = used_records(rng, rng.uniform(-0.2, 0.2, (ROWS, DIM)), second_moment, 0.1)
    shared = Shared(second_moment, dtypes)
    old = np.zeros(ROWS, shared.dtype)
    for name in shared.dtype.names:
        copy_field(used, name, old)
    options = AdamOptions(lr=0.1, second_moment=second_moment)
    constants = ball_constants(options, k, 2, None) if k else step_constants(options, 2, None)
    each = np.arange(ROWS + 1)
    gradients = Gradients(rng.normal(size=(ROWS, DIM)).astype(np.float32), each[:-1], each)
    shared.reset(old)
    visit = shared.visit()
    scratch = make_scratch(DIM, visit.layout)
    assert update(visit, gradients, constants, scratch, 0, ROWS) == (-1, 0)  # compiled from here on
    new = shared.records.copy()
    shared.reset(old)
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).ptrace(TRACEME, 0, None, None)
        os.kill(os.getpid(), signal.SIGSTOP)
        update(visit, gradients, constants, scratch, 0, ROWS)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    last, half_done, rows = bytes(shared.memory), 0, np.arange(ROWS) + 70

    def look():
        nonlocal last, half_done
        now = bytes(shared.memory)
        if now == last:
            return
        last = now
        changed, noted = shared.records != old, shared.noted != -1
        assert (noted | ~changed).all(), "a record has changed before its row was noted"
        assert (shared.images[noted] == old[noted]).all(), "a row was noted before its image was whole"
        assert (shared.noted[noted] == rows[noted]).all()
        half_done += bool((changed & (shared.records != new)).any())

    try:
        os.waitpid(child, 0)
        stepped(child, look)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert shared.records.tobytes() == new.tobytes()
    assert half_done >= 3 * ROWS, "records were looked at only when they were done"
