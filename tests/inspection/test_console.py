"""A console that can't show everything gets what it can show, and never an error."""

import io
import os
import shutil
import sys

import nursery
import pytest

from dsa.cli import program

STORY = """
import sys, numpy as np
from dsa import DiskSparseRiemannianAdam, init
tables = {"词向量": init.Normal(200, 3, 0.1, seed=1), "half \\ud800 pair": init.Zeros(5, 2)}
with DiskSparseRiemannianAdam(tables, disk_dir="状态") as optimizer:
    optimizer.step({"词向量": (np.arange(50), np.ones((50, 3), np.float32))})
    optimizer.export_checkpoint("数据")
"""

COMMANDS = {
    "inspect 状态": "closed, step 1", "inspect 数据": "full checkpoint", "inspect 数据 --json": "{",
    "verify 状态": "whole", "verify 数据": "whole", "diff 状态 数据": "the same", "demo --help": "usage",
    "estimate 1000 8 --no-measure": "", "copy 数据 拷贝 --progress": "full checkpoint", "--help": "usage",
    "export 状态 导出 --weights": "weights", "import 数据 新 --progress": "state at step 1",
}  # fmt: skip


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    folder = tmp_path_factory.mktemp("story")
    assert nursery.run(STORY, cwd=folder).returncode == 0
    return folder


MANY = """
import sys, shlex
from dsa.cli import program
for line in sys.argv[1:]:
    try:
        code = program.main(shlex.split(line))
    except SystemExit as end:
        code = end.code
    print(f"<{code}>", flush=True)
"""


def run(folder, encoding, *lines):
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    return nursery.run(MANY, *lines, cwd=folder, env=environment, encoding=encoding)


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "utf-8", "cp437"])
def test_every_command_survives_a_console(story, encoding):
    done = run(story, encoding, *COMMANDS)
    *outputs, _ = done.stdout.split("<0>")
    assert len(outputs) == len(COMMANDS), done
    for command, output in zip(COMMANDS, outputs, strict=True):
        assert COMMANDS[command] in output, command
    if encoding == "ascii":
        assert "'???'" in outputs[-1]
    assert "Error" not in done.stderr
    for name in ("拷贝", "导出", "新"):
        shutil.rmtree(story / name)


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_errors_survive_a_console(story, encoding):
    done = run(story, encoding, "verify 无", "inspect 无", "diff 状态 无", "copy 数据 状态")
    assert done.stdout.count("<2>") == 4
    assert done.stderr.count("check the path") == 3
    assert "UnicodeEncodeError" not in done.stderr
    assert "codec" not in done.stderr


def test_the_caller_of_main_gets_the_console_back(story, capsys, monkeypatch):
    console = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", console)
    assert program.main(["verify", str(story / "数据")]) == 0
    assert console.errors == "strict"
