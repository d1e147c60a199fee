"""The command line: arguments, help, versions, and errors as a message and an exit code."""

import contextlib
import errno
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dsa
from dsa import cli
from dsa.errors import DiskSpaceError, StateExistsError

ROOT = Path(dsa.__file__).parents[1]
PROJECT = Path(__file__).parents[1] / "pyproject.toml"
COMMANDS = ["demo", "bench"]


def run(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "dsa", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


def leave(capsys, *arguments):
    """Run arguments that argparse answers itself; return the exit code and the two outputs."""
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    out, err = capsys.readouterr()
    return caught.value.code, out, err


@pytest.fixture
def command(monkeypatch):
    """Replaces the work of the commands by a function, which gets the parsed arguments."""

    def replace(function):
        for name in COMMANDS:
            monkeypatch.setattr(getattr(cli, name), "run", function)

    return replace


def test_version(capsys):
    assert leave(capsys, "--version") == (0, f"dsa {dsa.__version__}\n", "")


def test_the_version_is_told_once():
    project = tomllib.loads(PROJECT.read_text())["project"]
    assert project["version"] == dsa.__version__
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a working tree that isn't installed
        assert importlib.metadata.version("dsa") == dsa.__version__


def test_help_names_every_command(capsys):
    code, out, err = leave(capsys, "--help")
    assert (code, err) == (0, "")
    words = " ".join(out.split())
    assert dsa.__doc__ in words
    for name in COMMANDS:
        assert re.search(rf"^ +{name} +\w+", out, re.MULTILINE), f"{name} has no line of help"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_explained(capsys, name):
    code, out, err = leave(capsys, name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: dsa {name}")
    for action in cli._parser()._subparsers._group_actions[0].choices[name]._actions:
        assert action.help, f"{name} {action.dest} has no help"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "required: COMMAND"),
        (("train",), "invalid choice: 'train'"),
        (("--verbose",), "required: COMMAND"),
        (("demo", "--no-such-option"), "unrecognized arguments: --no-such-option"),
        (("bench", "--no-such-option"), "unrecognized arguments: --no-such-option"),
    ],
)
def test_arguments_that_are_refused(capsys, arguments, words):
    code, out, err = leave(capsys, *arguments)
    assert (code, out) == (2, "")
    assert "usage: dsa" in err
    assert words in err


ERRORS = [
    StateExistsError("the directory 'x' already holds state: pass resume=True"),
    DiskSpaceError(5_000, 10, "x"),
    OSError(errno.EIO, "Input/output error", "x"),
    ValueError("--dim 0 is out of range: pass a number > 0"),
]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", COMMANDS)
def test_errors_become_a_message_and_an_exit_code(capsys, command, name, error):
    def fail(_):
        raise error

    command(fail)
    assert cli.main([name]) == 1
    assert capsys.readouterr() == ("", f"dsa {name}: {error}\n")


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("x"), KeyboardInterrupt(), AssertionError()])
def test_faults_of_the_program_keep_their_traceback(command, error):
    def fail(_):
        raise error

    command(fail)
    with pytest.raises(type(error)):
        cli.main(["demo"])


@pytest.mark.parametrize("code", [0, 1, 3])
def test_the_exit_code_is_the_commands(command, code):
    command(lambda _: code)
    assert cli.main(["demo"]) == code
    assert cli.main(["bench"]) == code


def test_arguments_come_from_the_command_line(monkeypatch, command, capsys):
    seen = []
    command(lambda parsed: seen.append(parsed.command) or 0)
    monkeypatch.setattr(sys, "argv", ["dsa", "bench"])
    assert cli.main() == 0
    assert seen == ["bench"]
    assert capsys.readouterr() == ("", "")


def test_as_a_module(tmp_path):
    done = run("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"dsa {dsa.__version__}\n", "")
    done = run("no-such-command", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert not any(tmp_path.iterdir())


def test_the_script_of_the_wheel_is_this_function():
    project = tomllib.loads(PROJECT.read_text())["project"]
    module, function = project["scripts"]["dsa"].split(":")
    assert getattr(sys.modules[module], function) is cli.main
