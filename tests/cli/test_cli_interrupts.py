"""Ctrl-C in the middle of a command: an exit code, one line, and nothing left behind."""

import contextlib
import os
import shlex
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from nursery import start
from story import listing, tell

import dsa
from dsa import DiskSparseRiemannianAdam, init
from dsa.cli import program

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(dsa.__file__).parents[1])}

# What each command is doing when it is interrupted.
INTERRUPTED = {
    "inspect run": "dsa.checkpoint.meter",
    "verify run": "dsa.inspection.verification",
    "verify checkpoints/step-20": "dsa.inspection.verification",
    "verify checkpoints/step-30-changes": "dsa.inspection.verification",
    "diff run checkpoints/step-20": "dsa.inspection.comparison",
    "export run out": "dsa.checkpoint.export",
    "export run deep/er/out": "dsa.checkpoint.export",
    "export run out --base checkpoints/step-20": "dsa.checkpoint.export",
    "export run out --weights": "dsa.checkpoint.export",
    "export run out.safetensors --weights": "dsa.checkpoint.weights",
    "export run memory://interrupts/out": "dsa.checkpoint.export",
    "import checkpoints/step-20 out": "dsa.checkpoint.transfer",
    "import checkpoints/step-20 deep/er/out": "dsa.checkpoint.transfer",
    "import checkpoints/step-20 empty": "dsa.checkpoint.transfer",
    "copy checkpoints/step-20 out": "dsa.checkpoint.copying",
    "migrate old-run out": "dsa.checkpoint.transfer",
    "flatten checkpoints/step-30-changes out": "dsa.checkpoint.export",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("story")
    tell(folder)
    (folder / "empty").mkdir()
    return folder


@pytest.fixture
def folder(told, tmp_path, monkeypatch):
    shutil.copytree(told, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@contextlib.contextmanager
def interrupting(progress, total, what):
    """In place of `metered`: the second piece is one too many."""
    pieces = []

    def advance(size):
        pieces.append(size)
        if len(pieces) == 2:
            raise KeyboardInterrupt

    yield advance


@pytest.mark.parametrize("line", INTERRUPTED)
def test_nothing_is_left(folder, capsys, monkeypatch, line):
    monkeypatch.setattr(f"{INTERRUPTED[line]}.metered", interrupting)
    before = {name: raw for name, (raw, _) in listing(folder).items()}
    assert program.main(shlex.split(line)) == 130
    out, err = capsys.readouterr()
    name = line.partition(" ")[0]
    assert (out, err) == ("", f"dsa {name}: interrupted\n")
    after = {name: raw for name, (raw, _) in listing(folder).items()}
    assert set(after) == set(before)
    # An export opens the state, and closing describes it anew.
    changed = {name for name in before if before[name] != after[name]}
    assert changed <= {"run/dsa.lock", "run/dsa.json"}
    assert not (folder / "deep").exists()
    assert not list((folder / "empty").iterdir())
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    assert program.main(["verify", "run"]) == 0
    assert program.main(shlex.split(line)) == (1 if name == "diff" else 0)
    dsa.checkpoint.places.fsspec.filesystem("memory").store.clear()


HELD = """
import os, runpy, sys
held = []

def hold(event, arguments):
    if event == "open" and not held and part in os.path.dirname(str(arguments[0])):
        held.append(arguments)
        os.write(1, b"held\\n")
        os.read(0, 1)

_, part, *arguments = sys.argv
sys.argv = ["dsa", *arguments]
sys.addaudithook(hold)
runpy.run_module("dsa", run_name="__main__")
"""


def interrupt(arguments, folder, seen):
    """Interrupt a command that is held where it opens a file of its own; return exit code, output and errors.

    Args:
        arguments: The command.
        folder: Where it runs.
        seen: A part of the path of the directory that it makes.
    """
    with start(HELD, seen, *arguments, cwd=folder) as child:
        assert child.stdout.readline() == "held\n"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(
            timeout=120
        )  # which lets it go, if the thread that opens is not the main one
    return child.returncode, out, err


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_signal_to_a_process_that_exports(tmp_path):
    tables = {"entity": init.Normal(400_000, 32, 0.1, seed=1)}
    with DiskSparseRiemannianAdam(tables, k=0.0, disk_dir=tmp_path / "run", allocate="sparse") as optimizer:
        optimizer.step({"entity": (np.arange(9), np.ones((9, 32), np.float32))})
    before = sorted(tmp_path.rglob("*"))
    code, out, err = interrupt(["export", "run", "out"], tmp_path, ".out.tmp-")
    assert (code, out, err) == (130, "", "dsa export: interrupted\n")
    assert sorted(tmp_path.rglob("*")) == before
    code, out, err = interrupt(["estimate", "1000000", "64"], tmp_path, "dsa-estimate-")
    assert (code, out, err) == (130, "", "dsa estimate: interrupted\n")
    assert sorted(tmp_path.rglob("*")) == before
