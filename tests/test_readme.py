"""The README's Python blocks run, top to bottom, in an empty directory; its commands exist."""

import re
from pathlib import Path

import pytest

from dsa.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_the_python_blocks_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for number, block in enumerate(blocks("python")):
        exec(compile(block, f"README block {number}", "exec"), namespace)
    assert capsys.readouterr().out.split() == ["3", "2"]


def test_every_command_is_shown(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    commands = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert commands
    for command in commands:
        assert f"dsa {command}" in README


def test_the_gate_runs_the_test_command():
    after = README.partition("<!-- test command -->\n")[2]
    assert re.match(r"```bash\n.*pytest\n```", after)
