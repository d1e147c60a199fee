"""The README's Python blocks run, top to bottom, in an empty directory; its commands exist."""

import re

import pytest
from pages import ROOT, run

from dsa.cli.program import main

README = (ROOT / "README.md").read_text("utf-8")


def test_the_python_blocks_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(README, "README").split() == ["3", "2", "2", "True", "20000", "2", "500"]


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
