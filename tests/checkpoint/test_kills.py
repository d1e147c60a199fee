"""C50: a killed export leaves the old checkpoint, the new one, or none; and memory stays bounded."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import nursery
import pytest

from dsa.checkpoint import open_checkpoint

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")

HERE = Path(__file__).parent


@pytest.mark.usefixtures("small_blocks")
def test_c50_random_kills(tmp_path):
    from kills import run_trials

    found = run_trials(tmp_path, 24, seed=1)
    assert found["content 0"] + found["content 1"] > 5


PRELUDE = "import sys\nsys.path[:0] = sys.argv[1:3]\n"


def run(script, *args):
    """Run a script in its own interpreter, with the helpers at hand."""
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(script), str(HERE), str(HERE.parents[1])]
    return subprocess.run(
        [*command, *map(str, args)], capture_output=True, text=True, timeout=300, check=False
    )


AT = """
import os, signal
import checkpoint_samples
from dsa.checkpoint import local
from dsa.backends.shards import layout
vars(layout).update(checkpoint_samples.SMALL_LAYOUT)
old, new = reversed(checkpoint_samples.killed_contents())
path, moment = sys.argv[3:]
checkpoint_samples.export(old, path)

def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)

def die_after(name):
    original = getattr(local, name)
    setattr(local, name, lambda *args: (original(*args), die()))

if moment == "first file":
    original = local.LocalTarget.create
    local.LocalTarget.create = lambda self, key: original(self, key) if not key.endswith("c/0/0") else die()
elif moment == "before the root":
    local.LocalTarget.commit = die
elif moment == "before the rename":
    local.replace_directory = die
elif moment == "after the rename":
    die_after("replace_directory")
elif moment == "between two renames":
    from dsa.checkpoint import exchange
    exchange.exchange_directories = lambda first, second: False
    renames = []
    original = os.rename
    os.rename = lambda *args: die() if renames else renames.append(original(*args))
checkpoint_samples.export(new, path, overwrite=True)
"""


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("moment", "step"),
    [("first file", 1), ("before the root", 1), ("before the rename", 1), ("between two renames", 1),
     ("after the rename", 0)],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*was being replaced when its writer was killed")
def test_c50_a_kill_at_this_very_moment(tmp_path, moment, step):
    from checkpoint_samples import assert_same, export, killed_contents

    done = nursery.run(PRELUDE + AT, HERE, HERE.parents[1], tmp_path / "k", moment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    contents = killed_contents()
    assert_same(open_checkpoint(tmp_path / "k").content(), contents[step])
    assert len(list(tmp_path.iterdir())) == 2
    export(contents[0], tmp_path / "k", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["k"]


MEMORY = """
import threading, time
import numpy as np
import dsa.checkpoint
from dsa.checkpoint import open_checkpoint, write_checkpoint
from dsa.rules.adam import ADAM
from dsa.state.facts import TableFacts
from dsa.state.content import StateContent, TableContent
from dsa.schema import adam_schema

def resident():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024

peak = 0.0
def watch():
    global peak
    while True:
        peak = max(peak, resident())
        time.sleep(0.002)

schema, rows, block = adam_schema(64), 1_000_000, 5_000
rng = np.random.default_rng(0)
def blocks():
    for start in range(0, rows, block):
        records = np.zeros(block, schema.dtype)
        records["w"] = rng.standard_normal((block, 64), np.float32)
        records["m"] = records["v"] = records["w"]
        records["s"] = 1
        yield start, records
content = StateContent((TableContent(TableFacts("entity", rows, schema, ADAM), blocks),))
small = TableContent(TableFacts("small", block, schema, ADAM), lambda: [next(blocks())])
write_checkpoint(StateContent((small,)), sys.argv[3] + "0")
open_checkpoint(sys.argv[3] + "0").verify()
before = resident()
threading.Thread(target=watch, daemon=True).start()
write_checkpoint(content, sys.argv[3], durable=False)
print("write", peak - before)
peak = 0.0
for _ in open_checkpoint(sys.argv[3]).content().tables[0].blocks():
    pass
print("read", peak - before)
peak = 0.0
open_checkpoint(sys.argv[3]).verify()
print("verify", peak - before)
"""


@pytest.mark.disk
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is not told there")
def test_memory_is_bounded(tmp_path):
    """776 MB of content go through far less."""
    done = run(MEMORY, tmp_path / "k")
    used = {line.split()[0]: float(line.split()[1]) for line in done.stdout.splitlines()}
    assert used.keys() == {"write", "read", "verify"}, done.stderr
    assert used["write"] < 60, used
    assert used["read"] < 100, used
    assert used["verify"] < 100, used
