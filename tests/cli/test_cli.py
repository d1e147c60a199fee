"""The command line: arguments, help, versions, and errors as a message and an exit code."""

import contextlib
import errno
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

import dsa
from dsa.cli import program
from dsa.cli.commands.wording import in_options
from dsa.errors import DiskSpaceError, StateExistsError, StateWarning, notify

ROOT = Path(dsa.__file__).parents[1]
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
COMMANDS = list(program.COMMANDS)
OLD = ["demo", "bench"]


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
        program.main(list(arguments))
    out, err = capsys.readouterr()
    return caught.value.code, out, err


@pytest.fixture
def command(monkeypatch):
    """Replaces the work of the commands by a function, which gets the parsed arguments."""

    def replace(function):
        for name in COMMANDS:
            monkeypatch.setattr(f"{program.COMMANDS[name].module}.run", function)

    return replace


# Arguments with which each command can be called.
ARGUMENTS = {
    "demo": [],
    "bench": [],
    "estimate": ["1000", "8"],
    "inspect": ["x"],
    "verify": ["x"],
    "repair": ["x"],
    "export": ["x", "y"],
    "import": ["x", "y"],
    "copy": ["x", "y"],
    "diff": ["x", "y"],
    "migrate": ["x"],
    "flatten": ["x", "y"],
}


def test_version(capsys):
    assert leave(capsys, "--version") == (0, f"dsa {dsa.__version__}\n", "")


def test_the_version_is_told_once():
    project = tomllib.loads(PROJECT.read_text())["project"]
    assert project["version"] == dsa.__version__
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a working tree that isn't installed
        assert importlib.metadata.version(project["name"]) == dsa.__version__


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
    for action in program._parser(name)._subparsers._group_actions[0].choices[name]._actions:
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
    assert program.main([name, *ARGUMENTS[name]]) == (1 if name in OLD else 2)
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"dsa {name}: {in_options(str(error))}\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_is_a_line_and_an_exit_code(capsys, command, name):
    def interrupt(_):
        raise KeyboardInterrupt

    command(interrupt)
    assert program.main([name, *ARGUMENTS[name]]) == 130
    assert capsys.readouterr() == ("", f"dsa {name}: interrupted\n")


def test_warnings_are_lines(capsys, command):
    def warn(_):
        notify("the state was migrated:\n  look at it", StateWarning)
        return 0

    command(warn)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert program.main(["demo"]) == 0
    assert capsys.readouterr() == ("", "dsa demo: warning: the state was migrated: look at it\n")
    assert warnings.showwarning.__module__ != "dsa.cli.program"


class NoCredentialsError(Exception):
    """As libraries beneath fsspec raise them."""


def test_errors_of_a_store_have_no_traceback(capsys, command):
    def fail(_):
        raise NoCredentialsError("Unable to locate credentials")

    command(fail)
    assert program.main(["verify", "s3://bucket/x"]) == 2
    assert capsys.readouterr() == (
        "",
        "dsa verify: NoCredentialsError: Unable to locate credentials\n",
    )


def test_the_same_without_a_store_is_a_fault(command):
    def fail(_):
        raise NoCredentialsError("Unable to locate credentials")

    command(fail)
    with pytest.raises(NoCredentialsError):
        program.main(["verify", "x"])


def test_a_missing_package_is_an_error(capsys, command):
    def fail(_):
        raise ImportError("Install s3fs to access S3")

    command(fail)
    assert program.main(["verify", "s3://bucket/x"]) == 2
    assert capsys.readouterr().err == "dsa verify: Install s3fs to access S3\n"


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("x"), AssertionError()])
def test_faults_of_the_program_keep_their_traceback(command, error):
    def fail(_):
        raise error

    command(fail)
    with pytest.raises(type(error)):
        program.main(["demo"])


@pytest.mark.parametrize("code", [0, 1, 3])
def test_the_exit_code_is_the_commands(command, code):
    command(lambda _: code)
    for name in COMMANDS:
        assert program.main([name, *ARGUMENTS[name]]) == code


def test_arguments_come_from_the_command_line(monkeypatch, command, capsys):
    seen = []
    command(lambda parsed: seen.append(parsed.command) or 0)
    monkeypatch.setattr(sys, "argv", ["dsa", "bench"])
    assert program.main() == 0
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
    assert getattr(sys.modules[module], function) is program.main


HEAVY = ("torch", "numba", "numpy", "zarr", "fsspec", "rich", "tqdm", "matplotlib")


@pytest.mark.parametrize("name", [None, *(name for name in COMMANDS if name not in OLD)])
def test_help_waits_for_nothing(name):
    """No library that takes time to import is imported."""
    given = ["--help"] if name is None else [name, "--help"]
    code = (
        "import sys; from dsa.cli.program import main\n"
        f"try: main({given!r})\n"
        f"finally: print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "[]\n")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("it exists: pass overwrite=True, or another", "it exists: pass --overwrite, or another"),
        ("it is not there: pass base= with the place", "it is not there: pass --base with the place"),
        ("no delta: leave base= out", "no delta: leave --base out"),
        ("as shapes={'emb': (rows, dim)} with", "as --shape emb=ROWSxDIM with"),
        ("flatten it, with dsa.flatten_checkpoint", "flatten it, with dsa flatten"),
        ("convert it with dsa.migrate", "convert it with dsa migrate"),
        ("or pass allocate='sparse' if", "or pass --allocate sparse if"),
        ("two\n  lines", "two lines"),
    ],
)
def test_messages_speak_of_options(message, words):
    assert in_options(message) == words
